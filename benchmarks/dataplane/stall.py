"""What streams notice of a hostile body a second: the gaps between their chunks, with and without.

    python benchmarks/dataplane/stall.py [--megabytes 20] [--seconds 6] [--rounds 3]

Two mock instances send a chunk every 15 ms on each of some streams through the gateway, while
somebody sends it a body of 20 MB each second, made to cost its reader as much as it can. A gap is
the time between two reads of one stream. Of several rounds the one that others disturbed less
counts: the least 99th percentile, with and without. Goal: it grows by at most 60 ms.
"""

from __future__ import annotations

import argparse
import multiprocessing
import selectors
import socket
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.dataplane import targets
from benchmarks.dataplane.parse_body import MB, hostile_bodies
from benchmarks.dataplane.rig import Rig, note, pinned

GOAL_MS = 60.0
KINDS = (
    "messages of []", "messages of [[[]]]", "prompts of [[[]]]", "lists of ids", "quotes of a list",
    "messages of brackets in text", "keys", 'keys "n":1,', "a long name of a field",
    "a list as deep as long", "NaN", "Infinity", "UTF-16",
)  # fmt: skip
_PERIOD_S = 1.0
_WARM_UP_S = 1.0


def request(path: str, body: bytes) -> bytes:
    """One of HTTP/1.1."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def send(port: int, body: bytes) -> None:
    """The same body each second, on a new connection, until this process is ended."""
    message = request("/v1/completions", body)
    due_s = time.monotonic()
    while True:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(message)
            connection.recv(1 << 16)
        due_s = max(due_s + _PERIOD_S, time.monotonic())
        time.sleep(max(0.0, due_s - time.monotonic()))


def gaps_ms(port: int, streams: int, seconds: float) -> np.ndarray:
    """Between the reads of each of so many streams, for so long."""
    chunks = round((seconds + _WARM_UP_S) * 1000)  # more than there is time for
    body = b'{"model":"bench","messages":[{"role":"user","content":"x"}],"stream":true,'
    message = request("/v1/chat/completions", body + b'"max_tokens":%d}' % chunks)
    result: list[float] = []
    with selectors.DefaultSelector() as selector:
        for _ in range(streams):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(message)
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ, [0.0])
        begin_s = time.monotonic() + _WARM_UP_S
        end_s = begin_s + seconds
        while (now_s := time.monotonic()) < end_s:
            for key, _ in selector.select(end_s - now_s):
                assert isinstance(key.fileobj, socket.socket)
                if not key.fileobj.recv(1 << 16):
                    raise SystemExit("a stream ended too soon")
                now_s = time.monotonic()
                if key.data[0] and now_s > begin_s:
                    result.append(1000 * (now_s - key.data[0]))
                key.data[0] = now_s
        for key in list(selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
    return np.array(result)


def beside(rig: Rig, port: int, body: bytes, args: argparse.Namespace) -> np.ndarray:
    """The gaps while somebody sends this body each second."""
    with pinned(rig.load_core):
        sender = multiprocessing.Process(target=send, args=(port, body), daemon=True)
        sender.start()
    try:
        return gaps_ms(port, args.streams, args.seconds)
    finally:
        sender.kill()
        sender.join()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--streams", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default="|".join(KINDS), help="of parse_body.py, with | between")
    args = parser.parse_args()
    bodies = dict(hostile_bodies(round(args.megabytes * MB)))
    grown = []
    with (
        tempfile.TemporaryDirectory(prefix="hetero-gateway-bench-") as workdir,
        Rig(Path(workdir)) as rig,
    ):
        port = targets.start(rig, "gateway", targets.TARGETS["gateway"], install=False).port
        note("alone …")
        rounds = [gaps_ms(port, args.streams, args.seconds) for _ in range(args.rounds)]
        alone = np.min([np.percentile(gaps, (50, 99, 100)) for gaps in rounds], axis=0)
        print(f"{'ms between reads, beside':28}{'median':>8}{'p99':>8}{'longest':>9}{'p99 +':>8}")
        print(f"{'nothing':28}{alone[0]:8.1f}{alone[1]:8.1f}{alone[2]:9.1f}")
        for kind in args.kinds.split("|"):
            rounds = [beside(rig, port, bodies[kind], args) for _ in range(args.rounds)]
            found = np.min([np.percentile(gaps, (50, 99, 100)) for gaps in rounds], axis=0)
            grown.append(found[1] - alone[1])
            print(f"{kind:28}{found[0]:8.1f}{found[1]:8.1f}{found[2]:9.1f}{grown[-1]:+8.1f}")
    print(f"the 99th percentile grows by {max(grown):.1f} ms (goal ≤ {GOAL_MS:.0f})")
    return int(max(grown) > GOAL_MS)


if __name__ == "__main__":
    sys.exit(main())
