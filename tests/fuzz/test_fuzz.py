"""Short seeded runs of the fuzzers; scripts/fuzz runs them for longer, with other seeds."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.fakes.running import config_for, eventually, running_gateway
from tests.fuzz.fuzzing import Findings, bodies_of, fuzz_bodies, fuzz_heads
from tests.fuzz.sink import sink


def assert_none(findings: Findings) -> None:
    shown = "\n".join(f"{text}: {data[:300]!r}" for text, data in findings.violations[:10])
    assert not findings.violations, shown


async def test_no_body_gets_an_answer_of_5xx_or_hurts_the_next_request() -> None:
    findings = await fuzz_bodies(seed=1, count=600)
    assert_none(findings)
    assert findings.statuses[200] > 20
    assert findings.statuses[400] > 100


async def test_no_head_gets_through_that_an_instance_could_misread() -> None:
    findings = await fuzz_heads(seed=1, count=400)
    assert_none(findings)
    assert findings.statuses[200] > 20
    assert findings.statuses[400] > 100


def test_one_seed_draws_the_same_bodies() -> None:
    draws = [bodies_of(seed) for seed in (1, 1, 2)]
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


@pytest.mark.slow
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
