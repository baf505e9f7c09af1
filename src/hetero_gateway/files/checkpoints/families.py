"""Families of models by model_type: what families.json says of them.

    plain        decoders that are like Llama's in all that counts here
    others       those that are read by rules of their own
    ungated      whose MLP has two matrices
    fourfold     whose MLP is four times the hidden size where the file does not say
    all_experts  where intermediate_size is that of one expert
    state_only   whose layers all keep a state
    refused      known to be of another build than what is counted here, and why
    defaults, nested_defaults   what a config.json leaves out because its family's configuration
                 class has it; nested: in a text_config, which is written as a difference, too
    parts        the same of encoders, by the whole file's model_type and the part's name
    undescribed  weights of encoders that a config.json does not describe, of the published model

Some publishers write only what differs from the defaults of the class: gemma-3's file has no number
of attention heads. The figures are those of transformers' configuration classes (5.19), which vLLM
reads a config.json with, but for Granite: IBM publishes tied models, the class says untied.
Families whose published files are complete have no defaults, so that a field that is missing there
is an error.
"""

from collections.abc import Mapping
from typing import Any, Final

from hetero_gateway.files.package_data import document

_TOLD: Final[dict[str, Any]] = document("checkpoints/families.json")
UNGATED, FOURFOLD, ALL_EXPERTS, STATE_ONLY = (
    frozenset(_TOLD[kind]) for kind in ("ungated", "fourfold", "all_experts", "state_only")
)
KNOWN: Final = UNGATED | ALL_EXPERTS | STATE_ONLY | {*_TOLD["plain"], *_TOLD["others"]}
REFUSED: Final[Mapping[str, str]] = _TOLD["refused"]
UNDESCRIBED: Final[Mapping[str, int]] = _TOLD["undescribed"]


def defaults_of(family: str, *, nested: bool) -> dict[str, Any]:
    """The fields that a config.json of this family leaves out."""
    own = _TOLD["defaults"].get(family, {})
    if isinstance(own, str):  # the name of the family that has the same
        own = _TOLD["defaults"][own]
    return {**(_TOLD["nested_defaults"].get(family, {}) if nested else {}), **own}


def part_defaults(outer: str, key: str) -> dict[str, Any]:
    """The fields that a part's own object leaves out; ``outer``: model_type of the whole file."""
    found: dict[str, Any] = _TOLD["parts"].get(outer, {}).get(key, {})
    return found
