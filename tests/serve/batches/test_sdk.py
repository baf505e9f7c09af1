"""The flow of OpenAI's SDK, unchanged, and what it says where something is wrong."""

import asyncio
from typing import Any

import openai
import pytest

from tests.fakes.running import CHAT, eventually
from tests.fakes.vllm import FakeInstance
from tests.gateway.admission.test_limits import entry, key_of, sections_with
from tests.serve.batches.rigs import BatchRig, batch_rig, jsonl, line


def counts(batch: Any) -> tuple[int, int, int]:
    told = batch.request_counts
    return told.total, told.completed, told.failed


async def test_files_go_up_and_batches_come_back(tmp_path):
    async with batch_rig(tmp_path / "batches") as there:
        lines = [line(i) for i in range(40)]
        file_id = await there.upload(lines)
        assert (await there.openai.files.content(file_id)).content == jsonl(lines)
        batch = await there.openai.batches.create(
            input_file_id=file_id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
        )
        assert (batch.object, batch.status) == ("batch", "validating")
        ended = await there.ended(batch.id)
        assert ended.status == "completed"
        assert counts(ended) == (40, 40, 0)
        assert ended.created_at <= ended.in_progress_at <= ended.finalizing_at <= ended.completed_at
        assert ended.expires_at == ended.created_at + 86400
        assert ended.metadata == {"a": "b"}
        assert ended.usage.total_tokens == 40 * 13
        answers = await there.lines_of(ended.output_file_id)
        assert sorted(a["custom_id"] for a in answers) == sorted(f"c{i}" for i in range(40))
        assert len({a["id"] for a in answers}) == len(
            {a["response"]["request_id"] for a in answers}
        )
        assert all(a["response"]["status_code"] == 200 for a in answers)
        assert all(a["response"]["body"]["object"] == "chat.completion" for a in answers)
        assert ended.error_file_id is None
        assert (await there.openai.batches.list()).data[0].id == batch.id
        file = await there.openai.files.retrieve(ended.output_file_id)
        assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
        # What was counted is what every other request is counted by.
        gateway = there.rig.running.gateway
        gateway.metrics.catch_up()
        assert gateway.metrics.classes["batch", "completed"] == 40
        await there.openai.files.delete(file_id)
        with pytest.raises(openai.NotFoundError):
            await there.openai.files.content(file_id)


async def test_every_bad_line_is_told_by_number_before_anything_runs(tmp_path):
    async with batch_rig(tmp_path / "batches") as there:
        bad: list[Any] = [line(0), line(1, url="/v1/embeddings"), line(0), line(3, stream=True)]
        bad += [line(4, model="other"), line(5, max_tokens=0), {"custom_id": "x"}]
        batch = await there.start(bad)
        ended = await there.ended(batch.id)
        assert ended.status == "failed"
        told = {each.line: each.code for each in ended.errors.data}
        assert told == {
            2: "mismatched_endpoint",
            3: "duplicate_custom_id",
            4: "stream_not_supported",
            5: "model_not_found",
            6: "invalid_value",
            7: "invalid_json_line",
        }
        assert [e["error"]["line"] for e in await there.lines_of(ended.error_file_id)]
        assert ended.output_file_id is None
        assert there.rig.fakes[0].requests == there.rig.fakes[1].requests == 0
        many = await there.start([line(i, stream=True) for i in range(1500)])
        ended = await there.ended(many.id)
        assert len(ended.errors.data) == 100
        lines = [e["error"]["line"] for e in await there.lines_of(ended.error_file_id)]
        assert lines == list(range(1, 1501))
        later = [line(i, url="/v1/responses", background=i > 0) for i in range(3)]
        ended = await there.ended((await there.start(later, endpoint="/v1/responses")).id)
        told = {each.line: each.code for each in ended.errors.data}
        assert told == {2: "background_not_supported", 3: "background_not_supported"}
        empty = await there.ended((await there.start([])).id)
        assert [each.code for each in empty.errors.data] == ["empty_file"]


