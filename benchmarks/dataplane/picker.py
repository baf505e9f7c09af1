"""What a request costs behind Envoy: the picker's CPU and Envoy's, per request and per chunk.

    python benchmarks/dataplane/picker.py [--requests 6000] [--rate 500] [--chunks 200] [--rounds 3]

Everything is real: Envoy with docker/envoy/envoy.yaml, `hetero-gateway picker`, two mock instances
(mock.c) and the load (load.c), on the same bench as `proxies.py`. Envoy and the picker share one
core, the mocks and the load another. CPU is read from each process's own clock, less what it uses
when idle. The gateway alone (`serve`) is measured beside it, on the same load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: find the package of benchmarks
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from benchmarks.dataplane.cpu import tree_cpu_s
from benchmarks.dataplane.rig import BenchError, Rig, note
from benchmarks.envoy import command, configuration, without_reports
from benchmarks.ports import free_port

PROFILES = ("V100-32GB-NVLink2/Llama-3-8B/tp4", "V100-32GB-NVLink2/Llama-3-8B/tp1")
START_S = 60.0
IDLE_S = 2.0
SETTLE_S = 0.3


class Setup:
    """Envoy with a picker, and a gateway, in front of the same mocks.

    ``pids``: of each process by name; ``ports``: where requests go, by name.
    """

    def __init__(self, rig: Rig, body_mode: str, *, reports: bool) -> None:
        self.pids: dict[str, int] = {}
        self.http_ports: dict[str, int] = {}
        self.ports: dict[str, int] = {"envoy": free_port(), "gateway": free_port()}
        grpc_port, http_port, admin_port = free_port(), free_port(), free_port()
        self.http_ports = {"envoy": http_port, "gateway": self.ports["gateway"]}
        config = rig.workdir / "gateway.yaml"
        instances = [
            {"id": f"mock-{i}", "base_url": url, "model": "bench", "profile": PROFILES[i % 2]}
            for i, url in enumerate(rig.instance_urls)
        ]
        config.write_text(yaml.safe_dump({"instances": instances}), "utf-8")
        python = [sys.executable, "-m", "hetero_gateway"]
        quiet = ["--log-level", "warning"]
        self._start(
            rig, "picker",
            [*python, "picker", "-c", str(config), "--port", str(grpc_port), "--http-port",
             str(http_port), *quiet],
        )  # fmt: skip
        self._start(
            rig, "gateway",
            [*python, "serve", "-c", str(config), "--port", str(self.ports["gateway"]), *quiet],
        )  # fmt: skip
        document = configuration(
            rig.instance_urls, [(grpc_port, http_port)], self.ports["envoy"], admin_port
        )
        if body_mode == "FULL_DUPLEX_STREAMED":
            from benchmarks.envoy import ext_proc

            ext_proc(document)["processing_mode"] |= {
                "request_body_mode": body_mode,
                "request_trailer_mode": "SEND",
            }
        if not reports:
            without_reports(document)
        path = rig.workdir / "envoy.yaml"
        path.write_text(yaml.safe_dump(document), "utf-8")
        for url in (f":{http_port}/readyz", f":{self.ports['gateway']}/readyz"):
            _until(lambda url=url: _get(url) is not None, f"{url} is not ready")
        self._start(rig, "envoy", command(path))
        name = "cluster.picker.membership_healthy"
        stats = f":{admin_port}/stats?filter=^{name}$"
        _until(lambda: (_get(stats) or "").strip() == f"{name}: 1", "Envoy does not see the picker")

    def _start(self, rig: Rig, name: str, words: list[str]) -> None:
        self.pids[name] = rig.start(name, words, rig.proxy_core).pid

    def cpu_s(self) -> dict[str, float]:
        return {name: tree_cpu_s(pid) for name, pid in self.pids.items()}

    def waited(self, target: str) -> int:
        """How many requests have waited in the scheduler's queue for 1 ms or more."""
        seen = {}
        text = _get(f":{self.http_ports[target]}/metrics") or ""
        for line in text.splitlines():
            if line.startswith("hetero_gateway_queue_wait_seconds"):
                name, _, value = line.rpartition(" ")
                seen[name] = float(value)
        prefix = "hetero_gateway_queue_wait_seconds_"
        return round(seen[f"{prefix}count"] - seen[f'{prefix}bucket{{le="0.001"}}'])


