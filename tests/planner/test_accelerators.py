"""The catalogue of accelerators: complete, plausible, and findable by what people call them."""

import csv
import dataclasses
from pathlib import Path

import pytest

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.accelerator_catalogue import ACCELERATORS, accelerator, taken_for
from hetero_gateway.files.profile_file import builtin_profiles
from hetero_gateway.planner.accelerators import GIB


def test_every_built_in_profile_is_of_an_accelerator_in_the_catalogue():
    assert {profile.gpu for profile in builtin_profiles().values()} <= set(ACCELERATORS)


@pytest.mark.parametrize("device", ACCELERATORS.values(), ids=lambda device: device.name)
def test_a_row_is_plausible_and_says_where_it_is_from(device):
    # bf16 and fp8 come with the generation.
    if capability := device.cuda_capability:
        assert device.bf16 == (capability >= 8.0)
        assert (device.fp8_op_per_s > 0) == (capability >= 8.9)
    assert device.source
    assert 0.85 < device.usable_bytes / device.memory_bytes <= 1
    # From a T4 to a B200: FLOP per byte of memory traffic, and an hour of streaming is none.
    assert 30 < device.flop_per_s / device.memory_bytes_per_s < 600
    assert 200e9 < device.memory_bytes_per_s < 10e12
    assert 0 < device.link_bytes_per_s < device.memory_bytes_per_s
    assert device.fp8_op_per_s in (0, pytest.approx(device.flop_per_s, rel=0.01)) or (
        1.9 < device.fp8_op_per_s / device.flop_per_s < 2.1
    )
    assert 0.1 <= device.uncertainty <= 0.5


def test_what_vllm_logged_as_a_cards_memory_is_in_the_catalogue():
    logged = {
        "H100-80GB-SXM": 79.19, "H200-141GB": 139.81, "V100-32GB-NVLink2": 31.74,
        "A10G-24GB": 22.06, "L4-24GB": 22.06,
    }  # fmt: skip
    for name, gib in logged.items():
        assert ACCELERATORS[name].usable_bytes / GIB == pytest.approx(gib, abs=0.01)


def test_case_dashes_and_usual_names_do_not_matter():
    with Path(__file__).with_name("accelerator_names.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            assert accelerator(row["said"]).name == row["meant"]


@pytest.mark.parametrize(
    ("said", "nearest"),
    [("H101", "H100-80GB-SXM"), ("L4OS-48GB", "L40S-48GB")],
)
def test_an_unknown_name_is_answered_with_the_nearest(said, nearest):
    with pytest.raises(ConfigError, match=f"{said!r} is not in the catalogue.*{nearest}"):
        accelerator(said)


def test_one_link_direction_is_less_over_a_slot_than_over_nvlink():
    for kind in ("V100-32GB", "A100-80GB", "H100-80GB", "A800-80GB"):
        slot = next(d for n, d in ACCELERATORS.items() if n.startswith(kind) and "PCIe" in n)
        nvlink = next(d for n, d in ACCELERATORS.items() if n.startswith(kind) and "PCIe" not in n)
        assert slot.link_bytes_per_s * 3 < nvlink.link_bytes_per_s


def test_what_a_name_of_several_cards_is_taken_for_is_said():
    assert "taken for H100-80GB-SXM" in taken_for("H100")
    assert taken_for("H100-80GB-PCIe") is None
    assert taken_for("L4") is None


def test_the_users_own_come_first():
    own = dataclasses.replace(accelerator("L4"), name="My card", memory_bytes=48 * GIB)
    assert accelerator("my-card", {"My card": own}) is own
    with pytest.raises(ConfigError, match="describe it under accelerators"):
        accelerator("my-card")
