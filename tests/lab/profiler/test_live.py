"""Measuring a live engine: what comes out, and every way in which it can go wrong."""

import asyncio
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from hetero_gateway.cli import main
from hetero_gateway.core.costs.cost_model import decode_time_s, prefill_time_s
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.lab.emulator.settings import EmulatorSettings, LogNormalOutputs
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.profiler.campaign import CampaignPlan
from hetero_gateway.lab.profiler.engine import Overrides
from hetero_gateway.lab.profiler.live import MeasuredProfile, measure, samples_path
from hetero_gateway.lab.profiler.samples import read_json_lines
from tests.fakes import profile_command
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.engine import QUICK, engine, quick_profile

PATIENCE_S = 120.0
ONE_PASS = CampaignPlan(budget_s=60, passes=1)
LIMIT = Overrides(max_num_seqs=4)


async def profile(
    url: str, output: Path, plan=ONE_PASS, given=LIMIT, key=None, **options
) -> MeasuredProfile:
    target = parse_target(url, key)
    return await measure(target, output, given, plan, **options)


def settings(**options) -> EmulatorSettings:
    return EmulatorSettings(quick_profile(), max_model_len=512, **options)


def lines(output: Path) -> list[dict]:
    return read_json_lines(samples_path(output))


async def test_a_profile_of_a_live_engine_predicts_it_and_serves(tmp_path):
    output = tmp_path / "p.yaml"
    async with engine() as (url, manners):
        result = await profile(url, output)
    assert result.missing is None
    assert {"cache_salt", "min_tokens", "ignore_eos"} <= manners.keys
    found = load_profile(str(output))
    assert (found.model, found.kv_capacity_tokens, found.max_num_seqs) == ("m", 4096, 4)
    assert found.source["how"] == "measured"
    assert found.source["engine"].startswith("0.32")
    errors = [
        decode_time_s(found.constants, b, i, 30) / decode_time_s(QUICK, b, i, 30) - 1
        for b in (1, 2, 4)
        for i in (20, 200, 400)
    ]
    assert np.median(np.abs(errors)) < 0.02
    ratio = prefill_time_s(found.constants, 4, 300) / prefill_time_s(QUICK, 4, 300)
    assert 0.95 < ratio < 1.05


async def test_the_engines_own_limit_of_sequences_is_found(tmp_path):
    async with engine(settings(max_num_seqs=2)) as (url, _):
        result = await profile(url, tmp_path / "p.yaml", given=Overrides())
    assert result.outcome.max_num_seqs == 2
    assert load_profile(str(tmp_path / "p.yaml")).max_num_seqs == 2


@pytest.mark.parametrize(
    "manners",
    [
        {"refuse": ("cache_salt", "cache_salt is not supported")},
        {"refuse": ("continuous_usage_stats", "extra field: continuous_usage_stats")},
        {"refuse": ("stream_options", "stream_options: unknown")},
        {"vocabulary": 260},
    ],
)
async def test_what_an_engine_refuses_is_left_out(tmp_path, manners):
    async with engine(**manners) as (url, _):
        result = await profile(url, tmp_path / "p.yaml", CampaignPlan(budget_s=3, passes=1))
    assert result.samples
    assert not any("engine error" in reason for reason in result.discarded)


@pytest.mark.parametrize(
    ("given", "said"), [(LIMIT, "no temperature here"), (Overrides(model="other"), "it serves m$")]
)
async def test_any_other_refusal_and_a_wrong_model_name_end_it_with_the_engines_words(
    tmp_path, given, said
):
    async with engine(refuse=("temperature", "no temperature here")) as (url, _):
        with pytest.raises(ConfigError, match=said):
            await profile(url, tmp_path / "p.yaml", given=given)


async def test_an_engine_with_a_key_says_which_flag_is_missing_and_takes_the_key(tmp_path):
    async with engine(settings(api_key="sk-secret")) as (url, _):
        with pytest.raises(ConfigError, match="--api-key-env") as error:
            await profile(url, tmp_path / "p.yaml", key="sk-wrong")
        assert "sk-" not in str(error.value)
        result = await profile(url, tmp_path / "p.yaml", CampaignPlan(budget_s=3), key="sk-secret")
    assert result.samples
    assert "sk-secret" not in samples_path(tmp_path / "p.yaml").read_text()


async def test_without_metrics_the_capacity_must_be_given_and_the_file_says_so(tmp_path):
    output = tmp_path / "p.yaml"
    async with engine(metrics=False) as (url, _):
        with pytest.raises(ConfigError, match="--kv-capacity-tokens"):
            await profile(url, output)
        await profile(url, output, given=Overrides(max_num_seqs=2, kv_capacity_tokens=4096))
    assert "no /metrics" in load_profile(str(output)).source["note"]


def test_nobody_there_is_one_line(tmp_path, capsys):
    assert main(["profile", "http://127.0.0.1:9", "-o", str(tmp_path / "p.yaml")]) == 1
    assert re.fullmatch(r"hetero-gateway: .*no answer.*\n", capsys.readouterr().err)


async def test_an_engine_that_ignores_min_tokens_is_not_measured_for_long(tmp_path):
    short = settings(lengths=LogNormalOutputs(mean_tokens=10))
    async with engine(short, forced_lengths=False) as (url, _):
        began_s = time.perf_counter()
        result = await profile(url, tmp_path / "p.yaml")
    assert "ignores min_tokens" in result.outcome.stopped
    assert result.discarded["output lengths not as asked"] >= 4
    assert time.perf_counter() - began_s < ONE_PASS.budget_s / 2


