"""Identifies the client behind a request, and applies its limits."""
