"""What one decision costs: µs of CPU per ``Scheduler.choose``, and per dispatch + settle.

    python benchmarks/scheduling/decision.py [--all] [--json]

The instances have four different profiles and hold four requests each, so that loads and KV usages
differ. Requests have lengths drawn from a log-normal distribution. CPU time of this process, the
median of several rounds; exit code 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from typing import Any

import numpy as np

from hetero_gateway.core.policies import POLICY_NAMES, make_policy
from hetero_gateway.core.scheduling.decision import Decision
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId, InstanceSpec, Outcome, Request
from hetero_gateway.files.profile_file import builtin_profiles

PROFILES = (
    "V100-32GB-NVLink2/Llama-3-8B/tp4",
    "V100-32GB-NVLink2/Llama-3-8B/tp1",
    "A800-80GB-PCIe/Llama-3-8B/tp1",
    "L40S-48GB/Llama-3-8B/tp1",
)
SIZES = (8, 64, 512, 4096)
# Of the policies that look at loads alone; benchmarks/scheduling/pump.py has finish-time's.
GOALS_US = {64: 30.0, 512: 60.0, 4096: 200.0}
REQUESTS_PER_INSTANCE = 4
DECISIONS_PER_ROUND = 1000
ROUNDS = 9


def make_requests(rng: np.random.Generator, count: int) -> list[Request]:
    prompts = np.minimum(rng.lognormal(6.0, 1.0, count), 6000).astype(int) + 1
    outputs = np.minimum(rng.lognormal(5.3, 0.8, count), 2000) + 1
    return [Request("m", int(i), float(o)) for i, o in zip(prompts, outputs, strict=True)]


def loaded_scheduler(policy: str, instances: int, requests: list[Request]) -> Scheduler:
    profiles = builtin_profiles()
    scheduler = Scheduler(make_policy(policy), np.random.default_rng(0))
    for i in range(instances):
        profile = profiles[PROFILES[i % len(PROFILES)]]
        scheduler.add(InstanceSpec(InstanceId(f"i{i}"), frozenset({"m"}), profile, 8192))
    for request in itertools.islice(itertools.cycle(requests), REQUESTS_PER_INSTANCE * instances):
        scheduler.dispatch(decide(scheduler, request))
    return scheduler


def decide(scheduler: Scheduler, request: Request) -> Decision:
    decision = scheduler.choose(request)
    assert isinstance(decision, Decision)
    return decision


def measure(policy: str, instances: int) -> dict[str, Any]:
    """Median µs of CPU of a decision, and of a dispatch with its settlement."""
    requests = make_requests(np.random.default_rng(1), DECISIONS_PER_ROUND)
    scheduler = loaded_scheduler(policy, instances, requests)
    choose, dispatch, settle = scheduler.choose, scheduler.dispatch, scheduler.settle
    decisions = [decide(scheduler, request) for request in requests]
    choose_us, settle_us = [], []
    for _ in range(ROUNDS):
        begin = time.process_time()
        for request in requests:
            choose(request)
        chosen = time.process_time()
        for decision in decisions:
            settle(dispatch(decision), Outcome.COMPLETED)
        end = time.process_time()
        choose_us.append((chosen - begin) / len(requests) * 1e6)
        settle_us.append((end - chosen) / len(requests) * 1e6)
    goal_us = None if policy == "finish-time" else GOALS_US.get(instances)
    figure_us = statistics.median(choose_us)
    return {
        "policy": policy,
        "instances": instances,
        "choose_us": round(figure_us, 2),
        "dispatch_settle_us": round(statistics.median(settle_us), 2),
        "goal_us": goal_us,
        "met": goal_us is None or figure_us < goal_us,
    }


def measure_watching() -> dict[str, float]:
    """Median µs of CPU of a request under min-max, from its choice to its end, watched or not."""
    requests = make_requests(np.random.default_rng(1), DECISIONS_PER_ROUND)
    result = {}
    for name, observes in (("unwatched_us", False), ("watched_us", True)):
        scheduler = Scheduler(make_policy("min-max"), np.random.default_rng(0), observes=observes)
        profile = builtin_profiles()[PROFILES[0]]
        for i in range(SIZES[0]):
            scheduler.add(InstanceSpec(InstanceId(f"i{i}"), frozenset({"m"}), profile, 8192))
        spent_us = []
        for second in range(ROUNDS):
            begin = time.process_time()
            dispatches = [scheduler.dispatch(decide(scheduler, r), second) for r in requests]
            for dispatch in dispatches:
                scheduler.first_token(dispatch, second + 0.3)
            for dispatch in dispatches:
                scheduler.settle(dispatch, Outcome.COMPLETED, second + 0.6)
            spent_us.append((time.process_time() - begin) / len(requests) * 1e6)
        result[name] = round(statistics.median(spent_us), 2)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="µs of CPU per decision")
    parser.add_argument("--all", action="store_true", help="every policy, not only min-max")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    results = []
    if not args.json:
        print(f"{'policy':22}{'instances':>10}{'choose µs':>11}{'goal µs':>9}{'settle µs':>11}")
    for policy in POLICY_NAMES if args.all else ("min-max",):
        for instances in SIZES:
            row = measure(policy, instances)
            results.append(row)
            if not args.json:
                goal = f"{row['goal_us']:.0f}" if row["goal_us"] else "-"
                print(
                    f"{policy:22}{instances:>10}{row['choose_us']:>11.1f}{goal:>9}"
                    f"{row['dispatch_settle_us']:>11.1f}" + ("" if row["met"] else "  missed"),
                    flush=True,
                )
    watching = measure_watching()
    met = all(row["met"] for row in results)
    if args.json:
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        print(json.dumps({"results": results, "watching": watching, "met": met, **versions}))
    else:
        print(
            f"a stream under min-max, from its choice to its end: {watching['unwatched_us']} µs, "
            f"{watching['watched_us']} µs where its instance is watched"
        )
        print("every goal is met" if met else "a goal is missed")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
