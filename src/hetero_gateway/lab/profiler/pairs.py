"""``profile URL --pairs URL …``: how fast instances hand prompts over to each other.

For each ordered pair, prompts of two sizes are computed by one instance and then answered, with one
token, by the other. The second request's time is fitted as a start and a time per token, and the
time of a request of a few tokens there is subtracted from the start. So a start includes everything
that comes with a transfer; the gateway learns it in the same way from its own requests.
"""

import asyncio
import datetime
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetero_gateway.engines.vllm.kv_transfer import (
    CONNECTORS,
    NoHandover,
    Transfer,
    decode_body,
    prefill_body,
    read_answer,
)
from hetero_gateway.engines.vllm.paths import COMPLETIONS, METRICS
from hetero_gateway.errors import ConfigError, HeteroGatewayError
from hetero_gateway.lab.load.client import LoadTarget
from hetero_gateway.lab.profiler.engine import EngineClient, EngineFacts, Overrides, read_engine

# Sizes are multiples of every block size in use, up to practical prompt lengths.
_STEP_TOKENS, _MOST_TOKENS, _LEAST_TOKENS = 256, 8192, 1024
# Relative to the larger prompt: the smaller one is this much shorter.
_SHORTER = 8
# Part of the context left for tokens that engines add.
_SPARE_TOKENS = 64
# Tokens of a request with next to nothing to compute.
_FEW_TOKENS = 4
# Ids that every vocabulary has.
_IDS = (3, 250)
_FETCHED = "vllm:prompt_tokens_by_source_total{", 'source="external_kv_transfer"'
_MOVED = "vllm:nixl_bytes_transferred_sum{", ""


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """The result for one ordered pair, by base URLs.

    Args:
        start_s, tokens_per_s: of a transfer; None: they cannot, and ``refused`` says why.
        gbit_per_s: by the bytes that the engine counted; None: it counts none.
    """

    prefill: str
    decode: str
    start_s: float | None = None
    tokens_per_s: float | None = None
    gbit_per_s: float | None = None
    refused: str | None = None

    def row(self) -> dict[str, Any]:
        """Of the file."""
        told = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in told.items()
            if value is not None
        }


def document(pairs: Sequence[MeasuredPair], connector: str) -> dict[str, Any]:
    """The file's."""
    return {
        "connector": connector,
        "date": datetime.datetime.now(datetime.UTC).date(),
        "pairs": [pair.row() for pair in pairs],
    }


def link_of(
    small: tuple[int, Sequence[float]], large: tuple[int, Sequence[float]], few_s: float
) -> tuple[float, float]:
    """(start, s; tokens/s) from the times of requests of two sizes, and of a few tokens.

    Args:
        small, large: tokens, and seconds of each request.
    """
    (few, one), (many, other) = small, large
    small_s, large_s = statistics.median(one), statistics.median(other)
    per_token_s = (large_s - small_s) / (many - few)
    start_s = small_s - few_s - few * per_token_s
    if per_token_s <= 0 or start_s < 0:  # a line through 0
        start_s, per_token_s = 0.0, max(1e-12, (large_s - few_s) / many)
    return start_s, 1 / per_token_s


async def measure_pairs(
    targets: Sequence[LoadTarget],
    connector: str = "NixlConnector",
    *,
    model: str | None = None,
    passes: int = 3,
    seed: int = 0,
    watch: Callable[[str], None] = lambda _: None,
) -> list[MeasuredPair]:
    """All ordered pairs, one after the other; the instances must serve nobody else.

    Raises:
        ConfigError: a wrong model, key or connector, or a context too short to measure.
        HeteroGatewayError: an instance does not answer.
    """
    if CONNECTORS[connector].at_once:
        raise ConfigError(f"--connector: {connector} is not measured: its requests go at once")
    async with AsyncExitStack() as stack:
        ends = []
        for target in targets:
            client = await stack.enter_async_context(aclosing(EngineClient(target)))
            ends.append(_End(client, await read_engine(client, Overrides(model=model))))
        found = []
        for one, other in itertools.permutations(ends, 2):
            watch(f"{one.client.url} to {other.client.url}")
            if one.facts.model != other.facts.model:
                refused = f"it serves {other.facts.model}, not {one.facts.model}"
                pair = MeasuredPair(one.client.url, other.client.url, refused=refused)
            else:
                pair = await _Pair(one, other, connector, seed).measure(passes)
            found.append(pair)
        return found


