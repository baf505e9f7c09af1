"""What the gateway learns of its instances from real streams, shows, and does only when told to."""

import asyncio
import logging
import math
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from hetero_gateway.cli import main
from hetero_gateway.core.instances import calibration
from hetero_gateway.core.instances.calibration import MOST_CHANGE
from hetero_gateway.core.instances.observation import FirstTokenRow, StepRow
from hetero_gateway.core.types import InstanceId
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.gateway.dataplane import speed
from hetero_gateway.gateway.fleet import recalibration
from tests.fakes.running import CHAT, FAST, RunningGateway, eventually, rig
from tests.fakes.vllm import NO_PREFIX_CACHE, FakeInstance

I0 = InstanceId("i0")
METRICS = NO_PREFIX_CACHE.replace("{", '{block_size="16",num_gpu_blocks="4000",')


def chat(
    delay_s: float = 0.02, events: int = 40, prompt: int = 200, **fake: object
) -> dict[str, object]:
    fake |= {"delay_s": delay_s, "events": events}
    return {"model": "m", "prompt": [7] * prompt, "stream": True, "fake": fake}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five looks a second, and a fit after two observed seconds, instead of sixty."""
    monkeypatch.setattr(speed, "INTERVAL_S", 0.2)
    monkeypatch.setattr(recalibration, "EVERY_S", 2.0)


async def traffic(client: httpx.AsyncClient, seconds: float, delay_s: float = 0.02) -> None:
    """Streams of several lengths, two to five at a time."""

    async def one(index: int) -> None:
        await client.post(CHAT, json=chat(delay_s, 20 + 13 * (index % 4), 50 + 150 * (index % 5)))

    async with asyncio.TaskGroup() as tasks:
        for index in range(round(seconds / 0.25)):
            tasks.create_task(one(index))
            await asyncio.sleep(0.25)


def speed_of(running: RunningGateway) -> float:
    return running.gateway.fleet.scheduler.members.snapshot(I0).speed_factor or 0.0


async def test_rows_are_told_with_their_fields_and_nothing_of_requests(quick: None) -> None:
    async with rig() as (_, client, _):
        await traffic(client, 2.0)
        document = (await client.get("/admin/observations?instance=i0")).json()
        assert tuple(document["step_fields"]) == StepRow._fields
        assert tuple(document["first_token_fields"]) == FirstTokenRow._fields
        rows = [StepRow(*row) for row in document["steps"]]
        assert len(rows) >= 5
        busy = rows[len(rows) // 2]
        assert busy.steps / busy.duration_s == pytest.approx(1 / 0.02, rel=0.5)
        assert 0.5 <= busy.sequences <= 8
        assert len(document["first_tokens"]) == 8
        assert document["profile"]["constants"]["p8"] > 0
        assert document["stand_in"] is None
        assert (await client.get("/admin/observations?instance=nobody")).status_code == 404
        assert (await client.get("/admin/observations")).status_code == 400


async def test_streams_shorter_than_a_look_are_observed() -> None:
    # Each lasts a third of a second, and looks are a second apart.
    async with rig() as (running, client, _):
        for _ in range(8):
            await client.post(CHAT, json=chat(0.03, 10))
        seen = running.gateway.fleet.scheduler.members.table[I0].observations
        await eventually(lambda: running.gateway.placement.idle)
        (row,) = seen.steps.last(1)
        assert 0.015 < row.duration_s / row.steps < 0.09


async def test_an_engine_that_puts_several_tokens_into_an_event_is_not_slow(quick: None) -> None:
    speeds = {}
    for tokens in (1, 4):
        async with rig() as (running, client, _):
            body = chat(0.04, 40, event_tokens=tokens)
            for _ in range(3):
                await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(3)))
            speeds[tokens] = speed_of(running)
    assert speeds[4] < speeds[1] / 2


async def test_drift_is_logged_once_and_shown(
    quick: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("HOLD_S", 1.5), ("_LEAST_S", 1.0), ("_EVERY_S", 0.5)):
        monkeypatch.setattr(f"hetero_gateway.core.instances.drift.{name}", value)
    async with rig(profiles=(FAST,)) as (running, client, _):
        with caplog.at_level(logging.WARNING, "hetero_gateway"):
            await traffic(client, 5.0, delay_s=0.06)  # some 12 ms by the profile
        row = (await client.get("/admin/instances")).json()["instances"][0]
        text = await running.metrics()
        assert row["drift"]["drifted"]
        assert row["drift"]["decode"] > 2
        assert row["drift"]["since"] is not None
        assert 'profile_drift_ratio{backend="i0",phase="decode"}' in text
        assert await asyncio.to_thread(main, ["status", running.url]) == 0
    told = [r.getMessage() for r in caplog.records if "drifted" in r.getMessage()]
    assert len(told) == 1
    assert "instance i0" in told[0]
    assert "--from-gateway" in told[0]


def dated_profile(folder: Path) -> Path:
    example = yaml.safe_load(Path("configs/profiles/example.yaml").read_text())
    example["source"]["date"] = "2026-01-02"
    path = folder / "dated.yaml"
    path.write_text(yaml.safe_dump(example))
    return path


async def test_the_age_of_a_profile_is_shown_where_it_has_a_date(tmp_path: Path) -> None:
    path = dated_profile(tmp_path)
    async with rig(2, profiles=(str(path), None)) as (running, client, _):
        rows = (await client.get("/admin/instances")).json()["instances"]
        text = await running.metrics()
    assert rows[0]["profile_age_s"] > 86400
    assert rows[1]["profile_age_s"] is None
    ages = [line for line in text.splitlines() if line.startswith("hetero_gateway_profile_age")]
    assert len(ages) == 1
    assert 'backend="i0"' in ages[0]


async def test_nothing_is_recalibrated_unless_it_is_on(quick: None) -> None:
    async with rig(profiles=(FAST,)) as (running, client, _):
        await traffic(client, 6.0, delay_s=0.05)
        row = (await client.get("/admin/instances")).json()["instances"][0]
        assert row["recalibrated"] is False
        assert running.gateway.fleet.scheduler.members.specs[I0].profile == load_profile(FAST)
        assert row["speed_factor"] > 2
        refused = await client.patch("/admin/instances/i0", json={"recalibrated": True})
        assert refused.status_code == 400
        assert "scheduler.recalibrate" in refused.json()["error"]["message"]


async def test_recalibrated_constants_are_bounded_and_can_be_taken_back(quick: None) -> None:
    on = {"recalibrate": True}
    async with rig(profiles=(FAST,), scheduler=on) as (running, client, _):
        fleet, original = running.gateway.fleet, load_profile(FAST).constants
        load = asyncio.create_task(traffic(client, 9.0, delay_s=0.1))  # 12 ms by the profile
        await eventually(lambda: fleet.instances[I0].calibrated is not None, within_s=15)
        fitted = fleet.scheduler.members.specs[I0].profile
        assert fitted is not None
        assert 2 < fitted.constants.p8 / original.p8 <= MOST_CHANGE * 1.001
        await load
        # What is left of the correction is beyond the bound, not a second one on top of the first.
        assert speed_of(running) < 4
        row = (await client.get("/admin/instances")).json()["instances"][0]
        assert (row["recalibrated"], row["profile"]) == (True, FAST)
        back = (await client.patch("/admin/instances/i0", json={"recalibrated": False})).json()
        assert back["recalibrated"] is False
        assert fleet.scheduler.members.specs[I0].profile.constants == original  # type: ignore[union-attr]
        await traffic(client, 4.0)
        assert fleet.instances[I0].calibrated is None


async def test_a_fit_runs_off_the_event_loop_and_not_for_an_instance_that_has_gone(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def refit(*seen: Any) -> Any:
        threads.append(threading.get_ident())
        return calibration.refit(*seen)

    monkeypatch.setattr(recalibration, "refit", refit)
    monkeypatch.setattr(recalibration, "_MOST_ERROR", math.inf)
    on = {"recalibrate": True}
    async with rig(profiles=(FAST,), scheduler=on) as (running, client, _):
        fleet = running.gateway.fleet
        instance = fleet.instances[I0]
        load = asyncio.create_task(traffic(client, 5.0, delay_s=0.1))
        await eventually(lambda: instance.calibrated is not None, within_s=15)
        await load
        assert threading.get_ident() not in threads
        instance.calibrated = None
        count = len(threads)
        recalibration.Recalibration(fleet).look()
        fleet.remove(I0)  # while the thread fits
        await eventually(lambda: len(threads) > count)
        await asyncio.sleep(0.1)
        assert instance.calibrated is None


async def test_an_unprofiled_instance_learns_its_constants_where_that_is_on(quick: None) -> None:
    fake = FakeInstance()
    fake.metrics = METRICS
    on = {"recalibrate": True}
    async with rig([fake], profiles=(None,), scheduler=on) as (running, client, _):
        status = (await client.get("/admin/instances")).json()["instances"][0]
        assert status["profile"] == "unprofiled"
        await traffic(client, 6.0, delay_s=0.05)
        status = (await client.get("/admin/instances")).json()["instances"][0]
        assert (status["profile"], status["recalibrated"]) == ("learned", True)
        assert status["kv_capacity_tokens"] == 64_000
        profile = running.gateway.fleet.scheduler.members.specs[I0].profile
        assert profile is not None
        assert profile.constants.p8 + 3 * profile.constants.p6 == pytest.approx(0.05, rel=0.3)


async def test_unprofiled_instances_get_requests_by_their_speed() -> None:
    # One makes a token in 10 ms, the other in 60.
    async with rig(2, profiles=(None,)) as (_, client, fakes):

        async def one() -> None:
            body = {"model": "m", "prompt": [7] * 99, "stream": True, "fake": {"events": 40}}
            await client.post(CHAT, json=body)

        fakes[0].delay_s, fakes[1].delay_s = 0.01, 0.06
        async with asyncio.TaskGroup() as tasks:
            for _ in range(80):
                tasks.create_task(one())
                await asyncio.sleep(0.1)
        rows = (await client.get("/admin/instances")).json()["instances"]
        assert rows[0]["requests"] > 3 * rows[1]["requests"]
        assert [row["profile"] for row in rows] == ["unprofiled"] * 2
        explained = (await client.get("/admin/explain?prompt_tokens=99")).json()
        assert "done in" in explained["reason"]
        assert "(where there is no profile, by observed speed)" in explained["reason"]


async def test_a_profile_from_the_gateway_fits_what_it_saw(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new.yaml"
    async with rig(profiles=(FAST,)) as (running, client, _):
        await traffic(client, 6.0, delay_s=0.05)
        assert await profile(running.url, output) == 0
    said = capsys.readouterr().out
    document = yaml.safe_load(output.read_text())
    made, old = load_profile(str(output)), load_profile(FAST)
    assert made.constants.p8 + 3 * made.constants.p6 == pytest.approx(0.05, rel=0.25)
    assert (made.gpu, made.kv_capacity_tokens) == (old.gpu, old.kv_capacity_tokens)
    assert document["source"]["how"] == "measured"
    assert "from live traffic" in document["source"]["note"]
    assert document["source"]["error"]["decode"] < 0.5
    assert "p5" in document["source"]["unidentified"]
    assert "does not determine" in said
    assert "p5" in said


async def profile(url: str, output: Path, *more: str) -> int:
    """The command's exit code."""
    command = ["profile", "--from-gateway", url, "-o", str(output), *more]
    return await asyncio.to_thread(main, command)


async def test_what_cannot_be_fitted_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new.yaml"
    monkeypatch.setenv("ADMIN", "secret-27182")
    keyed = {"server": {"admin_key_env": "ADMIN"}}
    key = ("--admin-key-env", "ADMIN")

    async def told(code: int, url: str, *more: str) -> str:
        assert await profile(url, output, *more) == code
        text = capsys.readouterr().err
        assert text.count("\n") == 1
        return text

    async with rig(2, **keyed) as (running, _, fakes):
        assert "missing or wrong" in await told(1, running.url, "--instance", "i0")
        assert "--instance: say which; the gateway has i0, i1" in await told(2, running.url, *key)
        assert "nobody" in await told(1, running.url, "--instance", "nobody", *key)
        said = await told(2, running.url, "--instance", "i0", *key)
        assert "0 rows of streams" in said
        assert "not a gateway's answer" in await told(1, fakes[0].url, "--instance", "i0")
    assert "must be http://" in await told(2, "gateway:8000", "--instance", "i0")
    assert "does not answer" in await told(1, "http://127.0.0.1:1", "--instance", "i0")
    assert not output.exists()
