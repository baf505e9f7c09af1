"""``plan --watch``: what is proposed as the load of a gateway changes."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from hetero_gateway.cli import parse
from hetero_gateway.cli.plan_again import Replan
from hetero_gateway.cli.plan_watch import LoadWatch
from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.files.accelerator_catalogue import accelerator
from hetero_gateway.files.plan_request import load_requests
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.files.trace import TraceRequest
from hetero_gateway.lab.profiler import seen
from hetero_gateway.planner.following import FleetChange, Seat, changes
from hetero_gateway.planner.present import Running, place
from tests.fakes.gateway_files import write

GPU = "V100-32GB-NVLink2"
KEY = (GPU, 1)
CLUSTER = {
    "model": "Llama-3-8B",
    "max_model_len": 2048,
    "machines": [{"id": "box", "accelerator": GPU, "count": 4}],
}


@pytest.mark.parametrize(
    ("desired", "expected"),
    [
        (2, []),
        (3, ["resume d"]),
        (4, ["resume d", "wake s"]),
        (6, ["resume d", "wake s", f"add a {GPU}/tp1", f"add a {GPU}/tp1"]),
        (1, ["sleep b"]),
        (0, ["sleep b", "drain a"]),
    ],
)
def test_what_is_soonest_ready_comes_first_and_the_idlest_goes_first(desired, expected):
    seats = [
        Seat("a", KEY, in_flight=5),
        Seat("b", KEY, in_flight=1, sleeps=True),
        Seat("s", KEY, "asleep"),
        Seat("d", KEY, "draining"),
        Seat("other", ("T4-16GB", 2)),
    ]
    assert [str(change) for change in changes({KEY: desired}, seats)] == expected


def running(name: str, **more) -> Running:
    profile = load_profile(f"{GPU}/Llama-3-8B/tp1")
    return Running(name, "box", profile, models=("m",), **more)


class Gateway:
    """What one would say, of instances and a steady load."""

    def __init__(self, folder: Path, *instances: Running) -> None:
        file = write(folder / "cluster.yaml", yaml.safe_dump(CLUSTER))
        self._request = load_requests(file, {})[0]
        self.instances = instances
        self.now_s = 1e9
        self.arrived: list[float] = []
        self.queued = 0

    def minutes(self, number: int, rate_per_s: float) -> None:
        step_s = 1 / rate_per_s
        self.arrived += [self.now_s + i * step_s for i in range(round(60 * number * rate_per_s))]
        self.now_s += 60 * number

    def ask(self) -> Replan:
        rows = tuple(TraceRequest(at_s, 500, 150, "m") for at_s in self.arrived)
        told = seen.SeenGateway(
            "http://x", "finish-time", self.instances, rows, self.queued, (*self.arrived,)
        )
        question = self._request.question
        present = place(self.instances, question.machines, self._request.model, accelerator)
        return Replan(told, self._request, present)


def test_a_growing_load_proposes_to_wake_and_add_and_a_small_one_to_drain(tmp_path):
    gateway = Gateway(tmp_path, running("a"), running("b", asleep=True))
    watch = LoadWatch(gateway.ask, lambda name: False)
    gateway.minutes(5, 0.5)
    assert watch.look(gateway.now_s)[0] == []
    gateway.minutes(3, 7.0)
    proposed, proposal = watch.look(gateway.now_s)
    assert proposed[0] == FleetChange("wake", KEY, "b")
    assert {change.action for change in proposed[1:]} == {"add"}
    assert proposal.desired[KEY] > 2
    # Done; and then the load goes.
    gateway.instances = (running("a", in_flight=3), *(running(f"n{i}") for i in range(3)))
    for _ in range(25):
        gateway.minutes(1, 0.2)
        proposed, _ = watch.look(gateway.now_s)
    assert [str(change) for change in proposed] == ["drain n0", "drain n1", "drain n2"]


def ranks(server: str, **more) -> list[Running]:
    return [running(f"{server}.dp{i}", server=server, **more) for i in range(2)]


def test_the_ranks_of_a_server_are_one_instance(tmp_path):
    gateway = Gateway(tmp_path, *ranks("a"))
    watch = LoadWatch(gateway.ask, lambda name: name == "b")
    gateway.minutes(5, 0.5)
    gateway.minutes(3, 30.0)
    proposed, proposal = watch.look(gateway.now_s)
    # Four accelerators, of which each has two.
    assert [str(change) for change in proposed] == [f"add a {GPU}/tp1"]
    assert proposal.desired == {KEY: 2}
    held = proposal.held_per_s
    gateway.instances = tuple(running(name) for name in "abcd")
    alone = LoadWatch(gateway.ask, lambda name: False)
    assert alone.look(gateway.now_s)[1].held_per_s == pytest.approx(held)
    # One of its ranks drains: it serves. Then the load goes, and with it a whole server.
    b = ranks("b", in_flight=1)
    b[0] = dataclasses.replace(b[0], draining=True)
    gateway.instances = (*ranks("a", in_flight=2), *b)
    assert watch.look(gateway.now_s)[0] == []
    for _ in range(25):
        gateway.minutes(1, 0.2)
        proposed, _ = watch.look(gateway.now_s)
    assert [str(change) for change in proposed] == ["sleep b"]


def test_a_gateway_tells_whose_ranks_they_are(monkeypatch):
    row = {"base_url": "http://box:8000", "up": True, "draining": False, "models": ["m"]}
    row |= {"instance": "a", "data_parallel_rank": None, "in_flight": 0, "weight": 1}
    rows = [row | {"id": "a.dp5", "data_parallel_rank": 5}, row | {"id": "a"}]
    told = {"policy": "finish-time", "queue": None, "instances": rows}
    told |= {"profile": None, "kv_capacity_tokens": None}
    monkeypatch.setattr(seen, "fetch_document", lambda *_: told)
    monkeypatch.setattr(seen, "fetch_csv", lambda *_: "")
    found = seen.ask("http://x", None).running
    assert [(each.id, each.server) for each in found] == [("a.dp5", "a"), ("a", "")]


def test_without_a_request_there_is_nothing_to_propose(tmp_path):
    gateway = Gateway(tmp_path, running("a"))
    with pytest.raises(HeteroGatewayError, match="nothing to propose"):
        LoadWatch(gateway.ask, lambda name: False).look(gateway.now_s)


def test_it_does_not_go_with_what_plans_once(tmp_path, error):
    file = write(tmp_path / "cluster.yaml", yaml.safe_dump(CLUSTER))
    words = ("plan", "-c", file, "--watch", "http://127.0.0.1:1", "-o", tmp_path / "x")
    assert "--watch: not together with" in error(*words)


def test_its_arguments_are_those_of_plan():
    assert parse(["plan", "--watch", "http://x"]).interval == 60
