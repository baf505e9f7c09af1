"""``profile --from``: a profile from samples that were measured before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetero_gateway.core.costs.fitting import Fit, Sample, fit
from hetero_gateway.files.profile_file import write_profile_file
from hetero_gateway.lab.profiler.document import profile_document
from hetero_gateway.lab.profiler.plot import check_can_plot, write_plot
from hetero_gateway.lab.profiler.samples import read_samples


@dataclass(frozen=True, slots=True)
class Recorded:
    """A fit, the samples that it is of, and how many others were discarded, by reason."""

    fit: Fit
    samples: Sequence[Sample]
    discarded: Mapping[str, int]


def fit_recorded(
    samples_file: Path,
    output: Path,
    *,
    gpu: str,
    model: str,
    tensor_parallel: int,
    kv_capacity_tokens: int,
    max_num_seqs: int,
    plot: Path | None,
    seed: int,
) -> Recorded:
    """Fit the samples of a file and write the profile, and a plot if asked for.

    Args:
        samples_file: CSV, or the JSON lines of an earlier measurement (``.jsonl``).
        output: the profile file.
        gpu, model, tensor_parallel, kv_capacity_tokens, max_num_seqs: what samples do not tell.
        plot: a PNG or SVG file, or None.
        seed: of the hold-out and the bootstrap.

    Raises:
        ConfigError: a file cannot be read or written, or what is wrong in it.
        ProfileError: the samples cannot give a fit.
    """
    if plot is not None:
        check_can_plot(plot)
    samples, discarded = read_samples(samples_file)
    fitted = fit(samples, rng=np.random.default_rng(seed))
    document = profile_document(
        fitted,
        gpu=gpu,
        model=model,
        tensor_parallel=tensor_parallel,
        kv_capacity_tokens=kv_capacity_tokens,
        max_num_seqs=max_num_seqs,
        source={"note": f"fitted to {samples_file.name}", "discarded": discarded or None},
    )
    write_profile_file(output, document)
    if plot is not None:
        write_plot(plot, samples, fitted)
    return Recorded(fitted, samples, discarded)
