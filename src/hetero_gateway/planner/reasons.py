"""Why a candidate loses, or all of them: lines from figures, never a rule of thumb.

Per accelerator, an instance type makes (batch / t) / step tokens per second: against another on the
same accelerators it loses by fewer sequences on each, or by longer steps. The limit of the batch,
the copies of the weights, and the part of a step that more accelerators do not shorten can be read
off.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_gateway.planner.goals import Goals
from hetero_gateway.planner.layouts import describe, feasible_sizes, group_machines, together
from hetero_gateway.planner.plan import InstanceType, Key, Layout, Machine, PlanCandidate, Unfit
from hetero_gateway.planner.question import Question
from hetero_gateway.planner.shortlist import Shortlist
from hetero_gateway.planner.sizes import Size, as_size
from hetero_gateway.sim.alone import Alone

# Smaller differences are not reported as a cause.
_NOTABLE = 0.9
# A whole system below this share of the sum of its instances alone: the policy's loss.
_KEPT = 0.95


@dataclass(frozen=True, slots=True)
class Reasons:
    """What candidates are judged by; ``alone`` has the types that were simulated alone."""

    machines: Mapping[str, Machine]
    types: Mapping[Key, InstanceType]
    alone: Mapping[Key, Alone]

    def why_not(self, candidate: PlanCandidate, best: PlanCandidate, goals: Goals) -> str:
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
            parts.append(
                f"{candidate.accelerators} accelerators, where {best.accelerators} will do"
            )
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
            parts += filter(None, (_policy_loss(candidate), self._cause(candidate, best)))
        return "; ".join(parts)

    def relative_uncertainty(self, candidate: PlanCandidate) -> float:
        """Of a candidate's throughput: that of its most uncertain type."""
        used = instances(candidate, self.machines)
        return max((self._uncertainty(key) for key in used if key in self.alone), default=0.0)

    def _uncertainty(self, key: Key) -> float:
        """Relative, of a type's throughput: of its step times, and of its KV if that limits it."""
        found = self.types[key]
        of_kv = found.memory.uncertainty if self.alone[key].limit == "KV" else 0.0
        return math.hypot(found.time_uncertainty, of_kv)

    def lead(self, best: PlanCandidate, second: PlanCandidate) -> str | None:
        """A line if the lead over the second is within its uncertainty; else None.

        What both have of a type cancels out: only the error of the surplus instances
        counts. Errors of different types are assumed to be independent.
        """
        if best.simulated is None or second.simulated is None:
            return None
        gain = best.simulated.tokens_per_s / second.simulated.tokens_per_s - 1
        more = instances(best, self.machines)
        more.subtract(instances(second, self.machines))
        error = math.hypot(
            *(
                n * self.alone[key].tokens_per_s * self._uncertainty(key)
                for key, n in more.items()
                if key in self.alone
            )
        )
        uncertain = error / best.alone_tokens_per_s if best.alone_tokens_per_s else 0.0
        if gain <= 0:
            return (
                "the best and the next do as much: either may win; a measured profile would decide"
            )
        if gain >= uncertain:
            return None
        return (
            f"the best leads the next by {gain:.1%}, and what the two do not share is uncertain by "
            f"{uncertain:.0%} of the whole: either may win; a measured profile would decide"
        )

    def _cause(self, candidate: PlanCandidate, best: PlanCandidate) -> str:
        """For the machine whose layout loses most: why its worst type does."""
        lost = {
            i: self._sum(i, best.layouts[i]) - self._sum(i, layout)
            for i, layout in candidate.layouts.items()
            if best.layouts[i] and layout != best.layouts[i]
        }
        worst = max(lost, key=lost.__getitem__, default="")
        if not worst or lost[worst] <= 0:
            return ""
        machine, layout, winner = (
            self.machines[worst],
            candidate.layouts[worst],
            best.layouts[worst],
        )
        if not layout:
            return f"{machine.id} stays idle"

        def per_accelerator(t: int) -> float:
            found = self.alone.get((machine.accelerator, t))
            return found.tokens_per_s / as_size(t).accelerators if found else 0.0

        lead_t = max(set(winner), key=lambda t: (per_accelerator(t), -t))
        worst_t = min(set(layout), key=lambda t: (per_accelerator(t), t))
        text = ""
        if worst_t != lead_t and per_accelerator(worst_t) < per_accelerator(lead_t):
            text = self._compare_types(machine.accelerator, worst_t, lead_t, len(layout))
        idle = machine.count - sum(layout)
        if idle > machine.count - sum(winner):
            text = f"{idle} of {machine.count} accelerators idle" + (f", {text}" if text else "")
        return text

    def _sum(self, machine_id: str, layout: Layout) -> float:
        """Tokens/s of a machine by its instances alone."""
        accelerator = self.machines[machine_id].accelerator
        found = [self.alone.get((accelerator, t)) for t in layout]
        return sum(each.tokens_per_s for each in found if each) / together(layout)

    def _compare_types(self, accelerator: str, t: int, other: int, copies: int) -> str:
        """Why t, with ``copies`` on a machine, makes fewer tokens per accelerator."""
        mine, its = self.alone.get((accelerator, t)), self.alone[accelerator, other]
        if mine is None:
            return f"tp{t} was ruled out by Algorithm 1"
        causes = []
        taken, others = as_size(t).accelerators, as_size(other).accelerators
        if (mine.batch / taken) / (its.batch / others) < _NOTABLE:
            text = (
                f"{mine.batch / taken:.0f} sequences an accelerator, not {its.batch / others:.0f}"
            )
            causes.append(f"{text} ({self._limit(accelerator, t, t < other and copies)})")
        if (mine.step_s / its.step_s) > 1 / _NOTABLE or not causes or t > other:
            fixed = self.types[accelerator, t].profile.constants.p8 * taken
            other_fixed = self.types[accelerator, other].profile.constants.p8 * others
            if t > other and fixed * _NOTABLE > other_fixed:
                causes.append(
                    f"fixed part of a step {fixed * 1000:.0f} accelerator-ms, not "
                    f"{other_fixed * 1000:.0f} (all-reduce, launches)"
                )
            elif mine.step_s / its.step_s > 1 / _NOTABLE:
                causes.append(
                    f"a step takes {mine.step_s * 1000:.0f} ms, not {its.step_s * 1000:.0f}"
                )
        if not causes:
            causes.append(
                f"{mine.tokens_per_s / taken:.0f} tokens/s an accelerator, "
                f"{its.tokens_per_s / others:.0f} at tp{other}"
            )
        return f"tp{t}: " + ", ".join(causes)

    def _limit(self, accelerator: str, t: int, copies: int) -> str:
        """What keeps a type's batch small; ``copies`` of the weights, if a larger t wins."""
        found, limit = self.types[accelerator, t], self.alone[accelerator, t].limit
        if limit == "max_num_seqs":
            return f"max_num_seqs {found.profile.max_num_seqs}"
        if limit == "prefill":
            return "prefills take the time"
        held = found.memory.parts.get("weights") and copies > 1
        return f"KV: the weights are held {copies} times" if held else "KV"


