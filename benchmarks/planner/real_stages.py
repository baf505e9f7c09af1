"""A real vLLM of two pipeline stages, beside one of one stage, the planner's rule and its queue.

    python benchmarks/planner/real_stages.py ENGINE_PYTHON [--mixes prompts,answers]

ENGINE_PYTHON: of the environment that scripts/real-vllm makes. The engine always has more requests
than seats. Each batch's processor time in each stage is noted, and replayed: as many batches in
flight as stages, each stage with a core to itself, nothing between them. So other programs on the
machine matter little. Printed are prompt and output tokens/s of that replay, of the planner's
profiles with constants fitted to the same batches, and of the queue of batches in pipelines.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

# As a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from real_vllm import servers

from benchmarks.planner import pipelines
from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.files.accelerator_catalogue import accelerator
from hetero_gateway.planner.further_profiles import pipelined_profile
from hetero_gateway.planner.model_shape import ModelShape
from hetero_gateway.planner.sizes import Size
from hetero_gateway.sim.alone import Engines, Mix, run_alone
from hetero_gateway.sim.workload import EvenLengths

ROOT = Path(__file__).resolve().parents[2]

Range = tuple[int, int]

SHAPE = ModelShape("tiny", 8, 1024, 16, 4, 64, 2048, 4096)
SEATS, MEASURED_S, FIRST_BATCHES = 32, 30, 60
# Prompt and output tokens, and those of a batch: less than the first prompts, as under any load,
# so that not all sequences are in one batch and stay there.
MIXES = {"prompts": ((64, 192), (20, 100), 512), "answers": ((16, 48), (60, 200), 256)}


def run(engine_python: str, stages: int, prompts: Range, outputs: Range, budget: int) -> np.ndarray:
    """(stages, batches, 3): prompts' tokens, sequences that decode, processor time in s."""
    env = os.environ | servers.ENGINE_ENV | {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in range(stages))}
    env |= {"PYTHONPATH": str(ROOT / "scripts")}
    model = {
        "hidden_size": SHAPE.hidden, "num_hidden_layers": SHAPE.layers,
        "vocab_size": SHAPE.vocabulary, "num_attention_heads": SHAPE.heads,
        "num_key_value_heads": SHAPE.kv_heads, "intermediate_size": SHAPE.intermediate,
    }  # fmt: skip
    asked = {"stages": stages, "shape": model, "prompts": prompts, "outputs": outputs}
    asked |= {"budget": budget, "seats": SEATS, "measured_s": MEASURED_S}
    asked |= {"dtype": servers.fast_dtype()}
    command = [engine_python, "-m", "real_vllm.stages_engine", json.dumps(asked)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("[[["))
    return np.array(json.loads(line))


def replayed(stages: np.ndarray) -> float:
    """Tokens/s with a core for each stage."""
    ends: list[float] = []
    free_s = [0.0] * len(stages)
    for i in range(stages.shape[1]):
        at = ends[i - len(stages)] if i >= len(stages) else 0.0
        for s in range(len(stages)):
            at = free_s[s] = max(at, free_s[s]) + stages[s, i, 2]
        ends.append(at)
    tokens = stages[0, FIRST_BATCHES:, :2].sum()
    return float(tokens / (ends[-1] - ends[FIRST_BATCHES - 1]))


def main() -> None:
    parser = argparse.ArgumentParser(description="stages of a real vLLM beside the planner's rule")
    parser.add_argument("engine_python", metavar="ENGINE_PYTHON")
    parser.add_argument("--mixes", default=",".join(MIXES))
    args = parser.parse_args()
    for title in args.mixes.split(","):
        prompts, outputs, budget = MIXES[title]
        one, two = (run(args.engine_python, stages, *MIXES[title]) for stages in (1, 2))
        whole = [each[:, FIRST_BATCHES:] for each in (one, two)]
        rows = np.concatenate([np.c_[each[0, :, :2], each[:, :, 2].sum(0)] for each in whole])
        weight = np.concatenate([np.full(each.shape[1], 1 / each.shape[1]) for each in whole])
        terms = np.c_[rows[:, :2], np.ones(len(rows))] * (weight / rows[:, 2])[:, None]
        p1, p6, p8 = nnls(terms, weight)[0]
        constants = Constants(p1=p1, p2=0, p3=0, p4=p8, p5=0, p6=p6, p7=0, p8=p8, p9=0)
        base = Profile("core", SHAPE.name, 1, constants, 200_000, SEATS)
        pipelined = pipelined_profile(base, SHAPE, accelerator("L4"), Size(1, 2), None)
        rng = np.random.default_rng(1)
        lengths = EvenLengths(*(rng.integers(a, b + 1, 2000) for a, b in (prompts, outputs)))
        mix, engines = Mix.of(lengths, 1), Engines(max_batched_tokens=budget)
        pipelines.BUDGET = budget
        planned = [run_alone(each, mix, engines, 1500).tokens_per_s for each in (base, pipelined)]
        queue = pipelines.simulate(base, pipelined, 2, mix, 1500)
        decodes = np.quantile(two[0, FIRST_BATCHES:, 1], (0.1, 0.5, 0.9))
        measured = replayed(one), replayed(two)
        print(f"{title}: batches of two stages decode {decodes} sequences (p10, p50, p90)")
        print(f"  two stages over one: measured {measured[1] / measured[0]:.2f}, planner "
              f"{planned[1] / planned[0]:.2f}, queue {queue / planned[0]:.2f}")  # fmt: skip
        print(f"  over measured: planner one {planned[0] / measured[0]:.2f}, two "
              f"{planned[1] / measured[1]:.2f}, queue {queue / measured[1]:.2f}")  # fmt: skip
        sys.stdout.flush()


if __name__ == "__main__":
    main()