async def test_what_engines_refuse_is_in_the_file_of_errors(tmp_path):
    async with batch_rig(tmp_path / "batches") as there:
        refused = {"status": 400, "body": '{"error": {"message": "no"}}'}
        broken = {"die_mid_body": True}
        lines = [line(0), line(1, fake=refused), line(2, fake=broken), line(3)]
        ended = await there.ended((await there.start(lines)).id)
        assert ended.status == "completed"
        assert counts(ended) == (4, 2, 2)
        errors = {e["custom_id"]: e for e in await there.lines_of(ended.error_file_id)}
        assert errors["c1"]["response"]["status_code"] == 400
        assert errors["c1"]["response"]["body"] == {"error": {"message": "no"}}
        assert errors["c2"]["response"]["status_code"] == 502
        assert len(await there.lines_of(ended.output_file_id)) == 2


async def test_an_answer_without_end_is_left(tmp_path):
    async with batch_rig(tmp_path / "batches", 1, server={"max_body_bytes": 100_000}) as there:
        endless = {"event_bytes": 300_000, "framing": "close"}
        ended = await there.ended((await there.start([line(0), line(1, fake=endless)])).id)
        assert counts(ended) == (2, 1, 1)
        (error,) = await there.lines_of(ended.error_file_id)
        assert error["response"]["body"]["error"]["message"] == "The answer broke off, 3 times."
        assert there.rig.fakes[0].requests == 4


async def test_a_busy_engine_and_one_that_dies_cost_no_line(tmp_path):
    fakes = [FakeInstance(), FakeInstance()]
    async with batch_rig(tmp_path / "batches", fakes) as there:
        for fake in fakes:
            fake.fault = {"status": 503, "head": "retry-after: 1\r\n"}
        batch = await there.start([line(i) for i in range(20)])
        await eventually(lambda: there.runner.answered["retried"] > 5)
        for fake in fakes:
            fake.fault = {}
        ended = await there.ended(batch.id)
        assert counts(ended) == (20, 20, 0)


async def test_other_endpoints(tmp_path):
    async with batch_rig(tmp_path / "batches") as there:
        for url, body in (
            ("/v1/embeddings", {"input": "a text"}),
            ("/v1/completions", {"prompt": "a text", "max_tokens": 4}),
            ("/v1/responses", {"input": "a text"}),
            ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
            ("/score", {"text_1": "a", "text_2": "b"}),
        ):
            each = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "m"} | body}
            ended = await there.ended((await there.start([each], endpoint=url)).id)
            assert counts(ended) == (1, 1, 0), url
        # A file of ``vllm run-batch`` may name several: an extension is to name none.
        both = [line(0), {"custom_id": "b", "url": "/v1/embeddings", "body": {"input": "b"}}]
        batch = await there.openai.post(
            "/batches", body={"input_file_id": await there.upload(both)}, cast_to=object
        )
        assert counts(await there.ended(batch["id"])) == (2, 2, 0)  # type: ignore[index]


async def test_a_batch_is_cancelled(tmp_path):
    async with batch_rig(tmp_path / "batches") as there:
        slow = [line(i, fake={"first_delay_s": 5}) for i in range(900)]
        batch = await there.start(slow)
        await eventually(lambda: there.runner.answered["completed"] > 0)
        with pytest.raises(openai.ConflictError):
            await there.openai.files.delete(batch.input_file_id)
        told = await there.openai.batches.cancel(batch.id)
        assert told.status == "cancelling"
        ended = await there.ended(batch.id)
        assert ended.status == "cancelled"
        assert ended.request_counts.completed > 0
        await exactly_once(there, ended, 900, "batch_cancelled")
        with pytest.raises(openai.ConflictError):
            await there.openai.batches.cancel(batch.id)


