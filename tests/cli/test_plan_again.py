"""``plan --from-gateway``: what runs, what would be better, and what that is worth."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.ports import free_port
from hetero_gateway.cli import main, parse, plan_watch
from hetero_gateway.cli.arguments import settings
from hetero_gateway.deploy.directory import write_deployment
from hetero_gateway.files.trace import TraceRequest
from hetero_gateway.lab.profiler.seen import SeenGateway
from tests.deploy.plans import options, plan
from tests.fakes.processes import wait_for

PATIENCE_S = 60.0
FILE = {
    "model": "Llama-3-8B",
    "max_model_len": 1024,
    "machines": [{"id": "box", "accelerator": "V100-32GB-NVLink2", "count": 2}],
    "engine": {"max_num_seqs": 4},
}
# Emulated, and believed by the gateway, so many times faster than the built-in profiles.
SPEED = 10.0
BENCH = ("--prompt", "token-ids", "--json")


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    """A gateway before one emulated instance on both accelerators, after thirty requests."""
    folder = tmp_path_factory.mktemp("running")
    (folder / "bin").mkdir()
    binary = folder / "bin" / "hetero-gateway"
    # Without a prefix cache every second of traffic tells; else only what lies between two scrapes.
    binary.write_text(
        '#!/bin/sh\n[ "$1" = emulate ] && set -- "$@" --no-enable-prefix-caching\n'
        f'exec "{sys.executable}" -m hetero_gateway "$@"\n'
    )
    binary.chmod(0o755)
    port = free_port(in_a_row=2)
    running = plan({"box": ("V100-32GB-NVLink2", 2, (2,))})
    small = {
        key: dataclasses.replace(each, profile=dataclasses.replace(each.profile, max_num_seqs=4))
        for key, each in running.types.items()
    }
    wanted = options(
        emulate=True, time_scale=SPEED, max_model_len=1024, served_model_name="Llama-3-8B",
        first_port=port + 1, gateway_port=port, shutdown_timeout_s=0,
    )  # fmt: skip
    write_deployment(dataclasses.replace(running, types=small), wanted, folder / "plan")
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "STOP_TIMEOUT_S": "5",
    }
    process = subprocess.Popen(
        [folder / "plan" / "start.sh"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert any("all 2 answer /health" in line for line in process.stderr)
        address = f"http://127.0.0.1:{port}"
        # On a busy machine it has not asked its instance yet which models there are.
        wait_for("a model", lambda: httpx.get(f"{address}/v1/models").json()["data"])
        requests = trace_of(folder, *((100 + k, 10 + k % 5) for k in range(30)))
        assert main(["bench", address, *requests, *("--rate", "20", *BENCH)]) == 0
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
        process.stderr.close()


@pytest.fixture
def cluster(tmp_path) -> Path:
    return write(tmp_path)


def write(folder: Path, **changes) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(FILE | changes))
    return path


@pytest.fixture
def again(run):
    return lambda cluster, url, *words, code=0: run(
        "plan", "-c", cluster, "--from-gateway", url, *words, code=code
    )


@pytest.fixture
def replanned(again):
    """The document of the same."""
    return lambda *words: json.loads(again(*words, "--json").out)


def trace_of(folder: Path, *rows: tuple[int, int]) -> tuple[str, str]:
    """The flag of a trace of prompts and outputs, in tokens."""
    path = folder / "trace.csv"
    path.write_text("input_tokens,output_tokens\n" + "".join(f"{i},{o}\n" for i, o in rows))
    return "--requests", str(path)


def test_requests_of_other_models_count_neither_in_lengths_nor_in_the_rate():
    rows = [TraceRequest(float(k), 10, 5, "a" if k % 2 else "b") for k in range(9)]
    seen = SeenGateway("http://x", "finish-time", (), tuple(rows))
    assert (seen.span_s, seen.rate_per_s) == (8.0, 1.0)
    of_a = seen.of_models({"a"})
    assert {row.model for row in of_a.rows} == {"a"}
    assert (of_a.span_s, of_a.rate_per_s) == (6.0, 0.5)


@pytest.mark.parametrize("arrivals", [[], [1.0], [1.0, 1.0], [None, None]])
def test_too_few_arrivals_make_no_rate(arrivals):
    rows = tuple(TraceRequest(arrival_s, 10, 5) for arrival_s in arrivals)
    assert SeenGateway("http://x", "finish-time", (), rows).rate_per_s is None


def test_the_document_has_what_runs_and_what_would_be_better(url, cluster, capsys, replanned):
    capsys.readouterr()  # of the fixture
    document = replanned(cluster, url)
    told = document["from_gateway"]
    assert told["requests"] == 30
    assert told["rate_per_s"] == pytest.approx(20, rel=0.7)  # thirty Poisson arrivals
    assert document["mean_prompt_tokens"] == pytest.approx(114.5, rel=0.05)
    assert document["mean_output_tokens"] == pytest.approx(12, rel=0.1)
    (instance,) = told["instances"]
    assert (instance["machine"], instance["tensor_parallel"]) == ("box", 2)
    assert told["now"]["layouts"] == {"box": [2]}
    # Four sequences at most in an instance: two instances are better than one.
    assert told["proposed"]["layouts"] == {"box": [1, 1]}
    assert told["changes"] == [{"machine": "box", "now": [2], "proposed": [1, 1]}]
    assert told["worth_it"] is True
    assert told["throughput_gain"] == pytest.approx(
        told["proposed"]["throughput_tokens_per_s"] / told["now"]["throughput_tokens_per_s"] - 1
    )
    assert document["best"]["machines"][0]["instances"][0]["count"] == 2


def step_times_s(document: dict[str, Any]) -> dict[int, float]:
    """Of each size's instances alone."""
    return {
        t["tensor_parallel"]: t["alone_batch"] / t["alone_tokens_per_s"] for t in document["types"]
    }


