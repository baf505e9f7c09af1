"""``profile --from``: a profile from samples that were measured before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hetero_gateway.core.costs.fitting import Fit, Sample, fit
from hetero_gateway.lab.profiler.document import ProfiledInstance, write_fit
from hetero_gateway.lab.profiler.plot import check_can_plot
from hetero_gateway.lab.profiler.samples import read_samples


class Recorded(NamedTuple):
    """A fit, the samples that it is of, and how many others were discarded, by reason."""

    fit: Fit
    samples: Sequence[Sample]
    discarded: Mapping[str, int]


def fit_recorded(
    samples_file: Path, output: Path, instance: ProfiledInstance, *, plot: Path | None, seed: int
) -> Recorded:
    """Fit the samples of a file and write the profile, and a plot if asked for.

    ``samples_file`` is CSV, or the JSON lines of an earlier measurement (``.jsonl``), ``plot`` a
    PNG or SVG file; ``seed`` is that of the hold-out and the bootstrap.

    Raises:
        ConfigError: a file cannot be read or written, or what is wrong in it.
        ProfileError: the samples cannot give a fit.
    """
    if plot is not None:
        check_can_plot(plot)
    samples, discarded = read_samples(samples_file)
    fitted = fit(samples, rng=np.random.default_rng(seed))
    source = {"note": f"fitted to {samples_file.name}", "discarded": discarded or None}
    write_fit(fitted, samples, instance, source, output, plot)
    return Recorded(fitted, samples, discarded)
