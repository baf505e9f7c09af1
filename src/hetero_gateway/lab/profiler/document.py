"""Turns a fit into the document of a profile file.

``files.profile_file`` defines its structure and writes it; docs/reference/configuration.md lists
its keys. ``profile --from`` needs nothing else: ``fit_recorded`` fits samples measured before.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hetero_gateway.core.costs.fitting import (
    DECODE_NAMES,
    PREFILL_NAMES,
    Fit,
    PartFit,
    Sample,
    fit,
)
from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.files import profile_file
from hetero_gateway.lab.profiler.plot import check_can_plot, write_plot
from hetero_gateway.lab.profiler.samples import read_samples

_T = TypeVar("_T")


class ProfiledInstance(NamedTuple):
    """Properties of a profile that samples do not show; as in the file."""

    gpu: str
    model: str
    tensor_parallel: int
    kv_capacity_tokens: int
    max_num_seqs: int
    first_token_s: float = 0.0
    plans_ahead: bool = False

    def profile(self, constants: Constants) -> Profile:
        """Its profile with these constants, rounded."""
        values = Constants(*map(rounded, astuple(constants)))
        return Profile(
            *(self.gpu, self.model, self.tensor_parallel, values),
            *(self.kv_capacity_tokens, self.max_num_seqs),
            first_token_s=rounded(self.first_token_s),
            plans_ahead=self.plans_ahead,
        )


class Recorded(NamedTuple):
    """A fit, its samples, and how many others were discarded, by reason."""

    fit: Fit
    samples: Sequence[Sample]
    discarded: Mapping[str, int]


def fit_recorded(
    samples_file: Path, output: Path, instance: ProfiledInstance, *, plot: Path | None, seed: int
) -> Recorded:
    """Fit the samples of a file and write the profile, and a plot if asked for.

    ``samples_file`` is CSV, or the JSON lines of an earlier measurement (``.jsonl``), ``plot``
    a PNG or SVG file; ``seed`` is that of the hold-out and the bootstrap.

    Raises:
        ConfigError: a file cannot be read or written, or has errors.
        ProfileError: the samples cannot give a fit.
    """
    if plot is not None:
        check_can_plot(plot)
    samples, discarded = read_samples(samples_file)
    fitted = fit(samples, rng=np.random.default_rng(seed))
    source = {"note": f"fitted to {samples_file.name}", "discarded": discarded or None}
    write_fit(fitted, samples, instance, source, output, plot)
    return Recorded(fitted, samples, discarded)


def write_fit(
    fitted: Fit,
    samples: Sequence[Sample],
    instance: ProfiledInstance,
    source: Mapping[str, Any],
    output: Path,
    plot: Path | None,
) -> dict[str, Any]:
    """Write the fit of these samples, with a plot if asked for; returns the document.

    Raises ConfigError: a file cannot be written.
    """
    document = profile_document(fitted, instance, source)
    profile_file.write_profile_file(output, document)
    if plot is not None:
        write_plot(plot, samples, fitted)
    return document


def profile_document(
    fitted: Fit, instance: ProfiledInstance, source: Mapping[str, Any]
) -> dict[str, Any]:
    """The profile file as a mapping, in the order of writing.

    ``source``: further entries of the file's, such as ``note``, ``engine``, ``block_size``,
    ``discarded``; ``how`` is measured and ``date`` today's (UTC) unless given. None values are
    left out.
    """
    given = {key: value for key, value in source.items() if value is not None}
    return profile_file.profile_document(
        instance.profile(fitted.constants),
        {
            "how": "measured",
            "date": datetime.now(UTC).date(),
            **given,
            "error": {
                "prefill": rounded(fitted.prefill.mean_error),
                "decode": rounded(fitted.decode.mean_error),
            },
            "fit": {"prefill": _quality(fitted.prefill), "decode": _quality(fitted.decode)},
            "intervals": {
                name: [rounded(low), rounded(high)]
                for name, (low, high) in _by_name(fitted.prefill.intervals, fitted.decode.intervals)
            },
            "unidentified": unidentified(fitted),
        },
    )


def unidentified(fitted: Fit) -> list[str]:
    """The names of the constants that the samples do not determine."""
    known = _by_name(fitted.prefill.identified, fitted.decode.identified)
    return [name for name, found in known if not found]


def _by_name(prefill: Sequence[_T], decode: Sequence[_T]) -> list[tuple[str, _T]]:
    """p1, p2, …: the available ones."""
    names = (*PREFILL_NAMES, *DECODE_NAMES)
    return sorted(zip(names, (*prefill, *decode), strict=True), key=lambda pair: pair[0])


def rounded(value: float) -> float:
    """To four figures: the fit is good for two, and should not look better than it is."""
    return float(f"{value:.4g}")


def _quality(part: PartFit) -> dict[str, Any]:
    result = {
        "r2": rounded(part.r2) if math.isfinite(part.r2) else None,
        "median_error": rounded(part.median_error),
        "worst_error": rounded(part.worst_error),
        "validation": part.validation,
        "samples": part.used,
        "outliers": part.outliers,
        "eq_3_error": None if part.eq_3_error is None else rounded(part.eq_3_error),
    }
    return {key: value for key, value in result.items() if value is not None}
