"""What a pipeline of stages does: vLLM's queue of batches, simulated batch by batch.

    python benchmarks/planner/pipelines.py

The planner reckons with a pipelined instance as with any: p1..p9 of ``planner.further_profiles``,
one step after another. Here its batches are simulated one by one, by the rules of vLLM 0.32's
engine core (v1/engine/core.py:698, step_with_batch_queue, and v1/core/sched/scheduler.py): as many
batches in flight as stages; a new one is made as soon as there is room, of all that is not in
flight, decoding sequences first, prompts in chunks of what is left of 2048 tokens; a prompt's next
chunk does not wait for the one before it; a stage takes batches in their order. A stage's time is
its share of the layers' by the same constants, and what the engine adds to a step.

Printed: tokens/s of both, always with enough to do, and BUBBLES as fitted to the simulation. Exit
code 1 when one of them is off by more than ``UNCERTAINTY``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import deque
from dataclasses import dataclass

import numpy as np

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.files.accelerator_catalogue import accelerator
from hetero_gateway.files.model_cards import model_card
from hetero_gateway.files.trace import CHAT_MIX
from hetero_gateway.planner import further_profiles
from hetero_gateway.planner.further_profiles import pipelined_profile
from hetero_gateway.planner.roofline import roofline_profile
from hetero_gateway.planner.sizes import Size
from hetero_gateway.sim.alone import Engines, Mix, run_alone
from hetero_gateway.sim.engine import WATERMARK
from hetero_gateway.sim.workload import LogNormal, LogNormalLengths

BUDGET = 2048
MIXES = {
    "chat": CHAT_MIX,
    "long prompts": LogNormalLengths(LogNormal(3000, 0.5, 7000), LogNormal(120, 0.6, 1000)),
    "long answers": LogNormalLengths(LogNormal(200, 0.7, 1000), LogNormal(900, 0.5, 3000)),
}
# Accelerator, model, tensor parallelism, stages, KV tokens.
CASES = [
    ("L4", "Llama-3.1-8B", 1, 2, 60_000),
    ("L4", "Llama-3.1-8B", 1, 4, 200_000),
    ("L40S", "Llama-3.3-70B", 1, 4, 60_000),
    ("L40S", "Llama-3.3-70B", 2, 4, 300_000),
    ("A100-80GB-SXM", "Llama-3.3-70B", 1, 2, 40_000),
    ("H100", "Llama-3.3-70B", 1, 4, 350_000),
    ("A10G", "Qwen2.5-32B", 1, 8, 250_000),
]


@dataclass(slots=True, eq=False)
class Sequence:
    prompt: int
    output: int
    scheduled: int = 0  # tokens of the prompt in a batch, or computed
    emitted: int = 0
    busy: bool = False  # in flight, and nothing more of it can be


def batch_s(c: Constants, prompts: list[tuple[int, int]], decodes: int, cached: int) -> float:
    """A step of the whole model, as ``sim.engine`` has it: (tokens, computed before) of prompts."""
    prefill = decode = 0.0
    if prompts:
        n = sum(tokens for tokens, _ in prompts)
        pairs = sum(u * (done + u / 2) for u, done in prompts)
        prefill = c.p1 * n + c.p2 * len(prompts) + c.p3 * n / len(prompts) + c.p4 + c.p9 * pairs
    if decodes:
        decode = c.p5 * cached + c.p6 * decodes + c.p7 * cached / decodes + c.p8
    return prefill + decode - (min(c.p4, c.p8) if prompts and decodes else 0.0)


def simulate(base: Profile, pipelined: Profile, stages: int, mix: Mix, requests: int) -> float:
    """Prompt and output tokens/s of the queue of batches, in its stride."""
    c, most, kv_tokens = base.constants, base.max_num_seqs, base.kv_capacity_tokens
    # What is not the layers': the rounds of the profile have it P times, a stage once.
    uneven = 1 + further_profiles.UNEVEN * math.log2(stages)
    extra_s = (pipelined.constants.p8 - c.p8 * uneven) / stages
    half = int(min(most, kv_tokens / mix.held_tokens))
    prompt, output = mix.requests(half, requests)
    waiting = deque(map(Sequence, prompt.tolist(), output.tolist()))
    running: list[Sequence] = []
    free, now = float(kv_tokens), 0.0
    stage_free = [0.0] * stages
    flying: deque[tuple[float, list[Sequence]]] = deque()
    stamps: list[float] = []
    while waiting or running:
        batch: list[tuple[Sequence, int]] = []
        if len(flying) < stages:
            budget = BUDGET
            idle = [each for each in running if not each.busy]
            evicted = False
            while len(idle) > free and len(idle) > 1:
                newest = idle.pop()
                running.remove(newest)
                free += newest.prompt + newest.emitted
                again = Sequence(newest.prompt + newest.emitted, newest.output - newest.emitted)
                waiting.appendleft(again)
                evicted = True
            for each in idle:
                if not budget:
                    break
                left = each.prompt - each.scheduled
                tokens = min(budget, left) or 1
                free -= left == 0
                batch.append((each, tokens))
                budget -= tokens
            while waiting and budget and len(running) < most and not evicted:
                each = waiting[0]
                if each.prompt > free - (WATERMARK * kv_tokens if running else 0):
                    break
                free -= each.prompt
                running.append(waiting.popleft())
                tokens = min(budget, each.prompt)
                batch.append((each, tokens))
                budget -= tokens
        if batch:
            prompts = [(n, s.scheduled) for s, n in batch if s.scheduled < s.prompt]
            decoding = [s for s, _ in batch if s.scheduled >= s.prompt]
            cached = sum(s.prompt + s.emitted for s in decoding)
            each_s = (batch_s(c, prompts, len(decoding), cached)) / stages + extra_s
            at = now
            for i in range(stages):
                at = stage_free[i] = max(at, stage_free[i]) + each_s
            emitting = []
            for s, n in batch:
                s.scheduled = min(s.prompt, s.scheduled + n)
                s.busy = s.scheduled >= s.prompt
                if s.busy:
                    emitting.append(s)
            flying.append((at, emitting))
            continue
        now, done = flying.popleft()
        for s in done:
            s.emitted += 1
            s.busy = False
            stamps.append(now)
            if s.emitted >= s.output:
                free += s.prompt + s.output - 1
                running.remove(s)
    times = np.array(stamps)
    # From when the first batch is through to long before it runs empty.
    low, high = times[int(0.25 * times.size)], times[int(0.7 * times.size)]
    inside = ((times >= low) & (times < high)).sum()
    return float(inside / (high - low) * mix.tokens_per_output_token)


def case(card: str, name: str, t: int, stages: int, kv_tokens: int) -> tuple[Profile, Profile]:
    """The profile without stages, and with."""
    device, model = accelerator(card), model_card(name)
    base = roofline_profile(device, model, t, 256, kv_tokens)
    return base, pipelined_profile(base, model, device, Size(t, stages), None)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    worst, wanted = 0.0, []
    print(f"{'accelerator':14} {'model':14} {'size':8} {'mix':13} {'planner':>8} {'queue':>8}")
    for card, name, t, stages, kv_tokens in CASES:
        for title, lengths in MIXES.items():
            mix = Mix.of(lengths, 1)
            base, profile = case(card, name, t, stages, kv_tokens)
            size = Size(t, stages)
            own = run_alone(profile, mix, Engines(), 1500)
            assert own is not None
            queue = simulate(base, profile, stages, mix, max(1500, 5 * round(own.batch)))
            error = own.tokens_per_s / queue - 1
            worst = max(worst, abs(error))
            best = fitted(base, card, name, size, mix, queue)
            wanted.append(best)
            print(
                f"{card:14} {name:14} tp{size!s:6} {title:13} {own.tokens_per_s:8.0f} {queue:8.0f} "
                f"{error:+7.1%}  {best:.2f}"
            )
    used = further_profiles.BUBBLES
    print(f"BUBBLES: {np.mean(wanted):.2f} ± {np.std(wanted):.2f}, {used} is used")
    return int(worst > further_profiles.UNCERTAINTY)


def fitted(base: Profile, card: str, name: str, size: Size, mix: Mix, queue: float) -> float:
    """The share that makes the profile as fast as the queue; 0 or 1 where none does."""
    low, high = 0.0, 1.0
    kept = further_profiles.BUBBLES
    for _ in range(5):
        middle = (low + high) / 2
        further_profiles.BUBBLES = middle
        profile = pipelined_profile(base, model_card(name), accelerator(card), size, None)
        own = run_alone(profile, mix, Engines(), 800)
        assert own is not None
        low, high = (middle, high) if own.tokens_per_s > queue else (low, middle)
    further_profiles.BUBBLES = kept
    return (low + high) / 2


if __name__ == "__main__":
    sys.exit(main())
