"""How long reading a request's body holds the event loop, by what it is made of.

    python benchmarks/dataplane/parse_body.py [--megabytes 1] [--rounds 30]

CPU time of one thread; the least and the median of many rounds, and the longest step: the event
loop has its turn after each. Goals: 1.5 ms for one
megabyte of what people send, no step of more than 5 ms for one of what is made to cost as much as
it can, and no more memory than a few copies of the body.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Iterator

from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.request.openai import parse_in_steps
from hetero_gateway.gateway.turns import advance

GOAL_MS_PER_MB = 1.5
HOSTILE_GOAL_MS_PER_MB = 5.0
MB = 1 << 20


def bodies(size_bytes: int) -> Iterator[tuple[str, bytes]]:
    """(kind, body) of about the same size: what people send."""
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


def hostile_bodies(size_bytes: int) -> Iterator[tuple[str, bytes]]:
    """(kind, body) of about the same size: what costs a parser most."""

    def filled(head: bytes, unit: bytes, tail: bytes) -> bytes:
        return b'{"model":"m",' + head + unit * (size_bytes // len(unit)) + tail

    for name, unit, last in (
        ("[]", b"[],", b"[]"), ("{}", b"{},", b"{}"), ('""', b'"",', b'""'), ("0", b"0,", b"0"),
        ("{'':0}", b'{"":0},', b"0"), ("[[[]]]", b"[[[[[[]]]]]],", b"0"),
        ("quoted quotes", b'"\\"\\"\\"\\"",', b"0"), ("brackets in text", b'"[[{{]]}}",', b"0"),
    ):  # fmt: skip
        yield f"n of {name}", filled(b'"n":[', unit, last + b"]}")
        yield f"prompts of {name}", filled(b'"prompt":[', unit, last + b"]}")
        yield f"messages of {name}", filled(b'"messages":[', unit, last + b"]}")
    yield "keys", b"{" + b",".join(b'"%x":0' % i for i in range(size_bytes // 9)) + b"}"
    for unit in (b'"n":1,', b'"x":[],', b'"n":[],', b'"x":{"":[]},', b'"\\u006e":1,', b'"":"",'):
        yield f"keys {unit.decode()}", filled(b"", unit, b'"x":0}')
    for part in (b'"type":', b'{"type":"text"},', b'{"type":"image_url"},', b'"t', b'"type"'):
        yield f"parts {part.decode()}", filled(b'"messages":[', part, b"0]}")
    yield "data URLs", filled(b'"messages":[{"type":"image"},"', b';base64,",";', b'"]}')
    yield "backslashes", filled(b'"prompt":"', b"\\\\", b'"}')
    yield "backslashes and quotes", filled(b'"prompt":"', b'\\\\\\"', b'"}')
    yield "quotes of a list", filled(b'"prompt":["', b'\\\\","', b'"]}')
    yield "escapes", filled(b'"prompt":"', b"\\u0041", b'"}')
    yield "digits", filled(b'"n":', b"9", b"}")
    yield "digits of a float", filled(b'"n":0.', b"9", b"e9}")
    yield "numbers of 20 digits", filled(b'"prompt":[', b"99999999999999999999,", b"0]}")
    yield "lists of ids", filled(b'"prompt":[', b"[1],", b"[1]]}")
    yield "lists of ids and spaces", filled(b'"prompt":[', b"[ 1 ], ", b"[1]]}")
    yield "a list too deep", filled(b'"messages":', b"[", b"")
    half = size_bytes // 2
    yield "a list as deep as long", b'{"messages":' + b"[" * half + b"]" * half + b"}"
    yield "spaces", filled(b'"n":', b" \n", b"1}")
    yield "spaces in a prompt", filled(b'"prompt":[', b" \n", b"1]}")
    yield "types and spaces", filled(b'"messages":["type"', b"  ", b"]}")
    yield "a long name", filled(b'"model":"', b"m", b'"}')
    yield "a long number as text", filled(b'"n":"', b"1", b'"}')
    yield "2-byte characters", filled(b'"prompt":"', "é".encode(), b'"}')
    yield "4-byte characters", filled(b'"prompt":"', "😀".encode(), b'"}')
    yield "NaN", filled(b'"x":NaN,"n":[', b"[],", b"0]}")
    yield "Infinity", filled(b'"prompt":[', b"Infinity,", b"0]}")
    yield "halves of pairs", filled(b'"prompt":"', b"\\ud800", b'"}')
    yield "a long name of a field", filled(b'"', b"n", '😀":0}'.encode())
    yield "UTF-16", filled(b'"prompt":["', b'","', b'"]}').decode().encode("utf-16")
    yield "no JSON", filled(b"", b'"x" ', b"")
    yield "random", random.Random(1).randbytes(size_bytes)
    yield "quotes only", b'"' * size_bytes
    yield "commas only", filled(b"", b",", b"")


def _chat(content: object) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 16}).encode()


STEP_S = 0.001


def steps_ms(body: bytes) -> list[float]:
    """How long each step took."""
    steps = parse_in_steps(body, b"application/json", "/v1/completions")
    result, parsed = [], None
    while parsed is None:
        began_s = time.thread_time()
        try:
            parsed = advance(steps, STEP_S)
        except Refusal as refusal:
            parsed = refusal
        result.append(1000 * (time.thread_time() - began_s))
    return result


def milliseconds(body: bytes, rounds: int) -> tuple[list[float], float]:
    """(what it took, least first; the longest step in the round in which that was shortest)."""
    taken = [steps_ms(body) for _ in range(rounds)]
    return sorted(map(sum, taken)), min(map(max, taken))


def memory_bytes(body: bytes) -> int:
    """What is allocated at most, beside the body."""
    tracemalloc.start()
    steps_ms(body)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    missed, worst = False, (0.0, "")
    size_bytes = round(args.megabytes * MB)
    names = ("least ms/MB", "median ms/MB", "step ms/MB", "memory")
    print(f"{'body':<28} {'MB':>5} {names[0]:>12} {names[1]:>13} {names[2]:>10} {names[3]:>7}")
    for goal, made in (
        (GOAL_MS_PER_MB, bodies(size_bytes)),
        (HOSTILE_GOAL_MS_PER_MB, hostile_bodies(size_bytes)),
    ):
        for kind, body in made:
            size = len(body) / MB
            times, step = milliseconds(body, args.rounds)
            least, median = times[0] / size, statistics.median(times) / size
            step /= size
            if goal == HOSTILE_GOAL_MS_PER_MB:
                worst = max(worst, (step, kind))
                missed |= step > goal
            else:
                missed |= median > goal
            share = memory_bytes(body) / len(body)
            figures = f"{least:>12.2f} {median:>13.2f} {step:>10.2f} {share:>6.1f}x"
            print(f"{kind:<28} {size:>5.2f} {figures}")
    print(f"the longest step of a hostile body: {worst[0]:.2f} ms/MB, {worst[1]}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
