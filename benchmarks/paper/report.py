"""docs/evidence/reproduction.md from the figures: tables, and what came out for each claim.

The words around the figures are fixed; every figure, and every yes or no, comes from the runs.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.paper.experiments import (
    CAPACITY,
    COPIES,
    FINISH,
    MB,
    OS,
    RR,
    SI,
    TENSOR_PARALLEL,
    WRR,
    Comparison,
    Ranking,
    mean_sd,
)
from benchmarks.paper.lengths import Mix, Source

PAPER_ORDER = (2, 4, 1, 8)
PAPER_GAIN_A, PAPER_RATE_A = 1.225, 24.0
PAPER_GAIN_B, PAPER_RATE_B = 0.336, 16.0
# Differences below this are noise at five seeds.
NOISE = 0.02


@dataclass(frozen=True)
class ScanPoint:
    """Gains over RR by policy, with the slow instances' constants times ``factor``."""

    factor: float
    ratio: float
    gains: dict[str, float]


@dataclass
class SourceResult:
    """Everything that was run on one source of lengths."""

    source: Source
    brief: bool  # only the claims are shown
    rankings: list[Ranking]
    comparisons: list[Comparison]
    scan_a: list[ScanPoint] = field(default_factory=list)
    scan_b: list[ScanPoint] = field(default_factory=list)

    def comparison(self, cluster: str, link: str) -> Comparison | None:
        found = [c for c in self.comparisons if (c.cluster.name, c.cluster.link) == (cluster, link)]
        return found[0] if found else None


def document(
    sources: Sequence[SourceResult], mixes: Iterable[Mix], links: Sequence[str], command: str
) -> str:
    parts = [
        INTRODUCTION.format(command=command, summary=_summary(sources, links)),
        _lengths_table(sources, mixes),
        "## The paper's claims",
        CLAIMS_TEXT,
        *(f"**{link}**\n\n{_claims(sources, link)}" for link in links),
        "## 1. Which t is best on 8 V100s",
        RANKING_TEXT,
        _rankings(sources, links[0]),
        "## 2. Cluster A: Llama-3-8B on V100 t=4 and V100 t=1",
        POLICY_TEXT,
        *_comparisons(sources, "A", links[0]),
        "### How unequal must the two be?",
        SCAN_A_TEXT,
        _scan([(s.source.name, s.scan_a) for s in sources], PAPER_GAIN_A),
        "## 3. Cluster B: DeepSeek-R1-Distill-Qwen-14B on 4 × V100 t=2 and A800 t=1",
        *_comparisons(sources, "B", links[0]),
        "### How unequal must they be?",
        SCAN_B_TEXT,
        _scan([(s.source.name, s.scan_b) for s in sources], PAPER_GAIN_B),
        DIFFERENCES,
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:+.{digits}f} %"


def rate_name(rate: float) -> str:
    return f"{rate:g} req/s" if math.isfinite(rate) else "at once"


# Lengths


def _lengths_table(sources: Sequence[SourceResult], mixes: Iterable[Mix]) -> str:
    fitted = {mix.name: mix for mix in mixes}
    rows = []
    for source in (s.source for s in sources):
        prompts, outputs = source.lengths.prompt_tokens, source.lengths.output_tokens
        mix = fitted.get(source.name)
        how = "as they are"
        if mix is not None:
            p, o = mix.prompts.log_normal(), mix.outputs.log_normal()
            how = (
                f"log-normal: prompts of median {p.median:.0f}, σ {p.sigma:.2f}, at most "
                f"{p.maximum}; outputs of median {o.median:.0f}, σ {o.sigma:.2f}, at most "
                f"{o.maximum}"
            )
        rows.append(
            (
                source.name,
                f"{prompts.mean():.0f} ± {prompts.std():.0f}",
                f"{outputs.mean():.0f} ± {outputs.std():.0f}",
                how,
            )
        )
    return table(("lengths", "prompt tokens, mean ± sd", "output tokens", "drawn"), rows)


# Claims


def _verdicts(source: SourceResult, link: str) -> list[str]:
    return [verdict(source, link) for _, _, verdict in CLAIMS]


def _held(verdicts: Iterable[str]) -> int:
    return sum(verdict.startswith("yes") for verdict in verdicts)


def _claims(sources: Sequence[SourceResult], link: str) -> str:
    columns = [_verdicts(source, link) for source in sources]
    rows = [
        (name, paper, *(cell or "–" for cell in cells))
        for (name, paper, _), *cells in zip(CLAIMS, *columns, strict=True)
    ]
    totals = [f"**{_held(column)} of {len(CLAIMS)}**" for column in columns]
    rows.append(("**claims that hold**", "", *totals))
    return table(("claim", "paper", *(source.source.name for source in sources)), rows)


