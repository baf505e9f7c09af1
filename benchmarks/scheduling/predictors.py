"""What each output-length predictor errs, costs, and is worth to each policy in virtual time.

    python benchmarks/scheduling/predictors.py NAME=TRACE.csv ... [-c CLUSTER.yaml] \\
        [--seeds 5] [--count 1500]

Three tables, in Markdown. The errors are of the later half of each trace: ``trained`` was fitted on
the earlier half, and ``mean`` and ``bucket-mean`` have learnt from it; each but ``mean`` goes on
learning. The costs are CPU time per call. The worth: the requests of a run are drawn from the later
half; a figure is the mean ± sd over the seeds of the ratio to the constant mean with the same
requests at the same times. There ``constant`` and ``normal`` are told the later half's own mean,
and ``bucket-mean`` starts from it: more than a real one could know.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hetero_gateway.cli.predictor import length_samples, predict_held_out
from hetero_gateway.core.lengths.length_model import LengthModel, TrainedPredictor, leaf_count
from hetero_gateway.core.lengths.predictors import (
    BucketMeanPredictor,
    ConstantPredictor,
    LengthFeatures,
    NormalPredictor,
    OutputLengthPredictor,
)
from hetero_gateway.core.lengths.training import LengthSamples, error_of, fit_length_model, replay
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.files.cluster_config import load_cluster
from hetero_gateway.files.trace import read_trace
from hetero_gateway.gateway.records.history import RequestHistory
from hetero_gateway.sim.cluster import SimulatedInstance
from hetero_gateway.sim.experiment import Experiment, measure_bound, mix_moments, run_once
from hetero_gateway.sim.result import RunResult
from hetero_gateway.sim.workload import TraceLengths

ROOT = Path(__file__).resolve().parents[2]
POLICIES = ("finish-time", "min-max", "paper", "capacity-weighted", "least-work")
PREDICTORS = ("normal", "bucket-mean", "trained", "oracle")
BASELINE = "constant"
# Near saturation for latency; everything at once for throughput.
LOAD = 0.9
GOAL_US = 20.0
CALLS, ROUNDS = 20_000, 7


@dataclasses.dataclass(frozen=True)
class Halves:
    """A trace in order of arrival, cut in the middle, and what was fitted on the earlier half."""

    name: str
    earlier: LengthSamples
    later: LengthSamples
    model: LengthModel


def read_halves(argument: str) -> Halves:
    name, _, file = argument.rpartition("=")
    path = Path(file)
    rows = read_trace(path)
    if all(row.arrival_s is not None for row in rows):
        rows.sort(key=lambda row: row.arrival_s or 0.0)
    samples = length_samples(rows)
    middle = len(samples) // 2
    earlier = samples.part(0, middle)
    return Halves(
        name or path.stem, earlier, samples.part(middle, len(samples)), fit_length_model(earlier)
    )


# Errors


def print_errors(traces: Sequence[Halves]) -> None:
    names = ("mean", "bucket-mean", "trained, frozen", "trained")
    print("| trace | requests | leaves | mean output | " + " | ".join(names) + " |")
    print("|---|---|---|---|" + "---|" * len(names))
    for trace in traces:
        predictions = predict_held_out(trace.model, trace.earlier, trace.later)
        predictions["trained, frozen"] = replay(
            TrainedPredictor(trace.model, online=False), trace.later
        )
        cells = []
        for name in names:
            error = error_of(predictions[name], trace.later)
            cells.append(
                f"{error.rmse_tokens:.1f} / {error.mae_tokens:.1f} / {error.bias_tokens:+.1f}"
            )
        leaves = leaf_count(trace.model.trees[""])
        mean = trace.later.output_tokens.mean()
        print(
            f"| {trace.name} | {len(trace.later)} | {leaves} | {mean:.0f} | {' | '.join(cells)} |"
        )
    print()


# Costs


def cpu_us(call: Callable[[], object]) -> float:
    """CPU time of one call in microseconds: the median of several rounds."""
    rounds = []
    for _ in range(ROUNDS):
        start_s = time.process_time()
        for _ in range(CALLS):
            call()
        rounds.append((time.process_time() - start_s) / CALLS * 1e6)
    return statistics.median(rounds)


def print_costs(trace: Halves) -> bool:
    """Of a model fitted on ``trace``; False when the goal is missed."""
    body = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
    features = LengthFeatures("m", 700, 256, body)
    predictors: dict[str, OutputLengthPredictor] = {
        "constant": ConstantPredictor(256.0),
        "normal": NormalPredictor(256.0, 200.0, np.random.default_rng(0)),
        "bucket-mean": BucketMeanPredictor(256.0),
        f"trained ({leaf_count(trace.model.trees[''])} leaves)": TrainedPredictor(trace.model),
    }
    print("| predictor | predict, µs | observe, µs |")
    print("|---|---|---|")
    good = True
    for name, predictor in predictors.items():
        predictor.observe(features, 300.0)
        predict_us = cpu_us(lambda p=predictor: p.predict(features))  # type: ignore[misc]
        observe_us = cpu_us(lambda p=predictor: p.observe(features, 300.0))  # type: ignore[misc]
        good = good and predict_us < GOAL_US
        print(f"| {name} | {predict_us:.2f} | {observe_us:.2f} |")
    made_us = cpu_us(lambda: LengthFeatures("m", 700, 256, body))
    print(f"| all: making the features | {made_us:.2f} | |")
    history = RequestHistory()
    row = (0.0, "m", 700, 300, 256, 1)
    kept_us = cpu_us(lambda: history.extend((row,)))
    print(f"| all: keeping the request for /admin/requests | | {kept_us:.2f} |")
    print()
    return good


# Worth


def latencies_s(result: RunResult) -> tuple[float, ...]:
    return result.latency_s.mean, result.latency_s.p99


def throughput_tokens_per_s(result: RunResult) -> tuple[float, ...]:
    return (result.throughput_tokens_per_s,)


def experiment_of(
    trace: Halves, instances: tuple[SimulatedInstance, ...], count: int
) -> Experiment:
    later = trace.later
    lengths = TraceLengths(
        later.prompt_tokens.astype(np.int64), later.output_tokens.astype(np.int64)
    )
    return Experiment(instances, lengths, count, Slo(2.0, 0.2))


def print_worth(
    traces: Sequence[Halves], cluster: Path, count: int, seeds: int, *, at_once: bool
) -> None:
    figures_of = throughput_tokens_per_s if at_once else latencies_s
    said = f"latency, mean and p99, at a load of {LOAD:g}"
    if at_once:
        said = "throughput, everything at once"
    print(
        f"{cluster.stem}, {count} requests a run, {seeds} seeds: {said}, against the constant mean"
    )
    print()
    print("| trace | policy | " + " | ".join(PREDICTORS) + " |")
    print("|---|---|" + "---|" * len(PREDICTORS))
    for trace in traces:
        experiment = experiment_of(trace, load_cluster(cluster).instances, count)
        moments = mix_moments(experiment.lengths)
        rate = math.inf
        if not at_once:
            rate = measure_bound(experiment).rate_per_s(LOAD, moments)
        for policy in POLICIES:
            figures: dict[str, list[tuple[float, ...]]] = {}
            for name in (BASELINE, *PREDICTORS):
                model = trace.model if name == "trained" else None
                chosen = dataclasses.replace(experiment, predictor=name, length_model=model)
                figures[name] = [
                    figures_of(run_once(chosen, policy, rate, seed, moments))
                    for seed in range(seeds)
                ]
            print(f"{trace.name}: {policy}", file=sys.stderr)
            cells = [ratio_cells(figures[name], figures[BASELINE]) for name in PREDICTORS]
            print(f"| {trace.name} | {policy} | {' | '.join(cells)} |", flush=True)
    print()


def ratio_cells(figures: Sequence[tuple[float, ...]], baseline: Sequence[tuple[float, ...]]) -> str:
    pairs = zip(zip(*figures, strict=True), zip(*baseline, strict=True), strict=True)
    return " / ".join(ratio_cell(mine, theirs) for mine, theirs in pairs)


def ratio_cell(figures: Sequence[float], baseline: Sequence[float]) -> str:
    ratios = [mine / theirs for mine, theirs in zip(figures, baseline, strict=True)]
    spread = statistics.stdev(ratios) if len(ratios) > 1 else 0.0
    return f"{statistics.mean(ratios):.3f} ± {spread:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", nargs="+", metavar="[NAME=]TRACE.csv")
    parser.add_argument(
        "-c", "--config", type=Path, default=ROOT / "configs" / "clusters" / "paper-b.yaml"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--only", choices=("errors", "costs", "latency", "throughput"))
    args = parser.parse_args()
    traces = [read_halves(argument) for argument in args.traces]
    good = True
    if args.only in (None, "errors"):
        print_errors(traces)
    if args.only in (None, "costs"):
        good = print_costs(max(traces, key=lambda trace: leaf_count(trace.model.trees[""])))
    for name, at_once in (("latency", False), ("throughput", True)):
        if args.only in (None, name):
            print_worth(traces, args.config, args.count, args.seeds, at_once=at_once)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
