"""``demo``: two unequal emulated instances, the gateway in front of them, load, a comparison.

A small version of the paper's second experiment (section 5.2): V100 t=4 and V100 t=1 of
Llama-3-8B. Every process is real and speaks HTTP; only the accelerators' time is computed, from
profiles derived from public measurements, and runs ``TIME_SCALE`` times faster than theirs. Each
policy gets the same requests at the same times, the same instances, and a fresh gateway.

As in the paper's and vLLM's own benchmarks, a request's ``max_tokens`` is its true output length:
the gateway, which caps its prediction at it, knows more than it would with real clients.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import Progress

from hetero_gateway.cli.made_key import dashboard_link
from hetero_gateway.cli.reports.report import grid
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.trace import schedule, synthetic_trace
from hetero_gateway.lab.load.children import Children
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.load.comparison import (
    PolicyResult,
    completion_gap_s,
    conclusion,
    table_rows,
)
from hetero_gateway.lab.load.emulated import EmulatedCluster, EmulatedInstance
from hetero_gateway.lab.load.progress import progress_bar, watch
from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind, filler_pool
from hetero_gateway.lab.load.replay import replay
from hetero_gateway.lab.load.result import summarise
from hetero_gateway.sim.workload import LogNormal, LogNormalLengths

POLICIES = ("round-robin", "capacity-weighted", "finish-time")
MODEL = "Llama-3-8B"
# Instance id: built-in profile.
INSTANCES = {
    "v100-tp4": f"V100-32GB-NVLink2/{MODEL}/tp4",
    "v100-tp1": f"V100-32GB-NVLink2/{MODEL}/tp1",
}
# Times faster than the hardware. Measured at 5, 11 000 streamed tokens a second: the gateway used
# 15 % of a core, the load generator and each emulator 8 %, and no emulated clock fell behind.
TIME_SCALE = 6.0
# Requests per second of hardware time: half of it is more than the t=1 instance can serve (about
# 4.5 of these requests per second), all of it less than both together can (about 16).
RATE_PER_S = 12.0
# Chat with some context: prompts of about 960 tokens on average, outputs about 190. Between
# ShareGPT with its history (2 355 and 437) and Azure's conversations (1 237 and 221), and shorter,
# so that the longest answer ends within the run.
_MIX = LogNormalLengths(LogNormal(768, 0.8, 3072), LogNormal(160, 0.7, 512))
# A policy's run lasts about as long as its arrivals and the longest answer, 1.2 times the arrivals
# at the default length; round robin's lasts twice. With startup, that makes five times this share.
_ARRIVAL_SHARE = 0.2
_DEFAULT_PORT = 8000
_REQUEST_TIMEOUT_S = 300.0
_TRICKLE_PER_S = 2.0
# In hardware seconds; about 1 % of a run.
_TOLERATED_LAG_S = 1.0


def run(args: argparse.Namespace) -> int:
    """Run the demo; however it ends, no process stays behind."""
    code: int = uvloop.run(_until_signal(args))
    return code


async def _until_signal(args: argparse.Namespace) -> int:
    """Run the demo until SIGINT, SIGTERM or SIGHUP cancels it; then the exit code is 128 + N."""
    loop = asyncio.get_running_loop()
    demo = loop.create_task(_demo(args))
    received: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        demo.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await demo
    except asyncio.CancelledError:
        return 128 + received[0] if received else 1


async def _demo(args: argparse.Namespace) -> int:
    console = Console(stderr=True, highlight=False)
    port = _port(args.port, console)
    with (
        tempfile.TemporaryDirectory(prefix="hetero-gateway-demo-") as folder,
        Children(Path(folder)) as children,
    ):
        demo = _Demo(args, port, Path(folder), children, console)
        await demo.start_instances()
        with progress_bar(console) as progress:
            results = [await demo.run_policy(policy, progress) for policy in POLICIES]
        document = demo.document(results)
        if args.json:
            print(json.dumps(document), flush=True)
        else:
            _print_table(results, document)
        if args.keep:
            # Ctrl-C is the normal way to end this, so it is not a failure.
            with contextlib.suppress(asyncio.CancelledError):
                await demo.serve(as_json=args.json)
    return 1 if any(r.summary.errors == r.summary.requests for r in results) else 0


class _Demo:
    """The processes of one demo, and the load on them."""

    def __init__(
        self,
        args: argparse.Namespace,
        port: int,
        folder: Path,
        children: Children,
        console: Console,
    ) -> None:
        self._seed = args.seed
        self._children = children
        self._console = console
        instances = [EmulatedInstance(name, profile) for name, profile in INSTANCES.items()]
        self._cluster = EmulatedCluster(instances, MODEL, TIME_SCALE, port, folder, children)
        self._maker = BodyMaker(MODEL, PromptKind.CHAT, True, 4.0, filler_pool())
        count = max(20, round(args.seconds * _ARRIVAL_SHARE * RATE_PER_S * TIME_SCALE))
        trace = synthetic_trace(count, args.seed, _MIX)
        self._load = schedule(trace, RATE_PER_S * TIME_SCALE, args.seed)
        self._lost_s = 0.0
        self._late_s = 0.0

    async def start_instances(self) -> None:
        """Start the emulated instances."""
        self._console.print(f"Starting {' and '.join(INSTANCES)}, emulated …")
        await self._cluster.start_instances()

    async def run_policy(self, policy: str, progress: Progress) -> PolicyResult:
        """Run the whole load through a fresh gateway with this policy; returns the results."""
        if policy == POLICIES[-1]:  # --keep leaves this one serving
            self._cluster.gateway_config = {"batches": {"directory": "batches"}}
        await self._cluster.start_gateway(policy)
        lost_before_s = await self._cluster.lost_s()
        target = parse_target(self._cluster.url)
        async with watch(progress, policy, len(self._load)) as counter:
            records = await replay(
                target, self._load, self._maker, counter.add, timeout_s=_REQUEST_TIMEOUT_S
            )
        self._children.check()
        summary = summarise(records)
        self._lost_s += await self._cluster.lost_s() - lost_before_s
        self._late_s = max(self._late_s, summary.send_delay_s.to_dict()["p99"] or 0.0)
        return PolicyResult(policy, summary.scaled(TIME_SCALE))

    def document(self, results: list[PolicyResult]) -> dict[str, Any]:
        """The document of ``--json``."""
        return {
            "time_scale": TIME_SCALE,
            "rate": RATE_PER_S,
            "seed": self._seed,
            "requests": len(self._load),
            "mean_input_tokens": sum(r.input_tokens for r in self._load) / len(self._load),
            "mean_output_tokens": sum(r.output_tokens for r in self._load) / len(self._load),
            "results": [
                {
                    "policy": r.policy,
                    **r.summary.to_dict(),
                    "completion_difference_s": completion_gap_s(r, list(INSTANCES)),
                }
                for r in results
            ],
            "conclusion": conclusion(results, POLICIES[-1]),
            "caution": self._caution(),
        }

    def _caution(self) -> str | None:
        """A warning for figures that show the machine rather than the policies."""
        lost_s, late_s = self._lost_s * TIME_SCALE, self._late_s * TIME_SCALE
        if max(lost_s, late_s) < _TOLERATED_LAG_S:
            return None
        return (
            "Take the figures with care: this machine was too busy. The emulated clocks fell "
            f"{lost_s:.1f} s behind, and requests were sent up to {late_s:.1f} s late."
        )

    async def serve(self, *, as_json: bool) -> None:
        """Keep a trickle of load on the last gateway until cancelled."""
        stream = sys.stderr if as_json else sys.stdout
        url = self._cluster.url
        dashboard = dashboard_link(url, self._cluster.admin_key, stream)
        body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]})
        print(
            f"Serving until Ctrl-C, policy {POLICIES[-1]}, under light load:\n"
            f"  dashboard        {dashboard}\n"
            f"  OpenAI base_url  {url}/v1   (model {MODEL}, any API key)\n"
            f"  try              curl -s {url}/v1/chat/completions "
            f"-H 'Content-Type: application/json' -d '{body}'",
            file=stream,
            flush=True,
        )
        target = parse_target(url)
        seed = self._seed
        while True:
            seed += 1
            load = schedule(synthetic_trace(20, seed, _MIX), _TRICKLE_PER_S, seed)
            await replay(target, load, self._maker, timeout_s=_REQUEST_TIMEOUT_S)
            self._children.check()


def _print_table(results: list[PolicyResult], document: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(
        f"{MODEL} on V100 t=4 and V100 t=1, emulated: {document['requests']} requests at "
        f"{RATE_PER_S:g}/s, {document['mean_input_tokens']:.0f} prompt and "
        f"{document['mean_output_tokens']:.0f} output tokens on average.",
        soft_wrap=True,
    )
    rows = [(name, *cells) for name, cells in table_rows(results, list(INSTANCES))]
    console.print(grid(("", *(result.policy for result in results)), rows))
    console.print(
        f"Hardware time: the emulated instances run {TIME_SCALE:g} times faster than V100s, and "
        "every time and rate here is scaled back. Throughput counts prompt and output tokens until "
        "the last answer.",
        soft_wrap=True,
    )
    if document["caution"]:
        console.print(document["caution"], soft_wrap=True)
    console.print(document["conclusion"], soft_wrap=True)


def _port(wanted: int | None, console: Console) -> int:
    """The port to serve on; a free one if the default is taken.

    Raises:
        ConfigError: the requested port cannot be used.
    """
    try:
        port = _bindable(_DEFAULT_PORT if wanted is None else wanted)
        return 0 if wanted == 0 else port  # 0: each gateway takes a free one
    except (OSError, OverflowError) as error:
        if wanted is not None:
            raise ConfigError(f"--port {wanted}: cannot listen there: {error}") from error
        port = _bindable(0)
        console.print(f"Port {_DEFAULT_PORT} is taken, so the gateway is on {port}.")
        return port


def _bindable(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        bound: int = probe.getsockname()[1]
        return bound
