"""Why a candidate loses: one line from figures, never a rule of thumb.

Per accelerator, an instance type makes (batch / t) / step tokens per second. So against another
type on the same accelerators it loses by fewer sequences on each accelerator, or by longer steps;
and each of the two has a reason that can be read off: what keeps the batch from growing, how often
the weights are held, and the part of a step that more accelerators do not make shorter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from hetero_gateway.planner.goals import Goals
from hetero_gateway.planner.layouts import describe, together
from hetero_gateway.planner.plan import Candidate, InstanceType, Layout, Machine
from hetero_gateway.planner.sizes import as_size
from hetero_gateway.sim.alone import Alone

Types = Mapping[tuple[str, int], InstanceType]
AloneByType = Mapping[tuple[str, int], Alone]

# Below this a difference is not told as a cause.
_NOTABLE = 0.9
# A whole system that makes less than this share of what its instances do alone: the policy's loss.
_KEPT = 0.95


def why_not(
    candidate: Candidate,
    best: Candidate,
    machines: Mapping[str, Machine],
    types: Types,
    alone: AloneByType,
    goals: Goals,
) -> str:
    """One line on why ``candidate`` is not the best."""
    parts = []
    if candidate.simulated is None:
        parts.append(_ruled_out(candidate, best, goals))
    elif goals.at_goodput and candidate.goodput_per_s is None:
        parts.append(f"keeps {goals.limits} at no rate")
    elif candidate.holds is False:
        parts.append(_not_held(candidate, goals))
    elif goals.name == "goodput" and candidate.goodput_per_s and best.goodput_per_s:
        parts.append(_less_goodput(candidate.goodput_per_s, best.goodput_per_s))
    elif goals.name == "fewest" and candidate.accelerators > best.accelerators:
        parts.append(f"{candidate.accelerators} accelerators, where {best.accelerators} will do")
    elif goals.name == "cost" and candidate.usd_per_million_tokens is not None:
        parts.append(
            f"${candidate.usd_per_million_tokens:.3g} per million tokens, "
            f"${best.usd_per_million_tokens or math.nan:.3g} is the least"
        )
    if goals.name == "throughput":
        if candidate.simulated is not None and best.simulated is not None:
            ratio = candidate.simulated.tokens_per_s / best.simulated.tokens_per_s
            if ratio < 1:
                parts.append(f"{ratio - 1:+.1%}")
            elif candidate.holds is not False:
                parts.append("as much as the best")
        loss = _policy_loss(candidate)
        if loss:
            parts.append(loss)
        cause = _cause(candidate, best, machines, types, alone)
        if cause:
            parts.append(cause)
    return "; ".join(parts)


def relative_uncertainty(
    candidate: Candidate, machines: Mapping[str, Machine], types: Types, alone: AloneByType
) -> float:
    """Of a candidate's throughput: that of its most uncertain type."""
    used = instances(candidate, machines)
    return max((_uncertainty(types[key], alone[key]) for key in used if key in alone), default=0.0)


def lead(
    best: Candidate,
    second: Candidate,
    machines: Mapping[str, Machine],
    types: Types,
    alone: AloneByType,
) -> str | None:
    """A line when the lead over the second is within what is uncertain of it; else None.

    What both have of a type cancels out: only of the instances that one has more of does the
    error count. Errors of different types are taken to be independent.
    """
    if best.simulated is None or second.simulated is None:
        return None
    gain = best.simulated.tokens_per_s / second.simulated.tokens_per_s - 1
    more = instances(best, machines)
    more.subtract(instances(second, machines))
    error = math.hypot(
        *(
            n * alone[key].tokens_per_s * _uncertainty(types[key], alone[key])
            for key, n in more.items()
            if key in alone
        )
    )
    uncertain = error / best.alone_tokens_per_s if best.alone_tokens_per_s else 0.0
    if gain <= 0:
        return "the best and the next do as much: either may win; a measured profile would decide"
    if gain >= uncertain:
        return None
    return (
        f"the best leads the next by {gain:.1%}, and what the two do not share is uncertain by "
        f"{uncertain:.0%} of the whole: either may win; a measured profile would decide"
    )


