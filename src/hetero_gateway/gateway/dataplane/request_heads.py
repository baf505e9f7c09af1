"""The heads of requests as they are sent on: what of a client's fields goes where."""

from __future__ import annotations

from hetero_gateway.gateway.dataplane.routes import Outside
from hetero_gateway.gateway.fleet.instances import Instance
from hetero_gateway.gateway.wire.headers import (
    NOT_TO_INSTANCES,
    NOT_TO_INSTANCES_NOR_CREDENTIALS,
)
from hetero_gateway.gateway.wire.inbound import Inbound

# A service elsewhere gets what it needs to read the body, and nothing of the client.
_TO_OUTSIDE = frozenset((b"accept", b"content-type"))


def head_to_instance(
    inbound: Inbound, instance: Instance, *, hides_credentials: bool, traceparent: bytes | None
) -> bytes:
    """Of a request to an engine: all of its end-to-end fields, but what is the gateway's own.

    Args:
        hides_credentials: what the client proves itself with is not the instance's business.
        traceparent: in place of the client's; None: that passes.
    """
    pool = instance.pool
    parts = [
        inbound.method, b" ", pool.path_prefix, inbound.target,
        b" HTTP/1.1\r\nhost: ", pool.host_header,
        b"\r\nx-request-id: ", inbound.request_id,
        b"\r\ncontent-length: %d\r\n" % len(inbound.body),
    ]  # fmt: skip
    dropped = NOT_TO_INSTANCES_NOR_CREDENTIALS if hides_credentials else NOT_TO_INSTANCES
    if inbound.dropped:
        dropped = dropped.union(inbound.dropped)
    if traceparent is not None:
        dropped = dropped.union((b"traceparent",))
        parts += (b"traceparent: ", traceparent, b"\r\n")
    for name, value in inbound.headers:
        if name not in dropped:
            parts += (name, b": ", value, b"\r\n")
    return _ended(parts, instance.api_key)


def head_to_outside(inbound: Inbound, outside: Outside) -> bytes:
    """Of a request to a service elsewhere."""
    parts = [
        inbound.method, b" ", outside.pool.path_prefix, inbound.target,
        b" HTTP/1.1\r\nhost: ", outside.pool.host_header,
        b"\r\ncontent-length: %d\r\n" % len(inbound.body),
    ]  # fmt: skip
    for name, value in inbound.headers:
        if name in _TO_OUTSIDE:
            parts += (name, b": ", value, b"\r\n")
    return _ended(parts, outside.api_key)


def _ended(parts: list[bytes], api_key: str | None) -> bytes:
    if api_key is not None:
        parts.append(b"authorization: Bearer %b\r\n" % api_key.encode())
    parts.append(b"\r\n")
    return b"".join(parts)
