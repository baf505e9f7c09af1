"""Recorded runs of vLLM on an H100 beside the simulator: half of their requests fit, half judge.

    python benchmarks/simulator/recorded.py
    python benchmarks/simulator/recorded.py --fit

``--fit`` looks for ``first_token_s`` and p6 by the requests with even numbers of both records; what
it finds should be in configs/profiles/h100-80gb-llama-3.1-8b-tp1-served.yaml. Printed, as Markdown,
are those with odd numbers: measured over simulated as placed, and the mean of each request's
relative error. Exit code 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hetero_gateway.cli.against import recording_of
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.files.recorded_run import read_recorded_run
from hetero_gateway.sim.recorded import Recording, run_as_placed

ROOT = Path(__file__).resolve().parents[2]
RECORDS = {n: ROOT / f"benchmarks/recorded/h100-llama-3.1-8b-{n}.jsonl" for n in (10, 22)}
PROFILE = ROOT / "configs/profiles/h100-80gb-llama-3.1-8b-tp1-served.yaml"
MAX_BATCHED_TOKENS = 8192
# Of ratios to 1, and of each request's relative error of TTFT.
BOUNDS = {"tokens_per_s": 0.03, "latency": 0.06, "p99": 0.08, "ttft": 0.15}
MOST_TTFT_ERROR = 0.25


class Beside(NamedTuple):
    """Measured over simulated; ``ttft_error``, ``latency_error``: mean of each request's."""

    tokens_per_s: float
    latency: float
    p99: float
    ttft: float
    latency_error: float
    ttft_error: float

    @property
    def within(self) -> bool:
        ratios = all(abs(getattr(self, name) - 1) <= most for name, most in BOUNDS.items())
        return ratios and self.ttft_error <= MOST_TTFT_ERROR


def read(path: Path) -> Recording:
    record = read_recorded_run(path)
    return recording_of(record)


def beside(recording: Recording, profile: Profile, parity: int) -> Beside:
    """The requests with numbers of that parity; all of them run."""
    found = run_as_placed([profile], recording.placements, max_batched_tokens=MAX_BATCHED_TOKENS)
    chosen = np.arange(recording.arrival_s.size) % 2 == parity
    ttft_s = (recording.first_token_s - recording.arrival_s)[chosen]
    latency_s = (recording.finish_s - recording.arrival_s)[chosen]
    simulated_ttft_s = (found.first_token_s - recording.arrival_s)[chosen]
    simulated_s = (found.finish_s - recording.arrival_s)[chosen]
    return Beside(
        # Of all: tokens over the time to the last completion.
        float(np.max(found.finish_s) / np.max(recording.finish_s)),
        float(latency_s.mean() / simulated_s.mean()),
        float(np.percentile(latency_s, 99) / np.percentile(simulated_s, 99)),
        float(ttft_s.mean() / simulated_ttft_s.mean()),
        float(np.abs(simulated_s / latency_s - 1).mean()),
        float(np.abs(simulated_ttft_s / ttft_s - 1).mean()),
    )


def fit(profile: Profile, recordings: list[Recording]) -> Profile:
    """``first_token_s`` and p6, by the even halves: errors of each request, and of the means."""
    from scipy.optimize import minimize  # 300 modules

    def changed(values: np.ndarray) -> Profile:
        constants = dataclasses.replace(profile.constants, p6=float(values[1]) * 1e-5)
        first_token_s = float(values[0]) * 1e-2
        return dataclasses.replace(profile, constants=constants, first_token_s=first_token_s)

    def off(values: np.ndarray) -> float:
        if min(values) < 0:
            return 1e3
        each = [beside(recording, changed(values), 0) for recording in recordings]
        return sum(
            b.ttft_error + b.latency_error + 5 * (np.log(b.ttft) ** 2 + np.log(b.latency) ** 2)
            for b in each
        )

    begin = (1.0, profile.constants.p6 * 1e5)
    found = minimize(off, begin, method="Nelder-Mead", options={"maxfev": 60})
    return changed(found.x)


def main() -> int:
    parser = argparse.ArgumentParser(description="recorded runs beside the simulator")
    parser.add_argument("--fit", action="store_true", help="fit the even halves first")
    args = parser.parse_args()
    profile = load_profile(str(PROFILE))
    recordings = {rate: read(path) for rate, path in RECORDS.items()}
    if args.fit:
        profile = fit(profile, list(recordings.values()))
        print(f"first_token_s {profile.first_token_s:.4g}, p6 {profile.constants.p6:.4g}\n")
    print("| requests/s | tokens/s | latency, mean | p99 | TTFT, mean | each latency | each TTFT |")
    print("|---|---|---|---|---|---|---|")
    met = True
    for rate, recording in recordings.items():
        b = beside(recording, profile, 1)
        met &= b.within
        ratios = " | ".join(f"{value:.2f}" for value in b[:4])
        print(f"| {rate} | {ratios} | {b.latency_error:.0%} | {b.ttft_error:.0%} |")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
