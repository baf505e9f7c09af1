"""Every path's work is counted: within 25 % of what the engine's usage says, prompt by prompt.

The truth is vLLM 0.32's own arithmetic (``vllm/entrypoints``), with the emulated instances' rule of
what a token is; where they serve the path, their usage is asked. A path of the table without a case
here fails ``test_every_path_that_costs_steps_has_a_case``.
"""

import base64
import io
import json
import math
import struct
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import pytest

from hetero_gateway.engines.vllm import WORK_BY_PATH, Work
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.gateway.admission.clients import EVERYBODY
from hetero_gateway.gateway.dataplane.intake import Intake, Job
from hetero_gateway.gateway.request.body_fields import LEAST_BYTES
from hetero_gateway.gateway.turns import finish
from hetero_gateway.http.heads import Inbound
from hetero_gateway.lab.emulator.settings import EmulatorSettings
from hetero_gateway.lab.emulator.text import tokenize
from tests.fakes.emulated import emulated
from tests.fakes.running import FAST, rig
from tests.fakes.vllm import FakeInstance

WORDS = (
    "The scheduler places each request on the instance that is expected to finish it first, and "
    "counts what it has placed until the answer is complete. "
)
QUERY = "Which instance gets the next request, and who decides that?"
IMAGE = "data:image/png;base64," + base64.b64encode(b"\x89PNG" * 4000).decode()
IMAGE_TOKENS = 576
SPEECH_TOKENS_PER_S = 100


def texts(count: int, times: int = 3) -> list[str]:
    """Unequal ones."""
    return [WORDS * (1 + i % times) for i in range(count)]


def count_tokens(text: str) -> int:
    return len(tokenize(text))


def tokens(*parts: str) -> int:
    return sum(count_tokens(part) for part in parts)


def chat(*contents: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def chat_tokens(*contents: str) -> int:
    """With what the template adds: 4 for each message, and 3 for the answer's header."""
    return tokens(*contents) + 4 * len(contents) + 3


def blocks(*contents: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": text}]} for text in contents]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"look_up_{i}",
            "description": WORDS,
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
        },
    }
    for i in range(8)
]
TOOLS_TOKENS = count_tokens(json.dumps(TOOLS, separators=(",", ":")))
PICTURE = {"type": "image_url", "image_url": {"url": IMAGE}}


class Case(NamedTuple):
    """A body, and what an engine computes for it."""

    body: dict[str, Any]
    prompt_tokens: int  # of all prompts
    prompts: int = 1  # sequences that are prefilled
    n: int = 1  # answers to each
    most: int | None = None  # output tokens of one, where a limit is given


def pairs(query: str, documents: list[str]) -> int:
    return sum(count_tokens(f"{query} {document}") for document in documents)


def completions() -> list[Case]:
    ids = list(range(1, 801))
    return [
        Case({"prompt": WORDS * 9, "max_tokens": 7}, tokens(WORDS * 9), most=7),
        Case({"prompt": texts(7), "n": 3}, tokens(*texts(7)), 7, 3),
        Case({"prompt": ids}, 800),
        Case({"prompt": [ids, ids[:100], ids[:9]], "n": 2}, 909, 3, 2),
    ]


def chats() -> list[Case]:
    image = [{"role": "user", "content": [{"type": "text", "text": WORDS}, PICTURE, PICTURE]}]
    return [
        Case({"messages": chat(*texts(5))}, chat_tokens(*texts(5))),
        Case({"messages": blocks(*texts(5)), "n": 4}, chat_tokens(*texts(5)), n=4),
        Case(
            {"messages": chat(QUERY), "tools": TOOLS, "max_completion_tokens": 9},
            chat_tokens(QUERY) + TOOLS_TOKENS,
            most=9,
        ),
        Case({"messages": image}, chat_tokens(WORDS) + 2 * IMAGE_TOKENS),
        # What a chat does not read does not stand for what it does.
        Case({"messages": chat(*texts(5)), "prompt": [1]}, chat_tokens(*texts(5))),
    ]