async def exactly_once(there: BatchRig, ended: Any, total: int, code: str) -> None:
    answers = await there.lines_of(ended.output_file_id)
    errors = await there.lines_of(ended.error_file_id)
    assert sorted(a["custom_id"] for a in answers + errors) == sorted(f"c{i}" for i in range(total))
    assert {e["error"]["code"] for e in errors} == {code}
    assert counts(ended) == (total, len(answers), len(errors))


async def test_a_window_is_over(tmp_path):
    async with batch_rig(tmp_path / "batches") as there:
        lines = [line(i, fake={"first_delay_s": 0.1}) for i in range(5)]
        lines += [line(i, fake={"hang": True}) for i in range(5, 700)]
        ended = await there.ended((await there.start(lines, window="4s")).id)
        assert ended.status == "expired"
        await exactly_once(there, ended, 700, "batch_expired")
        for fake in there.rig.fakes:
            fake.runs.set()


async def test_keys_see_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("ADMIN_KEY_9", "admin-secret-31415")
    keys = sections_with(tmp_path, entry("a"), entry("b", models=["other"]), groups={})
    async with batch_rig(tmp_path / "batches", 1, key=key_of("a"), **keys) as there:
        batch = await there.start([line(i) for i in range(3)])
        assert counts(await there.ended(batch.id)) == (3, 3, 0)
        assert (await there.rig.running.used_by("a"))["requests"] == 3
        other = there.openai.copy(api_key=key_of("b"))
        assert (await other.files.list()).data == []
        assert (await other.batches.list()).data == []
        ids = batch.id, batch.input_file_id
        for ask in (
            other.batches.retrieve(ids[0]), other.batches.cancel(ids[0]),
            other.files.retrieve(ids[1]), other.files.content(ids[1]), other.files.delete(ids[1]),
            other.batches.create(input_file_id=ids[1], endpoint=CHAT, completion_window="24h"),
        ):  # fmt: skip
            with pytest.raises(openai.NotFoundError):
                await ask
        with pytest.raises(openai.AuthenticationError):
            await there.openai.copy(api_key="nobody's").files.list()
        # What the key may not ask for, its lines may not.
        file = await other.files.create(file=("x", jsonl([line(0)])), purpose="batch")
        made = await other.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
        rig = there._replace(openai=other)
        ended = await rig.ended(made.id)
        assert [each.code for each in ended.errors.data] == ["model_not_allowed"]


async def test_half_of_a_keys_limits_is_left_to_its_other_requests(tmp_path, monkeypatch):
    monkeypatch.setenv("ADMIN_KEY_9", "admin-secret-31415")
    keys = sections_with(tmp_path, entry("a", requests_per_minute=20))
    async with batch_rig(tmp_path / "batches", 1, key=key_of("a"), **keys) as there:
        batch = await there.start([line(i) for i in range(12)])
        await eventually(lambda: there.rig.fakes[0].requests >= 10)
        await asyncio.sleep(5)
        assert there.rig.fakes[0].requests == 10
        chat: Any = {"model": "m", "messages": [{"role": "user", "content": "now"}]}
        await there.openai.chat.completions.create(**chat)
        assert counts(await there.ended(batch.id)) == (12, 12, 0)


async def test_uploads_in_parts(tmp_path):
    async with batch_rig(tmp_path / "batches", 1) as there:
        data = jsonl([line(i) for i in range(50)])
        upload = await there.openai.uploads.create(
            bytes=len(data), filename="in.jsonl", mime_type="application/jsonl", purpose="batch"
        )
        assert upload.status == "pending"
        cut = len(data) // 2
        second = await there.openai.uploads.parts.create(upload.id, data=data[cut:])
        first = await there.openai.uploads.parts.create(upload.id, data=data[:cut])
        with pytest.raises(openai.BadRequestError):
            await there.openai.uploads.complete(upload.id, part_ids=[first.id])
        done = await there.openai.uploads.complete(upload.id, part_ids=[first.id, second.id])
        assert done.status == "completed"
        assert done.file is not None
        assert (await there.openai.files.content(done.file.id)).content == data
        with pytest.raises(openai.BadRequestError):
            await there.openai.uploads.parts.create(upload.id, data=b"more")
        other = await there.openai.uploads.create(
            bytes=10, filename="x", mime_type="text/plain", purpose="batch"
        )
        await there.openai.uploads.parts.create(other.id, data=b"12345")
        assert (await there.openai.uploads.cancel(other.id)).status == "cancelled"
        files = tmp_path / "batches" / "files"
        assert [each.name for each in files.iterdir()] == [done.file.id]


