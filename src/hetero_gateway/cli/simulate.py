"""``simulate``: compare policies on a cluster in virtual time."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_gateway.cli.arguments import positive_float, positive_int, rate, share
from hetero_gateway.errors import ConfigError

if TYPE_CHECKING:
    from hetero_gateway.core.lengths.length_model import LengthModel
    from hetero_gateway.files.cluster_config import Cluster
    from hetero_gateway.files.trace import TraceRequest
    from hetero_gateway.sim.experiment import Bound, Experiment, Moments, Rate
    from hetero_gateway.sim.prefixes import Prefixes
    from hetero_gateway.sim.result import Cell
    from hetero_gateway.sim.workload import Lengths

DEFAULT_POLICIES = ("finish-time", "min-max", "capacity-weighted", "paper", "round-robin")
# Where nothing is said about rates: a quiet hour, a busy one, and the paper's "inf".
DEFAULT_LOADS = (0.7, 0.9)
# Fewer seeds do not distinguish a difference from chance (docs/guide/simulate.md).
DEFAULT_SEEDS = 5
# With half of it, filling and emptying the cluster are most of a run (docs/guide/simulate.md).
DEFAULT_COUNT = 2000
# The limits of MLPerf Inference's server scenario for Llama-2-70B (v4.0): 2 s and 200 ms.
DEFAULT_SLO_TTFT_S = 2.0
DEFAULT_SLO_TPOT_S = 0.2

_EXAMPLE = """\
examples:
  hetero-gateway simulate -c configs/clusters/paper-a.yaml
  hetero-gateway simulate -c cluster.yaml --rate 8,16,inf --policy finish-time,round-robin
  hetero-gateway simulate -c cluster.yaml --requests trace.csv --load 0.8 --report report.html

