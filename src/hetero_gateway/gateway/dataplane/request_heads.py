"""The heads of requests as they are sent on: what of a client's fields goes where."""

from __future__ import annotations

from hetero_gateway.engines.vllm import PRIORITY_HEADER
from hetero_gateway.gateway.dataplane.routes import Outside
from hetero_gateway.gateway.fleet.instances import Instance
from hetero_gateway.http.headers import Withheld
from hetero_gateway.http.hops import Hops
from hetero_gateway.http.inbound import Inbound

# A service elsewhere gets what it needs to read the body, and nothing of the client.
_TO_OUTSIDE = frozenset((b"accept", b"content-type"))


def head_to_instance(
    inbound: Inbound,
    instance: Instance,
    hops: Hops,
    withheld: Withheld,
    size_bytes: int,
    traceparent: bytes | None,
    priority: int | None,
) -> bytes:
    """Of a request to an engine: all of its end-to-end fields, but what is the gateway's own.

    Args:
        hops: of this gateway.
        withheld: what of the client's is not the instance's business.
        size_bytes: of the body.
        traceparent: in place of the client's; None: that passes.
        priority: with which the engine is to schedule it; None: it has none.
    """
    pool = instance.pool
    parts = [
        inbound.method, b" ", pool.path_prefix, inbound.target,
        b" HTTP/1.1\r\nhost: ", pool.host_header,
        b"\r\nx-request-id: ", inbound.request_id,
        b"\r\ncontent-length: %d\r\n" % size_bytes,
        hops.field_behind(inbound.came_through) if inbound.came_through else hops.field,
    ]  # fmt: skip
    headers = inbound.headers
    if inbound.dropped:
        headers = [pair for pair in headers if pair[0] not in inbound.dropped]
    if traceparent is not None:
        headers = [pair for pair in headers if pair[0] != b"traceparent"]
        parts += (b"traceparent: ", traceparent, b"\r\n")
    if priority is not None:
        headers = [pair for pair in headers if pair[0] != PRIORITY_HEADER]
        parts += (PRIORITY_HEADER, b": %d\r\n" % priority)
    for name, value in headers:
        if not withheld[name]:
            parts += (name, b": ", value, b"\r\n")
    if instance.api_key is not None:
        parts.append(_authorization(instance.api_key))
    parts.append(b"\r\n")
    return b"".join(parts)


def head_to_outside(inbound: Inbound, outside: Outside, hops: Hops) -> bytes:
    """Of a request to a service elsewhere, which may be a gateway as well."""
    parts = [
        inbound.method, b" ", outside.pool.path_prefix, inbound.target,
        b" HTTP/1.1\r\nhost: ", outside.pool.host_header,
        b"\r\ncontent-length: %d\r\n" % len(inbound.body),
        hops.field_behind(inbound.came_through) if inbound.came_through else hops.field,
    ]  # fmt: skip
    for name, value in inbound.headers:
        if name in _TO_OUTSIDE:
            parts += (name, b": ", value, b"\r\n")
    if outside.api_key is not None:
        parts.append(_authorization(outside.api_key))
    parts.append(b"\r\n")
    return b"".join(parts)


def _authorization(api_key: str) -> bytes:
    return b"authorization: Bearer %b\r\n" % api_key.encode()
