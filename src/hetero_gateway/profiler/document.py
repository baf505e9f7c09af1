"""What a fit becomes: the profile file, and the text that the command prints.

The file's layout is ``profile_file.ProfileModel``'s; docs/configuration.md lists its keys.
"""

from __future__ import annotations

import io
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from hetero_gateway.core.costs.fitting import Fit, PartFit
from hetero_gateway.errors import ConfigError

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
    return {
        "gpu": gpu,
        "model": model,
        "tensor_parallel": tensor_parallel,
        "constants": {f"p{i}": _rounded(value) for i, value in _numbered(fit)},
        "kv_capacity_tokens": kv_capacity_tokens,
        "max_num_seqs": max_num_seqs,
        "source": {
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
    }


def write_profile(path: Path, document: Mapping[str, Any]) -> None:
    """Write the file in one step: whoever reads it finds the old one or the new one, whole.

    Raises:
        ConfigError: it cannot be written.
    """
    text = yaml.safe_dump(
        _without_references(dict(document)), sort_keys=False, allow_unicode=True, width=_WIDTH
    )
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # mkstemp's files are their owner's alone; a profile is no secret.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
        raise


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


def _without_references(value: Any) -> Any:
    """``${NAME}`` would be replaced from the environment of whoever loads the file.

    A model's name and an engine's version are what the engine says they are.
    """
    if isinstance(value, Mapping):
        return {key: _without_references(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_references(inner) for inner in value]
    return value.replace("${", "$ {") if isinstance(value, str) else value


def _numbered(fit: Fit) -> list[tuple[int, float]]:
    return list(enumerate((*fit.prefill.constants, *fit.decode.constants), start=1))


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
