"""The plan's file: strict, every error one line that names the file and the key."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.cluster_config import ClusterConfig, LengthConfig
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.plan_config import PlanConfig
from hetero_gateway.files.plan_request import PlanRequest, load_requests
from hetero_gateway.files.profile_file import builtin_profiles, profile_document
from hetero_gateway.sim.alone import Mix
from hetero_gateway.sim.ordered_trace import OrderedTrace
from hetero_gateway.sim.prefixes import KnownText, Run

ROOT = Path(__file__).parents[2]
V100 = {"id": "box", "accelerator": "V100-32GB-NVLink2", "count": 8}
# What a Hugging Face config.json of Llama-3-8B says, as far as it matters.
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "vocab_size": 128256, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip


def write(tmp_path: Path, **changes: Any) -> Path:
    data = {"model": "Llama-3-8B", "max_model_len": 4096, "machines": [V100]} | changes
    path = tmp_path / "plan.yaml"
    path.write_text(
        yaml.safe_dump({k: v for k, v in data.items() if v is not None}), encoding="utf-8"
    )
    return path


def load(tmp_path: Path, **changes: Any) -> PlanRequest:
    return load_requests(write(tmp_path, **changes))[0]


def error(tmp_path: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, **changes)
    text = str(caught.value)
    assert "\n" not in text
    assert "plan.yaml" in text
    return text


def trace(tmp_path: Path, *rows: tuple[int, int]) -> Path:
    path = tmp_path / "trace.csv"
    lines = ["input_tokens,output_tokens", *(f"{i},{o}" for i, o in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_example_of_the_interface_loads(tmp_path: Path) -> None:
    request = load(tmp_path, machines=[V100, {"id": "a", "accelerator": "A800-PCIe", "count": 1}])
    assert [m.id for m in request.question.machines] == ["box", "a"]
    # Another name of an accelerator is the same one.
    assert set(request.question.types) == {
        *(("V100-32GB-NVLink2", t) for t in (1, 2, 4, 8)),
        ("A800-80GB-PCIe", 1),
    }
    assert request.max_model_len == 4096
    assert request.question.goals.name == "throughput"


def test_only_a_plan_has_machines() -> None:
    # `validate` knows a plan by it.
    assert "machines" in PlanConfig.model_fields
    assert "machines" not in GatewayConfig.model_fields
    assert "machines" not in ClusterConfig.model_fields


def test_copies_are_machines_of_their_own_and_a_price_is_of_one_or_of_its_accelerator(
    tmp_path: Path,
) -> None:
    dear = V100 | {"id": "dear", "price_per_hour_usd": 3.0}
    prices = {"V100-32GB-NVLink2": 1.0}
    machines = load(
        tmp_path, machines=[V100 | {"copies": 2}, dear], prices=prices
    ).question.machines
    told = [(m.id, m.price_per_hour_usd) for m in machines]
    assert told == [("box-0", 1.0), ("box-1", 1.0), ("dear", 3.0)]


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, policy="min-max", goals={"goal": "throughput"})
    overrides = {"policy": "round-robin", "goals.goal": "fewest", "workload.rate_per_s": 3.0}
    question = load_requests(path, overrides | {"memory": None})[0].question
    assert question.policy == "round-robin"
    assert (question.goals.name, question.goals.rate_per_s) == ("fewest", 3.0)


def test_a_config_json_is_read_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    model = {"config": "config.json", "dtype": "float16", "name": "Llama-3-8B"}
    request = load(tmp_path, model=model)
    card = load(tmp_path)
    assert request.model.layers == card.model.layers == 32
    assert {k: t.memory.kv_capacity_tokens for k, t in request.question.types.items()} == {
        k: t.memory.kv_capacity_tokens for k, t in card.question.types.items()
    }


def test_a_measured_profile_comes_first(tmp_path: Path) -> None:
    built_in = builtin_profiles()["V100-32GB-NVLink2/Llama-3-8B/tp1"]
    constants = {f"p{i}": 2 * getattr(built_in.constants, f"p{i}") for i in range(1, 9)}
    document = profile_document(built_in, {"how": "measured"}) | {"constants": constants}
    profile = tmp_path / "measured.yaml"
    profile.write_text(yaml.safe_dump(document), encoding="utf-8")
    types = load_requests(write(tmp_path), profiles=[str(profile)])[0].question.types
    assert types[built_in.gpu, 1].profile.source["how"] == "measured"
    assert types[built_in.gpu, 1].profile.constants.p8 == constants["p8"]
    assert types[built_in.gpu, 2].profile.source["how"] != "measured"
    listed = load(tmp_path, profiles=["measured.yaml"]).question.types
    assert listed[built_in.gpu, 1].profile == types[built_in.gpu, 1].profile


# The context


def test_the_chat_mix_is_cut_to_the_context(tmp_path: Path) -> None:
    question = load(tmp_path, max_model_len=1000).question
    assert question.lengths.prompt.maximum + question.lengths.output.maximum == 1000
    assert any("cut" in note for note in question.notes)


def lengths(prompt_max: int) -> dict[str, Any]:
    longest = {"prompt": prompt_max, "output": 300}
    return {name: {"median": 100, "sigma": 0.5, "max": most} for name, most in longest.items()}


def test_without_a_context_the_longest_request_makes_one(tmp_path: Path) -> None:
    request = load(tmp_path, max_model_len=None, workload=lengths(900))
    assert request.max_model_len == 2048
    assert any("2048" in note for note in request.question.notes)


def test_a_request_longer_than_the_context_is_named(tmp_path: Path) -> None:
    rows = trace(tmp_path, (10, 20), (4000, 97), (5000, 1))
    with pytest.raises(ConfigError) as caught:
        load_requests(write(tmp_path), requests=rows)
    text = str(caught.value)
    assert "trace.csv: request 3 needs 5001 tokens" in text
    assert "2 of 3" in text
    fits = load_requests(write(tmp_path), requests=trace(tmp_path, (4000, 96)))[0].question
    assert fits.lengths.prompt_tokens.tolist() == [4000]


# Errors


H100 = {"id": "h", "accelerator": "H100-80GB-SXM", "count": 1}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"machine": []}, "machine: unknown key; did you mean machines?"),
        ({"machines": [V100 | {"acelerator": "x"}]}, "machines.0.acelerator"),
        (
            {"machines": [V100 | {"accelerator": "V100-32G-NVLink"}]},
            "machines.0.accelerator: accelerator 'V100-32G-NVLink' is not in the catalogue; "
            "the nearest: V100-32GB-NVLink2",
        ),
        ({"machines": []}, "machines: there are none"),
        ({"machines": [V100, V100]}, "'box' is used twice"),
        ({"model": "Lama-3-8B"}, "Llama-3-8B"),
        ({"model": {"config": "nowhere.json"}}, "cannot be read"),
        (
            {"machines": [V100, H100], "prices": {"H100": 2.0}, "goals": {"goal": "cost"}},
            "prices: the goal cost needs USD per accelerator-hour of V100-32GB-NVLink2",
        ),
        ({"goals": {"goal": "fewest"}}, "rate_per_s"),
        ({"engine": {"kv_cache_dtype": "int3"}}, "engine"),
        ({"engine": {"vllm_version": "new"}}, "engine"),
        ({"workload": lengths(4000)}, "4000 prompt and 300 output"),
        ({"max_model_len": 9000}, "8192"),
        (
            {"accelerators": {"my-card": {"memory_bytes": -1}}},
            "accelerators.my-card.memory_bytes: must be greater than 0",
        ),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said in error(tmp_path, **changes)


LACKING = json.dumps({k: v for k, v in LLAMA.items() if k != "num_hidden_layers"})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (LACKING, "num_hidden_layers"),
        *((text, "config.json") for text in ("{", "[1]", '"text"', "[" * 100_000)),
    ],
)
def test_what_is_wrong_with_a_config_json_is_one_line(
    tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    assert said in error(tmp_path, model={"config": "config.json"})


def prefix_trace(directory: Path) -> str:
    lines = '{"block_tokens": 64}\n{"t": 0.5, "in": 200, "out": 60, "b": [[7, 2], 11]}\n'
    (directory / "trace.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return "trace.jsonl.gz"


def test_a_trace_with_prefixes_is_run_in_its_order(tmp_path: Path) -> None:
    question = load(tmp_path, workload={"requests": prefix_trace(tmp_path)}).question
    assert Mix.of(question.lengths, 0).mean_prompt == 200
    assert isinstance(question.lengths, OrderedTrace)
    assert question.lengths.texts == (KnownText((Run(7, 2), Run(11, 1))),)
    assert not any("begin alike" in note for note in question.notes)


@pytest.mark.parametrize(
    ("workload", "changes", "why"),
    [
        ({"prefix_cache": False}, {}, "prefix_cache is off"),
        ({}, {"engine": {"scheduling": "prefill-first"}}, "vLLM before 0.8"),
        ({}, {"engine": {"vllm_version": "0.7.3"}}, "vLLM before 0.8"),
        ({}, {"model": "Qwen3-Next-80B-A3B"}, "state"),
    ],
)
def test_where_engines_cache_nothing_a_line_says_that_prompts_are_computed_in_full(
    tmp_path: Path, workload: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    asked = {"requests": prefix_trace(tmp_path)} | workload
    question = load(tmp_path, workload=asked, **changes).question
    assert not isinstance(question.lengths, OrderedTrace)
    (note,) = [note for note in question.notes if "begin alike" in note]
    assert why in note


# The documentation


def fields_of(model: type[BaseModel]) -> set[str]:
    found: set[str] = set()
    for name, info in model.model_fields.items():
        found.add(name)
        annotations = [info.annotation, *getattr(info.annotation, "__args__", ())]
        for inner in annotations:
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                found |= set() if inner is LengthConfig else fields_of(inner)
    return found


def test_every_field_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "reference" / "plan-file.md").read_text("utf-8")
    listed = set(re.findall(r"^\| `([a-z0-9_]+)`", text, re.MULTILINE))
    assert fields_of(PlanConfig) <= listed


OWN = {
    "memory_bytes": 51539607552, "memory_bytes_per_s": 1.0e12, "flop_per_s": 2.0e14,
    "link_bytes_per_s": 32.0e9, "cuda_capability": 7.5,
}  # fmt: skip


def test_an_accelerator_of_the_users_own_is_planned_with(tmp_path: Path) -> None:
    machine = {"id": "box", "accelerator": "My Card", "count": 2}
    request = load(tmp_path, machines=[machine], accelerators={"my-card": OWN})
    assert sorted(request.question.types) == [("my-card", 1), ("my-card", 2)]
    assert request.question.types["my-card", 1].time_uncertainty == 0.4
    assert not request.accelerators["my-card"].bf16


def test_a_name_of_several_cards_is_noted(tmp_path: Path) -> None:
    request = load(tmp_path, machines=[H100 | {"accelerator": "H100"}])
    assert any("H100 is taken for H100-80GB-SXM" in note for note in request.question.notes)


def test_a_modelopt_checkpoint_says_beside_its_config_how_it_is_stored(tmp_path: Path) -> None:
    stored = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(stored))
    machine = {"id": "a", "accelerator": "B200", "count": 1}
    request = load(tmp_path, model={"config": str(tmp_path)}, machines=[machine])
    assert request.model.quantization is not None
    assert request.model.quantization.method == "modelopt_fp4"
    assert request.model.kv_dtype == "fp8"
    assert request.stored_in_config
    assert request.model_directory == tmp_path
