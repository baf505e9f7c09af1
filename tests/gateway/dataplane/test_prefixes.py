"""Keys of prompts where bodies are read, and clients that are kept apart; over real sockets."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import httpx
import pytest

from hetero_gateway.core.policies.base import Choice, View
from hetero_gateway.core.request import Request
from hetero_gateway.core.types import Draws, InstanceId, PrefixKeys
from hetero_gateway.gateway.request.body_fields import LEAST_BYTES
from tests.core.builders import Changed
from tests.fakes.running import CHAT, RunningGateway, eventually, rig
from tests.fakes.vllm import FakeInstance


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content} for content in contents]
    return {"model": "m", "messages": messages, "max_tokens": 1, **fields}


def placed(running: RunningGateway) -> list[Request]:
    """The requests that the scheduler gets from now on."""
    scheduler, seen = running.gateway.fleet.scheduler, list[Request]()

    policy = scheduler.policy

    def seeing(method: Callable[..., Choice | None]) -> Callable[..., Choice | None]:
        def asked(view: View, rng: Draws) -> Choice | None:
            seen.append(view.request)
            return method(view, rng)

        return asked

    methods = {name: seeing(getattr(policy, name)) for name in ("choose", "would_choose")}
    scheduler.set_policy(Changed(policy, **methods))  # type: ignore[arg-type]
    return seen


async def ask(
    client: httpx.AsyncClient,
    bodies: Sequence[dict[str, Any] | bytes],
    path: str = CHAT,
    **headers: str,
) -> None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    for body in bodies:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await client.post(path, content=content, headers=named)
        assert answer.status_code == 200, answer.text


def keys(request: Request) -> PrefixKeys:
    assert request.prefix is not None
    return request.prefix


async def test_a_turn_has_the_keys_of_the_one_before_also_when_it_has_become_long() -> None:
    contents = ["be kind " * 50]
    async with rig() as (running, client, _):
        seen = placed(running)
        for size in (100, 20_000, 60_000, 300_000, 900_000):
            contents += ["x" * size, f"and {size}? " * 9]
            await ask(client, [chat(*contents)])
    assert len(seen) == 5
    assert len(json.dumps(chat(*contents))) > LEAST_BYTES
    for before, after in pairwise(seen):
        shared = keys(before).hashes
        assert keys(after).hashes[: len(shared)] == shared != ()


async def test_what_generates_nothing_and_what_is_switched_off_has_no_keys() -> None:
    embedding = {"model": "m", "input": "x" * 3000}
    async with rig() as (running, client, _):
        seen = placed(running)
        await ask(client, [embedding], "/v1/embeddings")
        await ask(client, [{"model": "m", "prompt": "x" * 3000}], "/tokenize")
    async with rig(scheduler={"prefix_cache": False}) as (running, client, _):
        also = placed(running)
        await ask(client, [chat("x" * 3000)])
    assert [request.prefix for request in seen + also] == [None] * 3


async def test_gateways_with_one_secret_have_the_same_keys_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFIX_KEY", "hush")
    seen = []
    for name in ("PREFIX_KEY", "PREFIX_KEY", None):
        async with rig(scheduler={"prefix_key_env": name}) as (running, client, _):
            spied = placed(running)
            await ask(client, [chat("x" * 3000)])
            seen += spied
    assert keys(seen[0]) == keys(seen[1])
    assert not set(keys(seen[0]).hashes) & set(keys(seen[2]).hashes)


ISOLATED = {"isolate_clients": True}


def salt_of(body: bytes) -> str:
    salt: str = json.loads(body)["cache_salt"]
    assert len(salt) == 43
    return salt


async def test_isolated_clients_have_keys_and_salts_of_their_own() -> None:
    body = chat("x" * 3000)
    async with rig(scheduler=ISOLATED) as (running, client, fakes):
        seen = placed(running)
        await ask(client, [body, body], authorization="Bearer one")
        await ask(client, [body], authorization="Bearer two")
        await ask(client, [body], x_api_key="one")
        await ask(client, [body])
    salts = [salt_of(sent) for sent in fakes[0].bodies]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 4
    assert keys(seen[0]) == keys(seen[1])
    assert len({keys(request).hashes[0] for request in seen}) == 4
    for sent in fakes[0].bodies:
        decoded = json.loads(sent)
        del decoded["cache_salt"]
        assert decoded == body


async def test_a_client_cannot_have_anothers_salt_and_its_own_keeps_its_meaning() -> None:
    async with rig(scheduler=ISOLATED) as (_, client, fakes):
        await ask(client, [chat("x" * 3000)], authorization="Bearer victim")
        stolen = salt_of(fakes[0].bodies[0])
        bodies = [chat("x" * 3000, cache_salt=salt) for salt in (stolen, "a", "b", "a")]
        await ask(client, bodies, authorization="Bearer thief")
        twice = json.dumps(bodies[0])[:-1].encode() + b', "cache_salt" : "c" }\n '
        await ask(client, [twice], authorization="Bearer thief")
    salts = [salt_of(sent) for sent in fakes[0].bodies]
    assert stolen not in salts[1:]
    assert salts[2] == salts[4] != salts[3]
    assert len(set(salts)) == 5


@pytest.mark.parametrize("size", [10, 500_000])
async def test_a_salt_goes_into_bodies_of_every_size(size: int) -> None:
    async with rig(scheduler=ISOLATED) as (_, client, fakes):
        await ask(client, [json.dumps(chat("x" * size)).encode() + b" \n"])
        text = json.dumps(chat("x" * size))
        answer = await client.post(CHAT, content=text.encode("utf-16"))
    assert salt_of(fakes[0].bodies[0])
    assert answer.status_code == 400
    assert len(fakes[0].bodies) == 1, "what no salt can be put into is not sent"


async def test_without_isolation_bodies_go_as_they_came() -> None:
    body = json.dumps(chat("x" * 3000)).encode() + b"  "
    async with rig() as (_, client, fakes):
        await ask(client, [body], authorization="Bearer one")
    assert fakes[0].bodies == [body]


async def test_a_session_is_named_by_header_or_body() -> None:
    named: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"user": "u"}, {}),
        ({"user": "u", "prompt_cache_key": "k"}, {}),
        ({"user": "other", "prompt_cache_key": "k"}, {}),
        ({"user": "u", "prompt_cache_key": "k"}, {"x_session_id": "s"}),
        ({}, {"x_session_id": "s"}),
        ({"user": None}, {}),
        ({"user": ""}, {}),
        ({"user": {"a": 1}}, {}),
        ({"user": "u" * 100_000}, {}),
        ({}, {}),
    ]
    seen = []
    for policy in ("session", "min-max"):
        async with rig(scheduler={"policy": policy}) as (running, client, _):
            spied = placed(running)
            for fields, headers in named:
                await ask(client, [chat("hello", **fields)], **headers)
            seen.append([request.session for request in spied])
    by_user, by_key, same_key, by_header, same_header, *others = seen[0]
    assert by_key == same_key
    assert by_header == same_header
    assert len({by_user, by_key, by_header, *others[2:4]}) == 5
    assert (others[0], others[1], others[4]) == (None, None, None)
    assert seen[1] == [None] * len(named)


CACHING = (
    'vllm:cache_config_info{enable_prefix_caching="True",kv_cache_size_tokens="500000"} 1.0\n'
    "vllm:prefix_cache_queries_total 0.0\n"
    "vllm:prefix_cache_hits_total 0.0\n"
    "process_start_time_seconds %d\n"
    'vllm:engine_sleep_state{sleep_state="awake"} %d\n'
    'vllm:engine_sleep_state{sleep_state="discard_all"} %d\n'
)
I0 = InstanceId("i0")


def caching() -> FakeInstance:
    """One that says that it has a prefix cache, empty now."""
    fake = FakeInstance()
    fake.metrics = CACHING % (1000, 1, 0)
    return fake


@pytest.mark.parametrize("now", [(1001, 1, 0), (1000, 0, 1)], ids=["started anew", "asleep"])
async def test_what_an_instance_has_lost_is_not_counted_on(now: tuple[int, int, int]) -> None:
    async with rig([caching()]) as (running, client, fakes):
        caches = running.gateway.fleet.scheduler.caches
        index = caches.index
        await ask(client, [chat("x" * 9000)])
        assert index.keys_on(I0) > 5
        await ask(client, [chat("x" * 9000, "and?")])
        decision = (await client.get("/admin/decisions")).json()["decisions"][0]
        assert decision["candidates"][0]["prefix"]["match_tokens"] > 1000
        kept = index.keys_on(I0)
        instance = running.gateway.fleet.instances[I0]
        scraped = instance.engine_started_s
        assert scraped == 1000
        fakes[0].metrics = CACHING % now
        await eventually(lambda: index.keys_on(I0) == 0)
        assert kept > 0
        assert caches.eta(I0) == 1.0


async def test_what_is_known_of_caches_is_shown() -> None:
    async with rig([caching()]) as (running, client, _):
        await ask(client, [chat("x" * 9000)])
        (row,) = (await client.get("/admin/instances")).json()["instances"]
        text = await running.metrics()
    assert row["prefix_trust"] == 1.0
    assert 8900 < row["prefix_bytes"] < 9100
    assert row["prefix_capacity_bytes"] > 1_000_000
    assert 'hetero_gateway_instance_prefix_trust{backend="i0"} 1.0' in text
    shown = {
        line.split()[0]: float(line.split()[1])
        for line in text.splitlines()
        if line.startswith("hetero_gateway_") and "prefix" in line
    }
    assert shown['hetero_gateway_instance_prefix_bytes{backend="i0"}'] == row["prefix_bytes"]
    assert 5 < shown["hetero_gateway_prefix_index_keys"] < 20
    assert 100 < shown["hetero_gateway_prefix_index_memory_bytes"] < 400_000


async def test_an_instance_that_is_removed_takes_its_part_with_it() -> None:
    async with rig() as (running, client, _):
        await ask(client, [chat("x" * 9000)])
        caches = running.gateway.fleet.scheduler.caches
        assert len(caches.index) > 5
        assert (await client.delete("/admin/instances/i0")).status_code < 300
        assert len(caches.index) == 0
        assert I0 not in caches.index