def _summary(sources: Sequence[SourceResult], links: Sequence[str]) -> str:
    """Which lengths and link are nearest to the paper."""
    held, name, link = max(
        ((_held(_verdicts(s, link)), s.source.name, link) for s in sources for link in links),
        key=lambda entry: entry[0],
    )
    return f"\nMost do with {name} over {link}: {held} of {len(CLAIMS)}."


def _mark(holds: bool, figure: str) -> str:
    return f"{'yes' if holds else 'no'}: {figure}"


def _order(order: Sequence[int]) -> str:
    return " > ".join(map(str, order))


def _orders(rankings: Sequence[Ranking]) -> str:
    """The orders that came out, the most frequent first."""
    counted = Counter(r.order for r in rankings).most_common(3)
    return ", ".join(
        (f"**{_order(order)}**" if order == PAPER_ORDER else _order(order))
        + (f" ({n} of {len(rankings)})" if n < len(rankings) else "")
        for order, n in counted
    )


def _ranking_claim(method: str) -> Callable[[SourceResult, str], str]:
    def verdict(source: SourceResult, link: str) -> str:
        mine = [r for r in source.rankings if (r.link, r.method) == (link, method)]
        if not mine:
            return ""
        agree = sum(r.order == PAPER_ORDER for r in mine)
        usual, _ = Counter(r.order for r in mine).most_common(1)[0]
        also = "" if usual == PAPER_ORDER else f"; mostly {_order(usual)}"
        return _mark(agree == len(mine), f"{agree} of {len(mine)} draws{also}")

    return verdict


def _gain_claim(
    cluster: str, rate: float, paper: float, label: str = OS.label
) -> Callable[[SourceResult, str], str]:
    def verdict(source: SourceResult, link: str) -> str:
        c = source.comparison(cluster, link)
        if c is None or (label, rate) not in c.runs:
            return ""
        mean, sd = c.gain(label, RR.label, rate)
        # "Holds" leaves a tenth of the claimed ratio to the unknown constants.
        return _mark(mean >= (1 + paper) * 0.9 - 1, f"{percent(mean)} ± {100 * sd:.0f}")

    return verdict


def _rr_below_si(source: SourceResult, link: str) -> str:
    c = source.comparison("A", link)
    if c is None:
        return ""
    figures = {rate: c.gain(RR.label, SI.label, rate)[0] for rate in c.rates}
    return _mark(
        all(gain < 0 for gain in figures.values()),
        ", ".join(percent(gain) for gain in figures.values()),
    )


def _best(c: Comparison, rate: float) -> list[tuple[float, str]]:
    """The paper's five, best first."""
    labels = [x.label for x in (RR, SI, MB, OS, WRR)]
    return sorted(((c.tokens_per_s(x, rate)[0], x) for x in labels), reverse=True)


def _best_claim(label: str, rates: Sequence[float]) -> Callable[[SourceResult, str], str]:
    def verdict(source: SourceResult, link: str) -> str:
        c = source.comparison("A", link)
        if c is None:
            return ""
        holds, shown = True, []
        for rate in rates:
            ranked = _best(c, rate)
            mine = c.tokens_per_s(label, rate)[0]
            holds = holds and mine >= ranked[0][0] * (1 - NOISE)
            rival = next(x for x in ranked if x[1] != label)
            shown.append(f"{percent(mine / rival[0] - 1, 1)} on {rival[1]}")
        return _mark(holds, ", ".join(shown))

    return verdict


def _mb_below_os(source: SourceResult, link: str) -> str:
    c = source.comparison("A", link)
    if c is None:
        return ""
    gains = [c.gain(MB.label, OS.label, rate)[0] for rate in c.rates]
    return _mark(
        all(gain < NOISE for gain in gains) and min(gains) < 0,
        ", ".join(percent(gain, 1) for gain in gains),
    )


def _spread_claim(source: SourceResult, link: str) -> str:
    c = source.comparison("A", link)
    if c is None:
        return ""
    rr, os = (
        mean_sd([r.completion_spread for r in c.runs[label, PAPER_RATE_A]])[0]
        for label in (RR.label, OS.label)
    )
    return _mark(os < rr / 2, f"{100 * os:.0f} % against {100 * rr:.0f} %")


