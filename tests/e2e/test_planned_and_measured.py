"""A plan's own directory, emulated, does under load what was planned.

The directory's commands and its gateway.yaml run in one event loop and in virtual time, so the
figures are the same on every machine. That start.sh brings up such a directory as processes, and
bench loads it, is shown in tests/cli/test_plan_again.py.
"""

import argparse
import math
import re
import shlex
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from benchmarks.planner.planned_and_measured import simulated_output_tokens_per_s, write_plan
from hetero_gateway.cli import emulate, parse
from hetero_gateway.files.gateway_config import load_gateway_config
from hetero_gateway.files.trace import read_trace, schedule
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind, filler_pool
from hetero_gateway.lab.load.replay import replay
from hetero_gateway.lab.load.result import summarise
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.emulated import emulated
from tests.fakes.running import running_gateway

ROOT = Path(__file__).resolve().parents[2]
REQUESTS = 400


def commands(directory: Path) -> list[argparse.Namespace]:
    """The words of every ``hetero-gateway emulate`` in the directory's scripts, parsed."""
    lines = [
        line.strip()
        for script in sorted(directory.glob("commands/*.sh"))
        for line in script.read_text("utf-8").splitlines()
        if re.match(r" +hetero-gateway emulate ", line)
    ]
    return [parse(shlex.split(line)[1:]) for line in lines]


@pytest.mark.system(virtual=True)
@pytest.mark.slow
async def test_an_emulated_deployment_reaches_the_planned_throughput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "plan"
    planned = write_plan(ROOT / "configs/clusters/plan-emulated.yaml", directory, 1.0)["best"]
    simulated = simulated_output_tokens_per_s(directory, REQUESTS)
    requests = schedule(read_trace(directory / "requests.csv", REQUESTS), math.inf, 0)
    maker = BodyMaker("Llama-3-8B", PromptKind.TOKEN_IDS, True, 4.0, filler_pool())
    monkeypatch.chdir(directory)  # as the scripts do
    async with AsyncExitStack() as running:
        engines = [
            await running.enter_async_context(emulated(emulate.settings_of(words), words.port))
            for words in commands(directory)
        ]
        config = load_gateway_config(directory / "gateway.yaml")
        assert [str(i.base_url) for i in config.instances] == sorted(url for url, _ in engines)
        gateway = await running.enter_async_context(running_gateway(config, workers=2))
        records = await replay(parse_target(gateway.url), requests, maker)
    summary = summarise(records)
    assert summary.requests == REQUESTS
    assert summary.errors == 0
    assert not any(engine.loop.metrics.lost_s for _, engine in engines)
    # Against the same requests in the simulator.
    assert 0.95 < summary.output_tokens_per_s / simulated < 1.05
    # A run also fills and empties, which the plan's figure leaves out.
    assert 0.85 < summary.throughput_tokens_per_s / planned["throughput_tokens_per_s"] < 1.05
