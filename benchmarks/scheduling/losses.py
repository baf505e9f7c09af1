"""Where ``finish-time`` loses, and whether it still does: tails, few slots, full caches, batches.

    python benchmarks/scheduling/losses.py -o cells.jsonl [--requests NAME=TRACE.csv ...]
        [--set development|held-out|lopsided] [--clusters a,b] [--loads 0.9,once] [--seeds 5]
        [--table] [--bound] [--policies finish-time,min-max,capacity-weighted,finish-time+fifo]

Every cell is one run: cluster x mix x load x policy x seed. Cells that are in the file already are
not run again, but for those of the policy that ``--again`` names. The table of goals is of all
cells in the file. Queue disciplines are judged beside ``finish-time+fifo``: the default at
``once``, and ``finish-time+classes`` at ``1.15``; needs the extra ``fast``.

Loads: ``0.7`` and ``0.9`` of the sum of the instances' own throughputs; ``once``: everything at
once, twice as many as there are slots, at most 3000; ``many``: 5000 of them; ``few``: half as many
as slots; ``closed``: so many clients that each send their next request when the last is answered:
four for each slot, where an instance counts at most 32 slots; ``burst``: 0.7, in bursts (a
coefficient of variation of 6).

The clusters of the set ``held-out`` are for judging: no constant is chosen on them. Those of
``lopsided`` have one or two very fast machines beside slow ones; where no trace is given, they have
mixes of their own: prompts alone, short and long, answers of thousands of tokens, agents' prompts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.scheduling.policies import chat_mix, trace_mix
from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.lengths.predictors import BucketMeanPredictor
from hetero_gateway.core.policies import PolicyOptions, make_policy
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.discipline_settings import DEFAULT_DISCIPLINE
from hetero_gateway.core.scheduling.disciplines import make_discipline
from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId, InstanceSpec, Outcome, Reject, Usage
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.sim.cluster import SimulatedInstance, simulate
from hetero_gateway.sim.experiment import Experiment, Moments, measure_bound, mix_moments
from hetero_gateway.sim.result import summarise
from hetero_gateway.sim.workload import (
    Lengths,
    LogNormal,
    LogNormalLengths,
    Workload,
    gamma_arrivals,
)

OURS = "finish-time"
POLICIES = (OURS, "min-max", "capacity-weighted")
LOADS = ("0.7", "0.9", "once", "few", "closed")
# Queue disciplines are judged where requests wait: with a backlog, and with more than can be done.
FIFO, CLASSES = f"{OURS}+fifo", f"{OURS}+classes"
OVERLOAD = "1.15"
BURST, _BURST_LOAD, _BURST_CV = "burst", 0.7, 6.0
_SLO = Slo(1.0, 0.1)
_REQUESTS, _MANY = 3000, 5000
_CLIENTS_PER_SLOT, _MOST_SLOTS = 4, 32
_BOTH = ("x", "y")


class Kind(NamedTuple):
    """Instances of one profile in a cluster; None: as the profile says."""

    profile: str
    count: int = 1
    max_num_seqs: int | None = None
    kv_share: float = 1.0
    models: tuple[str, ...] = ("model",)


_8B, _14B = "Llama-3-8B", "DeepSeek-R1-Distill-Qwen-14B"
_FOUR = (f"H100-80GB-SXM/{_8B}/tp1", f"A100-80GB-SXM/{_8B}/tp1", f"L40S-48GB/{_8B}/tp1",
         f"V100-32GB-NVLink2/{_8B}/tp1")  # fmt: skip
CLUSTERS: dict[str, dict[str, tuple[Kind, ...]]] = {
    "development": {
        "unequal": tuple(Kind(name) for name in _FOUR),
        "equal": (Kind(_FOUR[1], 4),),
        "few-slots": tuple(Kind(name, 1, 8) for name in _FOUR),
        "tiny-kv": (Kind(f"A10G-24GB/{_8B}/tp1", 2), Kind(_FOUR[2], 2, None, 0.5)),
        "two-models": (
            Kind(_FOUR[0], models=_BOTH),
            Kind(_FOUR[1], models=("x",)),
            Kind(_FOUR[2], models=_BOTH),
            Kind(_FOUR[3], models=("y",)),
        ),
        "14b": (
            Kind(f"A800-80GB-PCIe/{_14B}/tp1"),
            Kind(f"V100-32GB-NVLink2/{_14B}/tp4"),
            Kind(f"L40S-48GB/{_14B}/tp1", 2),
        ),
        "paper-a": (Kind(f"V100-32GB-NVLink2/{_8B}/tp4"), Kind(_FOUR[3])),
    },
    "held-out": {
        "unequal": (
            Kind(f"H200-141GB/{_8B}/tp1"),
            Kind(f"A800-80GB-PCIe/{_8B}/tp1", 2),
            Kind(f"V100-32GB-PCIe3/{_8B}/tp2", 2),
            Kind(f"T4-16GB/{_8B}/tp4"),
        ),
        "equal": (Kind(_FOUR[2], 3),),
        "few-slots": (
            Kind(f"H200-141GB/{_8B}/tp1", 1, 8),
            Kind(f"A800-80GB-PCIe/{_8B}/tp1", 2, 8),
            Kind(f"T4-16GB/{_8B}/tp4", 2, 8),
        ),
        "tiny-kv": (
            Kind(f"T4-16GB/{_8B}/tp2", 3, None, 0.6),
            Kind(f"A100-80GB-SXM/{_8B}/tp1", 1, None, 0.15),
        ),
        "two-models": (
            Kind(f"H200-141GB/{_8B}/tp1", models=_BOTH),
            Kind(f"A800-80GB-PCIe/{_8B}/tp1", models=("x",)),
            Kind(f"V100-32GB-NVLink2/{_8B}/tp2", models=("y",)),
        ),
        "14b": (
            Kind(f"H100-80GB-SXM/{_14B}/tp1"),
            Kind(f"V100-32GB-NVLink2/{_14B}/tp2", 2),
            Kind(f"A10G-24GB/{_14B}/tp2", 2),
        ),
        "random": (
            Kind(f"A100-80GB-SXM/{_8B}/tp2"),
            Kind(f"A10G-24GB/{_8B}/tp1", 3),
            Kind(f"V100-32GB-NVLink2/{_8B}/tp4"),
            Kind(f"L40S-48GB/{_8B}/tp2"),
        ),
    },
    "lopsided": {
        "one-six": (Kind(f"H200-141GB/{_8B}/tp4"), Kind(f"A10G-24GB/{_8B}/tp1", 6)),
        "one-six-seats": (Kind(f"H200-141GB/{_8B}/tp1", 1, 48), Kind(f"T4-16GB/{_8B}/tp2", 6, 48)),
        "two-four": (Kind(_FOUR[0], 2), Kind(_FOUR[2], 4)),
        "four": tuple(Kind(name) for name in _FOUR),
    },
}
# Where no trace is given: the chat mix, and prompts ten times as long.
MIXES: dict[str, Lengths] = {
    "chat": chat_mix(),
    "long": LogNormalLengths(LogNormal(2500.0, 0.9, 12_000), LogNormal(250.0, 0.7, 1024)),
}
_NO_ANSWER = LogNormal(1.0, 0.0, 1)
LOPSIDED_MIXES: dict[str, Lengths] = {
    "chat": chat_mix(),
    "embeddings": LogNormalLengths(LogNormal(200.0, 0.6, 2000), _NO_ANSWER),
    "prompts": LogNormalLengths(LogNormal(1500.0, 0.8, 12_000), _NO_ANSWER),
    "answers": LogNormalLengths(LogNormal(300.0, 0.7, 4000), LogNormal(5500.0, 0.5, 10_000)),
    "agents": LogNormalLengths(LogNormal(6000.0, 0.7, 20_000), LogNormal(150.0, 0.8, 2000)),
}


class Front:
    """A scheduler as ``simulate`` drives it, with what that does not have: models and clients.

    Args:
        scheduler: whose requests and instances they are.
        models: by request, what it asks for; None: all ask for the same.
        instances: by id, the models that it serves.
        clients: in a closed loop; 0: requests come when they come.
        classes: by request; None: all are of one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        models: Sequence[str] | None,
        instances: dict[InstanceId, tuple[str, ...]],
        clients: int = 0,
        classes: Sequence[str] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._classes = classes
        self._models = models
        self._instances = instances
        self._idle = clients if clients else math.inf
        self._closed = clients > 0
        self._held: deque[tuple[Request, Any]] = deque()
        self._now_s = 0.0
        self.sent_s: dict[int, float] = {}
        self.caches = None

    @property
    def queued(self) -> int:
        # With some held back, every end of a request is one's turn.
        return self._scheduler.queued + len(self._held)

    def add(self, spec: InstanceSpec) -> None:
        self._scheduler.add(
            dataclasses.replace(spec, models=frozenset(self._instances[spec.instance_id]))
        )

    def place(
        self,
        request: Request,
        now_s: float,
        *,
        owner: Any = None,
        first: bool = False,
        at_once: bool = False,
    ) -> Ticket | Reject:
        if self._models is not None:
            request = request.replace(model=self._models[owner])
        if self._classes is not None:
            request = request.replace(request_class=self._classes[owner])
        if self._idle <= 0:
            self._held.append((request, owner))
            return Ticket(request, now_s, (), owner, None)  # type: ignore[arg-type]
        self._idle -= 1
        self.sent_s[owner] = now_s
        return self._scheduler.place(request, now_s, owner=owner, first=first, at_once=False)

    def settle(
        self, dispatch: Dispatch, outcome: Outcome, now_s: float, usage: Usage | None = None
    ) -> bool:
        settled = self._scheduler.settle(dispatch, outcome, now_s, usage)
        self._idle += 1
        if self._held:
            request, owner = self._held.popleft()
            self._idle -= 1
            self.sent_s[owner] = now_s
            self._scheduler.place(request, now_s, owner=owner, at_once=False)
        return settled

    @property
    def residual(self) -> Self:
        """What lengths are reported to."""
        return self

    def observe(self, model: str, output_tokens: float) -> None:
        for name in _BOTH if self._models is not None else (model,):
            self._scheduler.residual.observe(name, output_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def instances_of(cluster: tuple[Kind, ...]) -> list[SimulatedInstance]:
    """In the cluster's order."""
    found: list[SimulatedInstance] = []
    for kind in cluster:
        profile = load_profile(kind.profile)
        profile = dataclasses.replace(
            profile,
            max_num_seqs=kind.max_num_seqs or profile.max_num_seqs,
            kv_capacity_tokens=round(profile.kv_capacity_tokens * kind.kv_share),
        )
        for _ in range(kind.count):
            found.append(SimulatedInstance(InstanceId(f"i{len(found)}"), profile, profile))
    return found


class Setting:
    """A cluster under one mix."""

    def __init__(self, cluster: tuple[Kind, ...], lengths: Lengths) -> None:
        self._lengths = lengths
        self.instances = instances_of(cluster)
        kinds = [kind for kind in cluster for _ in range(kind.count)]
        self._models = {
            one.instance_id: kind.models for one, kind in zip(self.instances, kinds, strict=True)
        }
        self._shared = any(len(kind.models) > 1 for kind in cluster)
        self._moments = mix_moments(lengths)
        self.slots = sum(i.profile.max_num_seqs for i in self.instances)
        self._rate_per_s = 0.0  # of load 1, measured when it is asked for

    def rate_per_s(self, load: float) -> float:
        if not self._rate_per_s:
            experiment = Experiment(tuple(self.instances), self._lengths, 1, _SLO)
            self._rate_per_s = measure_bound(experiment).rate_per_s(1.0, self._moments)
        return load * self._rate_per_s

    def tokens_per_s(self) -> float:
        """Output of all instances together, when all are full."""
        return self.rate_per_s(1.0) * self._moments.mean_output

    def workload(self, load: str, seed: int) -> tuple[Workload, int]:
        """The requests, and the clients of a closed loop (0: none)."""
        count, clients = _REQUESTS, 0
        if load == "once":
            count = min(2 * self.slots, _REQUESTS)
        elif load == "many":
            count = _MANY
        elif load == "few":
            count = self.slots // 2
        elif load == "closed":
            slots = sum(min(i.profile.max_num_seqs, _MOST_SLOTS) for i in self.instances)
            clients = _CLIENTS_PER_SLOT * slots
        arrival_s = np.zeros(count)
        if load == BURST:
            rng = np.random.default_rng((seed, 1))
            arrival_s = gamma_arrivals(count, self.rate_per_s(_BURST_LOAD), _BURST_CV, rng)
        elif load not in ("once", "many", "few", "closed"):
            rng = np.random.default_rng((seed, 1))
            arrival_s = gamma_arrivals(count, self.rate_per_s(float(load)), 1.0, rng)
        lengths = self._lengths.draw(count, np.random.default_rng((seed, 0)))
        return Workload(arrival_s, *lengths), clients

    def run(self, policy: str, load: str, seed: int, make: MakeScheduler) -> dict[str, float]:
        """The figures of one run."""
        workload, clients = self.workload(load, seed)
        models = None
        if self._shared:
            drawn = np.random.default_rng((seed, 4)).integers(2, size=len(workload))
            models = [_BOTH[i] for i in drawn]
        scheduler = make(policy, self._moments, seed)
        batch = np.random.default_rng((seed, 5)).integers(2, size=len(workload)) == 1
        predictor = BucketMeanPredictor(self._moments.mean_output)
        front: Scheduler | Front = scheduler  # as it is, it is simulated by the compiled loop
        if self._shared or clients or policy == CLASSES:
            classes = ["batch" if b else "interactive" for b in batch]
            front = Front(scheduler, models, self._models, clients, classes)
        records = simulate(self.instances, workload, front, predictor, compiled=True)
        if isinstance(front, Front) and clients:
            order = np.argsort([front.sent_s[i] for i in range(len(workload))], kind="stable")
            sent_s = np.array([front.sent_s[i] for i in order])
            workload = Workload(
                sent_s, workload.prompt_tokens[order], workload.output_tokens[order]
            )
            fields = {f.name: getattr(records, f.name)[order] for f in dataclasses.fields(records)}
            records = dataclasses.replace(records, **fields)
        result = summarise(workload, records, len(self.instances), _SLO)
        ttft_s, latency_s = (
            at_s - workload.arrival_s for at_s in (records.first_token_s, records.finish_s)
        )
        return {
            "interactive_ttft_p99": float(np.nanpercentile(ttft_s[~batch], 99)),
            "batch_latency": float(np.nanmean(latency_s[batch])),
            "latency": result.latency_s.mean,
            "p99": result.latency_s.p99,
            "ttft": result.ttft_s.mean,
            "ttft_p99": result.ttft_s.p99,
            "tpot_p99": result.tpot_s.p99,
            "throughput": result.throughput_tokens_per_s,
            "slo": result.slo_share,
            "refused": result.refused,
            "evictions": int(records.preemptions.sum()),
        }


MakeScheduler = Callable[[str, Moments, int], Scheduler]


def make_scheduler(policy: str, moments: Moments, seed: int) -> Scheduler:
    policy, _, queue = policy.partition("+")
    return Scheduler(
        make_policy(policy, PolicyOptions()),
        discipline=make_discipline(queue or DEFAULT_DISCIPLINE),  # type: ignore[arg-type]
        rng=np.random.default_rng((seed, 2)),
        reference=(moments.mean_prompt, moments.mean_output),
        prefix_cache=False,
    )


# A cell's name, in the order of the file's keys.
Key = tuple[str, str, str, str, str, int]
Cells = dict[Key, dict[str, float]]


def read_cells(path: Path) -> Cells:
    found: Cells = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            found[_key(row)] = row
    return found


def _key(row: dict[str, Any]) -> Key:
    return (row["set"], row["cluster"], row["mix"], row["load"], row["policy"], row["seed"])


class Ratios:
    """Ratios of one policy over another: geometric means over seeds."""

    def __init__(self, cells: Cells, which: str) -> None:
        self._cells = cells
        self._set = which
        self.settings = sorted({(c, m) for s, c, m, _, _, _ in cells if s == which})

    def over(
        self, setting: tuple[str, str], load: str, figure: str, other: str, ours: str = OURS
    ) -> float | None:
        """None: there is no such cell of both."""
        logs = []
        for (which, cluster, mix, at, policy, seed), mine in self._cells.items():
            if (which, (cluster, mix), at, policy) != (self._set, setting, load, ours):
                continue
            theirs = self._cells.get((which, cluster, mix, at, other, seed))
            if theirs is not None and mine[figure] > 0 and theirs[figure] > 0:
                logs.append(math.log(mine[figure] / theirs[figure]))
        return math.exp(sum(logs) / len(logs)) if logs else None

    def each(
        self,
        load: str,
        figure: str,
        other: str,
        clusters: Sequence[str] = (),
        ours: str = OURS,
    ) -> dict[tuple[str, str], float]:
        found = {}
        for setting in self.settings:
            if clusters and setting[0] not in clusters:
                continue
            ratio = self.over(setting, load, figure, other, ours)
            if ratio is not None:
                found[setting] = ratio
        return found


def goals(ratios: Ratios) -> Iterator[tuple[str, float, str, float, str]]:
    """Goal, what came out, "<=" or ">=", the bound, and where it is worst."""
    for load, latency in (("0.7", 0.75), ("0.9", 0.80)):
        found = ratios.each(load, "ttft_p99", "min-max")
        yield from _mean_and_worst(f"TTFT p99 / min-max at {load}", found, 1.10, 1.5)
        found = ratios.each(load, "latency", "min-max")
        yield from _mean_and_worst(f"latency / min-max at {load}", found, latency, None)
    for load in ("once", "few"):
        best = {}
        for setting in ratios.settings:
            both = [
                ratios.over(setting, load, "latency", o) for o in ("min-max", "capacity-weighted")
            ]
            if None not in both:
                best[setting] = max(both)  # type: ignore[type-var]
        if best:
            yield _worst(f"{load}: latency / the better", best, 1.02)
        found = ratios.each(load, "throughput", "capacity-weighted")
        if found and load == "once":
            yield (
                f"{load}: throughput / capacity-weighted",
                _mean(found),
                ">=",
                1.15,
                _spread(found),
            )
    found = ratios.each("0.9", "latency", "min-max", ["tiny-kv"])
    if found:
        yield _worst("tiny-kv: latency / min-max at 0.9", found, 1.0)
    found = ratios.each("closed", "p99", "capacity-weighted", ["few-slots"])
    if found:
        yield _worst("few-slots: p99 / capacity-weighted, closed loop", found, 1.10)
    for load in ("0.7", "0.9"):
        found = ratios.each(load, "p99", "capacity-weighted", ["equal"])
        if found:
            yield _worst(f"equal: p99 / capacity-weighted at {load}", found, 1.05)
        found = ratios.each(load, "latency", "capacity-weighted", ["equal"])
        if found:
            yield _worst(f"equal: latency / capacity-weighted at {load}", found, 0.95)


def queue_goals(ratios: Ratios) -> Iterator[tuple[str, float, str, float, str]]:
    """The same of the queue disciplines, over first in, first out."""
    for figure, bound in (("latency", 0.70), ("ttft", 0.60), ("p99", 1.02)):
        found = ratios.each("once", figure, FIFO)
        if found:
            yield f"shortest / fifo, once: {figure}", _mean(found), "<=", bound, _spread(found)
    for figure, bound in (("interactive_ttft_p99", 0.3), ("batch_latency", 1.4)):
        found = ratios.each(OVERLOAD, figure, FIFO, ours=CLASSES)
        if found:
            what = f"classes / fifo at {OVERLOAD}: {figure}"
            yield what, _mean(found), "<=", bound, _spread(found)


def _mean(found: dict[tuple[str, str], float]) -> float:
    return math.exp(sum(map(math.log, found.values())) / len(found))


def _spread(found: dict[tuple[str, str], float]) -> str:
    return f"{min(found.values()):.2f} to {max(found.values()):.2f}"


def _mean_and_worst(
    what: str, found: dict[tuple[str, str], float], mean: float, worst: float | None
) -> Iterator[tuple[str, float, str, float, str]]:
    if found:
        yield f"{what}, mean", _mean(found), "<=", mean, _spread(found)
        if worst is not None:
            yield _worst(f"{what}, worst", found, worst)


def _worst(
    what: str, found: dict[tuple[str, str], float], bound: float
) -> tuple[str, float, str, float, str]:
    where = max(found, key=lambda setting: found[setting])
    return what, found[where], "<=", bound, " ".join(where)


def print_goals(cells: Cells, which: str) -> bool:
    """Each goal with its figure. Whether all are met."""
    all_met = True
    for what, value, sense, bound, where in (
        *goals(Ratios(cells, which)),
        *queue_goals(Ratios(cells, which)),
    ):
        met = value <= bound if sense == "<=" else value >= bound
        all_met &= met
        mark = "met" if met else "missed"
        print(f"{what:<55}{value:7.3f}  {sense} {bound:<5g} {mark:<7} {where}")
    return all_met


def print_table(cells: Cells, which: str) -> None:
    """Every cluster, mix and load: the policy over each other one."""
    ratios = Ratios(cells, which)
    print(f"{'':42}{'latency':>10}{'p99':>7}{'TTFT':>7}{'p99':>7}{'tokens/s':>10}")
    for cluster, mix in ratios.settings:
        for load in sorted({k[3] for k in cells}):
            for other in POLICIES[1:]:
                row = [
                    ratios.over((cluster, mix), load, figure, other)
                    for figure in ("latency", "p99", "ttft", "ttft_p99", "throughput")
                ]
                if None not in row:
                    shown = "".join(
                        f"{v:{w}.2f}" for v, w in zip(row, (10, 7, 7, 7, 10), strict=True)
                    )
                    print(f"{cluster:<12}{mix:<10}{load:<7}{other:<13.13}{shown}")


def print_bounds(cells: Cells, which: str, mixes: dict[str, Lengths]) -> None:
    """What all instances make together when all are full, over what policies make at once."""
    logs: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    print(f"{'bound / at once':24}" + "".join(f"{policy:>19}" for policy in POLICIES))
    for cluster, kinds in CLUSTERS[which].items():
        for mix, lengths in mixes.items():
            tokens_per_s = Setting(kinds, lengths).tokens_per_s()
            shown = ""
            for policy in POLICIES:
                key = (which, cluster, mix, "once", policy)
                made = [row["throughput"] for k, row in cells.items() if k[:5] == key]
                log = math.log(tokens_per_s) - float(np.mean(np.log(made)))
                shown += f"{math.exp(log):19.2f}"
                if cluster != "few-slots":
                    logs[policy].append(log)
            print(f"{cluster:<12}{mix:<12}{shown}")
    means = "".join(f"{math.exp(float(np.mean(found))):19.2f}" for found in logs.values())
    print(f"{'mean without few slots':24}{means}")


def named_trace(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError("give NAME=TRACE.csv")
    return name, Path(path)


def _names(text: str) -> list[str]:
    return text.split(",")


def main(make: MakeScheduler = make_scheduler) -> int:
    parser = argparse.ArgumentParser(description="where finish-time loses, and by how much")
    parser.add_argument("--requests", type=named_trace, action="append", metavar="NAME=TRACE.csv")
    parser.add_argument("--set", choices=CLUSTERS, default="development")
    parser.add_argument("--clusters", type=_names, help="default: all of the set")
    parser.add_argument("--loads", type=_names, default=list(LOADS))
    parser.add_argument("--policies", type=_names, default=list(POLICIES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("-o", type=Path, required=True, help="cells, as JSON lines; added to")
    parser.add_argument("--again", default="", help="drop this policy's cells from the file first")
    parser.add_argument("--table", action="store_true", help="print every cell's ratios, too")
    parser.add_argument(
        "--bound", action="store_true", help="print what could be made at once, too"
    )
    args = parser.parse_args()
    cells = read_cells(args.o)
    if args.again:
        cells = {key: row for key, row in cells.items() if key[4] != args.again}
        args.o.write_text("".join(json.dumps(row) + "\n" for row in cells.values()), "utf-8")
    mixes = {name: trace_mix(path) for name, path in args.requests or ()}
    mixes = mixes or (LOPSIDED_MIXES if args.set == "lopsided" else MIXES)
    with args.o.open("a", encoding="utf-8") as out:
        for cluster in args.clusters or CLUSTERS[args.set]:
            for mix, lengths in mixes.items():
                setting = Setting(CLUSTERS[args.set][cluster], lengths)
                for load in args.loads:
                    for policy in args.policies:
                        for seed in range(args.seeds):
                            key = (args.set, cluster, mix, load, policy, seed)
                            if key in cells:
                                continue
                            names = ("set", "cluster", "mix", "load", "policy", "seed")
                            row = dict(zip(names, key, strict=True))
                            row |= setting.run(policy, load, seed, make)  # type: ignore[arg-type]
                            cells[key] = row  # type: ignore[assignment]
                            print(json.dumps(row), file=out, flush=True)
    if args.table:
        print_table(cells, args.set)
    if args.bound:
        print_bounds(cells, args.set, mixes)
    return 0 if print_goals(cells, args.set) else 1


if __name__ == "__main__":
    sys.exit(main())
