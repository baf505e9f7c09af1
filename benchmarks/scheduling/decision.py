"""What one decision costs: µs of CPU per ``Scheduler.choose``, and per request from end to end.

    python benchmarks/scheduling/decision.py [--policies finish-time,min-max] [--all]
        [--instances 2,8,16,64,512,4096] [--compiled] [--json]

The instances have four different profiles and hold four requests each, so that loads and KV usages
differ. Requests have lengths drawn from a log-normal distribution. A request's whole cost is that
of being submitted, placed, seen to make its first token and settled, with nobody waiting. CPU time
of this process, the median of several rounds; exit code 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import compiled  # before what may be compiled
from benchmarks.clusters import PROFILES, draw_lengths
from benchmarks.tables import Column, report
from hetero_gateway.core.policies import POLICY_NAMES, make_policy
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId, InstanceSpec, Outcome, Reject
from hetero_gateway.files.profile_file import builtin_profiles

POLICIES = ("finish-time", "min-max")
SIZES = (2, 8, 16, 64, 512, 4096)
# Of a choice under the policies that look at loads alone; pump.py has finish-time's goal.
GOALS_US = {64: 70.0, 512: 80.0, 4096: 100.0}
REQUESTS_PER_INSTANCE = 4
DECISIONS_PER_ROUND = 1000
ROUNDS = 9
WATCHED_INSTANCES = 8
COLUMNS = (
    Column("policy", "policy", 22),
    Column("instances", "instances", 10, "d"),
    Column("choose µs", "choose_us", 11, ".1f"),
    Column("goal µs", "goal_us", 9, ".0f"),
    Column("request µs", "request_us", 12, ".1f"),
)


def make_requests(rng: np.random.Generator, count: int) -> list[Request]:
    lengths = zip(*draw_lengths(rng, count), strict=True)
    return [Request("m", int(prompt), float(output)) for prompt, output in lengths]


def make_scheduler(policy: str, instances: int, *, observes: bool = False) -> Scheduler:
    """A scheduler with so many idle instances of the four kinds."""
    profiles = builtin_profiles()
    scheduler = Scheduler(make_policy(policy), np.random.default_rng(0), observes=observes)
    for i in range(instances):
        profile = profiles[PROFILES[i % len(PROFILES)]]
        scheduler.add(InstanceSpec(InstanceId(f"i{i}"), frozenset({"m"}), profile, 8192))
    return scheduler


def place(scheduler: Scheduler, request: Request, now_s: float = 0.0) -> Any:
    """The dispatch of a request that is placed at once."""
    scheduler.place(request, now_s, at_once=False)
    (ticket,) = scheduler.pump(now_s)
    return ticket.dispatch


def measure(policy: str, instances: int) -> dict[str, Any]:
    """Median µs of CPU of a decision, and of a request from its coming to its end."""
    requests = make_requests(np.random.default_rng(1), DECISIONS_PER_ROUND)
    scheduler = make_scheduler(policy, instances)
    for request in itertools.islice(itertools.cycle(requests), REQUESTS_PER_INSTANCE * instances):
        scheduler.first_token(place(scheduler, request), 0.0)
    choose_us, request_us = [], []
    for _ in range(ROUNDS):
        begin_s = time.process_time()
        for request in requests:
            scheduler.choose(request)
        chosen_s = time.process_time()
        for request in requests:
            dispatch = place(scheduler, request)
            scheduler.first_token(dispatch, 0.0)
            scheduler.settle(dispatch, Outcome.COMPLETED, 0.0)
        end_s = time.process_time()
        choose_us.append((chosen_s - begin_s) / len(requests) * 1e6)
        request_us.append((end_s - chosen_s) / len(requests) * 1e6)
    assert not isinstance(scheduler.choose(requests[0]), Reject)
    goal_us = None if policy == "finish-time" else GOALS_US.get(instances)
    figure_us = statistics.median(choose_us)
    return {
        "policy": policy,
        "instances": instances,
        "choose_us": round(figure_us, 2),
        "request_us": round(statistics.median(request_us), 2),
        "goal_us": goal_us,
        "met": goal_us is None or figure_us < goal_us,
    }


def measure_watching() -> dict[str, float]:
    """Median µs of CPU of a stream under min-max, from its coming to its end, watched or not."""
    requests = make_requests(np.random.default_rng(1), DECISIONS_PER_ROUND)
    result = {}
    for name, observes in (("unwatched_us", False), ("watched_us", True)):
        scheduler = make_scheduler("min-max", WATCHED_INSTANCES, observes=observes)
        spent_us = []
        for second in range(ROUNDS):
            begin_s = time.process_time()
            dispatches = [place(scheduler, request, second) for request in requests]
            for dispatch in dispatches:
                scheduler.first_token(dispatch, second + 0.3)
            for dispatch in dispatches:
                scheduler.settle(dispatch, Outcome.COMPLETED, second + 0.6)
            spent_us.append((time.process_time() - begin_s) / len(requests) * 1e6)
        result[name] = round(statistics.median(spent_us), 2)
    return result


def sizes(text: str) -> list[int]:
    """Numbers of instances, with commas."""
    return [int(part) for part in text.split(",")]


def policies(text: str) -> list[str]:
    """Names of policies, with commas."""
    names = text.split(",")
    if unknown := set(names) - set(POLICY_NAMES):
        raise argparse.ArgumentTypeError(f"no policy {', '.join(sorted(unknown))}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="µs of CPU per decision")
    parser.add_argument("--policies", type=policies, default=list(POLICIES), help="with commas")
    parser.add_argument("--all", action="store_true", help="every policy")
    parser.add_argument("--instances", type=sizes, default=list(SIZES), help="with commas")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--compiled", action="store_true", help=compiled.HELP)
    args = parser.parse_args(argv)
    watching = measure_watching()
    if not args.json:
        print(
            f"a stream under min-max, from its coming to its end: {watching['unwatched_us']} µs, "
            f"{watching['watched_us']} µs where its instance is watched"
        )

    def rows() -> Iterator[dict[str, Any]]:
        for policy in POLICY_NAMES if args.all else args.policies:
            for instances in args.instances:
                yield measure(policy, instances)

    return report(rows(), COLUMNS, as_json=args.json, watching=watching)


if __name__ == "__main__":
    sys.exit(main())
