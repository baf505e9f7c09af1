"""Parses an instance's response by RFC 9110 and 9112: its head, and where its body ends.

Body bytes go to the client as they came, including their framing. So everything is judged here
before a byte of it is passed on, and strictly: whatever two parsers could read differently is an
error, and never reaches a client. Limits bound the cost of an incomplete response, and everything
takes time linear in its bytes, however small the pieces.

    in the answer                           treatment
    --------------------------------------  -----------------------------------------------------
    a head above 64 KiB or 128 fields       refused; interim answers (1xx) before it count
    anything before the status line         refused
    HTTP/1.0, HTTP/1.1                      accepted; any other version is refused
    a status below 100 or above 599         refused
    100, 102 to 199                         dropped: no client of ours waits for one
    101                                     refused: no other protocol was asked for
    a folded line, a control character      refused
    white space before a colon              removed (RFC 9112, 5.1)
    several content-lengths                 one, if they are equal; else refused
    transfer-encoding                       ``chunked`` alone, in HTTP/1.1 and without a
                                            content-length; anything else is refused
    204, 304                                have no body, whatever their fields say
    fields that ``connection`` names        removed
    bytes after the end                     never passed on; the connection is not reused
    trailers                                checked and dropped: they may not become fields
"""

import functools
import re
from dataclasses import dataclass, field
from typing import ClassVar

from hetero_gateway.http.headers import NOT_TO_CLIENTS, Headers, lines_of

# Limit of all heads of an answer together.
MOST_HEAD_BYTES = 1 << 16
MOST_FIELDS = 128
MOST_INTERIM = 32
# Of a chunk's size line with its extensions. HAProxy's limit is its buffer, 16 KB.
MOST_CHUNK_LINE_BYTES = 1024

_TEXT_BYTES = b"\t" + bytes(range(0x20, 0x7F)) + bytes(range(0x80, 0x100))
# Visible characters, obs-text, spaces and tabs. Possessive quantifiers never backtrack.
_TEXT = rb"[\t\x20-\x7e\x80-\xff]*+"
_status_line = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: " + _TEXT + rb")?").fullmatch
_field_name = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]++)[ \t]*+").fullmatch
_length = re.compile(rb"[0-9]{1,18}").fullmatch
_chunk_line = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;" + _TEXT + rb")?").fullmatch
_VERSION = b"HTTP/1."
# Field names as engines and their servers write them: known to be well-formed.
_KNOWN_NAMES = {
    spelling: name
    for name in (
        b"connection", b"content-encoding", b"content-length", b"content-type", b"cache-control",
        b"date", b"server", b"transfer-encoding", b"vary", b"x-request-id",
    )
    for spelling in (name, name.title())
}  # fmt: skip
_FRAMING = frozenset((b"connection", b"content-length", b"transfer-encoding"))
# Streams that begin within a second have the same head, so short ones are parsed once.
MOST_SHORT_HEAD_BYTES = 1024

# The usual form of chunk lines.
_SIZES = {b"%x" % size: size for size in range(4096)}
# The length of a read that is one whole chunk, by its first five bytes: a size of three digits, or
# of two before an event. It ends in CRLF. ``at_chunk``, such a read needs no ``feed``: nearly all
# of a stream's reads are like that, and each would cost a call.
whole_chunk_length = {
    line + (b"\r\n" if size > 255 else b"\r\nd"): len(line) + 4 + size
    for line, size in _SIZES.items()
    if size > 15
}.get
# Many chunks in one read are tiny: walking over them in Python would take 0.2 s a megabyte.
_TINY = 48
_FEW = 16
# Not possessive: Python below 3.11.5 matches possessive groups wrongly (CPython 106052). Nothing
# follows, so that nothing is tried twice; the bound is for the stack of a match.
_tiny_chunks = re.compile(
    b"(?:"
    + b"|".join(b"%x\r\n.{%d}\r\n" % (size, size) for size in range(1, _TINY))
    + b"){0,1024}",
    re.DOTALL,
).match


class MalformedResponse(ValueError):
    """A response that is not HTTP/1.1, or ambiguous."""


