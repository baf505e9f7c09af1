"""The access log: a line for each request, however it ended, and nothing of what clients wrote."""

import asyncio
import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_gateway.gateway.dataplane.access_log import LineWriter, pieces
from tests.fakes.running import CHAT, RunningGateway, chat, eventually, rig
from tests.fakes.vllm import fake_instances

PROMPT = "the-secret-of-this-prompt"
KEY = "sk-the-key-of-a-client"
ENGINE_KEY = "sk-the-key-of-an-engine"
JSON = {"log": {"format": "json"}}


def keep_lines(running: RunningGateway) -> list[bytes]:
    """Where the lines of all processes go from now on."""
    lines: list[bytes] = []
    for process in [running.gateway, *running.workers]:
        process.dataplane.write_about(process.config.log, lines.extend)
    return lines


async def lines_of(running: RunningGateway, lines: list[bytes], number: int) -> list[Any]:
    await eventually(lambda: len(lines) >= number)
    await eventually(running.settled)
    assert len(lines) == number
    return [json.loads(line) for line in lines]


async def break_off(client: httpx.AsyncClient, **options: Any) -> None:
    """A stream that its instance breaks off."""
    body = chat(PROMPT, stream=True, fake={"events": 9, "die": "after_events"})
    with pytest.raises(httpx.RemoteProtocolError):
        await client.post(CHAT, json=body, **options)


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_request_leaves_one_line_with_its_figures(workers: int) -> None:
    async with rig(workers=workers, **JSON) as (running, client, _):
        lines = keep_lines(running)
        body = chat(PROMPT, stream=True, fake={"events": 4})
        answer = await client.post(CHAT, json=body, headers={"x-request-id": "mine"})
        assert answer.status_code == 200
        (line,) = await lines_of(running, lines, 1)
    figures = {key: line.pop(key) for key in ("duration_s", "ttft_s", "overhead_s", "time")}
    assert line == {
        "kind": "access", "request_id": "mine", "method": "POST", "path": CHAT, "status": 200,
        "outcome": "completed", "reason": None, "key": None, "model": "m", "instance": "i0",
        "attempts": 1, "queue_wait_s": 0.0, "input_tokens": 10, "output_tokens": 4,
        "cached_tokens": None,
    }  # fmt: skip
    assert 0 < figures["overhead_s"] <= figures["ttft_s"] <= figures["duration_s"]


@pytest.mark.parametrize("workers", [1, 2])
async def test_however_a_request_ends_it_leaves_a_line(workers: int) -> None:
    async with rig(workers=workers, **JSON) as (running, client, _):
        lines = keep_lines(running)
        await client.post(CHAT, content=b"{")
        await client.post(CHAT, json={"model": PROMPT, "messages": []})
        await break_off(client)
        await client.post(CHAT, json=chat(PROMPT, fake={"status": 400}))
        slow = chat(PROMPT, stream=True, fake={"events": 9, "delay_s": 5})
        async with client.stream("POST", CHAT, json=slow) as answer:
            await anext(answer.aiter_raw())
        found = await lines_of(running, lines, 5)
    fields = ("status", "outcome", "reason", "model", "attempts")
    assert [tuple(line[field] for field in fields) for line in found] == [
        (400, "rejected", None, None, 0),
        (404, "rejected", None, "unknown", 0),
        (200, "upstream_error", "reset", "m", 1),
        (400, "client_error", None, "m", 1),
        (200, "client_disconnected", None, "m", 1),
    ]


async def test_attempts_are_counted_and_the_last_instance_is_named() -> None:
    retry = {"budget_min": 5, "max_attempts": 3}
    async with rig(2, retry=retry, **JSON) as (running, client, fakes):
        lines = keep_lines(running)
        await client.post(CHAT, json=chat(PROMPT, fake={"die": "before_head"}))
        # One dies, and the other answers.
        await fakes[0].kill()
        for _ in range(3):
            await client.post(CHAT, json=chat(PROMPT))
        found = await lines_of(running, lines, 4)
    assert (found[0]["status"], found[0]["attempts"], found[0]["reason"]) == (502, 2, "reset")
    assert [(line["instance"], line["status"]) for line in found[1:]] == [("i1", 200)] * 3


async def test_a_broken_stream_is_logged_also_without_an_access_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rig() as (_, client, _):
        await break_off(client, headers={"x-request-id": "broken-one"})
    (message,) = [r.getMessage() for r in caplog.records if "broken-one" in r.getMessage()]
    assert "its answer from i0 broke off" in message


