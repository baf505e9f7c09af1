"""The layouts left before whole systems are simulated, by their instances alone.

Algorithm 1 of the paper estimates each instance type and drops layouts; the remaining types are
simulated alone.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.errors import ConfigError
from hetero_gateway.planner.batch_estimate import Estimator, estimate_throughput
from hetero_gateway.planner.goals import HEADROOM, find_goodput
from hetero_gateway.planner.layouts import Group, feasible_sizes, machine_layouts, together
from hetero_gateway.planner.plan import Key, Layout, SystemFigures
from hetero_gateway.planner.question import Question, System
from hetero_gateway.planner.sizes import as_size
from hetero_gateway.sim.alone import Alone, Mix

# The best layout's estimate was never below 0.56 of the estimator's best in the 100 settings of
# benchmarks/planner/search.py (unpadded); at 0.6 it was dropped in one of them.
KEEP = 0.5
# The paper samples 200 requests.
_ESTIMATE_REQUESTS = 200
_ESTIMATE_STREAM = 7
# Tolerance of the rate that one instance alone holds, as a share of its maximum.
_ALONE_STEP = 1 / 16

# Algorithm 1's tokens/s of one instance of each type: as printed, and unpadded.
_Estimates = Mapping[Key, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Shortlist:
    """The layouts of each kind of machine.

    Args:
        mix: the requests of all simulations.
        alone: the saturated throughput of one instance of each remaining type.
        worths: tokens/s of one machine by its instances alone, of the remaining layouts.
        dropped: the layouts that Algorithm 1 puts too far below its best.
    """

    groups: tuple[Group, ...]
    mix: Mix
    alone: Mapping[Key, Alone]
    worths: Mapping[Group, Mapping[Layout, float]]
    dropped: Mapping[Group, Sequence[Layout]]
    estimates: _Estimates


def make_shortlist(
    question: Question, groups: tuple[Group, ...], on_progress: Callable[[str], None]
) -> Shortlist:
    """Raises ConfigError: no request fits an instance of any machine."""
    mix = Mix.of(question.lengths, question.seed)
    estimates = _estimate_types(question, groups)
    kept, dropped = _prune(question, groups, estimates)
    wanted = {(g.accelerator, t) for g, of in kept.items() for layout in of for t in layout}
    alone: dict[Key, Alone] = {}
    for key in sorted(wanted):
        on_progress(f"{key[0]} tp{key[1]} alone")
        profile, share = question.types[key].profile, _share(question, key)
        if (found := question.alone(profile, mix, share)) is not None:
            alone[key] = found
    worths = {
        group: {
            layout: alone_sum(alone, group, layout)
            for layout in layouts
            if all((group.accelerator, t) in alone for t in layout)
        }
        for group, layouts in kept.items()
    }
    if not any(worths.values()):
        raise ConfigError("no request of the workload fits an instance of any machine")
    return Shortlist(groups, mix, alone, worths, dropped, estimates)


# Algorithm 1


def _estimate_types(question: Question, groups: Sequence[Group]) -> _Estimates:
    rng = np.random.default_rng((question.seed, _ESTIMATE_STREAM))
    prompt, output = (v.tolist() for v in question.lengths.draw(_ESTIMATE_REQUESTS, rng))
    keys = {(g.accelerator, t) for g in groups for t in feasible_sizes(g, question.types)}
    found = {}
    for key in sorted(keys):
        profile = question.types[key].profile
        found[key] = (
            _instance_estimate(profile, prompt, output, "paper"),
            _instance_estimate(profile, prompt, output, "unpadded"),
        )
    return found


def _instance_estimate(
    profile: Profile, prompt: Sequence[int], output: Sequence[int], estimator: Estimator
) -> float:
    """Algorithm 1's tokens/s of one instance; 0 if a request does not fit it.

    As printed it has no limit on the batch; unpadded, the engine's ``max_num_seqs``.
    """
    most = None if estimator == "paper" else profile.max_num_seqs
    found = estimate_throughput(profile, prompt, output, estimator=estimator, max_num_seqs=most)
    return 0.0 if found is None else found.tokens_per_s


def estimated(estimates: _Estimates, group: Group, layout: Layout) -> tuple[float, float]:
    """Algorithm 1's tokens/s of one machine: as printed, and unpadded."""
    pairs = [estimates[group.accelerator, t] for t in layout]
    share = 1 / together(layout)
    return sum(paper for paper, _ in pairs) * share, sum(fair for _, fair in pairs) * share


def _prune(
    question: Question, groups: Sequence[Group], estimates: _Estimates
) -> tuple[dict[Group, list[Layout]], dict[Group, list[Layout]]]:
    """The remaining layouts, and the others; all remain if latency goals may need a larger t, or if
    prefix caches, which Algorithm 1 ignores, may favour one.

    Those over several machines are few, and the smallest may be the cheapest: they remain.
    """
    which = 0 if question.estimator == "paper" else 1
    kept, dropped = {}, {}
    for group in groups:
        layouts = machine_layouts(group.count, feasible_sizes(group, question.types))
        worth = {x: estimated(estimates, group, x)[which] for x in layouts}
        least = KEEP * max(worth.values(), default=0.0)
        if question.goals.has_limits or question.in_order:
            least = 0.0
        kept[group] = [x for x in layouts if worth[x] >= least or together(x) > 1]
        dropped[group] = [x for x in layouts if x not in kept[group]]
    return kept, dropped


# Instances alone


def _share(question: Question, key: Key) -> float:
    """An instance's share of all accelerators: of the sessions that it is assumed to get."""
    return as_size(key[1]).accelerators / sum(m.count for m in question.machines)


def alone_sum(alone: Mapping[Key, Alone], group: Group, layout: Layout) -> float:
    """Tokens/s of one machine; 0 if not every instance was simulated alone."""
    if any((group.accelerator, t) not in alone for t in layout):
        return 0.0
    sums = sum(alone[group.accelerator, t].tokens_per_s for t in layout)
    return sums / together(layout)


def rates_alone(
    question: Question, of: Shortlist, on_progress: Callable[[str], None]
) -> dict[Key, float]:
    """Requests/s that one instance of each type holds within the limits, if any."""
    result = {}
    for key, alone in of.alone.items():
        most = alone.tokens_per_s / of.mix.mean_tokens / (1 + HEADROOM)
        if question.goals.has_limits:
            on_progress(f"{key[0]} tp{key[1]} within the limits")
            found = find_goodput(
                functools.partial(_hold_alone, question, of, key),
                question.goals,
                most,
                step=_ALONE_STEP,
                likely_per_s=most,
            )
            most = 0.0 if found is None else found.rate_per_s
        if most > 0:
            result[key] = most
    return result


def _hold_alone(
    question: Question, of: Shortlist, key: Key, rate_per_s: float
) -> SystemFigures | None:
    profile = question.types[key].profile
    if question.in_order:
        system = System(((profile, 1),), of.alone[key].batch, _share(question, key))
        return question.trials.hold(system, of.mix, rate_per_s / system.share)
    return question.trials.hold_alone(profile, of.mix, rate_per_s)
