"""Families of models by model_type: the data of families.json.

    plain        decoders like Llama's in all that counts here
    others       families with rules of their own
    ungated      their MLP has two matrices
    fourfold     their MLP is four times the hidden size if the file does not say
    all_experts  their intermediate_size is that of one expert
    state_only   all their layers keep a state
    refused      known to have another structure than is counted here, and why
    defaults, nested_defaults   values that a config.json leaves out because its family's
                 configuration class has them; nested: in a text_config, which also contains only
                 differences
    parts        the same for encoders, by the whole file's model_type and the part's name
    undescribed  weights of encoders that a config.json does not describe, of the published model

Some publishers write only differences from the class's defaults: gemma-3's file has no number of
attention heads. The figures are those of transformers' configuration classes (5.19), with which
vLLM reads a config.json, except for Granite: IBM publishes tied models, the class says untied.
Families whose published files are complete have no defaults, so that a missing field is an error.
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
    if isinstance(own, str):  # the name of a family with the same defaults
        own = _TOLD["defaults"][own]
    return {**(_TOLD["nested_defaults"].get(family, {}) if nested else {}), **own}


def part_defaults(outer: str, key: str) -> dict[str, Any]:
    """The fields that a part's own object leaves out; ``outer``: model_type of the whole file."""
    found: dict[str, Any] = _TOLD["parts"].get(outer, {}).get(key, {})
    return found
