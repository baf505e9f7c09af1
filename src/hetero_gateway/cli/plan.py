"""``plan``: which instances to run on which machines."""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from hetero_gateway.cli import plan_again, plan_output, plan_watch
from hetero_gateway.cli.arguments import settings
from hetero_gateway.cli.reports import page, plan_comparison
from hetero_gateway.cli.reports.plan import print_plan, render, title
from hetero_gateway.cli.reports.report import CommandReport
from hetero_gateway.deploy.plan_document import document as plan_document
from hetero_gateway.errors import ConfigError, HeteroGatewayError, named_place
from hetero_gateway.files.plan_request import PlanRequest, load_requests
from hetero_gateway.planner.checkpoint_choice import Tried, choose, document, line, storage
from hetero_gateway.planner.plan import Plan
from hetero_gateway.planner.present import compare
from hetero_gateway.planner.search import search
from hetero_gateway.planner.split_plan import with_verdict


def run(args: argparse.Namespace) -> int:
    """Plan, print, write; returns 0 or raises an error that says what to do."""
    if args.config is None:
        raise ConfigError("plan: name the cluster with -c CLUSTER.yaml, or ask: plan support MODEL")
    if args.watch is not None:
        return plan_watch.run(args, settings(args))
    page.check_can_write(args.report)
    plan_output.check_arguments(args)
    if args.from_gateway is None:
        again = None
        requests = load_requests(
            args.config, settings(args), requests=args.requests, profiles=args.profile
        )
    else:
        again = plan_again.prepare(args, settings(args))
        requests = [again.request]
    begin_s = time.monotonic()
    request, plan, checkpoints = _search_all(requests)
    if again is not None:
        seen = again.seen
        compared = compare(plan, request.question, again.present, seen.policy)
        plan = compared.plan
    plan = with_verdict(plan, request.question)
    took_s = time.monotonic() - begin_s
    told = plan_document(plan, request, took_s)
    if checkpoints:
        told["checkpoints"] = checkpoints
    if again is not None:
        told["from_gateway"] = plan_comparison.document(seen, compared)

    def text() -> None:
        print(title(plan, request, took_s))
        print_plan(plan)
        if again is not None:
            print()
            plan_comparison.print_comparison(seen, compared)

    CommandReport(told, text, lambda: render(plan, request, told)).tell(args)
    plan_output.write(args, plan, request, told)
    return 0


def _search_all(
    requests: Sequence[PlanRequest],
) -> tuple[PlanRequest, Plan, list[dict[str, Any]]]:
    """The checkpoint to serve, its plan, and a summary of all; no summary of a single one.

    Raises:
        HeteroGatewayError: no checkpoint has a plan.
    """
    if len(requests) == 1:
        return requests[0], _search(requests[0]), []
    tried = []
    for request in requests:
        name, stored = request.model_name, storage(request.model)
        try:
            tried.append(Tried(name, stored, _search(request)))
        except HeteroGatewayError as error:
            tried.append(Tried(name, stored, None, error))
    chosen = choose(tried, requests[0].question.goals.name)
    plan = tried[chosen].plan
    assert plan is not None
    noted = dataclasses.replace(plan, notes=(*plan.notes, line(tried, chosen)))
    return requests[chosen], noted, document(tried, chosen)


def _search(request: PlanRequest) -> Plan:
    """Search with progress on standard error; errors name the file."""
    console = Console(stderr=True, highlight=False, markup=False)
    with named_place(request.source):
        if not console.is_terminal:
            return search(request.question)
        with console.status("plan") as status:
            return search(request.question, lambda text: status.update(f"plan: {text}"))
