"""``plan``: which instances to make of which machines."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_gateway.cli import plan_again, plan_checkpoints, plan_output, plan_support, plan_watch
from hetero_gateway.cli.arguments import positive_float, share
from hetero_gateway.errors import ConfigError

if TYPE_CHECKING:
    from hetero_gateway.files.plan_request import PlanRequest
    from hetero_gateway.planner.plan import Plan

_EXAMPLE = """\
examples:
  hetero-gateway plan -c configs/clusters/plan-paper.yaml
  hetero-gateway plan -c cluster.yaml --requests trace.csv --report plan.html
  hetero-gateway plan -c cluster.yaml --goal goodput --slo-ttft 2 --slo-tpot 0.05
  hetero-gateway plan -c cluster.yaml --goal fewest --rate 20 --slo-ttft 2 --slo-tpot 0.05

A cluster is a YAML file: model, max_model_len, and machines: [{id, accelerator, count}, ...].
docs/guide/plan.md says what can stand in it, and what the columns mean.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="find the best deployment of a model on given machines",
        description="Search the tensor parallelism of every machine: by memory, by the paper's "
        "Algorithm 1, and by simulating the best few behind the gateway.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-c", "--config", type=Path, metavar="CLUSTER.yaml", help="the cluster")
    parser.add_argument("--requests", type=Path, metavar="TRACE.csv", help="lengths of requests")
    parser.add_argument(
        "--goal",
        choices=("throughput", "goodput", "cost", "fewest"),
        help="the most tokens/s (default); the highest rate that is held within the limits; the "
        "least cost per million tokens; the fewest accelerators that hold --rate",
    )
    parser.add_argument(
        "--rate", type=positive_float, metavar="R", help="requests per second to hold"
    )
    parser.add_argument(
        "--slo-ttft", type=positive_float, metavar="S", help="limit of each request's TTFT"
    )
    parser.add_argument(
        "--slo-tpot", type=positive_float, metavar="S", help="limit of each request's TPOT"
    )
    parser.add_argument(
        "--slo-share",
        type=share,
        metavar="X",
        help="of the requests that are to be within both (default: 0.95)",
    )
    parser.add_argument(
        "--prefix-cache",
        choices=("on", "off"),
        help="whether hits in prefix caches count, with a trace that says which prompts begin "
        "alike (default: on)",
    )
    parser.add_argument(
        "--ttft-p99", type=positive_float, metavar="S", help="goal of TTFT's 99th percentile"
    )
    parser.add_argument(
        "--tpot-p99", type=positive_float, metavar="S", help="goal of TPOT's 99th percentile"
    )
    parser.add_argument("--policy", metavar="NAME", help="of the gateway (default: finish-time)")
    parser.add_argument(
        "--memory",
        choices=("fitted", "paper"),
        help="KV memory as fitted to vLLM's own logs (default), or by Eq. (1) of the paper",
    )
    parser.add_argument(
        "--estimator",
        choices=("unpadded", "paper"),
        help="Algorithm 1, which prunes: with batches timed by their mean prompt (default), or "
        "as printed",
    )
    parser.add_argument(
        "--profile",
        action="append",
        default=[],
        metavar="FILE",
        help="a measured profile; may be given several times, and comes before all others",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of everything drawn (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write a page with plots")
    plan_output.add_arguments(parser)
    plan_again.add_arguments(parser)
    plan_watch.add_arguments(parser)
    parser.set_defaults(run=run)
    nested = parser.add_subparsers(metavar="[support]", title="also")
    plan_support.add_parser(nested)


def run(args: argparse.Namespace) -> int:
    """Plan, print, write; 0, or an error that says what to do."""
    # Imported here so that other commands and --help stay quick.
    from hetero_gateway.cli.reports import page, plan_comparison, plan_report
    from hetero_gateway.cli.reports.plan_table import print_plan, title
    from hetero_gateway.deploy.plan_document import document
    from hetero_gateway.planner.present import compare

    if args.config is None:
        raise ConfigError("plan: name the cluster with -c CLUSTER.yaml, or ask: plan support MODEL")
    if args.watch is not None:
        return plan_watch.run(args, _overrides(args))
    if args.report is not None:
        page.check_can_write(args.report)
    plan_output.check_arguments(args)
    again = None if args.from_gateway is None else plan_again.prepare(args, _overrides(args))
    requests = _requests(args) if again is None else [again.request]
    begin_s = time.monotonic()
    request, plan, checkpoints = plan_checkpoints.search_all(requests, _search)
    took_s = time.monotonic() - begin_s
    if again is not None:
        seen = again.seen
        compared = compare(plan, request.question, again.present, seen.policy)
        plan = compared.plan
    told = document(plan, request, took_s)
    if checkpoints:
        told["checkpoints"] = checkpoints
    if again is not None:
        told["from_gateway"] = plan_comparison.document(seen.traffic, compared)
    if args.json:
        print(json.dumps(told, allow_nan=False))
    else:
        print(title(plan, request, took_s))
        print_plan(plan)
        if again is not None:
            print()
            plan_comparison.print_comparison(seen.traffic, compared)
    if args.report is not None:
        page.write(args.report, plan_report.render(plan, request, told))
        print(f"wrote {args.report}", file=sys.stderr)
    plan_output.write(args, plan, request, told)
    return 0


def _requests(args: argparse.Namespace) -> list[PlanRequest]:
    """The file with the flags over it, for each of its checkpoints."""
    from hetero_gateway.files.plan_request import load_requests

    return load_requests(
        args.config, _overrides(args), requests=args.requests, profiles=args.profile
    )


def _overrides(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "goals.goal": args.goal,
        "goals.ttft_p99_s": args.ttft_p99,
        "goals.tpot_p99_s": args.tpot_p99,
        "slo.ttft_s": args.slo_ttft,
        "slo.tpot_s": args.slo_tpot,
        "slo.share": args.slo_share,
        "workload.rate_per_s": args.rate,
        "workload.prefix_cache": None if args.prefix_cache is None else args.prefix_cache == "on",
        "policy": args.policy,
        "memory": args.memory,
        "estimator": args.estimator,
        "seed": args.seed,
    }


def _search(request: PlanRequest) -> Plan:
    """With progress on standard error; errors name the file."""
    from rich.console import Console

    from hetero_gateway.planner.search import search

    console = Console(stderr=True, highlight=False, markup=False)
    try:
        if not console.is_terminal:
            return search(request.question)
        with console.status("plan") as status:
            return search(request.question, lambda text: status.update(f"plan: {text}"))
    except ConfigError as error:
        raise ConfigError(f"{request.source}: {error}") from error
