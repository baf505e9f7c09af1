"""Types of command-line arguments that several commands share, for argparse.

Each raises what argparse reports in one line.
"""

from __future__ import annotations

import argparse
import math


def rate(text: str) -> float:
    value = float(text)  # argparse reports a ValueError
    if math.isnan(value) or value <= 0:
        raise argparse.ArgumentTypeError("must be above 0, or inf")
    return value


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError("must be above 0")
    return value
