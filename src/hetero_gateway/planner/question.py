"""The planner's question, and its trials of whole systems.

docs/design/search.md explains how throughput is measured, also of a trace in its order.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hetero_gateway.core.costs.arrays import Flags
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.lengths.predictors import (
    BucketMeanPredictor,
    NormalPredictor,
    OutputLengthPredictor,
)
from hetero_gateway.core.policies import PolicyOptions, make_policy
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId
from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.planner.batch_estimate import Estimator
from hetero_gateway.planner.goals import HEADROOM, Goals, Goodput, find_goodput
from hetero_gateway.planner.plan import InstanceType, Key, Machine, Plan, SystemFigures, Unfit
from hetero_gateway.planner.splitting import Transfers
from hetero_gateway.sim.alone import (
    FILLED,
    Alone,
    Engines,
    Mix,
    mean_running,
    run_alone,
    simulate_alone,
    stride,
)
from hetero_gateway.sim.cluster import Records, SimulatedInstance, simulate
from hetero_gateway.sim.figures import Distribution, request_times, within_slo
from hetero_gateway.sim.ordered_trace import OrderedTrace
from hetero_gateway.sim.result import tokens_between
from hetero_gateway.sim.workload import Lengths, Workload, even_rows, gamma_arrivals

# Batches of a whole system after the half-done ones; fewer if those would be more requests than the
# budget. With 2, instances of 670 sequences were not full yet: 9 % too few tokens.
_SYSTEM_BATCHES = 5
_LEAST_BATCHES = 3
# Requests of one run of a whole system, about: 0.3 to 1 s with finish-time, not compiled.
SYSTEM_REQUESTS = 2400
# At a rate: the share of the arrivals that only fills the system.
_FILL = 0.25
# ``sim.alone`` uses the seeds before these.
_ARRIVALS, _TIES, _PREDICTOR = range(3, 6)
# Size of a sample to load a deployment with, in batches of the whole system: enough that a run is
# mostly in steady state.
_BATCHES = 30
# Requests of a trace in order for one instance alone.
_LEAST_ALONE = 800
_LEAST_REQUESTS, _MOST_REQUESTS = 200, 20_000
_SAMPLES = 50


@dataclass(frozen=True, slots=True)
class System:
    """Numbers of instances by profile.

    ``batch``: about how many sequences run in all of them together when saturated.
    ``share`` of the system that they represent.
    """

    instances: tuple[tuple[Profile, int], ...]
    batch: float
    share: float = 1.0

    def simulated(self) -> list[SimulatedInstance]:
        """In turn, one of each kind, so that no kind comes first in a policy's order."""
        left = dict(enumerate(count for _, count in self.instances))
        result: list[SimulatedInstance] = []
        while any(left.values()):
            for k, (profile, _) in enumerate(self.instances):
                if left[k]:
                    left[k] -= 1
                    name = InstanceId(f"i{len(result)}")
                    result.append(SimulatedInstance(name, profile, profile))
        return result


def reduced(counts: Mapping[Profile, int], alone: Mapping[Profile, Alone], requests: int) -> System:
    """The largest proportional system whose runs take about so many requests.

    Args:
        counts: instances by profile, each above 0, in a fixed order.
        alone: each one's capacity; decides its batch, and its share of the system.
    """
    batches = sum(alone[profile].batch * n for profile, n in counts.items())
    factor = min(1.0, requests / (batches * (1 + _SYSTEM_BATCHES)))
    kept = tuple((profile, max(1, round(n * factor))) for profile, n in counts.items())
    whole = sum(alone[profile].tokens_per_s * n for profile, n in counts.items())
    return System(
        kept,
        sum(alone[profile].batch * n for profile, n in kept),
        sum(alone[profile].tokens_per_s * n for profile, n in kept) / whole,
    )


