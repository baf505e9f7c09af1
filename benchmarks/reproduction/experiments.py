"""The three experiments of section 5, in virtual time. Returns figures; prints and writes nothing.

Everything runs on the simulator with vLLM 0.6's prefill-first steps, and on the gateway's own
scheduler. A request's tokens are its prompt's and its output's, as in Algorithm 1's tokenNum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import numpy as np

from benchmarks.reproduction.lengths import IntArray, Lengths
from hetero_gateway.config import builtin_profiles
from hetero_gateway.core.length import BucketMeanPredictor
from hetero_gateway.core.policies import PolicyOptions, make_policy
from hetero_gateway.core.profile import Profile
from hetero_gateway.core.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId
from hetero_gateway.planner.batch_estimate import BatchEstimate, Estimator, estimate_throughput
from hetero_gateway.sim.cluster import SimulatedInstance, simulate
from hetero_gateway.sim.workload import Workload

ACCELERATORS = 8
TENSOR_PARALLEL = (1, 2, 4, 8)
COPIES = 8  # of every request in the first experiment
# The attention heads over the KV heads of Llama-3-8B: how much too large the paper's 2·l·h is.
MHA_FACTOR = 4
# vLLM 0.6.0 without chunked prefill: the larger of 2048 and the context, which is 8192 here.
MAX_BATCHED_TOKENS = 8192
# The sample from which the paper's predictor takes its mean and standard deviation; it says
# "a subset".
PREDICTOR_SAMPLE = 1000


@dataclass(frozen=True)
class PolicyChoice:
    """A column of the tables: the paper's name where it has one."""

    label: str
    policy: str
    randomised: bool = False
    normal_predictor: bool = False  # the paper's: independent normal draws
    single: int = 0  # of single-instance: which


RR = PolicyChoice("RR", "round-robin", randomised=True)
SI = PolicyChoice("SI", "single-instance")
SI_B = PolicyChoice("SI (A800)", "single-instance", single=4)
MB = PolicyChoice("MB", "memory-based", normal_predictor=True)
OS = PolicyChoice("OS", "paper", normal_predictor=True)
WRR = PolicyChoice("WRR", "weighted-round-robin", randomised=True)
RR_TURNS = PolicyChoice("round-robin in turn", "round-robin")
WRR_TURNS = PolicyChoice("weighted in turn", "weighted-round-robin")
MIN_MAX = PolicyChoice("min-max", "min-max")
CAPACITY = PolicyChoice("capacity-weighted", "capacity-weighted")
FINISH = PolicyChoice("finish-time", "finish-time")


@dataclass(frozen=True)
class Cluster:
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


def cluster_a(link: str) -> Cluster:
    """Section 5.2: one instance of four V100s, one of one; weights 4 and 1 (configs/clusters)."""
    name = f"V100-32GB-{link}/Llama-3-8B/tp"
    return Cluster(
        "A", link, (_instance("v100-t4", name + "4", 4.0), _instance("v100-t1", name + "1"))
    )


def cluster_b(link: str) -> Cluster:
    """Section 5.3: four instances of two V100s, one of one A800."""
    v100 = f"V100-32GB-{link}/DeepSeek-R1-Distill-Qwen-14B/tp2"
    instances = [_instance(f"v100-t2-{i}", v100) for i in range(4)]
    a800 = _instance("a800", "A800-80GB-PCIe/DeepSeek-R1-Distill-Qwen-14B/tp1")
    return Cluster("B", link, (*instances, a800))


def _instance(instance_id: str, profile_name: str, weight: float = 1.0) -> SimulatedInstance:
    profile = builtin_profiles()[profile_name]
    return SimulatedInstance(InstanceId(instance_id), profile, profile, weight)


# One run


@dataclass(frozen=True)
class Run:
    """What one run gave; tuples are by instance."""

    tokens_per_s: float  # over the time of the last completion
    latency_mean_s: float
    latency_p99_s: float
    requests: tuple[int, ...]
    completion_s: tuple[float, ...]

    @property
    def spread(self) -> float:
        """The difference of the instances' completion times, over the last one."""
        return (max(self.completion_s) - min(self.completion_s)) / max(self.completion_s)


def run(
    cluster: Cluster,
    lengths: Lengths,
    rate_per_s: float,
    choice: PolicyChoice,
    seed: int,
    count: int,
) -> Run:
    """Requests and arrivals depend on the seed alone, so policies are compared on the same ones."""
    rng = np.random.default_rng(seed)
    prompts, outputs = lengths.sample(count, rng)
    arrivals = np.zeros(count)
    if math.isfinite(rate_per_s):
        arrivals = np.cumsum(rng.exponential(1 / rate_per_s, count))
    _, sample = lengths.sample(min(PREDICTOR_SAMPLE, count), rng)
    predictions = None
    if choice.normal_predictor:
        predictions = np.maximum(1.0, rng.normal(sample.mean(), sample.std(), count))
    return _simulate(
        cluster.instances,
        Workload(arrivals, prompts, outputs),
        choice,
        seed,
        BucketMeanPredictor(float(sample.mean())),
        predictions,
    )


