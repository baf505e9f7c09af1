"""``simulate``: compare policies on a cluster in virtual time."""

import argparse
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from hetero_gateway.cli import against
from hetero_gateway.cli.reports import page, simulation
from hetero_gateway.cli.simulate_running import running_cluster
from hetero_gateway.core.nearest import nearest_names
from hetero_gateway.core.policies import POLICY_NAMES
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.cluster_config import Cluster, load_cluster
from hetero_gateway.files.length_model_file import read_length_model
from hetero_gateway.files.policies import installed_policy
from hetero_gateway.files.scheduler_config import POLICY_GROUP, installed
from hetero_gateway.files.trace import TraceRequest, known_texts, read_trace, token_counts
from hetero_gateway.lab.load.progress import progress_bar
from hetero_gateway.planner.splitting import SPLITTING_POLICY, Splitting
from hetero_gateway.sim.cluster import simulate
from hetero_gateway.sim.experiment import (
    Bound,
    Experiment,
    Moments,
    Rate,
    compare,
    held,
    measure_bound,
    mix_moments,
)
from hetero_gateway.sim.jit import can_compile
from hetero_gateway.sim.prefixes import Prefixes
from hetero_gateway.sim.result import Cell
from hetero_gateway.sim.workload import FaultKind, TraceLengths, mean_rate_per_s

_POLICIES = ("finish-time", "min-max", "capacity-weighted", "paper", "round-robin")
# The default rates: a quiet hour, a busy one, and the paper's "inf".
_LOADS = (0.7, 0.9)
# With half of it, filling and emptying the cluster take most of a run (docs/guide/simulate.md).
_COUNT = 2000


def run(args: argparse.Namespace) -> int:
    """Run the comparison; 1 when no request finished in any run, else 0."""
    given = [what for what in (args.config, args.url) if what is not None]
    if len(given) > 1 or (args.url and args.against):
        raise ConfigError("simulate URL takes the gateway's own cluster: no -c, and no --against")
    if args.url and Path(args.url).exists():
        raise ConfigError(f"simulate {args.url}: a file goes with -c, or with --against")
    _check_policies(args.policy or ())
    if args.against is not None:
        return against.run(args)
    args.policy = args.policy or _POLICIES
    if not given:
        raise ConfigError(
            "simulate: give a cluster (-c CLUSTER.yaml), a gateway's URL, or a record (--against)"
        )
    page.check_can_write(args.report)
    args.source, seen = str(given[0]), list[TraceRequest]()
    if args.url is None:
        cluster = load_cluster(args.config)
    else:
        cluster, seen = running_cluster(args)
    experiment = _experiment(args, cluster, seen)
    moments = mix_moments(experiment.lengths)
    bound = measure_bound(experiment)
    cells = _compare(args, experiment, _rates_to_run(args, experiment, bound, moments), bound)
    held = _held(args, experiment, bound) if args.held else {}
    simulation.report(
        simulation.PolicyComparison(args.source, experiment, bound, moments, cells, held)
    ).tell(args)
    if all(cell.throughput_tokens_per_s.mean == 0 for cell in cells):
        print("hetero-gateway: simulate: no request finished in any run", file=sys.stderr)
        return 1
    return 0


def _experiment(args: argparse.Namespace, cluster: Cluster, seen: list[TraceRequest]) -> Experiment:
    """Flags override the cluster file, or the requests that a gateway has ``seen``."""
    for instance in cluster.instances if args.scheduling == "chunked" else ():
        if instance.profile.max_num_seqs > args.max_batched_tokens:
            raise ConfigError(
                f"{args.source}: {instance.instance_id} runs up to "
                f"{instance.profile.max_num_seqs} sequences (max_num_seqs), more than the "
                f"{args.max_batched_tokens} tokens of a step; raise --max-batched-tokens"
            )
    if (args.predictor_file is not None) != (args.predictor == "trained"):
        raise ConfigError("--predictor trained needs --predictor-file, and no other takes one")
    path = args.requests or cluster.trace
    rows = seen if path is None else read_trace(path)
    texts = any(row.text is not None for row in rows)
    own_times = args.arrivals == "trace" or (
        args.arrivals is None
        and (texts or not (args.rate or args.load))
        and any(row.arrival_s is not None for row in rows)
    )
    if texts and args.count is not None and args.count > len(rows):
        raise ConfigError(f"--count {args.count}: {path} has {len(rows)} requests, each sent once")
    if own_times:
        if not rows:
            raise ConfigError("--arrivals trace: there is no trace; give --requests")
        if any(row.arrival_s is None for row in rows):
            raise ConfigError(f"{path}: --arrivals trace: it has no column arrival_s")
        rows = sorted(rows, key=lambda row: row.arrival_s or 0.0)[: args.count]
    experiment = Experiment(
        instances=cluster.instances,
        lengths=TraceLengths(*token_counts(rows), args.in_order or own_times or texts)
        if rows
        else cluster.workload.lengths,
        count=len(rows) if own_times else args.count or (len(rows) if texts else _COUNT),
        slo=Slo(args.slo_ttft, args.slo_tpot),
        arrival_cv=cluster.workload.arrival_cv,
        trace_arrival_s=np.array([row.arrival_s for row in rows], float) if own_times else None,
        faults=cluster.faults,
        scheduling=args.scheduling,
        max_batched_tokens=args.max_batched_tokens,
        predictor=args.predictor,
        randomised=args.randomised,
        objective=args.objective,
        length_model=args.predictor_file and read_length_model(args.predictor_file),
        prefixes=_prefixes(rows) if texts else None,
        prefix_cache=args.prefix_cache == "on",
        queue=args.queue,
        batch_share=args.batch_share,
        heeds_slo=args.heed_slo,
        policies={
            name: partial(installed_policy, name, {})
            for name in args.policy
            if name not in POLICY_NAMES
        },
    )
    if cluster.transfers is None or args.split == "off":
        return experiment
    if any(fault.kind is not FaultKind.SLOW for fault in cluster.faults):
        raise ConfigError(
            f"{args.source}: faults: instances that hand prompts over cannot die in a simulation; "
            "leave transfer out, or give --split off"
        )
    return replace(experiment, splits=Splitting(experiment, cluster.transfers))