def responses() -> list[Case]:
    items = [{"type": "message", **message} for message in chat(*texts(6))]
    image = [{"role": "user", "content": [{"type": "input_text", "text": WORDS},
              {"type": "input_image", "image_url": IMAGE}]}]  # fmt: skip
    return [
        Case({"input": WORDS * 5, "max_output_tokens": 5}, chat_tokens(WORDS * 5), most=5),
        Case({"input": items, "instructions": WORDS * 4}, chat_tokens(*texts(6), WORDS * 4)),
        Case({"input": QUERY, "tools": TOOLS}, chat_tokens(QUERY) + TOOLS_TOKENS),
        Case({"input": image}, chat_tokens(WORDS) + IMAGE_TOKENS),
        Case(
            {"input": QUERY, "previous_input_messages": chat(*texts(5))},
            chat_tokens(QUERY, *texts(5)),
        ),
    ]


def messages() -> list[Case]:
    system = [{"type": "text", "text": WORDS * 6, "cache_control": {"type": "ephemeral"}}]
    return [
        Case({"messages": chat(*texts(3)), "max_tokens": 6}, chat_tokens(*texts(3)), most=6),
        Case(
            {"messages": blocks(QUERY), "system": system, "max_tokens": 6},
            chat_tokens(QUERY, WORDS * 6),
            most=6,
        ),
        Case(
            {"messages": chat(QUERY), "system": WORDS, "tools": TOOLS, "max_tokens": 6},
            chat_tokens(QUERY, WORDS) + TOOLS_TOKENS,
            most=6,
        ),
    ]


def inputs() -> list[Case]:
    """/v1/embeddings, /pooling, /classify."""
    ids = list(range(1, 801))
    conversations = [chat(*texts(3)), chat(QUERY, WORDS)]
    all_of_them = chat_tokens(*texts(3)) + chat_tokens(QUERY, WORDS)
    picture = [{"role": "user", "content": [PICTURE, {"type": "text", "text": WORDS}]}]
    return [
        Case({"input": WORDS * 9}, tokens(WORDS * 9)),
        Case({"input": texts(40)}, tokens(*texts(40)), 40),
        Case({"input": ids}, 800),
        Case({"input": [ids, ids[:50]]}, 850, 2),
        Case({"messages": chat(*texts(4))}, chat_tokens(*texts(4))),
        Case({"messages": conversations}, all_of_them, 2),
        Case({"input": chat(*texts(4))}, chat_tokens(*texts(4))),
        Case({"input": conversations}, all_of_them, 2),
        Case({"messages": picture}, chat_tokens(WORDS) + IMAGE_TOKENS),
        Case({"input": [WORDS * 99] * 4, "truncate_prompt_tokens": 64}, 4 * 64, 4),
        Case({"input": ids, "truncate_prompt_tokens": 64}, 64),
    ]


def scores() -> list[Case]:
    documents = texts(30)
    queries = [QUERY * (1 + i % 2) for i in range(30)]
    both = sum(count_tokens(f"{one} {two}") for one, two in zip(queries, documents, strict=True))
    pictures = {"content": [{"type": "text", "text": WORDS}, PICTURE]}
    cases = [
        Case({one: QUERY, two: documents}, pairs(QUERY, documents), 30)
        for one, two in (
            ("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"),
            ("queries", "items"),
        )
    ]  # fmt: skip
    return [
        *cases,
        Case({"text_1": WORDS, "text_2": WORDS * 2}, pairs(WORDS, [WORDS * 2])),
        Case({"text_1": [QUERY], "text_2": documents}, pairs(QUERY, documents), 30),
        Case({"text_1": queries, "text_2": documents}, both, 30),
        Case({"queries": QUERY * 40, "documents": documents}, pairs(QUERY * 40, documents), 30),
        Case(
            {"queries": WORDS, "documents": [pictures] * 3},
            3 * (2 * tokens(WORDS) + IMAGE_TOKENS),
            3,
        ),
        Case({"text_1": QUERY, "text_2": [WORDS * 99] * 5, "truncate_prompt_tokens": 100}, 500, 5),
    ]


