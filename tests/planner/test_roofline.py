"""The roofline against the built-in profiles, and the L4 file against the roofline."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planner.measured_operators import (
    MEASURED_ALL_REDUCE_MS,
    MEASURED_EXPERTS_US,
    all_reduce_ratios,
    expert_ratios,
)
from benchmarks.planner.measured_stages import run_stage
from hetero_gateway.core.costs.cost_model import decode_step_time_s, prefill_time_s
from hetero_gateway.files.accelerator_catalogue import accelerator
from hetero_gateway.files.model_cards import model_card
from hetero_gateway.files.profile_file import builtin_profiles, load_profile
from hetero_gateway.planner.memory import EngineOptions, StartUp
from hetero_gateway.planner.roofline import all_reduce_s, grid, roofline_profile, step_times
from hetero_gateway.sim import kernel
from hetero_gateway.sim.engine import instance_rows

ROOT = Path(__file__).parents[2]
LLAMA_3_8B = model_card("Llama-3-8B")
L4, A10G, L40S = accelerator("L4"), accelerator("A10G"), accelerator("L40S")
A100, H100, H200 = (accelerator(n) for n in ("A100-80GB-SXM", "H100-80GB-SXM", "H200-141GB"))
V100 = accelerator("V100-32GB-PCIe3")


def capacity(device, t=1):
    """Of KV tokens, by Eq. (1)."""
    return StartUp(LLAMA_3_8B, device, t, EngineOptions()).memory("paper").kv_capacity_tokens


def profile(device, t=1):
    return roofline_profile(device, LLAMA_3_8B, t, 256, capacity(device, t))


def ratios(device, tensor_parallel):
    """Mean of the roofline's step times over the built-in profile's, prefill and decode."""
    known = builtin_profiles()[f"{device.name}/Llama-3-8B/tp{tensor_parallel}"]
    times = step_times(device, LLAMA_3_8B, tensor_parallel)
    shapes = grid(known.kv_capacity_tokens, known.max_num_seqs)
    return [
        np.mean([guess_s(*s) / known_s(known.constants, *s) for s in which])
        for guess_s, known_s, which in zip(
            times, (prefill_time_s, decode_step_time_s), shapes, strict=True
        )
    ]


@pytest.mark.parametrize(
    ("device", "tensor_parallel", "prefill", "decode"),
    [
        # The table in docs/evidence/planner.md.
        (A100, 1, 1.03, 0.94),
        (A100, 4, 0.91, 0.97),
        (H100, 1, 0.92, 0.88),
        (H100, 4, 0.96, 1.00),
        (H200, 8, 1.11, 1.10),
        (L40S, 1, 1.06, 1.00),
        (L40S, 2, 1.03, 1.04),
        (V100, 4, 2.73, 1.15),
    ],
)
def test_its_step_times_deviate_from_the_built_in_profiles_as_documented(
    device, tensor_parallel, prefill, decode
):
    assert ratios(device, tensor_parallel) == pytest.approx([prefill, decode], abs=0.006)


def test_it_is_unbiased_on_profiles_of_measured_operators():
    engines = [(A100, 1), (A100, 2), (A100, 4), (A100, 8), (L40S, 1), (L40S, 2)]
    engines += [(device, t) for device in (H100, H200) for t in (1, 2, 4, 8)]
    means = np.array([ratios(device, t) for device, t in engines])
    assert np.mean(means, axis=0) == pytest.approx([1, 1], abs=0.03)
    # What the catalogue says of a card that was checked.
    assert np.abs(means - 1).max() < A100.uncertainty


def test_eq_1_has_the_capacities_of_the_built_in_profiles():
    for device, t in ((A100, 1), (H100, 4), (A10G, 1), (L4, 1)):
        known = builtin_profiles().get(f"{device.name}/Llama-3-8B/tp{t}")
        wanted = known.kv_capacity_tokens if known else 38035
        # Built from 8.03e9 parameters, where the shape counts 8 029 995 008.
        assert abs(capacity(device, t) - wanted) <= t
    assert capacity(accelerator("T4")) == 0
    assert capacity(accelerator("T4"), 2) == 80633


def test_the_stored_l4_profile_is_near_what_the_roofline_gives():
    stored = load_profile("configs/profiles/l4-24gb-llama-3-8b-tp1.yaml", ROOT)
    fresh = profile(L4)
    assert stored.source["how"] == fresh.source["how"] == "roofline"
    prefills, decodes = grid(stored.kv_capacity_tokens, stored.max_num_seqs)
    for time_s, which in ((prefill_time_s, prefills), (decode_step_time_s, decodes)):
        off = [time_s(stored.constants, *s) / time_s(fresh.constants, *s) - 1 for s in which]
        assert np.abs(off).max() < 0.06


def test_a_measured_h100_is_as_near_to_the_roofline_as_its_page_says():
    """docs/evidence/h100.md: decode steps come out right, and prefills."""
    measured = load_profile("configs/profiles/h100-80gb-llama-3.1-8b-tp1.yaml", ROOT)
    assert measured.source["how"] == "measured"
    prefill, decode = step_times(H100, LLAMA_3_8B, 1)
    steps = [(b, i) for b in (1, 4, 16, 64) for i in (128, 1024)]
    slower = [decode(*s) / decode_step_time_s(measured.constants, *s) for s in steps]
    assert np.mean(slower) == pytest.approx(1.03, abs=0.02)
    prompts = [(1, 2048), (4, 1024), (1, 8192)]
    ratio = [prefill(*s) / prefill_time_s(measured.constants, *s) for s in prompts]
    assert np.mean(ratio) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("device", [L4, A10G, L40S, A100, H100])
def test_the_fit_stays_near_the_roofline(device):
    constants, shapes = profile(device).constants, grid(capacity(device), 256)
    for fitted, exact, which in zip(
        (prefill_time_s, decode_step_time_s), step_times(device, LLAMA_3_8B, 1), shapes, strict=True
    ):
        errors = [abs(fitted(constants, *s) / exact(*s) - 1) for s in which]
        assert np.mean(errors) < 0.13
        assert max(errors) < 0.45


@pytest.mark.parametrize("t", [1, 4])
def test_attention_of_the_models_shape_is_right_beyond_the_grid(t):
    c, prefill = profile(A100, t).constants, step_times(A100, LLAMA_3_8B, t)[0]
    # 32 layers, 32 heads of 128: two products of 2 FLOP each for a pair of tokens.
    flop_per_s = A100.flop_per_s * A100.compute_efficiency * t
    assert c.p9 == pytest.approx(4 * 32 * 32 * 128 / flop_per_s, rel=1e-3)
    for tokens in (16_384, 65_536):
        assert prefill_time_s(c, 1, tokens) == pytest.approx(prefill(1, tokens), rel=0.06)
        # Without it half of the longest would be missing.
        without = prefill_time_s(dataclasses.replace(c, p9=0.0), 1, tokens)
        assert without < (0.85 if tokens == 16_384 else 0.6) * prefill(1, tokens)


def test_several_cards_without_a_link_have_no_profile():
    with pytest.raises(ValueError, match="link_bytes_per_s"):
        profile(dataclasses.replace(A100, link_bytes_per_s=0.0), 2)


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_eight_bits_make_a_decode_step_faster_and_on_new_cards_a_prefill_too(t):
    fp8 = model_card("Llama-3-8B", quantization="fp8")
    for narrow, wide in zip(step_times(H100, fp8, t), step_times(H100, LLAMA_3_8B, t), strict=True):
        assert narrow(4, 1024) < wide(4, 1024)
    assert step_times(A100, fp8, t)[0](8, 1024) == step_times(A100, LLAMA_3_8B, t)[0](8, 1024)


@pytest.mark.parametrize(("card", "t"), MEASURED_ALL_REDUCE_MS)
def test_an_all_reduce_over_slots_takes_as_long_as_measured(card, t):
    ratios = list(all_reduce_ratios(card, t).values())
    assert all(0.4 < ratio < 1.6 for ratio in ratios), ratios
    # What a prefill passes.
    assert ratios[-1] == pytest.approx(1, abs=0.05)


def test_experts_take_as_long_as_measured_by_tokens():
    ratios = [ratio for key in MEASURED_EXPERTS_US for ratio in expert_ratios(*key).values()]
    assert all(0.55 < ratio < 1.6 for ratio in ratios), ratios
    logs = [math.log(ratio) for ratio in ratios]
    assert math.exp(sum(logs) / len(logs)) == pytest.approx(1, abs=0.1)


def test_a_window_and_a_state_make_long_sequences_cheap():
    model = model_card("gpt-oss-20b")
    full = dataclasses.replace(model, caches=())
    windowed, plain = (step_times(H100, m, 1)[1] for m in (model, full))
    assert windowed(64, 100) == pytest.approx(plain(64, 100))
    assert windowed(64, 8192) < plain(64, 8192)


def test_few_tokens_touch_few_experts():
    mixtral = model_card("Mixtral-8x7B")
    decode = step_times(H100, mixtral, 2)[1]
    dense = step_times(H100, dataclasses.replace(mixtral, experts_per_token=8), 2)[1]
    assert decode(1, 1) < 0.5 * dense(1, 1)
    # With many, all of them are read; the arithmetic is still a quarter.
    assert 0.8 * dense(64, 1) < decode(64, 1) < dense(64, 1)


def test_more_accelerators_are_faster_but_not_as_many_times():
    one, two = (profile(A100, t).constants for t in (1, 2))
    assert 1 < decode_step_time_s(one, 64, 512) / decode_step_time_s(two, 64, 512) < 2


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen2.5-14B", "Llama-3.1-70B"])
def test_over_slots_two_cards_do_more_each_than_four_as_with_measured_all_reduces(name):
    """Tokens per second and card on L40S: the estimate beside itself with published all-reduces."""
    model = model_card(name)
    for kind, batch, tokens in ((0, 1, 2048), (1, 64, 1000)):
        computed = tokens if kind == 0 else batch
        estimated, measured = {}, {}
        for t in (2, 4, 8):
            step_s = step_times(L40S, model, t)[kind](batch, tokens)
            known = MEASURED_ALL_REDUCE_MS["L40S", t]
            numbers = np.log(list(known)), np.log(list(known.values()))
            published_s = np.exp(np.interp(np.log(computed * model.hidden), *numbers)) / 1e3
            more_s = 2 * model.layers * (published_s - all_reduce_s(L40S, model, t, computed))
            estimated[t] = computed / step_s / t
            measured[t] = computed / (step_s + more_s) / t
        assert estimated == pytest.approx(measured, rel=0.12)
        assert measured[2] > 1.9 * measured[4] > 3.5 * measured[8]
        assert estimated[2] > 1.9 * estimated[4] > 3.5 * estimated[8]


@pytest.mark.parametrize("device", [L4, A10G, L40S], ids=lambda device: device.name)
def test_over_slots_two_cards_do_more_each_than_four(device) -> None:
    """Nobody published all-reduces of L4 and A10G; their slots are as an L40S's."""
    prefill, decode = zip(*(step_times(device, LLAMA_3_8B, t) for t in (2, 4)), strict=True)
    assert prefill[0](1, 2048) * 2 < prefill[1](1, 2048) * 4
    assert decode[0](64, 1000) * 2 < decode[1](64, 1000) * 4


