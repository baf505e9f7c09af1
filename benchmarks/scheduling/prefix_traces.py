"""Makes traces that say which prompts begin alike: chats, agents, and retrieval.

    python benchmarks/scheduling/prefix_traces.py chat -o chat.jsonl.gz [--requests 5000]
        [--sessions-per-s 1] [--seed 0]

Gzipped JSON lines, in the form that ``simulate --requests`` and ``bench --requests`` read
(``files/prefix_trace.py``). A text is a row of segments (a system prompt, a document, a question,
an answer), each of so many tokens; two prompts share a block of 64 tokens where the segments up to
its end are the same. Answers have blocks, too, so that the next turn finds them.

    chat       conversations behind one of a few system prompts, some with none. A turn is a
               question, short mostly and now and then a pasted text; the next one follows when the
               answer was read, a geometric number of times
    agents     loops behind one of a few prompts with tools. A step is a short call; the tool's
               output, heavy-tailed, is there within seconds; now and then a person has to answer.
               Until the task is done, or the context is full
    retrieval  one question behind a few documents of a popular few (Zipf), the best match first,
               and at times a question on the same documents
    mixed      half the sessions are chats, the others agents and retrieval
    plain      one question each, and no two that begin alike

Sessions begin as a Poisson process. Lengths are log-normal, as those of public chat traces are
(``files/trace.py``); how long, how many and how popular are round numbers of our own. Printed: what
an unbounded cache would find, as a share of all prompt tokens.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

BLOCK_TOKENS = 64
KINDS = ("chat", "agents", "retrieval", "mixed", "plain")
CONTEXT_TOKENS = 32_768
# An answer's tokens come so fast, and are read so fast.
TOKEN_S, READ_TOKENS_PER_S = 0.02, 10.0


class Segment(NamedTuple):
    """A piece of text that is always the same: its number and its length, tokens."""

    number: int
    tokens: int


class Turn(NamedTuple):
    """One request: what it asks with, the answer, and how long after the answer the next comes."""

    prompt: tuple[Segment, ...]
    answer: Segment
    pause_s: float


class Texts:
    """Draws segments. Those that are shared are drawn once."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self._numbers = itertools.count()
        self.chat_systems = [self.new(m, 0.3) for m in (150, 400, 1200, 3000)]
        self.agent_systems = [self.new(m, 0.2) for m in (2500, 4000, 7000)]
        self.retrieval_system = self.new(250, 0.1)
        self.documents = [self.new(450, 0.6, most=4000) for _ in range(2000)]

    def new(self, median: float, sigma: float, most: int = 16_384) -> Segment:
        """A log-normal length, 1 to ``most`` tokens."""
        tokens = int(np.clip(self.rng.lognormal(np.log(median), sigma), 1, most))
        return Segment(next(self._numbers), tokens)

    def pick(self, segments: Sequence[Segment], zipf: float) -> Segment:
        """One of them; the k-th is k^-zipf as popular as the first."""
        weights = np.arange(1, len(segments) + 1) ** -zipf
        return segments[int(self.rng.choice(len(segments), p=weights / weights.sum()))]


def tokens_of(segments: Sequence[Segment]) -> int:
    return sum(segment.tokens for segment in segments)


def chat(texts: Texts) -> Iterator[Turn]:
    rng = texts.rng
    said: tuple[Segment, ...] = ()
    if rng.random() < 0.8:
        said = (texts.pick(texts.chat_systems, 1.0),)
    while True:
        pasted = rng.random() < 0.08
        said += (texts.new(1500, 0.8) if pasted else texts.new(40, 1.0),)
        answer = texts.new(190, 0.9, most=2048)
        if tokens_of(said) + answer.tokens > CONTEXT_TOKENS:
            return
        yield Turn(said, answer, answer.tokens / READ_TOKENS_PER_S + rng.lognormal(2.5, 0.8))
        said += (answer,)
        if rng.random() < 0.25:
            return


def agents(texts: Texts) -> Iterator[Turn]:
    rng = texts.rng
    said = (texts.pick(texts.agent_systems, 1.0), texts.new(300, 0.8))
    steps = int(np.clip(rng.lognormal(np.log(14), 0.8), 2, 80))
    for _ in range(steps):
        answer = texts.new(90, 0.9, most=2048)
        if tokens_of(said) + answer.tokens > CONTEXT_TOKENS:
            return
        asks = rng.random() < 0.06
        yield Turn(said, answer, rng.lognormal(4.0 if asks else 0.7, 0.9))
        said += (answer, texts.new(60, 0.8) if asks else texts.new(260, 1.2))


