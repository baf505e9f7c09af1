"""Models by name: model_cards.csv and model_configs.json have the data of their config.json."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

from hetero_gateway.core.nearest import folded, nearest_names
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.checkpoints.quantizations import TABLES, quantization_of
from hetero_gateway.files.checkpoints.shape import dtype_name, model_from_config
from hetero_gateway.files.package_data import document, table
from hetero_gateway.planner.model_shape import ModelShape

# For models whose layers differ, the config.json; a name refers to the one of that name.
_CONFIGS: Final[dict[str, Any]] = document("model_configs.json")
MODEL_CARDS: Final[dict[str, ModelShape]] = {
    row["name"]: ModelShape(
        row["name"], **{key: json.loads(row[key]) for key in row if key != "name" and row[key]}
    )
    for row in table("model_cards.csv")
} | {
    name: model_from_config(_CONFIGS[of] if isinstance(of, str) else of, name=name)
    for name, of in _CONFIGS.items()
}
_FOLDED: Final = {folded(name): name for name in MODEL_CARDS}
_PADDED: Final = ("awq", "gptq")
_TUNED: Final = frozenset(TABLES["tuned"])
_STORED: Final[dict[str, str]] = TABLES["suffixes"]


def says_storage(name: str) -> bool:
    """Whether a checkpoint's name ends with its storage: "…-AWQ", "…-FP8-dynamic"."""
    return any(part in _STORED for part in name.rsplit("/", 1)[-1].casefold().split("-"))


def model_card(
    name: str, *, dtype: str | None = None, quantization: str | Mapping[str, Any] | None = None
) -> ModelShape:
    """The built-in card of that name; case, an organisation and "-Instruct" do not matter.

    Args:
        name: "Qwen/Qwen2.5-72B-Instruct-AWQ" is Qwen2.5-72B, stored as AWQ.
        dtype, quantization: as of ``model_from_config``; None: bfloat16, and the name's
            storage, else the publisher's (gpt-oss: mxfp4, DeepSeek-V3: fp8).

    Raises:
        ConfigError: with the nearest names, or for an unknown dtype or method.
    """
    short = name.rsplit("/", 1)[-1]
    parts = short.casefold().split("-")
    plain = [part for part in parts if part not in _TUNED and part not in _STORED]
    undated = [part for part in plain if not (part.isdigit() and len(part) == 4)]
    tried = (short, "-".join(plain), "-".join(undated))
    known = next((_FOLDED[folded(x)] for x in tried if folded(x) in _FOLDED), None)
    if known is None:
        raise ConfigError(
            f"model {name!r} has no built-in card; the nearest: "
            f"{', '.join(nearest_names(short, MODEL_CARDS))}; or give its config.json"
        )
    card = MODEL_CARDS[known]
    if quantization is None:
        stored = [_STORED[part] for part in parts if part in _STORED]
        # "GPTQ-Int8": the bits count.
        quantization = "int8" if "int8" in stored else next(iter(stored), None)
        if quantization == "fp8" and name.casefold().startswith("qwen/"):
            quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    card = dataclasses.replace(card, dtype=dtype_name(dtype, "bfloat16"))
    if quantization is None:
        return card
    found = quantization_of(quantization)
    own = card.quantization
    if own is not None and found is not None and own.method == found.method:
        return card  # the publisher's own, with its blocks and wide parts
    padded = "gptq" in parts or (found is not None and found.method in _PADDED)
    if padded and known in TABLES["padded"]:
        card = dataclasses.replace(card, intermediate=TABLES["padded"][known])
    return dataclasses.replace(card, quantization=found, wide_weights=0)
