"""Whether two names mean the same model, as far as names can tell.

A served name may be anything ("chat"), a path, or a checkpoint's full name with its tuning and its
quantisation ("meta-llama/Meta-Llama-3-8B-Instruct"); a profile names the model itself
("Llama-3-8B"). Names that do not identify a model are left undecided.
"""

from __future__ import annotations

import re

# "8b", "0.5B", "125m", and "8x7b" of a mixture of experts; not "4bit".
_SIZE = re.compile(r"(?<![a-z0-9.])(?:(\d{1,3})x)?(\d{1,4}(?:\.\d{1,3})?)([bm])(?![a-z0-9])")
_MILLIONS = {"b": 1000.0, "m": 1.0}
# Sizes in names are rounded, and not always alike ("1.5b", "1.54b").
_SAME_SIZE = 1.05
_FAMILIES = (
    "bloom", "command", "deepseek", "falcon", "gemma", "glm", "granite", "internlm", "kimi",
    "llama", "minimax", "mistral", "mixtral", "nemotron", "olmo", "opt", "phi", "qwen", "starcoder",
    "yi",
)  # fmt: skip
_FAMILY = re.compile(rf"(?<![a-z])(?:code)?({'|'.join(_FAMILIES)})(?![a-z])")


def same_model(name: str, other: str) -> bool | None:
    """Whether both name one model, by family and number of parameters; None: undecided.

    Tuned and quantised versions are the same model, and so are minor versions: a profile of
    Llama-3-8B fits Llama-3.1-8B-Instruct. A distilled model has the families of both.
    """
    sizes = _millions(name), _millions(other)
    families = _families(name), _families(other)
    known = None
    if sizes[0] and sizes[1]:
        if max(sizes) > _SAME_SIZE * min(sizes):
            return False
        known = True
    if families[0] and families[1]:
        return bool(families[0] & families[1]) and (known or None)
    return known


def _millions(name: str) -> float:
    """The parameters stated in a name, in millions; 0: none. Of several sizes, the first: the
    total."""
    found = _SIZE.search(name.casefold().replace("_", "-"))
    return 0.0 if found is None else int(found[1] or 1) * float(found[2]) * _MILLIONS[found[3]]


def _families(name: str) -> frozenset[str]:
    return frozenset(_FAMILY.findall(name.casefold()))
