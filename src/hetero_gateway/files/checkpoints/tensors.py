"""A checkpoint's tensors: from the headers of its .safetensors files, or their index.

A file begins with eight bytes, the length of a JSON object that has a dtype and a shape for each
name; no weight is read. A file that is cut after its header works as well. Tensors that vLLM does
not load are ignored here: layers that guess further tokens, parts that speak, tables of positions,
and an output layer that is tied.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.whole_file import named, read_json

INDEX: Final = "model.safetensors.index.json"
# The format's own bound on a header, and more files than any checkpoint has.
MOST_HEADER_BYTES, MOST_FILES = 100_000_000, 2000
_LENGTH_BYTES: Final = 8
_POINTER: Final = b"version https://git-lfs"
_BITS: Final = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16,
    "BF16": 16, "I16": 16, "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "I8": 8, "U8": 8, "BOOL": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_FLOATS: Final = {"F64", "F32", "F16", "BF16"}
# The decoder's layers, and not those of an encoder beside it.
_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_ENCODER: Final = re.compile(
    r"(?:^|\.)(?:vision\w*|visual|audio\w*|image\w*|qformer|\w*projector|siglip\w*|resampler\w*|"
    r"connector|aligner|embed_audio|embed_vision|sam_model|vit)\."
)
_EXPERT: Final = re.compile(r"\.(?!shared_)(?:\w+_)?experts?\.")
_NOT_LOADED: Final = re.compile(
    r"^(?:talker|code2wav|token2wav|(?:model\.)?mtp\w*)\.|rotary_emb\.inv_freq$"
)
_OUTPUT: Final = re.compile(
    r"^(?:(?:model|language_model|transformer|thinker)\.)*(?:lm_head|output|embed_out)\.weight$"
)


@dataclass(frozen=True, slots=True)
class Tensors:
    """The amounts that vLLM loads of a checkpoint.

    Args:
        layer_weights: of the decoder's layers, without the experts. expert_weights: of these.
        other_weights: all others.
        float_bits: whether nothing is narrower than 16 bits, so that the counts are parameters.
        stored_bytes: of all of it, as stored.
        exact: by the tensors; else only ``stored_bytes`` is known, by the index.
    """

    layer_weights: int
    expert_weights: int
    other_weights: int
    float_bits: bool
    stored_bytes: int
    exact: bool = True

    @property
    def parameters(self) -> int:
        return self.layer_weights + self.expert_weights + self.other_weights


def holds_tensors(directory: Path) -> bool:
    """Whether there is anything that ``read_tensors`` would read."""
    return (directory / INDEX).is_file() or any(directory.glob("*.safetensors"))


def read_tensors(directory: Path, *, layers: int, tied: bool) -> Tensors | None:
    """The tensors next to a config.json; None: no headers, and no sufficient index.

    Args:
        layers: of the decoder; those after them guess further tokens.
        tied: the output layer is the embedding table.

    Raises:
        ConfigError: a file that is not a safetensors file, or an index that is not one.
    """
    index = directory / INDEX
    shards: dict[str, Any] | None = None
    document: dict[str, Any] = {}
    if index.is_file():
        document = read_json(index)
        shards = document.get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ConfigError(f"{index}: weight_map must be an object that says where tensors are")
        names = sorted({str(shard) for shard in shards.values()})
        if any(Path(name).name != name for name in names):
            raise ConfigError(f"{index}: weight_map must name files beside it")
        files = [directory / name for name in names]
    else:
        # Mistral's own names are a second copy.
        files = sorted(p for p in directory.glob("*.safetensors") if "consolidated" not in p.name)
    if len(files) > MOST_FILES:
        raise ConfigError(f"{directory}: {len(files)} files, at most {MOST_FILES} are read")
    headers = [_header(path) if path.is_file() else None for path in files]
    if headers and None not in headers:
        tensors = (t for header in headers if header is not None for t in header.items())
        return _counted(tensors, layers, tied)
    size = (document.get("metadata") or {}).get("total_size")
    if shards is None or not isinstance(size, int | float) or isinstance(size, bool) or size <= 0:
        return None
    if not all(_loaded(str(name), layers, tied) for name in shards):
        return None  # the part that is not loaded is unknown
    return Tensors(0, 0, 0, False, int(size), exact=False)


def _header(path: Path) -> Mapping[str, tuple[str, int]] | None:
    """(dtype, elements) by name; None: not the file itself, but its Git LFS pointer."""
    with named(path, "read"), path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        if _POINTER.startswith(start) and len(start) == _LENGTH_BYTES:
            return None
        length = int.from_bytes(start, "little")
        if len(start) < _LENGTH_BYTES or not 2 <= length <= MOST_HEADER_BYTES:
            raise ConfigError(f"{path}: not a safetensors file: a header of {length} bytes")
        text = file.read(length)
    if len(text) < length:
        raise ConfigError(f"{path}: not a safetensors file: it ends within its header")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: its header is not JSON: {error}") from error
    if not isinstance(told, dict):
        raise ConfigError(f"{path}: its header must be a JSON object")
    told.pop("__metadata__", None)
    return {str(name): _entry(path, name, entry) for name, entry in told.items()}


def _entry(path: Path, name: str, entry: Any) -> tuple[str, int]:
    dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else ("", 0)
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ConfigError(f"{path}: {name!r:.80} has dtype {dtype!r:.40}, which is not known")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**48 for n in shape):
        raise ConfigError(f"{path}: {name!r:.80} has no shape of whole numbers")
    return dtype, math.prod(shape)


def _loaded(name: str, layers: int, tied: bool) -> bool:
    if _NOT_LOADED.search(name) or (tied and _OUTPUT.search(name)):
        return False
    layer = None if _ENCODER.search(name) else _LAYER.search(name)
    return layer is None or int(layer[1]) < layers


def _counted(tensors: Iterator[tuple[str, tuple[str, int]]], layers: int, tied: bool) -> Tensors:
    layer_weights = expert_weights = other = bits = 0
    wide = True
    for name, (dtype, elements) in tensors:
        if not _loaded(name, layers, tied):
            continue
        bits += elements * _BITS[dtype]
        # Counters and the like are of no weight.
        wide = wide and (dtype in _FLOATS or elements < 1024)
        if _ENCODER.search(name) or not _LAYER.search(name):
            other += elements
        elif _EXPERT.search(name):
            expert_weights += elements
        else:
            layer_weights += elements
    return Tensors(layer_weights, expert_weights, other, wide, bits // 8)
