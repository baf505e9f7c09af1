"""Rooflines beside runs of vLLM that others have published, on many accelerators.

    python benchmarks/planner/published_runs.py [--only RTX4090-24GB] [RUNS.csv]

``published_runs.csv`` says what the columns are, and where each run is from. No profile is used:
memory, slots, batches and times are the planner's own, from data sheets. Each run is simulated as
it was made; where lengths or arrivals are drawn, with three seeds. Printed, as Markdown, is
simulated over measured: time to a first token, time per further token, requests/s.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.planner.one_engine import times_of
from hetero_gateway.core.costs.arrays import FloatArray, Integers
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.accelerator_catalogue import accelerator
from hetero_gateway.files.checkpoints.shape import model_from_config
from hetero_gateway.files.model_cards import model_card
from hetero_gateway.planner.memory import EngineOptions, StartUp
from hetero_gateway.planner.model_shape import ModelShape
from hetero_gateway.planner.roofline import roofline_profile
from hetero_gateway.sim.workload import gamma_arrivals

ROOT = Path(__file__).resolve().parents[2]
RUNS = Path(__file__).with_name("published_runs.csv")
CONFIGS = ROOT / "tests/planner/published_models.json"
SEEDS = 3
# What is known of ShareGPT's lengths: log-normal, nearly, with these spreads; vLLM's benchmark
# leaves out what is longer.
PROMPT_SIGMA, OUTPUT_SIGMA, LONGEST = 1.2, 1.1, 1024


class Figures(NamedTuple):
    """Means over a run's requests, s, and requests/s of all of it; nan: not published."""

    ttft_s: float
    tpot_s: float
    requests_per_s: float


class Run(NamedTuple):
    """A published run, and the same simulated."""

    row: dict[str, str]
    measured: Figures
    simulated: Figures


def read(path: Path) -> list[dict[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def shape_of(name: str, stored: str) -> ModelShape:
    """A built-in card, or a model of the tests. ConfigError: there is no such model."""
    told = f"{name}-{stored.upper()}" if stored else name
    try:
        return model_card(told)
    except ConfigError:
        config = json.loads(CONFIGS.read_text(encoding="utf-8")).get(name, {}).get("config")
        if config is None:
            raise
        quantization = {"quant_method": "fp8"} if stored else None
        return model_from_config(config, name=told, quantization=quantization)


def spread(mean: float, sigma: float, count: int, rng: np.random.Generator) -> Integers:
    """Log-normal lengths of this mean, cut at ``LONGEST``, and moved so that it stays the mean."""
    drawn = rng.lognormal(0.0, sigma, count)
    scale = mean / drawn.mean()
    for _ in range(20):
        scale *= mean / np.clip(drawn * scale, 1, LONGEST).mean()
    lengths: Integers = np.round(np.clip(drawn * scale, 1, LONGEST)).astype(np.int64)
    return lengths


def run_engine(
    profile: Profile,
    budget: int,
    prompt: Integers,
    output: Integers,
    arrival_s: FloatArray,
    streams: int,
    *,
    cached: bool,
) -> Figures:
    """One engine: requests as they arrive, at most ``streams`` of them at a time."""
    sent_s, first_s, end_s = times_of(
        profile, budget, prompt, output, arrival_s, streams, cached=cached
    )
    several = output > 1
    tpot_s = (end_s - first_s)[several] / (output[several] - 1)
    took_s = float(end_s.max() - arrival_s[0]) + profile.first_token_s
    return Figures(
        float((first_s - sent_s).mean()) + profile.first_token_s,
        float(tpot_s.mean()),
        prompt.size / took_s,
    )


def simulated(row: dict[str, str]) -> Figures:
    """A row's run, in the mean over seeds."""
    device, t = accelerator(row["accelerator"]), int(row["cards"])
    model, count = shape_of(row["model"], row["stored"]), int(row["requests"])
    kind, _, number = row["load"].partition(" ")
    options = EngineOptions(max_model_len=8192, vllm_version=row["vllm"])
    capacity = StartUp(model, device, t, options).memory().kv_capacity_tokens
    profile = roofline_profile(
        device, model, t, options.sequences(device), capacity, plans_ahead=options.plans_ahead
    )
    found = []
    for seed in range(SEEDS if row["spread"] or kind == "rate" else 1):
        rng = np.random.default_rng(seed)
        prompt = np.full(count, int(row["prompt"]))
        output = np.full(count, int(row["output"]))
        if row["spread"]:
            prompt = spread(float(row["prompt"]), PROMPT_SIGMA, count, rng)
            output = spread(float(row["output"]), OUTPUT_SIGMA, count, rng)
        arrival_s, streams = np.zeros(count), count
        if kind == "rate":
            arrival_s = gamma_arrivals(count, float(number), 1.0, rng)
        elif kind == "streams":
            streams = int(number)
        found.append(
            run_engine(
                profile, options.batched_tokens(device), prompt, output, arrival_s, streams,
                cached=bool(row["cached"]),
            )
        )  # fmt: skip
    return Figures(*np.mean(found, axis=0).tolist())


def measured(row: dict[str, str]) -> Figures:
    ttft, tpot, rate = (
        float(row[k]) if row[k] else math.nan for k in ("ttft_ms", "tpot_ms", "requests_per_s")
    )
    return Figures(ttft / 1e3, tpot / 1e3, rate)


def table(runs: Sequence[Run]) -> list[str]:
    """A line for each accelerator and number of cards, with the range over models and loads."""
    lines = ["| | loads | TTFT | TPOT | requests/s |", "|---|---|---|---|---|"]
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.row["accelerator"], run.row["cards"]), []).append(run)
    for (name, cards), of in groups.items():
        cells = [_range([r.simulated[i] / r.measured[i] for r in of]) for i in range(3)]
        which = f"{cards} × {name}" if cards != "1" else name
        lines.append(f"| {which} | {_loads(of)} | {' | '.join(cells)} |")
    return lines


def _loads(runs: Sequence[Run]) -> str:
    """As "rate 1 to 32", "all"."""
    of: dict[str, set[int]] = {}
    for run in runs:
        kind, _, number = run.row["load"].partition(" ")
        of.setdefault(kind, set()).update([int(number)] if number else [])
    told = []
    for kind, numbers in of.items():
        ends = dict.fromkeys((min(numbers), max(numbers))) if numbers else ()
        told.append(f"{kind} {' to '.join(map(str, ends))}".strip())
    return ", ".join(told)


def _range(ratios: Sequence[float]) -> str:
    told = [ratio for ratio in ratios if math.isfinite(ratio)]
    if not told:
        return "–"
    low, high = f"{min(told):.2f}", f"{max(told):.2f}"
    return low if low == high else f"{low} to {high}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="rooflines beside published runs")
    parser.add_argument("runs", nargs="?", type=Path, default=RUNS, metavar="RUNS.csv")
    parser.add_argument("--only", help="this accelerator's, a line for each run")
    args = parser.parse_args(argv)
    rows = [row for row in read(args.runs) if args.only in (None, row["accelerator"])]
    runs = [Run(row, measured(row), simulated(row)) for row in rows]
    for line in [f"{r.row['model']} {table([r])[2]}" for r in runs] if args.only else table(runs):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
