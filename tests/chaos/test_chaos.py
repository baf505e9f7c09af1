"""The run itself, shortly; scripts/chaos runs it for as long as one likes.

See docs/evidence/reliability.md.
"""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.clients import Outcome, Request, draw_request, judge
from tests.chaos.disturbances import draw_disturbances

ROOT = Path(__file__).resolve().parents[2]


def run(module: str, *words: str) -> dict[str, Any]:
    """The document of a run that broke no promise."""
    command = [sys.executable, "-m", module, "--json", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout, done.stderr[-2000:]
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["violations"] == [], json.dumps(document, indent=1)[:6000]
    return document


@pytest.mark.system
@pytest.mark.slow
def test_nothing_is_lost_mixed_or_left_behind_whatever_goes_wrong() -> None:
    document = run("tests.chaos", "--seed", "1", "--seconds", "10", "--clients", "60")
    assert document["outcomes"]["completed"] > 100
    assert sum(document["disturbances"].values()) > 5
    assert {"restart", "stop", "reload"} <= document["disturbances"].keys()


@pytest.mark.system
@pytest.mark.slow
def test_workers_and_their_scheduler_are_killed_too() -> None:
    document = run(
        "tests.chaos", "--seed", "3", "--seconds", "17", "--clients", "15", "--workers", "2"
    )
    assert document["outcomes"]["completed"] > 100
    assert {"worker killed", "scheduler killed"} <= document["disturbances"].keys()


@pytest.mark.system
@pytest.mark.slow
def test_a_batch_survives_its_gateway_and_its_instances() -> None:
    document = run("tests.chaos.batches", "--lines", "1200", "--every", "3")
    assert sum(document["kills"].values()) > 0
    assert document["counts"] == {"total": 1200, "completed": 1200, "failed": 0}


@pytest.mark.system
@pytest.mark.slow
def test_requests_of_two_instances_survive_either_of_them() -> None:
    words = ("--legs", "--seconds", "8", "--streams", "25", "--every", "1.5", "--lease", "6")
    document = run("tests.chaos.kills", *words)
    assert document["streams"] > 40
    assert document["handovers"]["handed_over"] > 20


@pytest.mark.system
@pytest.mark.slow
def test_no_stream_of_text_ends_because_its_instance_was_killed() -> None:
    words = ("--seconds", "8", "--streams", "40", "--every", "1.5", "--workers", "2")
    document = run("tests.chaos.kills", *words)
    assert document["streams"] > 100
    assert document["continued"] > 5


@pytest.mark.system
@pytest.mark.slow
def test_streams_and_idle_connections_leave_memory_and_descriptors_where_they_were() -> None:
    """scripts/soak, shortly and small."""
    words = ("--seconds", "7", "--streams", "50", "--idle", "400", "--interval", "0.02")
    document = run("tests.chaos.soak", *words)
    assert document["figures"]["streams_completed"] > 0
    # Both sides of each stream, and the idle ones.
    assert document["rows"][-1]["descriptors"] >= 2 * 50 + 400


# What the verdicts are worth: each of these answers must be found out.


def answered(**changes: Any) -> Request:
    """A completed plain completion."""
    request = draw_request(random.Random(1), "tag")
    request.stream = request.chat = False
    request.tokens, request.body = 4, b"{}"
    request.status, request.whole, request.raw_bytes = 200, True, 1
    request.headers = {b"x-request-id": b"tag", b"x-hetero-gateway-instance": b"i0"}
    choice = {"text": request.expected_text}
    request.content = bytearray(json.dumps({"id": "cmpl-tag", "choices": [choice]}).encode())
    for name, value in changes.items():
        setattr(request, name, value)
    return request


def stream(text: str, request_id: str = "cmpl-tag", done: bool = True) -> bytearray:
    usage = {"completion_tokens": 4}
    event = {"id": request_id, "choices": [{"text": text}], "usage": usage}
    end = b"data: [DONE]\n\n" if done else b""
    return bytearray(b"data: " + json.dumps(event).encode() + b"\n\n" + end)


def test_an_answer_of_its_own_is_completed() -> None:
    assert judge(answered(), lambda _: False) == (Outcome.COMPLETED, None)
    text = answered().expected_text
    whole = answered(stream=True, content=stream(text))
    assert judge(whole, lambda _: False) == (Outcome.COMPLETED, None)
    broken = answered(stream=True, content=stream(text[:5], done=False), whole=False)
    assert judge(broken, lambda _: False) == (Outcome.BROKEN, None)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: {"content": r.content.replace(b"cmpl-tag", b"cmpl-other")},
        lambda r: {"content": bytearray(b'{"id":"cmpl-tag","choices":[{"text":" of another"}]}')},
        lambda r: {"behind": b"HTTP/1.1 200 OK\r\n"},
        lambda r: {"headers": {}},
        lambda r: {"content": bytearray()},
        lambda r: {"status": 400},
        lambda r: {"status": 0, "raw_bytes": 0},
        lambda r: {"stream": True, "content": stream(" of another")},
        lambda r: {"stream": True, "content": stream(r.expected_text, "cmpl-other")},
        lambda r: {"stream": True, "content": stream(r.expected_text[:4])},
        lambda r: {"stream": True, "content": stream(r.expected_text[:4]), "whole": False},
        lambda r: {"stream": True, "content": stream(r.expected_text[:4], done=False)},
    ],
    ids=(
        "another's id", "another's text", "bytes behind the end", "no request id", "empty",
        "400", "closed", "another's stream", "another's events", "[DONE] too early",
        "[DONE] of a broken stream", "a broken stream as if whole",
    ),
)  # fmt: skip
def test_a_false_answer_is_found_out(spoil: Callable[[Request], dict[str, Any]]) -> None:
    outcome, violation = judge(answered(**spoil(answered())), lambda _: False)
    assert violation is not None
    assert outcome is not Outcome.COMPLETED


def test_a_seed_draws_the_same_disturbances_and_leaves_half_alone() -> None:
    drawn = draw_disturbances(5, 600, 8)
    assert drawn == draw_disturbances(5, 600, 8)
    assert drawn != draw_disturbances(6, 600, 8)
    for each in drawn:
        at_once = {
            other.instance
            for other in drawn
            if other.kind != "reload" and other.at_s <= each.at_s < other.at_s + other.duration_s
        }
        assert len(at_once) <= 5