def test_what_runs_has_the_times_that_the_gateway_knows(
    url, cluster, tmp_path, document, replanned
):
    requests = trace_of(tmp_path, (100, 50), (120, 60))
    observed = step_times_s(replanned(cluster, url, *requests))
    believed = step_times_s(document("plan", "-c", cluster, *requests))
    for size in (1, 2):  # tp1 does not run, but on the same accelerators it is as fast
        assert observed[size] == pytest.approx(believed[size] / SPEED, rel=0.05)


def test_the_table_says_now_proposed_and_worth(url, cluster, again):
    out = again(cluster, url).out
    lines = [line.split() for line in out.splitlines()]
    assert ["now", "proposed", "worth"] in lines
    (row,) = [line for line in lines if line[:4] == ["tokens/s,", "all", "at", "once"]]
    now, proposed, worth = row[4:]
    assert float(proposed) > float(now)
    assert worth.startswith("+")
    assert "box: tp2 → 2×tp1" in out


def test_equal_machines_are_told_apart_only_where_one_changes(url, tmp_path, replanned):
    # Two machines, one of which runs nothing yet; whichever the search gave what, b stays unused.
    machines = [{"id": i, "accelerator": "V100-32GB-NVLink2", "count": 2} for i in ("a", "box")]
    cluster = write(tmp_path, machines=machines)
    document = replanned(cluster, url, "--goal", "fewest", "--rate", "0.1")
    told = document["from_gateway"]
    assert told["now"]["layouts"] == {"a": [], "box": [2]}
    assert told["changes"] == [{"machine": "box", "now": [2], "proposed": [1]}]
    assert all(0 <= i < len(document["candidates"]) for i in document["pareto"])


def test_the_files_own_requests_come_before_the_gateways(url, cluster, tmp_path, replanned):
    document = replanned(cluster, url, *trace_of(tmp_path, (500, 50), (600, 60)))
    assert document["mean_prompt_tokens"] == pytest.approx(550, rel=0.05)


