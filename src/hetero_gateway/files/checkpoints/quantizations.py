"""How a checkpoint's matrices are stored: from a name, quantization_config or hf_quant_config.json.

Also which of the layers it leaves wide: lists of module names, globs or patterns, compared with the
usual names of such modules. quantizations.json has

    named       storages by name; four bits in groups of 128, as published checkpoints have them.
                NVFP4 has a scale of eight bits for each 16 of four bits, MXFP4 for each 32
    algorithms  the same by ModelOpt's quant_algo
    left_out    where checkpoints list what they leave wide
    modules, roots   the names of each kind of module in the families; preceded by one of the
                roots, with the layer's number
    suffixes    of quantised checkpoints' names, and their storage
    tuned       suffixes of tuned versions, whose shape is that of the model
    padded      width of the MLP if a publisher's AWQ and GPTQ checkpoints have a wider one, so that
                groups of 128 divide evenly
"""

import fnmatch
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.package_data import document
from hetero_gateway.planner.model_shape import Quantization

TABLES: Final[dict[str, Any]] = document("checkpoints/quantizations.json")


def _stored(fields: dict[str, Any] | None) -> Quantization | None:
    if fields is None:
        return None
    block = fields.get("block")
    return Quantization(**fields | {"block": tuple(block) if block else None})


_NAMED: Final = {name: _stored(fields) for name, fields in TABLES["named"].items()}
# ModelOpt's quant_algo.
_ALGORITHMS: Final = {
    name: stored for name, fields in TABLES["algorithms"].items() if (stored := _stored(fields))
}
NVFP4, MXFP4 = _ALGORITHMS["NVFP4"], Quantization("mxfp4", 4.25)


def quantization_of(stored: str | Mapping[str, Any]) -> Quantization | None:
    """From a name, or from the quantization_config of a checkpoint.

    Raises:
        ConfigError: an unknown method, or an unknown description of one.
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
    """A quantization_config, or the content of hf_quant_config.json; empty if there is neither."""
    inner = stored.get("quantization", stored) if isinstance(stored, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def kv_dtype_of(stored: str | Mapping[str, Any] | None) -> str:
    """The checkpoint's dtype of the KV cache; "auto": not stated."""
    scheme = stored.get("kv_cache_scheme") if isinstance(stored, Mapping) else None
    if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
        return "fp8"
    algorithm = _inner(stored).get("kv_cache_quant_algo")
    return "fp8" if str(algorithm).upper() == "FP8" else "auto"


def left_wide(stored: object, kind: str, layers: Iterable[int]) -> int:
    """How many modules of a kind in some layers the checkpoint leaves wide.

    Args:
        kind: "attention", "state", "mlp", "moe", "moe beside" (an MLP, gemma-4) or "shared".
    """
    inner = _inner(stored)
    named = inner.get("quantized_layers")
    if isinstance(named, Mapping):  # others are wide
        return sum(_first_match(named, kind, layer) is None for layer in layers)
    patterns = [
        str(name)
        for key in TABLES["left_out"]
        for name in inner.get(key) or ()
        if isinstance(name, str)
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
    """The names of modules of that kind in that layer."""
    roots, modules = TABLES["roots"], TABLES["modules"][kind]
    return (f"{root}.{layer}.{module}" for root in roots for module in modules)


def _first_match(named: Mapping[str, Any], kind: str, layer: int) -> str | None:
    """A module of that kind in that layer, by its own name or that of an inner one."""
    return next((name for name in _names(kind, layer) if name in named), None)


def _targets(stored: Mapping[str, Any]) -> list[str]:
    """The modules that compressed-tensors names as quantised, if not every linear layer."""
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
    """Whether a module of that kind in that layer, or its parent, is among the patterns."""
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
    """Literal names, and one pattern of all globs and regular expressions."""
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
        # The widest of them: storage with fewer bits takes less.
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
