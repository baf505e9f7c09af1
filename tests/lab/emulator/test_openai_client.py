"""What tests/e2e does not ask of an emulated instance with the real ``openai`` package."""

import json
import math

import pytest
from openai import OpenAI
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture
def client(instance):
    with OpenAI(base_url=f"{instance.base_url}/v1", api_key="x", max_retries=0) as client:
        yield client


def test_probabilities(client):
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
    chat = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    told = chat.choices[0].logprobs
    assert [len(each.top_logprobs) for each in told.content] == [3, 3]
    assert 0 < math.exp(told.content[0].logprob) <= 1


def test_streamed_completions(client):
    chunks = list(client.completions.create(model="tiny", prompt="a", max_tokens=4, stream=True))
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_tools(client, choice):
    asked = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL], "tool_choice": choice}
    plain = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion()
    for answer in (plain, streamed):
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {})


class Place(BaseModel):
    name: str
    people: int
    near: list[str]


def test_response_format_is_parsed(client):
    answer = client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Place)
    assert isinstance(answer.choices[0].message.parsed, Place)


def test_responses(client):
    answer = client.responses.create(model="tiny", input="hello", max_output_tokens=400)
    assert answer.output_text
    events = list(client.responses.create(model="tiny", input="hello", stream=True))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text


def test_embeddings(client):
    plain = client.embeddings.create(model="tiny", input=["a", "b"], encoding_format="float")
    packed = client.embeddings.create(model="tiny", input=["a", "b"])  # asks for base64
    assert len(plain.data) == 2
    for one, other in zip(plain.data, packed.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
