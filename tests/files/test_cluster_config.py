"""The cluster file: strict, every error one line that names the file and the key."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from hetero_gateway.cli import main
from hetero_gateway.core.instances.pairs import Link
from hetero_gateway.core.types import InstanceId
from hetero_gateway.errors import ConfigError
from hetero_gateway.files import cluster_config
from hetero_gateway.files.cluster_config import Cluster, ClusterConfig, is_cluster, load_cluster
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.sim.workload import Fault, FaultKind
from tests.fakes import gateway_files
from tests.fakes.gateway_files import PROFILE

ROOT = Path(__file__).parents[2]
TP4 = "V100-32GB-NVLink2/Llama-3-8B/tp4"
TP1 = "V100-32GB-NVLink2/Llama-3-8B/tp1"


def write(tmp_path: Path, data: Any) -> Path:
    return gateway_files.write(tmp_path / "cluster.yaml", data)


def load(tmp_path: Path, data: Any) -> Cluster:
    return load_cluster(write(tmp_path, data))


def cluster(*instances: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {"instances": list(instances) or [{"profile": TP4}, {"profile": TP1}]} | sections


def ids(loaded: Cluster) -> list[str]:
    return [str(i.instance_id) for i in loaded.instances]


def test_the_example_of_the_interface_loads(tmp_path: Path) -> None:
    loaded = load(tmp_path, cluster({"profile": TP4, "count": 1}, {"profile": TP1, "count": 1}))
    assert ids(loaded) == ["V100-32GB-NVLink2-tp4", "V100-32GB-NVLink2-tp1"]
    assert [i.profile for i in loaded.instances] == [load_profile(TP4), load_profile(TP1)]
    assert all(i.believed == i.profile and i.weight == 1 for i in loaded.instances)
    assert loaded.faults == ()
    assert loaded.trace is None


def test_several_of_a_kind_are_numbered_over_all_entries(tmp_path: Path) -> None:
    rows = [{"profile": TP4, "count": 2}, {"profile": TP1}, {"profile": TP4}]
    names = [f"V100-32GB-NVLink2-tp{n}" for n in ("4-0", "4-1", "1", "4-2")]
    assert ids(load(tmp_path, cluster(*rows))) == names
    rows = [{"profile": TP4, "id": "big", "count": 2}, {"profile": TP1, "id": "small"}]
    assert ids(load(tmp_path, cluster(*rows))) == ["big-0", "big-1", "small"]


def test_a_transfer_takes_the_models_bytes_and_heeds_roles(tmp_path: Path) -> None:
    rows = [{"profile": TP4, "id": "p", "role": "prefill"}, {"profile": TP1, "id": "d"}]
    loaded = load(tmp_path, cluster(*rows, transfer={"gbit_per_s": 8, "start_s": 0.1}))
    assert loaded.transfers is not None
    assert loaded.transfers.kv_bytes_per_token == 131072
    assert loaded.transfers.link == Link(0.1, 1e9)
    links = loaded.transfers.pairs(loaded.instances).links()
    assert list(links) == [(InstanceId("p"), InstanceId("d"))]
    own = cluster(*rows, transfer={"gbit_per_s": 8, "kv_bytes_per_token": 1000})
    transfers = load(tmp_path, own).transfers
    assert transfers is not None
    assert transfers.kv_bytes_per_token == 1000
    assert load(tmp_path, cluster(*rows)).transfers is None


def test_what_the_scheduler_believes_may_be_wrong_or_nothing(tmp_path: Path) -> None:
    wrong, unknown, limited = load(
        tmp_path,
        cluster(
            {"profile": TP4, "id": "a", "believed_scale": 2.0},
            {"profile": TP1, "profiled": False},
            {"profile": TP4, "max_num_seqs": 64, "weight": 3.0},
        ),
    ).instances
    true = load_profile(TP4)
    assert wrong.profile == true
    assert wrong.believed == dataclasses.replace(true, constants=true.constants.scaled(2.0))
    assert unknown.believed is None
    assert limited.profile == limited.believed == dataclasses.replace(true, max_num_seqs=64)
    assert limited.weight == 3


def test_a_profile_file_is_found_beside_the_cluster_and_names_a_decent_id(tmp_path: Path) -> None:
    document = PROFILE | {"gpu": "[red]My <b>GPU</b>", "tensor_parallel": 2}
    gateway_files.write(tmp_path / "mine.yaml", document)
    (one,) = load(tmp_path, cluster({"profile": "mine.yaml"})).instances
    assert one.instance_id == "red-My-b-GPU-b-tp2"
    assert one.profile.gpu == "[red]My <b>GPU</b>"
    # One without room for a block is refused.
    gateway_files.write(tmp_path / "mine.yaml", document | {"kv_capacity_tokens": 15})
    with pytest.raises(ConfigError, match=r"instances\.0\.profile: a KV capacity of 15 tokens"):
        load(tmp_path, cluster({"profile": "mine.yaml"}))


def test_faults_name_an_instance_by_id_or_position(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        cluster(
            faults=[
                {"instance": 1, "kind": "slow", "start_s": 5, "end_s": 9, "factor": 3.0},
                {"instance": "V100-32GB-NVLink2-tp4", "kind": "dead", "start_s": 7},
            ]
        ),
    )
    assert loaded.faults == (
        Fault(1, FaultKind.SLOW, 5, 9, 3.0),
        Fault(0, FaultKind.DEAD, 7, math.inf),
    )


def test_a_trace_is_relative_to_the_file(tmp_path: Path) -> None:
    loaded = load(tmp_path, cluster(workload={"requests": "traces/t.csv", "arrival_cv": 2.0}))
    assert loaded.trace == tmp_path / "traces" / "t.csv"
    assert loaded.workload.arrival_cv == 2


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "instances: required, but missing"),
        ({"instances": []}, "instances: must have at least 1 entries"),
        (cluster(machines=[]), "machines: unknown key"),
        (cluster({"count": 1}), "instances.0.profile: required, but missing"),
        (cluster({"profile": TP4, "cuont": 2}), "cuont: unknown key; did you mean count?"),
        (cluster({"profile": TP4, "count": 0}), "instances.0.count: "),
        (cluster({"profile": TP4, "count": 9999}, {"profile": TP1, "count": 2}), "10001 instances"),
        (cluster({"profile": TP4 + "0"}), "instances.0.profile: no profile is named"),
        (cluster({"profile": "no.yaml"}), "instances.0.profile: "),
        (cluster({"profile": TP4, "id": "a b"}), "instances.0.id: "),
        (cluster({"profile": TP4, "id": "a\n"}), "instances.0.id: "),
        (cluster({"profile": TP4, "believed_scale": 0}), "instances.0.believed_scale: "),
        (cluster({"profile": TP4, "believed_scale": math.nan}), "instances.0.believed_scale: "),
        (cluster({"profile": TP4, "max_num_seqs": 0}), "instances.0.max_num_seqs: "),
        (
            cluster({"profile": TP4, "id": "a", "count": 2}, {"profile": TP1, "id": "a-1"}),
            "instances.1.id: 'a-1' is used twice",
        ),
        (cluster(faults=[{"instance": 2, "kind": "dead"}]), "faults.0.instance: 2 is no position"),
        (cluster(faults=[{"instance": -1, "kind": "dead"}]), "faults.0.instance: -1 is no"),
        (cluster(faults=[{"instance": "x", "kind": "dead"}]), "faults.0.instance: no instance"),
        (cluster(faults=[{"instance": 0, "kind": "late"}]), "faults.0.kind: "),
        (
            cluster(faults=[{"instance": 0, "kind": "dead", "start_s": 5, "end_s": 5}]),
            "faults.0: end_s (5) must be after start_s (5)",
        ),
        (cluster(faults=[{"instance": 0, "kind": "dead", "factor": 2}]), "faults.0: factor"),
        (cluster(faults=[{"instance": 0, "kind": "slow"}]), "faults.0: factor"),
        (cluster(workload={"arrival_cv": -1}), "workload.arrival_cv: "),
        (
            cluster(workload={"prompt": {"median": 10, "sigma": 1}}),
            "workload.prompt.max: required, but missing",
        ),
        (
            cluster(workload={"requests": "t.csv", "prompt": {"median": 1, "sigma": 1, "max": 9}}),
            "workload: requests is a trace",
        ),
    ],
)
def test_what_is_wrong_is_one_line_with_file_and_key(
    tmp_path: Path, data: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, data)
    text = str(caught.value)
    assert re.match(rf"{re.escape(str(tmp_path / 'cluster.yaml'))}:(\d+:)? ", text)
    assert said in text
    assert "\n" not in text


# Which kind of file it is


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"instances": [{"profile": TP4}]}, True),
        ({"instances": [{"profile": TP4, "count": 2}]}, True),
        ({"instances": [{"profile": TP4, "id": "a"}], "faults": []}, True),
        ({"instances": [{"profile": TP4, "id": "a", "profiled": False}]}, True),
        ({"workload": {}}, True),
        ({"instances": [{"id": "a", "base_url": "http://x", "profile": TP4}]}, False),
        ({"instances": [{"id": "a", "profile": TP4}]}, True),
        ({"instances": [{"id": "a", "profile": TP4, "model": "m"}]}, False),
        ({"instances": [{"id": "a", "count": 2}]}, False),
        ({"instances": [{"profile": TP4, "count": 2}], "scheduler": {}}, False),
        ({"instances": []}, False),
        ({"instances": "x"}, False),
        ({}, False),
    ],
)
def test_a_cluster_is_told_from_a_gateways_configuration(
    data: dict[str, Any], expected: bool
) -> None:
    assert is_cluster(data) is expected


def test_validate_checks_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, cluster(faults=[{"instance": 0, "kind": "dead"}]))
    assert main(["validate", "-c", str(path)]) == 0
    out = capsys.readouterr().out
    assert "valid for simulate; 2 instances, 1 faults" in out
    assert f"V100-32GB-NVLink2-tp1: profile: {TP1}" in out
    assert main(["validate", "-c", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["valid"], document["kind"], document["faults"]) == (True, "cluster", 1)
    assert len(document["instances"]) == 2


@pytest.mark.parametrize(
    "data",
    [cluster({"profile": TP4, "count": -1}), cluster(workload={"requests": "not-there.csv"})],
)
def test_validate_refuses_a_wrong_cluster(
    tmp_path: Path, data: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "-c", str(write(tmp_path, data))]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert str(tmp_path) in err


# The document


def fields_of(model: type[BaseModel], section: str = "") -> set[tuple[str, str]]:
    found = set()
    for name, field in model.model_fields.items():
        found.add((section, name))
        for part in re.findall(r"\w+Config\b", repr(field.annotation)):
            found |= fields_of(getattr(cluster_config, part), name)
    return found


def test_every_field_is_documented_and_nothing_else() -> None:
    documented = set()
    section = ""
    page = ROOT / "docs" / "reference" / "simulation-file.md"
    for line in page.read_text("utf-8").splitlines():
        if heading := re.match(r"#+ `?([\w ]+)`?", line):
            section = heading[1]
        elif row := re.match(r"\| `(\w+)` \|", line):
            documented.add((section, row[1]))
    sections = ("instances", "faults", "workload", "prompt")
    told = {(s, key) for s, key in documented if s in sections}
    existing = {(s, key) for s, key in fields_of(ClusterConfig) if s in sections}
    assert told == existing
