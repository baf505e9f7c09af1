"""A profile that cannot be right is refused where it is made."""

import dataclasses
import math

import pytest

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.errors import ProfileError
from tests.core.builders import FAST, FAST_CONSTANTS

NAMES = [f"p{i}" for i in range(1, 9)]
ALL = [*NAMES, "p9"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [-1e-9, -1.0, math.nan, math.inf, -math.inf])
def test_a_constant_that_is_negative_or_no_number_is_named(name: str, value: float) -> None:
    with pytest.raises(ProfileError, match=f"constant {name} is {value}"):
        dataclasses.replace(FAST_CONSTANTS, **{name: value})


@pytest.mark.parametrize("name", NAMES)
def test_no_constant_may_be_missing_but_the_ninth(name: str) -> None:
    values = dict.fromkeys(NAMES, 1e-3)
    assert Constants(**values).p9 == 0.0
    del values[name]
    with pytest.raises(TypeError, match=name):
        Constants(**values)


def test_a_slower_machine_is_slower_in_everything_or_in_one_phase() -> None:
    c = Constants(1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert c.scaled(2) == Constants(2, 4, 6, 8, 10, 12, 14, 16, 18)
    assert c.scaled(2, 3) == Constants(2, 4, 6, 8, 15, 18, 21, 24, 18)


def test_a_decode_step_that_takes_no_time_is_refused() -> None:
    with pytest.raises(ProfileError, match="p5 to p8"):
        Constants(1, 1, 1, 1, 0, 0, 0, 0)
    # Elsewhere they may be 0.
    assert Constants(0, 0, 0, 0, 0, 0, 0, 1e-3).p8 == 1e-3


@pytest.mark.parametrize("name", ["tensor_parallel", "kv_capacity_tokens", "max_num_seqs"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_capacity_below_one_is_named(name: str, value: int) -> None:
    with pytest.raises(ProfileError, match=f"{name} is {value}"):
        dataclasses.replace(FAST, **{name: value})


def test_profiles_with_the_same_constants_are_one_whatever_their_source() -> None:
    measured = dataclasses.replace(FAST, source={"how": "measured"})
    assert measured == FAST
    assert len({measured, FAST}) == 1


def test_the_name_is_gpu_model_and_parallelism() -> None:
    assert Profile("V100", "Llama-3-8B", 4, FAST_CONSTANTS, 1000).name == "V100/Llama-3-8B/tp4"
