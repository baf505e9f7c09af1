"""The memory model against figures of vLLM's own logs and real engines, and its laws."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.costs.cost_model import kv_capacity_bytes
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.accelerator_catalogue import ACCELERATORS, accelerator
from hetero_gateway.files.checkpoints.shape import model_from_config
from hetero_gateway.files.model_cards import MODEL_CARDS, model_card
from hetero_gateway.planner.accelerators import GIB
from hetero_gateway.planner.memory import EngineOptions, StartUp, is_feasible
from hetero_gateway.planner.model_shape import Doubt
from hetero_gateway.planner.parallelism import refusal
from hetero_gateway.planner.stages import instance_memory

LLAMA = model_card("Llama-3.1-8B")
H100 = accelerator("H100-80GB-SXM")
START_UPS = json.loads(Path(__file__).with_name("published_start_ups.json").read_text())

models = st.sampled_from(sorted(MODEL_CARDS)).map(MODEL_CARDS.__getitem__)
devices = st.sampled_from(sorted(ACCELERATORS)).map(ACCELERATORS.__getitem__)
methods = st.sampled_from(["fitted", "paper"])
options = st.builds(
    EngineOptions,
    utilisation=st.floats(0.5, 0.98),
    max_num_seqs=st.none() | st.integers(1, 1024),
    vllm_version=st.sampled_from(["0.6.3", "0.11", "0.19", "0.21"]),
    kv_dtype=st.sampled_from(["auto", "fp8"]),
)


# Published start-ups (public issues of vLLM and its neighbours): what is known, what was logged,
# and how near the fit comes that has seen it; 0: none has, docs/evidence/planner.md has the table.
@pytest.mark.parametrize(
    ("name", "card", "t", "told", "kv_gib", "rel"),
    [tuple(row.values()) for row in START_UPS["published"]],
)
def test_the_kv_memory_of_published_start_ups_comes_out(name, card, t, told, kv_gib, rel):
    options = EngineOptions(**{"vllm_version": "0.19"} | told)
    start = StartUp(model_card(name), accelerator(card), t, options)
    found_gib = start.memory().kv_bytes / t / GIB
    assert abs(found_gib - kv_gib) < 2 * start.spread_bytes / t / GIB
    assert not rel or found_gib == pytest.approx(kv_gib, rel=rel)


# vLLM 0.26 on an H100, measured: docs/evidence/h100.md.
# Qwen3-30B-A3B is served by the first runner: the graphs are vLLM's own estimate, half of ours.
@pytest.mark.parametrize(
    ("name", "told", "kv_gib", "within_gib"),
    [tuple(row.values()) for row in START_UPS["second runner"]],
)
def test_the_second_runner_keeps_less(name, told, kv_gib, within_gib):
    options = EngineOptions(vllm_version="0.26.0", max_num_batched_tokens=8192, **told)
    found = instance_memory(model_card(name), H100, 1, options)
    assert found.kv_bytes / GIB == pytest.approx(kv_gib, abs=within_gib)


def test_eq_1_promises_twice_what_a_nearly_full_card_has():
    model, told = model_card("Llama-3-70B"), EngineOptions(max_model_len=8192)
    card = accelerator("A100-80GB-SXM")
    paper, fitted = (instance_memory(model, card, 2, told, m) for m in ("paper", "fitted"))
    assert paper.kv_bytes > 1.5 * fitted.kv_bytes
    # Such a deployment had 6048 tokens, and vLLM refused it: public, with Llama 3's 8192 tokens.
    assert paper.kv_capacity_tokens > 8192
    assert is_feasible(paper, 8192)
    assert not is_feasible(fitted, 8192)


@pytest.mark.parametrize(
    ("layers", "heads", "kv_heads", "tokens"), [(4, 4, 2, 524_288), (8, 12, 4, 131_072)]
)
def test_one_gib_holds_as_many_tokens_as_real_cpu_engines_report(layers, heads, kv_heads, tokens):
    # docs/evidence/real-vllm.md; tests/real_vllm/test_memory.py asks the engines themselves.
    model = model_from_config(
        {
            "model_type": "llama", "hidden_size": 64 * heads, "intermediate_size": 256 * heads,
            "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": 64,
            "num_key_value_heads": kv_heads, "vocab_size": 2048, "dtype": "bfloat16",
        },
        name="tiny",
    )  # fmt: skip
    assert GIB == tokens * model.kv_token_bytes()


@pytest.mark.parametrize(
    ("card", "told", "tokens", "sequences"),
    [
        ("H100-80GB-SXM", {}, 8192, 1024),
        ("B200", {}, 16_384, 1024),
        ("B200", {"vllm_version": "0.21"}, 8192, 1024),
        *((name, {}, 2048, 256) for name in ("A100-80GB-SXM", "L40S", "V100-32GB-NVLink2")),
        # Before 0.8 a prompt was one piece, unless it may be long.
        ("H100-80GB-SXM", {"vllm_version": "0.6.4", "max_model_len": 1000}, 2048, 256),
        ("H100-80GB-SXM", {"vllm_version": "0.6.4", "max_model_len": 20_000}, 20_000, 256),
        ("H100-80GB-SXM", {"vllm_version": "0.6.4", "max_model_len": 131_072}, 2048, 256),
    ],
)
def test_defaults_are_those_of_vllm_for_the_card(card, told, tokens, sequences):
    told, device = EngineOptions(**told), accelerator(card)
    assert (told.batched_tokens(device), told.sequences(device)) == (tokens, sequences)


@pytest.mark.parametrize(
    "told",
    [{"utilisation": 0}, {"utilisation": 1.2}, {"max_model_len": 0}, {"vllm_version": "newest"},
     {"kv_dtype": "int3"}, {"max_num_seqs": -1}],
)  # fmt: skip
def test_what_vllm_would_not_take_is_an_error(told):
    with pytest.raises(ConfigError, match=next(iter(told))):
        EngineOptions(**told)


@pytest.mark.parametrize(
    ("version", "gib"),
    # Logged: 1.26 by 0.6.5 with 256 sequences, 4.76 by 0.11 and 1.89 by 0.19 with 1024.
    [("0.6.5", 1.26), ("0.11", 4.76), ("0.19", 1.89)],
)
def test_the_sampler_of_a_version_is_what_it_logged(version, gib):
    sequences = 256 if version == "0.6.5" else 1024
    told = EngineOptions(
        vllm_version=version, max_num_seqs=sequences, max_num_batched_tokens=8192,
        max_model_len=8192,
    )  # fmt: skip
    assert StartUp(LLAMA, H100, 1, told).activation_bytes() / GIB == pytest.approx(gib, rel=0.05)


@pytest.mark.parametrize(
    ("model", "told", "taken_off"),
    [
        ("Llama-3.1-8B", {}, True),
        ("Llama-3.1-8B", {"vllm_version": "0.20.2"}, False),
        ("Llama-3.1-8B", {"enforce_eager": True}, False),
        # The second runner takes nothing off until it estimates them.
        ("Llama-3.1-8B", {"vllm_version": "0.26"}, False),
        ("Llama-3.1-8B", {"vllm_version": "0.32"}, True),
        ("Qwen3-30B-A3B", {"vllm_version": "0.26"}, True),
    ],
)
def test_cuda_graphs_are_taken_off_since_0_21_unless_there_are_none(model, told, taken_off):
    parts = instance_memory(model_card(model), H100, 1, EngineOptions(**told)).parts
    assert ("CUDA graphs" in parts) is taken_off


@given(models, devices, st.integers(1, 8), options, methods)
def test_parts_and_kv_cache_are_the_whole_memory(model, device, t, told, method):
    found = instance_memory(model, device, t, told, method)
    parts = found.parts.values()
    assert t * sum(parts) + found.kv_bytes == pytest.approx(t * device.memory_bytes)
    assert min(parts) >= 0
    assert 0 < found.uncertainty <= 1


@given(models, devices, st.integers(1, 8), st.floats(0.5, 0.98))
def test_the_papers_method_is_eq_1(model, device, t, utilisation):
    found = instance_memory(model, device, t, EngineOptions(utilisation=utilisation), "paper")
    wanted = kv_capacity_bytes(
        t, device.memory_bytes, utilisation, 2 * GIB, model.parameters, model.bytes_per_weight
    )
    assert found.kv_bytes == pytest.approx(wanted, abs=1e3)


def on_a_larger_card(device, told, more):
    """The same engine, whose defaults go by the card's memory, and the card."""
    told = dataclasses.replace(
        told,
        max_num_seqs=told.sequences(device),
        max_num_batched_tokens=told.batched_tokens(device),
    )
    memory, usable = more(device.memory_bytes), more(device.usable_bytes)
    return told, dataclasses.replace(device, memory_bytes=memory, usable_memory_bytes=usable)


