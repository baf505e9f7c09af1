"""Reloading while serving: what changes, what is refused whole, and that no stream notices."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.core.types import InstanceId, Request
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.config_changes import differences
from hetero_gateway.files.gateway_config import GatewayConfig, load_gateway_config
from tests.fakes.running import RunningGateway, config_for, eventually, running_gateway
from tests.fakes.vllm import fake_instances

CHAT = "/v1/chat/completions"


def write(path: Path, config: GatewayConfig, **sections: Any) -> None:
    """The configuration's file, these sections merged over it; None: a broken one."""
    data = config.model_dump(mode="json", exclude_unset=True)
    for name, section in sections.items():
        if isinstance(section, dict):
            data.setdefault(name, {}).update(section)
        else:
            data[name] = section
    path.write_text(yaml.safe_dump(data))


def stream(**fake: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "hello"}
    return {"model": "m", "messages": [message], "stream": True, "fake": fake}


EVERYTHING: dict[str, Any] = {
    "scheduler": {
        "policy": "least-requests",
        "theta": 3.0,
        "recalibrate": True,
        "queue": {
            "max_requests": 5,
            "timeout_s": 7,
            "discipline": "shortest",
            "patience_s": 3,
            "classes": {"one": {"share": 2}},
            "most_wait_s": 4,
        },
        "predictor": {"kind": "constant", "mean_tokens": 11},
        "tokens": {"image_tokens": 9},
    },
    "retry": {"max_attempts": 1},
    "timeouts": {"total_s": 99, "connect_s": 3, "idle_s": 44, "header_s": 12},
    "pool": {"max_idle": 2},
    "health": {"probe_interval_s": 0.3, "ejection": {"consecutive_failures": 3}},
    "server": {"max_body_bytes": 4096, "max_connections": 77, "drain_s": 1, "watch_files_s": 60},
}


def in_effect(running: RunningGateway) -> dict[str, Any]:
    """The settings as the parts have them that heed them."""
    gateway = running.gateway
    scheduler, [instance] = gateway.fleet.scheduler, gateway.fleet.instances.values()
    dataplane = gateway.dataplane
    return {
        "policy": scheduler.policy.name,
        "theta": scheduler._decider.views.theta,
        "recalibrates": instance.recalibrates,
        "max_requests": scheduler._max_queued,
        "queue_timeout_s": gateway.placement.timeout_s,
        "discipline": type(scheduler._discipline).__name__,
        "waits": scheduler._waits,
        "predicted": gateway.predict_output_tokens("m", 100, None),
        "image_tokens": dataplane.intake._image_tokens,
        "max_attempts": dataplane.rooms.budget.config.max_attempts,
        "total_s": dataplane.rooms.total_timeout_s,
        "connect_s": instance.pool._connect_timeout_s,
        "max_idle": instance.pool._config.max_idle,
        "idle_s": dataplane.open_exchanges._config.idle_s,
        "probe_interval_s": gateway.health._config.probe_interval_s,
        "failures": instance.outcomes.rules.consecutive_failures,
        "max_body_bytes": dataplane.body_limits.max_body_bytes,
        "header_s": running.server.watch.limits.header_s,
        "max_connections": running.server.watch.limits.max_connections,
    }


def measure(path: Path, step_s: float, **changes: Any) -> None:
    """A profile's file."""
    constants = dict.fromkeys([f"p{i}" for i in range(1, 8)], 0.0) | {"p8": step_s}
    document = {"gpu": "X", "model": "m", "tensor_parallel": 1, "constants": constants}
    path.write_text(yaml.safe_dump(document | {"kv_capacity_tokens": 100_000} | changes))