def _get(rest: str) -> str | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1{rest}", timeout=2) as answer:
            return str(answer.read().decode())
    except OSError:
        return None


def _until(condition: Callable[[], bool], problem: str) -> None:
    give_up_s = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > give_up_s:
            raise BenchError(problem)
        time.sleep(0.1)


def measure(
    rig: Rig,
    setup: Setup,
    target: str,
    count: int,
    rate: float,
    chunks: int,
    body_bytes: int,
    idle: dict[str, float],
) -> dict[str, Any]:
    """One load: CPU seconds per request of each process, and the latencies."""
    run = rig.load(
        setup.ports[target],
        stream=int(chunks > 0),
        connections=64 if chunks == 0 else 256,
        rate=rate,
        count=count,
        chunks=chunks,
        body_bytes=body_bytes,
        distinct=1,
    )
    time.sleep(SETTLE_S)
    waited = setup.waited(target)
    before, started_s = setup.cpu_s(), time.monotonic()
    run.go()
    load = run.wait()
    time.sleep(SETTLE_S)
    elapsed_s = time.monotonic() - started_s
    after = setup.cpu_s()
    if load.result["errors"]:
        raise BenchError(f"{target}: {load.result}")
    cpu = {
        name: (after[name] - before[name] - idle[name] * elapsed_s) / count for name in setup.pids
    }
    waited = setup.waited(target) - waited
    return {"cpu_s": cpu, "waited": waited / count, "load": load.result}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every measurement; medians over the rounds."""
    kinds = {
        "request": (args.requests, args.rate, 0),
        "stream": (args.streams, args.stream_rate, args.chunks),
    }
    seen: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="picker-bench-") as folder,
        Rig(Path(folder), mocks=args.instances) as rig,
    ):
        setup = Setup(rig, args.body_mode, reports=not args.without_reports)
        before, started_s = setup.cpu_s(), time.monotonic()
        time.sleep(IDLE_S)
        elapsed_s = time.monotonic() - started_s
        idle = {name: (cpu_s - before[name]) / elapsed_s for name, cpu_s in setup.cpu_s().items()}
        for number in range(args.rounds):
            for kind, (count, rate, chunks) in kinds.items():
                for target in ("envoy", "gateway"):
                    note(f"round {number + 1}: {kind} through {target}")
                    result = measure(rig, setup, target, count, rate, chunks, args.body_bytes, idle)
                    seen.setdefault((kind, target), []).append(result)
    rows = []
    for (kind, target), results in seen.items():
        names = ("picker", "envoy") if target == "envoy" else ("gateway",)
        row: dict[str, Any] = {"kind": kind, "through": target, "idle_cores": idle}
        for name in names:
            row[f"{name}_cpu_us"] = 1e6 * statistics.median(r["cpu_s"][name] for r in results)
        row["waited_share"] = statistics.median(r["waited"] for r in results)
        row["load"] = results[-1]["load"]
        rows.append(row)
    return {"chunks": args.chunks, "body_mode": args.body_mode, "results": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--rate", type=float, default=400.0, help="requests per second")
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--stream-rate", type=float, default=40.0)
    parser.add_argument("--chunks", type=int, default=200, help="of one stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--body-bytes", type=int, default=1024, help="of a request")
    parser.add_argument(
        "--body-mode", default="BUFFERED", choices=("BUFFERED", "FULL_DUPLEX_STREAMED")
    )
    parser.add_argument(
        "--without-reports", action="store_true", help="an Envoy that reports nothing of responses"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        document = run(args)
    except BenchError as error:
        sys.exit(f"picker: {error}")
    if args.json:
        print(json.dumps(document, indent=1))
        return
    for row in document["results"]:
        cpu = ", ".join(f"{k[:-7]} {v:.0f} µs" for k, v in row.items() if k.endswith("_cpu_us"))
        waited = f"{100 * row['waited_share']:.0f} % waited for an instance"
        print(f"{row['kind']:8} through {row['through']:8} {cpu}; {waited}")


if __name__ == "__main__":
    main()
