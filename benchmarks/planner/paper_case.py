"""The paper's first experiment as a plan: 8 V100s, Llama-3-8B, t = 1, 2, 4 or 8.

    python benchmarks/planner/paper_case.py

By lengths and link, tokens/s of the machine for each equal layout: Algorithm 1 as printed with the
paper's KV count (2·l·h), the same with grouped-query attention, unpadded, and the planner's
simulation of the whole machine behind round-robin (the paper sends in turn) with prefill-first
steps; at last the layout that the planner would choose of all, unequal ones among them.
docs/evidence/planner.md quotes it. Runs in less than a minute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.files.plan_request import load_requests
from hetero_gateway.files.profile_file import builtin_profiles
from hetero_gateway.planner.batch_estimate import Estimator, estimate_throughput
from hetero_gateway.planner.layouts import describe
from hetero_gateway.planner.plan import Machine
from hetero_gateway.planner.question import Question, System, Trials
from hetero_gateway.planner.search import search
from hetero_gateway.sim.alone import Engines, Mix, run_alone
from hetero_gateway.sim.workload import LogNormal, LogNormalLengths

ROOT = Path(__file__).resolve().parents[2]
# docs/evidence/reproduction.md says where these are from.
LENGTHS = {
    "conversations": LogNormalLengths(LogNormal(1758, 0.76, 7168), LogNormal(374, 0.56, 1024)),
    "first turns": LogNormalLengths(LogNormal(34, 1.26, 1023), LogNormal(196, 0.55, 1046)),
}
LINKS = {"NVLink2": "V100-32GB-NVLink2", "PCIe3": "V100-32GB-PCIe3"}
SIZES = (1, 2, 4, 8)
ACCELERATORS = 8
PAPER_ORDER = "2 > 4 > 1 > 8"
# The paper draws 200 requests, twice; its order hangs on the draw, so here are more.
DRAWS, DRAWN = 20, 200
SIMULATED_REQUESTS = 12_000
# The paper's KV is 2·l·h without grouped-query attention: 32 heads where there are 8.
PRINTED_KV = 8 / 32


def estimates(
    profiles: Mapping[int, Profile],
    lengths: LogNormalLengths,
    estimator: Estimator,
    kv_share: float,
) -> dict[int, float]:
    """Algorithm 1's mean over the draws."""
    found: dict[int, list[float]] = {t: [] for t in SIZES}
    for seed in range(DRAWS):
        prompt, output = lengths.draw(DRAWN, np.random.default_rng(seed))
        for t in SIZES:
            capacity = int(kv_share * profiles[t].kv_capacity_tokens)
            profile = dataclasses.replace(profiles[t], kv_capacity_tokens=capacity)
            lists = prompt.tolist(), output.tolist()
            result = estimate_throughput(profile, *lists, estimator=estimator)
            assert result is not None
            found[t].append(ACCELERATORS // t * result.tokens_per_s)
    return {t: float(np.mean(values)) for t, values in found.items()}


def row(lengths: str, link: str, method: str, values: Mapping[int, float]) -> str:
    order = sorted(values, key=lambda t: -values[t])
    cells = " | ".join(f"{values[t]:.0f}" for t in SIZES)
    text = " > ".join(map(str, order))
    if text == PAPER_ORDER:
        text = f"**{text}**"
    return f"| {lengths} | {link} | {method} | {cells} | {text} |"


def main() -> None:
    request = load_requests(ROOT / "configs/clusters/plan-paper.yaml")[0]
    engines = Engines("prefill-first", 8192)
    print("| lengths | link | method | t=1 | t=2 | t=4 | t=8 | order |")
    print("|---|---|---|---|---|---|---|---|")
    chosen = []
    for name, lengths in LENGTHS.items():
        mix = Mix.of(lengths, 0)
        for link, accelerator in LINKS.items():
            found = builtin_profiles()
            profiles = {t: found[f"{accelerator}/Llama-3-8B/tp{t}"] for t in SIZES}
            for method, estimator, share in (
                ("Algorithm 1 as printed, KV as printed", "paper", PRINTED_KV),
                ("Algorithm 1 as printed", "paper", 1.0),
                ("Algorithm 1, unpadded", "unpadded", 1.0),
            ):
                values = estimates(profiles, lengths, estimator, share)
                print(row(name, link, method, values), flush=True)
            for method, share in (("simulated, KV as printed", PRINTED_KV), ("simulated", 1.0)):
                values = {}
                for t in SIZES:
                    profile = dataclasses.replace(
                        profiles[t], kv_capacity_tokens=int(share * profiles[t].kv_capacity_tokens)
                    )
                    alone = run_alone(profile, mix, engines)
                    assert alone is not None
                    count = ACCELERATORS // t
                    system = System(((profile, count),), count * alone.batch)
                    trials = Trials("round-robin", engines, SIMULATED_REQUESTS)
                    figures = trials.saturate(system, mix)
                    assert figures is not None
                    values[t] = figures.tokens_per_s
                print(row(name, link, method, values), flush=True)
            machine = Machine("v100-box", accelerator, ACCELERATORS)
            types = {
                (accelerator, t): dataclasses.replace(
                    request.question.types["V100-32GB-NVLink2", t],
                    accelerator=accelerator,
                    profile=profiles[t],
                )
                for t in SIZES
            }
            plan = search(Question((machine,), types, lengths, engines=engines))
            chosen.append(
                f"- {name}, {link}: {describe(plan.best.layouts['v100-box'])}"
                + "".join(f"; {note}" for note in plan.notes)
            )
    print("\nThe planner's choice, policy finish-time:\n")
    print("\n".join(chosen))


if __name__ == "__main__":
    main()
