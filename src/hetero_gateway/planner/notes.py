"""What a plan says besides its candidates, and why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetero_gateway.planner import reasons
from hetero_gateway.planner.layouts import feasible_sizes, group_machines, together
from hetero_gateway.planner.plan import Candidate, Unfit
from hetero_gateway.planner.question import Key, Question
from hetero_gateway.planner.shortlist import Shortlist
from hetero_gateway.planner.sizes import Size, as_size
from hetero_gateway.sim.alone import Alone


def plan_notes(
    question: Question, alone: Mapping[Key, Alone], candidates: Sequence[Candidate]
) -> list[str]:
    """Of an answer, best candidate first: what to know of the best one."""
    best, machines = candidates[0], {m.id: m for m in question.machines}
    notes = []
    if question.goals.name == "throughput":
        others = [c for c in candidates[1:] if c.simulated is not None]
        if others and (line := reasons.lead(best, others[0], machines, question.types, alone)):
            notes.append(line)
    for machine in question.machines:
        layout = best.layouts[machine.id]
        if layout and (idle := machine.count - sum(layout)):
            notes.append(f"{machine.id}: {idle} of {machine.count} accelerators stay idle")
    if unable := _unable(question):
        notes.append(f"no instance fits {_few(unable)}")
    used = {(machines[i].accelerator, t) for i, of in best.layouts.items() for t in of}
    notes += [line for t in {as_size(t) for _, t in used} if (line := _caution(t))]
    for accelerator, t in sorted(used):
        if question.types[accelerator, t].memory.tight:
            notes.append(
                f"{accelerator} tp{t} is tight: whether it fits hangs on the uncertainty of "
                "its memory"
            )
    return notes


def _unable(question: Question) -> list[str]:
    """The machines that no instance fits."""
    able: set[str] = set()
    for group in group_machines(question.machines):
        if feasible_sizes(group, question.types):
            able.update(group.ids)
    return [m.id for m in question.machines if m.id not in able]


def nothing_fits(unfit: Sequence[Unfit]) -> str:
    """One line: the model fits no machine, and what comes nearest to fitting."""
    if not unfit:
        return "the model fits no machine"
    nearest = min(unfit, key=lambda u: (u.shortfall_bytes <= 0, u.shortfall_bytes))
    text = f"the model fits no machine; nearest: {nearest.accelerator} tp{nearest.size}"
    text += f": {nearest.reason}"
    if nearest.remedies:
        text += f"; try {nearest.remedies[0]}"
    return text


def nothing_holds(
    question: Question,
    shortlist: Shortlist,
    rates_per_s: Mapping[Key, float],
    largest: Candidate | None = None,
) -> str:
    """One line: no set of machines holds the rate, and what they would hold.

    Args:
        rates_per_s: that instances hold alone, by type.
        largest: what was tried with the most machines.
    """
    goals = question.goals
    if not rates_per_s:
        return f"no instance of any machine keeps {goals.limits} at any rate"
    limits = f" within {goals.limits}" if goals.has_limits else ""
    total = sum(
        g.machines
        * max(
            (
                sum(rates_per_s.get((g.accelerator, t), 0.0) for t in layout) / together(layout)
                for layout in shortlist.worths[g]
            ),
            default=0.0,
        )
        for g in shortlist.groups
    )
    text = f"nothing holds {goals.rate_per_s or 0.0:g} requests/s{limits}: all machines together "
    text += f"hold about {total:.3g}"
    if largest is not None and largest.at_rate is not None:
        text += f" ({goals.missed(largest.at_rate)})"
    return text


def _caution(size: Size) -> str:
    """What the profile of such a size does not say."""
    if size.pipeline > 1:
        return (
            f"tp{size} is reckoned, not measured: a lone prompt passes {size.pipeline} stages one "
            f"after another, its TTFT is up to {size.pipeline} times what is said"
        )
    if size.experts:
        return f"tp{size} is reckoned with even routing, not measured"
    return ""


def _few(ids: Sequence[str]) -> str:
    return ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
