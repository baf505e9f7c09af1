"""What a checkpoint's own tensors say, beside a config.json: exact, and of any family."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.checkpoints.shape import model_from_config
from hetero_gateway.files.model_file import PlanModelConfig, read_model
from hetero_gateway.planner.model_shape import ModelShape

H, V, WIDTH, LAYERS = 64, 256, 96, 3
PLAIN = {
    "model_type": "llama", "hidden_size": H, "num_hidden_layers": LAYERS, "vocab_size": V,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": WIDTH,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
EXPERTS = PLAIN | {
    "model_type": "never_seen_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
Tensors = dict[str, tuple[str, list[int]]]


def tensors(dtype: str = "BF16", *, experts: int = 0, layers: int = LAYERS) -> Tensors:
    """A decoder's, as checkpoints name them."""
    shapes = {"model.embed_tokens.weight": [V, H], "lm_head.weight": [V, H]}
    for i in range(layers):
        at = f"model.layers.{i}"
        for name, rows in (("q_proj", H), ("k_proj", H // 2), ("v_proj", H // 2), ("o_proj", H)):
            shapes[f"{at}.self_attn.{name}.weight"] = [rows, H]
        owners = [f"experts.{e}." for e in range(experts)] or [""]
        width = 32 if experts else WIDTH
        for owner in owners:
            for name in ("gate_proj", "up_proj", "down_proj"):
                shapes[f"{at}.mlp.{owner}{name}.weight"] = [width, H]
        if experts:
            shapes[f"{at}.mlp.gate.weight"] = [experts, H]
        shapes[f"{at}.input_layernorm.weight"] = [H]
    return {name: (dtype, shape) for name, shape in shapes.items()}


def elements(found: Tensors) -> int:
    return sum(math.prod(shape) for _, shape in found.values())


def write_shard(path: Path, found: Tensors) -> None:
    """Its header alone: the weights are never read."""
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        for name, (dtype, shape) in found.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def write_index(folder: Path, names: Mapping[str, str], total_size: float | None) -> None:
    document = {"metadata": {"total_size": total_size}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))


def model(folder: Path, config: Mapping[str, Any], **asked: Any) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(config))
    return read_model(PlanModelConfig(config=folder, **asked), "plan.yaml", folder)[0]


def test_parameters_are_those_of_the_tensors_whatever_the_config_leaves_out(tmp_path: Path) -> None:
    found = tensors() | {
        "vision_tower.layers.9.mlp.weight": ("F32", [H, 1000]),
        "multi_modal_projector.weight": ("BF16", [H, H]),
    }
    half = dict(list(found.items())[::2])
    write_shard(tmp_path / "model-00001-of-00002.safetensors", half)
    write_shard(
        tmp_path / "model-00002-of-00002.safetensors",
        {name: each for name, each in found.items() if name not in half},
    )
    # Mistral's own names, once more.
    write_shard(tmp_path / "consolidated.safetensors", found)
    config = {"model_type": "llava", "text_config": PLAIN, "vision_config": {"odd": 1}}
    assert model_from_config(config, name="m").kv_error == 0.3
    read = model(tmp_path, config)
    assert read.parameters == elements(found)
    assert read.other_weights == H * 1000 + H * H
    assert read.kv_error == 0.07
    assert read.layer_caches == model_from_config(config, name="m").layer_caches
    # The layers' norms are with what is quantised while it is loaded, the encoder is not.
    narrow = model(tmp_path, config, quantization="fp8")
    assert narrow.parameters == elements(found)
    saved = read.weight_bytes() - narrow.weight_bytes()
    assert saved == narrow.layer_weights == LAYERS * (3 * H * H + 3 * H * WIDTH + H)


def test_what_vllm_does_not_load_is_not_counted(tmp_path: Path) -> None:
    found = tensors()
    more = {
        f"model.layers.{LAYERS}.self_attn.q_proj.weight": ("BF16", [H, H]),
        "mtp.layers.0.mlp.weight": ("BF16", [H, H]),
        "talker.model.layers.0.weight": ("BF16", [H, H]),
        "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", [H]),
    }
    write_shard(tmp_path / "model.safetensors", found | more)
    assert model(tmp_path, PLAIN).parameters == elements(found)
    tied = model(tmp_path, PLAIN | {"tie_word_embeddings": True})
    assert tied.parameters == elements(found) - V * H


