"""The search for a deployment configuration (section 3.2): estimates prune, the simulator ranks.

    1  equal machines are one case; the layouts of each kind are listed (``layouts``)
    2  Algorithm 1 estimates every instance type on sampled requests, and drops the layouts that
       it puts below ``KEEP`` of its best for that kind of machine
    3  every type that is left is simulated alone, with always enough to do (``sim.alone``)
    4  throughput is nearly additive: layouts, and combinations of them, are ranked by what their
       instances do alone (``allocation``)
    5  the best few are simulated as whole systems, all machines behind one gateway with the
       chosen policy: everything at once for throughput, and at a rate for latencies; or, where
       each is judged by its goodput, at the highest rate that it holds (``goodput``)

Differs from the paper, which ranks by Algorithm 1: with grouped-query attention counted right that
names the best configuration in 72 % of cases. benchmarks/planner/search.py compares the two.

One seed gives one answer, whatever the order of the machines.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.errors import ConfigError, HeteroGatewayError
from hetero_gateway.planner import allocation, reasons, trials
from hetero_gateway.planner.allocation import Allocation
from hetero_gateway.planner.batch_estimate import BatchEstimate, Estimator, estimate_throughput
from hetero_gateway.planner.bound import lower_bound
from hetero_gateway.planner.buying import Counts, cheaper_sets, is_part_of
from hetero_gateway.planner.goals import (
    HEADROOM,
    Goals,
    price_per_hour_usd,
    usd_per_million_tokens,
)
from hetero_gateway.planner.goodput import Goodput, find_goodput
from hetero_gateway.planner.layouts import (
    Group,
    best_by_use,
    group_machines,
    machine_layouts,
    stretches,
    together,
)
from hetero_gateway.planner.plan import (
    Candidate,
    Figures,
    InstanceType,
    Layout,
    Machine,
    Plan,
    Unfit,
)
from hetero_gateway.planner.sizes import Size, as_size
from hetero_gateway.sim.alone import Alone, Engines, Mix, run_alone
from hetero_gateway.sim.ordered_trace import OrderedTrace
from hetero_gateway.sim.workload import Lengths

Key = tuple[str, int]  # accelerator, size

# The best layout's estimate was never below 0.56 of the estimator's best in the 100 settings of
# benchmarks/planner/search.py (unpadded); at 0.6 it was dropped in one of them.
KEEP = 0.5
# The paper samples 200 requests.
_ESTIMATE_REQUESTS = 200
# Combinations that are ranked by their sums, and shown.
_COMBINATIONS = 12
# Whole systems that are simulated; fewer where a run has many requests, so that all of them
# together have about as many as the budget says.
_SYSTEMS = 6
_LEAST_SYSTEMS = 2
_BUDGET_REQUESTS = 30_000
# Candidates this close are one to a run of the simulator: they are run again, and the mean decides.
_NOISE = 0.01
# Latencies are told at this share of the best's throughput where no rate is given.
_LOAD = 0.7
# Cheaper sets of machines that are simulated at most.
_TRIES = 16
# The rate that one instance alone holds within the limits is found to this share of what it can do.
_ALONE_STEP = 1 / 16

_ESTIMATE_STREAM = 7


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of the planner.

    Args:
        machines: ids differ.
        types: what can be deployed, by (accelerator, size); ``unfit``: what cannot.
        lengths: of the requests.
        estimator: of Algorithm 1, which prunes.
        seed: of everything that is drawn.
        requests: of one simulation of a whole system, about.
        compiled: run the engines compiled by numba.
        notes: passed on to the plan.
    """

    machines: tuple[Machine, ...]
    types: Mapping[Key, InstanceType]
    lengths: Lengths
    goals: Goals = field(default_factory=Goals)
    policy: str = "finish-time"
    estimator: Estimator = "unpadded"
    engines: Engines = field(default_factory=Engines)
    unfit: tuple[Unfit, ...] = ()
    seed: int = 0
    requests: int = trials.SYSTEM_REQUESTS
    compiled: bool = False
    notes: tuple[str, ...] = ()


