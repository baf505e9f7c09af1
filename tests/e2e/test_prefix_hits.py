"""Over real HTTP, an emulated engine with a prefix cache and right constants: whatever share of the
prompts it has, the gateway neither thinks that it has become faster, nor that its profile drifts,
and finds its constants in the traffic. In virtual time.
"""

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.types import InstanceId
from hetero_gateway.gateway.fleet.instances import Fleet
from hetero_gateway.lab.emulator.settings import EmulatorSettings
from hetero_gateway.lab.load.emulated import write_profile
from hetero_gateway.lab.profiler.observed import fit_observed
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.emulated import emulated
from tests.fakes.running import config_for, running_gateway
from tests.fakes.vllm import FakeInstance

pytestmark = pytest.mark.slow

PLANTED = Constants(1.2e-4, 1e-3, 0, 8e-3, 1e-7, 3e-4, 0, 1.2e-2)
ENGINE = Profile("GPU", "tiny", 1, PLANTED, 120_000, 64)
LONGEST, DOCUMENTS = 1400, 6
KEPT = httpx.Limits(max_connections=None, keepalive_expiry=600)


class Clients:
    """Prompts of which so much has been sent before: most of them nearly whole, or nothing."""

    def __init__(self, client: httpx.AsyncClient, hit_share: float) -> None:
        self._client = client
        self._found = hit_share / 0.95
        self._rng = np.random.default_rng(3)
        self._documents = self._rng.integers(10, 900, (DOCUMENTS, LONGEST))

    async def send(self, prompt: np.ndarray[Any, Any], output_tokens: int) -> None:
        body = {
            "model": "m", "stream": True, "ignore_eos": True, "max_tokens": output_tokens,
            "prompt": prompt.tolist(), "stream_options": {"include_usage": True},
        }  # fmt: skip
        answer = await self._client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text

    async def run(self, seconds: float, rate_per_s: float) -> None:
        rng = self._rng
        for document in self._documents:
            await self.send(document, 2)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(round(seconds * rate_per_s)):
                length = int(rng.integers(200, LONGEST))
                prompt = rng.integers(10, 900, length)
                if rng.random() < self._found:
                    same = int(0.95 * length)
                    prompt[:same] = self._documents[rng.integers(DOCUMENTS)][:same]
                tasks.create_task(self.send(prompt, int(rng.integers(10, 70))))
                await asyncio.sleep(float(rng.exponential(1 / rate_per_s)))


@pytest.mark.parametrize(
    ("hit_share", "details", "workers"),
    [
        pytest.param(0.9, True, 2, marks=pytest.mark.system(virtual=True)),
        pytest.param(0.8, False, 1, marks=pytest.mark.system(virtual=True)),
    ],
)
async def test_what_an_engine_has_cached_is_not_prefilled(
    hit_share: float,
    details: bool,
    workers: int,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hetero_gateway.core.instances.drift.HOLD_S", 15.0)
    alarms: list[InstanceId] = []
    monkeypatch.setattr(Fleet, "tell_drift", lambda _, instance_id: alarms.append(instance_id))
    write_profile(ENGINE, tmp_path / "right.yaml")
    settings = EmulatorSettings(
        ENGINE, models=("m",), max_model_len=4096, prompt_tokens_details=details
    )
    speeds: list[float] = []

    async def watch(fleet: Fleet) -> None:
        while True:
            await asyncio.sleep(1)
            speeds.append(fleet.scheduler.members.snapshot(InstanceId("i0")).speed_factor or 0.0)

    async with emulated(settings) as (url, _):
        config = config_for(
            [FakeInstance().at(url)],
            profiles=(str(tmp_path / "right.yaml"),),
            health={"scrape_interval_s": 5.0, "probe_interval_s": 2.0},
        )
        async with (
            running_gateway(config, workers=workers, one_port=True) as running,
            httpx.AsyncClient(base_url=running.url, timeout=60, limits=KEPT) as client,
        ):
            fleet = running.gateway.fleet
            watching = asyncio.create_task(watch(fleet))
            await Clients(client, hit_share).run(70, 3.0)
            await asyncio.sleep(8)  # the last counters are read
            watching.cancel()
            seen = (await client.get("/admin/observations?instance=i0")).json()
            (row,) = (await client.get("/admin/instances")).json()["instances"]
            metrics = await running.metrics()
    assert alarms == []
    assert np.mean(speeds[20:]) == pytest.approx(1, abs=0.05)
    constants = fit_observed(seen).constants
    assert constants.p1 == pytest.approx(PLANTED.p1, rel=0.1)
    assert row["prefix_caching"] is True
    assert row["cached_share"] == pytest.approx(hit_share, abs=0.2)
    counted = {
        line.split('source="')[1].split('"')[0]: float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith("hetero_gateway_prompt_cached_tokens_total")
    }
    # What was predicted for them, and what there was: as far as a prompt's beginning was known.
    assert counted["engine"] >= 0.9 * counted["predicted"]
    assert (counted["predicted"] > 0) is (hit_share > 0)
