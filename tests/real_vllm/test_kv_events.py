"""What a real engine tells of its prefix cache, and what a gateway knows by it: the same blocks.

A third server, that publishes KV events and has little room, behind a gateway of the test's own.
What it has told since its start is asked for again, past the gateway, and applied by the plainest
rules; after whatever happens, the gateway knows those blocks and no others.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio
from real_vllm.cluster import PATIENCE_S, Cluster
from real_vllm.servers import Server, engine, load_server

from benchmarks.ports import free_port
from hetero_gateway.core.prefixes.sources import CacheSource
from hetero_gateway.core.types import InstanceId
from hetero_gateway.gateway.fleet import kv_events
from tests.fakes.running import CHAT, RunningGateway, config_for, eventually, running_gateway
from tests.real_vllm.test_prefix_caches import words

pytestmark = pytest.mark.real_vllm

ONE = InstanceId("i0")
PROFILE = Path(__file__).resolve().parents[2] / "scripts" / "real_vllm" / "profiles" / "small.yaml"
# Of 128 tokens; one sequence may take 32.
BLOCKS, BLOCK_TOKENS = 48, 128
# A key may be off by so many.
MOST_OFF = 2 * BLOCK_TOKENS
_END = (-1).to_bytes(8, "big", signed=True)
_NUMBERS = itertools.count(time.time_ns())


@dataclasses.dataclass
class Telling:
    """An engine that tells."""

    server: Server
    port: int
    replay_port: int

    async def blocks(self) -> Counter[int]:
        """How often it has each block, by all that it has told since its start."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        found: Counter[int] = Counter()
        try:
            socket.connect(f"tcp://127.0.0.1:{self.replay_port}")
            await socket.send_multipart([b"", bytes(8)])
            for due in itertools.count():
                async with asyncio.timeout(PATIENCE_S):
                    _, _, number, payload = await socket.recv_multipart()
                if number == _END:
                    return +found
                assert int.from_bytes(number, "big") == due
                for event in msgspec.msgpack.decode(payload)[1]:
                    _apply(event, found)
        finally:
            socket.close(linger=0)
            context.destroy(linger=0)
        raise AssertionError


def _apply(event: dict[str, Any], found: Counter[int]) -> None:
    if event["type"] == "BlockStored":
        found.update(event["block_hashes"])
    elif event["type"] == "BlockRemoved":
        found.subtract(event["block_hashes"])
        assert min(found[each] for each in event["block_hashes"]) >= 0
    else:
        assert event["type"] == "AllBlocksCleared"
        found.clear()


@pytest.fixture(scope="module")
def telling(servers: Cluster) -> Iterator[Telling]:
    with engine_that_tells(servers, "telling", free_port(), free_port()) as made:
        yield made


@contextlib.contextmanager
def engine_that_tells(
    cluster: Cluster, name: str, port: int, replay_port: int, *more: str, **env: str
) -> Iterator[Telling]:
    """A server of the small model with few blocks, that publishes on these ports."""
    directory = Path(cluster.gateway.directory)
    first = load_server(directory / "small.json")
    python, model = Path(first.argv[3]), Path(first.argv[first.argv.index("--model") + 1])
    made = engine("small", directory, python, model, 0)
    if more:  # it may want as many as there are
        made.argv[2] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    events = {
        "enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv",
        "endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://127.0.0.1:{replay_port}",
    }  # fmt: skip
    at = made.argv.index("--host")
    options = ["--kv-events-config", json.dumps(events), "--enable-prompt-tokens-details"]
    options += ["--num-gpu-blocks-override", str(BLOCKS), *more]
    server = dataclasses.replace(
        made,
        id=name,
        argv=[*made.argv[:at], *options, *made.argv[at:]],
        env=made.env | {"VLLM_SERVER_DEV_MODE": "1"} | env,  # so that it can be reset
    )
    try:
        server.log.unlink(missing_ok=True)
        server.start()
        server.wait_ready()
        yield Telling(server, port, replay_port)
    finally:
        server.stop()
        (directory / f"{name}.json").unlink(missing_ok=True)