@dataclass(slots=True, eq=False)
class ResponseHead:
    """Status line and fields of a response, and how its body is framed.

    Args:
        status: 200 to 599.
        headers: names in lower case; none that ``connection`` names.
        chunked, content_length: the framing; neither: the body ends with the connection.
        keep_alive: whether the connection may serve another request after it.

    ``ends_at_close``: the body has no framing of its own and ends when the connection does.
    ``passed``: the fields for the client, as written. ``streams``: the body consists of server-sent
    events.
    """

    status: int
    headers: Headers
    chunked: bool = field(default=False, kw_only=True)
    content_length: int | None = field(default=None, kw_only=True)
    keep_alive: bool = field(default=True, kw_only=True)

    ends_at_close: bool = field(init=False)
    passed: bytes = field(init=False)
    streams: bool = field(init=False)

    def __post_init__(self) -> None:
        self.ends_at_close = not self.chunked and self.content_length is None
        self.passed = lines_of([pair for pair in self.headers if pair[0] not in NOT_TO_CLIENTS])
        self.streams = dict(self.headers).get(b"content-type", b"").startswith(b"text/event-stream")


def parse_head(head: bytes) -> ResponseHead:
    """Parse a whole head, including its blank line; the result must not be changed.

    Raises MalformedResponse.
    """
    return parse_short_head(head) if len(head) <= MOST_SHORT_HEAD_BYTES else _parse_head(head)


def _parse_head(head: bytes) -> ResponseHead:
    lines = _lines(head)
    match = _status_line(lines[0])
    if match is None:
        wrong = "its status line" if head.startswith(_VERSION) else "it does not begin as HTTP/1.1"
        raise MalformedResponse(wrong)
    headers: Headers = []
    framing: dict[bytes, bytes] = {}
    for line in lines[1:]:
        name, value = _field(line)
        if name in _FRAMING:
            if name not in framing:
                framing[name] = value
            elif name != b"content-length":
                framing[name] += b"," + value
            elif framing[name] == value:
                continue
            else:
                raise MalformedResponse("several content-lengths")
        headers.append((name, value))
    return _framed(int(match[2]), match[1] == b"1", headers, framing)


# The same for one of at most MOST_SHORT_HEAD_BYTES.
parse_short_head = functools.lru_cache(maxsize=64)(_parse_head)


def _lines(section: bytes) -> list[bytes]:
    """The lines of a head or of trailers, without the blank line that ends them."""
    ends = section.translate(None, _TEXT_BYTES)
    count = section.count(b"\r\n")
    if ends != b"\r\n" * count:
        raise MalformedResponse("a control character, or a bare line feed, in its fields")
    if count > MOST_FIELDS + 2:
        raise MalformedResponse(f"more than {MOST_FIELDS} fields")
    return section.split(b"\r\n")[:-2]


def _field(line: bytes) -> tuple[bytes, bytes]:
    """Name, in lower case, and value of a field line."""
    written, colon, value = line.partition(b":")
    name = _KNOWN_NAMES.get(written)
    if name is None:
        match = _field_name(written)
        if match is None or not colon:
            raise MalformedResponse("a malformed field")
        name = match[1].lower()
        if len(name) != len(written) and name in _FRAMING:
            raise MalformedResponse("white space in the name of a field that frames")
    elif not colon:
        raise MalformedResponse("a malformed field")
    return name, value.strip(b" \t")


def _framed(
    status: int, is_1_1: bool, headers: Headers, framing: dict[bytes, bytes]
) -> ResponseHead:
    options, length = framing.get(b"connection"), framing.get(b"content-length")
    encoding = framing.get(b"transfer-encoding")
    keep_alive = is_1_1
    if options is not None:
        named = {option.strip(b" \t").lower() for option in options.split(b",")}
        keep_alive = b"close" not in named if is_1_1 else b"keep-alive" in named
        named -= {b"close", b"keep-alive", b"content-length"}
        if named:
            headers = [pair for pair in headers if pair[0] not in named]
    content_length = None
    if length is not None:
        if not _length(length):
            raise MalformedResponse("a content-length that is no number")
        content_length = int(length)
    if encoding is not None:
        if encoding.lower() != b"chunked":
            raise MalformedResponse("a transfer-encoding other than chunked")
        if length is not None:
            raise MalformedResponse("both a content-length and a transfer-encoding")
        if not is_1_1:
            raise MalformedResponse("a transfer-encoding in HTTP/1.0")
    if status in (204, 304):
        headers = [pair for pair in headers if pair[0] != b"content-length"]
        return ResponseHead(status, headers, content_length=0, keep_alive=keep_alive)
    head = ResponseHead(
        status, headers, chunked=encoding is not None, content_length=content_length
    )
    head.keep_alive = keep_alive and not head.ends_at_close
    return head


