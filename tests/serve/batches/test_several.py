"""Several gateways do a batch together; in virtual time and one process."""

import asyncio
from typing import Any

import pytest

from hetero_gateway.serve.batches import choosing, stores
from hetero_gateway.serve.batches.choosing import AskedThere
from hetero_gateway.serve.batches.folder import make_folder
from hetero_gateway.serve.batches.shared_ledger import Presence
from tests.fakes.running import eventually
from tests.fakes.vllm import FakeInstance
from tests.serve.batches.rigs import batch_rig, line
from tests.serve.batches.several import MemoryBlobs, MemoryStore, make_tables
from tests.serve.batches.test_running import ask_until


@pytest.fixture(autouse=True)
def _in_memory(tmp_path, monkeypatch):
    make_folder(tmp_path / "shared")
    make_tables(tmp_path / "shared")
    blobs = MemoryBlobs()

    def store_of(config: Any, _: Any) -> MemoryStore:
        return MemoryStore(tmp_path / "shared", blobs, config)

    monkeypatch.setattr(stores, "store_of", store_of)
    # Some 45 lines are out at a time.
    monkeypatch.setattr(choosing, "_MOST_BYTES", 8000)


def slow(count: int, seconds: float) -> list[dict[str, Any]]:
    return [line(i, fake={"first_delay_s": seconds}) for i in range(count)]


async def test_two_gateways_do_a_batch_together(tmp_path):
    async with (
        batch_rig(tmp_path, [FakeInstance()]) as a,
        batch_rig(tmp_path, [FakeInstance()]) as b,
    ):
        batch = await a.start(slow(160, 4))
        ended = await b.ended(batch.id)
        told = await a.lines_of(ended.output_file_id)
        assert sorted(each["custom_id"] for each in told) == sorted(f"c{i}" for i in range(160))
        asked = [fake.requests for each in (a, b) for fake in each.rig.fakes]
        assert (sum(asked), min(asked) > 20, ended.repeated_lines) == (160, True, 0)
        # It is cancelled at the one, and the other one hears of it.
        a.runner.choice.pick = b.runner.choice.pick = lambda *_: []
        batch = await a.start(slow(30, 0))
        await eventually(lambda: a.runner.running and b.runner.running)
        await b.openai.batches.cancel(batch.id)
        ended = await a.ended(batch.id)
        assert (ended.status, ended.request_counts.failed) == ("cancelled", 30)
        await eventually(lambda: not (a.runner.running or b.runner.running))


async def test_a_gateway_that_dies_leaves_its_lines_to_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(Presence, "end", lambda _: None)
    async with batch_rig(tmp_path, [FakeInstance()]) as b:
        async with batch_rig(tmp_path, [FakeInstance()]) as a:
            batch = await a.start(slow(120, 6))
            await eventually(lambda: a.runner.choice.out.total() and b.runner.choice.out.total())
            out = a.runner.choice.out.total()
            # What was answered and not written is lost with it.
            a.runner.keep_answers = _nothing
            await a.rig.running.gateway.batches.stop()
        ended = await b.ended(batch.id)
        told = await b.lines_of(ended.output_file_id)
        assert sorted(each["custom_id"] for each in told) == sorted(f"c{i}" for i in range(120))
        repeated = sum(each.get("repeated", False) for each in told)
        assert 0 < out == repeated == ended.repeated_lines


async def _nothing() -> None:
    pass


async def test_a_file_that_nobody_has_looked_at_is_looked_at_elsewhere(tmp_path):
    async with batch_rig(tmp_path, [FakeInstance()]) as b:
        async with batch_rig(tmp_path, [FakeInstance()]) as a:
            batches = a.rig.running.gateway.batches
            batches._look_at = lambda _: None
            batch = await a.start(slow(20, 0))
        assert (await b.ended(batch.id)).request_counts.completed == 20


async def test_lines_that_find_no_place_are_let_go(tmp_path):
    """One gateway's only machine is full for ever; the other one sends what it had fetched."""
    async with (
        batch_rig(tmp_path, [FakeInstance()]) as a,
        batch_rig(tmp_path, [FakeInstance()]) as b,
    ):
        b.runner.choice.pick = lambda *_: []
        batch = await b.start(slow(60, 1))
        ended = await a.ended(batch.id)
        assert (ended.request_counts.completed, ended.repeated_lines) == (60, 0)
        assert [fake.requests for fake in b.rig.fakes] == [0]


async def test_who_asks_another_gateway_is_given_way_to(tmp_path):
    """Over one machine: what one gateway is asked bounds the lines of both."""
    one = FakeInstance()
    async with batch_rig(tmp_path, [one]) as a, batch_rig(tmp_path, [one]) as b:
        over = asyncio.Event()
        asking = asyncio.create_task(ask_until(over, a))
        await asyncio.sleep(16)
        batch = await b.start(slow(150, 5))
        most = 0
        for _ in range(40):
            await asyncio.sleep(0.2)
            most = max(most, a.runner.choice.out.total() + b.runner.choice.out.total())
        over.set()
        await asking
        assert 0 < most < 40
        await b.openai.batches.cancel(batch.id)
        await b.ended(batch.id)


async def test_what_was_asked_before_a_gateway_was_heard_is_no_rate(tmp_path):
    async with batch_rig(tmp_path, [FakeInstance()]) as there:
        choice = there.runner.choice
        await eventually(lambda: choice.told())
        (url,) = choice.told()
        asked = AskedThere(3, 1000, 900, 90_000, 9000, 2)
        choice.hear({"other": {url: asked}})
        assert choice._with_others(url, choice._counts["i0"]).sent == choice._counts["i0"].sent
        choice.hear({"other": {url: asked._replace(sent=1010)}})
        told = choice._with_others(url, choice._counts["i0"])
        assert (told.sent - choice._counts["i0"].sent, told.there) == (10, 2)
        choice.hear({})
        assert choice._with_others(url, choice._counts["i0"]) == choice._counts["i0"]


async def test_what_others_do_of_a_batch_brings_its_end_nearer(tmp_path):
    lines = [line(i, fake={"first_delay_s": 1 if i < 40 else 10}) for i in range(150)]
    async with batch_rig(tmp_path, [FakeInstance()]) as there:
        runner, loop = there.runner, asyncio.get_running_loop()
        batch = await there.start(lines)
        await eventually(lambda: runner.answered["completed"] >= 40)
        (running,) = runner.running

        def ends_in_s() -> float:
            runner._foresee(loop.time())
            return runner._ends_s[running.batch.seq] - loop.time()

        alone_s, done_s = ends_in_s(), runner._pace.done_s
        (url,) = runner.choice.told()
        runner.choice.hear({"other": {url: AskedThere(20, 0, 0, 0, 0, 0)}})
        assert 0 < ends_in_s() < alone_s
        runner.note_elsewhere(40)
        assert runner._pace.done_s > done_s
        await there.openai.batches.cancel(batch.id)
        await there.ended(batch.id)
