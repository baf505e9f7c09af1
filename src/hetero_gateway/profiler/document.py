"""What a fit becomes: the document of a profile file, and the text that the command prints.

``files.profile_file`` has its layout and writes it; docs/configuration.md lists its keys.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from hetero_gateway.core.costs.fitting import Fit, PartFit
from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.files import profile_file

# Four figures: the fit is good for two, and what is printed should not look better than it is.
_DIGITS = 4
_WIDTH = 100


def profile_document(
    fit: Fit,
    *,
    gpu: str,
    model: str,
    tensor_parallel: int,
    kv_capacity_tokens: int,
    max_num_seqs: int,
    source: Mapping[str, Any],
) -> dict[str, Any]:
    """The profile file as a mapping, in the order in which it is written.

    Args:
        fit: the constants and their errors.
        gpu, model, tensor_parallel, kv_capacity_tokens, max_num_seqs: as in the file.
        source: more for ``source``, such as ``note``, ``engine``, ``block_size``, ``discarded``;
            ``how`` is measured and ``date`` today's (UTC) unless given. None values are left out.
    """
    given = {key: value for key, value in source.items() if value is not None}
    values = (*fit.prefill.constants, *fit.decode.constants)
    constants = Constants(*(_rounded(value) for value in values))
    profile = Profile(gpu, model, tensor_parallel, constants, kv_capacity_tokens, max_num_seqs)
    return profile_file.profile_document(
        profile,
        {
            "how": "measured",
            "date": datetime.now(UTC).date(),
            **given,
            "error": {
                "prefill": _rounded(fit.prefill.mean_error),
                "decode": _rounded(fit.decode.mean_error),
            },
            "fit": {"prefill": _quality(fit.prefill), "decode": _quality(fit.decode)},
            "intervals": {
                f"p{i}": [_rounded(low), _rounded(high)]
                for i, (low, high) in enumerate(
                    (*fit.prefill.intervals, *fit.decode.intervals), start=1
                )
            },
            "unidentified": unidentified(fit),
        },
    )


def unidentified(fit: Fit) -> list[str]:
    """The names of the constants that the samples do not determine."""
    known = (*fit.prefill.identified, *fit.decode.identified)
    return [f"p{i}" for i, found in enumerate(known, start=1) if not found]


def report(fit: Fit, *, discarded: Mapping[str, int] | None = None) -> str:
    """Two tables and the cautions, for a terminal 100 columns wide or a pipe.

    Args:
        fit: what to tell.
        discarded: samples that were not fitted, by reason.
    """
    console = Console(file=io.StringIO(), width=_WIDTH, highlight=False, markup=False)
    console.print(_constants_table(fit))
    console.print(_errors_table(fit))
    for part, name in ((fit.prefill, "prefill"), (fit.decode, "decode")):
        console.print(f"{name} errors: {part.validation}", soft_wrap=True)
    if discarded:
        reasons = ", ".join(f"{count} {reason}" for reason, count in discarded.items())
        console.print(f"{sum(discarded.values())} samples discarded: {reasons}", soft_wrap=True)
    for note in (*fit.prefill.notes, *fit.decode.notes):
        console.print(f"note: {note}", soft_wrap=True)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _quality(part: PartFit) -> dict[str, Any]:
    result: dict[str, Any] = {
        "r2": _rounded(part.r2) if math.isfinite(part.r2) else None,
        "median_error": _rounded(part.median_error),
        "worst_error": _rounded(part.worst_error),
        "validation": part.validation,
        "samples": part.used,
        "outliers": part.outliers,
    }
    if part.attention_error is not None:
        result["attention_error"] = _rounded(part.attention_error)
    return {key: value for key, value in result.items() if value is not None}


def _constants_table(fit: Fit) -> Table:
    table = Table()
    for name in ("constant", "multiplies", "seconds", "95 % interval", ""):
        table.add_column(name, no_wrap=True, justify="left" if name == "multiplies" else "right")
    terms = ("batch · tokens", "batch", "tokens", "1")
    for first, part in ((1, fit.prefill), (5, fit.decode)):
        for i, term in enumerate(terms):
            low, high = part.intervals[i]
            table.add_row(
                f"p{first + i}",
                term,
                f"{part.constants[i]:.3g}",
                f"{low:.3g} to {high:.3g}",
                "" if part.identified[i] else "not identified",
            )
    return table


def _errors_table(fit: Fit) -> Table:
    table = Table()
    names = ("part", "used", "outliers", "R²", "median error", "mean", "worst", "with b·I²")
    for name in names:
        table.add_column(name, no_wrap=True, justify="left" if name == "part" else "right")
    for name, part in (("prefill", fit.prefill), ("decode", fit.decode)):
        table.add_row(name, str(part.used), str(part.outliers), *_error_cells(part))
    return table


def _error_cells(part: PartFit) -> Sequence[str]:
    errors = (part.median_error, part.mean_error, part.worst_error, part.attention_error)
    r2 = f"{part.r2:.3f}" if math.isfinite(part.r2) else "–"
    return [r2, *("–" if error is None else f"{error:.1%}" for error in errors)]
