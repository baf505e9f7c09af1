"""What a request costs in a busy cluster: µs of CPU per placed request, and per other event.

    python benchmarks/scheduling/pump.py [--policies finish-time,min-max]
        [--instances 2,8,16,64,512,4096] [--requests 10000] [--json]

Each round settles a request, submits one and pumps. "one by one": the cluster runs 78 requests on
each instance, 5 000 at most, and has room for more. "queue": instances have only that many
seats, all are full, and a hundred requests wait, as in a batch; the figure per placed request then
includes the pumps that placed nothing. Only a policy that lets requests wait has the latter. CPU
time of this process; exit code 1 when the goal for the pump is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.clusters import PROFILES
from benchmarks.scheduling.decision import POLICIES, SIZES, make_requests, policies, sizes
from benchmarks.tables import Column, report
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId, InstanceSpec, Outcome, Reject
from hetero_gateway.files.profile_file import builtin_profiles

GOALS_US = {("finish-time", 64): 150.0}
# The policies under which requests wait for an instance with room.
QUEUEING = ("finish-time",)
RUNNING, RUNNING_EACH = 5000, 78
REQUESTS = 10_000
WAITING = 100
COLUMNS = (
    Column("policy", "policy", 22),
    Column("instances", "instances", 10, "d"),
    Column("  arriving", "arriving", 14),
    Column("running", "running", 9, "d"),
    Column("placed", "placed", 8, "d"),
    Column("pump µs", "pump_us", 9, ".1f"),
    Column("goal µs", "goal_us", 9, ".0f"),
    Column("first token µs", "first_token_us", 16, ".1f"),
    Column("settle µs", "settle_us", 11, ".1f"),
)


class Cluster:
    """Instances whose requests finish in the order they came, and a stop-watch per event.

    Args:
        seats: most requests that an instance runs at once; None: as many as its profile says.
    """

    def __init__(self, policy: str, instances: int, seats: int | None) -> None:
        self.scheduler = Scheduler(make_policy(policy), np.random.default_rng(0))
        profiles = builtin_profiles()
        for i in range(instances):
            profile = profiles[PROFILES[i % len(PROFILES)]]
            if seats is not None:
                profile = dataclasses.replace(profile, max_num_seqs=seats)
            self.scheduler.add(InstanceSpec(InstanceId(f"i{i}"), frozenset({"m"}), profile, 8192))
        self.now_s = 0.0
        self.running: deque[Any] = deque()  # dispatches, the oldest first
        self.restart()

    def restart(self) -> None:
        """Set the watches and the count of the placed to 0."""
        self.spent_s = {"pump": 0.0, "first_token": 0.0, "settle": 0.0}
        self.placed = 0

    def _timed(self, event: str, begin_s: float) -> None:
        self.spent_s[event] += time.process_time() - begin_s

    def pump(self) -> int:
        """How many were placed."""
        begin_s = time.process_time()
        tickets = self.scheduler.pump(self.now_s)
        self._timed("pump", begin_s)
        for ticket in tickets:
            begin_s = time.process_time()
            self.scheduler.first_token(ticket.dispatch, self.now_s)
            self._timed("first_token", begin_s)
            self.running.append(ticket.dispatch)
        self.placed += len(tickets)
        return len(tickets)

    def submit(self, request: Request) -> None:
        begin_s = time.process_time()
        submitted = self.scheduler.place(request, self.now_s, at_once=False)
        self._timed("pump", begin_s)
        assert not isinstance(submitted, Reject)

    def settle(self) -> None:
        dispatch = self.running.popleft()
        begin_s = time.process_time()
        self.scheduler.settle(dispatch, Outcome.COMPLETED, self.now_s)
        self._timed("settle", begin_s)


def measure(policy: str, instances: int, count: int, *, queue: bool) -> dict[str, Any]:
    running = min(RUNNING, RUNNING_EACH * instances)
    cluster = Cluster(policy, instances, running // instances if queue else None)
    requests = itertools.cycle(make_requests(np.random.default_rng(1), running + count))
    for _ in range(running):
        cluster.submit(next(requests))
        cluster.pump()
    if queue:
        for request in itertools.islice(requests, WAITING):
            cluster.submit(request)
        while placed := cluster.pump():  # until every instance is full
            for request in itertools.islice(requests, placed):
                cluster.submit(request)
    else:
        assert len(cluster.running) == running, "the instances must hold them all"
    cluster.restart()
    for _ in range(count):
        cluster.now_s += 0.001
        cluster.settle()
        cluster.submit(next(requests))
        cluster.pump()
    goal_us = GOALS_US.get((policy, instances))
    figures = {
        f"{event}_us": spent_s / max(1, cluster.placed) * 1e6
        for event, spent_s in cluster.spent_s.items()
    }
    return {
        "policy": policy,
        "instances": instances,
        "arriving": "  queue" if queue else "  one by one",
        "running": len(cluster.running),
        "placed": cluster.placed,
        **figures,
        "goal_us": goal_us,
        "met": goal_us is None or figures["pump_us"] < goal_us,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="µs of CPU per placed request")
    parser.add_argument("--policies", type=policies, default=list(POLICIES), help="with commas")
    parser.add_argument("--instances", type=sizes, default=list(SIZES), help="with commas")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="measured in each row")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)

    def rows() -> Iterator[dict[str, Any]]:
        for policy in args.policies:
            for instances in args.instances:
                for queue in (False, True) if policy in QUEUEING else (False,):
                    yield measure(policy, instances, args.requests, queue=queue)

    return report(rows(), COLUMNS, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
