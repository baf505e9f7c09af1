"""Bytes: connections to instances and clients, and what is read from bodies."""
