"""What emulated engines tell of their caches, over ZMQ, and what a gateway knows by it."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from hetero_gateway.core.prefixes.sources import CacheSource
from hetero_gateway.core.types import InstanceId
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.gateway.fleet.kv_events import KvEventReaders
from hetero_gateway.lab.emulator.app import EmulatedVLLM
from hetero_gateway.lab.emulator.event_settings import KVEventsConfig
from hetero_gateway.lab.emulator.settings import EmulatorSettings
from hetero_gateway.serve.wiring.gateway import Gateway
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.emulated import emulated
from tests.fakes.running import CHAT, FAST, There, eventually, rig

pytestmark = pytest.mark.filterwarnings("ignore:.*add_reader.*")
ONE = InstanceId("i0")


def settings(**changes: Any) -> EmulatorSettings:
    events = {
        "enable_kv_cache_events": True, "endpoint": "tcp://*:0",
        "replay_endpoint": "tcp://127.0.0.1:0", "topic": "kv",
    }  # fmt: skip
    config = KVEventsConfig(**events | changes.pop("events", {}))
    return EmulatorSettings(
        load_profile(FAST), models=("m",), prompt_tokens_details=True, kv_events=config, **changes
    )


class Rig:
    """A gateway in front of one instance that tells, and one may go past it."""

    def __init__(self, gateway: Gateway, client: httpx.AsyncClient, engine: EmulatedVLLM) -> None:
        self.gateway = gateway
        self.client = client
        self.engine = engine
        self.direct = httpx.AsyncClient(base_url=engine_url(gateway), timeout=60)

    @property
    def readers(self) -> KvEventReaders:
        assert self.gateway.kv_events is not None
        return self.gateway.kv_events

    async def say(self, *messages: str, past: bool = False, **fields: Any) -> int:
        """A conversation's next turn; returns what was cached of it."""
        roles = ("user", "assistant")
        said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
        body = {"model": "m", "messages": said, "max_tokens": 8, **fields}
        answer = await (self.direct if past else self.client).post(CHAT, json=body)
        answer.raise_for_status()
        details = answer.json()["usage"]["prompt_tokens_details"]
        return int((details or {}).get("cached_tokens") or 0)

    def in_engine(self) -> set[int]:
        assert self.engine.events is not None
        return set(self.engine.events._keys.counts)

    def known(self) -> set[int]:
        blocks = self.gateway.fleet.instances[ONE].engine_blocks
        return set() if blocks is None else set(blocks.hashes())

    @property
    def source(self) -> CacheSource:
        caches = self.gateway.fleet.scheduler.caches
        assert caches is not None
        return caches.source(ONE)

    @property
    def kept_bytes(self) -> int:
        caches = self.gateway.fleet.scheduler.caches
        assert caches is not None
        return caches.index.bytes_on(ONE)[0]

    async def connected(self) -> None:
        """ZMQ connects in threads of its own: what is published before is heard by nobody."""
        assert self.engine.events is not None
        while not self.readers.counts["rejected"]:
            self.engine.events._sockets[0].send_multipart([b"kv"])
            await asyncio.sleep(0.01)

    async def agree(self) -> None:
        """What is known is what the engine has, to a block."""
        await eventually(lambda: self.known() == self.in_engine())


def engine_url(gateway: Gateway) -> str:
    return gateway.fleet.instances[ONE].config.base_url


@contextlib.asynccontextmanager
async def running(**changes: Any) -> AsyncIterator[Rig]:
    async with emulated(settings(**changes)) as (url, engine):
        async with rig([There(url)], profiles=(FAST,)) as made:
            it = Rig(made.running.gateway, made.client, engine)
            await eventually(lambda: it.source is CacheSource.EXACT)
            await it.connected()
            try:
                yield it
            finally:
                await it.direct.aclose()


def words(number: int, kilobytes: int = 2) -> str:
    return f"{number:08d}" * (128 * kilobytes)


async def test_after_each_turn_the_index_has_the_engine_s_blocks() -> None:
    async with running() as it:
        turns = [words(1), "fine", words(2), "good", words(3)]
        for count in (1, 3, 5):
            # The second turn goes past the gateway.
            await it.say(*turns[:count], past=count == 3)
            await it.agree()
        assert it.known()
        blocks = it.gateway.fleet.instances[ONE].engine_blocks
        assert blocks is not None
        await eventually(lambda: blocks.bound_keys >= 6)
        # What is sent again is found where it is thought to be.
        assert await it.say(*turns) > 1500
        assert await it.direct.post("/reset_prefix_cache")
        await it.agree()
        await eventually(lambda: it.kept_bytes == 0)


async def test_what_a_small_cache_lets_go_is_forgotten() -> None:
    async with running(num_gpu_blocks=150, max_model_len=2048) as it:
        for number in range(6):
            await it.say(words(number))
            await it.agree()
        index = it.gateway.fleet.scheduler.caches
        assert index is not None
        # Six texts of 2 KB are more than 192 blocks.
        assert it.readers.counts["removed"] > 0
        await eventually(lambda: it.kept_bytes <= 4 * 150 * 16)


@pytest.mark.parametrize("replay", [True, False])
async def test_what_was_missed_is_asked_for_or_nothing_is_believed(replay: bool) -> None:
    events = {} if replay else {"replay_endpoint": None}
    async with running(events=events) as it:
        publisher = it.engine.events
        assert publisher is not None
        await it.say(words(1))
        await it.agree()
        publisher.drops = True
        await it.say(words(2))
        publisher.drops = False
        await it.say(words(3))
        counts = it.readers.counts
        await eventually(lambda: counts["gaps"] == 1)
        if replay:
            await it.agree()
            assert counts["lost"] == 0
        else:
            await eventually(lambda: counts["lost"] == 1 and bool(it.known()))
            assert it.known() < it.in_engine()
            before = it.known()
            await it.say(words(4))
            await eventually(lambda: it.known() > before)
        assert it.source is CacheSource.EXACT


