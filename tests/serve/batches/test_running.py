"""Lines beside other requests, and over the ends of a gateway."""

import asyncio
import os
import sqlite3
from typing import Any

import openai
import pytest

from hetero_gateway.serve.batches.ledger import Ledger
from tests.fakes.running import eventually
from tests.fakes.vllm import FakeInstance
from tests.serve.batches.rigs import BatchRig, batch_rig, jsonl, line
from tests.serve.batches.test_ends import OneGateway


async def test_a_gateway_that_ends_goes_on_where_it_was(tmp_path):
    fakes = [FakeInstance(), FakeInstance()]
    async with batch_rig(tmp_path / "batches", fakes) as there:
        lines = [line(i) for i in range(30)]
        lines += [line(i, fake={"first_delay_s": 10 if i % 2 else 0}) for i in range(30, 60)]
        batch = await there.start(lines)
        await eventually(lambda: there.runner.answered["completed"] >= 40)
        await there.rig.running.gateway.batches.stop()
    async with batch_rig(tmp_path / "batches", [FakeInstance(), FakeInstance()]) as there:
        ended = await there.ended(batch.id)
        assert ended.status == "completed"
        answers = await there.lines_of(ended.output_file_id)
        assert sorted(a["custom_id"] for a in answers) == sorted(f"c{i}" for i in range(60))
        repeated = [a for a in answers if a.get("repeated")]
        assert 0 < len(repeated) == ended.repeated_lines <= 20
        assert sum(fake.requests for fake in there.rig.fakes) == len(repeated)


async def test_a_batch_that_was_looked_at_is_looked_at_again(tmp_path):
    async with batch_rig(tmp_path / "batches", 1) as there:
        batch = await there.start([line(i) for i in range(20)])
        there.rig.running.gateway.batches.runner.stop()
    async with batch_rig(tmp_path / "batches", 1) as there:
        assert (await there.ended(batch.id)).request_counts.completed == 20


async def test_one_that_was_cancelled_before_it_was_looked_at_ends_cancelled(tmp_path):
    """Its gateway ended in between."""
    folder = OneGateway(tmp_path / "batches")
    file_id = folder.upload(jsonl(line(i) for i in range(5)))
    made, _ = folder.ledger.create("", file_id, None, ("24h", 86400.0), {})
    folder.ledger.cancel("", made["id"])
    folder.close()
    async with batch_rig(tmp_path / "batches", 1) as there:
        ended = await there.ended(made["id"])
        assert ended.status == "cancelled"
        errors = await there.lines_of(ended.error_file_id)
        assert sorted(each["custom_id"] for each in errors) == [f"c{i}" for i in range(5)]


async def test_a_disk_that_is_full_while_lines_are_looked_at_is_said(tmp_path, monkeypatch):
    real = Ledger.add_lines

    def full(*_: Any) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    async with batch_rig(tmp_path / "batches", 1) as there:
        monkeypatch.setattr(Ledger, "add_lines", full)
        batch = await there.start([line(i) for i in range(5)])
        batches = there.rig.running.gateway.batches
        await eventually(lambda: list(batches.alarms()))
        told = await there.openai.batches.retrieve(batch.id)
        assert (told.status, told.paused) == ("validating", "database or disk is full")
        monkeypatch.setattr(Ledger, "add_lines", real)
        assert (await there.ended(batch.id)).request_counts.completed == 5
        assert list(batches.alarms()) == []


async def ask_until(over: asyncio.Event, there: BatchRig) -> None:
    """Somebody who is no batch, five times a second."""
    while not over.is_set():
        await there.openai.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hello"}], max_tokens=16
        )
        await asyncio.sleep(0.2)


async def test_who_begins_beside_requests_leaves_them_their_machines(tmp_path):
    """What others ask is known before the first line goes."""
    async with batch_rig(tmp_path / "batches", 1) as there:
        over = asyncio.Event()
        asking = asyncio.create_task(ask_until(over, there))
        await asyncio.sleep(20)
        batch = await there.start([line(i, fake={"first_delay_s": 5}) for i in range(300)])
        most = 0
        for _ in range(40):
            await asyncio.sleep(0.1)
            most = max(most, there.runner.choice.out.total())
        assert 0 < most < 40
        over.set()
        await asking
        await there.openai.batches.cancel(batch.id)
        await there.ended(batch.id)