class HeadReader:
    """Gathers the bytes of a response until its head is complete, apart from interim answers."""

    __slots__ = ("_bytes", "_count", "_spent")

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._spent = self._count = 0  # bytes and number of interim answers

    def feed(self, data: bytes) -> tuple[ResponseHead, bytes] | None:
        """(head, the bytes after it), or None while it is incomplete. Raises MalformedResponse."""
        gathered = self._bytes
        end = self._gather(data) if gathered else data.find(b"\r\n\r\n")
        if gathered and end >= 0:
            data = bytes(gathered)
            gathered.clear()
        while end >= 0:
            self._spent += end + 4
            if self._spent > MOST_HEAD_BYTES:
                break
            head = parse_head(data[: end + 4])
            data = data[end + 4 :]
            if head.status >= 200:
                return head, data
            self._count += 1
            if head.status == 101 or self._count > MOST_INTERIM:
                raise MalformedResponse(f"unexpected status {head.status}")
            end = data.find(b"\r\n\r\n")
        if not gathered:
            gathered += data
            self._check(data)
        if self._spent + len(gathered) > MOST_HEAD_BYTES:
            raise MalformedResponse(f"a head of more than {MOST_HEAD_BYTES} bytes")
        return None

    def _gather(self, data: bytes) -> int:
        """Add a piece; returns the position of the head's blank line, or -1."""
        gathered = self._bytes
        seen = max(0, len(gathered) - 3)
        gathered += data
        end = gathered.find(b"\r\n\r\n", seen)
        if end < 0:
            self._check(gathered[seen:])
        return end

    def _check(self, recent: bytes | bytearray) -> None:
        """Refuse what can no longer become a head, without waiting for its end."""
        start = bytes(self._bytes[: len(_VERSION)])
        if not _VERSION.startswith(start):
            raise MalformedResponse("it does not begin as HTTP/1.1")
        if recent.count(b"\n") > recent.count(b"\r\n") + (recent[:1] == b"\n"):
            raise MalformedResponse("a bare line feed in its head")
        line_end = self._bytes.find(b"\r\n", 0, 1024)
        if line_end >= 0 and _status_line(self._bytes[:line_end]) is None:
            raise MalformedResponse("its status line")


class CountedBody:
    """A body of known length. ``ended``: all of it is here; ``extra``: more than that came."""

    __slots__ = ("_left", "ended", "extra")

    at_chunk: ClassVar[bool] = False

    def __init__(self, length: int) -> None:
        self._left = length
        self.ended = not length
        self.extra = False

    def feed(self, data: bytes) -> bytes:
        """The part of these bytes that belongs to the body."""
        left = self._left = self._left - len(data)
        if left > 0:
            return data
        self.ended = True
        if left == 0:
            return data
        self.extra = True
        self._left = 0
        return data[:left]


# A body that is complete already.
WHOLE_BODY = CountedBody(0)


class UnframedBody:
    """A body that ends with the connection."""

    __slots__ = ()

    at_chunk: ClassVar[bool] = False
    ended: ClassVar[bool] = False
    extra: ClassVar[bool] = False

    def feed(self, data: bytes) -> bytes:
        return data


