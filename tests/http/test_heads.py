"""What is read as a request's head, and what is not: unit by unit, and over a real connection."""

import asyncio
import re

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hetero_gateway.errors import Refusal
from hetero_gateway.http import heads
from hetero_gateway.http.heads import MAX_FIELDS, MAX_HEAD_BYTES, head_size, read_head
from tests.http.test_protocol import CHAT, SPLIT, connected, serving

POST = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"Host: x\r\n"


def read(data: bytes) -> heads.RequestHead | int:
    """What ``data`` is read as, whole, or the status it is refused with; 0: it isn't whole."""
    try:
        size = head_size(data)
        return read_head(data[:size]) if size else 0
    except Refusal as refusal:
        return refusal.status


def read_in_pieces(data: bytes, step: int) -> heads.RequestHead | int:
    """The same of what comes bit by bit."""
    buffer, seen = bytearray(), 0
    try:
        for at in range(0, len(data), step):
            buffer += data[at : at + step]
            size = head_size(buffer, seen)
            seen = len(buffer)
            if size:
                return read_head(bytes(buffer[:size]))
    except Refusal as refusal:
        return refusal.status
    return 0


def with_fields(*lines: bytes, request_line: bytes = POST) -> bytes:
    return request_line + HOST + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


REFUSED: dict[str, tuple[bytes, int]] = {
    # The request line: RFC 9112, 3
    "no version": (b"GET /livez\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /livez \r\n\r\n", 400),
    "HTTP/2.0": (b"GET /livez HTTP/2.0\r\nHost: x\r\n\r\n", 505),
    "preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "HTTP/1.2": (b"GET /livez HTTP/1.2\r\nHost: x\r\n\r\n", 505),
    "HTTP/3.1": (b"GET /livez HTTP/3.1\r\nHost: x\r\n\r\n", 505),
    "HTTP/1.10": (b"GET /livez HTTP/1.10\r\nHost: x\r\n\r\n", 400),
    "lower-case version": (b"GET /livez http/1.1\r\nHost: x\r\n\r\n", 400),
    "another protocol": (b"GET /livez SIP/2.0\r\nHost: x\r\n\r\n", 400),
    "two spaces": (b"GET  /livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a tab": (b"GET\t/livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a space in the target": (b"GET /li vez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a space at the end": (b"GET /livez HTTP/1.1 \r\nHost: x\r\n\r\n", 400),
    "NUL in the target": (b"GET /livez\x00 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a byte above ASCII": (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a fragment": (b"GET /livez#a HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a relative target": (b"GET livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "an asterisk": (b"GET * HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "an authority": (b"GET x:80 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "another scheme": (b"GET ftp://x/livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "credentials in the target": (b"GET http://a@x/livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "no host in the target": (b"GET http:///livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "no method": (b" /livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a bad method": (b"GE(T /livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "an unknown method": (b"BREW /livez HTTP/1.1\r\nHost: x\r\n\r\n", 501),
    "a method in lower case": (b"get /livez HTTP/1.1\r\nHost: x\r\n\r\n", 501),
    "TRACE": (b"TRACE /livez HTTP/1.1\r\nHost: x\r\n\r\n", 501),
    "CONNECT": (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", 501),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "SSH": (b"SSH-2.0-OpenSSH_9.2\r\n", 400),
    # Line ends: 2.2
    "bare LF": (POST.replace(b"\r\n", b"\n") + b"Host: x\n\n", 400),
    "bare LF in a field": (with_fields(b"a: b\nc: d"), 400),
    "bare CR in a field": (with_fields(b"a: b\rc: d"), 400),
    "CR CR LF": (with_fields(b"a: b\r"), 400),
    "bare LF at the end": (POST + HOST + b"\n", 400),
    # Fields: 5
    "a folded field": (with_fields(b"a: b", b" c"), 400),
    "a field that begins with a tab": (with_fields(b"\ta: b"), 400),
    "a space in front of the colon": (with_fields(b"Content-Length : 5"), 400),
    "a tab in front of the colon": (with_fields(b"Transfer-Encoding\t: chunked"), 400),
    "no colon": (with_fields(b"abc"), 400),
    "no name": (with_fields(b": abc"), 400),
    "a space in a name": (with_fields(b"a b: c"), 400),
    "a name above ASCII": (with_fields(b"\xe4: c"), 400),
    "NUL in a value": (with_fields(b"a: b\x00c"), 400),
    "a control character in a value": (with_fields(b"a: b\x01c"), 400),
    "DEL in a value": (with_fields(b"a: b\x7fc"), 400),
    # Host: 3.2
    "no Host": (POST + b"\r\n", 400),
    "two Hosts": (with_fields(b"Host: x"), 400),
    "a Host with a path": (POST + b"Host: x/y\r\n\r\n", 400),
    "a Host with credentials": (POST + b"Host: a@x\r\n\r\n", 400),
    "a Host with a space": (POST + b"Host: x y\r\n\r\n", 400),
    "a Host with a bad port": (POST + b"Host: x:80a\r\n\r\n", 400),
    # What the gateway would read in one way and an engine in another
    "two Content-Types": (
        with_fields(b"Content-Type: application/json", b"Content-Type: multipart/x"), 400
    ),
    "two Content-Encodings": (with_fields(b"Content-Encoding: a", b"Content-Encoding: b"), 400),
    "two Authorizations": (with_fields(b"Authorization: a", b"authorization: a"), 400),
    "two X-Api-Keys": (with_fields(b"X-Api-Key: a", b"X-Api-Key: b"), 400),
    "a Content-Type that ends here": (
        with_fields(b"Content-Type: multipart/x", b"Connection: content-type"), 400
    ),
    # Framing: 6
    "two Content-Lengths": (with_fields(b"Content-Length: 5", b"Content-Length: 6"), 400),
    "twice the same Content-Length": (with_fields(b"Content-Length: 5", b"Content-Length: 5"), 400),
    "a list of Content-Lengths": (with_fields(b"Content-Length: 5, 5"), 400),
    "a signed Content-Length": (with_fields(b"Content-Length: +5"), 400),
    "a negative Content-Length": (with_fields(b"Content-Length: -5"), 400),
    "a hexadecimal Content-Length": (with_fields(b"Content-Length: 0x5"), 400),
    "an underscore in Content-Length": (with_fields(b"Content-Length: 1_0"), 400),
    "an empty Content-Length": (with_fields(b"Content-Length:"), 400),
    "a huge Content-Length": (with_fields(b"Content-Length: 9999999999999999999"), 400),
    "Content-Length and chunks": (
        with_fields(b"Content-Length: 5", b"Transfer-Encoding: chunked"), 400),
    "chunks and Content-Length": (
        with_fields(b"Transfer-Encoding: chunked", b"Content-Length: 5"), 400),
    "a coding that is not ours": (with_fields(b"Transfer-Encoding: gzip, chunked"), 501),
    "a coding and chunks in two fields": (
        with_fields(b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked"), 501),
    "no chunks at the end": (with_fields(b"Transfer-Encoding: chunked, gzip"), 400),
    "identity": (with_fields(b"Transfer-Encoding: identity"), 400),
    "chunked twice": (with_fields(b"Transfer-Encoding: chunked, chunked"), 400),
    "xchunked": (with_fields(b"Transfer-Encoding: xchunked"), 400),
    "chunked with a parameter": (with_fields(b"Transfer-Encoding: chunked;a=b"), 400),
    "chunked in quotes": (with_fields(b'Transfer-Encoding: "chunked"'), 400),
    "a vertical tab before chunked": (with_fields(b"Transfer-Encoding: \x0bchunked"), 400),
    "no coding": (with_fields(b"Transfer-Encoding:"), 400),
    "chunks in HTTP/1.0": (
        b"POST /livez HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    # Others
    "an unknown expectation": (with_fields(b"Expect: 200-ok"), 417),
    "two expectations": (with_fields(b"Expect: 100-continue, tea"), 417),
    "too many fields": (with_fields(*[b"a: b"] * MAX_FIELDS), 431),
    "too large a field": (with_fields(b"a: " + b"b" * MAX_HEAD_BYTES), 431),
    "too many bytes of fields": (with_fields(*[b"a: " + b"b" * 1000] * 70), 431),
    "too long a target": (b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n", 414),
}  # fmt: skip


@pytest.mark.parametrize(("data", "status"), REFUSED.values(), ids=REFUSED)
def test_what_may_mean_more_than_one_thing_is_refused_in_pieces_too(
    data: bytes, status: int
) -> None:
    assert read(data) == status
    data = data[: MAX_HEAD_BYTES + 100]
    assert read_in_pieces(data, 1 if len(data) < 1000 else 997) == status


def test_only_what_is_new_of_a_head_is_looked_at() -> None:
    # What was looked at is not read again, or small pieces would take quadratic time.
    part = POST + b"a: \n" + b"b" * 100
    assert head_size(part, len(part) - 50) == 0
    with pytest.raises(Refusal):
        head_size(part, 0)


def test_a_head_may_be_as_large_as_the_limits() -> None:
    fields = [b"a: b"] * (MAX_FIELDS - 1)
    assert len(read(with_fields(*fields)).headers) == MAX_FIELDS  # type: ignore[union-attr]
    data = with_fields(b"a: ")
    data = data.replace(b"a: ", b"a: " + b"b" * (MAX_HEAD_BYTES - len(data)))
    assert len(data) == MAX_HEAD_BYTES
    assert isinstance(read(data), heads.RequestHead)


@pytest.mark.parametrize(
    ("lines", "length", "keep_alive", "expects"),
    [
        ([], 0, True, False),
        ([b"Content-Length: 0"], 0, True, False),
        ([b"content-length:17 \t"], 17, True, False),
        ([b"Content-Length: 007"], 7, True, False),
        ([b"Transfer-Encoding: chunked"], None, True, False),
        ([b"TRANSFER-ENCODING: Chunked"], None, True, False),
        ([b"Connection: close"], 0, False, False),
        ([b"Connection: x, CLOSE"], 0, False, False),
        ([b"Connection: close", b"Connection: keep-alive"], 0, False, False),
        ([b"Expect: 100-Continue", b"Content-Length: 5"], 5, True, True),
    ],
)
def test_how_a_request_is_framed(
    lines: list[bytes], length: int | None, keep_alive: bool, expects: bool
) -> None:
    head = read(with_fields(*lines))
    assert isinstance(head, heads.RequestHead)
    assert (head.length, head.keep_alive, head.expects_continue) == (length, keep_alive, expects)


@pytest.mark.parametrize(
    ("lines", "keep_alive"),
    [
        (b"", False),
        (b"Connection: keep-alive\r\n", True),
        (b"Connection: close\r\nConnection: keep-alive\r\n", False),
        (b"Expect: whatever\r\n", False),
    ],
)
def test_http_10_needs_no_host_and_closes_unless_asked(lines: bytes, keep_alive: bool) -> None:
    head = read(b"GET /livez HTTP/1.0\r\n" + lines + b"\r\n")
    assert isinstance(head, heads.RequestHead)
    assert (head.http_10, head.keep_alive, head.expects_continue) == (True, keep_alive, False)


def test_an_absolute_target_says_whose_it_is() -> None:
    head = read(b"GET HTTP://a:1?b HTTP/1.1\r\nAccept: *\r\nHost: c\r\n\r\n")
    assert isinstance(head, heads.RequestHead)
    assert head.target == b"/?b"
    assert head.headers == [(b"host", b"a:1"), (b"accept", b"*")]


def test_connection_names_what_ends_here() -> None:
    head = read(with_fields(b"Connection: Upgrade, HTTP2-Settings", b"Connection: X-A"))
    assert isinstance(head, heads.RequestHead)
    assert set(head.options) >= {b"http2-settings", b"x-a"}
    assert read(with_fields(b"Connection: keep-alive")).options == ()  # type: ignore[union-attr]


TOKENS = st.text("!#$%&'*+-.^_`|~09AZaz", min_size=1, max_size=8)
BYTES = st.binary(max_size=12)
ALMOST = st.lists(
    st.one_of(
        st.tuples(TOKENS, st.text(" \t!~aé", max_size=8)).map(
            lambda pair: f"{pair[0]}:{pair[1]}\r\n".encode("latin-1")
        ),
        st.sampled_from(
            [
                b"content-length: 3\r\n", b"transfer-encoding: chunked\r\n", b"host: x\r\n",
                b"connection: close\r\n", b" folded\r\n", b"a : b\r\n", b"a: b\n", b"\r\n",
            ]
        ),
        BYTES,
    ),
    max_size=6,
)  # fmt: skip
REQUEST_LINES = st.sampled_from(
    [POST, b"GET /a?b HTTP/1.1\r\n", b"GET /a HTTP/1.0\r\n", b"GET http://x/ HTTP/1.1\r\n"]
)


@pytest.mark.slow
@given(REQUEST_LINES, ALMOST)
@example(POST, [b"host: x\r\n", b"content-length: 3\r\n"])
def test_what_is_accepted_another_parser_reads_in_the_same_way(
    request_line: bytes, lines: list[bytes]
) -> None:
    data = request_line + b"".join(lines) + b"\r\n"
    size = 0
    try:
        size = head_size(data)
        ours = read_head(data[:size])
    except Refusal:
        return
    if not size or b"://" in request_line:
        return
    other = h11.Connection(h11.SERVER)
    other.receive_data(data[:size])
    theirs = other.next_event()
    assert isinstance(theirs, h11.Request)
    assert (theirs.method, theirs.target) == (ours.method, ours.target)
    assert list(theirs.headers) == ours.headers
    assert theirs.http_version == (b"1.0" if ours.http_10 else b"1.1")


@pytest.mark.parametrize("blank", [b"\r\n", b"\r\n\r\n"])
async def test_empty_lines_in_front_of_a_request_may_come_in_pieces(blank: bytes) -> None:
    async with serving() as (running, _):
        for cut in range(len(blank) + 1):
            async with connected(running) as client:
                data = blank + b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
                client.writer.write(data[:cut])
                await asyncio.sleep(0.01)
                client.writer.write(data[cut:])
                assert (await client.response())[0] == 200


@given(REQUEST_LINES, ALMOST, st.integers(1, 9))
def test_pieces_make_no_difference(request_line: bytes, lines: list[bytes], step: int) -> None:
    data = request_line + b"".join(lines) + b"\r\n"
    whole, pieces = read(data), read_in_pieces(data, step)
    if isinstance(whole, int):
        assert pieces == whole
    else:
        assert isinstance(pieces, heads.RequestHead)
        assert pieces.headers == whole.headers


# Over a connection, on both kinds of paths


@pytest.mark.parametrize("path", [CHAT, "/admin/instances", "/metrics", "/nope"])
async def test_each_is_refused_over_a_connection_and_nothing_behind_it_is_read(path: str) -> None:
    async with serving() as (running, fakes):
        for name, (data, status) in REFUSED.items():
            data = data.replace(CHAT.encode(), path.encode())
            async with connected(running) as client:
                client.writer.write(data + b"GET /admin/instances HTTP/1.1\r\nhost: x\r\n\r\n")
                answer = await client.rest()
                assert answer.startswith(b"HTTP/1.1 %d " % status), name
                assert len(re.findall(rb"HTTP/1.1 \d", answer)) == 1, name
                assert b"connection: close\r\n" in answer, name
                assert b'{"error":{"message":"' in answer, name
        assert fakes[0].requests == 0


async def test_an_endless_head_is_answered_before_it_ends() -> None:
    async with serving() as (running, _):
        for data in (POST + HOST + b"a: ", b"GET /"):
            async with connected(running) as client:
                client.writer.write(data)
                for _ in range(64):
                    client.writer.write(b"x" * 1024)
                    await asyncio.sleep(0)
                # The client writes on, and still sees why it was refused.
                head = await asyncio.wait_for(client.reader.readuntil(SPLIT), 10)
                assert re.match(rb"HTTP/1.1 4(31|14) ", head)
                client.writer.write(b"x" * 2**20)
                assert b"error" in await client.rest()


async def test_a_refused_head_request_gets_no_body() -> None:
    async with serving() as (running, _), connected(running) as client:
        client.writer.write(b"HEAD /livez HTTP/1.1\r\n\r\n")
        assert (await client.rest()).endswith(SPLIT)
