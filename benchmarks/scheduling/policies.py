"""``finish-time`` against other policies in virtual time, for docs/evidence/scheduling.md.

    python benchmarks/scheduling/policies.py --requests sharegpt=TRACE.csv \
        --requests azure=TRACE.csv [--seeds 5] [--clusters A,B,mix]
        [--write docs/evidence/scheduling.md] [--json]

Three clusters (configs/clusters), two loads (0.9 of the sum of the instances' own throughputs, and
everything at once; ``--loads`` has others). All policies see the same requests at the same times. A
ratio is the geometric mean over the seeds. The second table has constants that are wrong, by two or
by ``--wrong``: the scheduler believes one set, the engines run another. ``--only table`` or
``--only wrong-constants`` leaves the other out.

Without ``--requests``: the chat mix of ``hetero-gateway simulate``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import write_between_markers
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.files.cluster_config import load_cluster
from hetero_gateway.files.trace import CHAT_MIX, read_trace
from hetero_gateway.sim.cluster import SimulatedInstance
from hetero_gateway.sim.experiment import (
    Bound,
    Experiment,
    Moments,
    measure_bound,
    mix_moments,
    run_once,
)
from hetero_gateway.sim.result import RunResult
from hetero_gateway.sim.workload import Lengths, TraceLengths

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = {"A": "paper-a", "B": "paper-b", "mix": "modern-mix"}
LOADS = (0.9, math.inf)  # what the goals are set for
OURS, HONEST = "finish-time", "capacity-weighted"
OTHERS = ("min-max", "paper", "least-requests", HONEST, "power-of-two", "round-robin")
# Long against the latencies: a run is several times as long as its requests.
REQUESTS_PER_INSTANCE = {"A": 2000, "B": 1000, "mix": 600}
SLO = Slo(2.0, 0.2)
MARKERS = ("<!-- policies: begin -->", "<!-- policies: end -->")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One cluster under one mix, with what its loads are measured by."""

    cluster: str
    mix: str
    experiment: Experiment
    moments: Moments
    bound: Bound

    def rate_per_s(self, load: float) -> float:
        return math.inf if math.isinf(load) else self.bound.rate_per_s(load, self.moments)

    def runs(self, policy: str, load: float, seeds: int) -> list[RunResult]:
        rate = self.rate_per_s(load)
        return [run_once(self.experiment, policy, rate, s, self.moments) for s in range(seeds)]

    def believing(self, scale: Sequence[float]) -> Setting:
        """The same, but the scheduler takes instance i for ``scale[i]`` times as slow as it is."""
        instances = tuple(
            dataclasses.replace(i, believed=_scaled(i, factor))
            for i, factor in zip(self.experiment.instances, scale, strict=True)
        )
        experiment = dataclasses.replace(self.experiment, instances=instances)
        return dataclasses.replace(self, experiment=experiment)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Our policy over another one: geometric means over seeds, and the spread of the throughput."""

    latency: float
    throughput: float
    throughput_sd: float


def _scaled(instance: SimulatedInstance, factor: float) -> Profile:
    profile = instance.profile
    return dataclasses.replace(profile, constants=profile.constants.scaled(factor))


def settings(mixes: dict[str, Lengths], clusters: Sequence[str]) -> list[Setting]:
    result = []
    for cluster, name in ((c, CLUSTERS[c]) for c in clusters):
        instances = load_cluster(ROOT / "configs" / "clusters" / f"{name}.yaml").instances
        for mix, lengths in mixes.items():
            count = REQUESTS_PER_INSTANCE[cluster] * len(instances)
            experiment = Experiment(instances, lengths, count, SLO)
            bound = measure_bound(experiment)
            result.append(Setting(cluster, mix, experiment, mix_moments(lengths), bound))
    return result


def over(ours: list[RunResult], theirs: list[RunResult]) -> Comparison:
    latency = np.array(
        [a.latency_s.mean / b.latency_s.mean for a, b in zip(ours, theirs, strict=True)]
    )
    throughput = np.array(
        [
            a.throughput_tokens_per_s / b.throughput_tokens_per_s
            for a, b in zip(ours, theirs, strict=True)
        ]
    )
    return Comparison(
        float(np.exp(np.log(latency).mean())),
        float(np.exp(np.log(throughput).mean())),
        float(throughput.std(ddof=1)) if len(throughput) > 1 else 0.0,
    )


def against_all(
    every: list[Setting], loads: Sequence[float], seeds: int
) -> tuple[list[str], list[str]]:
    """The big table as Markdown lines, and a line per goal.

    Below a load of 1 arrivals decide the throughput: such a row has latencies only.
    """
    lines = [
        "| cluster | lengths | load | mean latency, s | TTFT, s | tokens/s | of bound | "
        + " | ".join(f"`{name}`" for name in OTHERS)
        + " |",
        "|---" * (7 + len(OTHERS)) + "|",
    ]
    seen: dict[tuple[str, str, float, str], Comparison] = {}
    for setting in every:
        for load in loads:
            ours = setting.runs(OURS, load, seeds)
            cells = []
            for other in OTHERS:
                ratio = over(ours, setting.runs(other, load, seeds))
                seen[setting.cluster, setting.mix, load, other] = ratio
                throughput = f" / {ratio.throughput:.2f}" if math.isinf(load) else ""
                cells.append(f"{ratio.latency:.2f}{throughput}")
            latency = [r.latency_s.mean for r in ours]
            tokens = [r.throughput_tokens_per_s for r in ours]
            lines.append(
                f"| {setting.cluster} | {setting.mix} | {_load(load)} | {_mean_sd(latency, 1)} | "
                f"{np.mean([r.ttft_s.mean for r in ours]):.2f} | {_mean_sd(tokens, 0)} | "
                f"{np.mean(tokens) / setting.bound.tokens_per_s:.0%} | " + " | ".join(cells) + " |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return lines, goals(seen) if set(LOADS) <= set(loads) else []


def goals(seen: dict[tuple[str, str, float, str], Comparison]) -> list[str]:
    """What was aimed at, and what came out."""
    result = []
    for cluster, mix in dict.fromkeys((c, m) for c, m, _, _ in seen):
        if cluster != "A":
            latency = seen[cluster, mix, 0.9, "paper"].latency
            result.append(_goal(f"{cluster}, {mix}: latency at 0.9", latency, "at most", 0.90))
        throughput = seen[cluster, mix, math.inf, "paper"].throughput
        least = 1.0 if cluster == "A" else 1.4
        result.append(_goal(f"{cluster}, {mix}: throughput at once", throughput, "at least", least))
    worst = max(c.latency for (_, _, load, other), c in seen.items() if other == HONEST)
    result.append(_goal(f"worst latency over `{HONEST}`", worst, "at most", 1.02))
    least = min(c.throughput for (_, _, _, other), c in seen.items() if other == HONEST)
    result.append(_goal(f"worst throughput over `{HONEST}`", least, "at least", 0.98))
    return result


def _goal(what: str, value: float, sense: str, bound: float) -> str:
    met = value <= bound if sense == "at most" else value >= bound
    return f"| {what} | {sense} {bound:.2f} | {value:.3f} | {'yes' if met else '**no**'} |"


def wrong_constants(every: list[Setting], seeds: int, by: float) -> list[str]:
    """Each policy's own loss when the scheduler's constants are wrong by so many times."""
    lines = [
        "| cluster | lengths | load | believed | `finish-time` | `capacity-weighted` |",
        "|---|---|---|---|---|---|",
    ]
    for setting in every:
        speed = np.array([1 / i.profile.constants.p8 for i in setting.experiment.instances])
        slowest, fastest = speed <= speed.min() * 1.001, speed >= speed.max() * 0.999
        cases = {
            f"slowest {by:g} times as fast": np.where(slowest, 1 / by, 1.0),
            f"fastest {by:g} times as slow": np.where(fastest, by, 1.0),
        }
        for load in LOADS:
            right = {p: setting.runs(p, load, seeds) for p in (OURS, HONEST)}
            for name, scale in cases.items():
                wrong = setting.believing(scale)
                cells = []
                for policy in (OURS, HONEST):
                    ratio = over(wrong.runs(policy, load, seeds), right[policy])
                    cells.append(
                        f"{ratio.latency:.2f} / {ratio.throughput:.2f} ± {ratio.throughput_sd:.2f}"
                    )
                row = (setting.cluster, setting.mix, _load(load), name, *cells)
                lines.append("| " + " | ".join(row) + " |")
                print(lines[-1], file=sys.stderr, flush=True)
    return lines


def _load(load: float) -> str:
    return "at once" if math.isinf(load) else f"{load:g}"


def _mean_sd(values: Sequence[float], digits: int) -> str:
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return f"{np.mean(values):.{digits}f} ± {sd:.{digits}f}"


def chat_mix() -> Lengths:
    return CHAT_MIX


def trace_mix(path: Path) -> Lengths:
    rows = read_trace(path)
    return TraceLengths(
        np.array([r.input_tokens for r in rows]), np.array([r.output_tokens for r in rows])
    )


def _named_trace(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError("give NAME=TRACE.csv")
    return name, Path(path)


def main() -> int:
    parser = argparse.ArgumentParser(description="finish-time against every other policy")
    parser.add_argument("--requests", type=_named_trace, action="append", metavar="NAME=TRACE.csv")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--clusters", type=lambda text: text.split(","), default=list(CLUSTERS))
    parser.add_argument(
        "--loads", type=lambda text: [float(load) for load in text.split(",")], default=list(LOADS)
    )
    parser.add_argument("--write", type=Path, help="a Markdown file with the markers")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--wrong", type=float, default=2.0, help="by how much constants are wrong")
    parser.add_argument("--only", choices=("table", "wrong-constants"), help="default: both")
    args = parser.parse_args()
    mixes = {name: trace_mix(path) for name, path in args.requests or ()} or {"chat": chat_mix()}
    every = settings(mixes, args.clusters)
    table: list[str] = []
    goal_lines: list[str] = []
    wrong: list[str] = []
    lines: list[str] = []
    if args.only != "wrong-constants":
        table, goal_lines = against_all(every, args.loads, args.seeds)
        lines += [
            *table,
            "",
            "Cells: mean latency of `finish-time` over the other's; at once, throughput too.",
            "",
        ]
        print("\n".join(("| goal | bound | came out | met |", *goal_lines)), file=sys.stderr)
    if args.only != "table":
        wrong = wrong_constants(every, args.seeds, args.wrong)
        lines += [
            f"Constants wrong by {args.wrong:g}; cells: mean latency / throughput over the same",
            "policy's with right constants:",
            "",
            *wrong,
        ]
    text = "\n".join(lines)
    if args.json:
        print(json.dumps({"table": table, "goals": goal_lines, "wrong_constants": wrong}))
    else:
        print(text)
    if args.write:
        write_between_markers(args.write, MARKERS, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
