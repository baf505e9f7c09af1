"""A trace's conversations as chats with real text, in front of an emulated instance."""

import asyncio

import pytest

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.files.prefix_trace import TracedText
from hetero_gateway.files.trace import LoadRequest, TraceRequest, schedule
from hetero_gateway.lab.emulator.settings import EmulatorSettings
from hetero_gateway.lab.load.client import Reply, parse_target
from hetero_gateway.lab.load.conversations import Conversations, answer_text
from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind, filler_pool
from hetero_gateway.lab.load.replay import replay
from hetero_gateway.lab.load.result import summarise
from tests.fakes.emulated import emulated

FAST = Constants(p1=1e-6, p2=1e-5, p3=0, p4=1e-3, p5=1e-9, p6=1e-5, p7=0, p8=1e-3)


def request(
    session: int, turn: int, prompt: int, output: int, runs, due_s: float = 0.0
) -> LoadRequest:
    text = TracedText(session, turn, tuple(runs), 64)
    return LoadRequest(due_s, prompt, output, text)


def talk() -> list[LoadRequest]:
    """Two sessions with one system prompt of 10 blocks; the first has three turns."""
    return [
        request(1, 1, 960, 64, [(0, 10), (20, 6)]),
        request(2, 1, 960, 64, [(0, 10), (30, 6)], 0.01),
        request(1, 2, 1280, 64, [(0, 10), (20, 6), (40, 5)], 0.02),
        request(1, 3, 1600, 64, [(0, 10), (20, 6), (40, 5), (50, 5)], 0.03),
    ]


async def test_the_next_turn_has_the_answer_that_came():
    talks = Conversations(talk(), filler_pool(), 4.0)
    first = await talks.messages(0)
    other = await talks.messages(1)
    assert [m["role"] for m in first] == ["system", "user"]
    assert first[0] == other[0]
    assert first[1] != other[1]
    # All of its 15 blocks, and a token of its own.
    assert sum(len(m["content"]) for m in first) == 4 * (960 + 1)
    assert talks.wants_text(0)
    assert not talks.wants_text(1)
    following = asyncio.create_task(talks.messages(2))
    await asyncio.sleep(0)
    assert not following.done()
    body = b'{"choices":[{"message":{"content":"Well said."}}]}'
    talks.finish(0, Reply(0.0, status=200, tail=body), stream=False)
    second = await following
    assert second[:2] == first
    assert second[2] == {"role": "assistant", "content": "Well said."}
    assert len(second[3]["content"]) == 4 * (1280 - 960 - 64 - 4)


async def test_a_turn_whose_predecessor_failed_goes_on_with_made_up_words():
    talks = Conversations(talk(), filler_pool(), 4.0)
    await talks.messages(0)
    talks.finish(0, None, stream=True)
    second = await talks.messages(2)
    assert len(second[2]["content"]) == 4 * 64


def test_a_turn_with_another_text_is_no_continuation():
    requests = [
        request(1, 1, 640, 64, [(0, 10)]),
        request(1, 2, 960, 64, [(0, 9), (90, 5)]),
        request(1, 4, 960, 64, [(0, 9), (90, 5)]),
    ]
    talks = Conversations(requests, filler_pool(), 4.0)
    assert not any(talks.wants_text(i) for i in range(3))


@pytest.mark.parametrize(
    ("tail", "stream", "text"),
    [
        (b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n', True, "a"),
        (b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n', True, None),
        (b'{"choices":[{"message":{"content":null}}]}', False, None),
        (b"[1]", False, None),
        (b"", True, None),
    ],
)
def test_an_answers_text(tail, stream, text):
    assert answer_text(Reply(0.0, status=200, tail=tail), stream=stream) == text
    assert answer_text(Reply(0.0, status=500, tail=tail), stream=stream) is None
    assert answer_text(Reply(0.0, failure="reset", tail=tail), stream=stream) is None


async def sent(requests, stream: bool = True, **settings):
    """The records of these chats with an emulated instance."""
    maker = BodyMaker("m", PromptKind.CHAT, stream, 4.0, filler_pool())
    profile = Profile("GPU", "m", 1, FAST, 64_000, 64)
    async with emulated(EmulatorSettings(profile, models=("m",), **settings)) as (url, _):
        return await replay(parse_target(url), requests, maker, timeout_s=60)


@pytest.mark.parametrize("stream", [True, False])
async def test_over_http_the_turns_find_what_the_last_one_left(stream):
    records = await sent(talk(), stream, prompt_tokens_details=True)
    assert [record.error for record in records] == [None] * 4
    # The trace's lengths, but for a few tokens of the template.
    lengths = [record.input_tokens for record in records]
    assert lengths == pytest.approx([960, 960, 1280, 1600], abs=24)
    cached = [record.cached_tokens for record in records]
    assert cached[0] == 0
    assert cached[2:] == pytest.approx([1024, 1344], abs=32)
    assert records[2].sent_s >= records[0].end_s
    assert records[3].sent_s >= records[2].end_s
    # Whoever waited for an answer was not sent late.
    assert records[3].sent_s - records[3].due_s < 0.2
    summary = summarise(records)
    assert summary.cached_share == pytest.approx(sum(cached) / sum(lengths))
    assert summary.to_dict()["cached_share"] == summary.cached_share


async def test_without_details_nobody_knows_the_share():
    records = await sent(talk()[:1])
    assert records[0].cached_tokens is None
    assert summarise(records).cached_share is None


def test_a_trace_with_texts_is_stretched_to_a_rate():
    text = talk()[0].text
    trace = [TraceRequest(t, 960, 64, text=text) for t in (5.0, 6.0, 9.0)]
    assert [r.due_s for r in schedule(trace, 2.0, 0)] == [0.0, 0.25, 1.0]
    assert [r.due_s for r in schedule(trace, None, 0)] == [0.0, 1.0, 4.0]
