"""``hetero-gateway batch`` against a gateway, and a file of ``vllm run-batch``."""

import asyncio
import json

import pytest

from hetero_gateway.cli import batch, main
from tests.fakes.running import eventually
from tests.serve.batches.rigs import batch_rig, jsonl, line


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(batch, "_LOOK_S", 0.02)


async def run(*words):
    return await asyncio.to_thread(main, ["batch", *map(str, words)])


def answers(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


async def interrupted(monkeypatch, *words):
    """What it ends with, by Ctrl-C once all is sent."""

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(batch, "_wait", interrupt)
        return await run(*words)


async def test_a_file_is_answered(tmp_path, capsys):
    requests, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    # As vllm's own example has them: two paths in one file.
    lines = [line(i) for i in range(5)]
    lines.append({"custom_id": "e", "method": "POST", "url": "/v1/embeddings",
                  "body": {"model": "m", "input": "a text"}})  # fmt: skip
    requests.write_bytes(jsonl(lines))
    async with batch_rig(tmp_path / "batches") as there:
        url = there.rig.running.url
        assert await run(requests, "-o", out, "--url", url) == 0
        assert sorted(a["custom_id"] for a in answers(out)) == ["c0", "c1", "c2", "c3", "c4", "e"]
        assert "completed: 6 of 6 requests answered" in capsys.readouterr().err
        assert not (tmp_path / "out.jsonl.batch").exists()
        assert await run(requests, "-o", out, "--url", url) == 2
        assert "exists already" in capsys.readouterr().err


async def test_what_was_begun_is_gone_on_with(tmp_path, capsys, monkeypatch):
    requests, out = tmp_path / "in.jsonl", tmp_path / "in.out.jsonl"
    requests.write_bytes(jsonl(line(i) for i in range(8)))

    async with batch_rig(tmp_path / "batches") as there:
        url = there.rig.running.url
        assert await interrupted(monkeypatch, requests, "--url", url) == 130
        assert "goes on" in capsys.readouterr().err
        await eventually(lambda: there.runner.answered["completed"] == 8)
        assert await run(requests, "--url", url) == 0
        assert len(answers(out)) == 8
        assert sum(fake.requests for fake in there.rig.fakes) == 8


async def test_what_fails_is_in_the_file_as_well(tmp_path, capsys):
    requests, out = tmp_path / "in.jsonl", tmp_path / "in.out.jsonl"
    refused = {"status": 400, "body": '{"error": {"message": "no"}}'}
    requests.write_bytes(jsonl([line(0), line(1, fake=refused)]))
    async with batch_rig(tmp_path / "batches") as there:
        assert await run(requests, "--url", there.rig.running.url) == 1
        assert {a["custom_id"]: a["response"]["status_code"] for a in answers(out)} == {
            "c0": 200, "c1": 400,
        }  # fmt: skip


async def test_a_batch_is_cancelled(tmp_path, monkeypatch, capsys):
    requests = tmp_path / "in.jsonl"
    requests.write_bytes(jsonl(line(i, fake={"first_delay_s": 3}) for i in range(2000)))

    async with batch_rig(tmp_path / "batches") as there:
        url = there.rig.running.url
        await interrupted(monkeypatch, requests, "--url", url)
        assert await run(requests, "--url", url, "--cancel") == 0
        assert await run(requests, "--url", url) == 1
        assert "cancelled" in capsys.readouterr().err


def test_bad_lines_are_said_before_anything_is_sent(tmp_path, capsys):
    requests = tmp_path / "in.jsonl"
    requests.write_text('{"custom_id": "a"}\n\nno json\n')
    assert main(["batch", str(requests)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [text.split(": ")[1] for text in said] == [f"{requests}:1", f"{requests}:3"]


def test_a_gateway_that_is_not_there_or_has_no_batches(tmp_path, capsys):
    requests = tmp_path / "in.jsonl"
    requests.write_bytes(jsonl([line(0)]))
    assert main(["batch", str(requests), "--url", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert main(["batch", str(requests), "--window", "soon"]) == 2
    assert main(["batch", str(tmp_path / "none.jsonl")]) == 2
