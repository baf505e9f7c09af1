"""What a fit becomes: the document of a profile file.

``files.profile_file`` has its layout and writes it; docs/reference/configuration.md lists its keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from datetime import UTC, datetime
from typing import Any, TypeVar

from hetero_gateway.core.costs.fitting import DECODE_NAMES, PREFILL_NAMES, Fit, PartFit
from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.files import profile_file

# Four figures: the fit is good for two, and what is printed should not look better than it is.
_DIGITS = 4

_T = TypeVar("_T")


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
    constants = Constants(*(_rounded(value) for value in astuple(fit.constants)))
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
                name: [_rounded(low), _rounded(high)]
                for name, (low, high) in _by_name(fit.prefill.intervals, fit.decode.intervals)
            },
            "unidentified": unidentified(fit),
        },
    )


def unidentified(fit: Fit) -> list[str]:
    """The names of the constants that the samples do not determine."""
    known = _by_name(fit.prefill.identified, fit.decode.identified)
    return [name for name, found in known if not found]


def _by_name(prefill: Sequence[_T], decode: Sequence[_T]) -> list[tuple[str, _T]]:
    """p1, p2, …: what there is of each."""
    names = (*PREFILL_NAMES, *DECODE_NAMES)
    return sorted(zip(names, (*prefill, *decode), strict=True), key=lambda pair: pair[0])


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
    if part.eq_3_error is not None:
        result["eq_3_error"] = _rounded(part.eq_3_error)
    return {key: value for key, value in result.items() if value is not None}