def reranks() -> list[Case]:
    documents = texts(50)
    objects = [{"text": text} for text in documents]
    several = [{"content": [{"type": "text", "text": text}, PICTURE]} for text in texts(4)]
    return [
        Case({"query": QUERY, "documents": documents, "top_n": 3}, pairs(QUERY, documents), 50),
        Case({"query": QUERY, "documents": objects}, pairs(QUERY, documents), 50),
        Case({"query": QUERY * 50, "documents": objects}, pairs(QUERY * 50, documents), 50),
        Case({"query": QUERY, "documents": documents[2]}, pairs(QUERY, documents[2:3])),
        Case(
            {"query": {"content": [{"type": "text", "text": QUERY * 3}]}, "documents": several},
            pairs(QUERY * 3, texts(4)) + 4 * IMAGE_TOKENS,
            4,
        ),
        Case({"query": QUERY, "documents": [WORDS * 99] * 6, "truncate_prompt_tokens": 90}, 540, 6),
    ]


def items() -> list[Case]:
    """/generative_scoring: one prompt for each item, with the query in front or behind."""
    ids = list(range(1, 301))
    return [
        Case({"query": QUERY * 9, "items": texts(9), "label_token_ids": [1, 2]},
             tokens(*texts(9)) + 9 * tokens(QUERY * 9), 9),
        Case({"query": ids, "items": [ids[:40], ids[:60]], "label_token_ids": [1]}, 700, 2),
        Case({"query": ids, "items": texts(5), "label_token_ids": [1]},
             5 * 300 + tokens(*texts(5)), 5),
    ]  # fmt: skip


def batches() -> list[Case]:
    conversations = [chat(*texts(3)), chat(QUERY, WORDS), chat(WORDS * 4)]
    each = chat_tokens(*texts(3)) + chat_tokens(QUERY, WORDS) + chat_tokens(WORDS * 4)
    return [
        Case({"messages": conversations, "max_tokens": 4}, each, 3, most=4),
        Case({"messages": conversations, "n": 2}, each, 3, 2),
    ]


def token_ids() -> list[Case]:
    ids = list(range(1, 1201))
    return [
        Case({"token_ids": ids, "sampling_params": {}}, 1200),
        Case({"token_ids": ids, "sampling_params": {"n": 5, "max_tokens": 20}}, 1200, 1, 5, 20),
        Case(
            {"sampling_params": {"max_tokens": 8, "stop": ["x" * 700]}, "token_ids": ids}, 1200,
            most=8,
        ),
    ]  # fmt: skip


def cohere_chats() -> list[Case]:
    documents = [{"data": {"title": "one", "text": text}} for text in texts(4)]
    return [
        Case({"messages": chat(*texts(4)), "max_tokens": 9}, chat_tokens(*texts(4)), most=9),
        Case(
            {"messages": chat(QUERY), "documents": documents},
            chat_tokens(QUERY) + count_tokens(json.dumps(documents)),
        ),
    ]


def cohere_embeds() -> list[Case]:
    contents = [
        {"content": [{"type": "text", "text": WORDS}, PICTURE]},
        {"content": [{"type": "text", "text": WORDS * 3}]},
    ]
    return [
        Case({"texts": texts(20), "input_type": "search_document"}, tokens(*texts(20)), 20),
        Case({"inputs": contents}, tokens(WORDS * 4) + IMAGE_TOKENS, 2),
        Case({"images": [IMAGE, IMAGE]}, 2 * IMAGE_TOKENS, 2),
    ]