@dataclass(frozen=True, slots=True)
class _End:
    client: EngineClient
    facts: EngineFacts

    async def total(self, series: tuple[str, str]) -> float | None:
        """The sum of a counter over its labels; None: there is none."""
        response = await self.client.get(METRICS)
        begins, label = series
        numbers = [
            float(line.rpartition(" ")[2])
            for line in response.text.splitlines()
            if line.startswith(begins) and label in line
        ]
        return sum(numbers) if numbers else None


class _Refused(Exception):
    """The two cannot hand over, and why."""


class _Pair:
    def __init__(self, one: _End, other: _End, connector: str, seed: int) -> None:
        self._one, self._other = one, other
        self._connector = CONNECTORS[connector]
        self._rng = np.random.default_rng((seed, time.time_ns()))  # no prompt is cached anywhere

    async def measure(self, passes: int) -> MeasuredPair:
        named = self._one.client.url, self._other.client.url
        facts = (self._one.facts, self._other.facts)
        room = min(min(each.max_model_len, each.kv_capacity_tokens) for each in facts)
        many = min(_MOST_TOKENS, (room - _SPARE_TOKENS) // _STEP_TOKENS * _STEP_TOKENS)
        if many < _LEAST_TOKENS:
            raise ConfigError(
                f"--pairs: prompts of {_LEAST_TOKENS} tokens are needed to tell a start from a "
                f"bandwidth; {named[0]} and {named[1]} hold {room}"
            )
        few = max(_STEP_TOKENS, many // _SHORTER // _STEP_TOKENS * _STEP_TOKENS)
        try:
            await self._hand_over(few)  # this includes the handshake
            before, moved = await self._other.total(_FETCHED), await self._other.total(_MOVED)
            taken_s: dict[int, list[float]] = {few: [], many: []}
            for _ in range(passes):
                for tokens, seconds in taken_s.items():
                    seconds.append(await self._hand_over(tokens))
            whole_s = [await self._whole() for _ in range(passes)]
            after, more = await self._other.total(_FETCHED), await self._other.total(_MOVED)
        except _Refused as error:
            return MeasuredPair(*named, refused=str(error))
        tokens = passes * (few + many)
        if before is not None and after is not None and after - before < tokens / 2:
            return MeasuredPair(*named, refused="it computed the prompts again")
        small, large = ((size, taken_s[size]) for size in (few, many))
        start_s, per_s = link_of(small, large, min(whole_s))
        gbit_per_s = None
        if moved is not None and more is not None and more > moved:
            gbit_per_s = per_s * (more - moved) / tokens * 8 / 1e9
        return MeasuredPair(*named, start_s, per_s, gbit_per_s)

    async def _hand_over(self, tokens: int) -> float:
        """One prompt; returns the time of the request that fetches it, s. Raises _Refused."""
        body = self._body(tokens)
        transfer = Transfer(f"pairs-{time.time_ns()}", self._one.facts.block_tokens)
        asked = prefill_body(COMPLETIONS, body, self._connector.for_prefill(transfer))
        status, answer, _ = await self._post(self._one, asked)
        if status != 200:
            raise HeteroGatewayError(f"{self._one.client.url}: answered {status} to a prompt")
        try:
            told = self._connector.for_decode(transfer, read_answer(COMPLETIONS, answer))
        except NoHandover as error:
            raise _Refused(f"{self._one.client.url} hands nothing over: {error}") from None
        status, _, took_s = await self._post(self._other, decode_body(body, told))
        if status != 200:
            raise _Refused(f"answered {status} in place of fetching a prompt")
        return took_s

    async def _whole(self) -> float:
        """The time of a request of a few tokens where prompts are fetched, s."""
        status, _, took_s = await self._post(self._other, self._body(_FEW_TOKENS))
        if status != 200:
            raise HeteroGatewayError(f"{self._other.client.url}: answered {status} to a prompt")
        return took_s

    def _body(self, tokens: int) -> bytes:
        ids = self._rng.integers(*_IDS, tokens).tolist()
        asked = {"model": self._one.facts.model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        return json.dumps(asked).encode()

    async def _post(self, end: _End, body: bytes) -> tuple[int, bytes, float]:
        began_s = time.perf_counter()
        response = await end.client.post(COMPLETIONS, body)
        took_s = time.perf_counter() - began_s
        await asyncio.sleep(0)
        return response.status_code, response.content, took_s
