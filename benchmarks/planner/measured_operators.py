"""The roofline's all-reduce over PCIe slots, and its experts, against published measurements.

    python benchmarks/planner/measured_operators.py

Printed: the roofline's time over the measured one, in Markdown. Tests hold the bounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence

from hetero_gateway.files.accelerator_catalogue import accelerator
from hetero_gateway.files.model_cards import model_card
from hetero_gateway.planner.roofline import all_reduce_s, step_times

# Milliseconds of one all-reduce of so many bfloat16 numbers by vLLM 0.14 and 0.24, as
# AIConfigurator measured them (Apache-2.0; systems/data/l40s and rtx_pro_6000_server, comm/vllm).
MEASURED_ALL_REDUCE_MS = {
    ("L40S", 2): {16384: 0.00741, 262144: 0.0321, 4194304: 0.450, 33554432: 3.542},
    ("L40S", 4): {16384: 0.02602, 262144: 0.219, 4194304: 3.322, 33554432: 27.24},
    ("L40S", 8): {16384: 0.04836, 262144: 0.4445, 4194304: 8.168, 33554432: 60.07},
    ("RTX-PRO-6000", 2): {16384: 0.00537, 262144: 0.0176, 4194304: 0.2445, 33554432: 1.844},
    ("RTX-PRO-6000", 4): {16384: 0.01576, 262144: 0.0765, 4194304: 0.462, 33554432: 3.556},
    ("RTX-PRO-6000", 8): {16384: 0.02978, 262144: 0.1563, 4194304: 0.6746, 33554432: 5.067},
}

# Microseconds of one layer's experts in bfloat16, by tokens: the same source, moe/vllm.
MEASURED_EXPERTS_US = {
    ("H100-SXM", "Qwen3-30B-A3B", 1): {8: 176, 64: 378, 256: 442, 1024: 546, 4096: 989, 8192: 1677},
    ("H100-SXM", "Qwen3-30B-A3B", 4): {8: 66, 64: 114, 256: 147, 1024: 184, 4096: 408, 8192: 709},
    ("H100-SXM", "Mixtral-8x7B", 2): {8: 487, 64: 564, 256: 589, 1024: 816, 4096: 2504, 8192: 5005},
    ("A100-80GB-SXM", "Qwen3-30B-A3B", 2): {8: 177, 64: 355, 256: 534, 1024: 689, 4096: 1482},
    ("A100-80GB-SXM", "Mixtral-8x7B", 4): {8: 393, 64: 469, 256: 548, 1024: 1230, 4096: 4340},
    ("L40S", "Qwen3-30B-A3B", 2): {8: 325, 64: 784, 256: 952, 1024: 1099, 4096: 1726, 8192: 2795},
    ("L40S", "Mixtral-8x7B", 4): {8: 987, 64: 1079, 256: 1128, 1024: 1674, 4096: 4224},
}


def all_reduce_ratios(card: str, t: int) -> dict[int, float]:
    """By numbers that are summed."""
    hidden = 4096
    model = dataclasses.replace(model_card("Llama-3-8B"), hidden=hidden)
    return {
        numbers: all_reduce_s(accelerator(card), model, t, numbers // hidden) * 1e3 / measured
        for numbers, measured in MEASURED_ALL_REDUCE_MS[card, t].items()
    }


def expert_ratios(card: str, name: str, t: int) -> dict[int, float]:
    """By tokens of a step."""
    model, device = model_card(name), accelerator(card)
    none = dataclasses.replace(model, moe_layers=0, dense_layers=0, caches=model.layer_caches)
    found = {}
    for tokens, us in MEASURED_EXPERTS_US[card, name, t].items():
        # One token a sequence: the rest of the step is the same in both.
        both = [step_times(device, m, t)[1](tokens, 1) for m in (model, none)]
        found[tokens] = (both[0] - both[1]) / model.layers * 1e6 / us
    return found


def print_table(head: str, rows: Mapping[str, Mapping[int, float]], columns: Sequence[int]) -> None:
    print(f"| {head} | " + " | ".join(f"{n}" for n in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name, ratios in rows.items():
        cells = (f"{ratios[n]:.2f}" if n in ratios else "" for n in columns)
        print(f"| {name} | " + " | ".join(cells) + " |")
    print()


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    reduces = {f"{c}, t = {t}": all_reduce_ratios(c, t) for c, t in MEASURED_ALL_REDUCE_MS}
    print_table("all-reduce of so many numbers", reduces, (16384, 262144, 4194304, 33554432))
    experts = {f"{m}, {c}, t = {t}": expert_ratios(c, m, t) for c, m, t in MEASURED_EXPERTS_US}
    print_table("experts of a layer, tokens", experts, (8, 64, 256, 1024, 4096, 8192))
    return 0


if __name__ == "__main__":
    sys.exit(main())
