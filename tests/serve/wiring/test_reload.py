"""Reloading while serving: what changes, what is refused whole, and that no stream notices."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.core.request import Request
from hetero_gateway.core.types import InstanceId
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.config_changes import differences
from hetero_gateway.files.gateway_config import load_gateway_config
from tests.fakes.gateway_files import write
from tests.fakes.reloads import FromFile, from_file
from tests.fakes.running import CHAT, SLOW, RunningGateway, eventually, faked, running_gateway
from tests.fakes.vllm import fake_instances


def post(rig: FromFile, **fake: Any) -> asyncio.Future[httpx.Response]:
    return asyncio.ensure_future(rig.client.post(CHAT, json=faked(**fake)))


EVERYTHING: dict[str, Any] = {
    "scheduler": {
        "policy": "least-requests",
        "theta": 3.0,
        "recalibrate": True,
        "queue": {
            "max_requests": 5,
            "timeout_s": 7,
            "discipline": "classes",
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
    scheduler, instance = gateway.fleet.scheduler, gateway.fleet.instances[InstanceId("i0")]
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
        "header_s": running.server.watch.limits.timeouts.header_s,
        "max_connections": running.server.watch.limits.max_connections,
    }


def measure(path: Path, step_s: float, **changes: Any) -> None:
    """A profile's file."""
    constants = dict.fromkeys([f"p{i}" for i in range(1, 8)], 0.0) | {"p8": step_s}
    document = {"gpu": "X", "model": "m", "tensor_parallel": 1, "constants": constants}
    write(path, document | {"kv_capacity_tokens": 100_000} | changes)


async def test_what_a_reload_changes_is_as_if_it_had_been_started_so(tmp_path: Path) -> None:
    async with from_file(tmp_path) as rig:
        told, running = await rig.reload(**EVERYTHING), rig.running
        fresh = load_gateway_config(rig.path)
        assert sorted(told["settings"]) == sorted(differences(rig.config, fresh))
        assert told["needs_restart"] == []
        assert running.gateway.config == fresh
        reloaded = in_effect(running)
        shown = await running.metrics()
        assert 'hetero_gateway_config_reloads_total{outcome="applied"} 1.0' in shown
        assert (await post(rig)).status_code == 200
        assert 'policy="least-requests"' in await running.metrics()
        async with running_gateway(fresh, rig.path) as anew:
            assert in_effect(anew) == reloaded


async def test_limits_of_requests_come_change_and_go_by_a_reload(tmp_path: Path) -> None:
    async with from_file(tmp_path) as rig:
        for section, slo in (
            ({"ttft_s": 1, "tpot_s": 0.1}, Slo(1.0, 0.1)),
            ({"ttft_s": 2, "classes": {"interactive": {"tpot_s": 0.2}}}, Slo(tpot_s=0.2)),
            ({"models": {"m": {}}}, Slo()),
            (None, None),
        ):
            assert (await rig.reload(scheduler={"slo": section}))["needs_restart"] == []
            policy: Any = rig.running.gateway.fleet.scheduler.policy
            assert (policy.slos and policy.slos.of(Request("m", 10, 10.0))) == slo
        with pytest.raises(ConfigError, match=r"scheduler\.slo\.ttft_s"):
            await rig.reload(scheduler={"slo": {"ttft_s": 0}})


async def test_what_needs_a_restart_is_named_until_there_is_one(tmp_path: Path) -> None:
    async with from_file(tmp_path) as rig:
        before = rig.running.gateway.config
        for _ in range(2):
            told = await rig.reload(server={"port": 9, "workers": 3}, scheduler={"seed": 5})
            assert told["settings"] == []
            assert told["needs_restart"] == ["server.port", "server.workers", "scheduler.seed"]
        assert rig.running.gateway.config == before
        shown = await rig.running.metrics()
        assert "hetero_gateway_config_settings_needing_restart 3.0" in shown
        assert (await rig.reload())["needs_restart"] == []


