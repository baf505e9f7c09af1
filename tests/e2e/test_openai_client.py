"""The real ``openai`` package against the installed commands: emulated instances, gateway."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.fakes.processes import Process, emulated_cluster, wait_for

pytestmark = pytest.mark.slow

FAST = "V100-32GB-NVLink2/Llama-3-8B/tp4"
SLOW = "V100-32GB-NVLink2/Llama-3-8B/tp1"
MODEL = "llama-3-8b"
HELLO = [{"role": "user", "content": "Say hello"}]


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two workers"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    profiles = {"fast": FAST, "slow": SLOW}
    directory = tmp_path_factory.mktemp("cluster")
    with emulated_cluster(directory, profiles, workers=request.param) as (gateway, _):
        yield gateway.url


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_plain_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12)
    assert answer.choices[0].message.content
    assert 1 <= answer.usage.completion_tokens <= 12


def test_streamed_chat_with_usage(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


async def test_the_async_client_streamed_and_not(url: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5)
                for _ in range(20)
            )
        )
        assert all(answer.choices for answer in answers)
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=5, stream=True
        )
        assert [chunk async for chunk in stream]


def test_completions_and_several_choices(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Once", max_tokens=5, n=3)
    assert len(answer.choices) == 3


def test_tools_pass_through(client: OpenAI) -> None:
    function = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    calls = answer.choices[0].message.tool_calls
    assert calls[0].function.name == "weather"


def test_response_format_passes_through(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, response_format={"type": "json_object"}
    )
    text = answer.choices[0].message.content
    assert text.startswith("{")
    assert text.endswith("}")


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_errors_are_the_packages_own(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="nope", messages=HELLO)
    with pytest.raises(openai.BadRequestError):  # the engine's own, passed through
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=-1)
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model=MODEL, prompt="x" * 800_000)  # not ids: it walks along them


def test_leaving_a_stream_aborts_it_on_the_engine(client: OpenAI, url: str) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        stream=True,
        max_tokens=7000,
        n=4,  # more than fits between here and the engine: it cannot end before it is read
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    assert sum(in_flight(url).values()) == 1
    stream.close()
    wait_for("its end", lambda: in_flight(url) == {"fast": 0, "slow": 0})


def in_flight(url: str) -> dict[str, int]:
    document = httpx.get(f"{url}/admin/instances", timeout=60).json()
    return {row["id"]: row["in_flight"] for row in document["instances"]}


def test_a_killed_instance_hurts_only_its_own_streams(tmp_path: Path) -> None:
    with emulated_cluster(tmp_path, {"fast": FAST, "slow": SLOW}, time_scale=5) as (
        gateway,
        instances,
    ):
        with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            long = {"model": MODEL, "messages": HELLO, "stream": True, "max_tokens": 2000}
            streams = []
            for draining in (False, True):  # three on each
                change = {"draining": draining}
                httpx.patch(f"{gateway.url}/admin/instances/fast", json=change, timeout=60)
                streams += [
                    client.chat.completions.create(
                        **long, seed=seed, extra_body={"ignore_eos": True}
                    )  # type: ignore[call-overload]
                    for seed in (None, None, 7)
                ]
            httpx.patch(f"{gateway.url}/admin/instances/fast", json={"draining": False}, timeout=60)
            victims = [
                s for s in streams if s.response.headers["x-hetero-gateway-instance"] == "fast"
            ]
            assert 0 < len(victims) < len(streams)
            instances["fast"].process.kill()
            for stream in victims[:-1]:  # they go on elsewhere
                for _ in range(500):
                    assert next(stream).choices[0].delta.content is not None
            told = httpx.get(f"{gateway.url}/metrics", timeout=60).text
            assert 'streams_continued_total{result="continued"} 2.0' in told
            with pytest.raises(openai.APIError, match="fast"):
                list(victims[-1])  # whose draws begin anew elsewhere
            for _ in range(10):
                answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3)
                assert answer.choices
            for stream in streams:
                stream.close()
            instances["slow"].process.kill()
            instances["slow"].process.wait()
            with pytest.raises(openai.InternalServerError) as caught:
                client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3)
            assert caught.value.status_code == 503
            assert caught.value.response.headers["retry-after"]


@pytest.mark.parametrize("number", [2, 15])
def test_a_signal_ends_serve_with_exit_code_0(tmp_path: Path, number: int) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("instances: []\n")
    gateway = Process("serve", "-c", str(path), "--port", "0")
    url = gateway.wait_ready()
    assert httpx.get(f"{url}/readyz", timeout=60).status_code == 503
    assert gateway.stop(number) == 0
    assert "Traceback" not in "".join(gateway.lines)
