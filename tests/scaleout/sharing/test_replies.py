"""A store that sends what no Redis would: nothing of it is believed, or kept."""

import asyncio
import contextlib
import time
import tracemalloc
from collections.abc import Callable

import pytest

from hetero_gateway.core.sharing.exchange import Mode
from hetero_gateway.core.sharing.message import MOST_BYTES
from hetero_gateway.scaleout.sharing.redis import ReplyError, ReplyReader, ServerError
from tests.fakes.redis_replies import Replies, array, bulk
from tests.fakes.running import FAST, eventually
from tests.fakes.sharing import SharingGateway, exchanging, sharing_config

MEGABYTE = 2**20


def read(data: bytes) -> list[object]:
    return list(ReplyReader().feed(data))


GOOD = b"+OK\r\n:12\r\n:-3\r\n-ERR a problem\r\n$-1\r\n*-1\r\n*0\r\n$0\r\n\r\n" + array(
    b"a", b"\r\n"
)
VALUES = [b"OK", 12, -3, ServerError("ERR", "a problem"), None, None, [], b"", [b"a", b"\r\n"]]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_replies_are_the_same_however_they_are_cut(size: int) -> None:
    reader, got = ReplyReader(), []
    for start in range(0, len(GOOD), size):
        got += reader.feed(GOOD[start : start + size])
    assert got == VALUES


BAD = {
    "an array of a billion": b"*1000000000\r\n",
    "one more than may be": b"*1025\r\n",
    "a string of 2 GB": b"$2000000000\r\n",
    "a string one byte too long": b"$%d\r\n" % (MOST_BYTES + 1),
    "a negative length": b"$-2\r\n",
    "a negative array": b"*-2\r\n",
    "a length with a sign": b"$+5\r\nhello\r\n",
    "a length with an underscore": b"$1_0\r\n0123456789\r\n",
    "a length with spaces": b"$ 5\r\nhello\r\n",
    "a length in other digits": "$٥\r\nhello\r\n".encode(),
    "a length of 5000 digits": b"*" + b"9" * 5000 + b"\r\n",
    "no length": b"*\r\n",
    "arrays in arrays": b"*1\r\n" * 1000,
    "a string without its end": b"$2\r\nabc\r\n",
    "a line without an end": b"+" + b"x" * 5000,
    "a long line": b"-" + b"x" * 5000 + b"\r\n",
    "a push of RESP3": b">3\r\n$7\r\nmessage\r\n$1\r\na\r\n$1\r\nb\r\n",
    "a map of RESP3": b"%1\r\n+a\r\n+b\r\n",
    "an empty line": b"\r\n",
    "HTTP": b"HTTP/1.1 200 OK\r\n\r\n",
    "zeros": b"\0" * 5000,
    "an array of more than two messages": b"*3\r\n" + 3 * bulk(b"x" * MOST_BYTES),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_what_is_no_reply_or_too_long_is_refused_before_it_is_kept(data: bytes) -> None:
    """13 bytes had hiredis allocate for a billion values: 6 s of CPU."""
    tracemalloc.start()
    try:
        with pytest.raises(ReplyError):
            read(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(data) + MEGABYTE


def test_a_slow_drip_costs_no_more_than_its_bytes() -> None:
    """The buffer is searched once, not again for each byte."""
    reader = ReplyReader()

    def drip(bytes_: int) -> float:
        begun_s = time.thread_time()
        for _ in range(bytes_):
            list(reader.feed(b"x"))
        return time.thread_time() - begun_s

    list(reader.feed(b"$%d\r\n" % MOST_BYTES))
    first = drip(100_000)
    list(reader.feed(b"x" * (MOST_BYTES - 300_000)))
    assert drip(100_000) < 20 * first


def two(
    server: Replies,
) -> contextlib.AbstractAsyncContextManager[tuple[SharingGateway, ...]]:
    settings = sharing_config(server.url, FAST, interval_s=0.05, timeout_s=0.5, ttl_s=2.0)
    return exchanging(SharingGateway(settings), SharingGateway(settings))


async def test_two_gateways_share_through_it() -> None:
    async with Replies() as server, two(server) as (first, second):
        first.place()
        await eventually(lambda: second.in_flight() == 1)
        await eventually(lambda: len(server.listeners) == 2 and first.sharing.replicas == 1)
        first.place()
        await eventually(lambda: second.sharing.news["heard"] == 1)


SPOILT: dict[str, Callable[[bytes], bytes]] = {
    "all replies are arrays of a billion": lambda _: b"*1000000000\r\n",
    "a string of 2 GB": lambda _: b"$2000000000\r\n",
    "a long string that drips": lambda _: b"$2000000\r\nx",
    "a reply too many": lambda data: data + b"+OK\r\n",
    "a line that never ends": lambda _: b"+" + b"x" * 100_000,
    "errors": lambda _: b"-LOADING it is\x1b[31m busy\r\n",
    "moved to nowhere": lambda _: b"-MOVED 1 127.0.0.1:999999999999\r\n",
    "moved to where nobody listens": lambda _: b"-MOVED 1 127.0.0.1:1\r\n",
    "moved to and fro": lambda _: b"-MOVED 1 :%d\r\n",
    "other kinds": lambda _: b":1\r\n",
    "nothing": lambda _: b"",
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
async def test_a_store_that_makes_no_sense_costs_the_view_and_nothing_else(spoil, caplog):
    async with Replies() as server, two(server) as (first, second):
        first.place()
        await eventually(lambda: second.in_flight() == 1)
        tracemalloc.start()
        try:
            port = server.port

            def spoilt(data: bytes) -> bytes:
                made = spoil(data)
                return made % port if b"%d" in made else made

            server.spoil = spoilt
            # What makes sense as replies says at least that nobody is there.
            await eventually(lambda: second.in_flight() == 0, within_s=20)
            await asyncio.sleep(0.5)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 30 * MEGABYTE
        server.spoil = lambda data: data
        await eventually(lambda: second.sharing.mode is Mode.SHARED, within_s=20)
        await eventually(lambda: second.in_flight() == 1, within_s=20)
        assert not [r for r in caplog.records if r.exc_info], "no traceback"
        assert "\x1b" not in caplog.text
