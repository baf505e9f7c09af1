"""A chunked body in any pieces, and what is none."""

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.errors import Refusal
from hetero_gateway.http import chunks
from hetero_gateway.http.chunks import ChunkDecoder
from hetero_gateway.http.heads import MAX_FIELDS


def read(data: bytes, step: int = 10**9) -> tuple[bytes, bytes, bool]:
    """(body, what is behind it, whether it is complete), fed in pieces."""
    body, parts, at = ChunkDecoder(), [], 0
    while at < len(data):
        rest = data[at : at + step]
        at += step
        while rest and not body.complete:
            part, rest = body.feed(rest)
            parts.append(part)
        if body.complete:
            return b"".join(parts), rest + data[at:], True
    return b"".join(parts), b"", False


@pytest.mark.parametrize("step", [1, 2, 3, 7, 10**9])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"0\r\n\r\n", (b"", b"", True)),
        (b"3\r\nabc\r\n0\r\n\r\nGET", (b"abc", b"GET", True)),
        (b"3\r\nabc\r\n00\r\n\r\n", (b"abc", b"", True)),
        (
            b"3;a=b;c\r\nabc\r\nA\r\n0123456789\r\n0;x\r\nt: u\r\n\r\n",
            (b"abc0123456789", b"", True),
        ),
        (b"3\r\nabc\r\n", (b"abc", b"", False)),
        (b"3\r\nabc\r\n0\r\n", (b"abc", b"", False)),
        (b"3\r\na", (b"a", b"", False)),
    ],
)
def test_chunks(data: bytes, expected: tuple[bytes, bytes, bool], step: int) -> None:
    assert read(data, step) == expected


@pytest.mark.parametrize("step", [1, 10**9])
@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"g\r\n",
        b"-1\r\n",
        b"+1\r\n",
        b"0x1\r\n",
        b" 1\r\n",
        b"1 \r\n",
        b"1 ;a\r\n",
        b"1_0\r\n",
        b"1\n",
        # The same with all of the chunk there, which is read in a shorter way.
        b"0x1\r\na\r\n0\r\n\r\n",
        b"0X8b\r\n" + b"a" * 0x8B + b"\r\n0\r\n\r\n",
        b"1\r\na\r\n0x1\r\na\r\n0\r\n\r\n",
        b"1_0\r\n" + b"a" * 16 + b"\r\n0\r\n\r\n",
        b"+1\r\na\r\n0\r\n\r\n",
        b" 1\r\na\r\n0\r\n\r\n",
        b"1\t\r\na\r\n0\r\n\r\n",
        b"\r\na\r\n0\r\n\r\n",
        b"1\r\nab\r\n",
        b"1\r\na\nb",
        b"1\r\na\rb",
        b"1;a\x00\r\n",
        b"1;a\rb\r\n",
        b"1;a\nb\r\n",
        b"1234567890123456\r\n",
        b"0\r\na : b\r\n\r\n",
        b"0\r\n a: b\r\n\r\n",
        b"0\r\na: b\n\n",
        b"0\r\n\n",
        b"1;" + b"x" * 5000,
        b"0\r\na: " + b"x" * 5000,
        b"0\r\n" + b"a: b\r\n" * (MAX_FIELDS + 1),
        b"0\r\n" + (b"a: " + b"b" * 4000 + b"\r\n") * 5,
        (b"1;" + b"x" * 4000 + b"\r\na\r\n") * 5,
    ],
)
def test_what_is_no_chunk_is_refused(data: bytes, step: int) -> None:
    with pytest.raises(Refusal):
        read(data, step)


def test_what_extensions_exceed_is_reckoned_alike_however_the_body_comes() -> None:
    extended, plain = b"1;" + b"x" * 3000 + b"\r\na\r\n", b"5dc\r\n" + b"a" * 1500 + b"\r\n"
    data = (extended + plain) * 20 + b"0\r\n\r\n"
    whole = read(data)
    assert whole[2]
    assert read(data, 700) == whole


@given(st.lists(st.binary(min_size=1, max_size=20), max_size=20), st.integers(1, 30))
def test_what_one_frames_the_other_reads(parts: list[bytes], step: int) -> None:
    data = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\nrest"
    assert read(data, step) == (b"".join(parts), b"rest", True)


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
PIECES = st.sampled_from(
    [b"1\r\na\r\n", b"2;x\r\nab\r\n", b"0\r\n", b"\r\n", b"a", b"1", b"\n", b";", b"a: b\r\n", b" "]
)


@given(st.lists(PIECES, max_size=8).map(b"".join))
def test_what_is_accepted_another_parser_reads_in_the_same_way(data: bytes) -> None:
    try:
        ours, _, complete = read(data)
    except Refusal:
        return
    other = h11.Connection(h11.SERVER)
    other.receive_data(HEAD + data)
    theirs, ended = b"", False
    while (event := other.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
        if isinstance(event, h11.Data):
            theirs += bytes(event.data)
        if isinstance(event, h11.EndOfMessage):
            ended = True
            break
    assert (ours, complete) == (theirs, ended)


@pytest.mark.parametrize("chunk", [b"1\r\na\r\n", b"1;x\r\na\r\n"])
def test_a_step_takes_so_many_chunks_and_no_more(chunk: bytes) -> None:
    most = chunks._CHUNKS_PER_STEP + chunks._OTHERS_PER_STEP
    body, rest, size = ChunkDecoder(), chunk * 3 * most, 0
    while rest:
        part, rest = body.feed(rest)
        assert 0 < len(part) <= most
        size += len(part)
    assert size == 3 * most
