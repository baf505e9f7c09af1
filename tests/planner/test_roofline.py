"""The roofline against the built-in profiles, and the L4 file against the roofline."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from hetero_gateway.config import builtin_profiles, load_profile
from hetero_gateway.core.cost_model import decode_step_time_s, prefill_time_s
from hetero_gateway.planner.accelerators import Accelerator, accelerator
from hetero_gateway.planner.models import model_card
from hetero_gateway.planner.roofline import grid, roofline_profile, step_times

ROOT = Path(__file__).parents[2]
GIB = 2**30
LLAMA_3_8B = model_card("Llama-3-8B")
L4 = accelerator("L4")

# Data sheets: dense fp16 tensor FLOP/s, memory, memory bytes/s, link bytes/s in one direction.
A10G = Accelerator("A10G-24GB", 70e12, 24 * GIB, 600e9, 32e9)
L40S = Accelerator("L40S-48GB", 362e12, 48 * GIB, 864e9, 32e9)
A100 = Accelerator("A100-80GB-SXM", 312e12, 80 * GIB, 2039e9, 300e9)
H100 = Accelerator("H100-80GB-SXM", 989e12, 80 * GIB, 3350e9, 450e9)
L40S_HALF = dataclasses.replace(L40S, compute_efficiency=0.5)


@pytest.mark.parametrize(
    ("accelerator", "tensor_parallel", "prefill", "decode"),
    [
        # The table in the module's docstring.
        (A10G, 1, 0.95, 0.97),
        (L40S, 1, 0.74, 0.94),
        (L40S_HALF, 1, 1.00, 0.94),
        (L40S, 2, 0.69, 0.93),
        (A100, 1, 0.95, 0.83),
        (A100, 2, 0.85, 0.79),
        (H100, 1, 0.85, 0.88),
    ],
)
def test_its_step_times_deviate_from_the_built_in_profiles_as_documented(
    accelerator, tensor_parallel, prefill, decode
):
    known = builtin_profiles()[f"{accelerator.name}/Llama-3-8B/tp{tensor_parallel}"]
    guess = roofline_profile(accelerator, LLAMA_3_8B, tensor_parallel)
    shapes = grid(known.kv_capacity_tokens, known.max_num_seqs)
    ratios = [
        np.mean([time_s(guess.constants, *s) / time_s(known.constants, *s) for s in which])
        for time_s, which in zip((prefill_time_s, decode_step_time_s), shapes, strict=True)
    ]
    assert ratios == pytest.approx([prefill, decode], abs=0.006)
    # Built from 8.03e9 parameters, where the shape counts 8 029 995 008.
    assert abs(guess.kv_capacity_tokens - known.kv_capacity_tokens) <= 1


def test_the_stored_l4_profile_is_what_the_roofline_gives():
    stored = load_profile("configs/profiles/l4-24gb-llama-3-8b-tp1.yaml", ROOT)
    fresh = roofline_profile(L4, LLAMA_3_8B)
    assert stored == fresh
    assert stored.source["how"] == "roofline"
    assert stored.source["error"] == fresh.source["error"]


@pytest.mark.parametrize("accelerator", [L4, A10G, L40S, A100, H100])
def test_the_fit_stays_near_the_roofline(accelerator):
    profile = roofline_profile(accelerator, LLAMA_3_8B)
    prefill, decode = step_times(accelerator, LLAMA_3_8B, 1)
    shapes = grid(profile.kv_capacity_tokens, 256)
    for fitted, exact, which in zip(
        (prefill_time_s, decode_step_time_s), (prefill, decode), shapes, strict=True
    ):
        errors = [abs(fitted(profile.constants, *s) / exact(*s) - 1) for s in which]
        assert np.mean(errors) < 0.13
        assert max(errors) < 0.45


def test_a_model_that_leaves_no_room_has_no_profile():
    t4 = Accelerator("T4-16GB", 65e12, 16 * GIB, 320e9, 16e9)
    assert roofline_profile(t4, LLAMA_3_8B) is None
    assert roofline_profile(t4, LLAMA_3_8B, 2).kv_capacity_tokens == 80633


def test_several_accelerators_without_a_link_are_an_error():
    with pytest.raises(ValueError, match="link_bytes_per_s"):
        roofline_profile(dataclasses.replace(A100, link_bytes_per_s=0.0), LLAMA_3_8B, 2)


def test_more_accelerators_are_faster_but_not_as_many_times():
    one = roofline_profile(A100, LLAMA_3_8B).constants
    two = roofline_profile(A100, LLAMA_3_8B, 2).constants
    ratio = decode_step_time_s(one, 64, 512) / decode_step_time_s(two, 64, 512)
    assert 1 < ratio < 2
