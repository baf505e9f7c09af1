"""The shapes of published models, read from their config.json, against what is published of them.

published_models.json holds the fields of each model's own config.json that say something of its
shape, its parameters, and how many numbers its caches keep of one token. Parameters and caches are
those of transformers' own classes (5.19), counted without weights, or of the publisher's card where
that version does not have the model. A gemma-4 cache keeps keys and values apart, as vLLM's does.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.checkpoints.shape import model_from_config
from hetero_gateway.files.model_cards import model_card

PUBLISHED = json.loads(Path(__file__).with_name("published_models.json").read_text())
LOADED = {name: fact for name, fact in PUBLISHED.items() if "refused" not in fact}


def test_there_are_enough_models_of_enough_families():
    configs = [fact["config"] for fact in LOADED.values()]
    families = {config.get("text_config", config)["model_type"] for config in configs}
    assert len(LOADED) >= 60
    assert len(families) >= 25


@pytest.mark.parametrize("name", sorted(LOADED))
def test_parameters_and_cache_are_as_published(name):
    fact = LOADED[name]
    model = model_from_config(fact["config"], name=name)
    assert model.parameters == pytest.approx(fact["parameters_b"] * 1e9, rel=0.03)
    own = [cache for cache in model.layer_caches if cache.element_bytes is None]
    plain = dataclasses.replace(model, caches=tuple(own), kv_dtype="auto")
    assert plain.kv_token_bytes() == 2 * fact["kv_elements"]


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - LOADED.keys()))
def test_what_is_not_modelled_is_refused_with_a_reason(name):
    with pytest.raises(ConfigError, match=r"config\.json: model_type .* (is not modelled: |has)"):
        model_from_config(PUBLISHED[name]["config"], name=name)


def test_an_unknown_plain_family_loads_with_a_doubt():
    config = LOADED["Meta-Llama-3.1-8B"]["config"] | {"model_type": "brand_new"}
    model = model_from_config(config, name="new")
    assert model.kv_error == 0.3
    assert "'brand_new', counted as a plain decoder" in model.unmodelled[0].what


def test_a_window_ends_what_a_sequence_keeps():
    model = model_card("gpt-oss-20b")  # 12 layers of 24 keep 128 tokens
    each = 8 * 128 * 2
    assert model.kv_request_bytes(100) == 24 * each * 100
    assert model.kv_request_bytes(10_000) == 12 * each * (10_000 + 128)
    assert model.kv_request_bytes(10_000, in_flight=2048) == 12 * each * (10_000 + 2176)
    assert model.kv_request_bytes(1000, 16) == 2 * model.kv_request_bytes(1000, 8)


def test_a_state_is_kept_once_however_long_the_sequence():
    model = model_from_config(LOADED["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"]["config"], name="n")
    # 23 Mamba-2 layers: 64 heads of 64 × 128 in float32, and three inputs of 6144 channels.
    inner = 64 * 64
    state = 23 * (inner * 128 * 4 + 3 * (inner + 2 * 8 * 128) * 2)
    assert model.state_bytes == state
    assert model.kv_request_bytes(1000) == state + 1000 * 6 * 2 * 128 * 2 * 2


@pytest.mark.parametrize(
    ("name", "gib"),
    # Sizes of the checkpoints' files, as their publishers have them.
    [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8), ("DeepSeek-V3", 627.0)],
)
def test_a_checkpoint_that_comes_quantised_is_as_large_as_its_files(name, gib):
    assert model_card(name).weight_bytes() / 2**30 == pytest.approx(gib, rel=0.02)


def test_modules_that_are_left_wide_count_as_wide():
    config = LOADED["Qwen3-30B-A3B"]["config"]
    plain = {"quant_algo": "NVFP4"}
    some = plain | {"exclude_modules": ["lm_head", "model.layers.*.self_attn*"]}
    all_narrow = model_from_config(config, name="m", quantization={"quantization": plain})
    attention_wide = model_from_config(config, name="m", quantization={"quantization": some})
    attention = 48 * 2 * 2048 * 128 * (32 + 4)
    assert all_narrow.wide_weights == 0
    assert attention_wide.wide_weights == attention
    more = attention_wide.weight_bytes() - all_narrow.weight_bytes()
    assert more == pytest.approx(attention * (2 - 4.5 / 8))


@pytest.mark.parametrize(
    ("stored", "method", "bits", "kv"),
    [
        ({"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}, "modelopt_fp4",
         4.5, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt", 8, "auto"),
        ({"quant_method": "modelopt", "config_groups": {"g": {"weights": {
            "num_bits": 4, "type": "float", "group_size": 16}}}}, "modelopt_fp4", 4.5, "auto"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {
            "num_bits": 4, "type": "float", "group_size": 32}}}}, "mxfp4", 4.25, "auto"),
    ],
)  # fmt: skip
def test_modelopt_says_in_several_ways_how_a_checkpoint_is_stored(stored, method, bits, kv):
    config = LOADED["Meta-Llama-3.1-8B"]["config"]
    model = model_from_config(config, name="m", quantization=stored)
    assert (model.quantization.method, model.quantization.bits) == (method, bits)
    assert model.kv_dtype == kv


def test_qwens_own_fp8_is_in_blocks():
    assert model_card("Qwen/Qwen3-30B-A3B-FP8").quantization.block == (128, 128)
    assert model_card("RedHatAI/Qwen3-30B-A3B-FP8-dynamic").quantization.block is None
