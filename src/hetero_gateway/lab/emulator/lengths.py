"""How many tokens an emulated answer has when nothing but the model would end it.

A length is drawn from one uniform number, which the caller derives from the request's content: the
same body gets the same length on every instance of one seed, in whatever order requests come.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from hetero_gateway.errors import ConfigError

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class LogNormalOutputs:
    """Log-normal with this mean and coefficient of variation (0: always the mean).

    The defaults are of the size of public chat traces (a few hundred tokens, spread about as wide
    as the mean), and nothing more exact than that.

    Raises:
        ConfigError: a mean below 1 or a negative coefficient.
    """

    mean_tokens: float = 200.0
    cv: float = 0.8

    def __post_init__(self) -> None:
        if not 1 <= self.mean_tokens < math.inf:
            raise ConfigError(f"--mean-output-tokens: must be at least 1, not {self.mean_tokens}")
        if not 0 <= self.cv < math.inf:
            raise ConfigError(f"--cv-output-tokens: must be 0 or more, not {self.cv}")

    def draw(self, u: float) -> int:
        """The length at quantile ``u`` (0 < u < 1), in tokens, at least 1."""
        variance = math.log1p(self.cv**2)
        mu = math.log(self.mean_tokens) - variance / 2
        return max(1, round(math.exp(mu + math.sqrt(variance) * _NORMAL.inv_cdf(u))))


@dataclass(frozen=True, slots=True)
class TraceOutputs:
    """Lengths taken from a trace, each as likely as any other."""

    tokens: tuple[int, ...]

    @classmethod
    def read(cls, path: Path) -> TraceOutputs:
        """The ``output_tokens`` column of a trace.

        Raises ConfigError: the file, and the line, that cannot be used.
        """
        try:
            with path.open(encoding="utf-8", newline="") as file:
                rows = csv.DictReader(file)
                if "output_tokens" not in (rows.fieldnames or ()):
                    raise ConfigError(f"{path}: has no column output_tokens")
                tokens = tuple(_length(row["output_tokens"], path, rows.line_num) for row in rows)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error
        if not tokens:
            raise ConfigError(f"{path}: has no rows")
        return cls(tokens)

    def draw(self, u: float) -> int:
        """The length at quantile ``u`` (0 < u < 1), in tokens, at least 1."""
        return self.tokens[int(u * len(self.tokens))]


OutputLengths = LogNormalOutputs | TraceOutputs


def _length(text: str | None, path: Path, line: int) -> int:
    try:
        return max(1, int(float(text or "")))
    except (ValueError, OverflowError):
        raise ConfigError(f"{path}: line {line}: output_tokens is {text!r}") from None
