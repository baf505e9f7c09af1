"""Clients' usage, kept beyond a process."""
