"""``serve --record``: a line for each request, none of its text, and no harm when disks fail."""

import asyncio
from pathlib import Path

import httpx
import pytest

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.recorded_run import RequestLine, read_recorded_run
from hetero_gateway.gateway.dataplane import recording
from hetero_gateway.gateway.dataplane.recording import RunFile
from tests.fakes.running import CHAT, FAST, config_for, running_gateway
from tests.fakes.vllm import fake_instances

SECRET = "the secret word"


def chat(**options: object) -> dict[str, object]:
    messages = [{"role": "user", "content": SECRET}]
    return {"model": "m", "messages": messages, "stream": True, "max_tokens": 50, **options}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("policy", ["finish-time", "min-max"])
async def test_lengths_times_and_placements_are_kept(tmp_path: Path, workers: int, policy: str):
    path = tmp_path / "run.jsonl"
    async with fake_instances(2) as fakes:
        config = config_for(fakes, profiles=(FAST,), scheduler={"policy": policy})
        async with running_gateway(config, workers=workers, record=path) as running:
            for url in {f"http://127.0.0.1:{port}" for port in running.ports}:
                async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                    for fake in ({"events": 7}, {"events": 4}, {"status": 400}):
                        await client.post(CHAT, json=chat(fake=fake))
                    await client.post(CHAT, json=chat(stream=False))
                    unknown = await client.post(CHAT, json=chat(model="nope"))
                    assert unknown.status_code == 404
    text = path.read_text(encoding="utf-8")
    assert SECRET not in text
    run = read_recorded_run(path)
    assert run.policy == policy
    assert len(run.requests) == 5 * workers
    by_outcome: dict[str, list[RequestLine]] = {}
    for line in run.requests:
        by_outcome.setdefault(line.outcome, []).append(line)
    assert {name: len(lines) // workers for name, lines in by_outcome.items()} == {
        "completed": 3, "client_error": 1, "rejected": 1,
    }  # fmt: skip
    completed = by_outcome["completed"]
    assert sorted(line.out for line in completed) == sorted([3, 4, 7] * workers)
    assert {line.instance for line in completed} <= {"i0", "i1"}
    for line in completed:
        assert line.limit == 50
        assert 0 <= line.at <= line.placed <= line.first <= line.end
        assert line.predicted >= 1
    assert {line.stream for line in completed} == {True, False}
    assert run.instances[completed[0].instance].profile is not None
    assert path.stat().st_mode & 0o077 == 0


async def test_who_leaves_is_recorded_as_gone(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    async with fake_instances(1) as fakes:
        async with running_gateway(config_for(fakes), record=path) as running:
            async with httpx.AsyncClient(base_url=running.url) as client:
                body = chat(fake={"events": 1000, "delay_s": 0.05})
                async with client.stream("POST", CHAT, json=body) as answer:
                    await anext(answer.aiter_bytes())
            await asyncio.sleep(0.1)
    (line,) = read_recorded_run(path).requests
    assert line.outcome == "client_disconnected"


def test_what_is_too_much_is_left_out_and_counted(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(recording, "MOST_REQUESTS", 3)
    path = tmp_path / "run.jsonl"
    run = RunFile(path, "min-max")
    for i in range(10):
        run.add(RequestLine(float(i), "m", 5, 0, 5.0, "rejected"))
    run.close()
    run.close()
    found = read_recorded_run(path)
    assert (len(found.requests), found.left_out) == (3, 7)


def test_a_disk_that_fails_ends_the_recording_alone(caplog):
    run = RunFile(Path("/dev/full"), "min-max")
    run.add(RequestLine(0.0, "m", 5, 0, 5.0, "rejected"))
    run.close()
    assert "recording has stopped" in caplog.text
    run.add(RequestLine(0.0, "m", 5, 0, 5.0, "rejected"))


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere"):
        RunFile(tmp_path / "nowhere" / "run.jsonl", "min-max")
