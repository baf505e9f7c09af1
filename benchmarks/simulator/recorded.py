"""Recorded runs of vLLM on an H100 beside the simulator: half of their requests fit, half judge.

    python benchmarks/simulator/recorded.py
    python benchmarks/simulator/recorded.py --fit
    python benchmarks/simulator/recorded.py --http

``--fit`` looks for ``first_token_s`` and p6 by the requests with even numbers of both records; what
it finds should be in configs/profiles/h100-80gb-llama-3.1-8b-tp1-served.yaml. Printed, as Markdown,
are those with odd numbers: measured over simulated as placed, and the mean of each request's
relative error. With ``--http`` it is ``emulate`` that is held against the records: every request is
sent to it as it was placed, as a stream, in virtual time, so that nothing depends on the machine.
Exit code 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hetero_gateway.cli.against import recording_of
from hetero_gateway.core.costs.arrays import FloatArray
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.files.recorded_run import read_recorded_run
from hetero_gateway.files.trace import LoadRequest
from hetero_gateway.lab.emulator.settings import EmulatorSettings
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind, filler_pool
from hetero_gateway.lab.load.replay import replay
from hetero_gateway.sim.recorded import Recording, run_as_placed
from tests.fakes.clock import VirtualClock
from tests.fakes.emulated import emulated

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


class Times(NamedTuple):
    """Of a record's requests, (N,): when first tokens and ends came, s, as the record counts."""

    first_s: FloatArray
    end_s: FloatArray


# How a record is run again.
Again = Callable[[Recording, Profile], Times]


def simulated(recording: Recording, profile: Profile) -> Times:
    found = run_as_placed([profile], recording.placements, max_batched_tokens=MAX_BATCHED_TOKENS)
    return Times(found.first_token_s, found.finish_s)


async def over_http(recording: Recording, profile: Profile, most: int | None = None) -> Times:
    """As an emulated instance answers it; only the first ``most`` requests are sent.

    RuntimeError: a request failed, or had other lengths.
    """
    placed = recording.placements
    order = np.argsort(placed.placed_s, kind="stable")[:most]
    columns = (placed.placed_s, placed.prompt_tokens, placed.output_tokens)
    load = [LoadRequest(*row) for row in zip(*(c[order].tolist() for c in columns), strict=True)]
    settings = EmulatorSettings(
        profile, max_num_batched_tokens=MAX_BATCHED_TOKENS, prefix_caching=False
    )
    maker = BodyMaker(profile.model, PromptKind.TOKEN_IDS, True, 4.0, filler_pool())
    async with emulated(settings) as (url, _):
        records = await replay(parse_target(url), load, maker)
    times = Times(*(np.full(placed.placed_s.size, np.nan) for _ in Times._fields))
    for i, record, asked in zip(order.tolist(), records, load, strict=True):
        if record.error or record.first_s is None or record.output_tokens != asked.output_tokens:
            raise RuntimeError(f"request {i}: {record.error or record}")
        # What was sent late, was late by the load generator.
        late_s = record.sent_s - asked.due_s
        times.first_s[i], times.end_s[i] = record.first_s - late_s, record.end_s - late_s
    return times


def emulated_in_virtual_time(recording: Recording, profile: Profile) -> Times:
    with closing(VirtualClock()) as clock, pytest.MonkeyPatch.context() as patch:
        clock.install(patch)
        with asyncio.Runner(loop_factory=clock.new_loop) as runner:
            return runner.run(over_http(recording, profile))


def beside(recording: Recording, found: Times, parity: int) -> Beside:
    """The requests with numbers of that parity; all of them run."""
    chosen = np.arange(recording.arrival_s.size) % 2 == parity
    ttft_s = (recording.first_token_s - recording.arrival_s)[chosen]
    latency_s = (recording.finish_s - recording.arrival_s)[chosen]
    simulated_ttft_s = (found.first_s - recording.arrival_s)[chosen]
    simulated_s = (found.end_s - recording.arrival_s)[chosen]
    return Beside(
        # Of all: tokens over the time to the last completion.
        float(np.max(found.end_s) / np.max(recording.finish_s)),
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
        changed_to = changed(values)
        each = [beside(recording, simulated(recording, changed_to), 0) for recording in recordings]
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
    parser.add_argument("--http", action="store_true", help="emulated over HTTP, not simulated")
    args = parser.parse_args()
    profile = load_profile(str(PROFILE))
    recordings = {rate: read(path) for rate, path in RECORDS.items()}
    if args.fit:
        profile = fit(profile, list(recordings.values()))
        print(f"first_token_s {profile.first_token_s:.4g}, p6 {profile.constants.p6:.4g}\n")
    print("| requests/s | tokens/s | latency, mean | p99 | TTFT, mean | each latency | each TTFT |")
    print("|---|---|---|---|---|---|---|")
    met = True
    again: Again = emulated_in_virtual_time if args.http else simulated
    for rate, recording in recordings.items():
        b = beside(recording, again(recording, profile), 1)
        met &= b.within
        ratios = " | ".join(f"{value:.2f}" for value in b[:4])
        print(f"| {rate} | {ratios} | {b.latency_error:.0%} | {b.ttft_error:.0%} |")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
