"""Bytes are counted alike by both ways, whatever their number."""

import asyncio
import ctypes
import json
import random
import sys
import threading

import msgspec
import pytest

from hetero_gateway.gateway.dataplane import reading as body_reading
from hetero_gateway.gateway.dataplane.reading import LongBodies
from hetero_gateway.gateway.request import byte_counts, byte_scans
from hetero_gateway.gateway.request.addresses import address
from hetero_gateway.gateway.request.byte_counts import LEAST_SCANNED_BYTES
from hetero_gateway.gateway.request.openai import parse_body, parse_in_steps

BLOCK = 1 << 16


@pytest.mark.parametrize("size", [1, 2, 100, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
@pytest.mark.parametrize("kinds", ["ab", '\\"x', 'x,[]"\\'])
def test_long_data_is_counted_as_short_data_is(size: int, kinds: str) -> None:
    data = bytes(random.Random(size).choices(kinds.encode(), k=size))
    first, second = kinds.encode()[:2]
    pair = bytes((first, second))
    assert byte_scans.count(data, pair) == byte_counts.count(data, pair)
    twice = bytes((first, first))
    assert bool(byte_scans.count(data, twice)) == bool(byte_counts.count(data, twice))
    assert byte_scans.count_byte(data, first) == byte_counts.count_byte(data, first)
    for byte in (first, second, 0, 255):
        assert byte_scans.count_below(data, byte) == byte_counts.count_below(data, byte)
    for within in ((1, size - 1, pair, size), (0, size, pair, 3)):
        assert byte_scans.places(data, *within) == byte_counts.places(data, *within)


@pytest.mark.parametrize("make", [bytes, bytearray, msgspec.Raw])
def test_bytes_are_where_their_address_is(make: type) -> None:
    data = make(b'{"model": "m"}')
    assert ctypes.string_at(address(data), 14) == b'{"model": "m"}'


async def test_what_counts_in_long_bodies_is_loaded_by_the_first_and_not_on_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = json.dumps({"model": "m", "prompt": "a\\b " * LEAST_SCANNED_BYTES}).encode()
    monkeypatch.delitem(sys.modules, byte_scans.__name__)
    threads: list[int] = []
    monkeypatch.setattr(body_reading, "load_scans", lambda: threads.append(threading.get_ident()))
    bodies = LongBodies()
    waiting = [parse_in_steps(body, b"") for _ in range(2)]
    assert [bodies.begin(steps, len(body)) for steps in waiting] == [None, None]
    reading = [bodies.finish(steps, lambda: False) for steps in waiting]
    assert await asyncio.gather(*reading) == [parse_body(body, b"")] * 2
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
