"""The server side of gRPC over HTTP/2, as far as a data plane's few calls need it.

Why not a library: relaying a few messages is all that there is to do, and grpcio handed each of
them over between threads, at more than twice the CPU of the whole gateway
(docs/design/scale-out.md).
Header compression is the `hpack` library's.
"""
