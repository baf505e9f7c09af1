"""The three experiments of section 5, in virtual time. Returns figures; prints and writes nothing.

Everything runs on the simulator with vLLM 0.6's prefill-first steps, and on the gateway's own
scheduler. A request's tokens are its prompt's and its output's, as in Algorithm 1's tokenNum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from benchmarks.paper.lengths import Source
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.core.types import InstanceId
from hetero_gateway.files.cluster_config import load_cluster
from hetero_gateway.files.profile_file import builtin_profiles
from hetero_gateway.planner.batch_estimate import Estimator, estimate_throughput
from hetero_gateway.sim.cluster import SimulatedInstance
from hetero_gateway.sim.experiment import (
    Experiment,
    PredictorChoice,
    measure_bound,
    mix_moments,
    run_once,
)
from hetero_gateway.sim.result import RunResult
from hetero_gateway.sim.workload import TraceLengths

CLUSTERS = Path(__file__).parents[2] / "configs" / "clusters"
FILE_LINK = "NVLink2"  # what the files name
ACCELERATORS = 8
TENSOR_PARALLEL = (1, 2, 4, 8)
COPIES = 8  # of every request in the first experiment
# The attention heads over the KV heads of Llama-3-8B: how much too large the paper's 2·l·h is.
MHA_FACTOR = 4
# vLLM 0.6.0 without chunked prefill: the larger of 2048 and the context, which is 8192 here.
MAX_BATCHED_TOKENS = 8192
NO_SLO = Slo(float("inf"), float("inf"))


@dataclass(frozen=True)
class PolicyChoice:
    """A row of the tables: the paper's name where it has one."""

    label: str
    policy: str
    randomised: bool = False
    predictor: PredictorChoice = "bucket-mean"


RR = PolicyChoice("RR", "round-robin", randomised=True)
SI = PolicyChoice("SI", "single-instance")
MB = PolicyChoice("MB", "memory-based", predictor="normal")
OS = PolicyChoice("OS", "paper", predictor="normal")
WRR = PolicyChoice("WRR", "weighted-round-robin", randomised=True)
RR_TURNS = PolicyChoice("round-robin in turn", "round-robin")
WRR_TURNS = PolicyChoice("weighted in turn", "weighted-round-robin")
MIN_MAX = PolicyChoice("min-max", "min-max")
CAPACITY = PolicyChoice("capacity-weighted", "capacity-weighted")
FINISH = PolicyChoice("finish-time", "finish-time")


@dataclass(frozen=True)
class Cluster:
    """``name``: A or B; ``link``: between the V100s."""

    name: str
    link: str
    instances: tuple[SimulatedInstance, ...]

    def slowed(self, positions: Sequence[int], factor: float) -> Cluster:
        """Those instances' constants times ``factor``; the scheduler knows it."""
        instances = list(self.instances)
        for i in positions:
            p = instances[i].profile
            slow = replace(p, constants=p.constants.scaled(factor))
            instances[i] = replace(instances[i], profile=slow, believed=slow)
        return replace(self, instances=tuple(instances))


def paper_cluster(name: str, link: str) -> Cluster:
    """The cluster of configs/clusters/paper-NAME.yaml with this link between its V100s."""
    instances = []
    for instance in load_cluster(CLUSTERS / f"paper-{name.lower()}.yaml").instances:
        profile = builtin_profiles()[instance.profile.name.replace(FILE_LINK, link)]
        instances.append(replace(instance, profile=profile, believed=profile))
    return Cluster(name, link, tuple(instances))


def run(
    cluster: Cluster,
    source: Source,
    rate_per_s: float,
    choice: PolicyChoice,
    seed: int,
    count: int,
) -> RunResult:
    """Requests and arrivals depend on the seed alone, so policies are compared on the same ones.

    Raises:
        RuntimeError: a request was refused: throughput would say nothing then.
    """
    experiment = _experiment(cluster.instances, source, count)
    result = run_once(
        replace(experiment, randomised=choice.randomised, predictor=choice.predictor),
        choice.policy,
        rate_per_s,
        seed,
        mix_moments(source.lengths),
    )
    if result.refused:
        raise RuntimeError(f"{choice.label}: {result.refused} requests were refused")
    return result


def _experiment(instances: Sequence[SimulatedInstance], source: Source, count: int) -> Experiment:
    return Experiment(
        tuple(instances),
        source.lengths,
        count,
        NO_SLO,
        scheduling="prefill-first",
        max_batched_tokens=MAX_BATCHED_TOKENS,
    )


# Experiment 1: the ranking of t