CLAIMS: list[tuple[str, str, Callable[[SourceResult, str], str]]] = [
    ("1: measured ranking of t", _order(PAPER_ORDER), _ranking_claim("simulation")),
    (
        "1: Algorithm 1's ranking, KV as printed",
        _order(PAPER_ORDER),
        _ranking_claim("Algorithm 1, KV as printed"),
    ),
    (
        "1: Algorithm 1's ranking, KV by GQA",
        _order(PAPER_ORDER),
        _ranking_claim("Algorithm 1, KV by GQA"),
    ),
    (
        "2: OS over RR at 24 req/s",
        percent(PAPER_GAIN_A, 1),
        _gain_claim("A", PAPER_RATE_A, PAPER_GAIN_A),
    ),
    ("2: RR is below SI, by rate", "yes", _rr_below_si),
    ("2: OS is the best at 8 and 16", "yes", _best_claim(OS.label, (8.0, 16.0))),
    ("2: WRR is the best at 24 and at once", "yes", _best_claim(WRR.label, (24.0, math.inf))),
    ("2: MB is slightly below OS, by rate", "yes", _mb_below_os),
    ("2: completion times at 24, OS against RR", "much nearer", _spread_claim),
    (
        "3: OS over RR at 16 req/s",
        percent(PAPER_GAIN_B, 1),
        _gain_claim("B", PAPER_RATE_B, PAPER_GAIN_B),
    ),
]


# Tables


def _rankings(sources: Sequence[SourceResult], link: str) -> str:
    header = ["lengths", "method", *(f"t={t}" for t in TENSOR_PARALLEL), "order"]
    rows = []
    for source in sources:
        methods = sorted({r.method for r in source.rankings if r.link == link})
        for method in [] if source.brief else methods:
            seeds = [r for r in source.rankings if (r.link, r.method) == (link, method)]
            means = [mean_sd([r.tokens_per_s[t] for r in seeds])[0] for t in TENSOR_PARALLEL]
            rows.append((source.source.name, method, *(f"{m:.0f}" for m in means), _orders(seeds)))
    return table(header, rows)


def _comparisons(sources: Sequence[SourceResult], cluster: str, link: str) -> Iterable[str]:
    for source in sources:
        c = None if source.brief else source.comparison(cluster, link)
        if c is not None:
            yield _comparison(c)


def _comparison(c: Comparison) -> str:
    solo = ", ".join(f"{value:.0f}" for value in c.solo_tokens_per_s)
    seeds = len(next(iter(c.runs.values())))
    head = (
        f"**{c.source}, {c.cluster.link}**, {seeds} seeds. Alone the instances do {solo} tokens/s; "
        f"their sum, {sum(c.solo_tokens_per_s):.0f}, is the bound; "
        f"strongest over weakest {c.ratio:.2f}."
    )
    rates, busiest = c.rates[-2:], c.rates[-1]
    header = [
        "policy",
        *(rate_name(rate) for rate in rates),
        f"mean latency {rate_name(c.rates[0])}, s",
        f"requests, {rate_name(busiest)}, %",
    ]
    rows = []
    for label in c.labels:
        quiet, busy = c.runs[label, c.rates[0]], c.runs[label, busiest]
        cells = []
        for rate in rates:
            mean, sd = c.tokens_per_s(label, rate)
            cells.append(f"{mean:.0f} ± {sd:.0f} ({percent(c.gain(label, RR.label, rate)[0])})")
        shares = _by_instance([[100 * i.requests / r.requests for i in r.instances] for r in busy])
        rows.append(
            (
                f"**{label}**" if label == OS.label else label,
                *cells,
                f"{mean_sd([r.latency_s.mean for r in quiet])[0]:.1f}",
                " / ".join(shares),
            )
        )
    return head + "\n\n" + table(header, rows)


def _by_instance(runs: Sequence[Sequence[float]]) -> list[str]:
    return [f"{mean_sd(values)[0]:.0f}" for values in zip(*runs, strict=True)]


def crossing(points: Sequence[ScanPoint], label: str, gain: float) -> float | None:
    """The capacity ratio at which ``label`` first gains that much, interpolated; None: never."""
    ordered = sorted(points, key=lambda point: point.ratio)
    for low, high in itertools.pairwise(ordered):
        if low.gains[label] < gain <= high.gains[label]:
            share = (gain - low.gains[label]) / (high.gains[label] - low.gains[label])
            return low.ratio + share * (high.ratio - low.ratio)
    return ordered[0].ratio if ordered and ordered[0].gains[label] >= gain else None


def _scan(named: Sequence[tuple[str, list[ScanPoint]]], claim: float) -> str:
    rows = [
        (
            name,
            label,
            ", ".join(f"{p.ratio:.2f}: {percent(p.gains[label])}" for p in points),
            _crossing_text(points, label, claim),
        )
        for name, points in named
        for label in (points[0].gains if points else ())
    ]
    reached = f"{percent(claim, 1)} is reached at"
    return table(("lengths", "policy", "capacity ratio: gain over RR", reached), rows)


def _crossing_text(points: Sequence[ScanPoint], label: str, claim: float) -> str:
    ratio = crossing(points, label, claim)
    if ratio is None:
        return "not in this range"
    lowest = min(point.ratio for point in points)
    return f"{ratio:.2f}" if ratio > lowest else f"{ratio:.2f} or less"


