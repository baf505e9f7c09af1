"""The search for a deployment configuration (section 3.2): estimates prune, the simulator ranks.

docs/design/search.md has its steps: ``layouts``, ``shortlist``, ``allocation``, ``systems``, and
``least_resource`` for a rate at low cost. The paper ranks by Algorithm 1, which with grouped-query
attention counted right names the best configuration in 72 % of cases
(benchmarks/planner/search.py). One seed gives one answer, whatever the order of the machines.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hetero_gateway.errors import ConfigError
from hetero_gateway.planner import allocation
from hetero_gateway.planner.allocation import Allocation
from hetero_gateway.planner.goals import lacking
from hetero_gateway.planner.layouts import Group, feasible_sizes, group_machines, together
from hetero_gateway.planner.least_resource import LeastSets
from hetero_gateway.planner.plan import Layout, Plan, PlanCandidate, SystemFigures
from hetero_gateway.planner.question import NoPlan, Question
from hetero_gateway.planner.reasons import Reasons, nothing_fits, nothing_holds, plan_notes
from hetero_gateway.planner.shortlist import Shortlist, estimated, make_shortlist, rates_alone
from hetero_gateway.planner.systems import Systems
from hetero_gateway.sim.alone import Mix

# Combinations that are ranked by their sums, and shown.
_COMBINATIONS = 12
# Whole systems that are simulated; fewer if a run has many requests, so that all of them together
# have about as many as the budget.
_SYSTEMS = 6
_LEAST_SYSTEMS = 2
_BUDGET_REQUESTS = 30_000
# The same for a trace in order, whose requests take the simulator twice as long.
_BUDGET_IN_ORDER = 15_000
# For a trace in order, candidates with reported latencies if there is no rate and no limit.
_TOLD_IN_ORDER = 2
# Candidates this close are equal within one run's noise: they are run again, and the mean decides.
_NOISE = 0.01
# Latencies are reported at this share of the best's throughput if no rate is given.
_LOAD = 0.7


def search(question: Question, on_progress: Callable[[str], None] = lambda text: None) -> Plan:
    """The plan, best candidate first.

    Raises:
        ConfigError: nothing can be deployed, or a price is missing.
        NoPlan: nothing holds the rate within the goals.
    """
    groups = group_machines(question.machines)
    _check(question, groups)
    shortlist = make_shortlist(question, groups, on_progress)
    return _Search(question, shortlist, on_progress).run()


def _check(question: Question, groups: Sequence[Group]) -> None:
    if not question.machines:
        raise ConfigError("machines: there are none")
    if not any(feasible_sizes(group, question.types) for group in groups):
        raise ConfigError(nothing_fits(question.unfit))
    if problem := lacking(question.goals, question.machines):
        raise ConfigError(problem[1])


class _Search:
    """Steps 4 and 5: which whole systems of the shortlist are simulated, and how."""

    def __init__(
        self, question: Question, shortlist: Shortlist, on_progress: Callable[[str], None]
    ) -> None:
        self._q = question
        self._goals = question.goals
        self._on_progress = on_progress
        self._shortlist = shortlist
        self._groups = shortlist.groups
        self._systems = Systems(question, shortlist)
        self._rate_per_s = question.goals.rate_per_s or 0.0
        self._lower_bound: float | None = None

    def run(self) -> Plan:
        goals = self._goals
        if goals.at_goodput:
            candidates = self._most_within_limits()
        elif goals.name != "throughput" and goals.rate_per_s is not None:
            sets = LeastSets(self._systems, self._on_progress)
            candidates, self._lower_bound = sets.find()
        else:
            candidates = self._best_few()
        if goals.slo is not None and not goals.at_goodput:
            # How much more than the rate the best would hold.
            self._on_progress("the best's goodput")
            candidates[0] = self._systems.with_goodput(candidates[0], self._rate_per_s)
        return self._plan(candidates)

    # With everything at once

    def _best_few(self) -> list[PlanCandidate]:
        """The best combinations, simulated, in their order; then the others."""
        find = allocation.least_cost if self._goals.name == "cost" else allocation.best_sums
        found = find(self._groups, self._shortlist.worths, _COMBINATIONS)
        pairs = []
        for each in self._to_simulate(found):
            self._on_progress(f"everything at once: {self._systems.name(each)}")
            pairs.append((self._systems.saturated(each), each))
        ranked = self._settle_ties(sorted(pairs, key=self._rank_of_pair))
        goals_ask = bool(self._rate_per_s) or self._goals.slo is not None
        if not self._rate_per_s:
            tokens_per_s = _LOAD * ranked[0][0].tokens_per_s
            self._rate_per_s = tokens_per_s / self._shortlist.mix.mean_tokens
        # With a prefix cache a run takes a few times as long: figures that no goal needs are
        # computed only for the best few.
        told = _TOLD_IN_ORDER if self._q.in_order and not goals_ask else len(ranked)
        simulated = [self._systems.at_rate(c, self._rate_per_s) for c, _ in ranked[:told]]
        simulated += [candidate for candidate, _ in ranked[told:]]
        if not any(candidate.holds is not False for candidate in simulated):
            simulated = self._others_that_hold(simulated)
        simulated.sort(key=lambda candidate: candidate.holds is False)
        taken = {each for _, each in ranked}
        rest = [self._systems.candidate(each) for each in found if each not in taken]
        rest += [self._systems.candidate(each) for each in self._ruled_out()]
        return simulated + sorted(rest, key=self._goals.rank)

    def _others_that_hold(self, failed: Sequence[PlanCandidate]) -> list[PlanCandidate]:
        """The fastest few miss the rate's limits: perhaps another layout keeps them.

        Raises:
            NoPlan: none does.
        """
        found, _ = LeastSets(self._systems, self._on_progress).find()
        seen = [candidate.layouts for candidate in found]
        found += [candidate for candidate in failed if candidate.layouts not in seen]
        return sorted(found, key=self._goals.rank)

    def _to_simulate(self, found: Sequence[Allocation]) -> list[Allocation]:
        """The best few; for one kind of machine, including the equal layouts of the paper."""
        systems = self._systems
        batch = max(systems.system(systems.candidate(each)).batch for each in found[:_SYSTEMS])
        run = max(self._q.requests, 4 * batch)
        budget = _BUDGET_IN_ORDER if self._q.in_order else _BUDGET_REQUESTS
        few = int(np.clip(budget / (2 * run), _LEAST_SYSTEMS, _SYSTEMS))
        if len(self._groups) > 1 or self._goals.name != "throughput":
            return list(found[:few])
        equal = [each for each in found if len(set(each[0][0][0])) == 1]
        return list(dict.fromkeys([*found[:2], *equal, *found]))[:few]

    def _ruled_out(self) -> list[Allocation]:
        """What Algorithm 1 dropped, equal layouts first, if there is one kind of machine."""
        if len(self._groups) > 1:
            return []
        (group,) = self._groups
        known = self._shortlist.estimates
        dropped = sorted(
            self._shortlist.dropped[group],
            key=lambda layout: (len(set(layout)), -estimated(known, group, layout)[1]),
        )
        return [(((layout, group.machines),),) for layout in dropped[:_COMBINATIONS]]

    def _settle_ties(
        self, ranked: list[tuple[PlanCandidate, Allocation]]
    ) -> list[tuple[PlanCandidate, Allocation]]:
        """Run those that one run cannot tell from the best again, with other requests."""
        if self._goals.name != "throughput":
            return ranked
        least = (1 - _NOISE) * ranked[0][0].tokens_per_s
        tied = [pair for pair in ranked if pair[0].tokens_per_s >= least]
        if len(tied) < 2:
            return ranked
        other = Mix.of(self._q.lengths, self._q.seed + 1)
        second: list[SystemFigures] = []
        for candidate, _ in tied:
            if (figures := self._systems.saturate(candidate, other)) is None:
                return ranked
            second.append(figures)
        candidates = _with_second_runs([candidate for candidate, _ in tied], second)
        again = [(c, each) for c, (_, each) in zip(candidates, tied, strict=True)]
        return sorted(again + ranked[len(tied) :], key=self._rank_of_pair)

    # Each at its goodput

    def _most_within_limits(self) -> list[PlanCandidate]:
        """The best few by the rates that their instances hold alone, each at its own goodput."""
        rates_per_s = rates_alone(self._q, self._shortlist, self._on_progress)
        if not rates_per_s:
            raise NoPlan(nothing_holds(self._q, self._shortlist, rates_per_s))
        worths = {
            group: {
                layout: sum(rates_per_s[group.accelerator, t] for t in layout) / together(layout)
                for layout in self._shortlist.worths[group]
                if all((group.accelerator, t) in rates_per_s for t in layout)
            }
            for group in self._groups
        }
        by_price = self._goals.name == "cost"
        find = allocation.least_cost if by_price else allocation.best_sums
        found = find(self._groups, worths, _COMBINATIONS)
        if not by_price:
            found = [*found[:1], *_without_one(found[0]), *found[1:]]
        ranked = self._at_goodput(self._to_simulate(found), worths)
        best = ranked[0][0]
        if best.goodput_per_s is None:
            raise NoPlan(f"nothing that was simulated keeps {self._goals.limits} at any rate")
        if best.goodput_per_s < self._rate_per_s:
            raise NoPlan(
                f"nothing holds {self._rate_per_s:g} requests/s within {self._goals.limits}: "
                f"{self._systems.name(ranked[0][1])} holds the most, {best.goodput_per_s:.3g}"
            )
        self._rate_per_s = best.goodput_per_s
        taken = {each for _, each in ranked}
        rest = [
            self._systems.priced(
                self._systems.candidate(each), _rate_of(each, self._groups, worths)
            )
            for each in found
            if each not in taken
        ]
        return [candidate for candidate, _ in ranked] + rest

    def _at_goodput(
        self, allocations: Sequence[Allocation], worths: Mapping[Group, Mapping[Layout, float]]
    ) -> list[tuple[PlanCandidate, Allocation]]:
        """Each simulated at the highest rate that it holds, the best first."""
        found: list[tuple[PlanCandidate, Allocation]] = []
        ratio = 1.0  # the last one's held rate over its instances' sum
        for each in allocations:
            self._on_progress(f"at its goodput: {self._systems.name(each)}")
            alone_per_s = _rate_of(each, self._groups, worths)
            saturated = self._systems.saturated(each)
            candidate = self._systems.at_goodput(saturated, ratio * alone_per_s)
            if candidate.goodput_per_s is not None:
                ratio = candidate.goodput_per_s / alone_per_s
            found.append((candidate, each))
        return sorted(found, key=self._rank_of_pair)

    # The answer

    def _rank_of_pair(self, pair: tuple[PlanCandidate, Allocation]) -> tuple[float, ...]:
        return self._goals.rank(pair[0])

    def _plan(self, candidates: list[PlanCandidate]) -> Plan:
        q, mix, alone = self._q, self._shortlist.mix, self._shortlist.alone
        reasons = Reasons({m.id: m for m in q.machines}, q.types, alone)
        best = candidates[0]
        told = [best] + [
            dataclasses.replace(c, why_not=reasons.why_not(c, best, q.goals))
            for c in candidates[1:]
        ]
        return Plan(
            machines=q.machines,
            types=q.types,
            candidates=tuple(told),
            unfit=q.unfit,
            goal=q.goals.name,
            policy=q.policy,
            # Each at its own rate: latencies do not compare.
            pareto=() if q.goals.at_goodput else _pareto(told),
            notes=(*q.notes, *plan_notes(q, reasons, told)),
            alone=alone,
            limits=q.goals.limits,
            lower_bound=self._lower_bound,
            rate_per_s=self._rate_per_s,
            mean_prompt_tokens=mix.mean_prompt,
            mean_output_tokens=mix.mean_output,
        )


def _without_one(each: Allocation) -> list[Allocation]:
    """Each kind of machine left out in turn, if there are several: a slow one may do harm."""
    used = [i for i, parts in enumerate(each) if parts]
    if len(used) < 2:
        return []
    return [(*each[:i], (), *each[i + 1 :]) for i in used]


def _rate_of(
    each: Allocation, groups: Sequence[Group], worths: Mapping[Group, Mapping[Layout, float]]
) -> float:
    """Requests/s that the instances of an allocation hold alone, together."""
    return sum(
        machines * worths[group][layout]
        for group, parts in zip(groups, each, strict=True)
        for layout, machines in parts
    )


def _with_second_runs(
    candidates: Sequence[PlanCandidate], second: Sequence[SystemFigures]
) -> list[PlanCandidate]:
    """Each with the mean of its run with everything at once and of another one's figures.

    Other requests are a little harder or easier for all of them, which must not count.
    """
    level = sum(candidate.tokens_per_s for candidate in candidates)
    level /= sum(figures.tokens_per_s for figures in second)
    return [
        _mean(candidate, figures, level)
        for candidate, figures in zip(candidates, second, strict=True)
    ]


def _mean(candidate: PlanCandidate, other: SystemFigures, level: float) -> PlanCandidate:
    """With the mean of two runs with everything at once, the second times ``level``."""
    one = candidate.simulated
    if one is None:
        return candidate
    figures = dataclasses.replace(
        one,
        tokens_per_s=(one.tokens_per_s + level * other.tokens_per_s) / 2,
        output_tokens_per_s=(one.output_tokens_per_s + level * other.output_tokens_per_s) / 2,
        batch=(one.batch + other.batch) / 2,
    )
    return dataclasses.replace(candidate, simulated=figures)


def _pareto(candidates: Sequence[PlanCandidate]) -> tuple[PlanCandidate, ...]:
    """Those that no other beats in both throughput and mean latency at the rate; fastest last."""
    known = [c for c in candidates if c.at_rate is not None]
    known.sort(key=lambda c: (-c.tokens_per_s, c.at_rate.latency_mean_s if c.at_rate else 0.0))
    kept: list[PlanCandidate] = []
    for candidate in known:
        assert candidate.at_rate is not None
        last = kept[-1].at_rate if kept else None
        if last is None or candidate.at_rate.latency_mean_s < last.latency_mean_s:
            kept.append(candidate)
    return tuple(kept)
