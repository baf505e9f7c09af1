"""The same policies on the same requests, over real HTTP and in the simulator, side by side.

    python benchmarks/simulator/simulated_and_measured.py                 # about 15 minutes
    python benchmarks/simulator/simulated_and_measured.py \\
        -c configs/clusters/eight-one-slows-down.yaml --loads 0.7 \\
        --policies finish-time,capacity-weighted
    python benchmarks/simulator/simulated_and_measured.py --scene few-slots|full-caches|two-classes

A scene is a cluster file with the options that it is made for, on four instances: 8 seats on each;
prompts so long that caches are full; and two classes at 115 % of the bound, half of the requests of
each. ``finish-time+classes`` is finish-time with that discipline in place of fifo. Over HTTP the
classes are two clients, each with a key of its own.

Measured: each instance of the cluster file is an emulated one in a process of its own, before them
a gateway, freshly started for each policy; the load generator here streams every answer. Simulated:
the same arrival times and lengths, in virtual time. Both know the same: the scheduler's constants,
the mean lengths of the mix, prompt lengths exactly (token ids), and of output lengths only what
the predictor learns: requests have one and the same max_tokens, and ask the emulated engine for
their length by min_tokens, which the gateway does not read. Engines have the same settings: 2 048
tokens in a step, blocks of 16, the profile's max_num_seqs, chunked prefill. "slow" faults of the
file happen in both.

With --time-scale X the instances are X times faster than their profiles, the gateway's profiles
are, too, and all times are scaled back. The gateway's own constants in seconds (finish-time: 1 s of
patience, 2 s at most before the drain rule, 5 s of memory of the speed factor) are wall seconds: X
times as many of the hardware's. At 1, the default, there is no difference.

Gateway, instances and load generator share this machine: their CPU use is printed, and that of
everything else. A run in which the emulated clocks fell behind, or requests were sent late, is made
again, at most --attempts times in all. Exit code 1 when two policies are in a different order.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop
import yaml

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.dataplane.cpu import MachineCpu, process_cpu_s
from benchmarks.tables import write_between_markers
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.core.types import DEFAULT_CLASS
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.client_keys import hash_of
from hetero_gateway.files.cluster_config import Cluster, load_cluster
from hetero_gateway.files.trace import LoadRequest
from hetero_gateway.lab.load.children import Children
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.load.comparison import NOISE
from hetero_gateway.lab.load.emulated import EmulatedCluster, EmulatedInstance, write_profile
from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind, filler_pool
from hetero_gateway.lab.load.replay import replay
from hetero_gateway.lab.load.result import RequestRecord, Summary, summarise
from hetero_gateway.sim.experiment import (
    Bound,
    Experiment,
    Moments,
    Rate,
    make_workload,
    measure_bound,
    mix_moments,
    run_once,
)
from hetero_gateway.sim.result import RunResult
from hetero_gateway.sim.workload import FaultKind, LogNormalLengths, Workload

ROOT = Path(__file__).resolve().parents[2]
POLICIES = ("finish-time", "capacity-weighted", "min-max", "paper", "round-robin")
MODEL = "Llama-3-8B"
# Emulated answers are as long as min_tokens says: by themselves they would end at once.
INSTANCE_OPTIONS = ("--mean-output-tokens", "1", "--cv-output-tokens", "0")
TIMEOUT_S = 3600.0
# More than this, in wall seconds, and a run says more about the machine than about the policy.
TOLERATED_LOST_S = 0.5
TOLERATED_LATE_S = 0.2
# Of the mean latency: what is sent all at once takes a while to send.
TOLERATED_LATE_SHARE = 0.05
SAMPLE_S = 1.0
# What is compared: (name, unit of the table). By the first one policies are put in order.
FIGURES = (
    ("latency_mean_s", "latency, mean, s"),
    ("latency_p50_s", "p50"),
    ("latency_p99_s", "p99"),
    ("ttft_mean_s", "TTFT, mean, s"),
    ("output_tokens_per_s", "tokens/s"),
)
CLASSES = (DEFAULT_CLASS, "batch")
FIGURES_OF_CLASSES = (
    (f"{CLASSES[0]}_ttft_p99_s", f"{CLASSES[0]} TTFT p99, s"),
    (f"{CLASSES[0]}_latency_mean_s", f"{CLASSES[0]} latency, mean, s"),
    (f"{CLASSES[1]}_latency_mean_s", f"{CLASSES[1]} latency, mean, s"),
    ("latency_mean_s", "latency, mean, s"),
    ("output_tokens_per_s", "tokens/s"),
)
# Columns of a table.
Figures = Sequence[tuple[str, str]]
_FEW = "finish-time,capacity-weighted,min-max,round-robin"
# Of the arguments, what a scene has of its own. Rates are such that the instances, gateway and load
# generator take less than a core together.
SCENES: dict[str, dict[str, Any]] = {
    "few-slots": {"loads": (0.9, math.inf), "count": 400, "policies": _FEW},
    "full-caches": {"loads": (0.9, math.inf), "count": 250, "policies": _FEW, "time_scale": 4.0},
    "two-classes": {
        "loads": (1.15,),
        "count": 800,
        "batch_share": 0.5,
        "policies": "finish-time,finish-time+classes,capacity-weighted,min-max",
    },
}


# The same workload, twice


def simulated(
    experiment: Experiment, policy: str, rate: float, seed: int, moments: Moments
) -> dict[str, Any]:
    """The figures of a simulated run."""
    name, _, queue = policy.partition("+")
    experiment = dataclasses.replace(experiment, queue=queue or "fifo")
    result: RunResult = run_once(experiment, name, rate, seed, moments)
    of_classes: dict[str, Any] = {}
    for one, its in result.classes.items():
        of_classes[f"{one}_ttft_p99_s"] = its.ttft_s.p99
        of_classes[f"{one}_latency_mean_s"] = its.latency_s.mean
    return {
        **of_classes,
        "latency_mean_s": result.latency_s.mean,
        "latency_p50_s": result.latency_s.p50,
        "latency_p99_s": result.latency_s.p99,
        "ttft_mean_s": result.ttft_s.mean,
        "output_tokens_per_s": result.throughput_tokens_per_s,
        "requests": {
            str(instance.instance_id): done.requests
            for instance, done in zip(experiment.instances, result.instances, strict=True)
        },
    }


class Rig:
    """The processes of the measured runs, and the load on them."""

    def __init__(
        self,
        cluster: Cluster,
        experiment: Experiment,
        moments: Moments,
        time_scale: float,
        folder: Path,
        children: Children,
    ) -> None:
        self._experiment = experiment
        self._time_scale = time_scale
        self._children = children
        self._faults = [(str(cluster.instances[f.instance].instance_id), f) for f in cluster.faults]
        instances = []
        for instance in cluster.instances:
            path = folder / f"{instance.instance_id}.yaml"
            write_profile(instance.profile, path)
            instances.append(
                EmulatedInstance(str(instance.instance_id), str(path), instance.believed)
            )
        self._cluster = EmulatedCluster(
            instances,
            MODEL,
            time_scale,
            0,
            folder,
            children,
            instance_options=INSTANCE_OPTIONS,
            gateway_config=_clients_config(folder) if experiment.batch_share else None,
        )
        self._scheduler = _scheduler_config(moments)

    async def start(self) -> None:
        await self._cluster.start_instances()

    async def run(self, policy: str, workload: Workload) -> dict[str, Any]:
        """The whole workload through a fresh gateway, in the hardware's seconds."""
        cluster, scale = self._cluster, self._time_scale
        name, _, queue = policy.partition("+")
        await cluster.start_gateway(
            name, self._scheduler | {"queue": {"discipline": queue or "fifo"}}
        )
        speeds: list[dict[str, Any]] = []
        lost_before_s = await cluster.lost_s()
        before, machine_before, begin_s = self._cpu_s(), MachineCpu.now(), time.perf_counter()
        async with _alongside(self._make_faults(), self._watch_speeds(speeds)):
            records = await _send(cluster.url, workload, scale)
        wall_s = time.perf_counter() - begin_s
        after, machine = self._cpu_s(), MachineCpu.now()
        self._children.check()
        lost_s = await cluster.lost_s() - lost_before_s
        for instance_id, _ in self._faults:
            await cluster.slow_down(instance_id, 1.0)
        summary = summarise([record for its in records.values() for record in its])
        late_s = summary.send_delay_s.p99 or 0.0
        late_limit_s = max(TOLERATED_LATE_S, TOLERATED_LATE_SHARE * (summary.latency_s.mean or 0.0))
        sent = (int(workload.prompt_tokens.sum()), int(workload.output_tokens.sum()))
        if summary.errors:
            raise SystemExit(
                f"requests failed, so there is nothing to compare: {summary.errors_by_kind}"
            )
        if (summary.input_tokens, summary.output_tokens) != sent:
            raise SystemExit("the emulated instances did not count the workload's tokens")
        in_hardware_s = summary.scaled(scale)
        cpu = {name: (after[name] - before[name]) / wall_s for name in after}
        cpu["others"] = (machine.busy_s - machine_before.busy_s) / wall_s - sum(cpu.values())
        of_classes: dict[str, Any] = {}
        for one, its in records.items() if len(records) > 1 else ():
            of_class: Summary = summarise(its).scaled(scale)
            of_classes[f"{one}_ttft_p99_s"] = of_class.ttft_s.p99
            of_classes[f"{one}_latency_mean_s"] = of_class.latency_s.mean
        return {
            **of_classes,
            "latency_mean_s": in_hardware_s.latency_s.mean,
            "latency_p50_s": in_hardware_s.latency_s.p50,
            "latency_p99_s": in_hardware_s.latency_s.p99,
            "ttft_mean_s": in_hardware_s.ttft_s.mean,
            "output_tokens_per_s": in_hardware_s.output_tokens_per_s,
            "requests": {i.instance_id: i.requests for i in summary.instances},
            "errors": summary.errors,
            "wall_s": wall_s,
            "cpu_cores": cpu,
            "emulated_clocks_lost_s": lost_s,
            "sent_late_p99_s": late_s,
            "speed_factors": speeds,
            "quiet": lost_s <= TOLERATED_LOST_S and late_s <= late_limit_s,
        }

    def _cpu_s(self) -> dict[str, float]:
        return {
            "gateway": process_cpu_s(self._cluster.gateway_pid),
            "instances": sum(map(process_cpu_s, self._cluster.emulator_pids)),
            "load generator": time.process_time(),
        }

    async def _make_faults(self) -> None:
        """What the cluster file says, at its times."""
        events = []
        for instance_id, fault in self._faults:
            events.append((fault.start_s, instance_id, fault.factor))
            if math.isfinite(fault.end_s):
                events.append((fault.end_s, instance_id, 1.0))
        begin_s = time.perf_counter()
        for at_s, instance_id, factor in sorted(events):
            await asyncio.sleep(begin_s + at_s / self._time_scale - time.perf_counter())
            await self._cluster.slow_down(instance_id, factor)

    async def _watch_speeds(self, speeds: list[dict[str, Any]]) -> None:
        """The speed factors that the gateway shows, under a policy that has them."""
        begin_s = time.perf_counter()
        while True:
            listed = await self._cluster.instances()
            if any(i["speed_factor"] is None for i in listed):
                return
            at_s = (time.perf_counter() - begin_s) * self._time_scale
            speeds.append({"at_s": at_s, **{i["id"]: i["speed_factor"] for i in listed}})
            await asyncio.sleep(SAMPLE_S)