# The fixed words

INTRODUCTION = """
# Reproduction of the paper's experiments

The three experiments of section 5 of *High-Throughput LLM inference on Heterogeneous Clusters*, in
virtual time, on the gateway's own scheduler. This page is the output of

    {command}

and states what came out. It cannot show what the paper's machines did: the paper prints neither its
constants nor its lengths. It shows under which constants and lengths the claims hold.{summary}

- **Constants**: the built-in profiles of V100-32GB and A800-80GB, which are derived from public
  per-layer measurements, with an assumed all-reduce. The paper says "V100-SXM2-32GB (connected over
  PCIe 3.0 x16)". SXM2 boards wire NVLink from GPU to GPU, so the claims are judged by both
  readings; the other tables are of the first.
- **Engine**: prefill-first steps (vLLM 0.6), blocks of 16 tokens, at most 256 sequences and 8192
  prompt tokens in a step, KV capacity by Eq. (1) with φ = 0.9, δ = 2 GiB, grouped-query attention.
- **Tokens** are prompt and output tokens, as Algorithm 1 counts them (tokenNum); the paper does not
  say whether its measured throughput does. Every request is finished in every run, so gains are the
  same either way. Throughput is over the time of the last completion.
- **Lengths**: "(mix)" are log-normals with the mean and sd of two public traces of ShareGPT, both
  Apache-2.0: the first turns in Thesys-lab/Helix-ASPLOS25, and the multi-turn conversations, cut to
  8192 tokens, in project-etalon/etalon. Other names are traces given with --requests; "(Helix)" and
  "(etalon)" are those two, half of their rows.
- **Load**: 4000 requests, Poisson arrivals, or all at once. The policies get the same ones.
- **OS** is policy `paper`, with the paper's predictor (a normal draw; also for MB); RR and WRR draw
  at random, as the paper says. The others predict by a running mean.
"""

CLAIMS_TEXT = f"""
A gain "holds" when the ratio is at least nine tenths of the claimed one; "best" allows
{100 * NOISE:.0f} % for noise; a ranking holds when every draw gives the paper's.
"""

RANKING_TEXT = f"""
Tokens/s of the whole machine: means, and the most frequent orders, in bold the paper's. Algorithm 1
on 20 draws of 200 requests; the simulation on two of 1000 requests, each {COPIES} times, all at
once and in turn over the instances. "As printed" counts KV by 2·l·h, four times too much for this
model; "unpadded" is erratum 11 of
[scheduling](../design/scheduling.md#what-differs-from-the-papers-print).
"""

POLICY_TEXT = f"""
Tokens/s, mean ± sd over the seeds, and the gain over RR. OS to the paper's letter; in turn,
{CAPACITY.label} and {FINISH.label} are not in the paper.
"""

SCAN_A_TEXT = """
The constants of the t=1 instance times 0.75 to 3, NVLink2, 24 req/s. The capacity ratio r is that
of the two instances' solo throughputs. Where both are overloaded, RR does twice what the weak one
can, so a perfect split gains (r - 1)/2, and +122.5 % needs r = 3.45.
"""

SCAN_B_TEXT = """
The constants of the four V100 instances times 1 to 3, NVLink2, 16 req/s. OS gives ties to the
lowest index, as printed; min-max gives them to the lowest own load. Here a perfect split gains
(r - 1)/5, with r the A800's solo throughput over a V100 instance's, and +33.6 % needs r = 2.68.
"""

DIFFERENCES = """
## What differs from the paper, and why

- **Nothing was measured here.** The constants come from other people's measurements of the same
  cards. vLLM 0.6 on a V100 had no FlashAttention and more overhead in each step, which would make
  the paper's V100s slower than these, and the A800's lead in cluster B larger.
- **Lengths.** The paper samples ShareGPT without saying what of a conversation is the prompt. With
  first turns alone the clusters are hardly loaded at the paper's rates, so that policies differ
  little below "at once". With whole conversations they are overloaded at each of its rates. In
  cluster B, a reasoning model would write longer answers than ShareGPT's; these are ShareGPT's.
- **Overload.** When much more is outstanding than the KV caches hold, e^(θ·kvusage) outweighs T,
  and OS splits tokens by KV capacity rather than by speed. In cluster A the two nearly agree. In
  cluster B they do not, which is why OS stops gaining there while finish-time goes on.
- **KV memory** is grouped-query right; the paper's formula is four to five times too large. In the
  first experiment Algorithm 1 is shown with both.
- **Weights for cluster B** are not in the paper, so WRR is left out there.
- **Ties.** With three or more instances min-max ties are the rule, and the printed algorithm gives
  them to the lowest index. [Scheduling](../design/scheduling.md#what-differs-from-the-papers-print)
  says what the gateway does instead.
"""
