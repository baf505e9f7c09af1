"""Aliases, splits and fallbacks, over real sockets."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_gateway.errors import ConfigError, Refusal
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.yaml_file import parse_model
from hetero_gateway.gateway.request.openai import parse_body, with_model
from tests.fakes.gateway_files import clients
from tests.fakes.running import CHAT, chat, eventually, rig
from tests.fakes.vllm import FakeInstance, fake_instances

FALLBACK = "x-hetero-gateway-fallback"
INSTANCE = "x-hetero-gateway-instance"


@asynccontextmanager
async def outside_service(
    *others: str, **fields: str
) -> AsyncIterator[tuple[FakeInstance, dict[str, Any]]]:
    """A service elsewhere, and routes by which it stands in for the model ``one``, after others."""
    async with fake_instances(1, models=("big",)) as (outside,):
        there = {"model": "big", "base_url": outside.url} | fields
        yield outside, {"one": {"fallbacks": [*({"model": name} for name in others), there]}}


# The body


def alike(one: bytes, other: bytes) -> int:
    """Bytes that both begin with."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","prompt":"x"}',
        b' {"prompt" : "\\"model\\":\\"a\\"", "model"\n:\t"a" , "n": 1 } \n',
        b'{"model":"b","prompt":[{"model":"a"}],"model":"a"}',
        b'{"\\u006dodel":"\\u0061","prompt":"x"}',
        b'{"prompt":"' + b"x" * 200_000 + b'","model":"a","z":"' + b"y" * 100_000 + b'"}',
        b'{"messages":[' + b",".join([b'{"role":"user","content":"q"}'] * 9000) + b'],"model":"a"}',
    ],
)
@pytest.mark.parametrize("name", ["a", "longer/name-7", 'qu"ote\\', "ü"])
def test_a_body_is_rewritten_in_its_model_alone(body: bytes, name: str) -> None:
    fresh = with_model(body, b"application/json", name)
    before, after = json.loads(body), json.loads(fresh)
    assert after == before | {"model": name}
    assert parse_body(fresh, b"application/json").model == name
    # Byte for byte: what is left when the name is cut out is the same.
    common = alike(body, fresh)
    tail = alike(body[common:][::-1], fresh[common:][::-1])
    assert len(fresh) - common - tail <= len(json.dumps(name)) + 2


def test_odd_bodies_are_rewritten_or_refused() -> None:
    odd = b'{"model":"a","temperature":NaN}'
    assert json.loads(with_model(odd, b"application/json", "b"))["model"] == "b"
    wide = '{"model":"a"}'.encode("utf-16")
    assert json.loads(with_model(wide, b"application/json", "b")) == {"model": "b"}
    form = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\na\r\n--x--\r\n'
    assert with_model(form, b"multipart/form-data; boundary=x", "bb") == form.replace(
        b"\r\n\r\na\r\n", b"\r\n\r\nbb\r\n"
    )
    assert with_model(b" { }", b"", "b") == b' {"model":"b" }'
    assert with_model(b'{"a":1}', b"", "b") == b'{"model":"b","a":1}'
    for unusable in (b"[]", b"", b'{"model', b'{"a":NaN' + b" " * 20_000):
        with pytest.raises(Refusal):
            with_model(unusable, b"application/json", "b")


# Aliases