def _simulate(
    instances: Sequence[SimulatedInstance],
    workload: Workload,
    choice: PolicyChoice,
    seed: int,
    predictor: BucketMeanPredictor,
    predictions: np.ndarray[tuple[int], np.dtype[np.float64]] | None = None,
) -> Run:
    options = PolicyOptions(
        randomised=choice.randomised, single_instance=instances[choice.single].instance_id
    )
    # Not the generator that made the requests: a draw for a policy must not repeat one of those.
    rng = np.random.default_rng([seed, 1])
    records = simulate(
        instances,
        workload,
        Scheduler(make_policy(choice.policy, options), rng),
        predictor,
        scheduling="prefill-first",
        max_batched_tokens=MAX_BATCHED_TOKENS,
        predictions=predictions,
    )
    if np.isnan(records.finish_s).any():
        raise RuntimeError(f"{choice.label}: {np.isnan(records.finish_s).sum()} were not finished")
    latency_s = records.finish_s - workload.arrival_s
    on = [records.instance == i for i in range(len(instances))]
    return Run(
        tokens_per_s=float(
            (workload.prompt_tokens.sum() + workload.output_tokens.sum()) / records.finish_s.max()
        ),
        latency_mean_s=float(latency_s.mean()),
        latency_p99_s=float(np.percentile(latency_s, 99)),
        requests=tuple(int(mine.sum()) for mine in on),
        completion_s=tuple(float(records.finish_s[mine].max(initial=0.0)) for mine in on),
    )


def solo_tokens_per_s(cluster: Cluster, lengths: Lengths, seed: int, count: int) -> list[float]:
    """What each instance alone does with everything sent at once; equal profiles run once."""
    known: dict[Profile, float] = {}
    for instance in cluster.instances:
        if instance.profile not in known:
            alone = replace(cluster, instances=(instance,))
            known[instance.profile] = run(alone, lengths, math.inf, SI, seed, count).tokens_per_s
    return [known[instance.profile] for instance in cluster.instances]


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
    lengths: Lengths, link: str, seed: int, *, estimator: Estimator, mha: bool, count: int = 200
) -> Ranking:
    """Algorithm 1 on ``count`` sampled requests."""
    prompts, outputs = lengths.sample(count, np.random.default_rng(seed))
    result = {}
    for t in TENSOR_PARALLEL:
        profile = builtin_profiles()[f"V100-32GB-{link}/Llama-3-8B/tp{t}"]
        estimate = estimate_throughput(
            profile,
            ACCELERATORS,
            prompts.tolist(),
            outputs.tolist(),
            estimator=estimator,
            kv_capacity_tokens=profile.kv_capacity_tokens // (MHA_FACTOR if mha else 1),
        )
        result[t] = estimate.tokens_per_s if isinstance(estimate, BatchEstimate) else 0.0
    method = f"Algorithm 1, {'KV as printed' if mha else 'KV by GQA'}"
    return Ranking(method if estimator == "paper" else method + ", unpadded", link, seed, result)


def simulated_ranking(
    lengths: Lengths, links: Sequence[str], seed: int, count: int = 1000
) -> list[Ranking]:
    """``count`` requests × 8 at once, in turn over the instances; one ranking per link."""
    prompts, outputs = lengths.sample(count, np.random.default_rng(seed))
    known: dict[Profile, float] = {}
    rankings = []
    for link in links:
        result = {}
        for t in TENSOR_PARALLEL:
            name = f"V100-32GB-{link}/Llama-3-8B/tp{t}"
            profile = builtin_profiles()[name]
            # t = 1 needs no link and is the same for each.
            key = replace(profile, gpu="")
            if key not in known:
                known[key] = _duplicated(name, ACCELERATORS // t, prompts, outputs, seed)
            result[t] = known[key]
        rankings.append(Ranking("simulation", link, seed, result))
    return rankings


def _duplicated(
    profile_name: str, instances: int, prompts: IntArray, outputs: IntArray, seed: int
) -> float:
    workload = Workload(
        np.zeros(len(prompts) * COPIES), np.repeat(prompts, COPIES), np.repeat(outputs, COPIES)
    )
    members = [_instance(f"i{i}", profile_name) for i in range(instances)]
    predictor = BucketMeanPredictor(float(outputs.mean()))
    return _simulate(members, workload, RR_TURNS, seed, predictor).tokens_per_s


# Experiments 2 and 3: policies


@dataclass(frozen=True)
class Comparison:
    """Runs of one cluster on one source of lengths: [(policy label, rate)][seed]."""

    cluster: Cluster
    source: str
    solo_tokens_per_s: list[float]
    runs: dict[tuple[str, float], list[Run]]

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
        return mean_sd([r.tokens_per_s for r in self.runs[label, rate]])

    def gain(self, label: str, over: str, rate: float) -> tuple[float, float]:
        """Mean and sd over the seeds of the ratio, less 1: each pair has the same requests."""
        pairs = zip(self.runs[label, rate], self.runs[over, rate], strict=True)
        return mean_sd([a.tokens_per_s / b.tokens_per_s - 1 for a, b in pairs])


def compare(
    cluster: Cluster,
    lengths: Lengths,
    choices: Sequence[PolicyChoice],
    rates: Sequence[float],
    seeds: int,
    count: int = 4000,
) -> Comparison:
    return Comparison(
        cluster,
        lengths.name,
        solo_tokens_per_s(cluster, lengths, 0, max(1, count // 2)),
        {
            (choice.label, rate): [
                run(cluster, lengths, rate, choice, seed, count) for seed in range(seeds)
            ]
            for choice in choices
            for rate in rates
        },
    )


def mean_sd(values: Sequence[float]) -> tuple[float, float]:
    return fmean(values), stdev(values) if len(values) > 1 else 0.0
