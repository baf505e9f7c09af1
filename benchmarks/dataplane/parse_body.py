"""How long reading a request's body holds the event loop, by what its prompt is made of.

    python benchmarks/dataplane/parse_body.py [--megabytes 1] [--rounds 30]

CPU time of one thread; the least and the median of many rounds. Goal: 1.5 ms for one megabyte.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator

from hetero_gateway.gateway.wire.openai import parse_body

GOAL_MS_PER_MB = 1.5
MB = 1 << 20


def bodies(size_bytes: int) -> Iterator[tuple[str, bytes]]:
    """(kind, body) of about the same size."""
    words = "The quick brown fox jumps over the lazy dog. "
    lines = 'The quick brown fox\njumps over the "lazy" dog. '
    rng = random.Random(0)
    image = "data:image/png;base64," + "A8/+" * (size_bytes // 4)
    part = [{"type": "image_url", "image_url": {"url": image}}]
    ids = [rng.randrange(128_000) for _ in range(size_bytes * 10 // 79)]
    yield "text", _chat(words * (size_bytes // len(words)))
    yield "text with quotes", _chat(lines * (size_bytes // (len(lines) + 3)))
    yield "text, escaped", _chat("漢字かな" * (size_bytes // 24))
    yield "token ids", json.dumps({"model": "m", "prompt": ids}).encode()
    yield "an image", _chat(part)


def _chat(content: object) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 16}).encode()


def milliseconds(body: bytes, rounds: int) -> list[float]:
    result = []
    for _ in range(rounds):
        began_s = time.thread_time()
        parse_body(body, b"application/json")
        result.append(1000 * (time.thread_time() - began_s))
    return sorted(result)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    missed = False
    print(f"{'prompt':<18} {'MB':>5} {'least ms/MB':>12} {'median ms/MB':>13}")
    for kind, body in bodies(round(args.megabytes * MB)):
        size = len(body) / MB
        times = milliseconds(body, args.rounds)
        median = statistics.median(times) / size
        missed |= median > GOAL_MS_PER_MB
        print(f"{kind:<18} {size:>5.2f} {times[0] / size:>12.2f} {median:>13.2f}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
