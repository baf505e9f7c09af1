"""Rows, news and raw replies of a Redis that says anything, against the exchange of two gateways.

A store in this process spoils what it sends: whole replies, their bytes, or the messages in them.
Two gateways share through it all the time. What must hold: no traceback, every turn ends, memory
stays bounded, what counts of the others' rows is finite and no more than an engine can hold, and
once the store is itself again the two see each other exactly.
"""

import asyncio
import math
import random
import struct
import time
import tracemalloc

import numpy as np

from hetero_gateway.core.sharing.exchange import OTHERS
from hetero_gateway.core.sharing.message import FIELDS, MOST_BYTES, Message, instance_key, pack
from tests.fakes.redis_replies import Replies, array, bulk
from tests.fakes.sharing import SharingGateway, exchanging, sharing_config
from tests.fuzz.fuzzing import Findings, errors_found
from tests.fuzz.mutation import mutated_bytes

_PROFILE = "A100-80GB-SXM/Llama-3-8B/tp1"
_INSTANCES = 3
_MOST_MEMORY_BYTES = 200 * 2**20
_AGAIN_S = 20.0

_LENGTHS = (
    b"-2",
    b"-1",
    b"0",
    b"1",
    b"3",
    b"1025",
    b"2097153",
    b"1000000000",
    b"9" * 30,
    b"x",
    b"",
)
_REPLIES = (
    b"", b"\r\n", b"+OK\r\n", b"-ERR no\r\n", b"-MOVED 0 :1\r\n", b"-MOVED 0 127.0.0.1:1\r\n",
    b"-NOPERM no\r\n", b"-WRONGTYPE no\r\n", b"-LOADING\r\n", b":1\r\n", b"*0\r\n", b"*-1\r\n",
    b"$-1\r\n", b"*1000000000\r\n", b"$2000000000\r\n", b"*1\r\n" * 100, b">2\r\n+a\r\n+b\r\n",
    b"%1\r\n+a\r\n+b\r\n", b"+" + b"x" * 5000, b"HTTP/1.1 400 Bad Request\r\n\r\n",
)  # fmt: skip
_NUMBERS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-320,
    1e15,
    2.0**50,
    2.0**51,
    1e308,
    math.inf,
    -math.inf,
    math.nan,
)


