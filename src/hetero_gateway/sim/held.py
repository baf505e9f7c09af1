"""The highest load at which a given share of requests is within the limits: goodput. Pure."""

from collections.abc import Callable, Sequence

# The shares that ``simulate --held`` looks for.
SHARES = (0.90, 0.95, 0.99)
# Loads are tried in hundredths of the bound: finer than a few seeds can tell apart. No load far
# above the bound is held, except by short runs, which are over before a queue has grown.
_STEP = 0.01
_MOST = 2.0
# How far from a likely answer the first tries are, in steps.
_NEAR_STEPS = 4


def held_loads(
    share_at: Callable[[float], float],
    shares: Sequence[float] = SHARES,
    *,
    most: float = _MOST,
    step: float = _STEP,
    likely: float | None = None,
) -> tuple[float, ...]:
    """For each of ``shares``: the highest load that has it, in steps from 0 to ``most``.

    Args:
        share_at: the share of the requests that are within their limits at a load, 0 to 1. It
            is assumed to fall with the load, and called for each load once.
        most: the highest load to try, above 0.
        step: of the tried loads, above 0.
        likely: a rough expectation, which saves tries; None: unknown.
    """
    known: dict[int, float] = {}
    most_steps = round(most / step)
    first = None if likely is None else min(max(round(likely / step), 1), most_steps)

    def share(number: int) -> float:
        if number not in known:
            known[number] = share_at(number * step)
        return known[number]

    return tuple(_highest(share, wanted, most_steps, first) * step for wanted in shares)


def _highest(
    share: Callable[[int], float], wanted: float, most_steps: int, first: int | None
) -> int:
    """The last step that has the share, by bisection; at 0 there is no load to fail."""
    holds, fails = 0, most_steps + 1
    width, middle = _NEAR_STEPS, (holds + fails) // 2 if first is None else first
    while fails - holds > 1:
        if share(middle) >= wanted:
            holds = middle
        else:
            fails = middle
        middle = (holds + fails) // 2
        if first is not None:
            # Ever further from the likely one, until the answer lies between two tries.
            if holds == 0:
                middle = max(middle, fails - width)
            elif fails > most_steps:
                middle = min(middle, holds + width)
            width *= 2
    return holds
