"""The real `openai` package, unchanged, through the gateway to a real vLLM."""

import json
from typing import Any

import openai
import pytest
from real_vllm.cluster import Cluster, chat
from real_vllm.servers import ALIASES, SERVED_NAME

pytestmark = pytest.mark.real_vllm

MESSAGES: Any = [{"role": "user", "content": "def f(x): return x"}]
IGNORE_EOS = {"ignore_eos": True}
FORCED: Any = {"model": SERVED_NAME, "messages": MESSAGES, "extra_body": IGNORE_EOS}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


@pytest.fixture
def client(cluster: Cluster) -> Any:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_plain_chat_answers_with_the_tokens_asked_for(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**FORCED, max_tokens=20)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20


def test_a_streamed_chat_ends_with_its_finish_reason_and_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        **FORCED, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) > 5
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20


async def test_the_async_client_answers_plain_and_streamed(cluster: Cluster) -> None:
    client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    plain = await client.chat.completions.create(**FORCED, max_tokens=10)
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 10
    stream = await client.chat.completions.create(**FORCED, max_tokens=10, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "length"
    await client.close()


def test_completions_stream_every_choice_of_every_prompt(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=SERVED_NAME,
        prompt=["import os", "class A:"],
        n=2,
        max_tokens=8,
        stream=True,
        extra_body=IGNORE_EOS,
    )
    finished = [c.choices[0].index for c in stream if c.choices and c.choices[0].finish_reason]
    assert sorted(finished) == [0, 1, 2, 3]


def test_responses_answer(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=SERVED_NAME, input="import os", max_output_tokens=8)
    assert answer.usage is not None
    assert answer.usage.output_tokens == 8


def test_responses_stream_to_their_last_event(client: openai.OpenAI) -> None:
    events = client.responses.create(
        model=SERVED_NAME, input="import os", max_output_tokens=8, stream=True
    )
    assert list(events)[-1].type in ("response.completed", "response.incomplete")


def test_a_response_format_reaches_the_engine(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=SERVED_NAME,
        messages=MESSAGES,
        max_tokens=100,
        response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}},
    )
    assert json.loads(answer.choices[0].message.content or "")["colour"] in ("red", "green")


def test_a_tool_call_comes_back(client: openai.OpenAI) -> None:
    """Random weights make any JSON the arguments, some of it endless: so 16 choices, and seeded."""
    tool: Any = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}
    answer = client.chat.completions.create(
        model=ALIASES["small"],
        messages=MESSAGES,
        max_tokens=60,
        n=16,
        seed=1,
        tools=[tool],
        tool_choice="required",
    )
    calls: list[Any] = [call for c in answer.choices for call in c.message.tool_calls or []]
    assert calls
    assert {call.function.name for call in calls} == {"paint"}
    json.loads(calls[0].function.arguments)


def test_embeddings_of_a_generative_model_fail_as_the_engine_says(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.embeddings.create(model=SERVED_NAME, input="hello")
    assert raised.value.response.json() == {"detail": "Not Found"}


def test_the_models_are_the_union_over_the_instances(client: openai.OpenAI) -> None:
    models = {model.id: model for model in client.models.list()}
    assert set(models) == {SERVED_NAME, *ALIASES.values()}


def test_a_name_of_one_instance_reaches_only_that_one(cluster: Cluster) -> None:
    for instance, alias in ALIASES.items():
        for _ in range(3):
            answer = cluster.post("/v1/chat/completions", chat(2, alias))
            assert answer.status_code == 200
            assert answer.headers["x-hetero-gateway-instance"] == instance


def test_the_messages_endpoint_streams_to_message_stop(cluster: Cluster) -> None:
    body = {"model": SERVED_NAME, "max_tokens": 8, "messages": MESSAGES, "stream": True}
    with cluster.stream("/v1/messages", body) as response:
        text = response.read().decode()
    assert response.status_code == 200
    assert "event: message_stop" in text
    assert "[DONE]" not in text


@pytest.mark.parametrize("home", ALIASES)
def test_a_response_is_continued_and_found_where_it_was_made(client, home):
    first = client.responses.create(model=ALIASES[home], input="def f(x):", max_output_tokens=4)
    for model in (SERVED_NAME, ALIASES[home]):
        raw = client.responses.with_raw_response.create(
            model=model, input="and g?", previous_response_id=first.id, max_output_tokens=4
        )
        assert raw.headers["x-hetero-gateway-instance"] == home
        following = raw.parse()
        assert following.previous_response_id == first.id
        assert following.usage is not None
        assert first.usage is not None
        assert following.usage.input_tokens > first.usage.total_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        client.responses.cancel(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_0")
