"""The load client by itself: parts with their times, connections opened beforehand."""

import contextlib
import json

import pytest

from hetero_gateway.lab.load import client as client_module
from hetero_gateway.lab.load.client import LoadClient, Reply, parse_target
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.vllm import fake_instances


def body(**fake) -> bytes:
    return json.dumps({"model": "m", "stream": True, "fake": fake}).encode()


@contextlib.asynccontextmanager
async def connected(url=None, stream=True):
    """A client of a fake instance, or of what is at ``url``."""
    async with fake_instances(1) as (instance,):
        target = parse_target(url or instance.url)
        client = LoadClient(target, "/v1/chat/completions", stream=stream, timeout_s=9)
        yield client
        await client.aclose()


async def test_every_part_of_a_traced_reply_is_kept_with_its_time():
    reply = Reply(0.0, parts=[])
    async with connected() as client:
        assert await client.post(body(events=40, delay_s=0.001), reply) is reply
        assert (await client.post(body())).parts is None  # as it was not asked for
    times_s = [time_s for time_s, _ in reply.parts]
    assert times_s == sorted(times_s)
    assert times_s[0] == reply.first_s
    assert len(times_s) > 16  # more than the tail keeps
    whole = b"".join(part for _, part in reply.parts)
    assert whole.count(b"\n\n") == reply.events > 40
    assert whole.endswith(reply.tail)


async def test_warm_connections_are_those_that_requests_go_over():
    async with connected() as client:
        await client.warm(3)
        opened = set(client._open)
        await client.warm(3)  # they are there already
        assert client._open == opened
        await client.post(body())
        assert client._open == opened
        assert len(opened) == 3


async def test_warming_up_for_a_server_that_is_not_there_says_nothing():
    async with connected("http://127.0.0.1:9") as client:
        await client.warm(2)
        assert (await client.post(b"{}")).failure == "connect"


@pytest.mark.parametrize(("size", "failure"), [(100_000, "protocol"), (4, None)])
async def test_a_plain_answer_that_never_ends_is_broken_off(monkeypatch, size, failure):
    monkeypatch.setattr(client_module, "_MAX_PLAIN_BYTES", 1000)
    async with connected(stream=False) as client:
        asked = json.dumps({"model": "m", "fake": {"event_bytes": size}}).encode()
        assert (await client.post(asked)).failure == failure
