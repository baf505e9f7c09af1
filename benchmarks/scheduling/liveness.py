"""What a frozen instance costs its gateway's clients: a process that is stopped, under load.

    python benchmarks/scheduling/liveness.py [--clients 4 50] [--plain] [--json]

Two equal emulated instances, each in a process of its own, behind a real gateway with its
defaults. So many clients send one request after the other; after ``WARM_S`` one instance gets
SIGSTOP, and ``FROZEN_S`` later SIGCONT. Of the requests that were sent in the ``WINDOW_S`` after it
was stopped:

    touched   went to the frozen instance, as the gateway's decisions say, while it was frozen
    waited    the longest time to a first byte
    back      the share of the requests after that window which it answered

Exit code 1 when more than 5 % of them touched it, or one waited for more than 3 s. Answers of at
most 40 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import uvloop

from hetero_gateway.lab.load.children import Children
from hetero_gateway.lab.load.emulated import EmulatedCluster, EmulatedInstance

MODEL = "Llama-3-8B"
PROFILE = "V100-32GB-NVLink2/Llama-3-8B/tp4"
WARM_S, FROZEN_S, WINDOW_S, TAIL_S = 6.0, 10.0, 12.0, 6.0
MOST_TOUCHED, MOST_WAIT_S = 0.05, 3.0
FROZEN = "frozen"


class Requests:
    """What the clients sent: (when, first byte after, by which instance, its status)."""

    def __init__(self, url: str, *, stream: bool) -> None:
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.AsyncClient(base_url=url, timeout=120, limits=limits)
        self.stream = stream
        self.rows: list[tuple[float, float, str, int]] = []
        self._numbers = itertools.count()

    async def send(self, until_s: float) -> None:
        while (sent_s := time.monotonic()) < until_s:
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": f"request {next(self._numbers)}"}],
                "max_tokens": 40,
                "stream": self.stream,
            }
            async with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                parts = answer.aiter_raw()
                await anext(parts)
                waited_s = time.monotonic() - sent_s
                by = answer.headers.get("x-hetero-gateway-instance", "")
                self.rows.append((sent_s, waited_s, by, answer.status_code))
                async for _ in parts:
                    pass


async def run(clients: int, *, stream: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, Children(Path(name)) as children:
        cluster = EmulatedCluster(
            [EmulatedInstance(FROZEN, PROFILE), EmulatedInstance("well", PROFILE)],
            MODEL,
            1.0,
            0,
            Path(name),
            children,
            gateway_config={"health": {}},  # as by default
        )
        await cluster.start_instances()
        await cluster.start_gateway("finish-time")
        requests = Requests(cluster.url, stream=stream)
        until_s = time.monotonic() + WARM_S + WINDOW_S + TAIL_S
        sending = [asyncio.create_task(requests.send(until_s)) for _ in range(clients)]
        await asyncio.sleep(WARM_S)
        pid, stopped_s = cluster.emulator_pids[0], time.monotonic()
        before = await decided(cluster)
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(FROZEN_S)
            after = await decided(cluster)
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*sending)
        await requests.client.aclose()
    new = [row for row in requests.rows if stopped_s <= row[0] < stopped_s + WINDOW_S]
    touched = after[FROZEN] - before[FROZEN]
    late = [row for row in requests.rows if row[0] >= stopped_s + WINDOW_S]
    return {
        "clients": clients,
        "stream": stream,
        "new": len(new),
        "touched": touched,
        "share": touched / len(new),
        "waited_s": max(waited_s for _, waited_s, _, _ in new),
        "failed": sum(status != 200 for *_, status in requests.rows),
        "back": sum(by == FROZEN for _, _, by, _ in late) / max(1, len(late)),
    }


async def decided(cluster: EmulatedCluster) -> dict[str, int]:
    """How many requests were sent to each instance so far."""
    name = "hetero_gateway_routing_decisions_total"
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{cluster.url}/metrics")).text
    found = {FROZEN: 0, "well": 0}
    for line in text.splitlines():
        for instance_id in found:
            if line.startswith(name) and f'backend="{instance_id}"' in line:
                found[instance_id] += int(float(line.rpartition(" ")[2]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="requests that a frozen instance costs")
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 50])
    parser.add_argument("--plain", action="store_true", help="answers that do not stream")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    rows = [uvloop.run(run(clients, stream=not args.plain)) for clients in args.clients]
    if args.json:
        print(json.dumps(rows))
    else:
        print("clients     new  touched   share  waited  failed    back")
        for row in rows:
            print(
                f"{row['clients']:7d} {row['new']:7d} {row['touched']:8d} {row['share']:7.1%} "
                f"{row['waited_s']:6.2f}s {row['failed']:7d} {row['back']:7.0%}"
            )
    met = all(
        row["share"] < MOST_TOUCHED and row["waited_s"] <= MOST_WAIT_S and not row["failed"]
        for row in rows
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
