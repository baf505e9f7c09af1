"""Policies × rates × seeds on one simulated cluster. Pure.

With one seed, every policy gets the same requests, times and faults. The seed changes all of those
draws, the scheduler's ties and the predictor's draws.

Results are compared with a bound: the sum of the instances' own throughputs on the same mix, each
alone and saturated. It is not strict: a policy that sorts requests by length, so that each instance
gets those that suit it, may come out a little above.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from hetero_gateway.core.costs.arrays import FloatArray
from hetero_gateway.core.instances.pairs import Pairs
from hetero_gateway.core.lengths.length_model import LengthModel, TrainedPredictor
from hetero_gateway.core.lengths.predictors import (
    BucketMeanPredictor,
    ConstantPredictor,
    NormalPredictor,
    OutputLengthPredictor,
)
from hetero_gateway.core.policies import PolicyMaker, PolicyOptions, make_policy
from hetero_gateway.core.policies.base import Objective
from hetero_gateway.core.policies.legs import RolePrice
from hetero_gateway.core.policies.slo import Slo, Slos
from hetero_gateway.core.scheduling.discipline_settings import DEFAULT_DISCIPLINE, DisciplineName
from hetero_gateway.core.scheduling.disciplines import make_discipline
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import BATCH_CLASS, DEFAULT_CLASS, InstanceId
from hetero_gateway.sim import cluster
from hetero_gateway.sim.alone import Engines, Mix, run_alone
from hetero_gateway.sim.cluster import Records, SimulatedInstance
from hetero_gateway.sim.engine import DEFAULT_MAX_BATCHED_TOKENS, Scheduling
from hetero_gateway.sim.held import held_loads
from hetero_gateway.sim.prefixes import Prefixes
from hetero_gateway.sim.result import Cell, RunResult, summarise
from hetero_gateway.sim.workload import (
    EvenLengths,
    Fault,
    Lengths,
    Workload,
    at_rate,
    gamma_arrivals,
)

PredictorChoice = Literal["auto", "bucket-mean", "constant", "normal", "trained", "oracle"]

# For the mix's mean and standard deviation: enough for heavy tails to be within 2 %.
_MOMENT_DRAWS = 20_000
# Requests of the bound's runs. With an even sample of the mix's rows, this many give the bound to
# 0.4 % (standard deviation over seeds); the rows themselves give the mix to 1 %.
_BOUND_REQUESTS = 10_000
# Seeds of draws that do not depend on the run's seed.
_MOMENTS_STREAM, _BOUND_STREAM = 1_000_001, 1_000_002


# The signature of ``sim.cluster.simulate``.
Simulate = Callable[..., Records]
# For a policy at a rate, per second: who can hand over to whom, new for each run, and the roles;
# None: nothing is split.
Splits = Callable[[str, float], tuple[Pairs, Mapping[InstanceId, RolePrice]] | None]


@dataclass(frozen=True, slots=True)
class Experiment:
    """The settings common to all runs; ``simulate --help`` explains each option.

    Args:
        instances: at least one.
        lengths: source of the requests' lengths.
        count: requests of one run.
        arrival_cv: coefficient of variation of the gaps between arrivals; 1: Poisson.
        trace_arrival_s: (count,) a trace's own times, from 0; stretched to each rate in place
            of random arrivals. None: random arrivals.
        predictor: ``auto`` is ``normal`` for the policy ``paper`` and ``bucket-mean`` for
            others. These start from the mix's mean. ``trained`` starts from ``length_model``;
            ``oracle`` knows each request's true length.
        length_model: of the predictor ``trained``, and only of that.
        prefixes: of the requests, in the order of ``lengths``; then their engines have prefix
            caches, unless switched off. The bound is without them.
        prefix_cache: whether the scheduler knows of them.
        policies: further ones, by the names that they are compared under.
        heeds_slo: ``finish-time`` knows ``slo``; else it is only judged by it.
        splits: how requests are split; None: they are not.

    Raises:
        ValueError: the predictor and ``length_model`` do not agree, or there are fewer
            ``prefixes`` than requests.
    """

    instances: tuple[SimulatedInstance, ...]
    lengths: Lengths
    count: int
    slo: Slo
    arrival_cv: float = 1.0
    trace_arrival_s: FloatArray | None = None
    faults: tuple[Fault, ...] = ()
    scheduling: Scheduling = "chunked"
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS
    predictor: PredictorChoice = "auto"
    randomised: bool = False
    objective: Objective = "latency"
    length_model: LengthModel | None = None
    prefixes: Prefixes | None = None
    prefix_cache: bool = True
    policies: Mapping[str, PolicyMaker] = field(default_factory=dict)
    queue: DisciplineName = DEFAULT_DISCIPLINE
    batch_share: float = 0.0
    heeds_slo: bool = False
    splits: Splits | None = None

    def __post_init__(self) -> None:
        if (self.length_model is not None) != (self.predictor == "trained"):
            raise ValueError("the predictor trained has a length_model, and no other has one")
        if self.prefixes is not None and len(self.prefixes) < self.count:
            raise ValueError("there must be a text for each request")


@dataclass(frozen=True, slots=True)
class Moments:
    """Of the mix, in tokens."""

    mean_prompt: float
    mean_output: float
    sd_output: float


@dataclass(frozen=True, slots=True)
class Bound:
    """Output tokens per second of each instance alone, in the cluster's order, and their sum."""

    instances_tokens_per_s: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        return sum(self.instances_tokens_per_s)

    def rate_per_s(self, load: float, moments: Moments) -> float:
        """The arrival rate whose output is this share of the bound."""
        return load * self.tokens_per_s / moments.mean_output


