"""status and explain against a running gateway: what they print, and how they fail."""

import asyncio
import json
import math
import time

import pytest

from hetero_gateway.files.kv_transfer_config import InstanceTransferConfig
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.running import CHAT, FAST, chat, config_for, eventually, rig, running_gateway
from tests.fakes.vllm import FakeInstance, fake_instances

QUESTION = ("--prompt-tokens", "800", "--max-tokens", "200")
NOBODY = "http://127.0.0.1:1"


@pytest.fixture
def asked(run):
    """The command blocks, and the gateway lives in this thread's loop."""
    return lambda *words, code=0: asyncio.to_thread(run, *words, code=code)


async def test_status_shows_a_row_per_instance(asked):
    async with rig(2, profiles=(FAST, None)) as (running, client, fakes):
        await fakes[1].kill()
        instances = running.gateway.fleet.instances
        await eventually(lambda: [i.up for i in instances.values()] == [True, False])
        await client.post("/tokenize", json={"prompt": "x"})
        lines = (await asked("status", running.url)).out.splitlines()
        assert lines[0] == "policy finish-time, 1 of 2 instances take requests; 0 wait"
        assert lines[1].split()[:2] == ["INSTANCE", "STATE"]
        assert lines[2].split()[:2] == ["i0", "up"]
        assert "100.0%" in lines[2]
        assert FAST in lines[2]
        assert lines[3].split()[:2] == ["i1", "down"]
        assert "unprofiled" in lines[3]
        assert lines[4].startswith("i1 is down: ")
        document = json.loads((await asked("status", running.url, "--json")).out)
        assert [row["id"] for row in document["instances"]] == ["i0", "i1"]


async def test_an_instance_with_ranks_has_a_row_above_theirs(asked):
    async with fake_instances(2) as fakes:
        places = {"id": "a", "base_url": fakes[0].url, "data_parallel_ranks": 2}
        instances = [places, {"id": "b", "base_url": fakes[1].url}]
        async with running_gateway(config_for([], instances=instances)) as running:
            there = running.gateway.fleet.instances
            await eventually(lambda: all(i.up for i in there.values()))
            lines = (await asked("status", running.url)).out.splitlines()
            assert lines[0].startswith("policy finish-time, 2 of 2 instances take requests")
            assert [line.split()[0] for line in lines[2:6]] == ["a", "a.dp0", "a.dp1", "b"]
            assert "2 of 2 ranks up" in lines[2]
            assert "a is drained: 0 requests" in (await asked("drain", running.url, "a")).err
            assert [i.draining for i in there.values()] == [True, True, False]
            told = (await asked("explain", running.url, *QUESTION)).out
            assert told.startswith("b would get it")
            assert "a.dp1" in told


async def test_status_names_pairs_that_refused(asked):
    async with fake_instances(2) as fakes:
        config = config_for(fakes, scheduler={"split_requests": "each"})
        transfer = InstanceTransferConfig(connector="NixlConnector")
        rows = [i.model_copy(update={"kv_transfer": transfer}) for i in config.instances]
        async with running_gateway(config.model_copy(update={"instances": rows})) as running:
            running.gateway.fleet.scheduler.legs.pairs.refuse("i0", "i1", time.monotonic())
            out = (await asked("status", running.url)).out
    assert "i1 cannot fetch prompts that i0 has computed" in out


async def test_explain_shows_the_candidates_and_the_reason(asked):
    async with rig(2) as (running, *_):
        words = ("explain", running.url, *QUESTION)
        lines = (await asked(*words)).out.splitlines()
        assert lines[0].startswith("i0 would get it: done in ")
        assert "800 prompt tokens, 200 output tokens predicted" in lines[1]
        columns = ["TTFT", "LATENCY", "DELAY", "MEMORY", "LATE", "SLO", "COST"]
        assert lines[2].split()[-7:] == columns
        assert lines[3].startswith("i0")
        assert lines[3].endswith("chosen")
        assert lines[4].startswith("i1")
        document = json.loads((await asked(*words, "--model", "m", "--json")).out)
        assert (document["chosen"], document["policy"]) == ("i0", "finish-time")
        fixed = {"instance", "request_time_s", "kv_usage", "workload", "load_after", "excluded"}
        assert all(fixed <= set(row) for row in document["candidates"])
        document = json.loads((await asked(*words, "--model", "zz", "--json")).out)
        assert (document["chosen"], document["candidates"]) == (None, [])