def instances(candidate: PlanCandidate, machines: Mapping[str, Machine]) -> Counter[Key]:
    """By type; one that spans machines counts once, within rounding."""
    found = Counter(
        (machines[i].accelerator, t) for i, layout in candidate.layouts.items() for t in layout
    )
    return Counter({key: n // as_size(key[1]).machines for key, n in found.items()})


def summary(candidate: PlanCandidate, machines: Mapping[str, Machine]) -> str:
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


def _ruled_out(candidate: PlanCandidate, best: PlanCandidate, goals: Goals) -> str:
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


def _not_held(candidate: PlanCandidate, goals: Goals) -> str:
    if candidate.at_rate is not None and (missed := goals.missed(candidate.at_rate)):
        return missed
    tokens_per_s = f"{candidate.tokens_per_s:.0f} tokens/s"
    return f"{goals.rate_per_s:g} requests/s are over 95 % of its {tokens_per_s}"


def _policy_loss(candidate: PlanCandidate) -> str:
    if candidate.simulated is None or not candidate.alone_tokens_per_s:
        return ""
    kept = candidate.simulated.tokens_per_s / candidate.alone_tokens_per_s
    return f"the policy gets {kept:.0%} of what its instances do alone" if kept < _KEPT else ""


# Besides the candidates, and if there are none


def plan_notes(
    question: Question, reasons: Reasons, candidates: Sequence[PlanCandidate]
) -> list[str]:
    """Notes on the best candidate of an answer, best candidate first."""
    best, machines = candidates[0], reasons.machines
    notes = []
    if question.goals.name == "throughput":
        others = [c for c in candidates[1:] if c.simulated is not None]
        if others and (line := reasons.lead(best, others[0])):
            notes.append(line)
    for machine in question.machines:
        layout = best.layouts[machine.id]
        if layout and (idle := machine.count - sum(layout)):
            notes.append(f"{machine.id}: {idle} of {machine.count} accelerators stay idle")
    fit = [g for g in group_machines(question.machines) if feasible_sizes(g, question.types)]
    able = {machine_id for group in fit for machine_id in group.ids}
    if unable := [m.id for m in question.machines if m.id not in able]:
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


def nothing_fits(unfit: Sequence[Unfit]) -> str:
    """One line: the model fits no machine, and the nearest miss."""
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
    largest: PlanCandidate | None = None,
) -> str:
    """One line: no set of machines holds the rate, and what they would hold.

    Args:
        rates_per_s: that instances hold alone, by type.
        largest: the tried one with the most machines.
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
    """What the profile of such a size does not include."""
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