@pytest.mark.parametrize("workers", [1, 2])
async def test_an_alias_is_served_by_what_it_stands_for(workers: int) -> None:
    engine = FakeInstance(("llama",))
    models = {"gpt-4o": {"serve": "llama"}}
    async with rig([engine], workers=workers, models=models) as (_, client, _):
        body = b'{ "messages": [], "unknown": 1e2, "model" : "gpt-4o" }'
        for size in (0, 100_000):  # short, and folded
            sent = body.replace(b'"unknown"', b'"pad":"' + b"x" * size + b'","unknown"')
            answer = await client.post(
                CHAT, content=sent, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 200, answer.text
            assert FALLBACK not in answer.headers
            assert engine.bodies[-1] == sent.replace(b'"gpt-4o"', b'"llama"')
            assert b"content-length: %d\r\n" % len(engine.bodies[-1]) in engine.heads[-1]
        untouched = json.dumps(chat(model="llama")).encode()
        await client.post(CHAT, content=untouched)
        assert engine.bodies[-1] == untouched
        cards = {c["id"]: c for c in (await client.get("/v1/models")).json()["data"]}
        assert set(cards) == {"llama", "gpt-4o"}
        assert cards["gpt-4o"]["root"] == "llama"
        assert (await client.get("/v1/models/gpt-4o")).status_code == 200


async def test_a_key_is_asked_for_the_name_that_was_asked_for(tmp_path: Path) -> None:
    keys = clients(tmp_path, a={"models": ["gpt"]}, b={"models": ["llama"]})
    engine = FakeInstance(
        (
            "llama",
            "other",
        )
    )
    models = {"gpt": {"serve": "llama"}, "llama": {"fallbacks": [{"model": "other"}]}}
    async with rig([engine], models=models, clients=keys) as (running, client, _):
        for key, name, status in (("ka", "gpt", 200), ("ka", "llama", 403), ("kb", "gpt", 403)):
            headers = {"authorization": f"Bearer {key}"}
            answer = await client.post(CHAT, json=chat(model=name), headers=headers)
            assert answer.status_code == status, (key, name)
        # A fallback that it may not ask for is none of its.
        engine.fault = {"status": 503}
        headers = {"authorization": "Bearer kb"}
        answer = await client.post(CHAT, json=chat(model="llama"), headers=headers)
        assert answer.status_code == 503
        assert FALLBACK not in answer.headers
        await eventually(running.settled)


# Splits


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_split_follows_the_requests_id(workers: int) -> None:
    one, canary = FakeInstance(("one",)), FakeInstance(("canary",))
    models = {"chat": {"split": {"one": 90, "canary": 10}}}
    async with rig([one, canary], workers=workers, models=models) as (running, client, _):
        seen: dict[str, str] = {}
        for again in range(2):
            for number in range(100):
                headers = {"x-request-id": f"r{number}"}
                port = running.port if again else client.base_url.port
                url = f"http://127.0.0.1:{port}{CHAT}"
                answer = await client.post(url, json=chat(model="chat"), headers=headers)
                assert answer.status_code == 200
                home = answer.headers[INSTANCE]
                assert seen.setdefault(headers["x-request-id"], home) == home
        assert 3 <= Counter(seen.values())["i1"] <= 20
        assert {json.loads(b)["model"] for b in canary.bodies} == {"canary"}


async def test_a_split_by_client_keeps_a_client_where_it_is() -> None:
    one, other = FakeInstance(("one",)), FakeInstance(("other",))
    models = {"chat": {"split": {"one": 1, "other": 1}, "split_by": "client"}}
    async with rig([one, other], models=models) as (_, client, _):
        homes = set()
        for key in range(12):
            headers = {"authorization": f"Bearer k{key}"}
            asked = {
                (await client.post(CHAT, json=chat(model="chat"), headers=headers)).headers[
                    INSTANCE
                ]
                for _ in range(4)
            }
            assert len(asked) == 1
            homes |= asked
        assert homes == {"i0", "i1"}


# Fallbacks


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("why", ["down", "busy", "dies", "unknown", "draining"])
async def test_another_model_is_asked_where_nothing_can_take_a_request(
    workers: int, why: str
) -> None:
    one, other = FakeInstance(("one",)), FakeInstance(("other",))
    asked = "nobody" if why == "unknown" else "one"
    models = {asked: {"fallbacks": [{"model": "other"}]}}
    async with rig([one, other], workers=workers, models=models) as (running, client, _):
        assert (await client.post(CHAT, json=chat(model="other"))).headers[INSTANCE] == "i1"
        if why == "down":
            await one.kill()
        elif why == "busy":
            one.fault = {"status": 503}
        elif why == "dies":
            one.fault = {"die": "before_head"}
        elif why == "draining":
            await client.patch("/admin/instances/i0", json={"draining": True})
        for number in range(3):
            stream = chat(model=asked, stream=True, fake={"events": 3})
            answer = await client.post(CHAT, json=stream if number == 1 else chat(model=asked))
            assert answer.status_code == 200, answer.text
            assert answer.headers[INSTANCE] == "i1"
            assert answer.headers[FALLBACK] == "other"
            assert json.loads(other.bodies[-1])["model"] == "other"
            assert b"content-length: %d\r\n" % len(other.bodies[-1]) in other.heads[-1]
        await running.counted()
        text = await running.metrics()
        assert f'fallbacks_total{{fallback="other",model="{asked}"}} 3.0' in text
        done = [line for line in text.splitlines() if "_requests_total{" in line]
        assert sum(float(line.split()[-1]) for line in done if 'model="other"' in line) == 4
        assert not any('model="one"' in line and float(line.split()[-1]) for line in done), done


async def test_a_full_queue_falls_back() -> None:
    one, other = FakeInstance(("one",)), FakeInstance(("other",))
    one.max_model_len = other.max_model_len = 32768
    models = {"one": {"fallbacks": [{"model": "other"}]}}
    scheduler = {"prefill_depth": 1, "queue": {"max_requests": 1, "timeout_s": 5}}
    async with rig([one, other], models=models, scheduler=scheduler) as (running, client, _):
        # So long that one of them is all that an instance is given to begin with.
        long = {"model": "one", "prompt": [1] * 5000, "stream": True}
        slow = long | {"fake": {"first_delay_s": 30}}
        first = asyncio.create_task(client.post(CHAT, json=slow))
        await eventually(lambda: one.open == 1)
        second = asyncio.create_task(client.post(CHAT, json=long))
        await eventually(lambda: running.gateway.fleet.scheduler.queued == 1)
        third = await client.post(CHAT, json=long)  # the queue is full
        assert third.headers.get(FALLBACK) == "other", third.text
        assert not second.done()
        assert (await second).headers[FALLBACK] == "other"  # it has waited for 5 s
        assert FALLBACK not in (await first).headers


async def test_a_request_without_a_model_falls_back_too() -> None:
    one = FakeInstance(("one",))
    async with outside_service() as (outside, models), rig([one], models=models) as (_, client, _):
        one.fault = {"status": 503}
        answer = await client.post(CHAT, json={"messages": []})
        assert (answer.status_code, answer.headers[FALLBACK]) == (200, "127.0.0.1/big")
        assert json.loads(outside.bodies[-1]) == {"model": "big", "messages": []}
        form = b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\na\r\n--x--\r\n'
        kind = {"content-type": "multipart/form-data; boundary=x"}
        refused = await client.post("/v1/audio/transcriptions", content=form, headers=kind)
        assert refused.status_code == 400


async def test_what_an_engine_refuses_or_has_begun_does_not_fall_back() -> None:
    one, other = FakeInstance(("one",)), FakeInstance(("other",))
    models = {"one": {"fallbacks": [{"model": "other"}]}}
    async with rig([one, other], models=models) as (_, client, _):
        refused = await client.post(
            CHAT, json=chat(model="one", fake={"status": 400, "body": "{}"})
        )
        assert refused.status_code == 400
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(
                CHAT, json=chat(model="one", stream=True, fake={"die": "after_events"})
            )
        assert not other.requests


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_service_elsewhere_answers_with_its_own_key(
    workers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ELSEWHERE_KEY", "sk-elsewhere")
    keys, one = clients(tmp_path, a={"concurrency": 2}), FakeInstance(("one",))
    async with (
        outside_service("gone", api_key_env="ELSEWHERE_KEY") as (outside, models),
        rig([one], workers=workers, models=models, clients=keys) as (running, client, _),
    ):
        await one.kill()
        client.headers.update(
            {"authorization": "Bearer ka", "x-api-key": "ka", "cookie": "c=1", "x-mine": "1"}
        )
        for stream in (False, True) * 2:
            answer = await client.post(CHAT, json=chat(model="one", stream=stream))
            assert answer.status_code == 200, answer.text
            assert answer.headers[FALLBACK] == "127.0.0.1/big"
            assert answer.headers[INSTANCE] == "outside:127.0.0.1"
            head = outside.heads[-1].lower()
            assert b"authorization: bearer sk-elsewhere\r\n" in head
            for secret in (b"ka\r\n", b"cookie", b"x-mine", b"x-request-id", b"x-api-key"):
                assert secret not in head
            assert json.loads(outside.bodies[-1]) == chat(model="big", stream=stream)
        await eventually(running.settled)
        used = await running.used_by("a")
        text = json.dumps(used)
        assert text.count("4") >= 1, text
        account = next(iter(running.gateway.admission.accounts()))
        assert account.in_flight == 0
        shown = b"".join([part async for part in running.gateway.metrics.exposition()]).decode()
        assert 'fallbacks_total{fallback="127.0.0.1/big",model="one"} 4.0' in shown
        assert 'outcome="completed"' in shown
        # And where that fails as well, the client hears of it, once.
        outside.fault = {"status": 500, "body": '{"error": "outside"}'}
        failed = await client.post(CHAT, json=chat(model="one"))
        assert failed.status_code == 500
        await outside.kill()
        failed = await client.post(CHAT, json=chat(model="one"))
        assert failed.status_code == 503
        # What is not OpenAI's is not sent to a stranger.
        assert (await client.post("/tokenize", json={"model": "one"})).status_code == 503


async def test_a_client_that_leaves_a_service_elsewhere_leaves_nothing() -> None:
    one = FakeInstance(("one",))
    async with (
        outside_service() as (outside, models),
        rig([one], models=models) as (running, client, _),
    ):
        await one.kill()
        body = chat(model="one", fake={"hang": True})
        with pytest.raises(httpx.ReadTimeout):
            await client.post(CHAT, json=body, timeout=1)
        await eventually(lambda: outside.aborted == 1)
        await eventually(running.settled)
        assert not len(running.gateway.dataplane)


@pytest.mark.parametrize(
    ("models", "says"),
    [
        ({"a": {"serve": "b"}, "b": {"serve": "c"}}, "is itself an alias"),
        ({"a": {"serve": "b", "split": {"c": 1}}}, "one of them"),
        ({"a": {"split": {"c": 0}}}, "greater than 0"),
        ({"a": {"fallbacks": [{"model": "a"}]}}, "its own fallback"),
        ({"a": {"fallbacks": [{"model": "b", "api_key_env": "X"}]}}, "for a base_url"),
        ({"a": {"fallbacks": [{"model": "b", "base_url": "http://h/v1"}]}}, "must not end in /v1"),
        ({"a": {"fallbacks": [{"model": "b", "base_url": "http://169.254.1.1"}]}}, "link-local"),
        ({"a\nb": {"serve": "c"}}, "printable"),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_be_meant_is_refused(models: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_model(GatewayConfig, {"models": models}, "gateway.yaml")


async def test_routes_are_reloaded() -> None:
    engine = FakeInstance(("llama",))
    async with rig([engine]) as (running, client, _):
        assert (await client.post(CHAT, json=chat(model="gpt"))).status_code == 404
        gateway = running.gateway
        data = gateway.config.model_dump() | {"models": {"gpt": {"serve": "llama"}}}
        gateway.take_up(gateway.settings.prepare(GatewayConfig.model_validate(data)))
        assert (await client.post(CHAT, json=chat(model="gpt"))).status_code == 200
