"""How a checkpoint's matrices are stored: from a name, quantization_config or hf_quant_config.json.

Also which of the layers it leaves wide: lists of module names, globs or patterns, held against the
names that such modules usually have.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from hetero_gateway.errors import ConfigError
from hetero_gateway.planner.model_shape import Quantization

# Four bits and a scale of eight for each 16 (NVFP4) or 32 (MXFP4) of them.
NVFP4: Final = Quantization("modelopt_fp4", 4.5)
MXFP4: Final = Quantization("mxfp4", 4.25)
_MODELOPT_FP8: Final = Quantization("modelopt", 8)
_NAMED: Final[Mapping[str, Quantization | None]] = {
    "none": None,
    "fp8": Quantization("fp8", 8),
    "fbgemm_fp8": Quantization("fbgemm_fp8", 8),
    "w8a8": Quantization("compressed-tensors", 8),
    "int8": Quantization("compressed-tensors", 8),
    # Four bits: groups of 128, as published checkpoints have them.
    "w4a16": Quantization("compressed-tensors", 4, 128),
    "int4": Quantization("compressed-tensors", 4, 128),
    "awq": Quantization("awq", 4, 128, zero_points=True),
    "gptq": Quantization("gptq", 4, 128, zero_points=True),
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
    "modelopt_fp4": NVFP4,
    "modelopt": _MODELOPT_FP8,
    "bitsandbytes": Quantization("bitsandbytes", 4, 64),
}
# ModelOpt's quant_algo.
_ALGORITHMS: Final[Mapping[str, Quantization]] = {
    "FP8": _MODELOPT_FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": _MODELOPT_FP8,
    "FP8_PB_WO": Quantization("modelopt", 8, block=(128, 128)),
    "NVFP4": NVFP4,
    "NVFP4_AWQ": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "W4A8_AWQ": Quantization("modelopt", 4, 128),
    "INT4_AWQ": Quantization("modelopt", 4, 128),
    "MXFP8": Quantization("modelopt_mxfp8", 8.25),
}
# Where checkpoints list what they leave wide.
_LEFT_OUT: Final = (
    "ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers",
    "llm_int8_skip_modules",
)  # fmt: skip
# A module of each kind, in the names that families give it; a layer's number goes in front.
_MODULES: Final[Mapping[str, Sequence[str]]] = {
    "attention": ("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.o_proj", "mixer.q_proj"),
    "state": ("linear_attn.out_proj", "mamba.in_proj", "mixer.in_proj", "linear_attn.in_proj_qkv"),
    "mlp": ("mlp.up_proj", "mlp.down_proj", "feed_forward.up_proj", "mixer.up_proj"),
    "moe": (
        "mlp.experts.0.up_proj", "block_sparse_moe.experts.0.w1", "feed_forward.experts.0.up_proj",
        "mixer.experts.0.up_proj", "mlp.experts", "experts.0.up_proj",
    ),
    "moe beside": ("experts.0.up_proj", "experts.gate_up_proj", "moe.experts.0.up_proj"),
    "shared": (
        "mlp.shared_expert.up_proj", "mlp.shared_experts.up_proj", "mixer.shared_experts.up_proj",
    ),
}  # fmt: skip
_ROOTS: Final = (
    "model.layers", "model.language_model.layers", "language_model.model.layers",
    "backbone.layers", "layers",
)  # fmt: skip


def quantization_of(stored: str | Mapping[str, Any]) -> Quantization | None:
    """From a name, or from the quantization_config of a checkpoint.

    Raises:
        ConfigError: a method that is not known, or is described in a way that is not.
    """
    if isinstance(stored, str):
        return _named(stored)
    inner = stored.get("quantization")
    if isinstance(inner, Mapping):  # hf_quant_config.json
        return _modelopt(inner)
    method = str(stored.get("quant_method", "")).casefold()
    if method.startswith("modelopt") or (not method and "quant_algo" in stored):
        return _modelopt(stored)
    if method in ("compressed-tensors", "compressed_tensors"):
        return _compressed_tensors(stored)
    if method == "fp8":
        block = stored.get("weight_block_size")
        if isinstance(block, list | tuple) and len(block) == 2:
            return Quantization("fp8", 8, block=(int(block[0]), int(block[1])))
        return Quantization("fp8", 8)
    if method in ("awq", "gptq"):
        bits = _positive(stored.get("bits", stored.get("w_bit", 4)), f"{method} bits")
        group = stored.get("group_size", stored.get("q_group_size", 128))
        zero_points = method == "awq" or not stored.get("sym", False)
        return Quantization(method, bits, max(0, int(group)), zero_points)
    if method == "bitsandbytes":
        four = bool(stored.get("load_in_4bit", stored.get("_load_in_4bit", False)))
        return Quantization("bitsandbytes", 4 if four else 8, 64 if four else 0)
    return _named(method)


def _inner(stored: object) -> Mapping[str, Any]:
    """A quantization_config, or what hf_quant_config.json holds; empty where there is neither."""
    inner = stored.get("quantization", stored) if isinstance(stored, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def kv_dtype_of(stored: str | Mapping[str, Any] | None) -> str:
    """What the checkpoint wants its KV cache in; "auto": it does not say."""
    scheme = stored.get("kv_cache_scheme") if isinstance(stored, Mapping) else None
    if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
        return "fp8"
    algorithm = _inner(stored).get("kv_cache_quant_algo")
    return "fp8" if str(algorithm).upper() == "FP8" else "auto"


def left_wide(stored: object, kind: str, layers: Iterable[int]) -> int:
    """Of some layers' modules of a kind, how many the checkpoint leaves wide.

    Args:
        kind: "attention", "state", "mlp", "moe", "moe beside" (an MLP, gemma-4) or "shared".
    """
    inner = _inner(stored)
    named = inner.get("quantized_layers")
    if isinstance(named, Mapping):  # what is not named is wide
        return sum(_first_match(named, kind, layer) is None for layer in layers)
    patterns = [
        str(name) for key in _LEFT_OUT for name in inner.get(key) or () if isinstance(name, str)
    ]
    targets = _targets(inner)
    wide = 0
    for layer in layers:
        out = _matched(patterns, kind, layer)
        wide += out or (bool(targets) and not _matched(targets, kind, layer))
    return wide


def mean_bits(stored: object, kinds: Mapping[str, tuple[Sequence[int], int]]) -> float | None:
    """Of the matrices that a checkpoint of mixed precision quantises; None: it is not mixed.

    Args:
        kinds: the layers that have such a module, and its weights in one of them.
    """
    named = _inner(stored).get("quantized_layers")
    if not isinstance(named, Mapping):
        return None
    total = weights = 0.0
    for kind, (layers, each) in kinds.items():
        for layer in layers:
            name = _first_match(named, kind, layer)
            algorithm = None if name is None else _ALGORITHMS.get(_algorithm(named[name]))
            if algorithm is not None:
                total += each * algorithm.bits
                weights += each
    return total / weights if weights else None


def _algorithm(module: object) -> str:
    return str(module.get("quant_algo")).upper() if isinstance(module, Mapping) else ""


def _names(kind: str, layer: int) -> Iterator[str]:
    """Of modules of that kind in that layer."""
    return (f"{root}.{layer}.{module}" for root in _ROOTS for module in _MODULES[kind])


def _first_match(named: Mapping[str, Any], kind: str, layer: int) -> str | None:
    """A module of that kind in that layer, by its own name or that of one inside."""
    return next((name for name in _names(kind, layer) if name in named), None)


def _targets(stored: Mapping[str, Any]) -> list[str]:
    """What compressed-tensors names as quantised, where that is not every linear layer."""
    groups = stored.get("config_groups")
    if not isinstance(groups, Mapping):
        return []
    names = [
        str(name)
        for group in groups.values()
        if isinstance(group, Mapping)
        for name in group.get("targets") or ()
    ]
    return [] if any(name in ("Linear", "MoEGMM", "FusedMoE") for name in names) else names


def _matched(patterns: Sequence[str], kind: str, layer: int) -> bool:
    """Whether a module of that kind in that layer, or what holds it, is among the patterns."""
    if not patterns:
        return False
    plain, opened = _compiled(tuple(patterns))
    for name in _names(kind, layer):
        if opened is not None and opened.match(name):
            return True
        parts = name.split(".")
        heads = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
        module = name.partition(f".{layer}.")[2]
        if not plain.isdisjoint(heads) or not plain.isdisjoint((module, parts[-2], parts[-1])):
            return True
    return False


@functools.lru_cache(maxsize=8)
def _compiled(patterns: tuple[str, ...]) -> tuple[frozenset[str], re.Pattern[str] | None]:
    """Names as they stand, and one pattern of all globs and regular expressions."""
    plain, opened = [], []
    for pattern in patterns:
        if pattern.startswith("re:"):
            opened.append(f"(?:{pattern[3:]})")
        elif any(c in pattern for c in "*?["):
            opened += [fnmatch.translate(pattern), fnmatch.translate(f"{pattern}.*")]
        else:
            plain.append(pattern)
    try:
        whole = re.compile("|".join(opened)) if opened else None
    except re.error:
        whole = None
    return frozenset(plain), whole


def _modelopt(stored: Mapping[str, Any]) -> Quantization | None:
    algorithm = stored.get("quant_algo")
    if algorithm is None and (groups := stored.get("config_groups")):
        return _compressed_tensors({"config_groups": groups}, modelopt=True)
    if algorithm is None:
        return None
    name = str(algorithm).upper()
    if name == "MIXED_PRECISION":
        layers = stored.get("quantized_layers")
        algorithms = set(map(_algorithm, layers.values() if isinstance(layers, Mapping) else ()))
        # The widest of them: what is stored in fewer bits takes less.
        found = [_ALGORITHMS[a] for a in algorithms if a in _ALGORITHMS]
        if found:
            return max(found, key=lambda q: q.bits)
    if name not in _ALGORITHMS:
        names = ", ".join(sorted(_ALGORITHMS))
        raise ConfigError(f"quantization: modelopt's {name!r} is not known; one of {names}")
    return _ALGORITHMS[name]


def _compressed_tensors(stored: Mapping[str, Any], *, modelopt: bool = False) -> Quantization:
    groups = stored.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        first = next(iter(groups.values()))
        weights = first.get("weights") if isinstance(first, Mapping) else None
        if isinstance(weights, Mapping):
            bits = _positive(weights.get("num_bits", 8), "num_bits")
            group = int(weights.get("group_size") or 0)
            if bits == 4 and weights.get("type") == "float":
                return NVFP4 if modelopt or group == 16 else MXFP4
            if modelopt:
                return Quantization("modelopt", bits, max(0, group) if bits < 8 else 0)
            block = weights.get("block_structure")
            if isinstance(block, list | tuple) and len(block) == 2:
                whole = (int(block[0]), int(block[1]))
                return Quantization("compressed-tensors", bits, block=whole)
            zero_points = bits < 8 and not weights.get("symmetric", True)
            return Quantization("compressed-tensors", bits, max(0, group), zero_points)
    raise ConfigError("quantization_config: compressed-tensors without config_groups.*.weights")


def _named(name: str) -> Quantization | None:
    base = name.casefold().removesuffix("_marlin")
    if base not in _NAMED:
        raise ConfigError(f"quantization {name!r} is not known; one of {', '.join(sorted(_NAMED))}")
    return _NAMED[base]


def _positive(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"quantization_config: {what} is {value!r}, it must be above 0")
    return float(value)
