"""A gateway's own traffic gives the constants of the engine behind it, whatever it believed."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from hetero_gateway.cli import main
from hetero_gateway.core.costs.cost_model import decode_step_time_s, prefill_time_s
from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.instances.observation import FirstTokenRow, StepRow
from hetero_gateway.errors import ProfileError
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.gateway.dataplane import speed
from hetero_gateway.lab.emulator.settings import EmulatorSettings
from hetero_gateway.lab.load.emulated import write_profile
from hetero_gateway.lab.profiler.observed import fit_observed, write_observed
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.emulated import emulated
from tests.fakes.running import config_for, running_gateway
from tests.fakes.vllm import FakeInstance

PLANTED = Constants(8e-5, 1e-4, 0, 8e-3, 2e-7, 3e-4, 0, 1e-2)
ENGINE = Profile("GPU", "tiny", 1, PLANTED, 64_000, 32)


async def traffic(client: httpx.AsyncClient, seconds: float) -> None:
    """Requests of many lengths, now few and now many at a time."""
    rng = np.random.default_rng(0)

    async def one(first: int) -> None:
        body = {
            "model": "m", "stream": True, "ignore_eos": True,
            # No two begin alike: nothing is cached.
            "prompt": [first] * int(rng.integers(20, 1500)),
            "max_tokens": int(rng.integers(10, 120)),
        }  # fmt: skip
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text

    async with asyncio.TaskGroup() as tasks:
        for k in range(round(seconds / 0.2)):
            for copy in range(1 if k % 30 < 18 else 2):
                tasks.create_task(one(300 + 2 * k + copy))
            await asyncio.sleep(0.5 if k % 30 < 4 else 0.2)


@pytest.mark.slow
async def test_the_constants_are_found_from_live_traffic(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(speed, "INTERVAL_S", 0.4)
    wrong = Profile("GPU", "tiny", 1, PLANTED.scaled(2.5), 64_000, 32)
    write_profile(wrong, tmp_path / "wrong.yaml")
    output = tmp_path / "found.yaml"
    fake = FakeInstance()
    profiles = (str(tmp_path / "wrong.yaml"),)
    async with (
        emulated(EmulatorSettings(ENGINE, models=("m",), max_model_len=8192)) as (url, _),
        running_gateway(config_for([fake.at(url)], profiles=profiles)) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as client,
    ):
        await traffic(client, 18)
        command = ["profile", "--from-gateway", gateway.url, "-o", str(output)]
        assert await asyncio.to_thread(main, [*command, "--instance", "i7"]) == 1
        assert "i7" in capsys.readouterr().err
        assert await asyncio.to_thread(main, command) == 0
    said = capsys.readouterr().out
    found = load_profile(str(output)).constants
    for batch, tokens in ((4, 500), (8, 800), (16, 800)):
        planted_s = decode_step_time_s(PLANTED, batch, tokens)
        found_s = decode_step_time_s(found, batch, tokens)
        assert found_s == pytest.approx(planted_s, rel=0.12), (batch, said)
    planted_s = prefill_time_s(PLANTED, 1, 1000)
    assert prefill_time_s(found, 1, 1000) == pytest.approx(planted_s, rel=0.25), said
    source = yaml.safe_load(output.read_text())["source"]
    assert source["error"]["decode"] < 0.15
    assert "from live traffic" in source["note"]


def seen(fields: int, *, caching: bool | None, hits: float | None) -> dict[str, Any]:
    """What a gateway tells of an engine that had half of each prompt cached."""
    rng, steps = np.random.default_rng(0), []
    for _ in range(60):
        batch, prompts = float(rng.uniform(1, 20)), int(rng.integers(0, 4))
        tokens = prompts * 800.0
        prefill_s = 0.5 * PLANTED.p1 * tokens + PLANTED.p2 * prompts
        made = (1 - prefill_s) / decode_step_time_s(PLANTED, batch, 500)
        steps.append([1.0, made, batch, 500.0, prompts, tokens, hits and hits * tokens])
    return {
        "instance": "i0", "profile": None, "stand_in": dataclasses.asdict(PLANTED),
        "prefix_caching": caching, "first_tokens": [],
        "step_fields": StepRow._fields[:fields], "steps": [row[:fields] for row in steps],
        "first_token_fields": FirstTokenRow._fields,
    }  # fmt: skip


def test_rows_count_what_was_prefilled() -> None:
    found = fit_observed(seen(7, caching=True, hits=0.5))
    assert found.step_rows == 60
    assert found.constants.p1 == pytest.approx(PLANTED.p1, rel=0.05)
    # An older gateway's rows do not say it, and are used where there is nothing to say.
    prefilled = fit_observed(seen(6, caching=False, hits=None)).constants.p1
    assert prefilled == pytest.approx(PLANTED.p1 / 2, rel=0.1)


def test_what_traffic_does_not_show_of_a_profile_stays(tmp_path: Path) -> None:
    kept = {
        "first_token_s": 0.02,
        "plans_ahead": True,
        "experts_awake_at": 8.0,
        "idle_expert_s": 1e-4,
    }
    present = {
        "gpu": "G", "model": "m", "tensor_parallel": 1, "constants": dataclasses.asdict(PLANTED),
        "kv_capacity_tokens": 1000, "max_num_seqs": 8, **kept,
    }  # fmt: skip
    document = seen(7, caching=True, hits=0.5) | {"profile": present, "models": ["m"]}
    write_observed(document | {"kv_capacity_tokens": None}, tmp_path / "p.yaml")
    found = load_profile(str(tmp_path / "p.yaml"))
    assert {name: getattr(found, name) for name in kept} == kept


@pytest.mark.parametrize("fields", [6, 7])
def test_rows_that_do_not_say_what_was_cached_are_not_believed(fields: int) -> None:
    document = seen(fields, caching=None, hits=None)
    with pytest.raises(ProfileError, match="how much of their prompts was prefilled"):
        fit_observed(document)
    document["steps"] *= 4  # now there are enough without a prompt
    found = fit_observed(document)
    assert found.step_rows < 120
    assert "p1" not in found.identified
    assert found.constants.p1 == pytest.approx(PLANTED.p1, rel=0.2)