@given(models, devices, st.integers(1, 8), options, methods, st.floats(1, 3), st.integers(1, 10**6))
def test_more_memory_never_lowers_the_capacity_nor_makes_it_unfit(
    model, device, t, told, method, factor, needed
):
    told, larger = on_a_larger_card(device, told, lambda n: n * factor)
    small = instance_memory(model, device, t, told, method)
    large = instance_memory(model, larger, t, told, method)
    assert large.kv_capacity_tokens >= small.kv_capacity_tokens
    assert is_feasible(large, needed) or not is_feasible(small, needed)


@given(models, devices, options, methods)
def test_more_accelerators_never_lower_the_kv_bytes_of_an_instance(model, device, told, method):
    sizes = [t for t in range(1, 9) if refusal(model, t) is None]
    kv = [instance_memory(model, device, t, told, method).kv_bytes for t in sizes]
    # Also where one is too few: what is missing on all of them shrinks.
    assert kv == sorted(kv)


@given(models, devices, st.integers(1, 8), options, methods, st.integers(1, 2 * 10**6))
def test_feasible_has_room_and_unfit_has_a_shortfall(model, device, t, told, method, needed):
    start = StartUp(model, device, t, told)
    found = start.memory(method, needed)
    missing = start.shortfall_bytes(found, needed)
    if is_feasible(found, needed):
        assert found.kv_capacity_tokens >= needed
        assert missing == 0
    else:
        assert missing > 0
        # With that much more on each, and a block (of a state, too, where there is one), it fits.
        tokens = [model.kv_token_bytes(t, told.kv_dtype, length) for length in (None, needed)]
        more_bytes = (missing + 2 * 16 * max(tokens)) / told.utilisation
        told, larger = on_a_larger_card(device, told, lambda n: n + more_bytes)
        more = instance_memory(model, larger, t, told, method, needed_tokens=needed)
        assert is_feasible(more, needed)


