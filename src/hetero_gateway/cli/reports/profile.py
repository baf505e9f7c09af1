"""The report of ``profile`` about a fit: constants, errors, and cautions."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from hetero_gateway.cli.reports.page import axis, figure, fill, points, table, text
from hetero_gateway.cli.reports.report import grid
from hetero_gateway.core.costs.arrays import FloatArray
from hetero_gateway.core.costs.fitting import (
    DECODE_NAMES,
    PREFILL_NAMES,
    Fit,
    Sample,
    decode_terms,
    prefill_terms,
)
from hetero_gateway.lab.profiler.plot import BAND, size_classes

_CONSTANTS_HEAD = ("constant", "multiplies", "seconds", "95 % interval", "")
_ERRORS_HEAD = ("part", "used", "outliers", "R²", "median error", "mean", "worst", "without p9")
_WIDTH = 100


def report(fit: Fit, *, discarded: Mapping[str, int] | None = None) -> str:
    """Two tables and the cautions, for a terminal 100 columns wide or a pipe.

    Args:
        fit: what to report.
        discarded: the number of samples that were not fitted, by reason.
    """
    output = io.StringIO()
    console = Console(file=output, width=_WIDTH, highlight=False, markup=False)
    console.print(grid(_CONSTANTS_HEAD, _constant_rows(fit), left=(1,), no_wrap=True))
    console.print(grid(_ERRORS_HEAD, _error_rows(fit), no_wrap=True))
    for line in _cautions(fit, discarded):
        console.print(line, soft_wrap=True)
    return output.getvalue()


def render(
    fit: Fit,
    samples: Sequence[Sample],
    document: Mapping[str, Any],
    discarded: Mapping[str, int] | None = None,
) -> str:
    """The page of ``--report``.

    Args:
        samples: those that were fitted, outliers included, as the figure shows them.
        document: the profile file.
    """
    cautions = "".join(f"<li>{text(line)}</li>" for line in _cautions(fit, discarded))
    source = document.get("source") or {}
    parts = {
        "title": text(f"{document['gpu']}/{document['model']}/tp{document['tensor_parallel']}"),
        "subtitle": text(
            f"{len(samples)} samples, KV cache of {document['kv_capacity_tokens']} tokens; "
            f"{source.get('note', '')}"
        ),
        "constants": table(_CONSTANTS_HEAD, _constant_rows(fit), text_columns=2, last_is_text=True),
        "errors": table(_ERRORS_HEAD, _error_rows(fit), text_columns=1),
        "cautions": f'<ul class="muted">{cautions}</ul>',
    }
    figures = {"prefill": prefill_figure(samples, fit), "decode": decode_figure(samples, fit)}
    return fill("profile.html", figures, dict(document), parts)


def _cautions(fit: Fit, discarded: Mapping[str, int] | None = None) -> list[str]:
    """How the errors were estimated, and what to know about the samples."""
    lines = [
        f"{name} errors: {part.validation}"
        for part, name in ((fit.prefill, "prefill"), (fit.decode, "decode"))
    ]
    if discarded:
        reasons = ", ".join(f"{count} {reason}" for reason, count in discarded.items())
        lines.append(f"{sum(discarded.values())} samples discarded: {reasons}")
    return [*lines, *(f"note: {note}" for note in (*fit.prefill.notes, *fit.decode.notes))]


def _constant_rows(fit: Fit) -> list[tuple[str, ...]]:
    terms = ("batch · tokens", "batch", "tokens", "1", "batch · pairs")
    rows = []
    for names, part in ((PREFILL_NAMES, fit.prefill), (DECODE_NAMES, fit.decode)):
        for i, name in enumerate(names):
            low, high = part.intervals[i]
            unknown = "left at 0" if name == "p9" else "not identified"
            found = "" if part.identified[i] else unknown
            value = f"{part.constants[i]:.3g}"
            rows.append((name, terms[i], value, f"{low:.3g} to {high:.3g}", found))
    return sorted(rows)


def _error_rows(fit: Fit) -> list[tuple[str, ...]]:
    """One row per equation."""
    rows = []
    for name, part in (("prefill", fit.prefill), ("decode", fit.decode)):
        errors = (part.median_error, part.mean_error, part.worst_error, part.eq_3_error)
        r2 = f"{part.r2:.3f}" if math.isfinite(part.r2) else "–"
        cells = ("–" if error is None else f"{error:.1%}" for error in errors)
        rows.append((name, str(part.used), str(part.outliers), r2, *cells))
    return rows


def prefill_figure(samples: Sequence[Sample], fit: Fit) -> dict[str, Any]:
    """Measured against fitted times of prefills."""
    chosen = [s for s in samples if s.prefill_s]
    return _figure(chosen, prefill_terms, fit.prefill.constants, [s.prefill_s for s in chosen])


def decode_figure(samples: Sequence[Sample], fit: Fit) -> dict[str, Any]:
    """Measured against fitted times of all decode steps of a batch."""
    chosen = [s for s in samples if s.decode_s and s.steps >= 1]
    return _figure(chosen, decode_terms, fit.decode.constants, [s.decode_s for s in chosen])


def _figure(
    samples: Sequence[Sample],
    terms: Callable[[Sequence[Sample]], FloatArray],
    constants: Sequence[float],
    times_s: Sequence[float | None],
) -> dict[str, Any]:
    measured = np.array(times_s, dtype=float)
    fitted = np.maximum(terms(samples) @ np.array(constants), 1e-9)
    classes = size_classes(samples)
    ends = np.array(
        [min(measured.min(), fitted.min()) / 1.3, max(measured.max(), fitted.max()) * 1.3]
    )
    bounds = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": ends.tolist(),
            "y": (ends * factor).tolist(),
            "line": {"color": "#888888", "width": 1, "dash": dash},
            "hoverinfo": "skip",
            "showlegend": False,
        }
        for factor, dash in ((1.0, "solid"), (1 - BAND, "dash"), (1 + BAND, "dash"))
    ]
    hover = "%{fullData.name}<br>measured %{x:.4g} s, fitted %{y:.4g} s"
    measurements = []
    for i, size in enumerate(np.unique(classes)):
        of_size = classes == size
        x, y = measured[of_size].tolist(), fitted[of_size].tolist()
        measurements.append(points(f"batch of {size:g}", x, y, i, hover, 7))
    axis_range = np.log10(ends).tolist()
    return figure(
        [*bounds, *measurements],
        xaxis=axis("measured, s", type="log", range=axis_range),
        yaxis=axis("fitted, s", type="log", range=axis_range),
    )
