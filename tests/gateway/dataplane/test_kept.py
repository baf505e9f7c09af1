"""What is kept of streams: all of it, in little memory where there are many."""

import asyncio
import random

import pytest

from hetero_gateway.gateway.dataplane import kept as kept_module
from hetero_gateway.gateway.dataplane.kept import TAIL_READS, KeptReads, Squeezing


def event(number: int) -> bytes:
    data = (
        b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"%x"}}]}\n\n' % number
    )
    return b"%x\r\n%b\r\n" % (len(data), data)


def filled(events: int, most_bytes: int = 1 << 18) -> KeptReads:
    kept = KeptReads(most_bytes)
    kept.reads.extend(map(event, range(events)))
    return kept


def test_what_was_squeezed_in_between_is_there_as_it_came() -> None:
    rng, kept, came = random.Random(1), KeptReads(1 << 20), b""
    for number in range(2000):
        read = event(number) * rng.randint(1, 3)
        kept.reads.append(read)
        came += read
        if len(kept.reads) > TAIL_READS and rng.random() < 0.02:
            kept.squeeze()
            assert len(kept.reads) == TAIL_READS
        assert not kept.is_too_long()
    assert kept.body() == came


def test_what_was_squeezed_counts_as_long_as_it_came() -> None:
    kept = filled(100, most_bytes=20_000)
    kept.squeeze()
    assert not kept.is_too_long()
    kept.reads.extend(map(event, range(100)))
    kept.squeeze()
    assert not kept.is_too_long()
    assert kept.is_too_long(10_000)
    kept.reads.extend(map(event, range(100)))
    assert kept.is_too_long()


async def test_only_streams_that_take_much_together_are_squeezed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_module, "_MOST_LOOSE_BYTES", 100_000)
    squeezing = Squeezing(asyncio.get_running_loop())
    streams = [filled(200) for _ in range(3)] + [filled(20)]
    squeezing.look_at(streams)
    await asyncio.sleep(0.1)
    assert [len(kept.reads) for kept in streams] == [200, 200, 200, 20]
    streams += [filled(200) for _ in range(3)]
    before = sum(kept.loose_bytes for kept in streams)
    squeezing.look_at(streams)
    await asyncio.sleep(0.1)
    assert [len(kept.reads) for kept in streams] == [TAIL_READS] * 3 + [20] + [TAIL_READS] * 3
    held = sum(kept.loose_bytes + sum(map(len, kept._squeezed)) for kept in streams)
    assert held < before / 10
