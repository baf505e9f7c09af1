"""What an engine says of a request is believed as far as it can be true."""

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hetero_gateway.core.lengths.predictors import LengthFeatures
from tests.fakes.running import CHAT, RunningGateway, eventually, rig
from tests.fakes.vllm import FakeInstance

FINE = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def saying(prompt_tokens: str, completion_tokens: str) -> dict[str, object]:
    usage = f'{{"prompt_tokens":{prompt_tokens},"completion_tokens":{completion_tokens}}}'
    return FINE | {"fake": {"status": 200, "body": f'{{"choices":[],"usage":{usage}}}'}}


LIES = {
    "once, 10^18": [str(10**18)],
    "48 of 30 000": ["30000"] * 48,
    "48 within the context": ["4000"] * 48,
    "310 digits": ["1" + "0" * 309] * 3,
    "5 000 digits": ["9" * 5000] * 3,
    "15 digits": ["9" * 15] * 48,
    "none": ["0", "-1", "1e9", "null", '"5"', "[]", "1.5"],
}


@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("max_model_len", [4096, None])
async def test_whatever_usage_an_engine_makes_up_later_requests_are_served(
    lies: str, max_model_len: int | None
) -> None:
    fakes = [FakeInstance(max_model_len=max_model_len) for _ in range(2)]
    async with rig(fakes) as (running, client, _):
        for count in LIES[lies]:
            told = await client.post(CHAT, json=saying(count, count))
            assert told.status_code == 200
        for size in (5, 5000, 12_000):
            body = FINE | {"messages": [{"role": "user", "content": "x " * (size // 2)}]}
            assert (await client.post(CHAT, json=body)).status_code == 200
            assert (await client.post(CHAT, json=body | {"stream": True})).status_code == 200
        await eventually(running.settled)
        gateway = running.gateway
        assert 0.25 <= gateway.bytes_per_token.ratio("m") <= 64
        if max_model_len is not None:
            assert gateway.predictor.predict(LengthFeatures("m", 10)) <= max_model_len
        for family in text_string_to_metric_families(await running.metrics()):
            for sample in family.samples:
                if family.name.endswith(("put_tokens", "prediction_ratio")):
                    assert sample.value < 1e10, sample


async def test_estimates_recover_from_an_engine_that_lied() -> None:
    async with rig() as (running, client, _):
        for _ in range(150):
            await client.post(CHAT, json=saying("3000", "4000"))
        ratio = running.gateway.bytes_per_token.ratio
        catch_up = running.gateway.dataplane.recorder.catch_up
        catch_up()
        assert ratio("m") < 1
        for _ in range(180):
            await client.post(CHAT, json=saying("9", "20"))
        catch_up()
        # The messages are 38 bytes of JSON.
        assert ratio("m") == pytest.approx(len(json.dumps(FINE["messages"])) / 9, rel=0.2)


async def test_no_estimate_refuses_a_request_and_an_exact_length_does() -> None:
    async with rig(2) as (_, client, _):
        fits = {"model": "m", "prompt": [1] * 4095}
        for body in (
            {"model": "m", "prompt": "x" * 3_000_000},
            {"model": "m", "prompt": ["x" * 100_000] * 3},
            {"model": "m", "prompt": [1] * 9000, "truncate_prompt_tokens": 100},
            fits,
        ):
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        exact = await client.post("/v1/completions", json=fits | {"prompt": [1] * 4096})
        assert exact.status_code == 400
        assert exact.json()["error"]["code"] == "context_length_exceeded"


async def test_of_unequal_contexts_the_largest_gets_what_may_fit_none() -> None:
    fakes = [FakeInstance(max_model_len=length) for length in (1024, 8192)]
    async with rig(fakes) as (_, client, _):
        for _ in range(5):
            body = FINE | {"messages": "x" * 200_000}
            assert (await client.post(CHAT, json=body)).status_code == 200
        assert [len(fake.bodies) for fake in fakes] == [0, 5]


async def counted(running: RunningGateway, what: str = "output_tokens") -> float:
    """So far, of all requests."""
    await running.counted()
    return getattr(running.gateway.metrics.counts("m", "i0"), what)


@pytest.mark.parametrize("workers", [1, 2])
async def test_an_answer_has_the_tokens_that_came_whatever_its_usage_says(workers: int) -> None:
    async with rig(workers=workers) as (running, client, _):
        cases: list[tuple[dict[str, object], float, float]] = [
            # (what the instance does, at least, at most)
            ({"events": 40, "event_tokens": 0}, 40, 42),
            ({"events": 400, "event_tokens": 0}, 400, 402),
            # Of few events little can be said, and more than one for each is believed.
            ({"events": 3, "event_tokens": 0}, 0, 0),
            ({"events": 100, "event_tokens": 1}, 100, 100),
            ({"events": 100, "event_tokens": 3}, 300, 300),
        ]
        for fake, least, most in cases:
            before = await counted(running)
            body = FINE | {"stream": True, "fake": fake}
            assert (await client.post(CHAT, json=body)).status_code == 200
            assert least <= await counted(running) - before <= most, fake
        for field, least in (({}, 1000), ({"logprobs": True}, 0), ({"max_tokens": 9}, 9)):
            before = await counted(running)
            text = '{"choices":[{"message":{"content":"%s"}}],"usage":%s}'
            usage = '{"prompt_tokens":9,"completion_tokens":0}'
            body = FINE | field | {"fake": {"status": 200, "body": text % ("x" * 99_000, usage)}}
            assert (await client.post(CHAT, json=body)).status_code == 200
            assert (await counted(running) - before > 0) is (least > 0), field
            assert await counted(running) - before >= least, field


async def test_a_prompt_of_token_ids_is_as_long_as_they_are() -> None:
    async with rig() as (running, client, _):
        for told, counts in (("0", 500), ("1", 500), ("500", 500), ("501", 501), ("99999999", 500)):
            before = await counted(running, "input_tokens")
            body = saying(told, "3") | {"prompt": [7] * 500}
            del body["messages"]
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert await counted(running, "input_tokens") - before == counts, told
