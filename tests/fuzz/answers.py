"""Answers of an instance that are spoilt, through a real gateway.

Whatever an instance answers, its client gets HTTP that h11 can read (the instance's own answer, one
of the gateway's, or one that breaks off), and gets it in time; requests to another instance are
served, nothing is logged as an error, and all loads end at 0. (What comes behind an answer only
once the next request is on its way is that one's answer, to anyone: so the same instance is not
asked.)
"""

from __future__ import annotations

import asyncio
import itertools
import random

from tests.fakes.raw import RawInstance, plain, raw_instance
from tests.fakes.running import config_for
from tests.fuzz.fuzzing import Findings, _exchange, _gateway, _repeat
from tests.fuzz.mutation import mutated_bytes, mutated_head, mutated_json
from tests.fuzz.short_ways import ANSWERS, chunked, cuts_of, pieces_of

_BODY = b'{"model":"spoilt","prompt":"spoil it","max_tokens":4,"stream":%b}'
_DOCUMENT = {
    "id": "cmpl-1",
    "object": "text_completion",
    "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_EVENTS = (
    b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n',
    b'data: {"error":{"message":"broken","code":500}}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1e999}}\n\n',
    b"data: [DONE]\n\n", b"event: error\n", b": a comment\n\n", b"data: " * 40, b"\n\n",
)  # fmt: skip
# An engine that says nothing more is given up after these; an answer ends well before the patience.
_TIMEOUTS = {"first_byte_s": 3.0, "idle_s": 1.0, "total_s": 5.0}
_PATIENCE_S = 30.0
_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def answers_of(rng: random.Random) -> bytes:
    """One answer."""
    kind = rng.random()
    if kind < 0.25:
        events = [rng.choice(_EVENTS) for _ in range(rng.randint(0, 6))]
        data = _STREAM + b"".join(b"%x\r\n%b\r\n" % (len(e), e) for e in events) + b"0\r\n\r\n"
    elif kind < 0.45:
        data = plain(mutated_json(rng, _DOCUMENT), rng.choice((b"200 OK", b"400 X", b"500 X")))
    elif kind < 0.6:
        data = _STREAM + chunked(rng)
    else:
        data = rng.choice(ANSWERS)
        data += rng.choice(ANSWERS) if rng.random() < 0.2 else b""
    if rng.random() < 0.5:
        data = mutated_head(rng, data)
    return mutated_bytes(rng, data) if rng.random() < 0.4 else data


class _Spoilt(RawInstance):
    """Answers POSTs with what is drawn."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split(b" ")[1].decode()
        if head.startswith(b"GET "):
            writer.write(b"".join(filter(None, self.answers[path])))
            return True
        length = next(x for x in head.split(b"\r\n") if x.startswith(b"content-length:"))
        await reader.readexactly(int(length[15:]))
        rng = self._rng
        data = answers_of(rng)
        for piece in pieces_of(data, cuts_of(rng, data) if rng.random() < 0.5 else []):
            writer.write(piece)
            await asyncio.sleep(0)
        await writer.drain()
        return rng.random() < 0.3  # or it closes


async def fuzz_answers(seed: int, count: int) -> Findings:
    """``count`` requests, each answered by an instance with something else."""
    findings, rng, numbers = Findings(), random.Random(seed), itertools.count()
    async with raw_instance(_Spoilt(rng)) as instance, raw_instance() as good:
        config = config_for(
            [],
            instances=[
                {"id": "spoilt", "base_url": instance.url, "model": "spoilt"},
                {"id": "good", "base_url": good.url, "model": "m"},
            ],
            timeouts=_TIMEOUTS,
            health={"probe_interval_s": 0.5, "unhealthy_after": 1000},
        )
        async with _gateway(config, findings) as running:

            async def one() -> None:
                stream = b"true" if next(numbers) % 2 else b"false"
                body = _BODY % stream
                head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
                await _exchange(
                    running.port,
                    head % len(body) + body,
                    findings,
                    patience_s=_PATIENCE_S,
                    allowed=range(200, 600),
                    ends=True,
                )

            await _repeat(one, count, running.port, findings)
    return findings