def instances(candidate: Candidate, machines: Mapping[str, Machine]) -> Counter[tuple[str, int]]:
    """By type; one that stretches over machines counts once, within rounding."""
    found = Counter(
        (machines[i].accelerator, t) for i, layout in candidate.layouts.items() for t in layout
    )
    return Counter({key: n // as_size(key[1]).machines for key, n in found.items()})


def _uncertainty(found: InstanceType, alone: Alone) -> float:
    """Relative, of its throughput: of its step times, and of its KV where that limits it."""
    return math.hypot(
        found.time_uncertainty, found.memory.uncertainty if alone.limit == "KV" else 0.0
    )


def summary(candidate: Candidate, machines: Mapping[str, Machine]) -> str:
    """A candidate in a few words: layouts, and on how many machines of which accelerator."""
    counts = Counter(
        (machines[i].accelerator, machines[i].count, layout)
        for i, layout in candidate.layouts.items()
        if layout
    )
    kinds = {(accelerator, count) for accelerator, count, _ in counts}
    single = len({(m.accelerator, m.count) for m in machines.values()}) == 1
    parts = []
    for (accelerator, _, layout), n in sorted(counts.items()):
        name = describe(layout)
        if not (single and len(kinds) == 1):
            name = f"{accelerator}: {name}"
        parts.append(f"{name} on {n} machines" if n > 1 else name)
    return "; ".join(parts) or "nothing"


def _ruled_out(candidate: Candidate, best: Candidate, goals: Goals) -> str:
    if candidate.alone_tokens_per_s and best.alone_tokens_per_s and goals.name == "throughput":
        ratio = candidate.alone_tokens_per_s / best.alone_tokens_per_s
        return f"{ratio - 1:+.1%} by the sum of its instances alone"
    if goals.name == "cost" and candidate.usd_per_million_tokens is not None:
        return f"${candidate.usd_per_million_tokens:.3g} by its instances alone"
    if goals.at_goodput:
        return "less by what its instances hold alone"
    ratio = candidate.estimate_tokens_per_s / best.estimate_tokens_per_s
    return f"Algorithm 1 gives it {ratio:.2f} of the best"


def _less_goodput(mine_per_s: float, best_per_s: float) -> str:
    if mine_per_s >= best_per_s:
        return "as much goodput, with more accelerators"
    return f"holds {mine_per_s:.3g} requests/s, {best_per_s:.3g} is the most"


def _not_held(candidate: Candidate, goals: Goals) -> str:
    if candidate.at_rate is not None and (missed := goals.missed(candidate.at_rate)):
        return missed
    tokens_per_s = f"{candidate.tokens_per_s:.0f} tokens/s"
    return f"{goals.rate_per_s:g} requests/s are over 95 % of its {tokens_per_s}"


def _policy_loss(candidate: Candidate) -> str:
    if candidate.simulated is None or not candidate.alone_tokens_per_s:
        return ""
    kept = candidate.simulated.tokens_per_s / candidate.alone_tokens_per_s
    return f"the policy gets {kept:.0%} of what its instances do alone" if kept < _KEPT else ""


def _cause(
    candidate: Candidate,
    best: Candidate,
    machines: Mapping[str, Machine],
    types: Types,
    alone: AloneByType,
) -> str:
    """The machine whose layout loses most, and why its worst type does."""
    worst: tuple[float, str] | None = None
    for machine_id, layout in candidate.layouts.items():
        winner = best.layouts[machine_id]
        if layout == winner or not winner:
            continue
        accelerator = machines[machine_id].accelerator
        lost = _sum(accelerator, winner, alone) - _sum(accelerator, layout, alone)
        if lost > 0 and (worst is None or lost > worst[0]):
            worst = (lost, machine_id)
    if worst is None:
        return ""
    machine = machines[worst[1]]
    return compare_layouts(
        machine, candidate.layouts[machine.id], best.layouts[machine.id], types, alone
    )


def compare_layouts(
    machine: Machine, layout: Layout, winner: Layout, types: Types, alone: AloneByType
) -> str:
    """Why ``layout`` makes fewer tokens than ``winner`` of the same machine."""
    idle = machine.count - sum(layout)
    if not layout:
        return f"{machine.id} stays idle"

    def per_accelerator(t: int) -> float:
        found = alone.get((machine.accelerator, t))
        return found.tokens_per_s / as_size(t).accelerators if found else 0.0

    lead_t = max(set(winner), key=lambda t: (per_accelerator(t), -t))
    worst_t = min(set(layout), key=lambda t: (per_accelerator(t), t))
    text = ""
    if worst_t != lead_t and per_accelerator(worst_t) < per_accelerator(lead_t):
        text = _compare_types(machine.accelerator, worst_t, lead_t, types, alone, layout)
    if idle > machine.count - sum(winner):
        text = f"{idle} of {machine.count} accelerators idle" + (f", {text}" if text else "")
    return text


def _compare_types(
    accelerator: str, t: int, other: int, types: Types, alone: AloneByType, layout: Layout
) -> str:
    """Why t makes fewer tokens per accelerator than ``other``."""
    mine, its = alone.get((accelerator, t)), alone[accelerator, other]
    if mine is None:
        return f"tp{t} was ruled out by Algorithm 1"
    causes = []
    taken, others = as_size(t).accelerators, as_size(other).accelerators
    share = (mine.batch / taken) / (its.batch / others)
    if share < _NOTABLE:
        causes.append(_fewer_sequences(accelerator, t, other, types, alone, layout))
    if (mine.step_s / its.step_s) > 1 / _NOTABLE or not causes or t > other:
        fixed = types[accelerator, t].profile.constants.p8 * taken
        other_fixed = types[accelerator, other].profile.constants.p8 * others
        if t > other and fixed * _NOTABLE > other_fixed:
            causes.append(
                f"fixed part of a step {fixed * 1000:.0f} accelerator-ms, not "
                f"{other_fixed * 1000:.0f} (all-reduce, launches)"
            )
        elif mine.step_s / its.step_s > 1 / _NOTABLE:
            causes.append(f"a step takes {mine.step_s * 1000:.0f} ms, not {its.step_s * 1000:.0f}")
    if not causes:
        causes.append(
            f"{mine.tokens_per_s / taken:.0f} tokens/s an accelerator, "
            f"{its.tokens_per_s / others:.0f} at tp{other}"
        )
    return f"tp{t}: " + ", ".join(causes)


def _fewer_sequences(
    accelerator: str, t: int, other: int, types: Types, alone: AloneByType, layout: Layout
) -> str:
    mine, its = alone[accelerator, t], alone[accelerator, other]
    each, its_each = (a.batch / as_size(s).accelerators for a, s in ((mine, t), (its, other)))
    text = f"{each:.0f} sequences an accelerator, not {its_each:.0f}"
    if mine.limit == "max_num_seqs":
        return f"{text} (max_num_seqs {types[accelerator, t].profile.max_num_seqs})"
    if mine.limit == "prefill":
        return f"{text} (prefills take the time)"
    weights = sum(
        p.bytes_per_accelerator for p in types[accelerator, t].memory.parts if p.name == "weights"
    )
    copies = len(layout)
    if t < other and weights and copies > 1:
        return f"{text} (KV: the weights are held {copies} times)"
    return f"{text} (KV)"


def _sum(accelerator: str, layout: Layout, alone: AloneByType) -> float:
    sums = sum(alone[accelerator, t].tokens_per_s for t in layout if (accelerator, t) in alone)
    return sums / together(layout)
