"""Reads a request's head strictly as RFC 9112 defines it.

Anything outside its grammar is refused and never guessed at, so that no hop before or after the
gateway can have read the same bytes differently. Refused are, among others: a line that ends in a
bare LF or CR, a folded line, whitespace before a colon, control characters, more than one
Content-Length, Host, Content-Type or credential of a kind, a Content-Length beside a
Transfer-Encoding, any coding but ``chunked``.

An offer to upgrade is ignored, as RFC 9110 (7.8) allows: the request is answered over HTTP/1.1, and
its body is a body.

A head is read once, when all of it is here. A client's lines are nearly the same in all of its
requests, so the meaning of a line is remembered: that takes half the time of a C parser that calls
back for each field.
"""

import re
from collections.abc import Collection, Mapping
from functools import lru_cache

import msgspec

from hetero_gateway.engines.vllm import Work
from hetero_gateway.errors import Refusal
from hetero_gateway.http.bodies import BodyBuffer
from hetero_gateway.http.headers import HOPS, Headers

# Request line, fields and the empty line. nginx takes 32 KB, HAProxy 16 KB.
MAX_HEAD_BYTES = 65536
MAX_FIELDS = 128
HEAD_END = b"\r\n\r\n"
# Lines that are remembered, and the largest head whose lines are: 4 MB at most.
_REMEMBERED = 1024
_REMEMBERED_HEAD_BYTES = 4096

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]"
# A value's trailing whitespace is removed afterwards: a lazy match would be quadratic in it.
_FIELD = re.compile(rb"(%b++):[\t ]*+([\t -~\x80-\xff]*+)" % _TOKEN)
# A target has no fragment (RFC 9112, 3.2): parsers that treat it differently see different paths.
_REQUEST_LINE = re.compile(rb"(%b{1,32}) ([!\"$-~]++) HTTP/([0-9])\.([0-9])" % _TOKEN)
_METHOD_BYTES = 32
# The possible beginning of a request line, or of an empty line before it: anything else will never
# become HTTP.
_BEGUN = re.compile(rb"\r|%b{0,32}+(?: [!-~]*+(?: [!-~]{0,8}+\r?)?)?" % _TOKEN)
_BARE_LINE_END = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)|\x00")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_HOST = re.compile(rb"(?:[0-9A-Za-z._~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?")
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?]+)(/[^?]*)?(\?.*)?")

_METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"))
# The fields that say how the message is framed and whom it is for.
_DECISIVE = frozenset((b"connection", b"content-length", b"expect", b"host", b"transfer-encoding"))
# The fields that say how its body is to be read and who sent it: of two, the gateway would use one
# and the engine the other; and one named by ``Connection`` would not reach the engine.
_SINGLE = {
    b"authorization": "Authorization",
    b"content-encoding": "Content-Encoding",
    b"content-type": "Content-Type",
    b"x-api-key": "X-Api-Key",
}
_TO_THE_ENGINE = frozenset((b"content-encoding", b"content-type"))
# What Connection may name without adding to the known hop-by-hop fields.
_USUAL_OPTIONS = frozenset((b"close", b"keep-alive", b"upgrade", b"te", b""))


def bad_request(message: str) -> Refusal:
    """A refusal for malformed HTTP."""
    return Refusal(400, "bad_request", message)


def _too_large(message: str) -> Refusal:
    return Refusal(431, "header_fields_too_large", message)


class RequestHead(msgspec.Struct, eq=False):
    """The contents of a request's head.

    Attributes:
        method: a known one; others are refused.
        target: path and query as received, or ``*``.
        headers: names in lower case, values without surrounding whitespace.
        http_10: the client speaks HTTP/1.0 and knows no chunks.
        keep_alive: whether the client wants to keep the connection.
        length: of the body, in bytes; None if it is chunked, 0 if there is none.
        expects_continue: it waits for a 100.
        options: fields that its Connection names beside the usual: they end here.
        by_name: the last header of each name.
    """

    method: bytes
    target: bytes
    headers: Headers
    by_name: dict[bytes, bytes]
    http_10: bool
    keep_alive: bool
    length: int | None = 0
    expects_continue: bool = False
    options: Collection[bytes] = ()

    def __repr__(self) -> str:
        return f"<RequestHead {self.method!r} {self.target!r}>"


