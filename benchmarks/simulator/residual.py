"""What a learnt residual would add to the fitted constants, on the recorded runs of an H100.

    python benchmarks/simulator/residual.py

Each request's measured time over the simulated one is learnt from half of a record, or from all of
the other one, by what is known as a request is placed: sequences and prompts there, its own
lengths, and what the model says. Two ways: a quadratic by ridge regression, and the mean of the 15
nearest. Printed, as Markdown, is the mean relative error of each time, and of the learnt ones over
it; a request's numbers are odd, or of the other record, where it judges.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.simulator.recorded import PROFILE, RECORDS, read, simulated
from hetero_gateway.core.costs.arrays import FloatArray
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.sim.recorded import Recording

NEAREST, RIDGE = 15, 10.0


class Table(NamedTuple):
    """Of N requests. ``known``: (N, 8); ``residual``: log of measured over simulated."""

    known: FloatArray
    residual: FloatArray

    def half(self, parity: int) -> Table:
        return Table(self.known[parity::2], self.residual[parity::2])

    def error(self, learnt: FloatArray | float = 0.0) -> float:
        return float(np.abs(np.exp(learnt - self.residual) - 1).mean())


def tables(recording: Recording) -> dict[str, Table]:
    """By time: latency, TTFT, TPOT. Answers of one token are left out."""
    found, placed = simulated(recording, load_profile(str(PROFILE))), recording.placements
    at_s, end_s, first_s = placed.placed_s, recording.finish_s, recording.first_token_s
    here = (at_s < at_s[:, None]) & (end_s > at_s[:, None])
    waits = here & (first_s > at_s[:, None])
    prompt, output = placed.prompt_tokens, placed.output_tokens
    simulated_s = np.stack([found.first_s, found.end_s]) - recording.arrival_s
    counts = [here.sum(1), waits.sum(1), here @ prompt, waits @ prompt]
    known = np.stack([*counts, prompt, output, *simulated_s], 1).astype(float)
    tokens = np.maximum(output - 1, 1)
    measured = {
        "latency": (end_s - recording.arrival_s, simulated_s[1]),
        "TTFT": (first_s - recording.arrival_s, simulated_s[0]),
        "TPOT": ((end_s - first_s) / tokens, (found.end_s - found.first_s) / tokens),
    }
    some = output > 1
    return {name: Table(known[some], np.log(a / b)[some]) for name, (a, b) in measured.items()}


def quadratic(learn: Table, known: FloatArray) -> FloatArray:
    mean, spread = learn.known.mean(0), learn.known.std(0) + 1e-9

    def terms(rows: FloatArray) -> FloatArray:
        z = (rows - mean) / spread
        pairs = itertools.combinations_with_replacement(z.T, 2)
        return np.stack([np.ones(len(z)), *z.T, *(a * b for a, b in pairs)], 1)

    x = terms(learn.known)
    penalty = RIDGE * np.diag([0.0] + [1.0] * (x.shape[1] - 1))
    weights = np.linalg.solve(x.T @ x + penalty, x.T @ learn.residual)
    return np.asarray(terms(known) @ weights)


def nearest(learn: Table, known: FloatArray) -> FloatArray:
    spread = learn.known.std(0) + 1e-9
    far = (((known[:, None] - learn.known) / spread) ** 2).sum(2)
    return np.asarray(learn.residual[np.argsort(far, 1)[:, :NEAREST]].mean(1))


WAYS: dict[str, Callable[[Table, FloatArray], FloatArray]] = {
    "quadratic": quadratic,
    "nearest": nearest,
}


def main() -> None:
    argparse.ArgumentParser(description="a learnt residual beside the constants").parse_args()
    of = {rate: tables(read(path)) for rate, path in RECORDS.items()}
    rates = tuple(of)
    print("| | requests/s | error | " + " | ".join(f"{w}: same, other rate" for w in WAYS) + " |")
    print("|---|---|---|" + "---|" * len(WAYS))
    for name, (rate, other) in itertools.product(of[rates[0]], (rates, rates[::-1])):
        table, judged = of[rate][name], of[rate][name].half(1)
        error = judged.error()
        learn = table.half(0), of[other][name]
        cells = [
            [judged.error(way(t, judged.known)) / error for t in learn] for way in WAYS.values()
        ]
        shown = " | ".join(f"{same:.2f}, {apart:.2f}" for same, apart in cells)
        print(f"| {name} | {rate} | {error:.1%} | {shown} |")


if __name__ == "__main__":
    main()