class ChunkedBody:
    """Follows the framing of a chunked body. ``ended`` and ``extra`` as in ``CountedBody``.

    What ``feed`` returns is checked: whole lines of the framing, and bytes of chunks. An incomplete
    line is held back, and so is the end until it is certain.

    ``whole``: what it has returned so far consists of whole chunks.
    """

    __slots__ = ("_held", "_left", "_trailers", "at_chunk", "ended", "extra", "whole")

    def __init__(self) -> None:
        self.at_chunk = self.whole = True  # the next byte begins a chunk
        # Bytes left of the present chunk, including its CRLF; 0: a size line is next; -1: trailers
        # are.
        self._left = 0
        self._held = b""  # the beginning of a size line
        self._trailers = bytearray()
        self.ended = False
        self.extra = False

    def feed(self, data: bytes) -> bytes:
        """What may be passed on, as it came, including framing. Raises MalformedResponse."""
        if self._left < 0:
            return self._close(data)
        if self._held:
            data, self._held = self._held + data, b""
        passed = self._walk(data, self._left)
        self.whole = self._left <= 0
        self.at_chunk = self._left == 0 and not self._held
        return passed

    def _walk(self, data: bytes, pos: int) -> bytes:
        size, chunks = len(data), 0
        while pos < size:
            if pos and not _closes(data, pos):
                raise MalformedResponse("a chunk longer than its size")
            end = data.find(b"\r\n", pos, pos + MOST_CHUNK_LINE_BYTES)
            if end < 0:
                if size - pos >= MOST_CHUNK_LINE_BYTES:
                    raise MalformedResponse("a chunk's size line is too long")
                self._held, self._left = data[pos:], 0
                return data[:pos]
            length = _chunk_length(data[pos:end])
            if not length:
                return self._last(data, pos, end + 2)
            pos = end + length + 4
            chunks += 1
            if length < _TINY and chunks > _FEW and pos < size and _closes(data, pos):
                tiny = _tiny_chunks(data, pos)
                assert tiny is not None  # it matches nothing, if need be
                pos = tiny.end()
        self._left = pos - size
        if self._left < 2 and pos and not _closes(data, pos):
            raise MalformedResponse("a chunk longer than its size")
        return data

    def _last(self, data: bytes, pos: int, behind: int) -> bytes:
        """The line of the last chunk is at ``pos``, and ends at ``behind``."""
        self._left = -1
        return data[:pos] + self._close(data[behind:])

    def _close(self, data: bytes) -> bytes:
        """Gather trailers; returns the end without them, once they are complete."""
        trailers = self._trailers
        seen = max(0, len(trailers) - 3)
        trailers += data
        if trailers.startswith(b"\r\n"):
            end = 2
        elif (blank := trailers.find(b"\r\n\r\n", seen)) >= 0:
            end = blank + 4
        elif len(trailers) <= MOST_HEAD_BYTES:
            return b""
        else:
            raise MalformedResponse("its trailers are too long")
        section = bytes(trailers[:end])
        if end > MOST_HEAD_BYTES:
            raise MalformedResponse("its trailers are too long")
        for line in _lines(section):
            _field(line)
        self.ended = True
        self.extra = len(trailers) > end
        trailers.clear()
        return b"0\r\n\r\n"


def _closes(data: bytes, pos: int) -> bool:
    """Whether the received part of a chunk's CRLF, up to ``pos``, is valid."""
    size = len(data)
    if pos == size + 1:
        return data.endswith(b"\r")
    return data.startswith(b"\r\n", pos - 2) if pos > 1 else data.startswith(b"\n")


def _chunk_length(line: bytes) -> int:
    length = _SIZES.get(line)
    if length is None:
        match = _chunk_line(line)
        if match is None:
            raise MalformedResponse("a chunk's size line")
        length = int(match[1], 16)
    return length


class DecodedBody:
    """A chunked body without its framing."""

    __slots__ = ("_body", "_left")

    at_chunk: ClassVar[bool] = False

    def __init__(self, body: ChunkedBody) -> None:
        self._body = body
        self._left = 0  # as in ``ChunkedBody``

    @property
    def ended(self) -> bool:
        return self._body.ended

    @property
    def extra(self) -> bool:
        return self._body.extra

    def feed(self, data: bytes) -> bytes:
        """The bytes of chunks in the next part. Raises MalformedResponse."""
        return self.decode(self._body.feed(data))

    def decode(self, data: bytes) -> bytes:
        """The same for what ``ChunkedBody.feed`` returned."""
        parts, pos, size = [], self._left, len(data)
        if pos:
            parts.append(data[: max(0, pos - 2)])
        while pos < size:
            end = data.find(b"\r\n", pos)
            length = _chunk_length(data[pos:end])
            if not length:
                break
            parts.append(data[end + 2 : end + 2 + length])
            pos = end + length + 4
        self._left = max(0, pos - size)
        return b"".join(parts)


Body = CountedBody | ChunkedBody | DecodedBody | UnframedBody


def body_of(head: ResponseHead) -> Body:
    """The body reader for the framing that a head announces."""
    if head.chunked:
        return ChunkedBody()
    if head.content_length is not None:
        return CountedBody(head.content_length)
    return UnframedBody()