async def _send(url: str, workload: Workload, scale: float) -> dict[str, list[RequestRecord]]:
    """The whole workload, by class; each class as a client of its own, at the same time."""
    longest = int(workload.output_tokens.max())
    by_class: dict[str, list[LoadRequest]] = {}
    for i, one in enumerate(workload.classes or [DEFAULT_CLASS] * len(workload.arrival_s)):
        by_class.setdefault(one, []).append(
            LoadRequest(
                float(workload.arrival_s[i]) / scale,
                int(workload.prompt_tokens[i]),
                int(workload.output_tokens[i]),
            )
        )

    async def send(one: str, requests: list[LoadRequest]) -> list[RequestRecord]:
        # A salt, as both clients number their prompts from 0.
        salt = one if workload.classes else None
        maker = BodyMaker(MODEL, PromptKind.TOKEN_IDS, True, 4.0, filler_pool(), longest, salt)
        target = parse_target(url, _key_of(one) if workload.classes else None)
        return await replay(target, requests, maker, timeout_s=TIMEOUT_S)

    sent = await asyncio.gather(*(send(one, its) for one, its in by_class.items()))
    return dict(zip(by_class, sent, strict=True))


def _key_of(request_class: str) -> str:
    return f"the-client-of-class-{request_class}"


def _clients_config(folder: Path) -> dict[str, Any]:
    """A key for each class."""
    keys = [{"name": one, "hash": hash_of(_key_of(one)), "class": one} for one in CLASSES]
    path = folder / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": keys}), encoding="utf-8")
    return {"clients": {"keys_file": str(path)}}


