"""Bytes: connections to instances and clients, and the rules of their headers."""
