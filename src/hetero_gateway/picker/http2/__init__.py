"""The server side of gRPC over HTTP/2, as far as a data plane's few calls need it.

Why not a library: three messages each way are all that a request costs here, and grpcio spent seven
times on them what the scheduler does with their contents (docs/scale-out.md). Header compression
is the `hpack` library's.
"""