def test_experts_of_a_family_that_nobody_knows_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="never_seen_moe"):
        model(tmp_path, EXPERTS)
    found = tensors(experts=4)
    write_shard(tmp_path / "model.safetensors", found)
    read = model(tmp_path, EXPERTS)
    assert read.parameters == elements(found)
    assert (read.experts, read.experts_per_token, read.moe_layers) == (4, 2, LAYERS)
    assert read.active_layer_weights == read.layer_weights - LAYERS * 2 * 3 * 32 * H
    assert "counted as a plain decoder" in read.unmodelled[0].what


def test_what_is_stored_quantised_weighs_what_its_tensors_do(tmp_path: Path) -> None:
    found = tensors()
    for name in list(found):
        if "proj" in name:
            rows, columns = found.pop(name)[1]
            found[name.replace("weight", "qweight")] = ("I32", [rows, columns // 8])
            found[name.replace("weight", "scales")] = ("F16", [rows, columns // 32])
    write_shard(tmp_path / "model.safetensors", found)
    config = PLAIN | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}
    read = model(tmp_path, config)
    size = {"I32": 4, "F16": 2, "BF16": 2}
    stored = sum(size[dtype] * math.prod(shape) for dtype, shape in found.values())
    assert read.weight_bytes() == pytest.approx(stored, abs=2)
    assert read.quantization is not None


def test_an_index_without_its_files_gives_the_sum(tmp_path: Path) -> None:
    found = tensors()
    names = dict.fromkeys(found, "model-00001-of-00001.safetensors")
    write_index(tmp_path, names, 2 * elements(found))
    read = model(tmp_path, PLAIN)
    assert read.parameters == elements(found)
    assert not read.unmodelled
    # In place of a file there may be what Git LFS puts there.
    (tmp_path / "model-00001-of-00001.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\n"
    )
    assert model(tmp_path, PLAIN).parameters == elements(found)
    # Nothing checks the sum: a difference is said.
    write_index(tmp_path, names, 2.4 * elements(found))
    doubt = model(tmp_path, PLAIN).unmodelled[0]
    assert "its index" in doubt.what
    assert doubt.kv_error == pytest.approx(0.2, rel=0.05)
    # How much of it is not loaded is not known; and bytes of float32 are loaded as others.
    write_index(tmp_path, names | {"mtp.weight": "x.safetensors"}, 3 * elements(found))
    plain = model_from_config(PLAIN, name=tmp_path.name)
    assert model(tmp_path, PLAIN) == plain
    write_index(tmp_path, names, 4 * elements(found))
    wide = model(tmp_path, PLAIN | {"torch_dtype": "float32"})
    assert wide.parameters == plain.parameters


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"short", "a header of"),
        ((10**12).to_bytes(8, "little") + b"{}", "a header of 1000000000000 bytes"),
        ((100).to_bytes(8, "little") + b"{}", "ends within its header"),
        ((2).to_bytes(8, "little") + b"{]", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "JSON object"),
        ({"w": {"dtype": "F99", "shape": [1]}}, "'F99'"),
        ({"w": {"dtype": "F16", "shape": [-1]}}, "no shape"),
        ({"w": {"dtype": "F16", "shape": [1.5]}}, "no shape"),
        ({"w": {"dtype": ["F16"], "shape": [1]}}, "not known"),
        ({"w": 3}, "not known"),
        ({"w": {"dtype": "F16", "shape": [10**9]}}, "not of one model"),
    ],
)
def test_a_file_that_is_none_is_one_line(
    content: bytes | dict[str, Any], says: str, tmp_path: Path
) -> None:
    if isinstance(content, dict):
        text = json.dumps(content).encode()
        content = len(text).to_bytes(8, "little") + text
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        model(tmp_path, PLAIN)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "document",
    [{}, {"weight_map": []}, {"weight_map": {"w": "../../etc/passwd"}}],
)
def test_an_index_that_is_none_is_one_line(document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"index\.json: weight_map"):
        model(tmp_path, PLAIN)