class Trials(NamedTuple):
    """How systems are tried.

    Args:
        policy: of the gateway.
        requests: of a run of a whole system, about.
        compiled: run the engines compiled by numba.
        slo: the limits of requests; the gateway does not know them.
    """

    policy: str
    engines: Engines
    requests: int = SYSTEM_REQUESTS
    compiled: bool = False
    slo: Slo | None = None

    def saturate(self, system: System, mix: Mix) -> SystemFigures | None:
        """Everything at once, in steady state, scaled to the system it represents."""
        half_done = math.ceil(system.batch)
        batches = np.clip(self.requests / half_done - 1, _LEAST_BATCHES, 4 * _SYSTEM_BATCHES)
        fresh = max(100, math.ceil(batches * half_done))
        if isinstance(mix.lengths, OrderedTrace):
            fresh = max(self.requests, fresh)
            workload = mix.lengths.under_way(half_done, fresh, share=system.share, seed=mix.seed)
            prompt, output = workload.prompt_tokens[half_done:], workload.output_tokens[half_done:]
            per_output_token = 1 + float(prompt.sum() / output.sum())
        else:
            prompt, output = mix.requests(half_done, fresh)
            workload = Workload(np.zeros(prompt.size), prompt, output)
            per_output_token = mix.tokens_per_output_token
        instances = system.simulated()
        records = self._simulate(instances, workload, mix)
        window = stride(records, half_done)
        if window is None:
            return None
        output_tokens_per_s = _tokens_per_s(workload, records, window)
        counted = (records.first_token_s >= window[0]) & (records.first_token_s <= window[1])
        return SystemFigures(
            tokens_per_s=output_tokens_per_s * per_output_token / system.share,
            output_tokens_per_s=output_tokens_per_s / system.share,
            batch=mean_running(records, *window) / len(instances),
            cached_share=_cached_share(workload, records, counted),
        )

    def hold(
        self, system: System, mix: Mix, rate_per_s: float, times: int = 1
    ) -> SystemFigures | None:
        """Poisson arrivals at a rate of the whole system, with ``times`` as many requests.

        None if no request finishes.
        """
        instances, requests = system.simulated(), times * self.requests
        if isinstance(mix.lengths, OrderedTrace):
            workload = mix.lengths.workload(
                max(400, requests), rate_per_s * system.share, share=system.share, seed=mix.seed
            )
        else:
            workload = _at_rate(mix, rate_per_s * system.share, system.batch, requests)
        records = self._simulate(instances, workload, mix)
        return _figures_at_rate(workload, records, mix, len(instances), system.share, self.slo)

    def hold_alone(self, profile: Profile, mix: Mix, rate_per_s: float) -> SystemFigures | None:
        """One instance at a rate of arrivals; None if it does not finish a request."""
        workload = _at_rate(mix, rate_per_s, mix.batch(profile))
        records = simulate_alone(profile, workload, self.engines)
        return _figures_at_rate(workload, records, mix, 1, slo=self.slo)

    def alone_in_order(
        self, profile: Profile, alone: Alone, share: float, mix: Mix
    ) -> Alone | None:
        """One instance with the requests of a share of a trace's sessions, and its prefix cache.

        Args:
            alone: its capacity with every prompt computed in full.
            mix: of an ``OrderedTrace``.
        """
        system = System(((profile, 1),), alone.batch, share)
        # As many as its part of a system's run, or a few hundred: its cache's content depends on
        # how much came before.
        requests = max(_LEAST_ALONE, math.ceil(share * self.requests))
        plain = Trials("finish-time", self.engines, requests)
        figures = plain.saturate(system, mix)
        if figures is None:
            return None
        output_tokens_per_s = figures.output_tokens_per_s * share
        if figures.batch >= FILLED * profile.max_num_seqs:
            limit = "max_num_seqs"
        else:
            limit = "KV" if figures.batch >= FILLED * mix.batch(profile) else "prefill"
        return Alone(
            tokens_per_s=figures.tokens_per_s * share,
            output_tokens_per_s=output_tokens_per_s,
            batch=figures.batch,
            step_s=figures.batch / output_tokens_per_s,
            limit=limit,
        )

    def _simulate(
        self, instances: Sequence[SimulatedInstance], workload: Workload, mix: Mix
    ) -> Records:
        options = PolicyOptions(single_instance=instances[0].instance_id)
        scheduler = Scheduler(
            make_policy(self.policy, options),
            np.random.default_rng((mix.seed, _TIES)),
            reference=(mix.mean_prompt, mix.mean_output),
            prefix_cache=workload.prefixes is not None,
        )
        predictor: OutputLengthPredictor = BucketMeanPredictor(mix.mean_output)
        if self.policy == "paper":
            rng = np.random.default_rng((mix.seed, _PREDICTOR))
            predictor = NormalPredictor(mix.mean_output, mix.sd_output, rng)
        most = max(i.profile.max_num_seqs for i in instances)
        return simulate(
            instances,
            workload,
            scheduler,
            predictor,
            scheduling=self.engines.scheduling,
            max_batched_tokens=max(self.engines.max_batched_tokens, most),
            compiled=self.compiled,
        )


