"""The plot of a fit: measured against fitted, prefill and decode.

matplotlib is an extra; it is imported when a plot is written, and not before.
"""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hetero_gateway.core.costs.arrays import FloatArray
from hetero_gateway.core.costs.fitting import Fit, Sample, decode_terms, prefill_terms
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.whole_file import named

SUFFIXES = (".png", ".svg")
# Within the band a fitted time differs from the measured one by at most this.
BAND = 0.1
_MANY_SIZES = 10


def check_can_plot(path: Path) -> None:
    """Find out before minutes of measuring what would fail after them.

    Raises ConfigError: the suffix is neither PNG nor SVG, matplotlib is missing, or the folder is.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot: {path} must end in {' or '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot: needs matplotlib, which is not installed; "
            "pip install hetero-gateway[report], or leave --plot out"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: {path.parent}: no such folder")


def write_plot(path: Path, samples: Sequence[Sample], fit: Fit) -> None:
    """A PNG or SVG file, by the suffix, of a fit and its samples, including outliers.

    Raises ConfigError: as ``check_can_plot``, or the file cannot be written.
    """
    check_can_plot(path)
    from matplotlib.figure import Figure  # no pyplot: it looks for a display

    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    prefill = [s for s in samples if s.prefill_s]
    decode = [s for s in samples if s.decode_s and s.steps >= 1]
    _panel(left, "prefill", prefill, prefill_terms, fit.prefill.constants, lambda s: s.prefill_s)
    _panel(right, "decode", decode, decode_terms, fit.decode.constants, lambda s: s.decode_s)
    with named(f"--plot: {path}", "written"):
        figure.savefig(path, dpi=120)


def _panel(
    axes: Any,
    title: str,
    samples: Sequence[Sample],
    terms: Callable[[Sequence[Sample]], FloatArray],
    constants: Sequence[float],
    time_of: Callable[[Sample], float | None],
) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    measured = np.array([time_of(s) for s in samples], dtype=float)
    fitted = np.maximum(terms(samples) @ np.array(constants), 1e-9)
    ends = np.array(
        [min(measured.min(), fitted.min()) / 1.3, max(measured.max(), fitted.max()) * 1.3]
    )
    axes.fill_between(ends, ends * (1 - BAND), ends * (1 + BAND), color="0.9", label="±10 %")
    axes.plot(ends, ends, color="0.5", linewidth=1)
    classes = size_classes(samples)
    sizes = np.unique(classes)
    for i, size in enumerate(sizes):  # a colour for each
        chosen = classes == size
        colour = colormaps["viridis"](i / max(1, len(sizes) - 1))
        axes.scatter(measured[chosen], fitted[chosen], s=18, color=colour, label=f"{size:g}")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=title)
    axes.set(xlabel="measured, s", ylabel="fitted, s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_aspect("equal")
    axes.legend(title="batch size", fontsize="small", loc="upper left")


def size_classes(samples: Sequence[Sample]) -> FloatArray:
    """Each sample's batch size; if there are more than ten, too many to distinguish, per octave."""
    batches = np.array([s.batch_size for s in samples], dtype=float)
    if len(np.unique(batches)) <= _MANY_SIZES:
        return batches
    octaves: FloatArray = 2.0 ** np.round(np.log2(batches))
    return octaves
