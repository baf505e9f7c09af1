"""The load client by itself: parts with their times, connections opened beforehand."""

import json

from hetero_gateway.lab.load import client as client_module
from hetero_gateway.lab.load.client import LoadClient, Reply, parse_target
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.vllm import FakeInstance


def body(**fake) -> bytes:
    return json.dumps({"model": "m", "stream": True, "fake": fake}).encode()


async def test_every_part_of_a_traced_reply_is_kept_with_its_time():
    instance = FakeInstance()
    await instance.start()
    client = LoadClient(
        parse_target(instance.url), "/v1/chat/completions", stream=True, timeout_s=9
    )
    reply = Reply(0.0, parts=[])
    returned = await client.post(body(events=40, delay_s=0.001), reply)
    await client.aclose()
    await instance.close()
    assert returned is reply
    times_s = [time_s for time_s, _ in reply.parts]
    assert times_s == sorted(times_s)
    assert times_s[0] == reply.first_s
    assert len(times_s) > 16  # more than the tail keeps
    whole = b"".join(part for _, part in reply.parts)
    assert whole.count(b"\n\n") == reply.events > 40
    assert whole.endswith(reply.tail)


async def test_a_reply_that_is_not_traced_keeps_no_parts():
    instance = FakeInstance()
    await instance.start()
    client = LoadClient(
        parse_target(instance.url), "/v1/chat/completions", stream=True, timeout_s=9
    )
    assert (await client.post(body())).parts is None
    await client.aclose()
    await instance.close()


async def test_warm_connections_are_those_that_requests_go_over():
    instance = FakeInstance()
    await instance.start()
    client = LoadClient(
        parse_target(instance.url), "/v1/chat/completions", stream=True, timeout_s=9
    )
    await client.warm(3)
    opened = set(client._open)
    await client.warm(3)  # they are there already
    assert client._open == opened
    await client.post(body())
    assert client._open == opened
    assert len(opened) == 3
    await client.aclose()
    await instance.close()


async def test_warming_up_for_a_server_that_is_not_there_says_nothing():
    client = LoadClient(parse_target("http://127.0.0.1:9"), "/", stream=True, timeout_s=9)
    await client.warm(2)
    assert (await client.post(b"{}")).failure == "connect"
    await client.aclose()


async def test_a_plain_answer_that_never_ends_is_broken_off(monkeypatch):
    monkeypatch.setattr(client_module, "_MAX_PLAIN_BYTES", 1000)
    instance = FakeInstance()
    await instance.start()
    client = LoadClient(
        parse_target(instance.url), "/v1/chat/completions", stream=False, timeout_s=9
    )
    long = json.dumps({"model": "m", "fake": {"event_bytes": 100_000}}).encode()
    assert (await client.post(long)).failure == "protocol"
    assert (await client.post(b'{"model": "m"}')).failure is None
    await client.aclose()
    await instance.close()
