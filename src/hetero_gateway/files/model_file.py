"""A model as people name it: a built-in card, or a config.json with its checkpoint."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from hetero_gateway.errors import named_place
from hetero_gateway.files.checkpoints.fields import Fields
from hetero_gateway.files.checkpoints.shape import model_from_config
from hetero_gateway.files.checkpoints.stored import as_stored
from hetero_gateway.files.checkpoints.tensors import INDEX, holds_tensors, read_tensors
from hetero_gateway.files.model_cards import model_card
from hetero_gateway.files.whole_file import read_json
from hetero_gateway.files.yaml_file import StrictModel
from hetero_gateway.planner.accelerators import Accelerator
from hetero_gateway.planner.model_shape import ModelShape
from hetero_gateway.planner.support import SIZES


class PlanModelConfig(StrictModel):
    """A model that has no built-in card, or is stored otherwise."""

    config: Path | None = None
    """A Hugging Face config.json, relative to this file."""
    name: str | None = Field(None, min_length=1)
    """A built-in card's name, or a name for the config.json."""
    dtype: str | None = None
    """Of the weights: float16, bfloat16, …."""
    quantization: str | None = None
    """fp8, int8, int4, awq or gptq."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.config is None and self.name is None:
            raise ValueError("give config, or the name of a built-in card")
        return self


def model_config(text: str, dtype: str | None, quantization: str | None) -> PlanModelConfig:
    """A model as named on a command line: a path if there is one, else a card."""
    path = Path(text)
    if path.exists() or path.suffix == ".json":
        return PlanModelConfig(config=path, name=None, dtype=dtype, quantization=quantization)
    return PlanModelConfig(config=None, name=text, dtype=dtype, quantization=quantization)


def read_model(value: str | PlanModelConfig, source: str, base_dir: Path) -> tuple[ModelShape, str]:
    """The model, and the argument of vLLM to serve it.

    Args:
        source: the file that names it, for messages.
        base_dir: its path is relative to this.

    Raises:
        ConfigError: one line with the source.
    """
    asked = PlanModelConfig(name=value) if isinstance(value, str) else value
    with named_place(f"{source}: model"):
        if asked.config is None:
            assert asked.name is not None
            name = asked.name
            return model_card(name, dtype=asked.dtype, quantization=asked.quantization), name
        path = base_dir / asked.config
        if path.is_dir():
            path /= "config.json"
        name = asked.name or path.absolute().parent.name
        shape = _checkpoint(path, name, asked)
    return shape, name


def _checkpoint(path: Path, name: str, asked: PlanModelConfig) -> ModelShape:
    """By its config.json, and by its tensors if they, or their index, are next to it."""
    data = read_json(path)
    stored = _modelopt_file(path, data)
    read = functools.partial(
        model_from_config, data, name=name, dtype=asked.dtype,
        quantization=asked.quantization or stored,
    )  # fmt: skip
    if path.name != "config.json" or not holds_tensors(path.parent):
        return read()
    shape = read(weighed=True)
    tensors = read_tensors(path.parent, layers=shape.layers, tied=shape.tied_embeddings)
    if tensors is None or not tensors.exact:
        shape = read()
    if tensors is None:
        return shape
    fields = Fields(data, name)
    own = stored or fields.said("quantization_config")
    return as_stored(
        shape,
        tensors,
        quantised=None not in (own, shape.quantization) and asked.quantization is None,
        own_dtype=str(fields.said("torch_dtype") or fields.said("dtype") or ""),
        where=str(path.parent),
    )


def _modelopt_file(path: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """NVIDIA's checkpoints may state their storage only in a file next to config.json."""
    beside = path.with_name("hf_quant_config.json")
    if config.get("quantization_config") is not None or not beside.is_file():
        return None
    return read_json(beside)


def model_directory(value: str | PlanModelConfig, base_dir: Path) -> Path | None:
    """Where its files are; None for a card."""
    if isinstance(value, str) or value.config is None:
        return None
    path = (base_dir / value.config).absolute()
    return path if path.is_dir() else path.parent


def stored_bytes(directory: Path) -> float | None:
    """Of the weights, by the index next to them, or by the files; None: there are none."""
    index = directory / INDEX
    if index.is_file():
        said = read_json(index).get("metadata")
        if isinstance(said, dict) and isinstance(said.get("total_size"), int | float):
            return float(said["total_size"])
    return float(sum(f.stat().st_size for f in directory.glob("*.safetensors"))) or None


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a model that is not modelled.

    Args:
        reason: why it is not.
        kv_token_bytes: the most that a token can take; the least is 0.
        weight_bytes: of the files, as stored; None: not known.
        holding: the fewest of an accelerator whose memory holds the weights; 0: more than
            asked.
    """

    name: str
    reason: str
    layers: int
    kv_token_bytes: float
    weight_bytes: float | None
    holding: Mapping[str, int]


def bounds_of(
    config: Mapping[str, Any],
    name: str,
    reason: str,
    weight_bytes: float | None,
    accelerators: Sequence[Accelerator],
    utilisation: float,
) -> Bounds:
    """The bounds that follow from the file of a family that is not modelled.

    Attention in every layer that keeps every token is the most that a KV cache can take.

    Raises:
        ConfigError: it does not even say how many layers there are.
    """
    fields = Fields(config, name)
    layers = fields.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    hidden = fields.count("hidden_size", "n_embd", "d_model")
    heads = fields.optional("num_attention_heads", "n_head", "n_heads") or 1
    kv_heads = fields.optional("num_key_value_heads") or heads
    if fields.optional("kv_lora_rank", "q_lora_rank"):
        kv_heads = heads  # what is kept as one vector may be unpacked, and no more than that
    head_dim = fields.optional("head_dim") or hidden // heads
    holding = {}
    if weight_bytes is not None:
        for device in accelerators:
            room = device.usable_bytes * utilisation
            fewest = next((t for t in SIZES if weight_bytes / t < room), 0)
            holding[device.name] = fewest if fewest <= device.max_group else 0
    return Bounds(name, reason, layers, 4.0 * layers * kv_heads * head_dim, weight_bytes, holding)
