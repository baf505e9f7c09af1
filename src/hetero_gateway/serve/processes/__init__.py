"""``serve --workers N``: the supervisor and its processes; see ``scaleout/workers``."""
