"""The report of ``simulate --against``: measured and simulated times of a recorded run."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_gateway.cli.reports.report import figure as number
from hetero_gateway.cli.reports.report import print_table
from hetero_gateway.sim.figures import finite
from hetero_gateway.sim.recorded import Replayed, RequestFigures


@dataclass(frozen=True, slots=True)
class RecordComparison:
    """One record, replayed.

    Args:
        path, policy: from the record.
        instance_ids: in the order of the figures.
        notes: sentences on what was left out, and why.
    """

    path: Path
    policy: str
    instance_ids: tuple[str, ...]
    replayed: Replayed
    notes: tuple[str, ...]


Figure = Callable[[RequestFigures], float]

_OF_ALL: tuple[tuple[str, Figure], ...] = (
    ("latency, mean, s", lambda f: f.latency_s.mean),
    ("latency, p50, s", lambda f: f.latency_s.p50),
    ("latency, p99, s", lambda f: f.latency_s.p99),
    ("TTFT, mean, s", lambda f: f.ttft_s.mean),
    ("TTFT, p99, s", lambda f: f.ttft_s.p99),
    ("TPOT, mean, ms", lambda f: 1000 * f.tpot_s.mean),
    ("output tokens/s", lambda f: f.output_tokens_per_s),
)
_OF_ONE: tuple[tuple[str, Figure], ...] = (
    ("latency, s", lambda f: f.latency_s.mean),
    ("TTFT, s", lambda f: f.ttft_s.mean),
    ("TPOT, ms", lambda f: 1000 * f.tpot_s.mean),
)


def print_comparison(comparison: RecordComparison) -> None:
    """Print to standard output. Figures are measured / simulated, and their ratio."""
    measured, as_placed = comparison.replayed.measured, comparison.replayed.as_placed
    by_policy = {f"by {name}": found for name, found in comparison.replayed.by_policy.items()}
    print(f"{comparison.path}: {comparison.policy}, {measured[0].requests} requests")
    for note in comparison.notes:
        print(note)
    simulated = [as_placed, *by_policy.values()]
    head = ["", "measured", "as placed", *by_policy]
    rows = []
    for name, figure in _OF_ALL:
        beside = (_beside(figure, figures[0], measured[0]) for figures in simulated)
        rows.append([name, _text(figure(measured[0])), *beside])
    print()
    print_table(head, rows)
    head = ["instance", "requests", *by_policy]
    for name, _ in _OF_ONE:
        head += [name, "as placed"]
    rows = []
    for i, instance_id in enumerate(comparison.instance_ids, start=1):
        row = [str(found[i].requests) for found in (measured, *by_policy.values())]
        row.insert(0, instance_id)
        for _, figure in _OF_ONE:
            row += [_text(figure(measured[i])), _beside(figure, as_placed[i], measured[i])]
        rows.append(row)
    print()
    print_table(head, rows)
    print()


def document(comparison: RecordComparison) -> dict[str, Any]:
    """The same as JSON: all requests, then by instance. ``by_policy`` is the first of them."""
    replayed = comparison.replayed
    sets = {"measured": replayed.measured, "as_placed": replayed.as_placed}
    if replayed.by_policy:
        sets["by_policy"] = next(iter(replayed.by_policy.values()))
    return {
        "record": str(comparison.path),
        "policy": comparison.policy,
        "notes": list(comparison.notes),
        **{name: _as_dict(found[0]) for name, found in sets.items()},
        "policies": {name: _as_dict(found[0]) for name, found in replayed.by_policy.items()},
        "instances": [
            {"id": instance_id, **{name: _as_dict(found[i]) for name, found in sets.items()}}
            for i, instance_id in enumerate(comparison.instance_ids, start=1)
        ],
    }


def _as_dict(figures: RequestFigures) -> dict[str, Any]:
    return {
        "requests": figures.requests,
        "latency_s": figures.latency_s.to_dict(),
        "ttft_s": figures.ttft_s.to_dict(),
        "tpot_s": figures.tpot_s.to_dict(),
        "output_tokens_per_s": finite(figures.output_tokens_per_s),
    }


def _beside(figure: Figure, simulated: RequestFigures, measured: RequestFigures) -> str:
    """A simulated figure, and its ratio to the measured one."""
    value, true = figure(simulated), figure(measured)
    ratio = true / value if value else math.nan
    return _text(value) if math.isnan(ratio) else f"{_text(value)} ({ratio:.2f})"


def _text(value: float) -> str:
    return number(finite(value))
