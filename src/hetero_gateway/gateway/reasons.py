"""One plain sentence on why a decision fell as it did, for the dashboard and ``explain``.

Each policy looks at something else, so the sentence names what it looked at; the figures are those
of the decision itself. Nothing here chooses anything.
"""

from __future__ import annotations

import math

import numpy as np

from hetero_gateway.core.cost_model import FloatArray
from hetero_gateway.core.scheduler import Decision

# What they add to a load differs, the rule does not: the lowest load with the request on it wins.
_LOWEST_LOAD = frozenset(("min-max", "memory-based", "least-work"))
_BLIND = frozenset(("round-robin", "weighted-round-robin"))
_MOST_NAMED = 3


def decision_reason(policy: str, decision: Decision, got: str = "got it") -> str:
    """Why ``policy`` chose what it chose, in one sentence; ``got`` is its verb."""
    return f"{decision.instance_id} {got}: {_because(policy, decision)}."


def number(value: float, digits: int = 3) -> str:
    """A figure to read: so many digits that count, never an exponent."""
    exponent = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(12, max(0, digits - 1 - exponent))}f}"


def _because(policy: str, decision: Decision) -> str:
    c = decision.candidates
    after = c.load + decision.charges
    if len(c.ids) == 1:
        out = [f"{spec.instance_id}: {why}" for spec, why in decision.excluded]
        more = f" and {len(out) - _MOST_NAMED} more" if len(out) > _MOST_NAMED else ""
        left_out = f" ({'; '.join(out[:_MOST_NAMED])}{more})" if out else ""
        return f"no other instance can take the request{left_out}"
    if policy in _LOWEST_LOAD:
        ours, theirs = "its load would be {}, the lowest", "{} would be at {}"
        return _lowest(decision, after, ours, theirs)
    if policy == "paper":
        ours = "the highest load of all would then be {}, the lowest possible"
        tie = "of equals the first in the list gets it"
        return _lowest(decision, _highest_load(c.load, after), ours, "{} would make it {}", tie=tie)
    if policy == "least-requests":
        ours = "it had {} requests in flight, the fewest"
        return _lowest(decision, c.in_flight, ours, "{} had {}", whole=True)
    if policy == "capacity-weighted":
        ours = "its requests in flight over its capacity would be {} s, the lowest"
        return _lowest(decision, (c.in_flight + 1) / c.capacity, ours, "{} would be at {} s")
    if policy == "power-of-two":
        return "of two drawn at random it had the fewer requests in flight for its capacity"
    if policy in _BLIND:
        return f"{policy} does not look at the load"
    if policy == "single-instance":
        return "single-instance sends everything to one instance"
    return f"policy {policy} chose it; its load would be {number(after[decision.position])}"


def _lowest(
    decision: Decision,
    scores: FloatArray,
    ours: str,
    theirs: str,
    *,
    tie: str = "of equals one is drawn at random",
    whole: bool = False,
) -> str:
    """The sentence of a rule that takes the lowest of ``scores``, beside the nearest other one."""
    mine = float(scores[decision.position])
    others = scores.copy()
    others[decision.position] = math.inf
    nearest = int(others.argmin())
    other = float(others[nearest])
    digits = 3
    # Two figures that look the same would explain nothing.
    while digits < 12 and mine != other and number(mine, digits) == number(other, digits):
        digits += 1
    shown = [str(int(v)) if whole else number(v, digits) for v in (mine, other)]
    if mine == other:
        level = int((scores == mine).sum()) - 1
        return f"{ours.format(shown[0])}, as {level} other{'s' * (level > 1)}; {tie}"
    name = decision.candidates.ids[nearest]
    who = name if scores.size == 2 else f"the next, {name},"
    return f"{ours.format(shown[0])}; {theirs.format(who, shown[1])}"


def _highest_load(load: FloatArray, after: FloatArray) -> FloatArray:
    """For each candidate, the highest load of all if it were chosen: what Algorithm 2 compares."""
    highest = int(load.argmax())
    others = np.full(load.size, load[highest])
    others[highest] = np.partition(load, -2)[-2]
    result: FloatArray = np.maximum(others, after)
    return result