def decisions() -> list[Case]:
    """/v1/systemone: the state is read once for each question."""
    questions = {f"q{i}": {"type": "yes_no", "instructions": WORDS} for i in range(6)}
    asked = sum(count_tokens(json.dumps(each)) for each in questions.values())
    state = {"log": texts(5)}
    return [
        Case({"state": WORDS * 20, "questions": questions}, asked + 6 * tokens(WORDS * 20), 6),
        Case(
            {"state": state, "questions": questions, "instructions": WORDS, "images": [IMAGE]},
            asked + 6 * (tokens(*texts(5), WORDS) + IMAGE_TOKENS),
            6,
        ),
    ]


def anything() -> list[Case]:
    return [*completions(), *chats(), *inputs()[:4], *scores()[:4], *reranks()[:3]]


# Recordings, as bytes of the formats that are uploaded.


def wav(seconds: float, hz: int = 16_000) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(hz)
        writer.writeframes(bytes(2 * round(seconds * hz)))
    return out.getvalue()


def flac(seconds: float, hz: int = 44_100) -> bytes:
    stream = (hz << 44 | 1 << 41 | 15 << 36 | round(seconds * hz)).to_bytes(8, "big")
    return b"fLaC\x80\0\0\x22" + bytes(10) + stream + bytes(16) + bytes(round(seconds * 30_000))


def ogg(seconds: float) -> bytes:
    first = b"OggS\0\x02" + bytes(22) + b"OpusHead" + bytes(11)
    body = b"OggS\0\0" + bytes(22) + bytes(round(seconds * 3000))
    return first + body + b"OggS\0\x04" + struct.pack("<q", round(seconds * 48_000)) + bytes(14)


def mp3(seconds: float, *, counted: bool = False) -> bytes:
    head = b"ID3\x04\0\0\0\0\x02\x01" + bytes(257) + b"\xff\xfb\x90\x00"  # 128 kbit/s, 44.1 kHz
    if not counted:
        return head + bytes(round(seconds * 16_000))
    frames = round(seconds * 44_100 / 1152)
    return head + bytes(32) + b"Xing" + struct.pack(">II", 1, frames) + bytes(round(seconds * 9000))


def m4a(seconds: float) -> bytes:
    index = b"mvhd" + bytes(12) + struct.pack(">II", 1000, round(seconds * 1000)) + bytes(80)
    return b"\0\0\0\x20ftypM4A " + bytes(20) + bytes(round(seconds * 8000)) + b"moov" + index


def recordings() -> dict[str, tuple[bytes, float]]:
    return {
        "wav": (wav(20), 20),
        "wav of 48 kHz": (wav(7, 48_000), 7),
        "flac": (flac(95), 95),
        "ogg": (ogg(240), 240),
        "mp3": (mp3(61), 61),
        "mp3 of unequal frames": (mp3(600, counted=True), 600),
        "m4a": (m4a(125), 125),
        "of an unknown kind, 32 kbit/s": (b"\x1a\x45\xdf\xa3" + bytes(4000 * 12), 12),
    }


def as_form(recording: bytes, **fields: str) -> bytes:
    parts = [
        b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (k.encode(), v.encode())
        for k, v in fields.items()
    ]
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    return b"".join((*parts, head, recording, b"\r\n--b--\r\n"))


CASES: dict[str, list[Case]] = {
    "/v1/chat/completions": chats(),
    "/v1/completions": completions(),
    "/v1/responses": responses(),
    "/v1/messages": messages(),
    "/v1/chat/completions/batch": batches(),
    "/inference/v1/generate": token_ids(),
    "/generative_scoring": items(),
    "/invocations": anything(),
    "/cohere/v2/chat": cohere_chats(),
    "/v1/systemone": decisions(),
    "/v1/embeddings": inputs(),
    "/v2/embed": cohere_embeds(),
    "/pooling": [*inputs(), Case({"data": {"rows": texts(9)}}, tokens(*texts(9)))],
    "/classify": inputs(),
    "/score": scores(),
    "/v1/score": scores(),
    "/rerank": reranks(),
    "/v1/rerank": reranks(),
    "/v2/rerank": reranks(),
    # Of vLLM's sister projects: their prompt is a text.
    "/v1/audio/speech": [Case({"input": WORDS * 9, "voice": "a"}, tokens(WORDS * 9))],
    "/v1/images/generations": [Case({"prompt": WORDS * 2, "n": 1}, tokens(WORDS * 2))],
    "/v1/moderations": inputs()[:2],
}
# Forms, with a recording.
SPEECH = ("/v1/audio/transcriptions", "/v1/audio/translations")
SERVED_BY_THE_EMULATOR = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
    "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
)  # fmt: skip


