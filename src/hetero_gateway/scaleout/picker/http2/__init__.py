"""The server side of gRPC over HTTP/2, as far as a data plane's few calls need it.

Why not a library: the only task is to relay a few messages, and grpcio passed each of them between
threads, at more than twice the CPU of the whole gateway (docs/design/scale-out.md).
Header compression is the `hpack` library's.
"""
