"""How a decode step of a real vLLM grows with its sequences: small mixtures beside a dense model.

    PYTHONPATH=src ENGINE_PYTHON scripts/real_vllm/experts.py

ENGINE_PYTHON: of the environment that scripts/real-vllm makes. Random weights, larger than the
processor's caches, and short prompts: a step reads weights, nearly. One engine at a time, on one
thread; a step is the processor time it takes (first quartile), so that other programs matter less.

Printed by sequences: the dense step over its step of one; experts awake in a layer, by the rule of
``ModelShape`` and as the router chose them; and a mixture's step over that of the dense model
of the same active width, by the rule (what it reads beyond the dense model's weights takes what the
dense step of one takes for as much) and as measured. No constant is fitted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from real_vllm import servers  # noqa: E402 - its directory was not on the path before

from hetero_gateway.planner.model_shape import ModelShape  # noqa: E402

HIDDEN, WIDTH, LAYERS, HEADS, KV_HEADS, VOCABULARY = 512, 1792, 4, 8, 2, 2048
TAKEN = 2  # experts of a token; a dense MLP is as wide as those together
SEQUENCES = (1, 2, 4, 8, 16, 32)
STEPS = 20


def shape(experts: int) -> ModelShape:
    """The model as the planner sees it; ``experts``: of a layer, 0: dense."""
    sizes = (LAYERS, HIDDEN, HEADS, KV_HEADS, HIDDEN // HEADS, VOCABULARY)
    if not experts:
        return ModelShape("", *sizes, WIDTH * TAKEN)
    return ModelShape("", *sizes, 0, False, True, LAYERS, experts, TAKEN, WIDTH)


def build(directory: str, experts: int) -> None:
    """Write it with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    if experts:
        sizes |= {"num_local_experts": experts, "num_experts_per_tok": TAKEN}
        model = MixtralForCausalLM(MixtralConfig(**sizes, intermediate_size=WIDTH))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=WIDTH * TAKEN))
    model.to(torch.bfloat16).save_pretrained(directory)


def measure(directory: str, rounds: int) -> list[tuple[float, float]]:
    """For each of ``SEQUENCES``: a step's processor time, s, and the experts awake in a layer."""
    from vllm import LLM, SamplingParams

    llm = LLM(directory, skip_tokenizer_init=True, dtype=servers.fast_dtype(), max_model_len=1024,
              enforce_eager=True, enable_prefix_caching=False,
              distributed_executor_backend="uni")  # fmt: skip
    gates = llm.apply_model(
        lambda model: [m for n, m in model.named_modules() if n[-5:] == ".gate"]
    )
    times: dict[int, list[float]] = {n: [] for n in SEQUENCES}
    awake: dict[int, list[int]] = {n: [] for n in SEQUENCES}
    sampling = SamplingParams(ignore_eos=True, max_tokens=STEPS + 12, detokenize=False)
    for n in SEQUENCES * rounds:
        for i in range(n):
            tokens = torch.randint(3, VOCABULARY, (8,)).tolist()
            llm.llm_engine.add_request(f"{i}", {"prompt_token_ids": tokens}, sampling)
        for step in range(STEPS + 6):
            began_s = time.process_time()
            llm.llm_engine.step()
            if step >= 6:
                times[n].append(time.process_time() - began_s)

        def count(_module: object, _inputs: object, output: torch.Tensor, n: int = n) -> None:
            awake[n].append(output[0].topk(TAKEN).indices.unique().numel())

        hooks = [gate.register_forward_hook(count) for gate in gates[0]]
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        for hook in hooks:
            hook.remove()
    return [(statistics.quantiles(times[n])[0], statistics.fmean(awake[n] or [0])) for n in times]


def run(experts: int, rounds: int) -> list[tuple[float, float]]:
    """``measure`` in a process of its own, since vLLM is made for one engine in each."""
    command = [sys.executable, __file__, "--experts", str(experts), "--rounds", str(rounds)]
    env = os.environ | servers.ENGINE_ENV
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return [(step_s, awake) for step_s, awake in json.loads(done.stdout.splitlines()[-1])]


def row(title: str, values: list[float]) -> None:
    print(f"{title:28}", *[f"{each:6.2f}" for each in values], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help=f"of {STEPS} steps at each number")
    parser.add_argument("--experts", type=int, help="measure one model; 0: the dense one")
    args = parser.parse_args()
    if args.experts is not None:
        with tempfile.TemporaryDirectory() as directory:
            build(directory, args.experts)
            print(json.dumps(measure(directory, args.rounds)))
        return
    row("sequences", [float(n) for n in SEQUENCES])
    dense, plain = run(0, args.rounds), shape(0)
    row("dense: step over one's", [step_s / dense[0][0] for step_s, _ in dense])
    weight_s = dense[0][0] / (plain.layer_weights + plain.output_weights)
    for experts in (8, 16):
        mixture, rule = run(experts, args.rounds), shape(experts)
        beyond = [rule.layer_weights_touched(n) - plain.layer_weights for n in SEQUENCES]
        expert_weights = LAYERS * rule.expert_weights
        row(f"{experts}: awake, by the rule", [TAKEN + each / expert_weights for each in beyond])
        row(f"{experts}: awake, as chosen", [awake for _, awake in mixture])
        by_rule = [1 + each * weight_s / d for each, (d, _) in zip(beyond, dense, strict=True)]
        row(f"{experts}: over dense, by the rule", by_rule)
        row(
            f"{experts}: over dense, measured",
            [m / d for (m, _), (d, _) in zip(mixture, dense, strict=True)],
        )


if __name__ == "__main__":
    main()
