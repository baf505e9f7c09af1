"""Prometheus' text format: families and their lines, written as the values come.

prometheus-client makes an object and a dictionary of each line before it writes it, at ten times
the CPU: with 500 instances half a second a scrape. Tests read what is written here with its parser.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from hetero_gateway.core.histogram import Histogram
from hetero_gateway.gateway.records.series import SHOWN_BOUNDS

_log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LARGE = 1e300
# Stands for a label's value in a template: no escaped text contains it.
_PLACE = "\0"
# Escaped names of instances, models and outcomes that are cached.
_MOST_ESCAPED = 4096


def labels_text(names: Sequence[str], values: Sequence[str]) -> str:
    """Labels as they stand between braces, sorted by name, as in prometheus-client. Raises
    ValueError: one is not text."""
    pairs = sorted(zip(names, values, strict=True))
    return ",".join([f'{name}="{_escaped(value)}"' for name, value in pairs])


class Family:
    """One family, and its lines so far.

    Args:
        name: in full, without ``_total``.
        kind: counter, gauge or histogram.
        documentation: a line of text.
        labels: names of labels.
    """

    __slots__ = ("_lines", "_start", "documentation", "kind", "labels", "name")

    def __init__(self, name: str, kind: str, documentation: str, labels: Sequence[str]) -> None:
        self.name = name
        self.kind = kind
        self.documentation = documentation
        self.labels = tuple(labels)
        self._lines: list[str] = []
        self._start = name + ("_total" if kind == "counter" else "")

    def add(self, values: Sequence[str], figure: float | Histogram | None) -> None:
        """Write a value for these labels. None: unknown, and nothing is shown.

        What cannot be written (a number beyond a float, a label that is not text) is skipped and
        logged: one bad value must not hide the others for good.
        """
        if figure is not None:
            try:
                labelled = labels_text(self.labels, values)
            except ValueError:
                _log.exception("a series of %s cannot be shown", self.name)
            else:
                self.add_labelled(labelled, figure)

    def add_labelled(self, labelled: str, figure: float | Histogram | None) -> None:
        """The same for labels in text form (``labels_text``)."""
        try:
            if type(figure) is float and -_LARGE < figure < _LARGE:
                braces = f"{{{labelled}}}" if labelled else ""
                self._lines.append(f"{self._start}{braces} {figure!r}\n")
            elif figure is None:
                return
            elif isinstance(figure, Histogram):
                self._add_histogram(labelled, figure)
            else:
                braces = f"{{{labelled}}}" if labelled else ""
                self._lines.append(f"{self._start}{braces} {_number(figure)}\n")
        except (ValueError, OverflowError, TypeError):
            _log.exception("a series of %s cannot be shown", self.name)

    def add_zeros(self, first: str, others: tuple[str, ...]) -> None:
        """For a family with two labels: 0 for this value of the first, and each of the second."""
        try:
            escaped = _escaped(first)
        except ValueError:
            return  # such a name is logged when it counts something
        self._lines.append(_zeros(self._start, self.labels, others).replace(_PLACE, escaped))

    def _add_histogram(self, named: str, histogram: Histogram) -> None:
        histogram.count_noted()
        counts = [*accumulate(histogram.counts)]
        template, at = _of_histogram(self.name, histogram.bounds, bool(named))
        figures = [counts[i] for i in at]
        total = _number(histogram.sum)
        self._lines.append(template.replace(_PLACE, named) % (*figures, counts[-1], total))

    def head(self) -> str:
        """Its HELP and TYPE lines."""
        name = self._start
        text = self.documentation.replace("\\", "\\\\").replace("\n", "\\n")
        return f"# HELP {name} {text}\n# TYPE {name} {self.kind}\n"

    def lines(self) -> str:
        """All lines so far."""
        return "".join(self._lines)


@lru_cache(maxsize=_MOST_ESCAPED)
def _escaped(value: str) -> str:
    """Raises ValueError: not text."""
    value.encode("utf-8")
    if _PLACE in value:
        raise ValueError("a label has a zero byte")
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    """Raises OverflowError: it is beyond a float."""
    if type(value) is int and -(2**53) < value < 2**53:
        return f"{value}.0"
    value = float(value)
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


@lru_cache(maxsize=64)
def _zeros(start: str, labels: tuple[str, ...], others: tuple[str, ...]) -> str:
    """Lines of 0 by a family's second label, with a placeholder for the first one's value."""
    first = f'{labels[0]}="{_PLACE}"'
    both = (sorted((first, labels_text(labels[1:], (other,)))) for other in others)
    texts = (",".join(each) for each in both)
    return "".join(f"{start}{{{text}}} 0.0\n" for text in texts)


@lru_cache(maxsize=64)
def _of_histogram(
    name: str, bounds: tuple[float, ...], labelled: bool
) -> tuple[str, tuple[int, ...]]:
    """A histogram's lines, with placeholders for its labels and values; and the counts they show:
    the last bin of each bucket.
    """
    shown = SHOWN_BOUNDS.get(bounds, bounds)
    before = f"{name}_bucket{{{_PLACE}," if labelled else f"{name}_bucket{{"
    after = f"{{{_PLACE}}}" if labelled else ""
    lines = [f'{before}le="{float(bound)}"}} %d.0\n' for bound in shown]
    lines += [f'{before}le="+Inf"}} %d.0\n', f"{name}_count{after} %d.0\n"]
    lines += [f"{name}_sum{after} %s\n"]
    return "".join(lines), (*map(bounds.index, shown), len(bounds))