async def test_who_starts_late_hears_what_was_told_before() -> None:
    async with emulated(settings()) as (url, engine):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            chat = {"role": "user", "content": words(1)}
            body = {"model": "m", "messages": [chat], "max_tokens": 8}
            (await client.post(CHAT, json=body)).raise_for_status()
        async with rig([There(url)], profiles=(FAST,)) as made:
            it = Rig(made.running.gateway, made.client, engine)
            await it.agree()
            assert it.known()
            await it.direct.aclose()


async def test_numbers_that_begin_anew_are_another_engine() -> None:
    async with running() as it:
        publisher = it.engine.events
        assert publisher is not None
        await it.say(words(1))
        await it.say(words(2))
        await it.agree()
        publisher._number = 0
        publisher._kept.clear()
        publisher._keys.counts.clear()
        publisher._keys.changes = [(12345, True)]
        publisher.after_step()
        await eventually(lambda: it.readers.counts["restarts"] == 1)
        await eventually(lambda: it.known() == {12345})


async def test_what_came_with_a_replay_does_not_count_again() -> None:
    async with running() as it:
        publisher = it.engine.events
        assert publisher is not None
        await it.say(words(1))
        await it.say(words(2))
        await it.agree()
        number, payload = publisher._kept[0]
        publisher._sockets[0].send_multipart([b"kv", number.to_bytes(8, "big"), payload])
        await it.say(words(3))
        await it.agree()
        assert it.readers.counts["restarts"] == 0
        assert it.readers.counts["gaps"] == 0


async def test_who_was_out_of_sight_is_heard_from_its_beginning() -> None:
    async with running() as it:
        await it.say(words(1))
        await it.agree()
        known = it.known()
        it.gateway.fleet.forget_cache(ONE)
        assert not it.known()
        await it.say(words(2))
        await eventually(lambda: known < it.known())
        await it.agree()
        assert await it.say(words(1)) > 0
        await eventually(lambda: it.kept_bytes > 0)


async def test_a_publisher_that_stalls_is_not_relied_upon_until_it_goes_on() -> None:
    async with running() as it:
        publisher = it.engine.events
        assert publisher is not None
        await it.say(words(0))
        await it.agree()
        goes_on, publisher._publish = publisher._publish, lambda events: None
        for number in range(1, 10):
            await it.say(words(number))
        await eventually(lambda: it.source is CacheSource.OWN)
        # What was sent there is known all the same, as a placement is.
        assert it.kept_bytes > 9 * 2000
        publisher._publish = goes_on
        await it.say(words(20))
        await eventually(lambda: it.source is CacheSource.EXACT)


async def test_a_publisher_that_floods_fills_no_more_than_its_room() -> None:
    async with running(num_gpu_blocks=150, max_model_len=2048) as it:
        publisher = it.engine.events
        assert publisher is not None
        for number in range(200):
            hashes = list(range(100 * number, 100 * number + 100))
            told = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None}
            publisher._publish([told | {"block_size": 16, "session_id": f"{number}"}])
        await it.say(words(1))
        await eventually(lambda: it.readers.counts["stored"] >= 20_000)
        assert len(it.known()) <= 4 * 150
        assert it.source is CacheSource.EXACT
        # Nothing that it has made up has a text.
        assert it.kept_bytes <= 2 * 2048


async def test_what_makes_no_sense_is_left_out_and_a_client_s_session_stays() -> None:
    async with running() as it:
        publisher = it.engine.events
        assert publisher is not None
        socket = publisher._sockets[0]
        before = it.readers.counts["rejected"]
        socket.send_multipart([b"kv", b"short", b"x"])
        await eventually(lambda: it.readers.counts["rejected"] > before)
        before = it.readers.counts["rejected"]
        socket.send_multipart([b"kv", struct.pack(">q", publisher._number), b"\xc1"])
        publisher._number += 1
        await eventually(lambda: it.readers.counts["rejected"] > before)
        await it.say(words(1), session_id="mine")
        told = [msgspec.msgpack.decode(payload)[1] for _, payload in publisher._kept]
        assert {event["session_id"] for events in told for event in events} == {"mine"}
        await it.agree()


async def test_who_does_not_tell_is_as_before() -> None:
    async with emulated(EmulatorSettings(load_profile(FAST), models=("m",))) as (url, _):
        async with rig([There(url)], profiles=(FAST,)) as made:
            chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
            (await made.client.post(CHAT, json=chat)).raise_for_status()
            caches = made.running.gateway.fleet.scheduler.caches
            assert caches is not None
            assert caches.source(ONE) is CacheSource.OWN
            assert not list(made.running.gateway.kv_events or ())


async def test_events_are_heard_for_workers_too() -> None:
    async with emulated(settings()) as (url, engine):
        async with rig([There(url)], profiles=(FAST,), workers=2) as made:
            it = Rig(made.running.gateway, made.client, engine)
            await eventually(lambda: it.source is CacheSource.EXACT)
            fleets = [worker.fleet for worker in made.running.workers]
            await eventually(lambda: all(f.instances[ONE].names_prompts for f in fleets))
            await it.say(words(1))
            await it.agree()
            blocks = it.gateway.fleet.instances[ONE].engine_blocks
            assert blocks is not None
            await eventually(lambda: blocks.bound_keys == 2)
            await it.direct.aclose()
