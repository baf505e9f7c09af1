"""An emulated vLLM server: sim.engine behind real HTTP, against the wall clock."""