async def test_what_the_command_line_says_wins_over_the_file_at_a_reload_too(
    tmp_path: Path,
) -> None:
    async with from_file(tmp_path) as rig:
        rig.running.gateway.reloader.flags = {"scheduler.policy": "finish-time"}
        told = await rig.reload(scheduler={"policy": "min-max"})
        assert (told["settings"], told["flags"]) == ([], ["scheduler.policy"])
        assert rig.running.gateway.fleet.scheduler.policy.name == "finish-time"


NEW = {"id": "new", "base_url": "https://127.0.0.1:1"}
BROKEN: dict[str, dict[str, Any] | str | None] = {
    "unknown key": {"retry": {"max_attempts": 1, "max_atempts": 2}},
    "missing file": {
        "retry": {"max_attempts": 1},
        "scheduler": {"tokens": {"tokenizer_file": "/nowhere"}},
    },
    "bad instance": {
        "retry": {"max_attempts": 1},
        "instances": [{"id": "x", "base_url": "ftp://x"}],
    },
    "an instance's unknown key": {"instances": [NEW | {"profil": "x"}]},
    # The first instance would be gone and a new one there: neither may happen by half.
    "unset variable": {"instances": [NEW | {"api_key_env": "UNSET_VARIABLE_9"}]},
    "missing certificate": {"instances": [NEW | {"ca_file": "/nonexistent/ca.pem"}]},
    "no YAML": "instances: [",
    "no file": None,
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
async def test_a_broken_file_is_refused_whole_and_log_and_metrics_say_so(
    tmp_path: Path, broken: dict[str, Any] | str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with from_file(tmp_path, 2) as rig:
        gateway = rig.running.gateway
        before, config = in_effect(rig.running), gateway.config
        instances = dict(gateway.fleet.instances)
        if isinstance(broken, dict):
            rig.write(**broken)
        elif broken is not None:
            rig.path.write_text(broken)
        else:
            rig.path.unlink()
        with caplog.at_level(logging.ERROR):
            answer = await rig.client.post("/admin/reload")
        assert (answer.status_code, answer.json()["error"]["code"]) == (
            400,
            "invalid_configuration",
        )
        assert "refused" in caplog.text
        assert (in_effect(rig.running), gateway.config) == (before, config)
        assert gateway.fleet.instances == instances
        assert (await post(rig)).status_code == 200
        shown = await rig.running.metrics()
        assert 'hetero_gateway_config_reloads_total{outcome="refused"} 1.0' in shown
        assert "hetero_gateway_config_last_reload_successful 0.0" in shown
        await rig.reload()
        assert "hetero_gateway_config_last_reload_successful 1.0" in await rig.running.metrics()


async def test_the_instances_are_brought_in_line_with_the_file(tmp_path: Path) -> None:
    async with from_file(tmp_path, 2) as rig, fake_instances(1) as more:
        first = rig.config.model_dump(mode="json", exclude_unset=True)["instances"][0]
        fleet = rig.running.gateway.fleet
        rig.write(instances=[first, {"id": "i2", "base_url": more[0].url, "profile": SLOW}])
        told = (await rig.client.post("/admin/reload")).json()
        assert (told["added"], told["removed"], told["changed"]) == (["i2"], ["i1"], [])
        assert list(fleet.instances) == ["i0", "i2"]
        assert 'backend="i1"' not in await rig.running.metrics()
        assert (await post(rig)).status_code == 200
        # One that only weighs more now goes on serving, and one whose KV cache others may have.
        instance, second = fleet.instances.values()
        more_of_it = {"weight": 3.0, "kv_transfer": {"connector": "NixlConnector"}}
        rig.write(instances=[first | more_of_it, second.config.model_dump(mode="json")])
        assert (await rig.client.post("/admin/reload")).json()["changed"] == ["i0"]
        assert list(fleet.instances.values()) == [instance, second]
        assert instance.up
        assert fleet.scheduler.members.specs[instance.id].weight == 3
        assert instance.config.kv_transfer is not None


@pytest.mark.slow
async def test_a_storm_of_reloads_cuts_no_stream(tmp_path: Path) -> None:
    """One a second, every fifth of them broken, the policy and all settings to and fro."""
    reloads = 16
    most = {name: s for name, s in EVERYTHING.items() if name != "server"}
    queue = {"timeout_s": 60, "discipline": "clients"}
    most["scheduler"] = EVERYTHING["scheduler"] | {"queue": queue}
    async with from_file(tmp_path, 4) as rig:
        ids = {"i0": rig.fakes[0], "n": rig.fakes[3]}
        others = [{"id": name, "base_url": fake.url} for name, fake in ids.items()]
        gateway = rig.running.gateway

        async def one(i: int) -> str:
            await asyncio.sleep(i * 0.1)
            each_s = (reloads - 7) / 6  # so that all 100 are there nearly all the time
            response = await post(rig, events=6, delay_s=each_s)
            assert response.status_code == 200
            return response.text

        streams = [asyncio.ensure_future(one(i)) for i in range(100)]
        for i in range(reloads):
            await asyncio.sleep(1)
            if i % 5 == 4:
                rig.path.write_text("instances: [")
            elif i % 2:
                rig.write()
            else:
                rig.write(instances=others, **most)
            gateway.reload_soon("SIGHUP")
            # On a busy machine one may take longer than the second; two at once would be one.
            await eventually(lambda i=i: sum(gateway.metrics.reloads.values()) > i)
        for text in await asyncio.gather(*streams):
            assert text.count('"content":"xxxx"') == 6
            assert text.endswith("data: [DONE]\n\n")
        await eventually(rig.running.settled)
        # After each broken one but the last of all, that which is there already comes again.
        refused, unchanged = reloads // 5, (reloads - 1) // 5
        applied = reloads - refused - unchanged
        told = {"refused": refused, "applied": applied, "unchanged": unchanged}
        assert gateway.metrics.reloads == told
        after = ({"i0", "i1", "i2", "i3"}, {"i0", "n"})
        await eventually(lambda: set(gateway.fleet.instances) in after)


async def test_a_removed_instance_ends_its_streams_and_is_counted_until_then(
    tmp_path: Path,
) -> None:
    async with from_file(tmp_path, 2) as rig:
        fleet, fakes = rig.running.gateway.fleet, rig.fakes
        await eventually(fleet.ready)
        streams = [post(rig, events=20, delay_s=0.5) for _ in range(6)]
        await eventually(lambda: fakes[0].open + fakes[1].open == 6)
        left = InstanceId("i1" if fakes[1].open else "i0")
        entries = rig.config.model_dump(mode="json", exclude_unset=True)["instances"]
        await rig.reload(instances=[e for e in entries if e["id"] != left])
        assert fleet.instances[left].leaving
        held = fakes[int(left[1])]
        assert fleet.scheduler.members.snapshot(left).in_flight == held.open > 0
        requests = held.requests
        assert (await post(rig)).status_code == 200
        assert held.requests == requests
        for response in await asyncio.gather(*streams):
            assert response.text.endswith("data: [DONE]\n\n")
        await eventually(lambda: left not in fleet.instances)
        await eventually(rig.running.settled)


async def test_what_is_wanted_again_before_it_has_gone_stays(tmp_path: Path) -> None:
    async with from_file(tmp_path) as rig:
        under_way = post(rig, events=20, delay_s=0.5)
        await eventually(lambda: rig.fakes[0].open == 1)
        fleet = rig.running.gateway.fleet
        [instance] = fleet.instances.values()
        await rig.reload(instances=[])
        assert instance.leaving
        await rig.reload()
        assert list(fleet.instances.values()) == [instance]
        assert not instance.leaving
        assert fleet.scheduler.members.snapshot(instance.id).in_flight == 1
        assert (await post(rig)).status_code == 200
        assert (await under_way).text.endswith("data: [DONE]\n\n")


async def test_what_came_over_admin_is_not_the_files_to_take_away(tmp_path: Path) -> None:
    async with from_file(tmp_path) as rig, fake_instances(1) as more:
        mine = {"id": "mine", "base_url": more[0].url}
        added = (await rig.client.post("/admin/instances", json=mine)).json()
        assert added["source"] == "admin"
        rig.write(instances=[])
        told = (await rig.client.post("/admin/reload")).json()
        assert told["removed"] == ["i0"]
        assert list(rig.running.gateway.fleet.instances) == ["mine"]
        rig.write(instances=[{"id": "mine", "base_url": rig.fakes[0].url}])
        assert (await rig.client.post("/admin/reload")).status_code == 400
        rig.write(instances=[mine])
        await rig.client.post("/admin/reload")
        shown = (await rig.client.get("/admin/instances")).json()["instances"]
        assert [row["source"] for row in shown] == ["file"]


async def test_a_changed_profile_file_is_read_again(tmp_path: Path) -> None:
    profile = tmp_path / "p.yaml"
    measure(profile, 0.01)
    async with from_file(tmp_path, profiles=("p.yaml",)) as rig:
        measure(profile, 0.02)
        assert (await rig.reload())["changed"] == ["i0"]
        spec = rig.running.gateway.fleet.scheduler.members.specs[InstanceId("i0")]
        assert spec.profile is not None
        assert spec.profile.constants.p8 == 0.02
        assert (await rig.reload())["changed"] == []


async def test_requests_in_the_queue_are_placed_when_the_policy_has_none(tmp_path: Path) -> None:
    measure(tmp_path / "p.yaml", 0.01, max_num_seqs=1)
    async with from_file(tmp_path, profiles=("p.yaml",)) as rig:
        answers = [post(rig, events=20, delay_s=0.5) for _ in range(12)]
        scheduler, [fake] = rig.running.gateway.fleet.scheduler, rig.fakes
        await eventually(lambda: fake.open + scheduler.queued == 12)
        assert scheduler.queued >= 3
        await rig.reload(scheduler={"policy": "round-robin"})
        await eventually(lambda: fake.open == 12, within_s=4)
        assert [r.status_code for r in await asyncio.gather(*answers)] == [200] * 12
        await eventually(rig.running.settled)


@pytest.mark.parametrize("how", ["written", "renamed", "linked"])
async def test_a_watched_file_is_taken_up_by_itself(tmp_path: Path, how: str) -> None:
    async with from_file(tmp_path, server={"watch_files_s": 0.5}) as rig:
        path, gateway = rig.path, rig.running.gateway
        if how == "linked":  # as Kubernetes mounts a ConfigMap
            path.rename(tmp_path / "one.yaml")
            path.symlink_to(tmp_path / "one.yaml")
        await asyncio.sleep(2)
        assert not gateway.metrics.reloads
        aside = path if how == "written" else tmp_path / "two.yaml"
        rig.write(aside, retry={"max_attempts": 2})
        if how == "renamed":
            aside.rename(path)
        elif how == "linked":
            path.unlink()
            path.symlink_to(aside)
        else:
            os.utime(path, ns=(1, 1))
        await eventually(lambda: gateway.config.retry.max_attempts == 2)
        assert gateway.metrics.reloads == {"applied": 1}


async def test_a_reload_reaches_all_workers(tmp_path: Path) -> None:
    async with from_file(tmp_path, 2, workers=2) as rig:
        under_way = post(rig, events=10, delay_s=0.5)
        await eventually(lambda: rig.fakes[0].open + rig.fakes[1].open == 1)
        rig.write(**EVERYTHING | {"scheduler": {"policy": "session"}})
        told = (await rig.client.post("/admin/reload")).json()
        assert "scheduler.policy" in told["settings"]
        workers = rig.running.workers
        await eventually(lambda: all(w.config.retry.max_attempts == 1 for w in workers))
        for worker in workers:
            assert worker.fleet.scheduler.policy.name == "session"
            assert worker.remote.headers
            assert worker.dataplane.rooms.budget.config.max_attempts == 1
            assert worker.config.pool.max_connections == 2048  # its share
        assert (await post(rig)).status_code == 200
        assert (await under_way).text.endswith("data: [DONE]\n\n")
        await eventually(rig.running.settled)
