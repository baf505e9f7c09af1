"""Rooflines beside vLLM as others measured it: mean latency and TTFT at steady rates.

    python benchmarks/planner/measured_stages.py STAGES.csv

A row of STAGES.csv is a stage of constant arrivals: run, model, accelerator (absent: H100 SXM), tp,
max_model_len, max_num_batched_tokens, max_num_seqs, rate, prompt_mean, output_tokens,
latency_mean_s, ttft_mean_s. Prompts repeat, so all but their last block is in the engine's prefix
cache. No profile is used: memory and times are the planner's. Printed, as Markdown, is simulated
over measured. Exit code 1 where the mean latency is off by more than 10 % in the mean or 20 % in
the worst, or the mean TTFT by more than 20 % in the mean.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.planner.one_engine import times_of
from hetero_gateway.files.accelerator_catalogue import accelerator
from hetero_gateway.files.model_cards import model_card
from hetero_gateway.planner.memory import EngineOptions, StartUp
from hetero_gateway.planner.roofline import roofline_profile

# By what the publishers call the checkpoints. CodeLlama-34B is a Llama-2-70B of fewer and narrower
# layers, by its config.json.
SHAPES = {
    "Llama-2-7b-hf": model_card("Llama-2-7B"),
    "Llama-2-70b-hf": model_card("Llama-2-70B"),
    "CodeLlama-34b-Instruct-hf": dataclasses.replace(
        model_card("Llama-2-70B"), name="CodeLlama-34B", layers=48, intermediate=22016
    ),
    "Mixtral-8x7B-v0.1": model_card("Mixtral-8x7B"),
}
DURATION_S = 60.0


class Stage(NamedTuple):
    """``latency``, ``ttft``: simulated over measured means; ``held``: its queue does not grow."""

    run: str
    rate: float
    latency: float
    ttft: float
    held: bool


def run_stage(row: dict[str, str], duration_s: float = DURATION_S) -> Stage:
    """Simulate a stage; its first third only fills the engine."""
    name = row["model"].split("/")[-1]
    model, t = SHAPES.get(name) or model_card(name), int(row["tp"])
    device = accelerator(row.get("accelerator") or "H100-80GB-SXM")
    budget, seqs = int(row["max_num_batched_tokens"]), int(row["max_num_seqs"])
    options = EngineOptions(
        max_model_len=int(row["max_model_len"]), max_num_seqs=seqs, max_num_batched_tokens=budget
    )
    capacity = StartUp(model, device, t, options).memory().kv_capacity_tokens
    profile = roofline_profile(device, model, t, seqs, capacity)
    prompt, output = round(float(row["prompt_mean"])), int(row["output_tokens"])
    rate = float(row["rate"])
    arrival_s = np.arange(0.0, duration_s, 1 / rate)
    lengths = (np.full(arrival_s.size, tokens) for tokens in (prompt, output))
    _, first_s, end_s = times_of(profile, budget, *lengths, arrival_s, cached=True)
    third, latency_s = arrival_s.size // 3, end_s - arrival_s
    held = latency_s[2 * third :].mean() < 1.1 * latency_s[third : 2 * third].mean()
    return Stage(
        row["run"],
        rate,
        float((latency_s[third:].mean() + profile.first_token_s) / float(row["latency_mean_s"])),
        float(
            ((first_s - arrival_s)[third:].mean() + profile.first_token_s)
            / float(row["ttft_mean_s"])
        ),
        bool(held),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="rooflines beside measured stages")
    parser.add_argument("stages", type=Path, metavar="STAGES.csv")
    args = parser.parse_args()
    with args.stages.open(encoding="utf-8") as file:
        found = [run_stage(row) for row in csv.DictReader(file)]
    print("| run | requests/s | latency, mean | TTFT, mean | |\n|---|---|---|---|---|")
    for s in found:
        print(
            f"| {s.run} | {s.rate:g} | {s.latency:.2f} | {s.ttft:.2f} | "
            f"{'' if s.held else 'not held'} |"
        )
    latency = [abs(s.latency - 1) for s in found]
    ttft = float(np.mean([abs(s.ttft - 1) for s in found]))
    print(
        f"\nlatency off by {np.mean(latency):.1%} in the mean, {max(latency):.1%} at most; ", end=""
    )
    print(f"TTFT by {ttft:.1%} in the mean")
    met = np.mean(latency) <= 0.1 and max(latency) <= 0.2 and ttft <= 0.2
    return 0 if met and all(s.held for s in found) else 1


if __name__ == "__main__":
    sys.exit(main())
