"""What ``profile`` prints of a fit: constants, errors, and cautions."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from hetero_gateway.core.costs.fitting import DECODE_NAMES, PREFILL_NAMES, Fit, PartFit

CONSTANTS_HEAD = ("constant", "multiplies", "seconds", "95 % interval", "")
ERRORS_HEAD = ("part", "used", "outliers", "R²", "median error", "mean", "worst", "without p9")
_WIDTH = 100


def report(fit: Fit, *, discarded: Mapping[str, int] | None = None) -> str:
    """Two tables and the cautions, for a terminal 100 columns wide or a pipe.

    Args:
        fit: what to report.
        discarded: samples that were not fitted, by reason.
    """
    console = Console(file=io.StringIO(), width=_WIDTH, highlight=False, markup=False)
    console.print(_constants_table(fit))
    console.print(_errors_table(fit))
    for line in cautions(fit, discarded):
        console.print(line, soft_wrap=True)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def cautions(fit: Fit, discarded: Mapping[str, int] | None = None) -> list[str]:
    """How the errors were found, and what is to be known of the samples."""
    lines = [
        f"{name} errors: {part.validation}"
        for part, name in ((fit.prefill, "prefill"), (fit.decode, "decode"))
    ]
    if discarded:
        reasons = ", ".join(f"{count} {reason}" for reason, count in discarded.items())
        lines.append(f"{sum(discarded.values())} samples discarded: {reasons}")
    return [*lines, *(f"note: {note}" for note in (*fit.prefill.notes, *fit.decode.notes))]


def _constants_table(fit: Fit) -> Table:
    table = Table()
    for name in CONSTANTS_HEAD:
        table.add_column(name, no_wrap=True, justify="left" if name == "multiplies" else "right")
    for row in constant_rows(fit):
        table.add_row(*row)
    return table


def constant_rows(fit: Fit) -> list[tuple[str, ...]]:
    """A row per constant, as ``CONSTANTS_HEAD`` has it."""
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


def _errors_table(fit: Fit) -> Table:
    table = Table()
    for name in ERRORS_HEAD:
        table.add_column(name, no_wrap=True, justify="left" if name == "part" else "right")
    for row in error_rows(fit):
        table.add_row(*row)
    return table


def error_rows(fit: Fit) -> list[tuple[str, ...]]:
    """A row per equation, as ``ERRORS_HEAD`` has it."""
    return [
        (name, str(part.used), str(part.outliers), *_error_cells(part))
        for name, part in (("prefill", fit.prefill), ("decode", fit.decode))
    ]


def _error_cells(part: PartFit) -> Sequence[str]:
    errors = (part.median_error, part.mean_error, part.worst_error, part.eq_3_error)
    r2 = f"{part.r2:.3f}" if math.isfinite(part.r2) else "–"
    return [r2, *("–" if error is None else f"{error:.1%}" for error in errors)]
