"""Parts shared by the data plane's benchmarks: the C load, CPU accounting, the peers.

`benchmarks/dataplane.py` and `benchmarks/memory.py` are what is run.
"""
