"""``plan --from-gateway``: what runs, what would be better, and what that is worth."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from benchmarks.ports import free_port
from hetero_gateway.cli import main, parse, plan_watch
from hetero_gateway.cli.arguments import settings
from hetero_gateway.deploy.directory import write_deployment
from hetero_gateway.files.trace import TraceRequest
from hetero_gateway.lab.profiler.seen import Seen
from tests.deploy.plans import options, plan

PATIENCE_S = 60.0
FILE = {
    "model": "Llama-3-8B",
    "max_model_len": 1024,
    "machines": [{"id": "box", "accelerator": "V100-32GB-NVLink2", "count": 2}],
    "engine": {"max_num_seqs": 4},
}
# Emulated, and believed by the gateway, so many times faster than the built-in profiles.
SPEED = 10.0


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
        trace = folder / "trace.csv"
        rows = "".join(f"{100 + k},{10 + k % 5}\n" for k in range(30))
        trace.write_text(f"input_tokens,output_tokens\n{rows}")
        words = ("--requests", str(trace), "--rate", "20", "--prompt", "token-ids", "--json")
        assert main(["bench", address, *words]) == 0
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


def again(cluster: Path, url: str, *words: str) -> int:
    return main(["plan", "-c", str(cluster), "--from-gateway", url, *words])


def test_requests_of_other_models_count_neither_in_lengths_nor_in_the_rate():
    rows = [TraceRequest(float(k), 10, 5, "a" if k % 2 else "b") for k in range(9)]
    seen = Seen("http://x", "finish-time", (), tuple(rows))
    assert (seen.span_s, seen.rate_per_s) == (8.0, 1.0)
    of_a = seen.of_models({"a"})
    assert {row.model for row in of_a.rows} == {"a"}
    assert (of_a.span_s, of_a.rate_per_s) == (6.0, 0.5)


@pytest.mark.parametrize("arrivals", [[], [1.0], [1.0, 1.0], [None, None]])
def test_too_few_arrivals_make_no_rate(arrivals):
    rows = tuple(TraceRequest(arrival_s, 10, 5) for arrival_s in arrivals)
    assert Seen("http://x", "finish-time", (), rows).rate_per_s is None


def test_the_document_has_what_runs_and_what_would_be_better(url, cluster, capsys):
    capsys.readouterr()
    assert again(cluster, url, "--json") == 0
    document = json.loads(capsys.readouterr().out)
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


def test_what_runs_has_the_times_that_the_gateway_knows(url, cluster, tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("input_tokens,output_tokens\n100,50\n120,60\n")
    assert again(cluster, url, "--json", "--requests", str(trace)) == 0
    observed = json.loads(capsys.readouterr().out)
    assert main(["plan", "-c", str(cluster), "--json", "--requests", str(trace)]) == 0
    believed = json.loads(capsys.readouterr().out)

    def alone(document, size):
        (found,) = [t for t in document["types"] if t["tensor_parallel"] == size]
        return found["alone_batch"] / found["alone_tokens_per_s"]

    for size in (1, 2):  # tp1 does not run, but on the same accelerators it is as fast
        assert alone(observed, size) == pytest.approx(alone(believed, size) / SPEED, rel=0.05)


def test_the_table_says_now_proposed_and_worth(url, cluster, capsys):
    assert again(cluster, url) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["now", "proposed", "worth"] in lines
    (row,) = [line for line in lines if line[:4] == ["tokens/s,", "all", "at", "once"]]
    now, proposed, worth = row[4:]
    assert float(proposed) > float(now)
    assert worth.startswith("+")
    assert "box: tp2 → 2×tp1" in out


def test_equal_machines_are_told_apart_only_where_one_changes(url, tmp_path, capsys):
    # Two machines, one of which runs nothing yet; whichever the search gave what, b stays unused.
    machines = [{"id": i, "accelerator": "V100-32GB-NVLink2", "count": 2} for i in ("a", "box")]
    cluster = write(tmp_path, machines=machines)
    assert again(cluster, url, "--json", "--goal", "fewest", "--rate", "0.1") == 0
    document = json.loads(capsys.readouterr().out)
    told = document["from_gateway"]
    assert told["now"]["layouts"] == {"a": [], "box": [2]}
    assert told["changes"] == [{"machine": "box", "now": [2], "proposed": [1]}]
    assert all(0 <= i < len(document["candidates"]) for i in document["pareto"])


def test_the_files_own_requests_come_before_the_gateways(url, cluster, tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("input_tokens,output_tokens\n500,50\n600,60\n")
    assert again(cluster, url, "--requests", str(trace), "--json") == 0
    assert json.loads(capsys.readouterr().out)["mean_prompt_tokens"] == pytest.approx(550, rel=0.05)


def test_a_new_directory_can_be_written_at_once(url, cluster, tmp_path, capsys):
    assert again(cluster, url, "-o", str(tmp_path / "out")) == 0
    written = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert len(written["deployment"]["instances"]) == 2
    assert written["from_gateway"]["worth_it"] is True


def test_fewer_accelerators_are_worth_a_change_where_they_hold_the_rate(url, cluster, capsys):
    assert again(cluster, url, "--json", "--goal", "fewest", "--rate", "0.1") == 0
    told = json.loads(capsys.readouterr().out)["from_gateway"]
    assert (told["now"]["accelerators"], told["proposed"]["accelerators"]) == (2, 1)
    assert told["worth_it"] is True


def test_a_layout_that_is_the_best_already_is_left_alone(url, cluster, capsys):
    # tp1's steps, of 2.7 ms, are too long.
    assert again(cluster, url, "--goal", "fewest", "--rate", "1", "--tpot-p99", "0.0022") == 0
    assert "No change: what runs is the best that was found." in capsys.readouterr().out


def test_instances_of_no_machine_end_with_one_line_and_code_2(url, tmp_path, capsys):
    other = [{"id": "h100", "accelerator": "H100-80GB-SXM", "count": 2}]
    assert again(write(tmp_path, machines=other), url) == 2
    err = capsys.readouterr().err.strip()
    assert "none of the gateway's instances" in err
    assert "no machine with V100-32GB-NVLink2" in err
    assert "\n" not in err


def test_requests_longer_than_the_files_context_end_with_one_line_and_code_2(url, tmp_path, capsys):
    assert again(write(tmp_path, max_model_len=100), url) == 2
    err = capsys.readouterr().err.strip()
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
def test_an_address_without_a_gateway_is_one_line(cluster, capsys, address, code, message):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = unused.getsockname()[1]
        assert again(cluster, address.format(closed=closed)) == code
    err = capsys.readouterr().err.strip()
    assert message in err
    assert "\n" not in err


def test_a_server_that_is_no_gateway_is_one_line(url, cluster, capsys):
    instances = httpx.get(f"{url}/admin/instances", timeout=PATIENCE_S).json()["instances"]
    assert again(cluster, instances[0]["base_url"]) == 1
    assert "not a gateway's answer" in capsys.readouterr().err


def test_an_unset_key_variable_is_named(url, cluster, capsys):
    assert again(cluster, url, "--admin-key-env", "NOT_SET_ANYWHERE") == 2
    assert "NOT_SET_ANYWHERE is not set" in capsys.readouterr().err


@pytest.mark.slow
def test_an_instance_that_has_become_slower_is_planned_with_its_observed_times(
    url, cluster, tmp_path, capsys
):
    engine = httpx.get(f"{url}/admin/instances", timeout=PATIENCE_S).json()["instances"][0][
        "base_url"
    ]
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{80 + k % 60},{60 + k % 90}\n" for k in range(180))
    trace.write_text(f"input_tokens,output_tokens\n{rows}")
    assert again(cluster, url, "--json", "--requests", str(trace)) == 0
    before = json.loads(capsys.readouterr().out)
    httpx.post(
        f"{engine}/emulator/slowdown", json={"factor": 3}, timeout=PATIENCE_S
    ).raise_for_status()
    try:
        words = ("--requests", str(trace), "--rate", "6", "--prompt", "token-ids", "--json")
        assert main(["bench", url, *words]) == 0
        capsys.readouterr()
        assert again(cluster, url, "--json", "--requests", str(trace)) == 0
    finally:
        httpx.post(
            f"{engine}/emulator/slowdown", json={"factor": 1}, timeout=PATIENCE_S
        ).raise_for_status()
    after = json.loads(capsys.readouterr().out)
    (instance,) = after["from_gateway"]["instances"]
    assert instance["observed"] is True
    assert instance["times"] == "measured"
    # Sizes that do not run are taken for slower, too: they are on the same machine.
    for size in (1, 2):
        believed, observed = (
            next(t for t in document["types"] if t["tensor_parallel"] == size)
            for document in (before, after)
        )
        step_s = [t["alone_batch"] / t["alone_tokens_per_s"] for t in (believed, observed)]
        assert 1.8 < step_s[1] / step_s[0] < 6


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
