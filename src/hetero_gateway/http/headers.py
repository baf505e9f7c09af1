"""Which header fields a relay passes on, in each direction.

Hop-by-hop fields end at every hop (RFC 9110, 7.6.1): each of the two connections has its own. Names
are in lower case, as both parsers give them.
"""

from collections.abc import Iterable, Sequence

from hetero_gateway.engines.vllm import is_guarded_header

Headers = list[tuple[bytes, bytes]]


def lines_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Fields as they are written, each with its line end."""
    return b"".join([b"%b: %b\r\n" % pair for pair in headers])


def fields_in(lines: bytes) -> Headers:
    """The fields that ``lines_of`` has written."""
    pairs = (line.partition(b": ") for line in lines.split(b"\r\n")[:-1])
    return [(name, value) for name, _, value in pairs]


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
# A client's credentials: never passed to an instance if the gateway has a key of its own, or one
# for the instance.
CREDENTIALS = frozenset((b"authorization", b"x-api-key"))
# The ids of the gateways that a request has come through (``hops``).
HOPS = b"x-hetero-gateway-via"
# Also withheld: fields written anew, answered by the gateway itself (expect), that contain a
# browser's key (sec-websocket-protocol), or unwanted because a compressed answer would hide its
# usage (accept-encoding).
NOT_TO_INSTANCES = _HOP_BY_HOP | {
    HOPS,
    b"accept-encoding",
    b"content-length",
    b"expect",
    b"host",
    b"sec-websocket-protocol",
    b"x-request-id",
}
# Examined names are remembered: clients use a few dozen, and a hostile one gets no more.
_MOST_REMEMBERED = 1024
_LONGEST_REMEMBERED = 64


class Withheld(dict[bytes, bool]):
    """Whether a request's field of a name, in lower case, is withheld from instances.

    Fields for an engine's machinery are recognised by their prefixes, so there may be any number of
    names: each is examined once, and then costs a look-up.

    Args:
        names: always withheld.
        allowed: names for an engine's machinery that are passed on.
    """

    __slots__ = ("_allowed", "_names")

    def __init__(self, names: Iterable[bytes], allowed: Iterable[bytes] = ()) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._allowed = frozenset(allowed)

    def __missing__(self, name: bytes) -> bool:
        withheld = name in self._names or (is_guarded_header(name) and name not in self._allowed)
        if len(name) <= _LONGEST_REMEMBERED:
            if len(self) >= _MOST_REMEMBERED:
                self.clear()
            self[name] = withheld
        return withheld


class RequestFields:
    """The rules for a request's fields toward instances.

    Args:
        allowed: names for an engine's machinery that clients may send nevertheless.
    """

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        names = [name.encode() for name in allowed]
        self.withheld = Withheld(NOT_TO_INSTANCES, names)
        # For an engine's machinery only: what another data plane has to remove.
        self.guarded = Withheld((), names)
        # If the client's credentials do not concern the instance.
        self.withheld_with_credentials = Withheld(NOT_TO_INSTANCES | CREDENTIALS, names)


# Also: replaced by the gateway's own, or its own concern: vLLM allows every page.
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


def takes_gzip(accept_encoding: str) -> bool:
    """Whether a client with this Accept-Encoding accepts gzip (RFC 9110, 12.5.3)."""
    for part in accept_encoding.lower().split(","):
        name, _, weight = part.replace(" ", "").partition(";")
        if name in ("gzip", "x-gzip", "*"):
            return weight not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