class NoPlan(HeteroGatewayError):
    """The machines can serve, but nothing that they can be made into keeps the goals."""


def search(question: Question, on_progress: Callable[[str], None] = lambda text: None) -> Plan:
    """The plan, best candidate first.

    Raises:
        ConfigError: nothing can be deployed, or a price is missing.
        NoPlan: nothing holds the rate within the goals.
    """
    return _Search(question, on_progress).run()


class _Search:
    """One search; each step fills in what the next one needs."""

    def __init__(self, question: Question, on_progress: Callable[[str], None]) -> None:
        self._q = question
        self._on_progress = on_progress
        self._machines = {m.id: m for m in question.machines}
        self._groups = group_machines(question.machines)
        self._mix = Mix.of(question.lengths, question.seed)
        self._tokens = self._mix.mean_prompt + self._mix.mean_output
        self._estimates: dict[Key, tuple[float, float]] = {}  # as printed, unpadded
        self._alone: dict[Key, Alone] = {}
        self._worths: dict[Group, dict[Layout, float]] = {}  # what is left of the layouts
        self._dropped: dict[Group, list[Layout]] = {}
        self._rate_per_s = question.goals.rate_per_s or 0.0
        self._lower_bound: float | None = None
        self._in_order = isinstance(question.lengths, OrderedTrace)

    def run(self) -> Plan:
        self._check()
        self._estimate()
        kept = self._prune()
        self._simulate_types(kept)
        if self._q.goals.at_goodput:
            candidates = self._most_within_limits()
        elif self._q.goals.name != "throughput" and self._q.goals.rate_per_s is not None:
            candidates = self._least_that_holds()
        else:
            candidates = self._best_few()
        if self._q.goals.slo is not None and not self._q.goals.at_goodput:
            candidates[0] = self._with_goodput(candidates[0])
        return self._plan(candidates)

    # -- before the simulator

    def _check(self) -> None:
        if not self._q.machines:
            raise ConfigError("machines: there are none")
        if not any(self._feasible(group) for group in self._groups):
            raise ConfigError(nothing_fits(self._q.unfit))
        if self._q.goals.name == "cost":
            lacking = sorted({g.accelerator for g in self._groups if g.price_per_hour_usd is None})
            if lacking:
                raise ConfigError(
                    "the goal cost needs a price per accelerator-hour of " + ", ".join(lacking)
                )
        if self._q.goals.rate_per_s is None:
            if self._q.goals.name == "fewest":
                raise ConfigError("the goal fewest needs a rate to hold")
            if self._q.goals.has_limits and not self._q.goals.at_goodput:
                raise ConfigError(
                    f"{self._q.goals.limits} needs a rate at which it is to hold, or a goal that "
                    "finds one: goodput, cost"
                )
        if self._q.goals.name == "goodput" and not self._q.goals.has_limits:
            raise ConfigError(
                "the goal goodput needs limits: slo with ttft_s, tpot_s or both (--slo-ttft, "
                "--slo-tpot)"
            )

    def _feasible(self, group: Group) -> list[int]:
        return [
            t
            for a, t in self._q.types
            if a == group.accelerator
            and int(t) <= group.count
            and (not stretches(t) or (int(t) == group.count and together((t,)) <= group.machines))
        ]

    def _estimate(self) -> None:
        """Algorithm 1 of one instance of each type, both ways."""
        rng = np.random.default_rng((self._q.seed, _ESTIMATE_STREAM))
        prompt, output = (v.tolist() for v in self._q.lengths.draw(_ESTIMATE_REQUESTS, rng))
        for key in sorted({(g.accelerator, t) for g in self._groups for t in self._feasible(g)}):
            profile = self._q.types[key].profile
            self._estimates[key] = (
                instance_estimate(profile, prompt, output, "paper"),
                instance_estimate(profile, prompt, output, "unpadded"),
            )

    def _prune(self) -> dict[Group, list[Layout]]:
        """The layouts that are left; all of them where latency goals may need a larger t, or where
        prefix caches, of which Algorithm 1 does not know, may favour one.

        Those over several machines are few, and the smallest may be the cheapest: they stay.
        """
        which = 0 if self._q.estimator == "paper" else 1
        kept = {}
        for group in self._groups:
            layouts = machine_layouts(group.count, self._feasible(group))
            worth = {x: self._estimated(group, x)[which] for x in layouts}
            least = KEEP * max(worth.values(), default=0.0)
            if self._q.goals.has_limits or self._in_order:
                least = 0.0
            kept[group] = [x for x in layouts if worth[x] >= least or together(x) > 1]
            self._dropped[group] = [x for x in layouts if x not in kept[group]]
        return kept

    def _estimated(self, group: Group, layout: Layout) -> tuple[float, float]:
        pairs = [self._estimates[group.accelerator, t] for t in layout]
        share = 1 / together(layout)
        return sum(paper for paper, _ in pairs) * share, sum(fair for _, fair in pairs) * share

    # -- instances alone

    def _simulate_types(self, kept: Mapping[Group, Sequence[Layout]]) -> None:
        wanted = {(g.accelerator, t) for g, of in kept.items() for layout in of for t in layout}
        for key in sorted(wanted):
            self._on_progress(f"{key[0]} tp{key[1]} alone")
            profile = self._q.types[key].profile
            alone = run_alone(profile, self._mix, self._q.engines)
            if alone is not None and self._in_order:
                alone = trials.alone_in_order(
                    profile, alone, self._share(key), self._mix, self._q.engines, self._q.requests
                )
            if alone is not None:
                self._alone[key] = alone
        for group, layouts in kept.items():
            self._worths[group] = {
                layout: self._alone_sum(group, layout)
                for layout in layouts
                if all((group.accelerator, t) in self._alone for t in layout)
            }
        if not any(self._worths.values()):
            raise ConfigError("no request of the workload fits an instance of any machine")

    def _share(self, key: Key) -> float:
        """An instance's, of all accelerators: of the sessions that it is taken to get."""
        return as_size(key[1]).accelerators / sum(m.count for m in self._q.machines)

    def _alone_sum(self, group: Group, layout: Layout) -> float:
        """Of one machine."""
        sums = sum(self._alone[group.accelerator, t].tokens_per_s for t in layout)
        return sums / together(layout)

    def _goodput(self) -> dict[Key, float]:
        """Requests/s that one instance of each type holds within the limits."""
        result = {}
        for key, alone in self._alone.items():
            most = alone.tokens_per_s / self._tokens / (1 + HEADROOM)
            if self._q.goals.has_limits:
                self._on_progress(f"{key[0]} tp{key[1]} within the limits")
                found = find_goodput(
                    functools.partial(self._hold_alone, key),
                    self._q.goals,
                    most,
                    step=_ALONE_STEP,
                    likely_per_s=most,
                )
                most = 0.0 if found is None else found.rate_per_s
            if most > 0:
                result[key] = most
        return result

    def _hold_alone(self, key: Key, rate_per_s: float) -> Figures | None:
        q, profile = self._q, self._q.types[key].profile
        if self._in_order:
            system = trials.System(((profile, 1),), self._alone[key].batch, self._share(key))
            return self._hold(system, rate_per_s / system.share)
        return trials.hold_alone(profile, self._mix, q.engines, rate_per_s, q.goals.slo)

    # -- whole systems

    def _best_few(self) -> list[Candidate]:
        """The best combinations, simulated, in their order; then the others."""
        find = allocation.least_cost if self._q.goals.name == "cost" else allocation.best_sums
        found = find(self._groups, self._worths, _COMBINATIONS)
        pairs = []
        for each in self._to_simulate(found):
            self._on_progress(f"everything at once: {self._name(each)}")
            pairs.append((self._saturated(each), each))
        ranked = self._settle_ties(sorted(pairs, key=lambda pair: self._rank(pair[0])))
        if not self._rate_per_s:
            self._rate_per_s = _LOAD * _throughput(ranked[0][0]) / self._tokens
        simulated = [self._at_rate(candidate) for candidate, _ in ranked]
        simulated.sort(key=lambda candidate: candidate.holds is False)
        taken = {each for _, each in ranked}
        rest = [self._candidate(each) for each in found if each not in taken]
        rest += [self._candidate(each) for each in self._ruled_out()]
        return simulated + sorted(rest, key=self._rank)

    def _to_simulate(self, found: Sequence[Allocation]) -> list[Allocation]:
        """The best few; of one kind of machine, the equal layouts of the paper among them."""
        batch = max(self._system(self._candidate(each)).batch for each in found[:_SYSTEMS])
        run = max(self._q.requests, 4 * batch)
        systems = int(np.clip(_BUDGET_REQUESTS / (2 * run), _LEAST_SYSTEMS, _SYSTEMS))
        if len(self._groups) > 1 or self._q.goals.name != "throughput":
            return list(found[:systems])
        equal = [each for each in found if len(set(each[0][0][0])) == 1]
        return list(dict.fromkeys([*found[:2], *equal, *found]))[:systems]

    def _ruled_out(self) -> list[Allocation]:
        """What Algorithm 1 dropped, equal layouts first, where there is one kind of machine."""
        if len(self._groups) > 1:
            return []
        (group,) = self._groups
        dropped = self._dropped[group]
        dropped.sort(key=lambda layout: (len(set(layout)), -self._estimated(group, layout)[1]))
        return [(((layout, group.machines),),) for layout in dropped[:_COMBINATIONS]]

    def _most_within_limits(self) -> list[Candidate]:
        """The best few by the rates that their instances hold alone, each at its own goodput."""
        goodput = self._goodput()
        if not goodput:
            raise NoPlan(self._nothing_holds(goodput))
        worths = {
            group: {
                layout: sum(goodput[group.accelerator, t] for t in layout) / together(layout)
                for layout in self._worths[group]
                if all((group.accelerator, t) in goodput for t in layout)
            }
            for group in self._groups
        }
        by_price = self._q.goals.name == "cost"
        find = allocation.least_cost if by_price else allocation.best_sums
        found = find(self._groups, worths, _COMBINATIONS)
        if not by_price:
            found = [*found[:1], *_without_one(found[0]), *found[1:]]
        ranked: list[tuple[Candidate, Allocation]] = []
        ratio = 1.0
        for each in self._to_simulate(found):
            self._on_progress(f"at its goodput: {self._name(each)}")
            alone_per_s = _rate_of(each, self._groups, worths)
            candidate = self._at_goodput(self._saturated(each), ratio * alone_per_s)
            if candidate.goodput_per_s is not None:
                ratio = candidate.goodput_per_s / alone_per_s
            ranked.append((candidate, each))
        ranked.sort(key=lambda pair: self._rank(pair[0]))
        best = ranked[0][0]
        if best.goodput_per_s is None:
            raise NoPlan(f"nothing that was simulated keeps {self._q.goals.limits} at any rate")
        self._rate_per_s = best.goodput_per_s
        taken = {each for _, each in ranked}
        rest = []
        for each in found:
            if each not in taken:
                alone_per_s = _rate_of(each, self._groups, worths)
                rest.append(self._priced(self._candidate(each), alone_per_s))
        return [candidate for candidate, _ in ranked] + rest

    def _priced(self, candidate: Candidate, rate_per_s: float) -> Candidate:
        """With the price of a million tokens at a rate."""
        tokens_per_s = rate_per_s * self._tokens
        cost = usd_per_million_tokens(self._q.machines, candidate.layouts, tokens_per_s)
        return dataclasses.replace(candidate, usd_per_million_tokens=cost)

    def _at_goodput(self, candidate: Candidate, likely_per_s: float) -> Candidate:
        """The candidate with the highest rate that it holds, and its figures there."""
        found = self._find_goodput(candidate, likely_per_s)
        if found is None:
            return dataclasses.replace(candidate, holds=False)
        return dataclasses.replace(
            self._priced(candidate, found.rate_per_s),
            at_rate=found.figures,
            holds=True,
            goodput_per_s=found.rate_per_s,
        )

    def _with_goodput(self, candidate: Candidate) -> Candidate:
        """How much more than the rate the best would hold."""
        self._on_progress("the best's goodput")
        found = self._find_goodput(candidate, self._rate_per_s)
        goodput_per_s = None if found is None else found.rate_per_s
        return dataclasses.replace(candidate, goodput_per_s=goodput_per_s)

    def _find_goodput(self, candidate: Candidate, likely_per_s: float) -> Goodput | None:
        most_per_s = _throughput(candidate) / (1 + HEADROOM) / self._tokens
        if not most_per_s:
            return None
        system = self._system(candidate)
        return find_goodput(
            lambda rate_per_s: self._hold(system, rate_per_s),
            self._q.goals,
            most_per_s,
            likely_per_s=likely_per_s,
        )

    def _least_that_holds(self) -> list[Candidate]:
        """From where the instances alone would hold it: downwards while it holds, or upwards."""
        goodput = self._goodput()
        by_price = self._q.goals.name == "cost"
        options = allocation.holding(self._groups, goodput, self._rate_per_s, by_price=by_price)
        if not options:
            raise NoPlan(self._nothing_holds(goodput))
        tried: dict[int, Candidate] = {}

        def holds(position: int) -> bool:
            if position not in tried:
                self._on_progress(f"at the rate: {self._name(options[position][1])}")
                tried[position] = self._try(options[position][1])
            return bool(tried[position].holds)

        enough = (i for i, (worth, _) in enumerate(options) if worth >= self._rate_per_s)
        low, high = -1, next(enough, len(options) - 1)  # low does not hold, high is to hold
        step = 1
        while not holds(high):
            if high == len(options) - 1:
                raise NoPlan(self._nothing_holds(goodput, tried[high]))
            low, high = high, min(high + step, len(options) - 1)
            step *= 2
        while high - low > 1:
            # Near what is expected first: below it, few hold.
            middle = high - 1 if low < 0 else (low + high) // 2
            if holds(middle):
                high = middle
            else:
                low = middle
        # Its capacities are of prompts that are computed in full: with caches, less may do.
        bound = (
            None
            if self._in_order
            else lower_bound(
                self._groups,
                {key: found.profile for key, found in self._q.types.items()},
                self._mix,
                self._q.goals,
                self._rate_per_s,
                by_price=by_price,
            )
        )
        self._lower_bound = None if bound is None else bound.least
        pairs = [(options[i][1], candidate) for i, candidate in tried.items() if i != high]
        if by_price:
            nearby = self._cheaper(options[high][1], tried[high], goodput, pairs)
        else:
            nearby = [tried[high]]
        others = [candidate for _, candidate in pairs] + nearby[1:]
        return [nearby[0], *sorted(others, key=self._rank)]

    def _cheaper(
        self,
        found: Allocation,
        holding: Candidate,
        goodput: Mapping[Key, float],
        tried: Sequence[tuple[Allocation, Candidate]],
    ) -> list[Candidate]:
        """The cheapest near what holds the rate that holds it too, then all else that was tried."""
        best_layouts = [self._by_goodput(group, goodput) for group in self._groups]
        prices = [price_per_hour_usd(group) for group in self._groups]
        most = [
            g.machines if w else 0 for g, (w, _) in zip(self._groups, best_layouts, strict=True)
        ]
        failed = [_counts(each) for each, candidate in tried if not candidate.holds]
        counts, seen = _counts(found), [holding]
        for _ in range(_TRIES):
            near = (
                each
                for each in cheaper_sets(
                    counts,
                    most,
                    prices,
                    [worth for worth, _ in best_layouts],
                    least_worth=allocation.POOLING * self._rate_per_s,
                    least_price=self._lower_bound or 0.0,
                )
                if not is_part_of(each, failed)
            )
            if (each := next(near, None)) is None:
                break
            parts = tuple(((layout, n),) if n else ()
                          for n, (_, layout) in zip(each, best_layouts, strict=True))  # fmt: skip
            self._on_progress(f"at the rate: {self._name(parts)}")
            candidate = self._try(parts)
            if candidate.holds:
                counts, seen = each, [candidate, *seen]
            else:
                failed.append(each)
                seen.append(candidate)
        return seen

    def _by_goodput(self, group: Group, goodput: Mapping[Key, float]) -> tuple[float, Layout]:
        """The most requests/s that a machine of a group holds, and how; (0, ()): none."""
        worth = {t: value for (a, t), value in goodput.items() if a == group.accelerator}
        return max(best_by_use(group.count, worth), default=(0.0, ()))

    def _try(self, each: Allocation) -> Candidate:
        return self._confirmed(self._at_rate(self._saturated(each)))

    def _saturated(self, each: Allocation) -> Candidate:
        """With everything at once."""
        candidate = self._candidate(each)
        figures = self._saturate(candidate, self._mix)
        return candidate if figures is None else self._candidate(each, figures)

    def _saturate(self, candidate: Candidate, mix: Mix) -> Figures | None:
        q = self._q
        figures = trials.saturate(
            self._system(candidate), q.policy, mix, q.engines, q.requests, q.compiled
        )
        return None if figures is None else trials.at_most(figures, candidate.alone_tokens_per_s)

    def _hold(
        self, system: trials.System, rate_per_s: float, mix: Mix | None = None, times: int = 1
    ) -> Figures | None:
        """At a rate, by the search's own requests, or ``times`` as many of another mix."""
        q = self._q
        return trials.hold(
            system, q.policy, mix or self._mix, q.engines, rate_per_s, times * q.requests,
            q.compiled, q.goals.slo,
        )  # fmt: skip

    def _at_rate(self, candidate: Candidate) -> Candidate:
        """The candidate with its figures at the rate, and with what they mean for the goals."""
        q = self._q
        enough = _throughput(candidate) >= (1 + HEADROOM) * self._rate_per_s * self._tokens
        asked = q.goals.rate_per_s is not None
        if not enough:
            return dataclasses.replace(candidate, holds=False if asked else None)
        figures = self._hold(self._system(candidate), self._rate_per_s)
        if asked and q.goals.name == "cost":
            candidate = self._priced(candidate, self._rate_per_s)
        return dataclasses.replace(
            candidate,
            at_rate=figures,
            holds=figures is not None and not q.goals.missed(figures) if asked else None,
        )

    def _confirmed(self, candidate: Candidate) -> Candidate:
        """What holds a rate in one run must do so with other requests, twice as many, too."""
        q = self._q
        if not candidate.holds or not q.goals.has_limits:
            return candidate
        other = Mix.of(q.lengths, q.seed + 1)
        figures = self._hold(self._system(candidate), self._rate_per_s, other, times=2)
        if figures is not None and not q.goals.missed(figures):
            return candidate
        return dataclasses.replace(candidate, at_rate=figures, holds=False)

    def _system(self, candidate: Candidate) -> trials.System:
        machines = Counter(
            (self._machines[i].accelerator, t)
            for i, layout in candidate.layouts.items()
            for t in layout
        )
        counts = {key: n // as_size(key[1]).machines for key, n in machines.items()}
        return trials.reduced(
            {self._q.types[key].profile: n for key, n in sorted(counts.items())},
            {self._q.types[key].profile: alone for key, alone in self._alone.items()},
            self._q.requests,
        )

    # -- candidates

    def _candidate(self, each: Allocation, simulated: Figures | None = None) -> Candidate:
        layouts: dict[str, Layout] = {}
        paper = unpadded = alone = 0.0
        for group, parts in zip(self._groups, each, strict=True):
            ids = iter(group.ids)
            for layout, machines in parts:
                layouts.update((next(ids), layout) for _ in range(machines))
                estimates = self._estimated(group, layout)
                paper += machines * estimates[0]
                unpadded += machines * estimates[1]
                if all((group.accelerator, t) in self._alone for t in layout):
                    alone += machines * self._alone_sum(group, layout)
            layouts.update((machine_id, ()) for machine_id in ids)
        layouts = {m.id: layouts[m.id] for m in self._q.machines}
        running = sum(sum(layout) for layout in layouts.values())
        present = sum(self._machines[i].count for i, layout in layouts.items() if layout)
        tokens_per_s = alone if simulated is None else simulated.tokens_per_s
        return Candidate(
            layouts=layouts,
            estimate_paper_tokens_per_s=paper,
            estimate_tokens_per_s=unpadded,
            simulated=simulated,
            accelerators=running,
            idle_accelerators=present - running,
            usd_per_million_tokens=usd_per_million_tokens(self._q.machines, layouts, tokens_per_s),
            alone_tokens_per_s=alone,
        )

    def _name(self, each: Allocation) -> str:
        return reasons.summary(self._candidate(each), self._machines)

    def _rank(self, candidate: Candidate) -> tuple[float, ...]:
        """Sorts the better candidate first; what was not simulated comes last."""
        known = candidate.simulated is not None
        if self._q.goals.name == "goodput" and known:
            key = (-(candidate.goodput_per_s or 0.0), float(candidate.accelerators))
        elif self._q.goals.name == "cost" and candidate.alone_tokens_per_s:
            key = (candidate.usd_per_million_tokens or 0.0, -_throughput(candidate))
        elif known and self._q.goals.name == "fewest":
            key = (float(candidate.accelerators), -_throughput(candidate))
        elif known:
            key = (-_throughput(candidate), float(candidate.accelerators))
        else:
            key = (-candidate.alone_tokens_per_s, -candidate.estimate_tokens_per_s)
        return (float(not known), float(candidate.holds is False), *key)

    def _settle_ties(
        self, ranked: list[tuple[Candidate, Allocation]]
    ) -> list[tuple[Candidate, Allocation]]:
        """Those that one run cannot tell from the best are run again with other requests."""
        if self._q.goals.name != "throughput":
            return ranked
        least = (1 - _NOISE) * _throughput(ranked[0][0])
        tied = [pair for pair in ranked if _throughput(pair[0]) >= least]
        if len(tied) < 2:
            return ranked
        other = Mix.of(self._q.lengths, self._q.seed + 1)
        second = [self._saturate(candidate, other) for candidate, _ in tied]
        if any(figures is None for figures in second):
            return ranked
        # Other requests are a little harder or easier for all of them: that is nobody's merit.
        level = sum(_throughput(candidate) for candidate, _ in tied)
        level /= sum(figures.tokens_per_s for figures in second if figures is not None)
        again = [
            (_mean(candidate, figures, level), each)
            for (candidate, each), figures in zip(tied, second, strict=True)
            if figures is not None
        ]
        ranked = again + ranked[len(tied) :]
        return sorted(ranked, key=lambda pair: self._rank(pair[0]))

    # -- the answer

    def _plan(self, candidates: list[Candidate]) -> Plan:
        q = self._q
        best = candidates[0]
        told = [best] + [
            dataclasses.replace(
                c,
                why_not=reasons.why_not(c, best, self._machines, q.types, self._alone, q.goals),
            )
            for c in candidates[1:]
        ]
        return Plan(
            machines=q.machines,
            types=q.types,
            candidates=tuple(told),
            unfit=q.unfit,
            goal=q.goals.name,
            policy=q.policy,
            # At its own rate each, latencies do not compare.
            pareto=() if q.goals.at_goodput else _pareto(told),
            notes=(*q.notes, *self._notes(told)),
            alone=self._alone,
            limits=q.goals.limits,
            lower_bound=self._lower_bound,
            rate_per_s=self._rate_per_s,
            mean_prompt_tokens=self._mix.mean_prompt,
            mean_output_tokens=self._mix.mean_output,
        )

    def _notes(self, candidates: Sequence[Candidate]) -> list[str]:
        best = candidates[0]
        notes = []
        if self._q.goals.name == "throughput":
            others = [c for c in candidates[1:] if c.simulated is not None]
            if others and (line := self._lead(best, others[0])):
                notes.append(line)
        for machine in self._q.machines:
            layout = best.layouts[machine.id]
            if layout and (idle := machine.count - sum(layout)):
                notes.append(f"{machine.id}: {idle} of {machine.count} accelerators stay idle")
        unable = [m.id for g in self._groups if not self._feasible(g) for m in self._q.machines
                  if m.id in g.ids]  # fmt: skip
        if unable:
            notes.append(f"no instance fits {_few(unable)}")
        used = {(self._machines[i].accelerator, t) for i, of in best.layouts.items() for t in of}
        notes += [line for t in {as_size(t) for _, t in used} if (line := _caution(t))]
        for accelerator, t in sorted(used):
            if self._q.types[accelerator, t].memory.tight:
                notes.append(
                    f"{accelerator} tp{t} is tight: whether it fits hangs on the uncertainty of "
                    "its memory"
                )
        return notes

    def _lead(self, best: Candidate, second: Candidate) -> str | None:
        return reasons.lead(best, second, self._machines, self._q.types, self._alone)

    def _nothing_holds(self, goodput: Mapping[Key, float], largest: Candidate | None = None) -> str:
        limits = f" within {self._q.goals.limits}" if self._q.goals.has_limits else ""
        if not goodput:
            return f"no instance of any machine keeps {self._q.goals.limits} at any rate"
        total = sum(
            g.machines
            * max(
                (
                    sum(goodput.get((g.accelerator, t), 0.0) for t in layout) / together(layout)
                    for layout in self._worths[g]
                ),
                default=0.0,
            )
            for g in self._groups
        )
        text = f"nothing holds {self._rate_per_s:g} requests/s{limits}: all machines together "
        text += f"hold about {total:.3g}"
        if largest is not None and largest.at_rate is not None:
            text += f" ({self._q.goals.missed(largest.at_rate)})"
        return text


def instance_estimate(
    profile: Profile, prompt: Sequence[int], output: Sequence[int], estimator: Estimator
) -> float:
    """Algorithm 1's tokens/s of one instance; 0 where a request does not fit it.

    As printed it has no limit on the batch; unpadded, the engine's ``max_num_seqs``.
    """
    result = estimate_throughput(
        profile,
        profile.tensor_parallel,
        prompt,
        output,
        estimator=estimator,
        max_num_seqs=None if estimator == "paper" else profile.max_num_seqs,
    )
    return result.instance_tokens_per_s if isinstance(result, BatchEstimate) else 0.0


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


def _throughput(candidate: Candidate) -> float:
    return candidate.simulated.tokens_per_s if candidate.simulated else 0.0


def _mean(candidate: Candidate, other: Figures, level: float) -> Candidate:
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


def _pareto(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other beats in both throughput and mean latency at the rate; fastest last."""
    known = [c for c in candidates if c.at_rate is not None]
    known.sort(key=lambda c: (-_throughput(c), c.at_rate.latency_mean_s if c.at_rate else 0.0))
    kept: list[Candidate] = []
    for candidate in known:
        assert candidate.at_rate is not None
        last = kept[-1].at_rate if kept else None
        if last is None or candidate.at_rate.latency_mean_s < last.latency_mean_s:
            kept.append(candidate)
    return tuple(kept)


def _without_one(each: Allocation) -> list[Allocation]:
    """Each kind of machine left out in turn, where there are several: a slow one may do harm."""
    used = [i for i, parts in enumerate(each) if parts]
    if len(used) < 2:
        return []
    return [(*each[:i], (), *each[i + 1 :]) for i in used]


def _counts(each: Allocation) -> Counts:
    """Machines by group."""
    return tuple(sum(machines for _, machines in parts) for parts in each)


def _rate_of(
    each: Allocation, groups: Sequence[Group], worths: Mapping[Group, Mapping[Layout, float]]
) -> float:
    """Requests/s that the instances of an allocation hold alone, together."""
    return sum(
        machines * worths[group][layout]
        for group, parts in zip(groups, each, strict=True)
        for layout, machines in parts
    )


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