def test_every_path_that_costs_steps_has_a_case() -> None:
    paths = {path for path, work in WORK_BY_PATH.items() if work is not Work.LIGHT}
    assert paths == {*CASES, *SPEECH}
    assert all(CASES.values())


@asynccontextmanager
async def intake_of_a_gateway() -> AsyncIterator[Intake]:
    async with rig([FakeInstance(max_model_len=1 << 20)]) as (running, *_):
        yield running.gateway.dataplane.intake


def described(intake: Intake, path: str, body: bytes, kind: bytes = b"application/json") -> Job:
    inbound = Inbound(path, path.encode(), WORK_BY_PATH[path], [(b"content-type", kind)])
    inbound.body = body
    parsed = finish(intake.read_in_steps(inbound, None))
    at_once = None if len(body) >= LEAST_BYTES else parsed
    assert intake.read(inbound, None) == at_once, "the two ways differ"
    return intake.describe(inbound, EVERYBODY, parsed)


def prompt_tokens(job: Job) -> int:
    return job.request.prompt_tokens * job.parsed.prompt_count


@pytest.mark.parametrize("path", CASES)
async def test_what_a_request_is_taken_to_cost_is_within_a_quarter_of_its_usage(path: str) -> None:
    async with intake_of_a_gateway() as intake:
        for case in CASES[path]:
            for pad in ({}, {"unknown": "x" * LEAST_BYTES}):
                body = json.dumps({"model": "m"} | case.body | pad).encode()
                job = described(intake, path, body)
                shown = json.dumps(case.body)[:200]
                assert prompt_tokens(job) == pytest.approx(case.prompt_tokens, rel=0.25), shown
                assert job.parsed.prompt_count == case.prompts, shown
                assert job.request.sequences == case.prompts * case.n, shown
                # Of one sequence, as far as it is placed: memory is what all of them have.
                mean = case.prompt_tokens / case.prompts
                assert job.request.prompt_tokens == pytest.approx(mean, rel=0.25, abs=1), shown
                assert job.estimated_tokens() >= prompt_tokens(job)
                if WORK_BY_PATH[path] is Work.GENERATE and path != "/invocations":
                    assert job.parsed.max_output_tokens == case.most, shown


@pytest.mark.parametrize("path", SPEECH)
@pytest.mark.parametrize("kind", recordings())
async def test_a_recording_costs_its_seconds(path: str, kind: str) -> None:
    recording, seconds = recordings()[kind]
    async with intake_of_a_gateway() as intake:
        body = as_form(recording, model="m", prompt=WORDS, stream="true")
        job = described(intake, path, body, b"multipart/form-data; boundary=b")
        pieces = math.ceil(seconds / 30)
        usage = seconds * SPEECH_TOKENS_PER_S + pieces * tokens(WORDS)
        assert prompt_tokens(job) == pytest.approx(usage, rel=0.25)
        assert job.parsed.prompt_count == pytest.approx(pieces, abs=1)
        assert job.parsed.stream