A cluster is a YAML file: instances: [{profile: V100-32GB-NVLink2/Llama-3-8B/tp4, count: 1}, ...].
A trace is a CSV file with the header arrival_s,input_tokens,output_tokens, or JSON lines that say
which prompts begin alike (.jsonl, .jsonl.gz); without --requests a synthetic mix of chat lengths is
sent. docs/guide/simulate.md has the forms, and says what the columns mean.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="compare policies on a cluster in virtual time",
        description="Compare policies on a simulated cluster: the gateway's own scheduler, and "
        "engines with continuous batching whose steps take the time that their profiles say.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-c",
        "--config",
        type=Path,
        metavar="CLUSTER.yaml",
        help="the cluster; with --against, what instances really are, by their ids",
    )
    parser.add_argument(
        "--against",
        type=Path,
        nargs="+",
        metavar="RECORD",
        help="simulate what a gateway recorded (serve --record), and print it beside what was "
        "measured: each request where it was placed, and where the policy would have it",
    )
    parser.add_argument(
        "--policy",
        type=_names,
        default=DEFAULT_POLICIES,
        metavar="A,B",
        help=f"policies to compare (default: {','.join(DEFAULT_POLICIES)})",
    )
    _add_load(parser)
    _add_engines(parser)
    _add_scheduling(parser)
    _add_limits(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write a page with plots")
    parser.set_defaults(run=run)


def _add_load(parser: argparse.ArgumentParser) -> None:
    """What is sent, when, and how often."""
    parser.add_argument(
        "--rate",
        type=_rates,
        default=(),
        metavar="R,R",
        help="arrivals per second; inf is all at once",
    )
    parser.add_argument(
        "--load",
        type=_positive_floats,
        default=(),
        metavar="X,X",
        help="rates as a share of what the instances can do together (default without --rate: "
        "0.7,0.9 and --rate inf; or the times of a trace that has them)",
    )
    parser.add_argument("--requests", type=Path, metavar="TRACE", help="lengths and times")
    parser.add_argument(
        "--prefix-cache",
        choices=("on", "off"),
        default="on",
        help="whether the scheduler knows what engines have cached, with a trace that says which "
        "prompts begin alike; the engines have their caches either way (default: on)",
    )
    parser.add_argument(
        "--in-order",
        action="store_true",
        help="take the trace's rows in order; default: sample them with replacement",
    )
    parser.add_argument(
        "--arrivals",
        choices=("random", "trace"),
        help="random: Poisson, or what the cluster file says; trace: the trace's own times, in "
        "order, stretched to the rate (default: random where a rate is given)",
    )
    parser.add_argument(
        "--count",
        type=positive_int,
        metavar="N",
        help=f"requests of one run (default: {DEFAULT_COUNT}, or what the trace has where its "
        "own times are kept)",
    )
    parser.add_argument(
        "--seeds",
        type=positive_int,
        default=DEFAULT_SEEDS,
        metavar="N",
        help=f"runs of each policy at each rate, with seeds 0 to N-1 (default: {DEFAULT_SEEDS})",
    )


def _add_engines(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scheduling",
        choices=("chunked", "prefill-first"),
        default="chunked",
        help="of the engines: vLLM V1's chunked prefill (default), or V0's",
    )
    parser.add_argument(
        "--max-batched-tokens",
        type=positive_int,
        default=2048,
        metavar="N",
        help="most tokens in one step of an engine (default: 2048)",
    )


def _add_scheduling(parser: argparse.ArgumentParser) -> None:
    """What the gateway knows, and by what it chooses."""
    parser.add_argument(
        "--predictor",
        choices=("auto", "bucket-mean", "constant", "normal", "trained", "oracle"),
        default="auto",
        help="of output lengths; auto: normal for the policy paper, else bucket-mean; trained "
        "reads --predictor-file; oracle knows the true ones",
    )
    parser.add_argument(
        "--predictor-file",
        type=Path,
        metavar="FILE.json",
        help="what `hetero-gateway predictor fit` wrote, for --predictor trained",
    )
    parser.add_argument(
        "--queue",
        choices=("fifo", "shortest", "classes"),
        default="fifo",
        help="who is next of those that wait under finish-time (default: fifo)",
    )
    parser.add_argument(
        "--batch-share",
        type=share,
        default=0.0,
        metavar="X",
        help="this share of the requests is of the class batch, the rest interactive: for --queue "
        "classes; --json has each class's times (default: 0)",
    )
    parser.add_argument(
        "--objective",
        choices=("latency", "makespan"),
        default="latency",
        help="what the policy finish-time is to keep low (default: latency)",
    )
    parser.add_argument(
        "--randomised",
        action="store_true",
        help="round-robin policies draw at random, as in the paper, instead of taking turns",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """What requests are judged by."""
    parser.add_argument(
        "--slo-ttft",
        type=positive_float,
        default=DEFAULT_SLO_TTFT_S,
        metavar="S",
        help=f"limit of TTFT in seconds (default: {DEFAULT_SLO_TTFT_S:g})",
    )
    parser.add_argument(
        "--slo-tpot",
        type=positive_float,
        default=DEFAULT_SLO_TPOT_S,
        metavar="S",
        help=f"limit of TPOT in seconds per token (default: {DEFAULT_SLO_TPOT_S:g})",
    )
    parser.add_argument(
        "--heed-slo",
        action="store_true",
        help="finish-time knows the limits (scheduler.slo); default: it is only judged by them",
    )
    parser.add_argument(
        "--held",
        action="store_true",
        help="print the highest load, too, at which each policy has 90, 95 and 99 %% of the "
        "requests within the limits: some 20 loads more for each",
    )


def run(args: argparse.Namespace) -> int:
    """Run the comparison; 1 when no request finished in any run, else 0."""
    if args.against is not None:
        from hetero_gateway.cli import against

        return against.run(args)
    if args.config is None:
        raise ConfigError("simulate: give a cluster, -c CLUSTER.yaml, or a record, --against")
    # Imported here so that other commands and --help stay quick.
    from hetero_gateway.cli.reports import page, simulation_report, simulation_table
    from hetero_gateway.files.cluster_config import load_cluster
    from hetero_gateway.sim.experiment import measure_bound, mix_moments

    _check_policies(args.policy)
    if args.report is not None:
        page.check_can_write(args.report)
    cluster = load_cluster(args.config)
    experiment = _experiment(args, cluster)
    moments = mix_moments(experiment.lengths)
    bound = measure_bound(experiment)
    cells = _compare(args, experiment, _rates_to_run(args, experiment, bound, moments), bound)
    document = simulation_table.document(args.config, experiment, bound, moments, cells)
    held = _held(args, experiment, bound) if args.held else {}
    if held:
        document["held"] = simulation_table.held_document(held)
    if args.json:
        print(json.dumps(document))
    else:
        simulation_table.print_results(args.config, experiment, bound, moments, cells)
        if held:
            simulation_table.print_held(held)
    if args.report is not None:
        html = simulation_report.render(str(args.config), experiment, bound, cells, document)
        page.write(args.report, html)
        print(f"wrote {args.report}", file=sys.stderr)
    if all(cell.throughput_tokens_per_s.mean == 0 for cell in cells):
        print("hetero-gateway: simulate: no request finished in any run", file=sys.stderr)
        return 1
    return 0


def _experiment(args: argparse.Namespace, cluster: Cluster) -> Experiment:
    """Flags over the cluster file."""
    from functools import partial

    import numpy as np

    from hetero_gateway.core.policies import POLICY_NAMES
    from hetero_gateway.core.policies.slo import Slo
    from hetero_gateway.files.policies import installed_policy
    from hetero_gateway.sim.experiment import Experiment

    if args.scheduling == "chunked":
        for instance in cluster.instances:
            if instance.profile.max_num_seqs > args.max_batched_tokens:
                raise ConfigError(
                    f"{args.config}: {instance.instance_id} runs up to "
                    f"{instance.profile.max_num_seqs} sequences (max_num_seqs), more than the "
                    f"{args.max_batched_tokens} tokens of a step; raise --max-batched-tokens"
                )
    path = args.requests or cluster.trace
    rows = _trace(path)
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
    return Experiment(
        instances=cluster.instances,
        lengths=_lengths(rows, cluster, in_order=args.in_order or own_times or texts),
        count=len(rows) if own_times else args.count or (len(rows) if texts else DEFAULT_COUNT),
        slo=Slo(args.slo_ttft, args.slo_tpot),
        arrival_cv=cluster.workload.arrival_cv,
        trace_arrival_s=np.array([row.arrival_s for row in rows], float) if own_times else None,
        faults=cluster.faults,
        scheduling=args.scheduling,
        max_batched_tokens=args.max_batched_tokens,
        predictor=args.predictor,
        randomised=args.randomised,
        objective=args.objective,
        length_model=_length_model(args),
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


def _prefixes(rows: list[TraceRequest]) -> Prefixes:
    import numpy as np

    from hetero_gateway.sim.prefixes import KnownText, Prefixes, Run

    texts = [row.text for row in rows if row.text is not None]
    return Prefixes(
        [KnownText(tuple(Run(*run) for run in text.runs)) for text in texts],
        np.array([row.input_tokens for row in rows], np.int64),
        np.array([row.output_tokens for row in rows], np.int64),
        texts[0].block_tokens,
    )


def _length_model(args: argparse.Namespace) -> LengthModel | None:
    from hetero_gateway.files.length_model_file import read_length_model

    if (args.predictor_file is not None) != (args.predictor == "trained"):
        raise ConfigError("--predictor trained needs --predictor-file, and no other takes one")
    return None if args.predictor_file is None else read_length_model(args.predictor_file)


def _trace(path: Path | None) -> list[TraceRequest]:
    from hetero_gateway.files.trace import read_trace

    return [] if path is None else read_trace(path)


def _lengths(rows: list[TraceRequest], cluster: Cluster, *, in_order: bool) -> Lengths:
    import numpy as np

    from hetero_gateway.files.trace import CHAT_MIX
    from hetero_gateway.sim.workload import LogNormalLengths, TraceLengths

    if rows:
        return TraceLengths(
            np.array([row.input_tokens for row in rows], np.int64),
            np.array([row.output_tokens for row in rows], np.int64),
            in_order,
        )
    wanted = cluster.workload
    return LogNormalLengths(
        wanted.prompt.to_core() if wanted.prompt else CHAT_MIX.prompt,
        wanted.output.to_core() if wanted.output else CHAT_MIX.output,
    )


def _rates_to_run(
    args: argparse.Namespace, experiment: Experiment, bound: Bound, moments: Moments
) -> list[Rate]:
    """In the order that they were given; loads, which mean finite rates, before rates."""
    from hetero_gateway.sim.experiment import Rate
    from hetero_gateway.sim.workload import mean_rate_per_s

    rates, loads = [Rate(r) for r in args.rate], args.load
    if not rates and not loads:
        if experiment.trace_arrival_s is not None:
            return [Rate(mean_rate_per_s(experiment.trace_arrival_s))]
        rates, loads = [Rate(math.inf)], DEFAULT_LOADS
    if loads and bound.tokens_per_s <= 0:
        raise ConfigError(f"{args.config}: no request of the mix fits any instance")
    return [Rate(bound.rate_per_s(load, moments), load) for load in loads] + rates


def _held(
    args: argparse.Namespace, experiment: Experiment, bound: Bound
) -> dict[str, tuple[float, ...]]:
    """By policy, with progress on standard error."""
    from functools import partial

    from rich.console import Console

    from hetero_gateway.lab.load.progress import progress_bar
    from hetero_gateway.sim.cluster import simulate
    from hetero_gateway.sim.experiment import held
    from hetero_gateway.sim.fleet import can_compile

    if bound.tokens_per_s <= 0:
        raise ConfigError(f"{args.config}: no request of the mix fits any instance")
    # This many short runs are worth what compiling takes.
    run = partial(simulate, compiled=can_compile())
    found = {}
    with progress_bar(Console(stderr=True, highlight=False, markup=False)) as progress:
        task = progress.add_task("held", total=None, note="")
        for policy in args.policy:

            def on_load(load: float, policy: str = policy) -> None:
                progress.update(task, note=f"{policy}, load {load:.2f}", refresh=True)

            seeds = range(args.seeds)
            found[policy] = held(experiment, policy, seeds, bound, simulate=run, on_load=on_load)
    return found


def _compare(
    args: argparse.Namespace, experiment: Experiment, rates: list[Rate], bound: Bound
) -> list[Cell]:
    """All runs, with progress on standard error."""
    from rich.console import Console

    from hetero_gateway.cli.reports.simulation_table import rate_name
    from hetero_gateway.lab.load.progress import progress_bar
    from hetero_gateway.sim.experiment import compare

    console = Console(stderr=True, highlight=False, markup=False)
    runs = len(rates) * len(args.policy) * args.seeds
    with progress_bar(console) as progress:
        task = progress.add_task("simulate", total=runs, note="")

        def on_run(policy: str, rate: Rate, seed: int) -> None:
            note = f"{policy}, {rate_name(rate.per_s)}"
            progress.update(task, advance=1, note=note, refresh=True)
            if progress.disable and seed == args.seeds - 1:
                console.print(f"{note}: {args.seeds} runs", soft_wrap=True)

        return compare(
            experiment, args.policy, rates, tuple(range(args.seeds)), bound, on_run=on_run
        )


def _check_policies(names: tuple[str, ...]) -> None:
    from hetero_gateway.core.nearest import nearest_names
    from hetero_gateway.core.policies import POLICY_NAMES
    from hetero_gateway.files.scheduler_config import policy_entry_points

    known = (*POLICY_NAMES, *policy_entry_points())
    for name in names:
        if name not in known:
            near = nearest_names(name, known, 1, least=0.6)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"--policy: no policy is named {name!r}; {hint}")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(names):
        raise argparse.ArgumentTypeError("must be names with commas between them")
    return names


def _rates(text: str) -> tuple[float, ...]:
    return tuple(dict.fromkeys(rate(part) for part in text.split(",")))


def _positive_floats(text: str) -> tuple[float, ...]:
    return tuple(dict.fromkeys(positive_float(part) for part in text.split(",")))