def _at_rate(mix: Mix, rate_per_s: float, batch: float, requests: int = 1500) -> Workload:
    count = max(400, min(requests, math.ceil(batch * (1 + _SYSTEM_BATCHES))))
    prompt, output = mix.requests(0, count)
    rng = np.random.default_rng((mix.seed, _ARRIVALS))
    return Workload(gamma_arrivals(count, rate_per_s, 1.0, rng), prompt, output)


def _tokens_per_s(workload: Workload, records: Records, window: tuple[float, float]) -> float:
    return tokens_between(workload, records, *window) / (window[1] - window[0])


def _figures_at_rate(
    workload: Workload,
    records: Records,
    mix: Mix,
    instances: int,
    share: float = 1.0,
    slo: Slo | None = None,
) -> SystemFigures | None:
    size = len(workload)
    came = np.arange(size) >= int(_FILL * size)
    counted = came & np.isfinite(records.finish_s)
    window = (float(workload.arrival_s[int(_FILL * size)]), float(workload.arrival_s[-1]))
    if not counted.any() or window[1] <= window[0]:
        return None
    times = request_times(workload, records, counted)
    latency, ttft = Distribution.of(times.latency_s), Distribution.of(times.ttft_s)
    tpot = Distribution.of(times.tpot_s) if times.tpot_s.size else Distribution(mean=0.0, p99=0.0)
    slo_share = math.nan
    if slo is not None:
        slo_share = float(within_slo(workload, records, slo)[came].mean())
    output_tokens_per_s = _tokens_per_s(workload, records, window) / share
    per_output_token = mix.tokens_per_output_token
    if workload.prefixes is not None:  # these rows are not random draws
        per_output_token = 1 + float(workload.prompt_tokens.sum() / workload.output_tokens.sum())
    return SystemFigures(
        tokens_per_s=output_tokens_per_s * per_output_token,
        output_tokens_per_s=output_tokens_per_s,
        latency_mean_s=latency.mean,
        latency_p99_s=latency.p99,
        ttft_mean_s=ttft.mean,
        ttft_p99_s=ttft.p99,
        tpot_mean_s=tpot.mean,
        tpot_p99_s=tpot.p99,
        batch=mean_running(records, *window) / instances,
        slo_share=slo_share,
        cached_share=_cached_share(workload, records, counted),
    )


def _cached_share(workload: Workload, records: Records, counted: Flags) -> float:
    """Share of the counted requests' prompt tokens; nan if no prompts are known to be alike."""
    prompt_tokens = float(workload.prompt_tokens[counted].sum())
    if workload.prefixes is None or not prompt_tokens:
        return math.nan
    return float(records.cached_tokens[counted].sum()) / prompt_tokens


# The question


