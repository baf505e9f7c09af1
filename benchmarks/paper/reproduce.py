"""The paper's three experiments, and docs/evidence/reproduction.md from them.

    scripts/reproduce                                  two log-normal mixes like ShareGPT
    scripts/reproduce --requests NAME=TRACE.csv ...    those lengths, and the mixes more briefly
    scripts/reproduce -o -                             to standard output

A trace is a CSV file with the columns input_tokens and output_tokens; NAME stands in the document.
Takes six to seven minutes of one core; most of it is finish-time.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.paper import experiments as ex
from benchmarks.paper.lengths import CONVERSATIONS, FIRST_TURNS, Source, from_trace
from benchmarks.paper.report import (
    PAPER_RATE_A,
    PAPER_RATE_B,
    ScanPoint,
    SourceResult,
    document,
)
from hetero_gateway.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("NVLink2", "PCIe3")
RATES = (8.0, 16.0, 24.0, math.inf)
MIXES = (CONVERSATIONS, FIRST_TURNS)
PAPER_A = (ex.RR, ex.SI, ex.MB, ex.OS, ex.WRR)
OURS_A = (ex.RR_TURNS, ex.WRR_TURNS, ex.CAPACITY, ex.FINISH)
PAPER_B = (ex.RR, ex.MB, ex.OS)
OURS_B = (ex.RR_TURNS, ex.MIN_MAX, ex.CAPACITY, ex.FINISH)
RANKING_SEEDS = 2  # as in the paper
ESTIMATES = 20  # one costs milliseconds, and two agree by luck
SCAN_A = (0.75, 1.0, 1.5, 2.5)
SCAN_B = (1.0, 1.5, 2.0, 3.0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="reproduce", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests",
        action="append",
        default=[],
        metavar="NAME=TRACE.csv",
        help="lengths to draw from; may be given several times",
    )
    parser.add_argument(
        "-o",
        "--output",
        default=str(ROOT / "docs" / "evidence" / "reproduction.md"),
        help="file to write, or - for standard output (default: docs/evidence/reproduction.md)",
    )
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind (default: 5)")
    parser.add_argument("--count", type=int, default=4000, help="requests a run (default: 4000)")
    args = parser.parse_args(arguments)
    if args.seeds < 1 or args.count < 8:
        parser.error("--seeds must be at least 1 and --count at least 8")
    if not Path(args.output).parent.is_dir():  # better told now than at the end
        parser.error(f"{Path(args.output).parent} is no directory")
    try:
        traces = [read_source(text) for text in args.requests]
    except ConfigError as error:
        print(f"reproduce: {error}", file=sys.stderr)
        return 2
    sources = []
    for lengths in traces:
        sources.append(run_source(lengths, args.seeds, args.count, brief=False))
    for mix in MIXES:
        sources.append(run_source(mix.source(), args.seeds, args.count, brief=bool(traces)))
    # Where the trace lies on this machine means nothing to a reader.
    shown = [f"--requests {shlex.quote(lengths.name + '=TRACE.csv')}" for lengths in traces]
    text = document(sources, LINKS, " ".join(["scripts/reproduce", *shown]))
    if args.output == "-":
        print(text, end="")
    else:
        Path(args.output).write_text(text, encoding="utf-8")
    return 0


def read_source(text: str) -> Source:
    name, _, file = text.rpartition("=")
    return from_trace(Path(file), name or Path(file).stem)


def run_source(source: Source, seeds: int, count: int, *, brief: bool) -> SourceResult:
    """Everything on one source; ``brief``: what the claims need, and no more than two seeds."""
    began_s = time.process_time()

    def progress(what: str) -> None:
        print(f"[{time.process_time() - began_s:4.0f} s] {source.name}: {what}", file=sys.stderr)

    progress("ranking")
    result = SourceResult(source, brief, rankings(source, count), [])
    fewer = min(seeds, 2)
    for link in LINKS:
        progress(f"clusters A and B, {link}")
        a, b = ex.paper_cluster("A", link), ex.paper_cluster("B", link)
        if brief:
            of_a = ex.compare(a, source, PAPER_A, RATES, fewer, count)
            of_b = ex.compare(b, source, (ex.RR, ex.OS), (PAPER_RATE_B,), fewer, count)
        elif link == LINKS[0]:
            of_a = ex.compare(a, source, (*PAPER_A, *OURS_A), RATES, seeds, count)
            of_b = ex.compare(b, source, (*PAPER_B, *OURS_B), RATES, seeds, count)
        else:
            of_a = ex.compare(a, source, PAPER_A, RATES, fewer, count)
            of_b = ex.compare(b, source, PAPER_B, RATES, fewer, count)
        result.comparisons += [of_a, of_b]
    if not brief:
        progress("capacity ratios")
        a, b = ex.paper_cluster("A", LINKS[0]), ex.paper_cluster("B", LINKS[0])
        shown = (ex.OS, ex.MIN_MAX, ex.CAPACITY, ex.FINISH)
        result.scan_a = scan(a, (1,), SCAN_A, source, PAPER_RATE_A, shown, fewer, count)
        result.scan_b = scan(b, range(4), SCAN_B, source, PAPER_RATE_B, shown, fewer, count)
    progress("done")
    return result


def rankings(source: Source, count: int) -> list[ex.Ranking]:
    result = []
    for link in LINKS:
        for seed in range(ESTIMATES):
            for estimator, mha in (("paper", True), ("paper", False), ("unpadded", False)):
                result.append(
                    ex.estimated_ranking(source, link, seed, estimator=estimator, mha=mha)
                )
    for seed in range(RANKING_SEEDS):
        result.extend(ex.simulated_ranking(source, LINKS, seed, max(1, count // 4)))
    return result


def scan(
    cluster: ex.Cluster,
    slow: Sequence[int],
    factors: Sequence[float],
    source: Source,
    rate_per_s: float,
    choices: Sequence[ex.PolicyChoice],
    seeds: int,
    count: int,
) -> list[ScanPoint]:
    points = []
    for factor in factors:
        c = ex.compare(
            cluster.slowed(slow, factor), source, (ex.RR, *choices), (rate_per_s,), seeds, count
        )
        # Not the ratio over all: slowed, the slow ones are the weakest, unslowed they may not be.
        fast = next(i for i in range(len(cluster.instances)) if i not in slow)
        ratio = c.solo_tokens_per_s[fast] / c.solo_tokens_per_s[slow[0]]
        gains = {x.label: c.gain(x.label, ex.RR.label, rate_per_s)[0] for x in choices}
        points.append(ScanPoint(factor, ratio, gains))
    return points


if __name__ == "__main__":
    sys.exit(main())