def test_tight_is_what_two_standard_deviations_would_change():
    found = instance_memory(LLAMA, accelerator("A10"), 1, EngineOptions())
    tokens, two = found.kv_capacity_tokens, 2 * found.uncertainty

    def tight(needed):
        return instance_memory(
            LLAMA, accelerator("A10"), 1, EngineOptions(), needed_tokens=int(needed)
        ).tight

    assert not tight(tokens * (1 - two) * 0.99)
    assert tight(tokens * (1 - two) * 1.01)
    assert tight(tokens * (1 + two) * 0.99)
    assert not tight(tokens * (1 + two) * 1.01)


def test_what_would_help_does_help():
    model, card = model_card("Llama-3-70B"), accelerator("A100-80GB-SXM")
    told = EngineOptions()

    def found(t, needed):
        return StartUp(model, card, t, told).remedies("fitted", needed, largest=8)

    assert found(1, 8192) == ("tensor_parallel 4", "int4 (AWQ or GPTQ) weights")
    assert found(2, 8192)[0] == "tensor_parallel 4"
    long = found(4, 10**6)
    length = next(int(r.split()[4]) for r in long if r.startswith("a max length of"))
    assert is_feasible(instance_memory(model, card, 4, told), length)
    assert not is_feasible(instance_memory(model, card, 4, told), length + 64)
    # No fp8 on a V100.
    old = StartUp(LLAMA, accelerator("V100-16GB-PCIe"), 1, told)
    assert not any("fp8" in remedy for remedy in old.remedies("fitted", 8192, largest=1))


def test_what_is_not_modelled_makes_the_estimate_uncertain():
    plain = instance_memory(LLAMA, H100, 1, EngineOptions())
    odd = dataclasses.replace(LLAMA, unmodelled=(Doubt("sliding window", 0.3),))
    assert plain.uncertainty < 0.02
    assert instance_memory(odd, H100, 1, EngineOptions()).uncertainty >= 0.3
