"""Whole systems of a search: an allocation as a candidate, and the results of its trials."""

import dataclasses

from hetero_gateway.planner.allocation import Allocation
from hetero_gateway.planner.goals import HEADROOM, Goodput, usd_per_million_tokens
from hetero_gateway.planner.plan import Layout, PlanCandidate, SystemFigures
from hetero_gateway.planner.question import Question, System, reduced
from hetero_gateway.planner.reasons import instances, summary
from hetero_gateway.planner.shortlist import Shortlist, alone_sum, estimated
from hetero_gateway.sim.alone import Mix


class Systems:
    """Makes candidates, and simulates them, all machines behind one gateway."""

    def __init__(self, question: Question, shortlist: Shortlist) -> None:
        self.question = question
        self.shortlist = shortlist
        self._machines = {m.id: m for m in question.machines}

    def candidate(self, each: Allocation, simulated: SystemFigures | None = None) -> PlanCandidate:
        """An allocation as a candidate, by its instances alone or its simulation."""
        layouts: dict[str, Layout] = {}
        paper = unpadded = alone = 0.0
        for group, parts in zip(self.shortlist.groups, each, strict=True):
            ids = iter(group.ids)
            for layout, machines in parts:
                layouts.update((next(ids), layout) for _ in range(machines))
                estimates = estimated(self.shortlist.estimates, group, layout)
                paper += machines * estimates[0]
                unpadded += machines * estimates[1]
                alone += machines * alone_sum(self.shortlist.alone, group, layout)
            layouts.update((machine_id, ()) for machine_id in ids)
        layouts = {m.id: layouts[m.id] for m in self.question.machines}
        running = sum(sum(layout) for layout in layouts.values())
        present = sum(self._machines[i].count for i, layout in layouts.items() if layout)
        tokens_per_s = alone if simulated is None else simulated.tokens_per_s
        return PlanCandidate(
            layouts=layouts,
            estimate_paper_tokens_per_s=paper,
            estimate_tokens_per_s=unpadded,
            simulated=simulated,
            accelerators=running,
            idle_accelerators=present - running,
            usd_per_million_tokens=usd_per_million_tokens(
                self.question.machines, layouts, tokens_per_s
            ),
            alone_tokens_per_s=alone,
        )

    def name(self, each: Allocation) -> str:
        """In a few words."""
        return summary(self.candidate(each), self._machines)

    def system(self, candidate: PlanCandidate) -> System:
        """The system to simulate for a candidate."""
        counts = instances(candidate, self._machines)
        types, alone = self.question.types, self.shortlist.alone
        return reduced(
            {types[key].profile: n for key, n in sorted(counts.items())},
            {types[key].profile: of_it for key, of_it in alone.items()},
            self.question.requests,
        )

    def saturated(self, each: Allocation) -> PlanCandidate:
        """With everything at once."""
        candidate = self.candidate(each)
        figures = self.saturate(candidate, self.shortlist.mix)
        return candidate if figures is None else self.candidate(each, figures)

    def saturate(self, candidate: PlanCandidate, mix: Mix) -> SystemFigures | None:
        """With everything of a mix at once; None if no request finishes."""
        return self.question.saturate(self.system(candidate), mix, candidate.alone_tokens_per_s)

    def at_rate(self, candidate: PlanCandidate, rate_per_s: float) -> PlanCandidate:
        """The candidate with its figures at the rate, and whether it keeps the goals."""
        goals, mix = self.question.goals, self.shortlist.mix
        asked = goals.rate_per_s is not None
        if candidate.tokens_per_s < (1 + HEADROOM) * rate_per_s * mix.mean_tokens:
            return dataclasses.replace(candidate, holds=False if asked else None)
        figures = self.question.trials.hold(self.system(candidate), mix, rate_per_s)
        if asked and goals.name == "cost":
            candidate = self.priced(candidate, rate_per_s)
        return dataclasses.replace(
            candidate,
            at_rate=figures,
            holds=figures is not None and not goals.missed(figures) if asked else None,
        )

    def tried(self, each: Allocation, rate_per_s: float) -> PlanCandidate:
        """At the rate; a candidate that holds it within limits must do so twice.

        The second time with other requests, and twice as many.
        """
        goals = self.question.goals
        candidate = self.at_rate(self.saturated(each), rate_per_s)
        if not candidate.holds or not goals.has_limits:
            return candidate
        other = Mix.of(self.question.lengths, self.question.seed + 1)
        figures = self.question.trials.hold(self.system(candidate), other, rate_per_s, times=2)
        if figures is not None and not goals.missed(figures):
            return candidate
        return dataclasses.replace(candidate, at_rate=figures, holds=False)

    def priced(self, candidate: PlanCandidate, rate_per_s: float) -> PlanCandidate:
        """With the price of a million tokens at a rate."""
        tokens_per_s = rate_per_s * self.shortlist.mix.mean_tokens
        cost = usd_per_million_tokens(self.question.machines, candidate.layouts, tokens_per_s)
        return dataclasses.replace(candidate, usd_per_million_tokens=cost)

    def at_goodput(self, candidate: PlanCandidate, likely_per_s: float) -> PlanCandidate:
        """The candidate with the highest rate that it holds, and its figures there."""
        found = self._goodput(candidate, likely_per_s)
        if found is None:
            return dataclasses.replace(candidate, holds=False)
        return dataclasses.replace(
            self.priced(candidate, found.rate_per_s),
            at_rate=found.figures,
            holds=True,
            goodput_per_s=found.rate_per_s,
        )

    def with_goodput(self, candidate: PlanCandidate, likely_per_s: float) -> PlanCandidate:
        """The candidate with the highest rate that it holds, its figures as they are."""
        found = self._goodput(candidate, likely_per_s)
        goodput_per_s = None if found is None else found.rate_per_s
        return dataclasses.replace(candidate, goodput_per_s=goodput_per_s)

    def _goodput(self, candidate: PlanCandidate, likely_per_s: float) -> Goodput | None:
        if candidate.simulated is None:
            return None
        system = self.system(candidate)
        return self.question.goodput(system, self.shortlist.mix, candidate.simulated, likely_per_s)
