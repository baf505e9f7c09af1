"""Reads a request's body: the few fields that placing it needs, and the length of its prompt."""
