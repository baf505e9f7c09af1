"""Suggestions for a name that does not exist, for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher


def folded(name: str) -> str:
    """A name in the form for comparison: lower case, letters and digits only."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def nearest_names(
    name: str, names: Iterable[str], count: int = 3, *, least: float = 0.0
) -> list[str]:
    """The ``count`` names most like ``name``, best first; ties in alphabetical order.

    Args:
        least: minimum similarity, 0 to 1: at 0.6 a name has a letter or two wrong.
    """
    wanted = folded(name)

    def likeness(candidate: str) -> float:
        known = folded(candidate)
        whole = SequenceMatcher(None, wanted, known).ratio()
        # "H100" is a complete prefix of "H100-80GB-SXM", though less than half of its letters.
        return whole + (1.0 if wanted and known.startswith(wanted) else 0.0)

    found = {known: likeness(known) for known in names}
    close = [known for known, value in found.items() if value >= least]
    return sorted(close, key=lambda known: (-found[known], known))[:count]