@dataclass(frozen=True)
class Ranking:
    """Tokens/s of the whole machine by t; 0 where it is not feasible."""

    method: str
    link: str
    seed: int
    tokens_per_s: dict[int, float]

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(sorted(self.tokens_per_s, key=lambda t: -self.tokens_per_s[t]))


def estimated_ranking(
    source: Source, link: str, seed: int, *, estimator: Estimator, mha: bool, count: int = 200
) -> Ranking:
    """Algorithm 1 on ``count`` sampled requests."""
    prompts, outputs = source.lengths.draw(count, np.random.default_rng(seed))
    result = {}
    for t in TENSOR_PARALLEL:
        profile = builtin_profiles()[f"V100-32GB-{link}/Llama-3-8B/tp{t}"]
        if mha:
            capacity = profile.kv_capacity_tokens // MHA_FACTOR
            profile = replace(profile, kv_capacity_tokens=capacity)
        lists = prompts.tolist(), outputs.tolist()
        estimate = estimate_throughput(profile, *lists, estimator=estimator)
        result[t] = 0.0 if estimate is None else ACCELERATORS // t * estimate.tokens_per_s
    method = f"Algorithm 1, {'KV as printed' if mha else 'KV by GQA'}"
    return Ranking(method if estimator == "paper" else method + ", unpadded", link, seed, result)


def simulated_ranking(
    source: Source, links: Sequence[str], seed: int, count: int = 1000
) -> list[Ranking]:
    """``count`` requests × 8 at once, in turn over the instances; one ranking per link."""
    drawn = source.lengths.draw(count, np.random.default_rng(seed))
    prompts, outputs = (np.repeat(tokens, COPIES) for tokens in drawn)
    requests = Source(source.name, TraceLengths(prompts, outputs, in_order=True))
    known: dict[Profile, float] = {}
    rankings = []
    for link in links:
        result = {}
        for t in TENSOR_PARALLEL:
            profile = builtin_profiles()[f"V100-32GB-{link}/Llama-3-8B/tp{t}"]
            # t = 1 needs no link and is the same for each.
            key = replace(profile, gpu="")
            if key not in known:
                instances = tuple(
                    SimulatedInstance(InstanceId(f"t{t}-{i}"), profile, profile)
                    for i in range(ACCELERATORS // t)
                )
                machine = Cluster("8 V100s", link, instances)
                all_of_them = run(machine, requests, float("inf"), RR_TURNS, seed, prompts.size)
                known[key] = all_of_them.total_tokens_per_s
            result[t] = known[key]
        rankings.append(Ranking("simulation", link, seed, result))
    return rankings


# Experiments 2 and 3: policies


@dataclass(frozen=True)
class Comparison:
    """Runs of one cluster on one source of lengths: [(policy label, rate)][seed]."""

    cluster: Cluster
    source: str
    solo_tokens_per_s: tuple[float, ...]  # of each instance alone, never waiting for work
    runs: dict[tuple[str, float], list[RunResult]]

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(label for label, _ in self.runs))

    @property
    def rates(self) -> list[float]:
        return list(dict.fromkeys(rate for _, rate in self.runs))

    @property
    def ratio(self) -> float:
        """The strongest instance's solo throughput over the weakest's."""
        return max(self.solo_tokens_per_s) / min(self.solo_tokens_per_s)

    def tokens_per_s(self, label: str, rate: float) -> tuple[float, float]:
        """Mean and sd over the seeds."""
        return mean_sd([r.total_tokens_per_s for r in self.runs[label, rate]])

    def gain(self, label: str, over: str, rate: float) -> tuple[float, float]:
        """Mean and sd over the seeds of the ratio, less 1: each pair has the same requests."""
        pairs = zip(self.runs[label, rate], self.runs[over, rate], strict=True)
        return mean_sd([a.total_tokens_per_s / b.total_tokens_per_s - 1 for a, b in pairs])


def compare(
    cluster: Cluster,
    source: Source,
    choices: Sequence[PolicyChoice],
    rates: Sequence[float],
    seeds: int,
    count: int = 4000,
) -> Comparison:
    moments = mix_moments(source.lengths)
    bound = measure_bound(_experiment(cluster.instances, source, count))
    # The bound is in output tokens; ours are prompt and output tokens, in the mix's proportion.
    share = 1 + moments.mean_prompt / moments.mean_output
    return Comparison(
        cluster,
        source.name,
        tuple(share * output_tokens for output_tokens in bound.instances_tokens_per_s),
        {
            (choice.label, rate): [
                run(cluster, source, rate, choice, seed, count) for seed in range(seeds)
            ]
            for choice in choices
            for rate in rates
        },
    )


def mean_sd(values: Sequence[float]) -> tuple[float, float]:
    return fmean(values), stdev(values) if len(values) > 1 else 0.0
