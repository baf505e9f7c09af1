"""The page that ``profile --report`` writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hetero_gateway.cli.reports.page import colour, fill, json_block, table, text
from hetero_gateway.cli.reports.profile_table import (
    CONSTANTS_HEAD,
    ERRORS_HEAD,
    cautions,
    constant_rows,
    error_rows,
)
from hetero_gateway.core.costs.cost_model import FloatArray
from hetero_gateway.core.costs.fitting import Fit, Sample, decode_terms, prefill_terms
from hetero_gateway.lab.profiler.plot import BAND, size_classes


def render(
    fit: Fit,
    samples: Sequence[Sample],
    document: Mapping[str, Any],
    discarded: Mapping[str, int] | None = None,
) -> str:
    """The whole page.

    Args:
        samples: those that were fitted, outliers included: they are what the picture is to show.
        document: the profile file; it stands in the page for programs to read.
        discarded: samples that were not fitted, by reason.
    """
    lines = "".join(f"<li>{text(line)}</li>" for line in cautions(fit, discarded))
    source = document.get("source") or {}
    parts = {
        "title": text(f"{document['gpu']}/{document['model']}/tp{document['tensor_parallel']}"),
        "subtitle": text(
            f"{len(samples)} samples, KV cache of {document['kv_capacity_tokens']} tokens; "
            f"{source.get('note', '')}"
        ),
        "constants": table(CONSTANTS_HEAD, constant_rows(fit), text_columns=2, last_is_text=True),
        "errors": table(ERRORS_HEAD, error_rows(fit), text_columns=1),
        "cautions": f'<ul class="muted">{lines}</ul>',
        "figures": json_block(
            {"prefill": prefill_figure(samples, fit), "decode": decode_figure(samples, fit)}
        ),
        "document": json_block(dict(document)),
    }
    return fill("profile_report.html", parts)


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
    lines = [
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
    points = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": f"batch of {size:g}",
            "x": measured[classes == size].tolist(),
            "y": fitted[classes == size].tolist(),
            "marker": {"color": colour(i), "size": 7},
            "hovertemplate": "%{fullData.name}<br>measured %{x:.4g} s, fitted %{y:.4g} s"
            "<extra></extra>",
        }
        for i, size in enumerate(np.unique(classes))
    ]
    axis_range = np.log10(ends).tolist()
    return {
        "data": [*lines, *points],
        "layout": {
            "xaxis": {"type": "log", "title": {"text": "measured, s"}, "range": axis_range},
            "yaxis": {"type": "log", "title": {"text": "fitted, s"}, "range": axis_range},
        },
    }