@dataclass(frozen=True, slots=True)
class Rate:
    """Arrivals per second, ``inf`` for all at once; and the load it was computed from, if any."""

    per_s: float
    load: float | None = None


def mix_moments(lengths: Lengths) -> Moments:
    prompt, output = lengths.draw(_MOMENT_DRAWS, np.random.default_rng(_MOMENTS_STREAM))
    return Moments(float(prompt.mean()), float(output.mean()), float(output.std()))


def measure_bound(experiment: Experiment) -> Bound:
    """Run every distinct profile alone on the mix; see ``sim.alone``."""
    rows = experiment.lengths.draw(_MOMENT_DRAWS, np.random.default_rng(_MOMENTS_STREAM))
    mix = Mix.of(EvenLengths(*rows), _BOUND_STREAM)
    engines = Engines(experiment.scheduling, experiment.max_batched_tokens)
    profiles = dict.fromkeys(i.profile for i in experiment.instances)
    found = {p: run_alone(p, mix, engines, _BOUND_REQUESTS) for p in profiles}
    rates = {p: 0.0 if its is None else its.output_tokens_per_s for p, its in found.items()}
    return Bound(tuple(rates[i.profile] for i in experiment.instances))


def run_once(
    experiment: Experiment,
    policy: str,
    rate_per_s: float,
    seed: int,
    moments: Moments,
    simulate: Simulate = cluster.simulate,
) -> RunResult:
    """One policy at one rate with one seed. Raises KeyError for a policy that does not exist."""
    workload = make_workload(experiment, rate_per_s, seed)
    choice: PredictorChoice = experiment.predictor
    if choice == "auto":
        choice = make_policy(policy, installed=experiment.policies).default_predictor
    predictions = workload.output_tokens.astype(np.float64) if choice == "oracle" else None
    split = None if experiment.splits is None else experiment.splits(policy, rate_per_s)
    legs = {} if split is None else {"pairs": split[0], "roles": split[1]}
    records = simulate(
        experiment.instances,
        workload,
        _scheduler(experiment, policy, seed, moments),
        _predictor(experiment, choice, moments, np.random.default_rng((seed, 3))),
        faults=experiment.faults,
        scheduling=experiment.scheduling,
        max_batched_tokens=experiment.max_batched_tokens,
        predictions=predictions,
        **legs,
    )
    return summarise(workload, records, len(experiment.instances), experiment.slo)


