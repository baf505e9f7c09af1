"""The exposition: read back with prometheus-client's own parser, and by promtool."""

import asyncio
import itertools
import shutil
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId, InstanceSpec
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.gateway.fleet.instances import Fleet
from hetero_gateway.gateway.records.families import InstanceGauges
from hetero_gateway.gateway.records.metrics import Histogram, Metrics
from tests.fakes.running import CHAT, eventually, rig


async def written(metrics: Metrics) -> str:
    """The exposition."""
    return b"".join([part async for part in metrics.exposition()]).decode()


EXPECTED = {
    "config_reloads", "config_last_reload_successful", "config_settings_needing_restart",
    "config_last_reload_success_timestamp_seconds", "probes_late",
    "source_instances", "source_failing",
    "profile_age_seconds",
    "prompt_cached_tokens",
    "input_tokens_cached", "instance_prefix_trust", "instance_prefix_source",
    "kv_events", "instance_prefix_bytes",
    "instance_refused_pairs", "instance_problem",
    "prefix_index_keys", "prefix_index_memory_bytes",
    "profile_drift_ratio",
    "requests", "request_duration_seconds", "time_to_first_token_seconds",
    "time_per_output_token_seconds", "input_tokens", "output_tokens", "in_flight_requests",
    "instance_ejected",
    "instance_ejections",
    "instance_workload", "instance_kv_usage_ratio", "instance_up", "routing_decisions",
    "scheduler_decision_seconds", "prediction_error", "retries", "upstream_errors", "fallbacks",
    "streams_continued", "handovers",
    "client_disconnects", "overhead_seconds", "build_info", "event_loop_tasks", "queue_depth",
    "queue_wait_seconds", "responses", "class_requests",
    "queue_rejections", "instance_speed_factor", "instance_waiting_first_token",
    "predictor_failures", "client_connections", "client_timeouts", "client_refusals",
}  # fmt: skip


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (
            sample.name.removeprefix("hetero_gateway_"),
            frozenset(sample.labels.items()),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


async def test_one_request_is_counted_everywhere_once() -> None:
    async with rig() as (running, client, _):
        body = {"model": "m", "messages": [], "stream": True, "fake": {"events": 4}}
        await client.post(CHAT, json=body)
        await eventually(running.settled)
        text = await running.metrics()
    found = samples(text)
    where = {"model": "m", "backend": "i0"}
    assert found[key("requests_total", outcome="completed", **where)] == 1
    assert found[key("request_duration_seconds_count", **where)] == 1
    assert found[key("time_to_first_token_seconds_count", **where)] == 1
    assert found[key("time_per_output_token_seconds_count", **where)] == 1
    assert found[key("input_tokens_total", **where)] == 10
    assert found[key("output_tokens_total", **where)] == 4
    assert found[key("routing_decisions_total", policy="finish-time", backend="i0")] == 1
    assert found[key("scheduler_decision_seconds_count")] == 1
    assert found[key("overhead_seconds_count")] == 1
    assert found[key("prediction_error_count", quantity="output_tokens")] == 1
    assert found[key("prediction_error_count", quantity="latency")] == 1
    assert found[key("in_flight_requests", backend="i0")] == 0
    assert found[key("instance_workload", backend="i0")] == 0
    assert found[key("instance_up", backend="i0")] == 1
    assert found[key("queue_depth")] == 0
    assert found[key("queue_wait_seconds_count")] == 1
    assert found[key("instance_speed_factor", backend="i0")] == 1
    assert found[key("instance_waiting_first_token", backend="i0")] == 0
    names = {
        family.name.removeprefix("hetero_gateway_")
        for family in text_string_to_metric_families(text)
        if family.name.startswith("hetero_gateway_")
    }
    assert names == EXPECTED


async def test_labels_stay_bounded_whatever_clients_ask_for() -> None:
    async with rig() as (running, client, _):
        for i in range(50):
            await client.post(CHAT, json={"model": f"made-up-{i}", "messages": []})
        text = await running.metrics()
    assert "made-up" not in text
    assert (
        samples(text)[key("requests_total", model="unknown", backend="", outcome="rejected")] == 50
    )


def test_buckets_are_cumulative_and_bounds_belong_to_the_lower_one() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 4), ("+Inf", 5)]
    assert histogram.sum == 14


async def test_a_forgotten_instance_leaves_no_series() -> None:
    scheduler = Scheduler(make_policy("min-max"), np.random.default_rng(0))
    scheduler.add(InstanceSpec(InstanceId("kept"), frozenset("m")))
    rows = [InstanceGauges(scheduler.members.snapshot(InstanceId("kept")), True, None, None)]
    metrics = Metrics("min-max", lambda: rows)
    for name in ("kept", "gone"):
        metrics.series("m", name).outcomes["completed"] += 1
        metrics.decisions[name] += 1
        metrics.upstream_errors[name, "connect"] += 1
        metrics.client_disconnects[name] += 1
    metrics.forget("gone")
    text = await written(metrics)
    assert "kept" in text
    assert '"gone"' not in text