def _scheduler_config(moments: Moments) -> dict[str, Any]:
    """What ``sim.experiment`` gives its schedulers, too."""
    return {
        "predictor": {"mean_tokens": moments.mean_output, "sd_tokens": moments.sd_output},
        "reference_prompt_tokens": round(moments.mean_prompt),
        "reference_output_tokens": round(moments.mean_output),
    }


@contextlib.asynccontextmanager
async def _alongside(*coroutines: Any) -> Any:
    """Run these while the body runs; cancel what is left of them after it."""
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(coroutine) for coroutine in coroutines]
        yield
        for task in started:
            task.cancel()


# What came out


def mean_of(runs: Sequence[Mapping[str, Any]], figures: Figures = FIGURES) -> dict[str, float]:
    """Of every figure, over the seeds; nan where one run has none."""
    return {
        name: sum(math.nan if r[name] is None else r[name] for r in runs) / len(runs)
        for name, _ in figures
    }


def figures_of(cell: Mapping[str, Any]) -> Figures:
    """Those of classes, where there are any."""
    row = next(iter(cell["policies"].values()))
    return FIGURES_OF_CLASSES if FIGURES_OF_CLASSES[0][0] in row["measured"] else FIGURES


def order(latencies_s: Mapping[str, float]) -> str:
    """Policies from the lowest mean latency up; ``≈`` between neighbours within the noise."""
    names = sorted(latencies_s, key=lambda name: latencies_s[name])
    text = names[0]
    for lower, higher in itertools.pairwise(names):
        near = latencies_s[higher] < latencies_s[lower] * (1 + NOISE)
        text += f" {'≈' if near else '<'} {higher}"
    return text