def compare(
    experiment: Experiment,
    policies: Sequence[str],
    rates: Sequence[Rate],
    seeds: Sequence[int],
    bound: Bound,
    *,
    simulate: Simulate = cluster.simulate,
    on_run: Callable[[str, Rate, int], None] = lambda policy, rate, seed: None,
) -> list[Cell]:
    """Every policy at every rate; ``on_run`` is called after each. Rates come first in order."""
    moments = mix_moments(experiment.lengths)
    ids = tuple(str(i.instance_id) for i in experiment.instances)
    cells = []
    for rate in rates:
        for policy in policies:
            runs = []
            for seed in seeds:
                runs.append(run_once(experiment, policy, rate.per_s, seed, moments, simulate))
                on_run(policy, rate, seed)
            cells.append(Cell(policy, rate.per_s, rate.load, bound.tokens_per_s, ids, tuple(runs)))
    return cells


def held(
    experiment: Experiment,
    policy: str,
    seeds: Sequence[int],
    bound: Bound,
    *,
    simulate: Simulate = cluster.simulate,
    on_load: Callable[[float], None] = lambda load: None,
) -> tuple[float, ...]:
    """The highest loads at which ``held.SHARES`` of the requests are within the SLO.

    The share is the mean over the seeds; ``on_load`` is called before each tried load.
    """
    moments = mix_moments(experiment.lengths)

    def share_at(load: float) -> float:
        on_load(load)
        rate = bound.rate_per_s(load, moments)
        runs = [run_once(experiment, policy, rate, seed, moments, simulate) for seed in seeds]
        return sum(run.slo_share for run in runs) / len(runs)

    return held_loads(share_at)


def make_workload(experiment: Experiment, rate_per_s: float, seed: int) -> Workload:
    """The requests of one run: the same for every policy, in the same pattern at every rate."""
    prompt, output = experiment.lengths.draw(experiment.count, np.random.default_rng((seed, 0)))
    if math.isinf(rate_per_s):
        arrival_s = np.zeros(experiment.count)
    elif experiment.trace_arrival_s is not None:
        arrival_s = at_rate(experiment.trace_arrival_s, rate_per_s)
    else:
        rng = np.random.default_rng((seed, 1))
        arrival_s = gamma_arrivals(experiment.count, rate_per_s, experiment.arrival_cv, rng)
    classes: tuple[str, ...] = ()
    if experiment.batch_share:
        drawn = np.random.default_rng((seed, 5)).random(experiment.count)
        batch = drawn < experiment.batch_share
        classes = tuple(BATCH_CLASS if one else DEFAULT_CLASS for one in batch)
    return Workload(arrival_s, prompt, output, experiment.prefixes, classes)


def _scheduler(experiment: Experiment, policy: str, seed: int, moments: Moments) -> Scheduler:
    options = PolicyOptions(
        randomised=experiment.randomised,
        single_instance=experiment.instances[0].instance_id,
        objective=experiment.objective,
        slos=Slos(experiment.slo) if experiment.heeds_slo else None,
    )
    return Scheduler(
        make_policy(policy, options, experiment.policies),
        np.random.default_rng((seed, 2)),
        reference=(moments.mean_prompt, moments.mean_output),
        discipline=make_discipline(experiment.queue),
        prefix_cache=experiment.prefix_cache and experiment.prefixes is not None,
    )


def _predictor(
    experiment: Experiment, choice: PredictorChoice, moments: Moments, rng: np.random.Generator
) -> OutputLengthPredictor:
    if choice == "trained" and experiment.length_model is not None:
        return TrainedPredictor(experiment.length_model)
    if choice == "normal":
        return NormalPredictor(moments.mean_output, moments.sd_output, rng)
    if choice == "constant":
        return ConstantPredictor(moments.mean_output)
    return BucketMeanPredictor(moments.mean_output)
