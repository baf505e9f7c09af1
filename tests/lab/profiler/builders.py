"""Samples of an engine with planted constants, and their fit."""

from itertools import product

import numpy as np

from hetero_gateway.core.costs.cost_model import decode_time_s, prefill_time_s
from hetero_gateway.core.costs.fitting import Fit, Sample, fit
from hetero_gateway.core.costs.profile import Constants

PLANTED = Constants(1e-4, 1e-3, 1e-5, 2e-2, 1e-7, 1e-4, 2e-7, 2e-2)


def measured(seed: int = 0, noise: float = 0.02) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        Sample(
            b,
            i,
            o,
            prefill_time_s(PLANTED, b, i) * (1 + noise * rng.normal()),
            decode_time_s(PLANTED, b, i, o - 1) * (1 + noise * rng.normal()),
        )
        for b, i, o in product((1, 4, 16, 64), (64, 512, 2048), (9, 65))
    ]


def fit_of(samples: list[Sample]) -> Fit:
    return fit(samples, rng=np.random.default_rng(0), resamples=40)