def compare_orders(
    measured_s: Mapping[str, float], simulated_s: Mapping[str, float]
) -> dict[str, list[str]]:
    """Each pair of policies: ``agree``, ``tie`` (in either within the noise), or ``differ``."""
    pairs: dict[str, list[str]] = {"agree": [], "tie": [], "differ": []}
    for one, other in itertools.combinations(measured_s, 2):
        ratios = [values[one] / values[other] for values in (measured_s, simulated_s)]
        if any(1 / (1 + NOISE) < ratio < 1 + NOISE for ratio in ratios):
            kind = "tie"
        else:
            kind = "agree" if (ratios[0] < 1) == (ratios[1] < 1) else "differ"
        pairs[kind].append(f"{one}, {other}")
    return pairs


def verdict(cell: Mapping[str, Any]) -> str:
    """The order in both, in words."""
    by = "mean latency" if figures_of(cell) is FIGURES else f"{CLASSES[0]} TTFT p99"
    text = f"By {by}: measured {cell['order_measured']}; simulated "
    return f"{text}{cell['order_simulated']}. {pairs_in_words(cell)}"


def pairs_in_words(cell: Mapping[str, Any]) -> str:
    pairs = cell["pairs"]
    total = sum(map(len, pairs.values()))
    text = f"Of {total} pairs {len(pairs['agree'])} have the same order"
    text += f", {len(pairs['tie'])} are within {NOISE:.0%} in one of the two"
    if pairs["differ"]:
        return f"{text}, and these differ: {'; '.join(pairs['differ'])}."
    return f"{text}, and none differs."


def markdown(document: Mapping[str, Any]) -> str:
    """A table for each load: what was measured, and its ratio to what was simulated."""
    lines = []
    for cell in document["loads"]:
        lines += [f"{load_name(cell)}:", ""]
        compared = [figure for figure in figures_of(cell) if figure[0] != "latency_p50_s"]
        head = ["policy", *(f"{unit}" for _, unit in compared)]
        lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for policy, row in cell["policies"].items():
            figures = [_figures(row, name, both=False) for name, _ in compared]
            lines.append(f"| {policy} | {' | '.join(figures)} |")
        lines += ["", pairs_in_words(cell), ""]
    return "\n".join(lines)


def load_name(cell: Mapping[str, Any]) -> str:
    if cell["load"] is None:
        return "Everything at once"
    return f"At {cell['load']:.0%} of the bound ({cell['rate_per_s']:.1f} requests/s)"


