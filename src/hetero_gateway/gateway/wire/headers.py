"""Which header fields a relay passes on, in each direction.

Hop-by-hop fields end at every hop (RFC 9110, 7.6.1): each of the two connections has its own. Names
are in lower case, as both parsers give them.
"""

from __future__ import annotations

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# What a client proves itself with: never an instance's business where the gateway has a key of its
# own or one for the instance.
CREDENTIALS = frozenset((b"authorization", b"x-api-key"))
# Besides: written anew, answered by the gateway itself (expect), or, as a compressed answer would
# hide its usage, not wanted (accept-encoding).
NOT_TO_INSTANCES = _HOP_BY_HOP | {
    b"accept-encoding",
    b"content-length",
    b"expect",
    b"host",
    b"x-request-id",
}
NOT_TO_INSTANCES_NOR_CREDENTIALS = NOT_TO_INSTANCES | CREDENTIALS
# Besides: replaced by the gateway's own, or its business alone: vLLM allows every page.
NOT_TO_CLIENTS = _HOP_BY_HOP | {
    b"access-control-allow-credentials",
    b"access-control-allow-headers",
    b"access-control-allow-methods",
    b"access-control-allow-origin",
    b"access-control-expose-headers",
    b"access-control-max-age",
    b"x-hetero-gateway-fallback",
    b"x-hetero-gateway-instance",
    b"x-request-id",
}


def named_by_connection(headers: Headers) -> frozenset[bytes]:
    """The fields that Connection names: they end here."""
    return frozenset(
        option.strip(b" \t").lower()
        for name, value in headers
        if name == b"connection"
        for option in value.split(b",")
    )
