"""What a request costs under ``finish-time``: µs of CPU per placed request, and per other event.

    python benchmarks/scheduling/pump.py [--instances 64] [--running 5000] [--json]

The cluster is kept at so many running requests: each round settles some, submits as many and pumps.
Half of the rounds have a queue that never empties, so that every settlement and first token pumps
it, as in a batch; the figure per placed request then includes the pumps that placed nothing.
CPU time of this process; exit code 1 when the goal for the pump is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.scheduling.decision import PROFILES, make_requests
from hetero_gateway.core.instances.ledger import Dispatch
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId, InstanceSpec, Outcome, Request
from hetero_gateway.files.profile_file import builtin_profiles

GOAL_US = 150.0
REQUESTS = 10_000


class Cluster:
    """Instances whose requests finish in the order they came, and a stop-watch per event."""

    def __init__(self, instances: int) -> None:
        self.scheduler = Scheduler(make_policy("finish-time"), np.random.default_rng(0))
        profiles = builtin_profiles()
        for i in range(instances):
            profile = profiles[PROFILES[i % len(PROFILES)]]
            self.scheduler.add(InstanceSpec(InstanceId(f"i{i}"), frozenset({"m"}), profile, 8192))
        self.now_s = 0.0
        self.running: list[Dispatch] = []
        self.spent_s = {"pump": 0.0, "first_token": 0.0, "settle": 0.0}
        self.placed = 0

    def _timed(self, event: str, begin_s: float) -> None:
        self.spent_s[event] += time.process_time() - begin_s

    def pump(self) -> None:
        begin_s = time.process_time()
        tickets = self.scheduler.pump(self.now_s)
        self._timed("pump", begin_s)
        for ticket in tickets:
            assert ticket.dispatch is not None
            begin_s = time.process_time()
            self.scheduler.first_token(ticket.dispatch, self.now_s)
            self._timed("first_token", begin_s)
            self.running.append(ticket.dispatch)
        self.placed += len(tickets)

    def submit(self, request: Request) -> None:
        begin_s = time.process_time()
        self.scheduler.submit(request, self.now_s)
        self._timed("pump", begin_s)

    def settle(self) -> None:
        dispatch = self.running.pop(0)
        begin_s = time.process_time()
        self.scheduler.settle(dispatch, Outcome.COMPLETED, self.now_s)
        self._timed("settle", begin_s)


def measure(instances: int, running: int, *, queue: bool) -> dict[str, float]:
    cluster = Cluster(instances)
    requests = make_requests(np.random.default_rng(1), running + REQUESTS)
    for request in requests[:running]:
        cluster.submit(request)
        cluster.pump()
    assert len(cluster.running) == running, "the instances must hold them all"
    for event in cluster.spent_s:
        cluster.spent_s[event] = 0.0
    cluster.placed = 0
    if queue:
        for request in requests[running:]:
            cluster.submit(request)
    for request in requests[running:]:
        cluster.now_s += 0.001
        cluster.settle()
        if not queue:
            cluster.submit(request)
        cluster.pump()
    return {
        f"{event}_us": spent_s / max(1, cluster.placed) * 1e6
        for event, spent_s in cluster.spent_s.items()
    } | {"placed": cluster.placed}


def main() -> int:
    parser = argparse.ArgumentParser(description="µs of CPU per request placed by finish-time")
    parser.add_argument("--instances", type=int, default=64)
    parser.add_argument("--running", type=int, default=5000)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    results = {
        "arriving one by one": measure(args.instances, args.running, queue=False),
        "from a queue": measure(args.instances, args.running, queue=True),
    }
    met = all(row["pump_us"] < GOAL_US for row in results.values())
    if args.json:
        print(json.dumps({"results": results, "goal_us": GOAL_US, "met": met}))
    else:
        for name, row in results.items():
            print(
                f"{name:22} pump {row['pump_us']:6.1f} µs per placed request, first token "
                f"{row['first_token_us']:5.1f} µs, settle {row['settle_us']:5.1f} µs"
            )
        print(f"goal for the pump: {GOAL_US:.0f} µs, {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