@pytest.mark.parametrize("form", ["text", "json"])
async def test_no_line_has_a_prompt_or_a_key(
    form: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="hetero_gateway")
    monkeypatch.setenv("CLIENT_KEY", KEY)
    monkeypatch.setenv("ENGINE_KEY", ENGINE_KEY)
    async with fake_instances(1) as fakes:
        sections = {
            "log": {"format": form},
            "server": {"api_key_env": "CLIENT_KEY"},
            "instances": [{"id": "i0", "base_url": fakes[0].url, "api_key_env": "ENGINE_KEY"}],
        }
        async with rig(fakes, **sections) as (running, client, _):
            lines = keep_lines(running)
            headers = {"authorization": f"Bearer {KEY}", "x-request-id": f"id {PROMPT}"}
            await client.post(CHAT, json=chat(PROMPT), headers=headers)
            await client.post(CHAT, json=chat(PROMPT, model=PROMPT), headers=headers)
            await client.post(f"{CHAT}?key={KEY}", json=chat(PROMPT), headers=headers)
            await client.post(CHAT, content=PROMPT.encode(), headers=headers)
            await client.post(CHAT, json=chat(PROMPT), headers={"authorization": f"Bearer {KEY}x"})
            await break_off(client, headers=headers)
            await eventually(lambda: len(lines) >= 6)
    assert len(lines) == 6
    written = b"".join(lines).decode() + caplog.text
    for secret in (PROMPT, KEY, ENGINE_KEY):
        assert secret not in written


async def test_a_line_for_people_is_one_line_of_words() -> None:
    async with rig() as (running, client, _):
        lines = keep_lines(running)
        await client.post(CHAT, json=chat(PROMPT), headers={"x-request-id": "mine"})
        await eventually(lambda: len(lines) == 1)
    words = lines[0].decode().split()
    assert words[1:7] == ["access", "POST", CHAT, "200", "completed", "id=mine"]
    assert "instance=i0" in words
    assert lines[0].endswith(b"\n")
    assert lines[0].count(b"\n") == 1


async def test_switched_off_it_costs_no_object() -> None:
    async with rig(log={"access": False}) as (running, *_):
        assert keep_lines(running) == []
        assert running.gateway.dataplane.rooms.ended is None


async def test_a_reader_that_is_too_slow_holds_nobody_up() -> None:
    reading, writing = os.pipe()
    writer = LineWriter(writing)
    line = b"x" * 1000 + b"\n"
    try:
        for _ in range(2000):
            writer.write([line] * 10)
            await asyncio.sleep(0)
        assert writer.dropped > 0
    finally:
        os.close(reading)
        await asyncio.to_thread(writer.close)
        os.close(writing)


def test_lines_are_lost_while_the_disk_is_full_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, room = tmp_path / "log", [10, 3, 0, 0]
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if descriptor != file.fileno() or not room:
            return write(descriptor, data)
        if not (allowed := room.pop(0)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:allowed])

    monkeypatch.setattr(os, "write", full)
    with path.open("wb") as file:
        writer = LineWriter(file.fileno())
        for line in (b"123456789\n", b"torn line\n", b"lost\n", b"whole\n"):
            writer.write([line])
        writer.close()
    assert path.read_bytes() == b"123456789\ntor\nwhole\n"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("access log: No space left on device")
    assert said[1] == "access log: there is room again; 2 lines were lost"


def test_a_descriptor_that_cannot_be_written_to_is_none(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    with path.open("rb") as file, pytest.raises(OSError, match="Bad file descriptor"):
        LineWriter(file.fileno())


def test_lines_of_several_writers_come_whole() -> None:
    reading, writing = os.pipe()
    writers = [LineWriter(writing) for _ in range(4)]
    read = bytearray()

    def drain() -> None:
        while part := os.read(reading, 65536):
            read.extend(part)

    reader = threading.Thread(target=drain)
    reader.start()
    for turn in range(50):
        for number, writer in enumerate(writers):
            writer.write([b"%d" % number * (50 + turn * 7) + b"\n" for _ in range(20)])
    for writer in writers:
        writer.close()
    os.close(writing)
    reader.join()
    os.close(reading)
    lines = bytes(read).splitlines()
    assert len(lines) == 4 * 50 * 20 - sum(writer.dropped for writer in writers)
    assert all(len(set(line)) == 1 for line in lines)


def test_pieces_end_with_a_line_and_fit_into_a_pipe() -> None:
    lines = [b"%d\n" % i * 100 for i in range(300)]
    found = pieces(lines)
    assert b"".join(found) == b"".join(lines)
    assert all(piece.endswith(b"\n") and len(piece) <= 4096 for piece in found)