def head_size(data: bytes | bytearray, seen: int = 0) -> int:
    """The size of the head that ``data`` begins with, in bytes; 0 while it is incomplete.

    Args:
        seen: bytes of ``data`` that the last call had, which contained no complete head.

    Raises:
        Refusal: it can no longer become one: 400, 414, 431, 501 or 505.
    """
    end = data.find(HEAD_END, max(0, seen - 3), MAX_HEAD_BYTES)
    if end >= 0:
        return end + 4
    # Only the new part: otherwise a head in many small pieces would take quadratic time.
    since = max(0, seen - 1)
    line_end = data.find(b"\r\n", 0, MAX_HEAD_BYTES)
    if len(data) >= MAX_HEAD_BYTES:
        if line_end < 0:
            raise Refusal(414, "uri_too_long", "The request's target is too long.")
        raise _too_large(f"The request's head is larger than {MAX_HEAD_BYTES} bytes.")
    if _BARE_LINE_END.search(data, since):
        raise bad_request("The request's head has a bare line end or a NUL.")
    if line_end >= since:
        _request_line(bytes(data[:line_end]))
    elif line_end < 0 and seen < _METHOD_BYTES and _BEGUN.fullmatch(data) is None:
        raise bad_request("The request line is malformed.")
    return 0


def read_head(data: bytes) -> RequestHead:
    """Read a whole head, including its empty line.

    Raises:
        Refusal: it may not be served: 400, 417, 431, 501 or 505.
    """
    lines = data[:-4].split(b"\r\n")
    if len(lines) > MAX_FIELDS + 1:
        raise _too_large(f"The request has more than {MAX_FIELDS} header fields.")
    if len(data) <= _REMEMBERED_HEAD_BYTES:
        method, target, http_10, host = _known_request_line(lines[0])
        headers = list(map(_known_field, lines[1:]))
    else:
        method, target, http_10, host = _request_line(lines[0])
        headers = list(map(read_field, lines[1:]))
    head = RequestHead(method, target, headers, dict(headers), http_10, not http_10)
    # How the message is framed; if that is uncertain, it is refused.
    by_name = head.by_name
    if len(by_name) == len(headers) and b"expect" not in by_name:
        # Each name once, the normal case.
        named, length = by_name.get(b"host"), by_name.get(b"content-length")
        coding, options = by_name.get(b"transfer-encoding"), by_name.get(b"connection")
        if coding is not None:
            coding = coding.lower()
    else:
        named, length, coding, options = _decisive(head)
    if options is not None and (options != b"keep-alive" or http_10):
        _read_options(head, options)
    if named is None:
        if not http_10:
            raise bad_request("The request has no Host.")
    elif not _is_host(named):
        raise bad_request("The request's Host is malformed.")
    if coding is not None:
        _check_coding(head, coding, length)
        head.length = None
    elif length is not None:
        head.length = _known_length(length)
    if host is not None:
        # It is for the target's host, whatever Host says (RFC 9112, 3.2.2).
        head.headers = [(b"host", host), *(pair for pair in headers if pair[0] != b"host")]
        head.by_name[b"host"] = host
    return head


def _request_line(line: bytes) -> tuple[bytes, bytes, bool, bytes | None]:
    """(method, target in origin form, whether by HTTP/1.0, host of an absolute target)."""
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise bad_request("The request line is malformed.")
    method, target, major, minor = match.groups()
    if major != b"1" or minor not in (b"0", b"1"):
        raise Refusal(505, "version_not_supported", "Only HTTP/1.1 and HTTP/1.0 are supported.")
    if method not in _METHODS:
        raise Refusal(501, "not_implemented", f"The method {method.decode()} is not implemented.")
    host = None
    if target[0] != 0x2F and (target != b"*" or method != b"OPTIONS"):
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is None or _HOST.fullmatch(absolute[1]) is None:
            raise bad_request("The request's target is malformed.")
        host = absolute[1]
        target = (absolute[2] or b"/") + (absolute[3] or b"")
    return method, target, minor == b"0", host


