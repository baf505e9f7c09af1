"""``instances[].kv_transfer``: who can hand a KV cache over to whom, and what cannot be meant."""

from pathlib import Path
from typing import Any

import pytest

from hetero_gateway.cli import main
from hetero_gateway.files.gateway_config import load_gateway_config
from hetero_gateway.files.kv_transfer_config import hand_over_to
from tests.fakes.gateway_files import error_of, instance, load, write

ROOT = Path(__file__).parents[2]
NIXL = {"connector": "NixlConnector"}


def rows(**transfers: Any) -> list[dict[str, Any]]:
    return [
        instance(id=id, base_url=f"http://10.0.0.{i}:8000", kv_transfer=transfer)
        for i, (id, transfer) in enumerate(transfers.items(), 1)
    ]


def pairs(tmp_path: Path, **transfers: Any) -> dict[str, list[str]]:
    config = load(tmp_path, {"instances": rows(**transfers)})
    each = [(one.id, one.kv_transfer) for one in config.instances]
    return {id: hand_over_to(id, each) for id, _ in each}


def test_one_group_and_connector_and_no_role_against_it(tmp_path: Path) -> None:
    found = pairs(
        tmp_path,
        a=NIXL,
        b=NIXL,
        other=NIXL | {"group": "slow"},
        pushes={"connector": "NixlPushConnector"},
        none=None,
    )
    assert found == {"a": ["b"], "b": ["a"], "other": [], "pushes": [], "none": []}
    found = pairs(tmp_path, p=NIXL | {"role": "prefill"}, d=NIXL | {"role": "decode"}, both=NIXL)
    assert found == {"p": ["d", "both"], "d": [], "both": ["d"]}


@pytest.mark.parametrize(
    ("transfer", "said"),
    [
        ({}, "kv_transfer.connector: required, but missing"),
        ({"connector": "nixl"}, "kv_transfer.connector: must be one of NixlConnector, "),
        (NIXL | {"role": "producer"}, "kv_transfer.role"),
        (NIXL | {"group": "a b"}, "kv_transfer.group: must be 1 to 63 letters"),
        (NIXL | {"lease_s": 0}, "kv_transfer.lease_s"),
        (NIXL | {"gbit_per_s": 0}, "kv_transfer.gbit_per_s"),
        (NIXL | {"start_s": -1}, "kv_transfer.start_s"),
        (NIXL | {"gbits": 1}, "kv_transfer.gbits: unknown key"),
        (NIXL | {"bootstrap_url": "http://p:8998"}, "NixlConnector asks nobody for it"),
        ({"connector": "MooncakeConnector", "bootstrap_url": "p:8998"}, "must be http://HOST:PORT"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(
    tmp_path: Path, transfer: dict[str, Any], said: str
) -> None:
    assert said in error_of(tmp_path, {"instances": rows(a=transfer)})


def test_mooncakes_bootstrap_server(tmp_path: Path) -> None:
    transfer = {"connector": "MooncakeConnector", "bootstrap_url": "http://10.0.0.1:8998"}
    (one,) = load(tmp_path, {"instances": rows(a=transfer)}).instances
    assert one.kv_transfer is not None
    assert one.kv_transfer.bootstrap_url == "http://10.0.0.1:8998"


@pytest.mark.parametrize("field", ["kv_transfer_params", "vllm_xargs"])
def test_the_parameters_are_the_gateways_where_it_hands_over(tmp_path: Path, field: str) -> None:
    data = {"server": {"allow_engine_fields": [field]}, "instances": rows(a=NIXL, b=NIXL)}
    assert f"server.allow_engine_fields: {field} is either" in error_of(tmp_path, data)
    source = {"name": "k", "kind": "dns", "host": "vllm", "kv_transfer": NIXL}
    data |= {"instances": rows(a=None), "discovery": [source]}
    assert "is either the client's or" in error_of(tmp_path, data)
    load(tmp_path, data | {"discovery": []})


def test_validate_says_who_can_and_who_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"instances": rows(a=NIXL, b=NIXL, c=NIXL | {"group": "slow"}), "picker": {}}
    path = write(tmp_path / "gateway.yaml", data)
    assert main(["validate", "-c", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "a: http://10.0.0.1:8000" in out
    assert [line.rpartition("over to: ")[2] for line in out.splitlines()[1:3]] == ["b", "a"]
    lone, picker = err.splitlines()
    assert "warning: instance c: kv_transfer: nobody else of group 'slow'" in lone
    assert "warning: picker: Envoy sends a request once" in picker


def test_validate_says_what_the_picker_needs_to_split_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picker = {"prefill_header": "x-prefiller-host-port"}
    data = {"instances": rows(a=NIXL, b=NIXL), "picker": picker}
    for scheduler, said in (
        ({"split_requests": "roles"}, "base_url has to be its sidecar's"),
        ({}, "no request is split without scheduler.split_requests"),
    ):
        path = write(tmp_path / "gateway.yaml", data | {"scheduler": scheduler})
        assert main(["validate", "-c", str(path)]) == 0
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


def test_validate_says_what_splits_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mooncake = {"connector": "MooncakeConnector"}
    data = {
        "server": {"workers": 2},
        "scheduler": {"split_requests": "roles"},
        "instances": rows(a=mooncake, b=mooncake),
    }
    path = write(tmp_path / "gateway.yaml", data)
    assert main(["validate", "-c", str(path)]) == 0
    (workers,) = capsys.readouterr().err.splitlines()
    assert "with several workers every request is served whole" in workers


def test_the_example_is_valid() -> None:
    config = load_gateway_config(ROOT / "configs" / "handing-over.yaml")
    each = [(one.id, one.kv_transfer) for one in config.instances]
    told = {id: hand_over_to(id, each) for id, _ in each}
    assert told == {"h100": ["a100"], "a100": ["h100"], "v100-0": ["v100-1"], "v100-1": []}
