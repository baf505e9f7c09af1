"""Memory of the gateway with many open streams, beside other proxies.

    python benchmarks/dataplane/memory.py
    python benchmarks/dataplane/memory.py --targets gateway --streams 1000 [--chunks 200]

One server at a time, before two mock instances that send a chunk every half second, or sooner
where each stream is to have had many. Memory is the proportional set size of the whole process
tree (resident in brackets): idle after the first answer, and while all streams are open, as the
instances themselves count them, and have had ``--chunks``: of those that may go on elsewhere the
gateway keeps all.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.dataplane import targets
from benchmarks.dataplane.cpu import tree_memory_bytes
from benchmarks.dataplane.rig import BenchError, Rig, note

INTERVAL_S, MOST_S = 0.5, 20.0  # between a stream's chunks; for all that are asked for
DEFAULT_TARGETS = "gateway,nginx,haproxy,vllm-router,sglang-router,litellm"
# Of the gateway, idle, and with 1 000 open streams of few chunks, and of 200.
IDLE_GOAL_BYTES, OPEN_GOAL_BYTES, KEPT_GOAL_BYTES = 60e6, 90e6, 110e6
FEW_CHUNKS = 6


@dataclass(frozen=True)
class Memory:
    """One server's memory in bytes."""

    target: str
    version: str
    idle_pss_bytes: int
    idle_rss_bytes: int
    open_pss_bytes: int
    open_rss_bytes: int
    after_pss_bytes: int
    streams: int
    errors: int


def open_streams(rig: Rig) -> int:
    """How many streams the two instances are sending."""
    total = 0
    for url in rig.instance_urls:
        text = urllib.request.urlopen(f"{url}/metrics", timeout=5).read().decode()
        found = re.search(r"^vllm:num_requests_running\S* (\d+)", text, re.MULTILINE)
        assert found is not None
        total += int(found[1])
    return total


def measure(rig: Rig, name: str, args: argparse.Namespace) -> Memory:
    """Starts one server, opens the streams, reads its memory and ends it. Raises BenchError."""
    streams, hold_s, interval_s = args.streams, args.hold, rig.interval_ms / 1e3
    server = targets.start(rig, name, targets.TARGETS[name], not args.skip_install)
    pid = server.pid
    assert pid is not None
    idle_rss, idle_pss = tree_memory_bytes(pid)
    run = rig.load(
        server.port, stream=1, connections=streams, rate=400, count=streams,
        chunks=args.chunks + round(hold_s / interval_s), hold_s=90,
    )  # fmt: skip
    run.go()
    deadline_s = time.monotonic() + hold_s
    opened = 0
    while opened < streams and time.monotonic() < deadline_s:
        time.sleep(0.2)
        opened = max(opened, open_streams(rig))
    time.sleep(args.chunks * interval_s)
    opened = open_streams(rig)
    open_rss, open_pss = tree_memory_bytes(pid)
    load = run.wait()
    after_pss = tree_memory_bytes(pid)[1]
    errors = load.result["errors"]
    if errors:
        note(f"{name}: {errors} errors, first: {load.result['first_error']}")
    return Memory(
        name, server.version, idle_pss, idle_rss, open_pss, open_rss, after_pss, opened, errors
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", default=DEFAULT_TARGETS, help="comma-separated")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--chunks", type=int, default=FEW_CHUNKS, help="that each stream has had")
    parser.add_argument("--hold", type=float, default=17.0, help="seconds that a stream has beside")
    parser.add_argument("--skip-install", action="store_true", help="use what is installed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if unknown := set(args.targets.split(",")) - set(targets.TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    results, missing = [], {}
    for name in args.targets.split(","):
        note(f"measuring {name} …")
        try:
            with (
                tempfile.TemporaryDirectory(prefix="hetero-gateway-bench-") as workdir,
                Rig(Path(workdir), min(INTERVAL_S, MOST_S / args.chunks) * 1e3) as rig,
            ):
                results.append(measure(rig, name, args))
        except BenchError as error:
            missing[name] = str(error)
    print_table(results, missing, args.chunks)
    if args.json:
        document = {"results": [asdict(result) for result in results], "missing": missing}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def print_table(results: list[Memory], missing: dict[str, str], chunks: int) -> None:
    print("MB (10⁶ bytes), proportional set size (resident set size)")
    print(f"{'target':24}{'version':>10}{'idle':>15}{'streams open':>15}{'after':>8}"
          f"{'KB/stream':>11}{'streams':>9}{'errors':>8}")  # fmt: skip
    for row in results:
        idle = f"{row.idle_pss_bytes / 1e6:.0f} ({row.idle_rss_bytes / 1e6:.0f})"
        busy = f"{row.open_pss_bytes / 1e6:.0f} ({row.open_rss_bytes / 1e6:.0f})"
        each = (row.open_pss_bytes - row.idle_pss_bytes) / max(1, row.streams) / 1e3
        after = f"{row.after_pss_bytes / 1e6:.0f}"
        print(f"{row.target:24}{row.version:>10}{idle:>15}{busy:>15}{after:>8}{each:11.1f}"
              f"{row.streams:9}{row.errors:8}")  # fmt: skip
    for name, reason in missing.items():
        print(f"{name}: not measured: {reason}")
    open_goal = OPEN_GOAL_BYTES if chunks <= FEW_CHUNKS else KEPT_GOAL_BYTES
    for row in results:
        if row.target == "gateway":
            print(
                f"gateway, resident: idle {row.idle_rss_bytes / 1e6:.0f} MB (goal ≤ "
                f"{IDLE_GOAL_BYTES / 1e6:.0f}), streams open {row.open_rss_bytes / 1e6:.0f} MB "
                f"(goal ≤ {open_goal / 1e6:.0f} with 1 000)"
            )


if __name__ == "__main__":
    sys.exit(main())
