"""Which tensor parallelism and storage vLLM takes."""

import dataclasses
import json
from pathlib import Path

import pytest

from hetero_gateway.files.accelerator_catalogue import accelerator
from hetero_gateway.files.checkpoints.shape import model_from_config
from hetero_gateway.files.model_cards import model_card
from hetero_gateway.planner.model_shape import Quantization
from hetero_gateway.planner.parallelism import precision_refusal, refusal
from tests.planner.asked_sizes import SIZES, small

HERE = Path(__file__).parent


def accepted(model, largest=16):
    return [t for t in range(1, largest + 1) if refusal(model, t) is None]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Llama-3-8B", [1, 2, 4, 8, 16]),  # 32 heads, 8 KV heads: 16 copies them
        ("Qwen2.5-7B", [1, 2, 4]),  # 28 heads, 4 KV heads: 7 and 14 are no multiples of 4
        ("Qwen2.5-0.5B", [1, 2]),  # 14 heads, 2 KV heads; 7 is odd
        ("Qwen2.5-14B", [1, 2, 4, 8]),  # 40 heads: 5 and 10 do not fit 8 KV heads
        ("phi-4", [1, 2]),  # 10 KV heads: 5 and 10, but neither divides 100 352
        ("Llama-2-13B", [1, 2, 4, 8]),  # 40 heads, 13824 = 2^9·27: no multiple of 5
        ("Qwen3-30B-A3B", [1, 2, 4, 8, 16]),
    ],
)
def test_heads_kv_heads_and_the_mlp_decide(name, sizes):
    assert accepted(model_card(name)) == sizes


def test_the_sizes_are_those_that_vllms_own_classes_took():
    published = json.loads((HERE / "published_models.json").read_text())
    taken = json.loads((HERE / "vllm_sizes.json").read_text())
    assert len(taken) * len(SIZES) >= 300
    for name, sizes in taken.items():
        model = model_from_config(small(published[name]["config"]), name=name)
        assert [t for t in SIZES if refusal(model, t) is None] == sizes, name


def test_the_reason_names_the_number():
    assert refusal(model_card("Llama-3-8B"), 3) == "32 attention heads do not divide by 3"
    assert refusal(model_card("phi-4"), 4) == "10 KV heads do not divide by 4"
    assert refusal(model_card("Qwen2.5-7B"), 7) == "7 is no multiple of the 4 KV heads"
    assert "13824" in refusal(model_card("Llama-2-13B"), 5)
    assert "below 1" in refusal(model_card("Llama-2-13B"), 0)


def test_the_padded_vocabulary_is_cut_too():
    why = "the vocabulary, padded to 100352, does not divide by 5"
    assert refusal(model_card("phi-4"), 5) == why


def test_groups_of_weights_are_not_cut():
    # 11008 / 4 = 2752 = 21.5 · 128.
    assert accepted(model_card("Llama-2-7B", quantization="awq"), 8) == [1, 2]
    assert accepted(model_card("Llama-2-7B"), 8) == [1, 2, 4, 8]
    assert "group size 128" in refusal(model_card("Llama-2-7B", quantization="awq"), 4)
    assert accepted(model_card("Llama-3-8B", quantization="awq"), 8) == [1, 2, 4, 8]
    assert accepted(model_card("Llama-2-7B", quantization="fp8"), 8) == [1, 2, 4, 8]


def test_blocks_of_fp8_are_not_cut():
    blocks = Quantization("fp8", 8, block=(128, 128))
    model = dataclasses.replace(model_card("Llama-2-7B"), quantization=blocks)
    assert accepted(model, 8) == [1, 2]
    assert "block of 128" in refusal(model, 8)


def test_experts_are_cut_too():
    qwen = dataclasses.replace(model_card("Qwen3-30B-A3B"), moe_intermediate=700)
    assert refusal(qwen, 8) == "the experts' intermediate size of 700 does not divide by 8"
    shared = dataclasses.replace(model_card("Qwen3-30B-A3B"), shared_intermediate=700)
    assert refusal(shared, 8) == "the shared experts' intermediate size of 700 does not divide by 8"


@pytest.mark.parametrize(
    ("quantization", "oldest"),
    [
        ("fp8", "T4-16GB"),
        ("awq", "T4-16GB"),
        ("gptq", "V100-32GB-NVLink2"),
        ("int8", "T4-16GB"),
        ("int4", "T4-16GB"),
        (None, "V100-32GB-NVLink2"),
    ],
)
def test_a_storage_needs_a_generation(quantization, oldest):
    cards = ("V100-32GB-NVLink2", "T4-16GB", "A100-80GB-SXM", "L4-24GB", "H100-80GB-SXM")
    model = model_card("Llama-3-8B", quantization=quantization)
    taken = [name for name in cards if precision_refusal(model, accelerator(name)) is None]
    assert taken == list(cards[cards.index(oldest) :])


def test_of_other_makers_nothing_is_known():
    model = model_card("Llama-3-8B", quantization="fp8")
    assert precision_refusal(model, accelerator("Gaudi 2")) is None
