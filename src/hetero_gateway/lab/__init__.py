"""Measuring instances and emulating them: load, emulated instances, the profiler."""