def _prefixes(rows: list[TraceRequest]) -> Prefixes:
    block_tokens = next(row.text.block_tokens for row in rows if row.text is not None)
    return Prefixes(known_texts(rows), *token_counts(rows), block_tokens)


def _rates_to_run(
    args: argparse.Namespace, experiment: Experiment, bound: Bound, moments: Moments
) -> list[Rate]:
    """In the given order; loads, which mean finite rates, before rates."""
    rates, loads = [Rate(r) for r in args.rate], args.load
    if not rates and not loads:
        if experiment.trace_arrival_s is not None:
            return [Rate(mean_rate_per_s(experiment.trace_arrival_s))]
        rates, loads = [Rate(math.inf)], _LOADS
    if loads and bound.tokens_per_s <= 0:
        raise ConfigError(f"{args.source}: no request of the mix fits any instance")
    return [Rate(bound.rate_per_s(load, moments), load) for load in loads] + rates


def _held(
    args: argparse.Namespace, experiment: Experiment, bound: Bound
) -> dict[str, tuple[float, ...]]:
    """By policy, with progress on standard error."""
    if bound.tokens_per_s <= 0:
        raise ConfigError(f"{args.source}: no request of the mix fits any instance")
    # This many short runs are worth the time of compiling.
    run = partial(simulate, compiled=can_compile())
    found = {}
    with progress_bar(Console(stderr=True, highlight=False, markup=False)) as progress:
        task = progress.add_task("held", total=None, note="")
        for policy, asked in _asked(args, experiment):
            name = _named(policy, asked, experiment)

            def on_load(load: float, name: str = name) -> None:
                progress.update(task, note=f"{name}, load {load:.2f}", refresh=True)

            seeds = range(args.seeds)
            found[name] = held(asked, policy, seeds, bound, simulate=run, on_load=on_load)
    return found


def _compare(
    args: argparse.Namespace, experiment: Experiment, rates: list[Rate], bound: Bound
) -> list[Cell]:
    """All runs, with progress on standard error."""
    console = Console(stderr=True, highlight=False, markup=False)
    every, seeds = _asked(args, experiment), tuple(range(args.seeds))
    cells: list[Cell] = []
    with progress_bar(console) as progress:
        runs = len(rates) * len(every) * args.seeds
        task = progress.add_task("simulate", total=runs, note="")
        for rate in rates:
            for policy, asked in every:
                name = _named(policy, asked, experiment)
                note = f"{name}, {simulation.rate_name(rate.per_s)}"

                def on_run(_policy: str, _rate: Rate, seed: int, note: str = note) -> None:
                    progress.update(task, advance=1, note=note, refresh=True)
                    if progress.disable and seed == args.seeds - 1:
                        console.print(
                            f"{note}: {args.seeds} run{'s' * (args.seeds > 1)}", soft_wrap=True
                        )

                (cell,) = compare(asked, [policy], [rate], seeds, bound, on_run=on_run)
                cells.append(replace(cell, policy=name))
    return cells


def _asked(args: argparse.Namespace, experiment: Experiment) -> list[tuple[str, Experiment]]:
    """Each policy with its experiment; a splitting policy also without splitting."""
    every = [(policy, experiment) for policy in args.policy]
    if experiment.splits is not None and SPLITTING_POLICY in args.policy:
        unsplit = SPLITTING_POLICY, replace(experiment, splits=None)
        every.insert(args.policy.index(SPLITTING_POLICY) + 1, unsplit)
    return every


def _named(policy: str, asked: Experiment, experiment: Experiment) -> str:
    """The policy's name in tables."""
    return policy if asked is experiment else f"{policy} unsplit"


def _check_policies(names: tuple[str, ...]) -> None:
    there_are = (*POLICY_NAMES, *installed(POLICY_GROUP))
    for name in names:
        if name not in there_are:
            near = nearest_names(name, there_are, 1, least=0.6)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(there_are)}"
            raise ConfigError(f"--policy: no policy is named {name!r}; {hint}")
