"""The planner's rooflines held against the built-in profiles, and the fit of their shares.

    python benchmarks/planner/roofline.py

Prints, as Markdown: the shares fitted to the profiles of measured operators, which those in
``planner.accelerators`` and ``planner.roofline`` should be; and for every built-in profile the
roofline's step times over its own, mean and standard deviation over a grid of batches and lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np

from hetero_gateway.core.costs.cost_model import decode_step_time_s, prefill_time_s
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.files.accelerator_catalogue import accelerator
from hetero_gateway.files.model_cards import model_card
from hetero_gateway.files.profile_file import builtin_profiles
from hetero_gateway.planner import roofline
from hetero_gateway.planner.accelerators import (
    COMPUTE_EFFICIENCY,
    LAYER_OVERHEAD_S,
    MEMORY_EFFICIENCY,
)

# compute, memory, link (shares); a layer's small kernels, the start of an all-reduce (seconds).
NAMES = ("compute", "memory", "link", "layer", "all-reduce start")
SHARES = (
    COMPUTE_EFFICIENCY,
    MEMORY_EFFICIENCY,
    roofline.LINK_EFFICIENCY,
    LAYER_OVERHEAD_S,
    roofline.ALL_REDUCE_START_S,
)
BOUNDS = ((0.3, 0.4, 0.1, 0.0, 0.0), (1.0, 1.0, 1.0, 1e-4, 1e-4))


def ratios(
    profile: Profile, shares: tuple[float, ...], *, fitting: bool = False
) -> Iterator[np.ndarray]:
    """Roofline over profile, of the prefills and of the decode steps of the grid."""
    compute, memory, link, layer, start = shares
    device = accelerator(profile.gpu)
    device = dataclasses.replace(
        device,
        # A card that has a share of its own keeps it, in proportion; what engines show of its
        # memory and small kernels is not in operators, to which shares are fitted.
        compute_efficiency=device.compute_efficiency * compute / COMPUTE_EFFICIENCY,
        memory_efficiency=memory if fitting else device.memory_efficiency,
        layer_overhead_s=layer if fitting else device.layer_overhead_s,
    )
    with patch.multiple(roofline, LINK_EFFICIENCY=link, ALL_REDUCE_START_S=start):
        times = roofline.step_times(device, model_card(profile.model), profile.tensor_parallel)
        shapes = roofline.grid(profile.kv_capacity_tokens, profile.max_num_seqs)
        known = (prefill_time_s, decode_step_time_s)
        for guess_s, known_s, which in zip(times, known, shapes, strict=True):
            yield np.array([guess_s(*s) / known_s(profile.constants, *s) for s in which])


def fit(profiles: list[Profile]) -> tuple[float, ...]:
    """Shares with the least squares of the logarithms, each profile's grid counting as one."""
    from scipy.optimize import least_squares  # 300 modules

    def off(shares: np.ndarray) -> np.ndarray:
        return np.concatenate(
            [
                np.log(r) / np.sqrt(len(r))
                for p in profiles
                for r in ratios(p, tuple(shares), fitting=True)
            ]
        )

    scale = [0.1, 0.1, 0.1, 1e-5, 1e-5]
    return tuple(float(x) for x in least_squares(off, SHARES, bounds=BOUNDS, x_scale=scale).x)


def main() -> None:
    profiles = list(builtin_profiles().values())
    measured = [p for p in profiles if str(p.source["note"]).startswith("measured-ops;")]
    print("| share | fitted | in the planner |\n|---|---|---|")
    for name, fitted, used in zip(NAMES, fit(measured), SHARES, strict=True):
        print(f"| {name} | {fitted:.3g} | {used:.3g} |")
    print("\n| profile | from | prefill | decode |\n|---|---|---|---|")
    for profile in profiles:
        cells = [f"{r.mean():.2f} ± {r.std():.2f}" for r in ratios(profile, SHARES)]
        print(f"| {profile.name} | {profile.source['note'].split(';')[0]} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