@dataclasses.dataclass
class Rig:
    """A gateway in front of it, and clients of both."""

    telling: Telling
    running: RunningGateway
    client: httpx.AsyncClient
    direct: httpx.AsyncClient
    heard: list[Any]  # sockets that hear what is published

    @property
    def readers(self) -> kv_events.KvEventReaders:
        assert self.running.gateway.kv_events is not None
        return self.running.gateway.kv_events

    def known(self) -> set[int]:
        blocks = self.running.gateway.fleet.instances[ONE].engine_blocks
        return set() if blocks is None else set(blocks.hashes())

    @property
    def is_exact(self) -> bool:
        caches = self.running.gateway.fleet.scheduler.caches
        assert caches is not None
        return caches.source(ONE) is CacheSource.EXACT

    @property
    def index_bytes(self) -> int:
        caches = self.running.gateway.fleet.scheduler.caches
        assert caches is not None
        return caches.index.bytes_on(ONE)[0]

    async def agree(self) -> Counter[int]:
        """What is known is what the engine has; returns that."""
        until_s = time.monotonic() + 60
        while True:
            there = await self.telling.blocks()
            known = self.known()
            if known == set(there) or time.monotonic() > until_s:
                break
            await asyncio.sleep(0.1)
        assert known == set(there), f"{len(known - set(there))} too many, of {len(there)}"
        assert there.total() < BLOCKS
        return there

    async def expected(self) -> float:
        """Which share of its prompt the last request was thought to find."""
        answer = await self.client.get("/admin/decisions", params={"limit": 1})
        decision = answer.raise_for_status().json()["decisions"][0]
        (row,) = decision["candidates"]
        found = (row.get("prefix") or {}).get("match_tokens") or 0.0
        return float(found) / decision["prompt_tokens"]


class Talk:
    """A conversation; ``past``: the turn does not go through the gateway."""

    def __init__(self, rig: Rig, count: int = 500) -> None:
        self.rig = rig
        self.count = count
        self.messages: list[dict[str, str]] = []

    async def turn(self, *, past: bool = False) -> tuple[int, float]:
        """Tokens that were cached, and that were thought to be."""
        text = words(self.count, next(_NUMBERS))
        self.messages.append({"role": "user", "content": text})
        cached, expected = await self.again(past=past)
        return cached, expected

    async def again(self, *, past: bool = False) -> tuple[int, float]:
        body = {"model": "tiny", "messages": self.messages, "max_tokens": 4, "temperature": 0}
        answer = await (self.rig.direct if past else self.rig.client).post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        document = answer.json()
        if not past:
            assert answer.headers["x-hetero-gateway-instance"] == ONE
        said = document["choices"][0]["message"]["content"] or ""
        self.messages = [*self.messages, {"role": "assistant", "content": said}]
        usage = document["usage"]
        cached = int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)
        return cached, 0.0 if past else usage["prompt_tokens"] * await self.rig.expected()

    def repeat(self) -> "Talk":
        """The same up to its last question."""
        other = Talk(self.rig, self.count)
        other.messages = self.messages[:-1]
        return other


@pytest.fixture
async def rig(telling: Telling, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    heard: list[Any] = []
    plain = kv_events._set_up

    def set_up(socket: Any) -> None:
        plain(socket)
        if socket.type == zmq.SUB:
            heard.append(socket)

    monkeypatch.setattr(kv_events, "_set_up", set_up)
    async with contextlib.AsyncExitStack() as stack:
        config = config_for([Addressed(telling.server.base_url)], profiles=(str(PROFILE),))
        running = await stack.enter_async_context(running_gateway(config))
        client = httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S)
        await stack.enter_async_context(client)
        direct = httpx.AsyncClient(base_url=telling.server.base_url, timeout=PATIENCE_S)
        await stack.enter_async_context(direct)
        made = Rig(telling, running, client, direct, heard)
        await eventually(lambda: made.is_exact)
        await made.agree()
        yield made
        await eventually(running.settled)


@dataclasses.dataclass
class Addressed:
    url: str


async def test_after_each_turn_the_index_has_the_engine_s_blocks(rig: Rig, figure: Any) -> None:
    off = []
    # Through the gateway; the second turn past it; the first two past it.
    for past in ((), (1,), (0, 1)):
        talk = Talk(rig)
        for turn in range(3):
            before = len(await rig.agree())
            cached, expected = await talk.turn(past=turn in past)
            assert len(await rig.agree()) > before
            if turn and turn not in past and turn - 1 not in past:
                off.append(expected - cached)
                assert cached > 0
        # All of its chain is known now, whoever computed it.
        cached, expected = await talk.repeat().again()
        off.append(expected - cached)
        assert cached > 1000
    assert max(map(abs, off)) <= MOST_OFF
    there = await rig.agree()
    figure(
        f"KV events, 3 conversations of 3 turns, 3 turns past the gateway: {len(there)} blocks, "
        f"all known after each turn; thought to be cached less what was: {sorted(map(int, off))} "
        "tokens"
    )