async def test_quotas(tmp_path):
    limits = {"max_file_bytes": 5000, "max_key_bytes": 9000, "max_lines": 10, "max_key_batches": 1}
    async with batch_rig(tmp_path / "batches", 1, batches=limits) as there:
        with pytest.raises(openai.APIStatusError) as refused:
            await there.upload([line(0, "x" * 6000)])
        assert refused.value.status_code == 413
        await there.upload([line(0, "x" * 4600)])
        with pytest.raises(openai.RateLimitError, match="bytes"):
            await there.upload([line(0, "x" * 4600)])
        many = await there.ended((await there.start([line(i) for i in range(11)])).id)
        assert [each.code for each in many.errors.data] == ["too_many_lines"]
        held = await there.start([line(0, fake={"first_delay_s": 3})])
        with pytest.raises(openai.RateLimitError, match="batches"):
            await there.openai.batches.create(
                input_file_id=held.input_file_id, endpoint=CHAT, completion_window="24h"
            )
        assert (await there.ended(held.id)).status == "completed"
        files = tmp_path / "batches" / "files"
        assert not [each for each in files.iterdir() if each.stat().st_size > 5000]


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/batches", {"input_file_id": "file-none"}, 404),
        ("/batches", {"input_file_id": 1}, 400),
        ("/batches", {"input_file_id": "x", "endpoint": "/v1/files"}, 400),
        ("/batches", {"input_file_id": "x", "completion_window": "soon"}, 400),
        ("/batches", {"input_file_id": "x", "metadata": {"a": "b" * 600}}, 400),
        ("/uploads", {"filename": "x", "bytes": 10**15, "purpose": "batch"}, 413),
        ("/uploads", {"filename": "x", "bytes": -1, "purpose": "batch"}, 400),
        ("/uploads", {"filename": "x", "bytes": 1, "purpose": "fine-tune"}, 400),
        ("/uploads/upload_x/complete", {"part_ids": []}, 404),
        ("/files", {"a": 1}, 400),
    ],
)
async def test_what_cannot_be_is_said(tmp_path, path, body, code):
    async with batch_rig(tmp_path / "batches", 1) as there:
        answer = await there.rig.client.post(f"/v1{path}", json=body)
        assert answer.status_code == code
        assert answer.json()["error"]["message"]


async def test_forms_that_are_none(tmp_path):
    part = b'--b\r\ncontent-disposition: form-data; name="a"'
    file = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"'
    many = b"y" * 9000
    async with batch_rig(tmp_path / "batches", 1) as there:
        head = {"content-type": "multipart/form-data; boundary=b"}
        for body in (
            b"",
            b"--b",
            b"--b\r\n\r\n",
            part + b"\r\n\r\nx\r\n--b--",
            file + b"\r\n\r\nabc",
            b"--b\r\nx: " + many + b"\r\n\r\n\r\n--b--\r\n",
            part + b"\r\n\r\n" + many + b"\r\n--b--\r\n",
            2 * (file + b"\r\n\r\nabc\r\n") + b"--b--\r\n",
        ):
            answer = await there.rig.client.post("/v1/files", content=body, headers=head)
            assert answer.status_code == 400, body
        assert list((tmp_path / "batches" / "files").iterdir()) == []
