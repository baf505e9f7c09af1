"""``serve --workers N``: the supervisor and its processes; see ``gateway/workers``."""
