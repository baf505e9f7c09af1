"""Short seeded runs of the fuzzers; scripts/fuzz runs them for longer, with other seeds."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_gateway.gateway.dataplane import intake
from hetero_gateway.gateway.dataplane.realtime_events import ClientEvent, ClientEvents
from hetero_gateway.http.response import ChunkedBody
from hetero_gateway.scaleout.picker import stream
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.running import config_for, eventually, running_gateway
from tests.fuzz.answers import fuzz_answers
from tests.fuzz.fuzzing import Findings, bodies_of, fuzz_bodies, fuzz_heads
from tests.fuzz.picking import frames_of, fuzz_grpc, fuzz_http2, messages_of
from tests.fuzz.sink import sink
from tests.fuzz.websockets import fuzz_websocket

pytestmark = pytest.mark.slow
Fuzz = Callable[[int, int], Awaitable[Findings]]


async def run(fuzz: Fuzz, count: int, **least: int) -> Findings:
    """Nothing is found; ``least``: how often each status has come, as s200=20, at the least."""
    findings = await fuzz(1, count)
    shown = "\n".join(f"{text}: {data[:300]!r}" for text, data in findings.violations[:10])
    assert not findings.violations, shown
    assert all(findings.statuses[int(s[1:])] > few for s, few in least.items()), findings.statuses
    return findings


async def notices(fuzz: Fuzz, count: int, what: str) -> None:
    findings = await fuzz(1, count)
    assert any(what in text for text, _ in findings.violations)


async def test_no_body_gets_an_answer_of_5xx_or_hurts_the_next_request() -> None:
    await run(fuzz_bodies, 300, s200=20, s400=100)


async def test_no_head_gets_through_that_an_instance_could_misread() -> None:
    await run(fuzz_heads, 300, s200=20, s400=100)


async def test_no_frame_or_handshake_of_a_websocket_hurts_another_session() -> None:
    await run(fuzz_websocket, 100, s101=40)


async def test_no_frames_of_a_peer_hurt_another_ones_call() -> None:
    findings = await run(fuzz_http2, 150, s1=10)
    assert sum(count for status, count in findings.statuses.items() if status > 100) > 10


async def test_no_messages_of_a_peer_hurt_another_ones_call() -> None:
    await run(fuzz_grpc, 100, s1=30)


async def test_whatever_an_instance_answers_its_client_gets_http_and_the_next_is_served() -> None:
    await run(fuzz_answers, 400, s200=50, s502=50)


def broken(*_: object) -> None:
    raise ArithmeticError("spoilt on purpose")


_feed = ChunkedBody.feed


@pytest.mark.parametrize(
    ("fuzz", "count", "spoilt", "name", "by", "found"),
    [
        (fuzz_bodies, 30, intake, "parse_body", broken, "answered 500"),
        (fuzz_heads, 30, intake, "parse_body", broken, "answered 500"),
        # A session that may say anything.
        (fuzz_websocket, 60, ClientEvents, "read", lambda _, text: ClientEvent(text, 0, 0),
         "may not pass"),
        (fuzz_http2, 20, stream, "inbound_of", broken, "in the log"),
        (fuzz_grpc, 20, stream, "inbound_of", broken, "in the log"),
        (fuzz_answers, 60, ChunkedBody, "feed",
         lambda body, data: _feed(body, data).replace(b"\r\n", b"\n", 1), "not HTTP"),
    ],
    ids=("bodies", "heads", "websocket", "http2", "grpc", "answers"),
)  # fmt: skip
async def test_a_fuzzer_notices_what_is_spoilt(
    fuzz: Fuzz, count: int, spoilt: Any, name: str, by: Any, found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(spoilt, name, by)
    await notices(fuzz, count, found)


@pytest.mark.parametrize("drawn_of", [bodies_of, frames_of, messages_of])
def test_one_seed_draws_the_same(drawn_of: Callable[[int], Callable[[], object]]) -> None:
    draws = [drawn_of(seed) for seed in (1, 1, 2)]
    first, again, other = ([draw() for _ in range(50)] for draw in draws)
    assert first == again
    assert first != other


@pytest.mark.system
async def test_the_control_paths_never_fail_by_their_own_openapi_document(
    tmp_path: Path,
) -> None:
    """schemathesis draws requests from /openapi.json, valid ones and others."""
    # Without TRACE, which is rightly 501.
    methods = '["GET", "PUT", "POST", "DELETE", "OPTIONS", "PATCH"]'
    settings = tmp_path / "schemathesis.toml"
    settings.write_text(f"[phases.coverage]\nunexpected-methods = {methods}\n")
    async with sink() as instance:
        batches = {"directory": str(tmp_path / "batches")}
        config = config_for([instance], profiles=(None,), batches=batches)  # type: ignore[list-item]
        async with running_gateway(config) as running:
            await eventually(lambda: "m" in running.gateway.fleet.models())
            command = (
                str(Path(sys.executable).with_name("schemathesis")), "run",
                f"{running.url}/openapi.json", "--seed=1", "--max-examples=5", "--no-color",
                "--checks=not_a_server_error", "--suppress-health-check=all",
            )  # fmt: skip
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            done = await asyncio.to_thread(subprocess.run, command, cwd=tmp_path, **streams)
            text = done.stdout
            assert done.returncode == 0, text[-4000:]
            assert re.search(r"(\d{2,}) generated, \1 passed", text), text[-4000:]
            assert running.settled()