def read_field(line: bytes) -> tuple[bytes, bytes]:
    """Name, in lower case, and value of a line without its end. Raises Refusal: not a field."""
    match = _FIELD.fullmatch(line)
    if match is None:
        raise bad_request("A header field is malformed.")
    name, value = match.groups()
    return name.lower(), value.rstrip(b"\t ")


_known_request_line = lru_cache(_REMEMBERED)(_request_line)
_known_field = lru_cache(_REMEMBERED)(read_field)


@lru_cache(_REMEMBERED)
def _known_length(value: bytes) -> int:
    if _LENGTH.fullmatch(value) is None:
        raise bad_request("The request's Content-Length is malformed.")
    return int(value)


_Field = bytes | None


def _decisive(head: RequestHead) -> tuple[_Field, _Field, _Field, _Field]:
    """Host, Content-Length, Transfer-Encoding and Connection. Raises Refusal."""
    host = length = coding = options = None
    single: set[bytes] = set()
    for name, value in head.headers:
        if name not in _DECISIVE:
            if name in _SINGLE:
                if name in single:
                    raise bad_request(f"The request has more than one {_SINGLE[name]}.")
                single.add(name)
            continue
        if name == b"host":
            if host is not None:
                raise bad_request("The request has more than one Host.")
            host = value
        elif name == b"content-length":
            if length is not None:
                raise bad_request("The request has more than one Content-Length.")
            length = value
        elif name == b"connection":
            options = value if options is None else options + b"," + value
        elif name == b"transfer-encoding":
            coding = value.lower() if coding is None else coding + b"," + value.lower()
        elif not head.http_10:
            if value.lower() != b"100-continue":
                raise Refusal(417, "expectation_failed", "Only 100-continue can be expected.")
            head.expects_continue = True
    return host, length, coding, options


@lru_cache(64)
def _is_host(value: bytes) -> bool:
    return len(value) <= 512 and _HOST.fullmatch(value) is not None


def _read_options(head: RequestHead, value: bytes) -> None:
    options = {option.strip(b" \t") for option in value.lower().split(b",")}
    if not options <= _USUAL_OPTIONS:
        if not options.isdisjoint(_TO_THE_ENGINE):
            raise bad_request("The request's Connection names a field that belongs to its body.")
        head.options = options
    if b"close" in options:
        head.keep_alive = False
    elif b"keep-alive" in options and head.http_10:
        head.keep_alive = True


def _check_coding(head: RequestHead, coding: bytes, length: bytes | None) -> None:
    if length is not None:
        raise bad_request("The request has a Content-Length and a Transfer-Encoding.")
    if head.http_10:
        raise bad_request("HTTP/1.0 has no Transfer-Encoding.")
    if coding == b"chunked":
        return
    names = [name.strip(b" \t") for name in coding.split(b",")]
    if names.count(b"chunked") == 1 and names[-1] == b"chunked":
        raise Refusal(501, "not_implemented", "Only the transfer coding chunked is implemented.")
    raise bad_request("The request's Transfer-Encoding doesn't end its body.")


class Inbound:
    """A request on an engine path.

    Attributes:
        method: POST, except for queries.
        path: decoded, without the query.
        target: path and query as they are sent on.
        work: what the path makes an engine do.
        headers: names in lower case.
        dropped: names of fields that its Connection names: they end here.
        content_type: "" if there is none.
        content_length: in bytes, as announced; otherwise 0.
        authorization: the client's credentials, if they are in this field alone; else b"".
        came_through: the gateways that it has come through, as ``hops`` has them; "" for none.
        asked_id: the client's own x-request-id, "" without one.
        request_id: the gateway's name for it; set when it is opened.
        body: empty until all of it is here.
        buffer: of a long body, which counts as buffered until it is released; else None.
        received_s: monotonic; when the last byte of the body arrived.
    """

    __slots__ = (
        "asked_id",
        "authorization",
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
        """``by_name``: each name's value, if no relevant name occurs twice."""
        self.method = method
        self.path = path
        self.target = target
        self.work = work
        self.headers = headers
        self.dropped: Collection[bytes] = ()
        self.authorization = b""
        if by_name is None:
            by_name = dict(headers)
        elif b"x-api-key" not in by_name:
            self.authorization = by_name.get(b"authorization", b"")
        field = by_name.get
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
