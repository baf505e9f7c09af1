"""What to send and when: traces from a file or synthetic, and their arrival times.

A trace is a CSV file with the header ``arrival_s,input_tokens,output_tokens``; ``arrival_s`` may be
absent. ``model`` and ``max_tokens`` are read if present, as in the gateway's own /admin/requests;
further columns are ignored. A file of JSON lines is one with known texts of its prompts
(``prefix_trace``). Nothing here knows about HTTP.
"""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetero_gateway.core.costs.arrays import Integers
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.prefix_trace import TracedText, is_prefix_trace, read_prefix_trace
from hetero_gateway.files.whole_file import named
from hetero_gateway.sim.prefixes import KnownText, Run
from hetero_gateway.sim.workload import LogNormal, LogNormalLengths

_REQUIRED = ("input_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One row: lengths in tokens, at least 1; ``arrival_s`` is None if the trace has none.

    ``model`` is "" and ``max_tokens``, the client's limit, None if the trace does not say;
    ``text`` is None except in a trace with prefixes.
    """

    arrival_s: float | None
    input_tokens: int
    output_tokens: int
    model: str = ""
    max_tokens: int | None = None
    text: TracedText | None = None


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request to send, ``due_s`` seconds after the start of the run."""

    due_s: float
    input_tokens: int
    output_tokens: int
    text: TracedText | None = None


# Between public chat traces: ShareGPT's first turns (prompt median 20, output median 216) and the
# conversation trace of Azure 2023 (1 035 and 140); both have a log-normal sigma of 0.8 to 1.3.
CHAT_MIX = LogNormalLengths(LogNormal(256, 1.0, 3072), LogNormal(160, 0.8, 1024))


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Read a trace file, at most its first ``limit`` requests.

    Raises:
        ConfigError: one line with the file and, if a row is wrong, its number (the header is
            row 1).
    """
    if is_prefix_trace(path):
        rows = read_prefix_trace(path, limit)
        return [TraceRequest(*row[:3], text=row.text) for row in rows]
    with named(path, "read"), path.open(encoding="utf-8-sig", newline="") as lines:
        return _parse_trace(lines, str(path), limit)


def parse_trace(text: str, source: str) -> list[TraceRequest]:
    """Read a trace received over the network; ``source`` names it in errors (ConfigError)."""
    with named(source, "read"):
        return _parse_trace(io.StringIO(text, newline=""), source, None)


def token_counts(rows: Sequence[TraceRequest]) -> tuple[Integers, Integers]:
    """Prompt and output tokens of each request."""
    return (
        np.array([row.input_tokens for row in rows], np.int64),
        np.array([row.output_tokens for row in rows], np.int64),
    )


def known_texts(rows: Sequence[TraceRequest]) -> tuple[KnownText, ...]:
    """The texts of a trace with prefixes."""
    texts = [row.text for row in rows if row.text is not None]
    return tuple(KnownText(tuple(Run(*run) for run in text.runs)) for text in texts)


def synthetic_trace(count: int, seed: int, mix: LogNormalLengths = CHAT_MIX) -> list[TraceRequest]:
    """``count`` requests drawn from ``mix``, without arrival times; the same for the same seed."""
    lengths = mix.draw(count, np.random.default_rng(seed))
    return [TraceRequest(None, i, o) for i, o in zip(*(x.tolist() for x in lengths), strict=True)]


def schedule(
    trace: Sequence[TraceRequest], rate_per_s: float | None, seed: int
) -> list[LoadRequest]:
    """Give every request its time.

    Args:
        trace: the requests.
        rate_per_s: Poisson arrivals at this rate, or a trace with prefixes stretched to it in the
            mean; ``inf`` sends all at once; None keeps the trace's own times, counted from its
            first arrival (all at once where it has none).
        seed: of the Poisson arrivals.
    """
    if rate_per_s is None:
        first_s = min((r.arrival_s for r in trace if r.arrival_s is not None), default=0.0)
        due_s = [0.0 if r.arrival_s is None else r.arrival_s - first_s for r in trace]
    elif not math.isfinite(rate_per_s):
        due_s = [0.0] * len(trace)
    elif all(request.text is not None for request in trace):
        # Requests and their times belong together.
        first_s, last_s = trace[0].arrival_s or 0.0, trace[-1].arrival_s or 0.0
        stretch = (len(trace) - 1) / rate_per_s / (last_s - first_s) if last_s > first_s else 0.0
        due_s = [((r.arrival_s or 0.0) - first_s) * stretch for r in trace]
    else:
        gaps_s = np.random.default_rng(seed).exponential(1 / rate_per_s, len(trace))
        due_s = [float(t) for t in np.cumsum(gaps_s) - gaps_s[:1].sum()]
    requests = [
        LoadRequest(due, r.input_tokens, r.output_tokens, r.text)
        for due, r in zip(due_s, trace, strict=True)
    ]
    return sorted(requests, key=lambda request: request.due_s)


def _parse_trace(lines: Iterable[str], source: str, limit: int | None) -> list[TraceRequest]:
    reader = csv.DictReader(lines, skipinitialspace=True)
    header = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = header
    if missing := [name for name in _REQUIRED if name not in header]:
        raise ConfigError(
            f"{source}: row 1: the header has no column {missing[0]}; it must be "
            "arrival_s,input_tokens,output_tokens (arrival_s may be absent)"
        )
    result: list[TraceRequest] = []
    for row in reader:
        if limit is not None and len(result) >= limit:
            break
        where = f"{source}: row {reader.line_num}"
        arrival_s = _arrival(row["arrival_s"], where) if "arrival_s" in header else None
        result.append(
            TraceRequest(
                arrival_s,
                _tokens(row["input_tokens"], "input_tokens", where),
                _tokens(row["output_tokens"], "output_tokens", where),
                row.get("model") or "",
                _tokens(row["max_tokens"], "max_tokens", where) if row.get("max_tokens") else None,
            )
        )
    if not result:
        raise ConfigError(f"{source}: no requests in it")
    return result


def _tokens(text: str | None, name: str, where: str) -> int:
    try:
        value = int(text or "")
    except ValueError:
        raise ConfigError(f"{where}: {name} is {text!r}, not a whole number") from None
    if value < 1:
        raise ConfigError(f"{where}: {name} is {value}: it must be at least 1")
    return value


def _arrival(text: str | None, where: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        raise ConfigError(f"{where}: arrival_s is {text!r}, not a number of seconds") from None
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"{where}: arrival_s is {text}: it must be 0 or more")
    return value
