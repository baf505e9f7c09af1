"""What the gateway costs per request and per chunk, beside other proxies, in one run.

    python benchmarks/dataplane/proxies.py                # about 15 minutes with set-up
    python benchmarks/dataplane/proxies.py --targets gateway,nginx,vllm-router --rounds 3

Every server is up at once, on one core, before the same two mock instances; the load, the mocks
and this script are on another core. Each round measures every server once with each kind of load,
in shuffled order: plain requests (1 KB out, 1 KB back), short streams (10 chunks), long ones (200
chunks of 250 bytes, 15 ms apart, --streams at a time), and plain requests at 100 per second, whose
median latency is compared with that of the same without any server between. All prompts are the
same one, with --distinct all differ. A server's CPU is that of its whole process tree, less what it
uses when idle. Two kinds of stream give the cost of a chunk (the slope) and of a stream as such
(the intercept). Rates are lowered for a server that would use more than --utilization of its core.

CPU used meanwhile by anything else is reported. A segment waits a while for a quiet machine; one
that had much foreign CPU is measured again, once, and left out where at least half of its kind are
clean. Absolute figures move with the machine: compare ratios within one run.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.dataplane import targets
from benchmarks.dataplane.figures import make_rows, print_report
from benchmarks.dataplane.rig import BenchError, Rig, note
from benchmarks.dataplane.segments import INTERVAL_S, Bench, measure
from benchmarks.dataplane.targets import Launch, Place, Server, Unavailable


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ",".join(targets.TARGETS)
    parser.add_argument("--targets", default=names, help=f"comma-separated; default: {names}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a segment")
    parser.add_argument("--streams", type=int, default=64, help="streams at a time")
    parser.add_argument("--request-rate", type=float, default=1000.0, help="requests per second")
    parser.add_argument(
        "--distinct", action="store_true", help="a prompt of its own for each request"
    )
    parser.add_argument("--skip-install", action="store_true", help="use what is installed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every segment there")
    parser.add_argument(
        "--extra", action="append", default=[], metavar="NAME=COMMAND",
        help="another server: a command line with {port}, {first} and {second}",
    )  # fmt: skip
    parser.add_argument(
        "--patience",
        type=float,
        default=10.0,
        help="seconds to wait for a quiet machine, each time",
    )
    parser.add_argument("--utilization", type=float, default=0.5, help="most of a core to load")
    parser.add_argument("--max-foreign", type=float, default=0.15, help="in cores; more is noise")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if unknown := set(args.targets.split(",")) - set(targets.TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    if bad := [extra for extra in args.extra if "=" not in extra]:
        parser.error(f"--extra wants NAME=COMMAND, not {bad[0]!r}")
    return args


def start_all(
    rig: Rig, wanted: dict[str, Callable[[Place], Launch]], install: bool
) -> tuple[list[Server], dict[str, str]]:
    """The servers that came up, and the reason for each that did not."""
    servers, missing = [targets.direct(rig)], {}
    for name, make in wanted.items():
        note(f"starting {name} …")
        try:
            servers.append(targets.start(rig, name, make, install))
        except BenchError as error:
            missing[name] = str(error)
            note(f"{name}: {error}")
    return servers, missing


def main() -> int:
    args = parse_arguments()
    wanted = {name: targets.TARGETS[name] for name in args.targets.split(",")}
    for item in args.extra:
        name, command = item.split("=", 1)
        wanted[name] = targets.extra(command)
    rng = random.Random(args.seed)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="hetero-gateway-bench-") as workdir,
            Rig(Path(workdir), INTERVAL_S * 1e3) as rig,
        ):
            servers, missing = start_all(rig, wanted, not args.skip_install)
            bench = Bench(rig, servers, args)
            for server in list(servers):
                try:
                    bench.calibrate(server)
                except Unavailable as error:
                    servers.remove(server)
                    missing[server.name] = str(error)
                    note(f"{server.name}: {error}")
            segments, idles = measure(bench, args.rounds, rng)
            rows = make_rows(bench, segments, idles)
    except BenchError as error:
        print(f"dataplane: {error}", file=sys.stderr)
        return 1
    print_report(rows, segments, missing, args)
    if args.json:
        document = {
            "python": platform.python_version(),
            "kernel": platform.release(),
            "rows": [asdict(row) for row in rows],
            "missing": missing,
            "segments": [asdict(segment) for segment in segments],
            "idle_s_per_s": idles,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