async def test_what_a_small_pool_lets_go_is_forgotten(rig: Rig, figure: Any) -> None:
    first = Talk(rig, 300)
    await first.turn()
    removed = rig.readers.counts["removed"]
    for _ in range(12):
        talk = Talk(rig, 700)
        await talk.turn()
        # At the same time, and once more.
        both = [talk.repeat() for _ in range(2)]
        await asyncio.gather(*(each.again() for each in both))
        await rig.agree()
    assert rig.readers.counts["removed"] > removed
    cached, expected = await first.repeat().again()
    assert cached == 0
    assert expected == 0
    await rig.agree()
    gone = rig.readers.counts["removed"] - removed
    figure(f"KV events, a pool of {BLOCKS} blocks: {gone} removed, known after each turn")


async def test_equal_answers_are_there_twice_until_both_are_gone(rig: Rig, figure: Any) -> None:
    (await rig.direct.post("/reset_prefix_cache")).raise_for_status()
    body = {
        "model": "tiny", "prompt": words(100, "equal"), "max_tokens": 300, "ignore_eos": True,
        "temperature": 0,
    }  # fmt: skip
    for _ in range(2):
        answer = await rig.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
    there = await rig.agree()
    twice = [each for each, count in there.items() if count > 1]
    assert twice
    seen = set()
    while seen < set(twice):
        talk = Talk(rig, 900)
        await talk.turn()
        there = await rig.agree()
        seen |= {each for each in twice if not there[each]}
    figure(f"KV events, one answer given twice: {len(twice)} blocks twice, known until both went")


@pytest.mark.parametrize("past", [False, True])
async def test_what_was_missed_is_asked_for(rig: Rig, past: bool) -> None:
    talk = Talk(rig, 400)
    await talk.turn()
    before = await rig.agree()
    gaps, socket = rig.readers.counts["gaps"], rig.heard[-1]
    address = f"tcp://127.0.0.1:{rig.telling.port}"
    socket.disconnect(address)
    await talk.turn(past=past)
    assert set(await rig.telling.blocks()) - set(before)
    assert rig.known() == set(before)
    socket.connect(address)
    await asyncio.sleep(1)
    await talk.turn()
    await rig.agree()
    assert rig.readers.counts["gaps"] == gaps + 1
    assert rig.readers.counts["lost"] == 0
    cached, expected = await talk.repeat().again()
    assert abs(expected - cached) <= MOST_OFF


async def test_a_reset_cache_is_empty(rig: Rig) -> None:
    """It is told with what the engine computes next."""
    talk = Talk(rig)
    await talk.turn()
    before = await rig.agree()
    assert before
    assert rig.index_bytes > 0
    (await rig.direct.post("/reset_prefix_cache")).raise_for_status()
    await Talk(rig, 300).turn(past=True)
    there = await rig.agree()
    assert there
    assert not set(there) & set(before)
    await eventually(lambda: rig.index_bytes == 0)
    cached, expected = await talk.repeat().again()
    assert cached == expected == 0
    await rig.agree()


async def test_a_restarted_engine_is_known_from_its_start(rig: Rig) -> None:
    """Also what it has computed before the gateway has seen that it is another one."""
    talk = Talk(rig)
    await talk.turn()
    assert await rig.agree()
    server = rig.telling.server
    await asyncio.to_thread(server.kill)
    await eventually(lambda: not rig.running.gateway.fleet.instances[ONE].up)
    assert rig.index_bytes == 0
    server.start()
    await asyncio.to_thread(server.wait_ready)
    for _ in range(3):
        await Talk(rig, 300).turn(past=True)
    assert len(await rig.agree()) > 3
    await eventually(lambda: rig.running.gateway.fleet.instances[ONE].up)
    cached, _ = await talk.repeat().again()
    assert cached == 0
    await rig.agree()
    cached, expected = await talk.repeat().again()
    assert cached > 0
    assert abs(expected - cached) <= MOST_OFF
    assert rig.is_exact
