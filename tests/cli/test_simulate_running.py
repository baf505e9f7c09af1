"""``simulate URL``: the cluster of a running gateway, as that knows it."""

import dataclasses
from typing import Any

import pytest

from hetero_gateway.cli import simulate_running
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.files.trace import TraceRequest
from hetero_gateway.lab.profiler.seen import SeenGateway
from hetero_gateway.planner.present import Running

URL = "http://127.0.0.1:8000"
FLAGS = ("--policy", "min-max", "--seeds", "1")
BIG, SMALL = (load_profile(f"V100-32GB-NVLink2/Llama-3-8B/tp{t}") for t in (4, 1))
ROWS = [TraceRequest(0.2 * k, 50 + k % 7, 8, "llama") for k in range(120)]


def instance(name: str, **changes: Any) -> Running:
    return dataclasses.replace(Running(name, "h", SMALL, models=("llama",)), **changes)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch):
    """Makes a gateway that has these instances and has seen these requests."""
    monkeypatch.setattr("hetero_gateway.sim.experiment._BOUND_REQUESTS", 600)

    def seen(*running: Running, rows=ROWS) -> None:
        told = SeenGateway(URL, "finish-time", running, tuple(rows))
        monkeypatch.setattr(simulate_running, "ask", lambda url, key: told)

    return seen


def test_its_instances_get_its_last_requests_at_their_own_times(gateway, document) -> None:
    gateway(instance("a", profile=BIG), instance("b"), instance("c", left_out="it is down"))
    (result,) = document("simulate", URL, *FLAGS)["results"]
    assert [each["id"] for each in result["instances"]] == ["a", "b"]
    assert sum(each["requests"] for each in result["instances"]) == len(ROWS)
    assert result["rate"] == pytest.approx(119 / (0.2 * 119), rel=0.02)


def test_flags_win_over_what_it_has_seen_and_an_engine_over_its_profile(gateway, run) -> None:
    gateway(instance("a", kv_capacity_tokens=40_000), instance("z", asleep=True), rows=ROWS[:3])
    told = run("simulate", URL, *FLAGS, "--rate", "4", "--count", "20")
    assert "z is left out: it sleeps" in told.err
    assert "has seen 3 requests: their lengths say little" in told.err
    assert URL in told.out
    args = type("Args", (), {"url": URL, "admin_key_env": None, "model": None, "requests": None})
    cluster, _ = simulate_running.running_cluster(args)
    assert cluster.instances[0].profile.kv_capacity_tokens == 40_000


@pytest.mark.parametrize(
    ("running", "flags", "says"),
    [
        ([], (), "no instance takes requests now"),
        ([instance("a", profile=None)], (), "to a: a built-in one"),
        ([instance("a"), instance("b", models=("qwen",))], (), "name one, --model llama|qwen"),
        ([instance("a")], ("--model", "x"), "no instance of model x takes requests now; there are"),
        ([instance("a")], ("-c", "x.yaml"), "no -c, and no --against"),
    ],
)
def test_what_cannot_be_simulated_says_why(gateway, error, running, flags, says) -> None:
    gateway(*running)
    assert says in error("simulate", URL, *FLAGS, *flags)


def test_a_file_without_its_flag_is_told_from_an_address(tmp_path, error) -> None:
    path = tmp_path / "cluster.yaml"
    path.touch()
    assert f"simulate {path}: a file goes with -c" in error("simulate", path)


def test_of_several_models_one_is_simulated(gateway, document) -> None:
    other = [dataclasses.replace(row, model="qwen") for row in ROWS[:50]]
    gateway(instance("a"), instance("b", models=("qwen",)), rows=[*ROWS, *other])
    (result,) = document("simulate", URL, *FLAGS, "--model", "qwen")["results"]
    assert [(each["id"], each["requests"]) for each in result["instances"]] == [("b", 50)]