def retrieval(texts: Texts) -> Iterator[Turn]:
    rng = texts.rng
    count = int(rng.integers(3, 9))
    found = list(dict.fromkeys(texts.pick(texts.documents, 0.9) for _ in range(count)))
    said = (texts.retrieval_system, *found)
    while True:
        answer = texts.new(140, 0.8, most=1024)
        said += (texts.new(30, 0.7),)
        yield Turn(said, answer, answer.tokens / READ_TOKENS_PER_S + rng.lognormal(2.5, 0.8))
        said += (answer,)
        if rng.random() < 0.8:
            return


def mixed(texts: Texts) -> Iterator[Turn]:
    make = texts.rng.choice(np.array([chat, agents, retrieval], dtype=object), p=[0.5, 0.1, 0.4])
    turns: Iterator[Turn] = make(texts)
    return turns


def plain(texts: Texts) -> Iterator[Turn]:
    yield Turn((texts.new(400, 1.1, most=8192),), texts.new(190, 0.9, most=2048), 0.0)


MAKERS: dict[str, Callable[[Texts], Iterator[Turn]]] = {
    "chat": chat,
    "agents": agents,
    "retrieval": retrieval,
    "mixed": mixed,
    "plain": plain,
}


class Blocks:
    """Numbers blocks: equal ones have equal text, and equal text in front of it."""

    def __init__(self) -> None:
        self._ids: dict[tuple[Any, ...], int] = {}

    def of(self, segments: Sequence[Segment]) -> list[int]:
        """The ids of the full blocks of a text."""
        ids: list[int] = []
        part: list[tuple[int, int, int]] = []
        room, before = BLOCK_TOKENS, -1
        for number, tokens in segments:
            at = 0
            while at < tokens:
                end = min(tokens, at + room)
                part.append((number, at, end))
                room -= end - at
                at = end
                if not room:
                    before = self._ids.setdefault((before, *part), len(self._ids))
                    ids.append(before)
                    part, room = [], BLOCK_TOKENS
        return ids


def in_runs(ids: Sequence[int]) -> list[list[int]]:
    """[first, count] of each run of consecutive ids."""
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs


def make_rows(
    kind: str, requests: int, sessions_per_s: float, seed: int
) -> tuple[list[dict[str, Any]], float]:
    """The first so many requests, by arrival; and the share that an unbounded cache would find."""
    rng = np.random.default_rng((seed, KINDS.index(kind)))
    texts, blocks = Texts(rng), Blocks()
    # (when, session, turn, the turn, those that follow): sessions begin as their time comes.
    coming: list[tuple[float, int, int, Turn, Iterator[Turn]]] = []
    rows: list[dict[str, Any]] = []
    seen: set[int] = set()
    found = asked = 0
    session, start_s = 0, float(rng.exponential(1 / sessions_per_s))
    while len(rows) < requests:
        while not coming or start_s <= coming[0][0]:
            turns = MAKERS[kind](texts)
            if (first := next(turns, None)) is not None:
                heapq.heappush(coming, (start_s, session, 1, first, turns))
                session += 1
            start_s += float(rng.exponential(1 / sessions_per_s))
        now_s, whose, number, turn, turns = heapq.heappop(coming)
        prompt = tokens_of(turn.prompt)
        ids = blocks.of((*turn.prompt, turn.answer))
        cached = sum(
            1 for _ in itertools.takewhile(seen.__contains__, ids[: prompt // BLOCK_TOKENS])
        )
        found, asked = found + cached * BLOCK_TOKENS, asked + prompt
        seen.update(ids)
        rows.append(
            {
                "t": round(now_s, 3),
                "in": prompt,
                "out": turn.answer.tokens,
                "s": whose,
                "k": number,
                "b": in_runs(ids),
            }
        )
        if (following := next(turns, None)) is not None:
            next_s = now_s + turn.answer.tokens * TOKEN_S + turn.pause_s
            heapq.heappush(coming, (next_s, whose, number + 1, following, turns))
    return rows, found / asked


def write(path: Path, rows: Sequence[dict[str, Any]], source: str) -> None:
    """The trace; the same rows make the same bytes."""
    header = {"block_tokens": BLOCK_TOKENS, "output_blocks": True, "source": source}
    lines = [json.dumps(line, separators=(",", ":")) for line in (header, *rows)]
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="make a trace whose prompts begin alike")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("-o", "--output", type=Path, required=True, help="a .jsonl.gz")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--sessions-per-s", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rows, share = make_rows(args.kind, args.requests, args.sessions_per_s, args.seed)
    write(args.output, rows, f"prefix_traces.py {args.kind}, seed {args.seed}")
    prompts = [row["in"] for row in rows]
    outputs = [row["out"] for row in rows]
    print(
        f"{len(rows)} requests in {rows[-1]['t']:.0f} s of {len({r['s'] for r in rows})} sessions; "
        f"prompts of {np.median(prompts):.0f} tokens (99 %: {np.quantile(prompts, 0.99):.0f}), "
        f"answers of {np.median(outputs):.0f}; {share:.0%} of the prompts' tokens were seen before"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