def test_a_new_directory_can_be_written_at_once(url, cluster, tmp_path, again):
    again(cluster, url, "-o", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert len(written["deployment"]["instances"]) == 2
    assert written["from_gateway"]["worth_it"] is True


def test_fewer_accelerators_are_worth_a_change_where_they_hold_the_rate(url, cluster, replanned):
    told = replanned(cluster, url, "--goal", "fewest", "--rate", "0.1")["from_gateway"]
    assert (told["now"]["accelerators"], told["proposed"]["accelerators"]) == (2, 1)
    assert told["worth_it"] is True


def test_a_layout_that_is_the_best_already_is_left_alone(url, cluster, again):
    # tp1's steps, of 2.7 ms, are too long.
    words = ("--goal", "fewest", "--rate", "1", "--tpot-p99", "0.0022")
    assert "No change: what runs is the best that was found." in again(cluster, url, *words).out


def test_instances_of_no_machine_end_with_one_line_and_code_2(url, tmp_path, again):
    other = [{"id": "h100", "accelerator": "H100-80GB-SXM", "count": 2}]
    err = again(write(tmp_path, machines=other), url, code=2).err.strip()
    assert "none of the gateway's instances" in err
    assert "no machine with V100-32GB-NVLink2" in err
    assert "\n" not in err


def test_requests_longer_than_the_files_context_end_with_one_line_and_code_2(url, tmp_path, again):
    err = again(write(tmp_path, max_model_len=100), url, code=2).err.strip()
    assert err.startswith("hetero-gateway: requests that the gateway has seen: request ")
    assert "max_model_len 100" in err


@pytest.mark.parametrize(
    ("address", "code", "message"),
    [
        ("ftp://x", 2, "must be http://HOST:PORT"),
        ("http://user:key@x", 2, "must be http://HOST:PORT"),
        ("http://127.0.0.1:{closed}", 1, "does not answer"),
    ],
)
def test_an_address_without_a_gateway_is_one_line(cluster, address, code, message, error):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = unused.getsockname()[1]
        words = ("plan", "-c", cluster, "--from-gateway", address.format(closed=closed))
        assert message in error(*words, code=code)


def test_a_server_that_is_no_gateway_is_one_line(url, cluster, again):
    instances = httpx.get(f"{url}/admin/instances", timeout=PATIENCE_S).json()["instances"]
    assert "not a gateway's answer" in again(cluster, instances[0]["base_url"], code=1).err


def test_an_unset_key_variable_is_named(url, cluster, again):
    words = ("--admin-key-env", "NOT_SET_ANYWHERE")
    assert "NOT_SET_ANYWHERE is not set" in again(cluster, url, *words, code=2).err


@pytest.mark.slow
@pytest.mark.system
def test_an_instance_that_has_become_slower_is_planned_with_its_observed_times(
    url, cluster, tmp_path, run, replanned
):
    instances = httpx.get(f"{url}/admin/instances", timeout=PATIENCE_S).json()["instances"]
    requests = trace_of(tmp_path, *((80 + k % 60, 60 + k % 90) for k in range(180)))

    def slow_down(factor: int) -> None:
        address = f"{instances[0]['base_url']}/emulator/slowdown"
        httpx.post(address, json={"factor": factor}, timeout=PATIENCE_S).raise_for_status()

    before = replanned(cluster, url, *requests)
    slow_down(3)
    try:
        run("bench", url, *requests, "--rate", "6", *BENCH)
        after = replanned(cluster, url, *requests)
    finally:
        slow_down(1)
    (instance,) = after["from_gateway"]["instances"]
    assert instance["observed"] is True
    assert instance["times"] == "measured"
    # Sizes that do not run are taken for slower, too: they are on the same machine.
    believed, observed = step_times_s(before), step_times_s(after)
    for size in (1, 2):
        assert 1.8 < observed[size] / believed[size] < 6


def test_watch_prints_a_line_for_each_change_of_its_proposals(url, cluster, capsys):
    for more in ([], ["--json"]):
        words = ["plan", "-c", str(cluster), "--watch", url, "--interval", "0.1", *more]
        args = parse(words)
        assert plan_watch.run(args, settings(args), looks=2) == 0
        (line,) = capsys.readouterr().out.splitlines()
        if more:
            told = json.loads(line)
            assert told["proposals"] == []
            assert told["desired"] == [
                {"accelerator": "V100-32GB-NVLink2", "tensor_parallel": 2, "instances": 1}
            ]
        else:
            assert "nothing to change: " in line