def test_stages_that_others_measured_on_an_h100_are_as_the_page_says():
    """docs/evidence/planner.md: two of its rows, with the figures that stand there."""
    common = {"max_model_len": "4096", "max_num_batched_tokens": "2048", "max_num_seqs": "128"}
    common |= {"prompt_mean": "590", "output_tokens": "247", "rate": "10", "run": "stage"}
    for model, t, latency_s, ttft_s in (
        ("Llama-2-7b-hf", "1", "2.22", "0.029"),
        ("Mixtral-8x7B-v0.1", "2", "4.75", "0.057"),
    ):
        row = {"model": model, "tp": t, "latency_mean_s": latency_s, "ttft_mean_s": ttft_s}
        stage = run_stage(common | row, duration_s=20)
        assert stage.held
        assert stage.latency == pytest.approx(1, abs=0.1)
        assert stage.ttft == pytest.approx(1, abs=0.2)


def test_a_mixtures_steps_rise_until_all_experts_are_awake():
    mixtral = model_card("Mixtral-8x7B")
    found = roofline_profile(H100, mixtral, 2, 128, 100_000)
    decode = step_times(H100, mixtral, 2)[1]
    _, times = instance_rows(found, 0)
    took_s = {}
    for batch in (1, 2, 4, 8, 16, 64):
        took_s[batch] = kernel.step_time_s(times, 0, 0, 0.0, batch, batch * 500)
        assert took_s[batch] == pytest.approx(decode(batch, 500), rel=0.25)
    assert took_s[8] > 1.8 * took_s[1]
    assert took_s[64] < 1.2 * took_s[16]
    # Of a machine that is taken to be faster, a step still takes some time.
    faster = dataclasses.replace(found, constants=found.constants.scaled(0.1))
    assert kernel.step_time_s(instance_rows(faster, 0)[1], 0, 0, 0.0, 1, 1) > 0