def spoilt_message(rng: random.Random, data: bytes) -> bytes:
    """A message of a gateway, with other numbers, sizes, or bytes."""
    result = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        kind = rng.random()
        if kind < 0.5 and len(result) > 40:
            # A number of a row: they end the message.
            at = rng.randrange(24, len(result) - 8) if kind < 0.1 else 0
            at = at or max(24, len(result) - 8 * rng.randrange(1, 1 + len(result) // 8))
            number = rng.choice(_NUMBERS) if rng.random() < 0.7 else 10 ** rng.uniform(-9, 15)
            result[at : at + 8] = struct.pack("<d", number)
        elif kind < 0.7 and len(result) > 24:
            # Sequence, sections, a section's kind, width or size.
            at, form = rng.choice(((8, "<Q"), (6, "<H"), (16, "<H"), (18, "<H"), (20, "<I")))
            most = 256 ** struct.calcsize(form) - 1
            value = rng.choice((0, 1, 2, 3, 13, 14, most, rng.randrange(most)))
            result[at : at + struct.calcsize(form)] = struct.pack(form, value)
        elif kind < 0.85:
            result = bytearray(mutated_bytes(rng, bytes(result)))
        elif kind < 0.95:
            del result[rng.randrange(len(result) + 1) :]
        else:
            result *= rng.randrange(2, 5)
    return bytes(result)


def spoilt_reply(rng: random.Random, data: bytes) -> bytes:
    """A reply, or several, of which something is wrong."""
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(_REPLIES)
    if kind < 0.4:
        return data + rng.choice(_REPLIES)
    if kind < 0.55:
        return data[: rng.randrange(len(data) + 1)]
    if kind < 0.75:
        start = rng.choice((b"*", b"$", b":"))
        at = data.find(start)
        end = data.find(b"\r\n", at)
        if 0 <= at < end:
            return data[: at + 1] + rng.choice(_LENGTHS) + data[end:]
    return mutated_bytes(rng, data)


def _lies(rng: random.Random, sequence: int) -> bytes:
    """A message that holds together, of rows that nobody can have."""
    rows = [
        [rng.choice((0.0, 1.0, 10 ** rng.uniform(-9, 15), 2.0**50)) for _ in range(FIELDS)]
        for _ in range(_INSTANCES)
    ]
    keys = [instance_key(f"i{i}", f"http://h{i}") for i in range(_INSTANCES)]
    message = Message(sequence, np.array(keys, dtype=np.uint64), np.array(rows))
    return pack(message._replace(whole=rng.random() < 0.8))


class _Gateway(SharingGateway):
    """Of instances i0 and so on."""

    def __init__(self, url: str) -> None:
        sharing = {"interval_s": 0.005, "news_s": 0.001, "timeout_s": 0.05, "ttl_s": 0.5}
        super().__init__(sharing_config(url, *[_PROFILE] * _INSTANCES, **sharing))

    def others(self) -> float:
        """Requests of others that count here."""
        return sum(load.in_flight for load in self._loads())

    def _loads(self) -> list[object]:
        table = self.fleet.scheduler.members.table
        peers = [table[i]._peer_loads.get(OTHERS) for i in self.fleet.instances]
        return [each for each in peers if each is not None]

    def absurd(self) -> str:
        """What counts here and cannot be; "" if all is well."""
        for load in self._loads():
            numbers = [*load]  # type: ignore[misc]
            if not all(math.isfinite(n) and n >= 0 for n in numbers):
                return f"a number that is none counts: {load}"
            if load.in_flight > 2 * 512 or load.waiting + load.streaming > 2 * 512:  # type: ignore[attr-defined]
                return f"more than two engines hold: {load}"
        for instance_id in self.fleet.instances:
            speed = self.fleet.scheduler.members.table[instance_id].speed
            if not 0.2 <= speed <= 5:
                return f"a speed factor of {speed}"
        return ""


def _two(url: str) -> tuple[_Gateway, _Gateway]:
    return _Gateway(url), _Gateway(url)


async def fuzz_redis(seed: int, count: int) -> Findings:
    """``count`` replies and messages, spoilt one after the other."""
    findings, rng = Findings(), random.Random(seed)
    tracemalloc.start()
    with errors_found(findings):
        async with Replies() as server, exchanging(*_two(server.url)) as (first, second):
            for _ in range(3):
                first.place(10, 10.0)
            await _settle(findings, server, first, second, b"")
            last = [b""]

            def spoil(data: bytes) -> bytes:
                if rng.random() < 0.5:
                    return data
                findings.sent += 1
                last[0] = spoilt_reply(rng, data)
                return last[0]

            while findings.sent < count:
                server.spoil = spoil
                await asyncio.sleep(0.02)
                _lie(rng, server, findings)
                server.spoil = lambda data: data
                await asyncio.sleep(0.02)
                for each in (first, second):
                    if problem := each.absurd():
                        findings.add(problem, last[0])
                if rng.random() < 0.02:
                    await _settle(findings, server, first, second, last[0])
            await _settle(findings, server, first, second, last[0])
            findings.statuses[200] = sum(g.sharing.outcomes["ok"] for g in (first, second))
            findings.statuses[400] = sum(g.sharing.outcomes["rejected"] for g in (first, second))
            findings.statuses[503] = sum(g.sharing.outcomes["failed"] for g in (first, second))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if peak_bytes > _MOST_MEMORY_BYTES:
        findings.add(f"{peak_bytes / 1e6:.0f} MB of memory", b"")
    return findings


def _lie(rng: random.Random, server: Replies, findings: Findings) -> None:
    """Spoil what lies in the store, and news."""
    prefix = b"{hetero-gateway}:"
    values = [data for key, data in server.values.items() if data]
    if not values:
        return
    for _ in range(rng.randrange(4)):
        findings.sent += 1
        name = b"%016x" % rng.randrange(4)
        data = _lies(rng, 10**6 + findings.sent)
        if rng.random() < 0.5:
            data = spoilt_message(rng, rng.choice([*values, data]))[: MOST_BYTES + 10]
        if rng.random() < 0.8 and len(data) >= 16:
            # Newer than what it is taken from: else it counts for nothing.
            data = data[:8] + struct.pack("<Q", 10**6 + findings.sent) + data[16:]
        server.values[prefix + name] = data
        server.names.add(name)
        told = array(b"message", prefix + b"news", name + spoilt_message(rng, data))
        for listener in server.listeners:
            listener.write(told if rng.random() < 0.9 else told + bulk(b"more"))
    if rng.random() < 0.1:
        odd = (b"", b"\0" * 16, b"g" * 16, b"x" * 100_000, b"%016x" % rng.randrange(2**60))
        server.names |= {*odd}


async def _settle(
    findings: Findings, server: Replies, first: _Gateway, second: _Gateway, data: bytes
) -> None:
    """Without liars and spoilt replies, the view is exact again; in time."""
    server.spoil = lambda unspoilt: unspoilt
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < _AGAIN_S:
        for key in [*server.values]:
            if key[-16:].startswith(b"0" * 12):
                del server.values[key]
        server.names -= {name for name in server.names if name.startswith(b"0" * 12)}
        exact = second.others() == 3 and first.others() == 0
        if exact and second.sharing.replicas == first.sharing.replicas == 1:
            return
        await asyncio.sleep(0.02)
    findings.add(
        f"not exact after {_AGAIN_S} s: {second.others()}, {first.others()}, "
        f"{second.sharing.describe()}",
        data,
    )
