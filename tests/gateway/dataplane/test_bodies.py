"""Bodies that would hurt others: each hurts, at most, its own request."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator

import pytest

from hetero_gateway.gateway.dataplane import reading
from tests.fakes.running import CHAT, eventually, rig

FINE = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize("policy", ["finish-time", "min-max"])
async def test_a_number_that_no_engine_accepts_changes_nothing_for_the_next(policy: str) -> None:
    async with rig(scheduler={"policy": policy}) as (running, client, fakes):
        for name in ("n", "max_tokens", "max_completion_tokens"):
            for value in (str(10**310), "1" * 5000, "1e400", "-1", "NaN", "[]"):
                body = f'{{"model":"m","messages":[],"{name}":{value}}}'
                refused = await client.post(CHAT, content=body)
                assert refused.status_code == 400, (name, value)
                assert refused.json()["error"]["param"] == name
                assert refused.json()["error"]["type"] == "invalid_request_error"
                assert (await client.post(CHAT, json=FINE)).status_code == 200
                await eventually(running.settled)
        assert len(fakes[0].bodies) == 3 * 6


async def test_the_most_sequences_of_an_engine_are_the_engines_to_judge() -> None:
    async with rig() as (running, client, _):
        for n in (16_384, 1 << 20):
            assert (await client.post(CHAT, json=FINE | {"n": n})).status_code == 200
            assert (await client.post(CHAT, json=FINE)).status_code == 200
            await eventually(running.settled)


BOMBS = {
    "arrays in n": b'{"model":"m","messages":[],"n":[' + b"[]," * 3_000_000 + b"0]}",
    "empty prompts": b'{"model":"m","prompt":[' + b'"",' * 2_000_000 + b'""]}',
    "too deep": b'{"model":"m","messages":' + b"[" * 4_000_000 + b"]" * 4_000_000 + b"}",
}


@pytest.mark.parametrize(
    ("bomb", "least"), [("arrays in n", 2), ("empty prompts", 3), ("too deep", 90)]
)
async def test_while_a_long_body_is_read_the_event_loop_has_its_turns(
    bomb: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = 0
    between: list[int] = []  # turns of the event loop, from one step to the next
    advance = reading.advance

    def counted(*args: object) -> object:
        between.append(turns)
        return advance(*args)  # type: ignore[arg-type]

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(reading, "advance", counted)
    # One step at a time, however fast the machine is.
    monkeypatch.setattr(reading, "_STEP_S", 0.0)
    async with rig() as (running, client, _):
        task = asyncio.ensure_future(turn())
        await client.post(CHAT, content=BOMBS[bomb])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len(between) >= least
        steps = [after - before for before, after in itertools.pairwise(between)]
        assert min(steps) >= 1
        await eventually(lambda: not len(running.gateway.dataplane))
        assert (await client.post(CHAT, json=FINE)).status_code == 200


async def test_who_leaves_while_a_body_is_read_is_forgotten() -> None:
    async with rig() as (running, client, fakes):
        body = BOMBS["arrays in n"]
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % (CHAT.encode(), len(body)) + body)
        await writer.drain()
        writer.transport.abort()
        await eventually(lambda: not len(running.gateway.dataplane))
        assert (await client.post(CHAT, json=FINE)).status_code == 200
        await eventually(running.settled)
        assert len(fakes[0].bodies) == 1


async def test_a_long_body_is_refused_as_a_short_one_is() -> None:
    async with rig() as (_, client, fakes):
        for fields in ({"n": [[]] * 2_000_000}, {"x": "x" * 3_000_000, "n": 0}):
            answer = await client.post(CHAT, content=json.dumps(FINE | fields))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        long = await client.post(CHAT, json=FINE | {"x": ["x" * 3_000_000]})
        assert long.status_code == 200
        assert not fakes[0].open


# Memory


def long_body(size: int) -> bytes:
    return json.dumps(FINE | {"x": "x" * size}).encode()


async def test_bytes_are_buffered_until_the_response_begins_and_no_longer() -> None:
    async with rig() as (running, client, fakes):
        limits = running.gateway.dataplane.body_limits
        fake = {"events": 200, "delay_s": 0.05}
        waits = json.dumps(FINE | {"stream": True, "x": "x" * 1_000_000, "fake": fake}).encode()
        async with client.stream("POST", CHAT, content=waits) as response:
            assert response.status_code == 200
            await anext(response.aiter_bytes())
            assert len(running.gateway.dataplane) == 1
            assert limits.buffered_bytes == 0
        hangs = long_body(1_000_000)[:-1] + b',"fake":{"hang":true}}'
        task = asyncio.ensure_future(client.post(CHAT, content=hangs))
        await eventually(lambda: limits.buffered_bytes == len(hangs))
        task.cancel()
        await eventually(lambda: limits.buffered_bytes == 0)
        await eventually(running.settled)
        assert fakes[0].bodies == [waits, hangs]


@pytest.mark.parametrize("announced", [True, False])
async def test_long_bodies_above_the_budget_get_503_and_small_ones_are_served(
    announced: bool,
) -> None:
    server = {"max_body_bytes": 3_000_000, "max_buffered_bytes": 4_000_000}
    async with rig(server=server) as (running, client, _):
        limits = running.gateway.dataplane.body_limits
        hangs = long_body(2_500_000)[:-1] + b',"fake":{"hang":true}}'
        task = asyncio.ensure_future(client.post(CHAT, content=hangs))
        await eventually(lambda: limits.buffered_bytes == len(hangs))

        async def parts() -> AsyncIterator[bytes]:
            yield long_body(2_500_000)

        content = long_body(2_500_000) if announced else parts()
        refused = await client.post(CHAT, content=content)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert refused.json()["error"]["code"] == "too_many_bytes_buffered"
        assert (await client.post(CHAT, json=FINE)).status_code == 200
        task.cancel()
        await eventually(lambda: limits.buffered_bytes == 0)
        assert (await client.post(CHAT, content=long_body(2_500_000))).status_code == 200


async def test_a_long_body_is_tried_again_whole() -> None:
    async with rig(2) as (running, client, fakes):
        body = long_body(2_000_000)[:-1] + b',"fake":{"die":"before_head"}}'
        answer = await client.post(CHAT, content=body)
        assert answer.status_code == 502
        assert [fake.bodies for fake in fakes] == [[body], [body]]
        assert running.gateway.dataplane.body_limits.buffered_bytes == 0
