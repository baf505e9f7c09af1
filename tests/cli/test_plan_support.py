"""``plan support``: a model's facts, where it fits, and bounds where it is not modelled."""

import json
import re

import pytest

from hetero_gateway.files.accelerator_catalogue import ACCELERATORS, accelerator
from hetero_gateway.files.model_cards import model_card
from hetero_gateway.planner.memory import EngineOptions
from hetero_gateway.planner.stages import instance_memory


def test_a_card_on_every_accelerator_at_every_size(document):
    told = document("plan", "support", "Llama-3.1-8B")
    assert told["modelled"]
    assert told["parameters"] == pytest.approx(8.03e9, rel=0.001)
    assert told["kv_bytes_per_token"] == {"auto": 131072, "fp8": 65536}
    assert told["weight_bytes"]["bfloat16"] > 1.7 * told["weight_bytes"]["fp8"]
    assert told["tensor_parallel"] == [1, 2, 4, 8]
    assert told["tensor_parallel_refused"]["3"] == "32 attention heads do not divide by 3"
    assert [a["name"] for a in told["accelerators"]] == list(ACCELERATORS)
    assert all(a["source"] for a in told["accelerators"])


def test_the_memory_is_that_of_a_plan(document):
    words = ("--accelerator", "L4", "--accelerator", "T4", "--max-model-len", "8192")
    told = document("plan", "support", "Llama-3.1-8B", *words)
    l4, t4 = told["accelerators"]
    options = EngineOptions(max_model_len=8192, max_num_batched_tokens=2048)
    memory = instance_memory(
        model_card("Llama-3.1-8B"), accelerator("L4"), 2, options, needed_tokens=8192
    )
    two = next(f for f in l4["fits"] if f["tensor_parallel"] == 2)
    assert two["kv_tokens"] == memory.kv_capacity_tokens
    assert two["sequences"] == pytest.approx(memory.kv_capacity_tokens / 8192)
    assert not t4["fits"][0]["fits"]
    assert t4["fits"][0]["shortfall_bytes"] > 2**30


def test_the_table_names_what_fits_and_what_is_missing(run):
    out = run("plan", "support", "Llama-3.3-70B-AWQ", "--accelerator", "A10G").out
    assert "70.55 billion" in out
    assert "vLLM takes  t = 1, 2, 4, 8" in out
    (row,) = [line for line in out.splitlines() if "A10G-24GB" in line]
    assert re.search(r"−2\d\.\d GiB .* −\d\.\d GiB .* \d+k · \d+ .* \d+k · \d+ ", row)


def test_a_storage_that_a_card_does_not_load_is_refused(document):
    (card,) = document("plan", "support", "Llama-3.1-8B-AWQ", "--accelerator", "V100")[
        "accelerators"
    ]
    assert "awq needs CUDA capability 7.5" in card["fits"][0]["reason"]


def test_users_own_accelerators_and_engine_count(tmp_path, document):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "model: Llama-3.1-8B\nmachines: [{id: a, accelerator: mine, count: 1}]\n"
        "max_model_len: 2048\nengine: {gpu_memory_utilization: 0.5}\n"
        "accelerators: {mine: {memory_bytes: 80e9, memory_bytes_per_s: 1e12, flop_per_s: 1e14}}\n"
    )
    told = document("plan", "support", "Llama-3.1-8B", "-c", path)
    mine = told["accelerators"][0]
    assert mine["name"] == "mine"
    assert told["context"] == 2048
    assert mine["fits"][0]["fits"]
    whole = tmp_path / "whole.yaml"
    whole.write_text(path.read_text().replace("0.5", "0.9"))
    more = document("plan", "support", "Llama-3.1-8B", "-c", whole)["accelerators"][0]
    assert more["fits"][0]["kv_tokens"] > mine["fits"][0]["kv_tokens"] + 200_000
    assert "no link" in mine["fits"][1]["reason"]


def test_layers_that_keep_a_window_or_a_state_are_named(document):
    kinds = document("plan", "support", "gpt-oss-20b", "--accelerator", "H100")["layer_kinds"]
    assert any("a window of 128 tokens" in kind for kind in kinds)
    assert any("32 experts, 4 a token" in kind for kind in kinds)


def test_a_family_that_is_not_modelled_has_bounds(tmp_path, run, document):
    (tmp_path / "config.json").write_text(
        json.dumps({
            "model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"],
            "text_config": {
                "model_type": "gemma3n_text", "num_hidden_layers": 30, "hidden_size": 2048,
                "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
            },
        })
    )  # fmt: skip
    told = document("plan", "support", tmp_path, "--accelerator", "T4")
    assert told["modelled"] is False
    assert "share caches" in told["reason"]
    assert told["kv_bytes_per_token"] == {"least": 0, "most": 30 * 2 * 2 * 256 * 2}
    assert told["weight_bytes"] is None
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 2e10}}')
    (card,) = document("plan", "support", tmp_path, "--accelerator", "T4")["accelerators"]
    assert card["least_count"] == 2
    out = run("plan", "support", tmp_path, "--accelerator", "T4").out
    assert "T4-16GB: at least 2, by the weights alone" in out


def test_a_family_that_nobody_checked_is_uncertain(tmp_path, document):
    config = {
        "model_type": "brand_new", "num_hidden_layers": 4, "hidden_size": 512,
        "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024,
        "vocab_size": 32000,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (doubt,) = document("plan", "support", tmp_path, "--accelerator", "T4")["doubts"]
    assert "brand_new" in doubt["what"]
    assert doubt["kv_error"] == 0.3


def test_errors_are_one_line(tmp_path, error):
    (tmp_path / "config.json").write_text('{"a": 1}')
    for words, said in (
        (("support", "Lama-9B"), "no built-in card"),
        (("support", "Llama-3-8B", "--accelerator", "X9"), "not in the catalogue"),
        (("support", "Llama-3-8B", "--max-model-len", "9000"), "made for"),
        ((), "-c CLUSTER.yaml"),
        (("support", tmp_path), "config.json"),
    ):
        assert said in error("plan", *words)
