"""status and explain against a running gateway: what they print, and how they fail."""

import asyncio
import json

import httpx
import pytest

from hetero_gateway.cli import main
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.running import FAST, config_for, eventually, running_gateway
from tests.fakes.vllm import fake_instances

QUESTION = ("--prompt-tokens", "800", "--max-tokens", "200")
NOBODY = "http://127.0.0.1:1"


async def run(*argv: str) -> int:
    """The exit code; the command blocks, and the gateway lives in this thread's loop."""
    try:
        return await asyncio.to_thread(main, argv)
    except SystemExit as usage:
        return int(usage.code or 0)


async def test_status_shows_a_row_per_instance(capsys):
    async with fake_instances(2) as fakes:
        config = config_for(fakes, profiles=(FAST, None))
        async with running_gateway(config) as running, httpx.AsyncClient() as client:
            await fakes[1].kill()
            instances = running.gateway.fleet.instances
            await eventually(lambda: [i.up for i in instances.values()] == [True, False])
            await client.post(f"{running.url}/tokenize", json={"prompt": "x"})
            assert await run("status", running.url) == 0
            lines = capsys.readouterr().out.splitlines()
            assert lines[0] == "policy finish-time, 1 of 2 instances take requests; 0 wait"
            assert lines[1].split()[:2] == ["INSTANCE", "STATE"]
            assert lines[2].split()[:2] == ["i0", "up"]
            assert "100.0%" in lines[2]
            assert FAST in lines[2]
            assert lines[3].split()[:2] == ["i1", "down"]
            assert "unprofiled" in lines[3]
            assert lines[4].startswith("i1 is down: ")
            assert await run("status", running.url, "--json") == 0
            document = json.loads(capsys.readouterr().out)
            assert [row["id"] for row in document["instances"]] == ["i0", "i1"]


async def test_explain_shows_the_candidates_and_the_reason(capsys):
    async with fake_instances(2) as fakes, running_gateway(config_for(fakes)) as running:
        assert await run("explain", running.url, *QUESTION) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("i0 would get it: done in ")
        assert "800 prompt tokens, 200 output tokens predicted" in lines[1]
        columns = ["TTFT", "LATENCY", "DELAY", "MEMORY", "LATE", "SLO", "COST"]
        assert lines[2].split()[-7:] == columns
        assert lines[3].startswith("i0")
        assert lines[3].endswith("chosen")
        assert lines[4].startswith("i1")
        assert await run("explain", running.url, *QUESTION, "--model", "m", "--json") == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["chosen"], document["policy"]) == ("i0", "finish-time")
        fixed = {"instance", "request_time_s", "kv_usage", "workload", "load_after", "excluded"}
        assert all(fixed <= set(row) for row in document["candidates"])
        assert await run("explain", running.url, *QUESTION, "--model", "zz", "--json") == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["chosen"], document["candidates"]) == (None, [])


async def test_names_cannot_steer_the_terminal(capsys):
    name = "m\x1b]0;owned\x07\x1b[2J\n"
    async with fake_instances(1) as fakes:
        config = config_for(fakes)
        # An instance's own list may not hold such a name; a configuration may.
        (instance,) = config.instances
        config = config.model_copy(
            update={"instances": [instance.model_copy(update={"model": name})]}
        )
        async with running_gateway(config) as running:
            assert await run("status", running.url) == 0
            assert await run("explain", running.url, *QUESTION) == 0
            out = capsys.readouterr().out
            assert "owned" in out
            assert not set("\x1b\x07") & set(out)


async def test_the_key_comes_from_the_named_variable(capsys, monkeypatch):
    monkeypatch.setenv("TEST_ADMIN_KEY", "s3cret")
    monkeypatch.setenv("TEST_WRONG_KEY", "wr0ng")
    monkeypatch.setenv("TEST_BROKEN_KEY", "s3cret\n")
    monkeypatch.delenv("TEST_UNSET_KEY", raising=False)
    async with fake_instances(1) as fakes:
        config = config_for(fakes, server={"admin_key_env": "TEST_ADMIN_KEY"})
        async with running_gateway(config) as running:
            assert await run("status", running.url, "--admin-key-env", "TEST_ADMIN_KEY") == 0
            for variable, code in [("WRONG", 1), ("BROKEN", 2), ("UNSET", 2)]:
                named = ("--admin-key-env", f"TEST_{variable}_KEY")
                assert await run("explain", running.url, *QUESTION, *named) == code
            assert await run("status", running.url) == 1
    captured = capsys.readouterr()
    assert "--admin-key-env" in captured.err
    assert "TEST_UNSET_KEY is not set" in captured.err
    assert "s3cret" not in captured.out + captured.err
    assert "Traceback" not in captured.err


async def test_a_gateway_that_is_not_there_is_one_line(capsys):
    for argv in (("status", NOBODY), ("explain", NOBODY, *QUESTION)):
        assert await run(*argv) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith(f"hetero-gateway: {NOBODY}: the gateway does not answer")
        assert captured.err.count("\n") == 1
        assert captured.out == ""


async def test_something_else_at_the_address_is_told_apart(capsys):
    async with fake_instances(1) as fakes:
        assert await run("status", fakes[0].url) == 1
    assert "not a gateway's answer" in capsys.readouterr().err


async def test_what_the_gateway_refuses_is_told_in_its_words(capsys):
    async with fake_instances(1, models=("a", "b")) as fakes:
        async with running_gateway(config_for(fakes)) as running:
            assert await run("explain", running.url, *QUESTION) == 1
    assert "say which model; served: a, b" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ("status",),
        ("status", "127.0.0.1:8000"),
        ("status", "http://user:word@127.0.0.1:1"),
        ("status", "http://[::1"),
        ("explain", NOBODY),
        ("explain", NOBODY, "--prompt-tokens", "0"),
        ("explain", NOBODY, "--prompt-tokens", "few"),
        ("explain", NOBODY, "--prompt-tokens", "5", "--max-tokens", "-1"),
    ],
)
async def test_a_usage_error_exits_with_2(argv, capsys):
    assert await run(*argv) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "word" not in err


@pytest.mark.parametrize("command", ["status", "explain"])
async def test_help_has_an_example(command, capsys):
    assert await run(command, "--help") == 0
    assert f"example: hetero-gateway {command} http://" in capsys.readouterr().out