async def test_a_recordings_header_cannot_make_it_short() -> None:
    """Bytes that an engine has to read are seconds, at whatever rate they can have."""
    lies = (
        ogg(600)[:-30] + b"OggS\0\x04" + struct.pack("<q", 48) + bytes(14),
        mp3(600, counted=True).replace(struct.pack(">II", 1, 22969), struct.pack(">II", 1, 1)),
        m4a(600).replace(struct.pack(">II", 1000, 600_000), struct.pack(">II", 1000, 1)),
    )
    async with intake_of_a_gateway() as intake:
        for lie in lies:
            body = as_form(lie, model="m")
            job = described(intake, SPEECH[0], body, b"multipart/form-data; boundary=b")
            assert prompt_tokens(job) > len(lie) / 64_000 * 90


async def test_the_emulated_instances_say_the_same_of_what_they_serve() -> None:
    """So that the truth above is what clients would be charged by an engine's usage."""
    settings = EmulatorSettings(
        profile=load_profile(FAST), models=("m",), time_scale=1000.0, max_model_len=1 << 16
    )
    async with (
        emulated(settings) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        for path in SERVED_BY_THE_EMULATOR:
            served = 0
            for case in CASES[path]:
                answer = await client.post(path, json={"max_tokens": 1} | case.body)
                if answer.status_code == 400:
                    continue  # pictures, say: it reads text alone
                served += 1
                assert answer.status_code == 200, answer.text
                usage = answer.json()["usage"]
                told = usage.get("prompt_tokens") or usage.get("input_tokens")
                assert told == pytest.approx(case.prompt_tokens, rel=0.1), (path, case.body)
            assert served >= 2, path


async def test_hostile_shapes_are_counted_at_once_and_never_as_little() -> None:
    """What looks like one thing and is another, and lists of a million."""
    query = "q" * 8000
    wide = {"query": query, "documents": ["a"] * 300_000}
    mixed = {"query": query, "documents": [{"text": "a"}, *(["b"] * 1000)]}
    strange = '{"model": "m", "query": "%s", "documents": [%s], "x": NaN}'
    async with intake_of_a_gateway() as intake:
        for body in (wide, mixed, mixed | {"text_1": "", "queries": ""}):
            job = described(intake, "/rerank", json.dumps({"model": "m"} | body).encode())
            documents: Any = body["documents"]
            assert prompt_tokens(job) >= 0.75 * len(documents) * 2000
        # Two spellings of a side: the longer one counts.
        two = {"text_1": "a", "queries": query, "text_2": ["b"], "documents": ["c"] * 90}
        job = described(intake, "/score", json.dumps({"model": "m"} | two).encode())
        assert prompt_tokens(job) >= 0.75 * 90 * 2000
        short = strange % (query, ",".join(['"a"'] * 500))
        job = described(intake, "/rerank", short.encode())
        assert prompt_tokens(job) >= 0.75 * 500 * 2000
        empty = described(intake, "/rerank", b'{"model": "m", "documents": []}')
        assert prompt_tokens(empty) == 1
        for odd in ("{}", "[]", "null", "5", '"x"', "[[]]", "[{}]", "[null]"):
            for path in CASES:
                for name in CASES[path][0].body:
                    if name != "n" and not name.startswith("max_"):
                        body = b'{"model": "m", "%b": %b}' % (name.encode(), odd.encode())
                        job = described(intake, path, body)
                        assert 1 <= prompt_tokens(job) < 50


async def test_of_a_request_without_a_usage_the_limits_are_charged_what_was_estimated() -> None:
    fake = FakeInstance(max_model_len=1 << 20)
    fake.fault = {"status": 200, "body": "{}"}
    async with rig([fake]) as (running, client, _):
        for path in ("/rerank", "/score", "/inference/v1/generate"):
            case = CASES[path][0]
            before = await input_tokens(running.gateway)
            assert (await client.post(path, json={"model": "m"} | case.body)).status_code == 200
            counted = await input_tokens(running.gateway) - before
            assert counted == pytest.approx(case.prompt_tokens, rel=0.25), path


async def input_tokens(gateway: Any) -> float:
    gateway.dataplane.recorder.catch_up()
    return float(gateway.metrics.counts("m", "i0").input_tokens)
