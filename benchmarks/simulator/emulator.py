"""What an emulated instance costs: CPU share of one core with many open streams.

    python benchmarks/simulator/emulator.py [--streams 1000] [--seconds 15] [--profile NAME]

Starts ``emulate`` in a process of its own, opens the streams from a second process that only
counts bytes, waits until every stream has begun, and then measures the emulator's CPU time, the
tokens that it delivered and the wall-clock time by which its steps came late.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import re
import subprocess
import sys
import time
import urllib.request
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import uvloop

_RUN = (
    "import sys; from hetero_gateway.cli import parse;"
    "a = parse(['emulate', *sys.argv[1:]]); sys.exit(a.run(a))"
)


class Counter(asyncio.Protocol):
    """One stream: sends its request, notes that data has come, throws the data away."""

    awaited = 0
    lost = 0
    all_begun = asyncio.Event()

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not subclass asyncio's.
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._begun and b"data: " in data:
            self._begun = True
            Counter.awaited -= 1
            if not Counter.awaited:
                Counter.all_begun.set()

    def connection_lost(self, exc: Exception | None) -> None:
        Counter.lost += 1


async def _open_streams(port: int, streams: int, pipe: Connection) -> None:
    body = b'{"prompt": "%b", "max_tokens": 8000, "ignore_eos": true, "stream": true}' % (
        b"x" * 400
    )
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b"
    ) % (len(body), body)
    loop = asyncio.get_running_loop()
    Counter.awaited = streams
    for _ in range(streams):
        await loop.create_connection(lambda: Counter(request), "127.0.0.1", port)
    await Counter.all_begun.wait()
    pipe.send("begun")
    await asyncio.to_thread(pipe.recv)
    pipe.send(Counter.lost)


def _client(port: int, streams: int, pipe: Connection) -> None:
    uvloop.run(_open_streams(port, streams, pipe))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        text = response.read().decode()
    match = re.search(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    assert match, name
    return float(match[1])


def _start(profile: str, streams: int) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-c", _RUN, "--profile", profile, "--port", "0"]
    command += ["--max-num-seqs", str(streams), "--num-gpu-blocks-override", str(600 * streams)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    match = re.search(r":(\d+)$", line.strip())
    if match is None:
        raise SystemExit(f"the emulator did not start: {line}")
    return process, int(match[1])


def main() -> None:
    """Measure and print one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--profile", default="H100-80GB-SXM/Llama-3-8B/tp1")
    args = parser.parse_args()
    server, port = _start(args.profile, args.streams)
    ours, theirs = multiprocessing.Pipe()
    client = multiprocessing.Process(target=_client, args=(port, args.streams, theirs), daemon=True)
    client.start()
    try:
        ours.recv()
        tokens = "vllm:generation_tokens_total"
        lost = "hetero_gateway_emulator_lost_seconds_total"
        before = _metric(port, tokens), _metric(port, lost), _cpu_s(server.pid)
        started_s = time.perf_counter()
        time.sleep(args.seconds)
        elapsed_s = time.perf_counter() - started_s
        cpu_s = _cpu_s(server.pid) - before[2]
        delivered = _metric(port, tokens) - before[0]
        late_s = _metric(port, lost) - before[1]
        running = _metric(port, "vllm:num_requests_running")
        ours.send("stop")
        broken = ours.recv()
    finally:
        server.terminate()
        server.wait()
        client.join(5)
    print(f"{running:.0f} streams on {args.profile}, {elapsed_s:.1f} s")
    print(f"CPU share of one core   {cpu_s / elapsed_s:7.1%}")
    print(f"tokens per second       {delivered / elapsed_s:7.0f}")
    print(f"per stream              {delivered / elapsed_s / args.streams:7.1f} tokens/s")
    print(f"CPU per token           {cpu_s / delivered * 1e6:7.1f} µs")
    print(f"steps late by           {late_s:7.2f} s in all; streams broken: {broken}")


if __name__ == "__main__":
    main()
