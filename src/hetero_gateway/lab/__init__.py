"""What measures instances and what stands in for them: load, emulated instances, the profiler."""