def _figures(row: Mapping[str, Any], name: str, *, both: bool = True) -> str:
    digits = 0 if name == "output_tokens_per_s" else 2
    measured, simulation = (row[side][name] for side in ("measured", "simulated"))
    second = f" / {simulation:.{digits}f}" if both else ""
    return f"{measured:.{digits}f}{second} ({row['ratio'][name]:.2f})"


def print_cell(cell: Mapping[str, Any]) -> None:
    print(f"\n{load_name(cell)}; measured / simulated (ratio)")
    compared = figures_of(cell)
    units = "".join(f"{unit:>24}" for _, unit in compared)
    print(f"{'policy':18}{units}  cores: gateway + instances + load, others")
    for policy, row in cell["policies"].items():
        text = f"{policy:18}"
        text += "".join(f"{_figures(row, name):>24}" for name, _ in compared)
        cpu = row["runs"][-1]["cpu_cores"]
        own = " + ".join(f"{cpu[k]:.2f}" for k in ("gateway", "instances", "load generator"))
        text += f"  {own}, {cpu['others']:.2f}"
        if not all(run["quiet"] for run in row["runs"]):
            text += "  NOT QUIET"
        if errors := sum(run["errors"] for run in row["runs"]):
            text += f"  {errors} errors"
        print(text)
    print(verdict(cell))


def print_speeds(row: Mapping[str, Any], instance_ids: Sequence[str]) -> None:
    """What the gateway said of the instances that slowed down, every few seconds."""
    for run in row["runs"]:
        for instance_id in instance_ids:
            seen = [(s["at_s"], s[instance_id]) for s in run["speed_factors"]]
            text = ", ".join(f"{at_s:.0f} s: {factor:.2f}" for at_s, factor in seen[::3])
            if text:
                print(f"speed factor of {instance_id} by time: {text}")


# The command


async def measure(
    args: argparse.Namespace, cluster: Cluster, experiment: Experiment
) -> dict[str, Any]:
    moments = mix_moments(experiment.lengths)
    bound = measure_bound(experiment)
    document: dict[str, Any] = {
        "cluster": str(args.config),
        "time_scale": args.time_scale,
        "requests": experiment.count,
        "seeds": args.seeds,
        "mean_prompt_tokens": moments.mean_prompt,
        "mean_output_tokens": moments.mean_output,
        "bound_tokens_per_s": bound.tokens_per_s,
        "loads": [],
    }
    slowed = [str(cluster.instances[f.instance].instance_id) for f in cluster.faults]
    with (
        tempfile.TemporaryDirectory(prefix="hetero-gateway-measured-") as folder,
        Children(Path(folder)) as children,
    ):
        rig = Rig(cluster, experiment, moments, args.time_scale, Path(folder), children)
        await rig.start()
        for load in args.loads:
            cell = await measure_load(args, rig, experiment, moments, _rate(load, bound, moments))
            document["loads"].append(cell)
            if not args.json:
                print_cell(cell)
                for policy, row in cell["policies"].items():
                    if slowed and any(run["speed_factors"] for run in row["runs"]):
                        print(f"{policy}:")
                        print_speeds(row, slowed)
                sys.stdout.flush()
    return document


async def measure_load(
    args: argparse.Namespace, rig: Rig, experiment: Experiment, moments: Moments, rate: Rate
) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    compared = FIGURES_OF_CLASSES if experiment.batch_share else FIGURES
    for policy in args.policies:
        runs, simulations = [], []
        for seed in range(args.seeds):
            workload = make_workload(experiment, rate.per_s, seed)
            simulations.append(simulated(experiment, policy, rate.per_s, seed, moments))
            runs.append(await _quiet_run(args, rig, policy, workload))
        measured_mean, simulated_mean = mean_of(runs, compared), mean_of(simulations, compared)
        rows[policy] = {
            "measured": measured_mean,
            "simulated": simulated_mean,
            "ratio": {name: measured_mean[name] / simulated_mean[name] for name, _ in compared},
            "runs": runs,
            "simulations": simulations,
        }
    latencies = {
        side: {policy: row[side][compared[0][0]] for policy, row in rows.items()}
        for side in ("measured", "simulated")
    }
    return {
        "load": rate.load,
        "rate_per_s": None if math.isinf(rate.per_s) else rate.per_s,
        "policies": rows,
        "order_measured": order(latencies["measured"]),
        "order_simulated": order(latencies["simulated"]),
        "pairs": compare_orders(latencies["measured"], latencies["simulated"]),
    }