async def test_drain_takes_an_instance_out_and_back_in_and_waits_for_what_it_has(asked):
    async with rig(2) as (running, client, fakes):
        body = chat(stream=True, fake={"events": 20, "delay_s": 0.1})
        asking = asyncio.ensure_future(client.post(CHAT, json=body))
        await eventually(lambda: sum(fake.open for fake in fakes) == 1)
        name = f"i{[fake.open for fake in fakes].index(1)}"
        instance = running.gateway.fleet.instances[name]
        words = ("drain", running.url, name)
        assert "1 requests are left" in (await asked(*words, "--wait", "0.6", code=1)).err
        assert instance.draining
        assert instance.leave_at_s == math.inf
        await asked(*words, "--deadline", "60")
        assert instance.leave_at_s < math.inf
        assert "0 requests are left" in (await asked(*words, "--wait", "60")).err
        assert (await asking).status_code == 200
        assert "takes requests again" in (await asked(*words, "--undo")).err
        assert not instance.draining
        assert "there is no instance" in (await asked("drain", running.url, "x", code=1)).err


async def test_names_cannot_steer_the_terminal(asked):
    name = "m\x1b]0;owned\x07\x1b[2J\n"
    async with fake_instances(1) as fakes:
        config = config_for(fakes)
        # An instance's own list may not hold such a name; a configuration may.
        (instance,) = config.instances
        config = config.model_copy(
            update={"instances": [instance.model_copy(update={"model": name})]}
        )
        async with running_gateway(config) as running:
            for words in (("status", running.url), ("explain", running.url, *QUESTION)):
                out = (await asked(*words)).out
                assert "owned" in out or words[0] == "explain"
                assert not set("\x1b\x07") & set(out)


async def test_the_key_comes_from_the_named_variable(monkeypatch, asked):
    monkeypatch.setenv("TEST_ADMIN_KEY", "s3cret")
    monkeypatch.setenv("TEST_WRONG_KEY", "wr0ng")
    monkeypatch.setenv("TEST_BROKEN_KEY", "s3cret\n")
    monkeypatch.delenv("TEST_UNSET_KEY", raising=False)
    async with rig(server={"admin_key_env": "TEST_ADMIN_KEY"}) as (running, *_):
        said = [await asked("status", running.url, "--admin-key-env", "TEST_ADMIN_KEY")]
        for variable, code in [("WRONG", 1), ("BROKEN", 2), ("UNSET", 2)]:
            named = ("--admin-key-env", f"TEST_{variable}_KEY")
            said.append(await asked("explain", running.url, *QUESTION, *named, code=code))
        said.append(await asked("status", running.url, code=1))
    errors = "".join(each.err for each in said)
    assert "--admin-key-env" in said[-1].err
    assert "TEST_UNSET_KEY is not set" in errors
    assert "s3cret" not in "".join(each.out for each in said) + errors
    assert "Traceback" not in errors


async def test_a_gateway_that_is_not_there_is_one_line(asked):
    for argv in (("status", NOBODY), ("explain", NOBODY, *QUESTION)):
        captured = await asked(*argv, code=1)
        assert captured.err.startswith(f"hetero-gateway: {NOBODY}: the gateway does not answer")
        assert captured.err.count("\n") == 1
        assert captured.out == ""


async def test_something_else_at_the_address_is_told_apart(asked):
    async with fake_instances(1) as fakes:
        assert "not a gateway's answer" in (await asked("status", fakes[0].url, code=1)).err


async def test_what_the_gateway_refuses_is_told_in_its_words(asked):
    async with rig([FakeInstance(("a", "b"))]) as (running, *_):
        said = await asked("explain", running.url, *QUESTION, code=1)
    assert "say which model; served: a, b" in said.err


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
async def test_a_usage_error_exits_with_2(argv, asked):
    err = (await asked(*argv, code=2)).err
    assert "Traceback" not in err
    assert "word" not in err


@pytest.mark.parametrize("command", ["status", "explain"])
async def test_help_has_an_example(command, asked):
    out = (await asked(command, "--help")).out
    assert f"example: hetero-gateway {command} http://" in out
