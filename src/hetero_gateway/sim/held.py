"""The highest load at which so many requests are within their limits. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# What ``simulate --held`` looks for.
SHARES = (0.90, 0.95, 0.99)
# Loads are tried in hundredths of the bound: finer than what a few seeds can tell apart. No load
# is held far above the bound, but by short runs, which are over before a queue has grown.
_STEP = 0.01
_MOST_STEPS = 200


def held_loads(
    share_at: Callable[[float], float], shares: Sequence[float] = SHARES
) -> tuple[float, ...]:
    """For each of ``shares``: the highest load that has it, in hundredths, 0 to 2.

    Args:
        share_at: the share of the requests that are within their limits at a load, 0 to 1. It is
            taken to fall with the load, and asked for each load once.
    """
    known: dict[int, float] = {}

    def share(step: int) -> float:
        if step not in known:
            known[step] = share_at(step * _STEP)
        return known[step]

    return tuple(_highest(share, wanted) * _STEP for wanted in shares)


def _highest(share: Callable[[int], float], wanted: float) -> int:
    """The last step that has the share, by bisection; at 0 there is no load to fail."""
    holds, fails = 0, _MOST_STEPS + 1
    while fails - holds > 1:
        middle = (holds + fails) // 2
        if share(middle) >= wanted:
            holds = middle
        else:
            fails = middle
    return holds