@pytest.mark.system
async def test_promtool_finds_nothing_to_say() -> None:
    promtool = shutil.which("promtool")
    assert promtool is not None, "install Debian's package prometheus"
    async with rig(2) as (running, client, _):
        await client.post(CHAT, json={"model": "m", "messages": []})
        text = await running.metrics()
    own = "\n".join(line for line in text.splitlines() if "hetero_gateway_" in line) + "\n"
    process = await asyncio.create_subprocess_exec(
        promtool, "check", "metrics", stdin=PIPE, stdout=PIPE, stderr=STDOUT
    )
    output, _ = await process.communicate(own.encode())
    assert (process.returncode, output) == (0, b"")


@pytest.mark.parametrize("retries", [0, 5])
async def test_a_request_that_fails_for_good_is_counted_once(retries: int) -> None:
    retry = {"budget_min": retries, "budget_ratio": 0, "max_attempts": 2}
    async with rig(2, retry=retry) as (running, client, _):
        body = {"model": "m", "messages": [], "fake": {"die": "before_head"}}
        assert (await client.post(CHAT, json=body)).status_code == 502
        found = samples(await running.metrics())
    ended = [v for (name, _), v in found.items() if name == "requests_total"]
    assert sum(ended) == 1


async def test_what_we_cannot_serve_and_what_clients_get_wrong_are_told_apart() -> None:
    async with rig() as (running, client, fakes):
        await client.post(CHAT, content=b"{")
        await client.post(CHAT, json={"model": "m", "prompt": [1] * 9999})
        await fakes[0].kill()
        await client.post(CHAT, json={"model": "m", "messages": []})
        found = samples(await running.metrics())
    requests = "requests_total"
    assert found[key(requests, model="unknown", backend="", outcome="rejected")] == 1
    assert found[key(requests, model="m", backend="", outcome="rejected")] == 1
    assert found[key(requests, model="m", backend="", outcome="unavailable")] == 1


async def test_a_figure_that_cannot_be_written_hides_no_other() -> None:
    metrics = Metrics("min-max", list)
    metrics.series("m", "i0").input_tokens = 10**400
    metrics.series("m", "i0").output_tokens = 7
    metrics.series("half a \ud800 character", "i0").input_tokens = 3
    metrics.series('a "quoted" \\ name\n# TYPE evil counter\nevil 1', "i0").input_tokens = 5
    metrics.series("n", "i0").input_tokens = 4
    found = samples(await written(metrics))
    assert found[key("output_tokens_total", model="m", backend="i0")] == 7
    assert found[key("input_tokens_total", model="n", backend="i0")] == 4
    assert key("input_tokens_total", model="m", backend="i0") not in found
    assert not any(name == "evil" for name, _ in found)
    assert key("queue_depth") in found


async def test_a_scrape_outlives_what_its_gauges_raise() -> None:
    def gauges() -> list[InstanceGauges]:
        raise OverflowError("int too large to convert to float")

    found = samples(await written(Metrics("min-max", gauges)))
    assert key("queue_depth") in found
    assert not any(name == "instance_up" for name, _ in found)


async def test_a_scrape_of_many_instances_lets_others_have_their_turns() -> None:
    instances = [{"id": f"i{i}", "base_url": "http://127.0.0.1:9"} for i in range(40)]
    fleet = Fleet(GatewayConfig.model_validate({"instances": instances}), Path())
    metrics = Metrics("finish-time", fleet.gauges)
    for instance_id in fleet.instances:
        metrics.series("m", instance_id).outcomes["completed"] += 1
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            if turns == 8:  # in the midst of it
                fleet.remove(InstanceId("i39"))
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        beside = tasks.create_task(others())
        text = await written(metrics)
        beside.cancel()
    assert turns >= 10
    found = samples(text)
    assert [found[key("instance_up", backend=f"i{i}")] for i in range(39)] == [0.0] * 39
    assert key("instance_up", instance="i39") not in found
    completed = [v for (name, _), v in found.items() if name == "requests_total"]
    assert sum(completed) == 40
    heads = [line for line in text.splitlines() if line.startswith("#")]
    assert len(heads) == len(set(heads))
    assert text.count("# TYPE hetero_gateway_requests_total ") == 1
    # The lines of a family stand together, as the format wants it.
    names = [line.split("{")[0].split(" ")[0] for line in text.splitlines() if line[0] != "#"]
    runs = [name for name, _ in itertools.groupby(names)]
    assert runs.count("hetero_gateway_instance_up") == 1
