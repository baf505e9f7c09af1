"""Profiles: those that ship, and those of files; what is wrong with one is named."""

import re
from pathlib import Path
from typing import Any

import pytest

from hetero_gateway.core.costs.cost_model import request_time_s
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.instance_config import instance_profile
from hetero_gateway.files.profile_file import (
    builtin_profiles,
    load_profile,
    profile_document,
    write_profile_file,
)
from tests.fakes.gateway_files import PROFILE, TP4, error_of, instance, load, write

ROOT = Path(__file__).parents[2]


def test_a_profile_file_is_found_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    write(tmp_path / "profiles" / "mine.yaml", PROFILE)
    config = load(tmp_path, {"instances": [instance(profile="profiles/mine.yaml")]})
    profile = instance_profile(config.instances[0], tmp_path)
    assert profile is not None
    assert profile.name == "V100/Llama-3-8B/tp4"
    assert profile.constants.p8 == 8e-3
    assert profile.max_num_seqs == 256


def test_a_ninth_constant_is_read_and_written_and_a_file_without_one_stays_so(
    tmp_path: Path,
) -> None:
    for more in ({}, {"p9": 3e-9}):
        path = write(tmp_path / "mine.yaml", PROFILE | {"constants": PROFILE["constants"] | more})
        loaded = load_profile("mine.yaml", tmp_path)
        assert loaded.constants.p9 == more.get("p9", 0.0)
        document = profile_document(loaded, {"how": "measured"})
        assert document["constants"] == PROFILE["constants"] | more
        write_profile_file(path, document)
        assert load_profile("mine.yaml", tmp_path) == loaded


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"constants": {f"p{i}": 1e-3 for i in range(1, 8)}}, "p8 missing"),
        ({"constants": PROFILE["constants"] | {"p3": -1e-6}}, "constant p3 is -1e-06"),
        ({"constants": PROFILE["constants"] | {"p3": float("nan")}}, "constants.p3: "),
        ({"constants": PROFILE["constants"] | {"p3": float("inf")}}, "constants.p3: "),
        ({"constants": PROFILE["constants"] | {"p3": "fast"}}, "constants.p3"),
        ({"constants": PROFILE["constants"] | {"p10": 1.0}}, "unknown constant p10"),
        ({"constants": PROFILE["constants"] | {"p9": -1.0}}, "constant p9 is -1"),
        ({"constants": {f"p{i}": 0.0 for i in range(1, 9)}}, "p5 to p8 are all 0"),
        ({"kv_capacity_tokens": 0}, "kv_capacity_tokens"),
        ({"kv_capacity_tokens": "many"}, "kv_capacity_tokens"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seq": 8}, "max_num_seq: unknown key; did you mean max_num_seqs?"),
        ({"source": {"how": "guessed"}}, "source.how"),
    ],
)
def test_what_is_wrong_in_a_profile_file_is_named(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    write(tmp_path / "mine.yaml", PROFILE | changes)
    text = error_of(tmp_path, {"instances": [instance(profile="mine.yaml")]})
    where = re.escape(f"instances.0.profile: {tmp_path / 'mine.yaml'}:")
    assert re.match(rf"{where}(\d+:)? ", text)
    assert said in text


def test_a_profile_file_without_a_key_is_told_which(tmp_path: Path) -> None:
    for key in PROFILE:
        write(tmp_path / "mine.yaml", {k: v for k, v in PROFILE.items() if k != key})
        with pytest.raises(ConfigError, match=f"{key}: required, but missing"):
            load_profile("mine.yaml", tmp_path)


def test_a_profile_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    text = error_of(tmp_path, {"instances": [instance(profile="nowhere.yaml")]})
    assert text.startswith("instances.0.profile: ")
    assert "nowhere.yaml: cannot be read" in text


def test_an_unknown_built_in_profile_gives_near_names(tmp_path: Path) -> None:
    text = error_of(tmp_path, {"instances": [instance(profile="V100-32GB-NVLink/Llama-3-8B/tp4")]})
    assert text.startswith("instances.0.profile: no profile is named")
    assert TP4 in text


def test_every_built_in_profile_can_be_loaded_by_its_name() -> None:
    profiles = builtin_profiles()
    assert len(profiles) >= 30
    for name, profile in profiles.items():
        assert load_profile(name) == profile
        assert profile.name == name
        # A request of everyday size takes it between 10 ms and 2 s of its own.
        assert 0.01 < request_time_s(profile, 512, 256) < 2
        assert profile.source["how"] in {"measured", "derived", "roofline"}
        assert profile.source["note"]
        assert 0 <= profile.source["error"]["decode"] < 0.1


def test_more_tensor_parallelism_is_faster_and_holds_more() -> None:
    profiles = builtin_profiles()
    one, four = (profiles[f"V100-32GB-NVLink2/Llama-3-8B/tp{t}"] for t in (1, 4))
    assert request_time_s(four, 512, 256) < request_time_s(one, 512, 256) / 2
    assert four.kv_capacity_tokens > 4 * one.kv_capacity_tokens


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "profiles").glob("*.yaml")), ids=lambda p: p.name
)
def test_every_profile_that_ships_loads(path: Path) -> None:
    profile = load_profile(path.name, path.parent)
    assert 0.01 < request_time_s(profile, 512, 256) < 2
    assert profile.source["how"] in {"measured", "derived", "roofline"}