async def test_what_a_reload_changes_is_as_if_it_had_been_started_so(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    async with fake_instances(1) as fakes:
        config = config_for(fakes)
        write(path, config)
        async with running_gateway(load_gateway_config(path), path) as running:
            write(path, config, **EVERYTHING)
            fresh = load_gateway_config(path)
            told = await running.gateway.reloader.reload("a test")
            assert sorted(told["settings"]) == sorted(differences(config, fresh))
            assert told["needs_restart"] == []
            assert running.gateway.config == fresh
            reloaded = in_effect(running)
            shown = await running.metrics()
            assert 'hetero_gateway_config_reloads_total{outcome="applied"} 1.0' in shown
            async with httpx.AsyncClient(base_url=running.url) as client:
                assert (await client.post(CHAT, json=stream())).status_code == 200
            assert 'policy="least-requests"' in await running.metrics()
        async with running_gateway(fresh, path) as running:
            assert in_effect(running) == reloaded


async def test_limits_of_requests_come_change_and_go_by_a_reload(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    body = Request("m", 10, 10.0)
    async with fake_instances(1) as fakes:
        config = config_for(fakes)
        write(path, config)
        async with running_gateway(config, path) as running:
            fleet = running.gateway.fleet
            for section, slo in (
                ({"ttft_s": 1, "tpot_s": 0.1}, Slo(1.0, 0.1)),
                ({"ttft_s": 2, "classes": {"interactive": {"tpot_s": 0.2}}}, Slo(tpot_s=0.2)),
                ({"models": {"m": {}}}, Slo()),
                (None, None),
            ):
                write(path, config, scheduler={"slo": section})
                told = await running.gateway.reloader.reload("a test")
                assert told["needs_restart"] == []
                slos = fleet.scheduler.policy.slos  # type: ignore[attr-defined]
                assert (None if slos is None else slos.of(body)) == slo
            write(path, config, scheduler={"slo": {"ttft_s": 0}})
            with pytest.raises(ConfigError, match=r"scheduler\.slo\.ttft_s"):
                await running.gateway.reloader.reload("a test")


async def test_what_needs_a_restart_is_named_until_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    async with fake_instances(1) as fakes:
        config = config_for(fakes)
        write(path, config)
        async with running_gateway(config, path) as running:
            write(path, config, server={"port": 9, "workers": 3}, scheduler={"seed": 5})
            for _ in range(2):
                told = await running.gateway.reloader.reload("a test")
                assert told["settings"] == []
                assert told["needs_restart"] == ["server.port", "server.workers", "scheduler.seed"]
            assert running.gateway.config == config
            shown = await running.metrics()
            assert "hetero_gateway_config_settings_needing_restart 3.0" in shown
            write(path, config)
            assert (await running.gateway.reloader.reload("a test"))["needs_restart"] == []


async def test_what_the_command_line_says_wins_over_the_file_at_a_reload_too(
    tmp_path: Path,
) -> None:
    path = tmp_path / "gateway.yaml"
    async with fake_instances(1) as fakes:
        config = config_for(fakes)
        write(path, config)
        async with running_gateway(config, path) as running:
            running.gateway.reloader.flags = {"scheduler.policy": "finish-time"}
            write(path, config, scheduler={"policy": "min-max"})
            told = await running.gateway.reloader.reload("a test")
            assert (told["settings"], told["flags"]) == ([], ["scheduler.policy"])
            assert running.gateway.fleet.scheduler.policy.name == "finish-time"


@pytest.mark.parametrize(
    "broken",
    [
        {"retry": {"max_attempts": 1, "max_atempts": 2}},
        {"retry": {"max_attempts": 1}, "scheduler": {"tokens": {"tokenizer_file": "/nowhere"}}},
        {"retry": {"max_attempts": 1}, "instances": [{"id": "x", "base_url": "ftp://x"}]},
    ],
    ids=["unknown key", "missing file", "bad instance"],
)
async def test_a_broken_file_is_refused_whole_and_log_and_metrics_say_so(
    tmp_path: Path, broken: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gateway.yaml"
    async with fake_instances(1) as fakes:
        config = config_for(fakes)
        write(path, config)
        async with running_gateway(config, path) as running:
            before = in_effect(running)
            write(path, config, **broken)
            with pytest.raises(ConfigError), caplog.at_level(logging.ERROR):
                await running.gateway.reloader.reload("a test")
            assert "refused" in caplog.text
            assert in_effect(running) == before
            assert running.gateway.config == config
            shown = await running.metrics()
            assert 'hetero_gateway_config_reloads_total{outcome="refused"} 1.0' in shown
            assert "hetero_gateway_config_last_reload_successful 0.0" in shown
            write(path, config)
            await running.gateway.reloader.reload("a test")
            assert "hetero_gateway_config_last_reload_successful 1.0" in await running.metrics()


@pytest.mark.slow
async def test_a_storm_of_reloads_cuts_no_stream(tmp_path: Path) -> None:
    """One a second, every fifth of them broken, the policy and all settings to and fro."""
    path, reloads = tmp_path / "gateway.yaml", 16
    async with fake_instances(4) as fakes:
        config = config_for(fakes)
        write(path, config)
        most = {name: s for name, s in EVERYTHING.items() if name != "server"}
        queue = {"timeout_s": 60, "discipline": "clients"}
        most["scheduler"] = EVERYTHING["scheduler"] | {"queue": queue}
        others = [{"id": "i0", "base_url": fakes[0].url}, {"id": "n", "base_url": fakes[3].url}]
        async with (
            running_gateway(config, path) as running,
            httpx.AsyncClient(
                base_url=running.url, limits=httpx.Limits(max_connections=None), timeout=None
            ) as client,
        ):

            async def one(i: int) -> str:
                await asyncio.sleep(i * 0.05)
                each_s = (reloads - 7) / 6  # so that all 200 are there nearly all the time
                response = await client.post(CHAT, json=stream(events=6, delay_s=each_s))
                assert response.status_code == 200
                return response.text

            streams = [asyncio.ensure_future(one(i)) for i in range(200)]
            for i in range(reloads):
                await asyncio.sleep(1)
                if i % 5 == 4:
                    path.write_text("instances: [")
                elif i % 2:
                    write(path, config)
                else:
                    write(path, config, instances=others, **most)
                running.gateway.reload_soon("SIGHUP")
                # On a busy machine one may take longer than the second; two at once would be one.
                await eventually(lambda i=i: sum(running.gateway.metrics.reloads.values()) > i)
            texts = await asyncio.gather(*streams)
            assert all(text.count('"content":"xxxx"') == 6 for text in texts)
            assert all(text.endswith("data: [DONE]\n\n") for text in texts)
            await eventually(running.settled)
            outcomes = running.gateway.metrics.reloads
            # After each broken one but the last of all, that which is there already comes again.
            refused, unchanged = reloads // 5, (reloads - 1) // 5
            assert outcomes == {
                "refused": refused,
                "applied": reloads - refused - unchanged,
                "unchanged": unchanged,
            }
            await eventually(lambda: set(running.gateway.fleet.instances) in (
                {"i0", "i1", "i2", "i3"}, {"i0", "n"}))  # fmt: skip


async def test_a_removed_instance_ends_its_streams_and_is_counted_until_then(
    tmp_path: Path,
) -> None:
    path = tmp_path / "gateway.yaml"
    async with fake_instances(2) as fakes:
        config = config_for(fakes)
        write(path, config)
        async with (
            running_gateway(config, path) as running,
            httpx.AsyncClient(base_url=running.url, timeout=None) as client,
        ):
            await eventually(lambda: running.gateway.fleet.ready())
            bodies = [client.post(CHAT, json=stream(events=20, delay_s=0.5)) for _ in range(6)]
            streams = [asyncio.ensure_future(body) for body in bodies]
            await eventually(lambda: fakes[0].open + fakes[1].open == 6)
            left = InstanceId("i1" if fakes[1].open else "i0")
            entries = config.model_dump(mode="json", exclude_unset=True)["instances"]
            write(path, config, instances=[e for e in entries if e["id"] != left])
            await running.gateway.reloader.reload("a test")
            instance = running.gateway.fleet.instances[left]
            assert instance.leaving
            held = fakes[int(left[1])]
            assert running.gateway.fleet.scheduler.snapshot(left).in_flight == held.open > 0
            requests = held.requests
            assert (await client.post(CHAT, json=stream())).status_code == 200
            assert held.requests == requests
            for response in await asyncio.gather(*streams):
                assert response.text.endswith("data: [DONE]\n\n")
            await eventually(lambda: left not in running.gateway.fleet.instances)
            await eventually(running.settled)


async def test_what_is_wanted_again_before_it_has_gone_stays(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    async with fake_instances(1) as fakes:
        config = config_for(fakes)
        write(path, config)
        async with (
            running_gateway(config, path) as running,
            httpx.AsyncClient(base_url=running.url, timeout=None) as client,
        ):
            under_way = asyncio.ensure_future(
                client.post(CHAT, json=stream(events=20, delay_s=0.5))
            )
            await eventually(lambda: fakes[0].open == 1)
            [instance] = running.gateway.fleet.instances.values()
            write(path, config, instances=[])
            await running.gateway.reloader.reload("a test")
            assert instance.leaving
            write(path, config)
            await running.gateway.reloader.reload("a test")
            assert list(running.gateway.fleet.instances.values()) == [instance]
            assert not instance.leaving
            assert running.gateway.fleet.scheduler.snapshot(instance.id).in_flight == 1
            assert (await client.post(CHAT, json=stream())).status_code == 200
            assert (await under_way).text.endswith("data: [DONE]\n\n")


async def test_what_came_over_admin_is_not_the_files_to_take_away(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    async with fake_instances(2) as fakes:
        config = config_for(fakes[:1])
        write(path, config)
        async with (
            running_gateway(config, path) as running,
            httpx.AsyncClient(base_url=running.url) as client,
        ):
            mine = {"id": "mine", "base_url": fakes[1].url}
            added = (await client.post("/admin/instances", json=mine)).json()
            assert added["source"] == "admin"
            write(path, config, instances=[])
            told = (await client.post("/admin/reload")).json()
            assert told["removed"] == ["i0"]
            assert list(running.gateway.fleet.instances) == ["mine"]
            write(path, config, instances=[{"id": "mine", "base_url": fakes[0].url}])
            assert (await client.post("/admin/reload")).status_code == 400
            write(path, config, instances=[mine])
            await client.post("/admin/reload")
            shown = (await client.get("/admin/instances")).json()["instances"]
            assert [row["source"] for row in shown] == ["file"]


async def test_a_changed_profile_file_is_read_again(tmp_path: Path) -> None:
    path, profile = tmp_path / "gateway.yaml", tmp_path / "p.yaml"

    measure(profile, 0.01)
    async with fake_instances(1) as fakes:
        config = config_for(fakes, profiles=("p.yaml",))
        write(path, config)
        async with running_gateway(config, path) as running:
            measure(profile, 0.02)
            assert (await running.gateway.reloader.reload("a test"))["changed"] == ["i0"]
            spec = running.gateway.fleet.scheduler.spec(InstanceId("i0"))
            assert spec.profile is not None
            assert spec.profile.constants.p8 == 0.02
            assert (await running.gateway.reloader.reload("a test"))["changed"] == []


async def test_requests_in_the_queue_are_placed_when_the_policy_has_none(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    measure(tmp_path / "p.yaml", 0.01, max_num_seqs=1)
    async with fake_instances(1) as fakes:
        config = config_for(fakes, profiles=("p.yaml",))
        write(path, config)
        async with (
            running_gateway(config, path) as running,
            httpx.AsyncClient(base_url=running.url, timeout=None) as client,
        ):
            body = stream(events=20, delay_s=0.5)
            answers = [asyncio.ensure_future(client.post(CHAT, json=body)) for _ in range(12)]
            await eventually(lambda: fakes[0].open + running.gateway.fleet.scheduler.queued == 12)
            assert running.gateway.fleet.scheduler.queued >= 3
            write(path, config, scheduler={"policy": "round-robin"})
            await running.gateway.reloader.reload("a test")
            await eventually(lambda: fakes[0].open == 12, within_s=4)
            assert [r.status_code for r in await asyncio.gather(*answers)] == [200] * 12
            await eventually(running.settled)


@pytest.mark.parametrize("how", ["written", "renamed", "linked"])
async def test_a_watched_file_is_taken_up_by_itself(tmp_path: Path, how: str) -> None:
    path = tmp_path / "gateway.yaml"
    async with fake_instances(1) as fakes:
        config = config_for(fakes, server={"watch_files_s": 0.5})
        write(path, config)
        if how == "linked":  # as Kubernetes mounts a ConfigMap
            path.rename(tmp_path / "one.yaml")
            path.symlink_to(tmp_path / "one.yaml")
        async with running_gateway(config, path) as running:
            await asyncio.sleep(2)
            assert not running.gateway.metrics.reloads
            aside = path if how == "written" else tmp_path / "two.yaml"
            write(aside, config, retry={"max_attempts": 2}, server={"watch_files_s": 0.5})
            if how == "renamed":
                aside.rename(path)
            elif how == "linked":
                path.unlink()
                path.symlink_to(aside)
            else:
                os.utime(path, ns=(1, 1))
            await eventually(lambda: running.gateway.config.retry.max_attempts == 2)
            assert running.gateway.metrics.reloads == {"applied": 1}


async def test_a_reload_reaches_all_workers(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    async with fake_instances(2) as fakes:
        config = config_for(fakes)
        write(path, config)
        async with (
            running_gateway(config, path, workers=2) as running,
            httpx.AsyncClient(base_url=running.url, timeout=None) as client,
        ):
            under_way = asyncio.ensure_future(
                client.post(CHAT, json=stream(events=10, delay_s=0.5))
            )
            await eventually(lambda: fakes[0].open + fakes[1].open == 1)
            write(path, config, **EVERYTHING | {"scheduler": {"policy": "session"}})
            told = (await client.post("/admin/reload")).json()
            assert "scheduler.policy" in told["settings"]

            def taken_up() -> bool:
                return all(w.config.retry.max_attempts == 1 for w in running.workers)

            await eventually(taken_up)
            for worker in running.workers:
                assert worker.fleet.scheduler.policy.name == "session"
                assert worker.remote.headers
                assert worker.dataplane.rooms.budget.config.max_attempts == 1
                assert worker.config.pool.max_connections == 2048  # its share
            assert (await client.post(CHAT, json=stream())).status_code == 200
            assert (await under_way).text.endswith("data: [DONE]\n\n")
            await eventually(running.settled)