async def test_another_gateway_waits_for_the_folder(tmp_path):
    async with batch_rig(tmp_path / "batches", 1) as first:
        async with batch_rig(tmp_path / "batches", 1) as second:
            answer = await second.rig.client.get("/v1/batches")
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "batches_not_ready"
            batch = await first.start([line(i, fake={"first_delay_s": 3}) for i in range(300)])
            await eventually(lambda: first.runner.choice.out.total() > 5)
            out = first.runner.choice.out.total()
            # As a takeover has it: what is out is answered, and the other one goes on.
            first.rig.running.gateway.batches.drain()
            await eventually(lambda: second.rig.running.gateway.batches.runner is not None)
            answered = first.runner.answered["completed"]
            assert out <= answered < 300
            told = await second.ended(batch.id)
            assert (told.request_counts.completed, told.repeated_lines) == (300, 0)
            assert second.runner.answered["completed"] == 300 - answered


async def test_a_full_disk_pauses_and_loses_nothing(tmp_path, monkeypatch):
    real = os.pwrite

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    async with batch_rig(tmp_path / "batches") as there:
        monkeypatch.setattr(os, "pwrite", full)
        batch = await there.start([line(i) for i in range(50)])
        await eventually(lambda: there.runner.paused == "No space left on device")
        told = await there.openai.batches.retrieve(batch.id)
        assert (told.status, told.paused) == ("in_progress", "No space left on device")
        alarms = [text for _, text in there.rig.running.gateway.batches.alarms()]
        assert alarms == ["Batches are paused, nothing can be written: No space left on device."]
        assert "hetero_gateway_batches_paused 1.0" in await there.rig.running.metrics()
        sent = sum(fake.requests for fake in there.rig.fakes)
        await asyncio.sleep(10)
        assert sum(fake.requests for fake in there.rig.fakes) == sent
        monkeypatch.setattr(os, "pwrite", real)
        ended = await there.ended(batch.id)
        assert ended.request_counts.completed == 50
        assert sum(fake.requests for fake in there.rig.fakes) == 50


async def test_an_upload_to_a_full_disk_is_refused(tmp_path, monkeypatch):
    async with batch_rig(tmp_path / "batches", 1) as there:

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(openai.APIStatusError) as refused:
            await there.upload([line(0)])
        assert refused.value.status_code == 507
        monkeypatch.undo()
        assert list((tmp_path / "batches" / "files").iterdir()) == []


async def test_nothing_is_sent_while_requests_wait_and_nothing_waits_itself(tmp_path):
    one = FakeInstance()
    async with batch_rig(tmp_path / "batches", [one]) as there:
        scheduler = there.rig.running.gateway.fleet.scheduler
        batch = await there.start([line(i, fake={"first_delay_s": 1}) for i in range(400)])
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, scheduler.queued)
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        ended = await there.ended(batch.id)
        watching.cancel()
        assert ended.request_counts.completed == 400
        assert most == 0


async def test_lines_give_way_to_requests(tmp_path):
    """While somebody asks, the one instance has few lines; they are back when nobody does."""
    one = FakeInstance()
    async with batch_rig(tmp_path / "batches", [one]) as there:
        batch = await there.start([line(i, fake={"first_delay_s": 8}) for i in range(1200)])
        out = there.runner.choice.out
        await eventually(lambda: out.total() > 100)
        over = asyncio.Event()
        asking = asyncio.create_task(ask_until(over, there))
        await asyncio.sleep(20)
        beside = out.total()
        assert 0 < beside < 40
        over.set()
        await asking
        await asyncio.sleep(130)
        assert out.total() > 2 * beside
        await there.openai.batches.cancel(batch.id)
        await there.ended(batch.id)


async def test_with_workers_the_scheduler_process_has_the_files(tmp_path):
    """What a worker is asked goes there piece by piece, and back."""
    async with batch_rig(tmp_path / "batches", workers=2) as there:
        text = "x" * 3000
        lines = [line(i, text) for i in range(300)]
        batch = await there.start(lines)
        content = await there.openai.files.content(batch.input_file_id)
        assert content.content == jsonl(lines)
        ended = await there.ended(batch.id)
        assert ended.request_counts.completed == 300
        assert len(await there.lines_of(ended.output_file_id)) == 300
        with pytest.raises(openai.NotFoundError):
            await there.openai.files.content("file-none")