class PlannedTransfers(NamedTuple):
    """How instances would hand prompts over; ``backends`` of ``split_plan``, by accelerator."""

    transfers: Transfers
    backends: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Question:
    """The planner's input.

    Args:
        machines: with distinct ids.
        types: those that can be deployed, by (accelerator, size); ``unfit``: those that cannot.
        lengths: of the requests.
        estimator: of Algorithm 1, which prunes.
        seed: of everything random.
        requests: of one simulation of a whole system, about.
        compiled: run the engines compiled by numba.
        notes: passed on to the plan.
        transfer: with it, the plan reports the gain of splitting requests.
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
    requests: int = SYSTEM_REQUESTS
    compiled: bool = False
    notes: tuple[str, ...] = ()
    transfer: PlannedTransfers | None = None

    @property
    def in_order(self) -> bool:
        """Whether the requests are a trace that says which prompts begin alike."""
        return isinstance(self.lengths, OrderedTrace)

    @property
    def trials(self) -> Trials:
        return Trials(self.policy, self.engines, self.requests, self.compiled, self.goals.slo)

    def saturate(self, system: System, mix: Mix, alone_tokens_per_s: float) -> SystemFigures | None:
        """A system with everything at once, at most the sum of its instances alone.

        More is the luck of a short run, which flatters unequal layouts by up to 7 %; but not with
        prefix caches: what an instance finds depends on which sessions the gateway gives it.
        """
        found = self.trials.saturate(system, mix)
        if found is None or found.tokens_per_s <= alone_tokens_per_s:
            return found
        if not math.isnan(found.cached_share):
            return found
        output_tokens_per_s = found.output_tokens_per_s * alone_tokens_per_s / found.tokens_per_s
        return dataclasses.replace(
            found, tokens_per_s=alone_tokens_per_s, output_tokens_per_s=output_tokens_per_s
        )

    def goodput(
        self, system: System, mix: Mix, full: SystemFigures, likely_per_s: float | None = None
    ) -> Goodput | None:
        """The rate a system holds within the limits; ``full``: its result with everything at
        once."""
        most_per_s = full.tokens_per_s / (1 + HEADROOM) / mix.mean_tokens
        if not most_per_s:
            return None
        return find_goodput(
            functools.partial(self.trials.hold, system, mix),
            self.goals,
            most_per_s,
            likely_per_s=likely_per_s,
        )

    def alone(self, profile: Profile, mix: Mix, share: float) -> Alone | None:
        """One saturated instance; for a trace in order with a share of it."""
        found = run_alone(profile, mix, self.engines)
        if found is None or not self.in_order:
            return found
        return self.trials.alone_in_order(profile, found, share, mix)


class NoPlan(HeteroGatewayError):
    """The machines can serve, but no configuration of them keeps the goals."""


def sample_requests(plan: Plan, question: Question) -> list[tuple[int, int]]:
    """Requests to load a planned deployment with: (prompt, output) tokens.

    Their means are those of the planned mix.
    """
    batch = plan.best.simulated.batch if plan.best.simulated is not None else 1.0
    running = batch * sum(map(len, plan.best.layouts.values()))
    count = min(max(math.ceil(_BATCHES * running), _LEAST_REQUESTS), _MOST_REQUESTS)
    mix = Mix.of(question.lengths, question.seed)
    rng = np.random.default_rng(question.seed)
    # One of each slice of the mix sorted by length; of some such samples, the one whose means are
    # nearest to the mix's: a plan and a run of a thousand requests should differ by less than 1 %.
    samples = [even_rows(mix.prompt_pool, mix.output_pool, count, rng) for _ in range(_SAMPLES)]
    known = ((mix.prompt_pool, mix.mean_prompt), (mix.output_pool, mix.mean_output))
    rows = min(samples, key=lambda rows: sum(abs(of[rows].mean() / mean - 1) for of, mean in known))
    rng.shuffle(rows)
    prompt, output = mix.prompt_pool[rows], mix.output_pool[rows]
    return list(zip(prompt.tolist(), output.tolist(), strict=True))
