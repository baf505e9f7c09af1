"""The dashboard's data, and its page."""