async def test_an_engine_that_dies_midway_leaves_its_samples_to_go_on_with(tmp_path):
    output = tmp_path / "p.yaml"
    async with engine(die_after=50) as (url, _):
        result = await profile(url, output)
    assert "the engine is gone" in result.outcome.stopped
    kept = len(result.samples)
    assert kept
    async with engine() as (url, _):
        again = await profile(url, output, resume=True)
    assert again.outcome.stopped is None
    assert len(again.samples) > kept
    measured = [r["cell"] for r in lines(output) if r["discarded"] is None and r["closes"]]
    assert len(measured) == len(set(measured))  # none was measured twice


async def test_foreign_load_is_noticed_and_said(tmp_path):
    async def others(url: str) -> None:
        body = {"prompt": "x" * 40, "max_tokens": 6, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=url) as http:
            while True:
                await http.post("/v1/completions", json=body)
                await asyncio.sleep(0.01)

    async with engine() as (url, _), asyncio.TaskGroup() as tasks:
        load = tasks.create_task(others(url))
        result = await profile(url, tmp_path / "p.yaml")
        load.cancel()
    assert "serves others" in result.outcome.stopped
    assert result.discarded["foreign load"] >= 1


async def test_samples_of_an_earlier_run_are_neither_overwritten_nor_mixed_with_others(tmp_path):
    output = tmp_path / "p.yaml"
    async with engine() as (url, _):
        await profile(url, output, CampaignPlan(budget_s=2))
        with pytest.raises(ConfigError, match="continue it with --resume"):
            await profile(url, output)
        with pytest.raises(ConfigError, match="seed 0, this run is of 1"):
            await profile(url, output, CampaignPlan(budget_s=2, seed=1), resume=True)


async def test_what_cannot_be_afforded_is_left_out_and_named(tmp_path):
    async with engine() as (url, _):
        began_s = time.perf_counter()
        result = await profile(url, tmp_path / "p.yaml", CampaignPlan(budget_s=3, passes=2))
        took_s = time.perf_counter() - began_s
    assert result.outcome.unaffordable
    assert took_s < 10


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["-o", "p.yaml"], "one of a URL"),
        (["http://127.0.0.1:9", "--from", "s.csv", "-o", "p.yaml"], "one of a URL"),
        (["http://127.0.0.1:9", "-o", "p.json"], "ends in .yaml"),
        (["http://127.0.0.1:9", "-o", "nowhere/p.yaml"], "no such folder"),
        (["http://127.0.0.1:9", "-o", "p.yaml", "--api-key-env", "NO_SUCH"], "NO_SUCH is not set"),
        (["ftp://x", "-o", "p.yaml"], "must be http"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(args, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *args]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def words(output: Path, *more: str) -> list[str]:
    """Of ``profile``, with an engine of its own."""
    told = ["profile", "http://127.0.0.1:9", "-o", str(output)]
    return [*told, "--max-num-seqs", "4", "--passes", "1", *more]


def command(output: Path, *more: str, stop_after: int) -> subprocess.Popen[str]:
    """The same as a process, which its engine stops at its nth completion."""
    told = [str(stop_after), *words(output, *more)]
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.profile_command", *told],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    changed = os.waitid(os.P_PID, started.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert changed is not None
    assert changed.si_code == os.CLD_STOPPED
    return started


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="waits for a process that has stopped")
@pytest.mark.system
def test_killed_or_interrupted_and_resumed_is_as_good_as_in_one_go(tmp_path, capsys):
    output, whole = tmp_path / "p.yaml", tmp_path / "whole.yaml"
    first = command(output, stop_after=50)
    first.kill()
    first.communicate()
    assert not output.exists()
    kept = len(lines(output))
    assert kept >= 4
    second = command(output, "--resume", stop_after=50)
    second.send_signal(signal.SIGINT)
    second.send_signal(signal.SIGCONT)
    _, error = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 130
    assert "--resume goes on" in error
    assert "Traceback" not in error
    assert len(lines(output)) >= kept + 4
    load_profile(str(output))  # usable already
    assert profile_command.run(0, words(output, "--resume", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["stopped"] is None
    measured = [r["cell"] for r in lines(output) if r["discarded"] is None and r["closes"]]
    assert len(measured) == len(set(measured))  # nothing was lost, nothing done twice
    assert len(measured) > 8
    assert profile_command.run(0, words(whole)) == 0
    one, other = load_profile(str(whole)).constants, load_profile(str(output)).constants
    for b, i in ((1, 50), (4, 50), (1, 400), (4, 400)):
        assert decode_time_s(one, b, i, 30) == pytest.approx(
            decode_time_s(other, b, i, 30), rel=0.02
        )


@pytest.mark.parametrize("ahead", [False, True])
async def test_what_comes_before_a_first_token_is_measured(tmp_path, ahead):
    planted = dataclasses.replace(quick_profile(), first_token_s=0.03, plans_ahead=ahead)
    output = tmp_path / "p.yaml"
    async with engine(EmulatorSettings(planted, max_model_len=512)) as (url, _):
        await profile(url, output, CampaignPlan(budget_s=8, passes=1))
    found = load_profile(str(output))
    assert found.first_token_s == pytest.approx(0.03, abs=0.003)
    assert found.plans_ahead is ahead
