"""Sends one batch to a live engine behind a *gate*, so that all of it starts in one step.

docs/design/profiling.md explains it. A gate that was too short is noticed (the batch did not start
together), and the next one is longer.
"""

import asyncio
import secrets
import time
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from hetero_gateway.errors import ConfigError, HeteroGatewayError
from hetero_gateway.lab.load.client import LoadClient, Reply
from hetero_gateway.lab.profiler.grid import GridCell
from hetero_gateway.lab.profiler.tracks import Reading, Track, read_batch, track

# Ids that vocabularies have, clear of the special tokens at the low end: from the widest to what
# even a byte-level toy has. A wider range only makes equal prefixes rarer.
_TOKEN_RANGES = ((300, 1300), (3, 250), (1, 30))
# The gate is surely in its step this long after its headers.
_SETTLE_S = 0.005
_HEADERS_WITHIN_S = 0.25


@dataclass(frozen=True, slots=True)
class Dialect:
    """Which optional fields this engine accepts; found out once, by ``agree``."""

    token_range: int = 0
    salt: bool = True
    continuous_usage: bool = True
    usage: bool = True


@dataclass(frozen=True, slots=True)
class Shot:
    """One batch's measurement.

    Args:
        failure: the error of the first request that failed; None: all ended well.
        reading: None with a failure.
        gate_margin_s: from the last sending to the gate's token; at most 0: it came too late.
        client_cpu: this process's CPU seconds per second while the batch ran.
        prompt_tokens, output_tokens: of all its requests and the gate, as the engine counts
            them.
    """

    failure: str | None = None
    reading: Reading | None = None
    gate_margin_s: float = 0.0
    client_cpu: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0


class BatchSender:
    """Sends batches for one model over connections that stay open."""

    def __init__(self, client: LoadClient, model: str) -> None:
        self._client = client
        self._model = model
        self._rng = np.random.default_rng()  # new prompts in every run, even with the same seed
        self.dialect = Dialect()

    async def agree(self, prompt_tokens: int, output_tokens: int) -> Reading:
        """Send one small request; optional fields that the engine refuses are left out from now on.

        Raises:
            ConfigError: the engine refuses the request for another reason.
            HeteroGatewayError: it does not answer it.
        """
        while True:
            reply = _traced()
            await self._client.post(self._body(prompt_tokens, output_tokens), reply)
            if reply.status == 400:
                self.dialect = self._without(reply.tail.decode("utf-8", "replace"))
                continue
            found = _refused(reply) or track(reply, prompt_tokens)
            if isinstance(found, str):
                raise HeteroGatewayError(f"the engine does not complete a small request: {found}")
            return read_batch([found], reply.sent_s)

    async def one(self, prompt_tokens: int, output_tokens: int) -> tuple[float, Track]:
        """One streamed request: when it was sent, and its tokens.

        Raises:
            HeteroGatewayError: the engine does not complete it.
        """
        reply = _traced()
        await self._client.post(self._body(prompt_tokens, output_tokens), reply)
        found = _refused(reply) or track(reply, prompt_tokens)
        if isinstance(found, str):
            raise HeteroGatewayError(f"the engine does not complete a small request: {found}")
        return reply.sent_s, found

    async def measure(self, cell: GridCell, gate_tokens: int) -> Shot:
        """Send the gate, then the batch, and wait for all of it."""
        gate_body = self._body(gate_tokens, 1)
        bodies = [
            self._body(cell.prompt_tokens, cell.output_tokens) for _ in range(cell.batch_size)
        ]
        await self._client.warm(cell.batch_size + 1)
        gate = _traced()
        replies = [_traced() for _ in bodies]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._client.post(gate_body, gate))
            await _in_its_step(gate)
            began_cpu_s, began_s = time.process_time(), time.perf_counter()
            for body, reply in zip(bodies, replies, strict=True):
                tasks.create_task(self._client.post(body, reply))
        cpu_s, span_s = time.process_time() - began_cpu_s, time.perf_counter() - began_s
        if (failure := next(filter(None, map(_refused, (gate, *replies))), None)) is not None:
            return Shot(failure)
        tracks: list[Track] = []
        for found in (
            track(gate, gate_tokens),
            *(track(reply, cell.prompt_tokens) for reply in replies),
        ):
            if isinstance(found, str):
                return Shot(found)
            tracks.append(found)
        start_s = tracks[0].first_s
        return Shot(
            reading=read_batch(tracks[1:], start_s),
            gate_margin_s=start_s - max(reply.sent_s for reply in replies),
            client_cpu=cpu_s / span_s if span_s else 0.0,
            prompt_tokens=sum(t.prompt_tokens for t in tracks),
            output_tokens=sum(t.output_tokens for t in tracks),
        )

    def _body(self, prompt_tokens: int, output_tokens: int) -> bytes:
        low, high = _TOKEN_RANGES[self.dialect.token_range]
        document: dict[str, Any] = {
            "model": self._model,
            "prompt": self._rng.integers(low, high, prompt_tokens).tolist(),
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        if self.dialect.usage:
            document["stream_options"] = {"include_usage": True}
            if self.dialect.continuous_usage:
                document["stream_options"]["continuous_usage_stats"] = True
        if self.dialect.salt:
            document["cache_salt"] = secrets.token_hex(8)
        return msgspec.json.encode(document)

    def _without(self, text: str) -> Dialect:
        """The dialect without the field named in the 400. Raises ConfigError if none is."""
        d, lower = self.dialect, text.lower()
        if d.salt and "cache_salt" in lower:
            return replace(d, salt=False)
        if d.continuous_usage and "continuous_usage" in lower:
            return replace(d, continuous_usage=False)
        if d.usage and "stream_options" in lower:
            return replace(d, usage=False, continuous_usage=False)
        vocabulary = "vocab" in lower or "token id" in lower
        if vocabulary and d.token_range + 1 < len(_TOKEN_RANGES):
            return replace(d, token_range=d.token_range + 1)
        raise ConfigError(f"the engine refuses the request: {_message(text)}")


def _traced() -> Reply:
    return Reply(0.0, parts=[])


async def _in_its_step(gate: Reply) -> None:
    """Wait until the gate is in the engine: its headers have come, and a moment has passed."""
    give_up_s = time.perf_counter() + _HEADERS_WITHIN_S
    # Polled: the client's protocol notes headers, but signals only the end.
    while not gate.status and gate.failure is None and time.perf_counter() < give_up_s:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await asyncio.sleep(_SETTLE_S)


def _refused(reply: Reply) -> str | None:
    """The error of a reply that is not 200; None if it is."""
    if reply.failure is not None:
        return reply.failure
    if reply.status != 200:
        return f"{reply.status}: {_message(reply.tail.decode('utf-8', 'replace'))}"
    return None


def _message(text: str) -> str:
    """The message in an error body, or the start of its text, in one line."""
    try:
        error = msgspec.json.decode(text)["error"]
        text = error if isinstance(error, str) else str(error["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        pass
    return " ".join(text.split())[:200]
