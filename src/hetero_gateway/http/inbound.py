"""A request as it came in, whichever server read it: uvicorn's parser, or any through ASGI."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hetero_gateway.engines.vllm import Work
from hetero_gateway.http.bodies import BodyBuffer
from hetero_gateway.http.headers import HOPS, Headers


class Inbound:
    """A request on an engine path.

    Attributes:
        method: POST, but for what only asks.
        path: decoded, without the query.
        target: path and query as they are to be sent on.
        work: what the path makes an engine do.
        headers: names in lower case.
        dropped: names of fields that its Connection names: they end here.
        content_type: "" where there is none.
        content_length: in bytes, as announced; 0 where it is not.
        came_through: the gateways that it has come through, as ``hops`` has them; "" for none.
        asked_id: the client's own x-request-id, "" without one.
        request_id: by which the gateway names it; set by who opens it.
        body: empty until the whole of it is here.
        buffer: of a long body, which counts as buffered until it is released; else None.
        received_s: monotonic; when the last byte of the body was here.
    """

    __slots__ = (
        "asked_id",
        "body",
        "buffer",
        "came_through",
        "content_length",
        "content_type",
        "dropped",
        "headers",
        "method",
        "path",
        "received_s",
        "request_id",
        "target",
        "work",
    )

    def __init__(
        self,
        path: str,
        target: bytes,
        work: Work,
        headers: Headers,
        by_name: Mapping[bytes, bytes] | None = None,
        method: bytes = b"POST",
    ) -> None:
        """``by_name``: the last of each name among the headers, where that is known already."""
        self.method = method
        self.path = path
        self.target = target
        self.work = work
        self.headers = headers
        self.dropped: Collection[bytes] = ()
        field = (dict(headers) if by_name is None else by_name).get
        self.content_type = field(b"content-type", b"")
        self.content_length = int(field(b"content-length", 0))
        self.came_through = field(HOPS, b"")
        self.asked_id = field(b"x-request-id", b"")
        self.request_id = b""
        self.body = b""
        self.buffer: BodyBuffer | None = None
        self.received_s = 0.0

    def __repr__(self) -> str:
        name = self.request_id.decode("ascii", "replace")
        return f"<Inbound {name} {self.method.decode()} {self.path}, {len(self.body)} bytes>"
