"""A running gateway: its parts wired together and served, in one process or several."""