async def _quiet_run(
    args: argparse.Namespace, rig: Rig, policy: str, workload: Workload
) -> dict[str, Any]:
    """The first quiet run of this policy, or else the one whose clocks lost least."""
    tried: list[dict[str, Any]] = []
    while len(tried) < args.attempts and not (tried and tried[-1]["quiet"]):
        run = await rig.run(policy, workload)
        tried.append(run)
        others = run["cpu_cores"]["others"]
        print(
            f"{policy}: {run['wall_s']:.0f} s, mean latency {run['latency_mean_s']:.2f} s; clocks "
            f"lost {run['emulated_clocks_lost_s']:.2f} s, sent {run['sent_late_p99_s']:.2f} s "
            f"late, others {others:.2f} cores",
            file=sys.stderr,
        )
    return min(tried, key=lambda r: (not r["quiet"], r["emulated_clocks_lost_s"]))


def _rate(load: float, bound: Bound, moments: Moments) -> Rate:
    if math.isinf(load):
        return Rate(math.inf)
    return Rate(bound.rate_per_s(load, moments), load)


def _loads(text: str) -> tuple[float, ...]:
    loads = tuple(float(part) for part in text.split(","))
    if not all(load > 0 for load in loads):
        raise argparse.ArgumentTypeError("must be above 0, or inf")
    return loads


def _arguments() -> argparse.Namespace:
    """Those of the command line; a scene has defaults of its own."""
    scenes = argparse.ArgumentParser(add_help=False)
    scenes.add_argument("--scene", choices=SCENES, help="a cluster file, and what goes with it")
    parser = argparse.ArgumentParser(
        description="policies over real HTTP and in the simulator", parents=[scenes]
    )
    add = parser.add_argument
    add(
        "-c",
        "--config",
        type=Path,
        default=ROOT / "configs/clusters/eight-of-four-kinds.yaml",
        help="the cluster file",
    )
    add("--policies", default=",".join(POLICIES), help="names, with commas")
    add("--loads", type=_loads, default=(0.8, math.inf), help="shares of the bound; inf: at once")
    add("--count", type=int, default=1000, help="requests of a run (default: 1000)")
    add("--seeds", type=int, default=1, help="runs of each policy at each load (default: 1)")
    add("--time-scale", type=float, default=1.0, help="times faster than the hardware (default: 1)")
    add("--attempts", type=int, default=2, help="of a run on a busy machine (default: 2)")
    add("--json", action="store_true", help="print one JSON document")
    add("--markdown", type=Path, help="write the tables into this file, between its markers")
    add(
        "--batch-share",
        type=float,
        default=0.0,
        help="this share of the requests is of the class batch (default: 0, no classes)",
    )
    if scene := scenes.parse_known_args()[0].scene:
        config = ROOT / f"configs/clusters/four-with-{scene}.yaml"
        parser.set_defaults(config=config, **SCENES[scene])
    args = parser.parse_args()
    args.policies = tuple(args.policies.split(","))
    return args


def main() -> int:
    args = _arguments()
    try:
        cluster = load_cluster(args.config)
        if any(f.kind is not FaultKind.SLOW for f in cluster.faults) or cluster.trace is not None:
            raise ConfigError(f"{args.config}: only lengths by distribution and slow faults here")
        if any(i.believed is None for i in cluster.instances):
            raise ConfigError(f"{args.config}: every instance must be profiled here")
        if cluster.workload.prompt is None or cluster.workload.output is None:
            raise ConfigError(f"{args.config}: workload.prompt and workload.output must be given")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    lengths = LogNormalLengths(cluster.workload.prompt.to_core(), cluster.workload.output.to_core())
    experiment = Experiment(
        instances=cluster.instances,
        lengths=lengths,
        count=args.count,
        slo=Slo(2.0, 0.2),
        arrival_cv=cluster.workload.arrival_cv,
        faults=cluster.faults,
        batch_share=args.batch_share,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        document = runner.run(measure(args, cluster, experiment))
    if args.markdown is not None:
        name = args.scene or "simulated and measured"
        markers = (f"<!-- {name}: begin -->", f"<!-- {name}: end -->")
        write_between_markers(args.markdown, markers, markdown(document))
    if args.json:
        print(json.dumps(document))
    differ = any(cell["pairs"]["differ"] for cell in document["loads"])
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
