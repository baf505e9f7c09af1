"""The scheduler and its parts: which request waits, which instance is chosen, and why."""
