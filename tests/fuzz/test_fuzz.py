"""Short seeded runs of the fuzzers; scripts/fuzz runs them for longer, with other seeds."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from hetero_gateway.gateway.dataplane.realtime_events import ClientEvent, ClientEvents
from tests.fakes.running import config_for, eventually, running_gateway
from tests.fuzz.fuzzing import Findings, bodies_of, fuzz_bodies, fuzz_heads
from tests.fuzz.key_files import fuzz_keys
from tests.fuzz.picking import frames_of, fuzz_grpc, fuzz_http2, messages_of
from tests.fuzz.redis_rows import fuzz_redis
from tests.fuzz.sink import sink
from tests.fuzz.websockets import fuzz_websocket

pytestmark = pytest.mark.slow


def assert_none(findings: Findings) -> None:
    shown = "\n".join(f"{text}: {data[:300]!r}" for text, data in findings.violations[:10])
    assert not findings.violations, shown


async def test_no_body_gets_an_answer_of_5xx_or_hurts_the_next_request() -> None:
    findings = await fuzz_bodies(seed=1, count=300)
    assert_none(findings)
    assert findings.statuses[200] > 20
    assert findings.statuses[400] > 100


async def test_no_head_gets_through_that_an_instance_could_misread() -> None:
    findings = await fuzz_heads(seed=1, count=300)
    assert_none(findings)
    assert findings.statuses[200] > 20
    assert findings.statuses[400] > 100


async def test_no_frame_or_handshake_of_a_websocket_hurts_another_session() -> None:
    findings = await fuzz_websocket(seed=1, count=100)
    assert_none(findings)
    assert findings.statuses[101] > 40


async def test_the_websocket_fuzzer_notices_a_session_that_may_say_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def blind(_: object, message: str | bytes) -> ClientEvent:
        return ClientEvent(message, 0, 0)

    monkeypatch.setattr(ClientEvents, "read", blind)
    findings = await fuzz_websocket(seed=1, count=60)
    assert any("may not pass" in text for text, _ in findings.violations)


async def test_no_frames_of_a_peer_hurt_another_ones_call() -> None:
    findings = await fuzz_http2(seed=1, count=150)
    assert_none(findings)
    assert findings.statuses[1] > 10
    assert sum(count for status, count in findings.statuses.items() if status > 100) > 10


async def test_no_messages_of_a_peer_hurt_another_ones_call() -> None:
    findings = await fuzz_grpc(seed=1, count=100)
    assert_none(findings)
    assert findings.statuses[1] > 30


@pytest.mark.parametrize("fuzz", [fuzz_http2, fuzz_grpc])
async def test_the_fuzzers_notice_a_picker_that_breaks(
    fuzz: Callable[[int, int], Awaitable[Findings]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ArithmeticError("spoilt on purpose")

    monkeypatch.setattr("hetero_gateway.scaleout.picker.stream.inbound_of", broken)
    findings = await fuzz(1, 20)
    assert any("in the log" in text for text, _ in findings.violations)


async def test_no_file_of_keys_is_anything_but_read_or_refused_in_words() -> None:
    findings = await fuzz_keys(seed=1, count=100)
    assert_none(findings)
    assert findings.statuses[200] > 1
    assert findings.statuses[400] > 60


async def test_no_reply_or_row_of_redis_costs_more_than_the_view_of_others() -> None:
    findings = await fuzz_redis(seed=1, count=200)
    assert_none(findings)
    assert min(findings.statuses[each] for each in (200, 400, 503)) > 10


async def test_the_fuzzers_notice_a_traceback_and_rows_that_are_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ArithmeticError("spoilt on purpose")

    monkeypatch.setattr("hetero_gateway.files.client_keys.KeyConfig.digest", property(broken))
    findings = await fuzz_keys(1, 100)
    assert any("ArithmeticError" in text for text, _ in findings.violations)
    monkeypatch.setattr(
        "hetero_gateway.core.sharing.belief.Belief.believed", lambda _, rows, doubted: rows
    )
    findings = await fuzz_redis(1, 400)
    assert any("more than two engines hold" in text for text, _ in findings.violations)


@pytest.mark.parametrize("drawn_of", [bodies_of, frames_of, messages_of])
def test_one_seed_draws_the_same(drawn_of: Callable[[int], Callable[[], object]]) -> None:
    draws = [drawn_of(seed) for seed in (1, 1, 2)]
    first, again, other = ([draw() for _ in range(50)] for draw in draws)
    assert first == again
    assert first != other


@pytest.mark.parametrize("fuzz", [fuzz_bodies, fuzz_heads])
async def test_the_fuzzers_notice_a_gateway_that_answers_500(
    fuzz: Callable[[int, int], Awaitable[Findings]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ArithmeticError("spoilt on purpose")

    monkeypatch.setattr("hetero_gateway.gateway.dataplane.intake.parse_body", broken)
    findings = await fuzz(1, 30)
    assert any("answered 500" in text for text, _ in findings.violations)


async def test_the_control_paths_never_fail_by_their_own_openapi_document(
    tmp_path: Path,
) -> None:
    """schemathesis draws requests from /openapi.json, valid ones and others."""
    # Without TRACE, which is rightly 501.
    methods = '["GET", "PUT", "POST", "DELETE", "OPTIONS", "PATCH"]'
    settings = tmp_path / "schemathesis.toml"
    settings.write_text(f"[phases.coverage]\nunexpected-methods = {methods}\n")
    async with sink() as instance:
        config = config_for([instance], profiles=(None,))  # type: ignore[list-item]
        async with running_gateway(config) as running:
            await eventually(lambda: "m" in running.gateway.fleet.models())
            command = (
                str(Path(sys.executable).with_name("schemathesis")), "run",
                f"{running.url}/openapi.json", "--seed=1", "--max-examples=5", "--no-color",
                "--checks=not_a_server_error", "--suppress-health-check=all",
            )  # fmt: skip
            process = await asyncio.create_subprocess_exec(
                *command,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=tmp_path,
            )
            output, _ = await process.communicate()
            text = output.decode("utf-8", "replace")
            assert process.returncode == 0, text[-4000:]
            assert re.search(r"(\d{2,}) generated, \1 passed", text), text[-4000:]
            assert running.settled()
