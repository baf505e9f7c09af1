"""One plain sentence on why a decision fell as it did, for the dashboard and ``explain``.

Each policy looks at something else, so the sentence names what it looked at; the figures are those
of the decision itself. Nothing here chooses anything.
"""

from __future__ import annotations

import math

import numpy as np

from hetero_gateway.core.costs.cost_model import FloatArray
from hetero_gateway.core.scheduling.decision import Decision

# What they add to a load differs, the rule does not: the lowest load with the request on it wins.
_LOWEST_LOAD = frozenset(("min-max", "memory-based", "least-work"))
_BLIND = frozenset(("round-robin", "weighted-round-robin"))
_MOST_NAMED = 3


# Shorter waits in the gateway are not worth a word.
_NO_WAIT_S = 0.01


def decision_reason(
    policy: str, decision: Decision, got: str = "got it", waited_s: float = 0.0
) -> str:
    """Why ``policy`` chose what it chose, in one sentence; ``got`` is its verb.

    ``waited_s``: how long the request was in the gateway's queue before.
    """
    after = f" after {number(waited_s)} s in the queue" if waited_s >= _NO_WAIT_S else ""
    return f"{decision.instance_id} {got}{after}: {_because(policy, decision)}."


def waiting_reason(policy: str, decision: Decision, waiting: int) -> str:
    """Why a request would wait in the gateway, in one sentence; ``waiting``: how many do now."""
    estimates = decision.candidates.estimates
    assert estimates is not None
    if decision.waits and not estimates.room.any():
        why = "no instance has room now"
    elif decision.waits:
        why = "no instance that has room would be done as soon as one that has none"
    else:
        why = f"{waiting} request{'s' * (waiting != 1)} came before it"
    return f"It would wait: {why}; {decision.instance_id} is the best for it as things are."


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
    if policy == "finish-time":
        return _soonest(decision)
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


def _soonest(decision: Decision) -> str:
    """finish-time: the lowest cost among those with room."""
    estimates, position = decision.candidates.estimates, decision.position
    assert estimates is not None
    if not estimates.room.any():
        return "no instance has room"
    if estimates.room.sum() == 1 and estimates.room[position]:
        return "no other instance has room"
    cost = np.where(estimates.room, estimates.cost_s, math.inf)
    outlook = decision.candidates.outlook
    if outlook is not None and not outlook.profiled:
        ours = "it would have {} sequences for its weight, the fewest"
        return _lowest(decision, cost, ours, "{} would have {}")
    if cost.min() < cost[position]:
        late = decision.candidates.ids[int(cost.argmin())]
        return f"it will be done soonest; {late} is left out, as the end of a batch is near"
    mine_s = number(float(estimates.latency_s[position]))
    delay_s = number(float(estimates.delay_s[position]))
    price_s = float(estimates.memory_price_s[position])
    memory = f", with {number(price_s)} s for scarce memory," if price_s else ""
    ours = (
        f"done in {mine_s} s and holding others up for {delay_s} s{memory} costs {{}} s, the lowest"
    )
    told = _lowest(decision, cost, ours, "{} would cost {} s")
    if outlook is not None and outlook.stands_in:
        told += " (where there is no profile, by observed speed)"
    return told


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
