"""The time of a first token besides its steps, from short prompts. No clock and no socket here.

Two lines, both through the TTFT of short prompts. On an idle engine

    TTFT − one step  =  first_token_s + slope · prompt tokens

where one step is the stream's own decode step, or the fitted time of a prefill of no tokens if that
is longer: both read all weights. While another stream decodes, an arriving prompt waits for the
rest of the current step, half a step in the mean. If it waits one step more, the engine had already
planned the next one (``Profile.plans_ahead``).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hetero_gateway.core.costs.profile import Constants

# Prompt lengths on an idle engine, and how often each; number of prompts beside a stream.
IDLE_TOKENS = (16, 32, 64, 128, 256)
IDLE_TIMES = 3
OUTPUT_TOKENS = 5
BESIDE_TOKENS, BESIDE_TIMES = 16, 12
# Steps that all of them take, about: they are skipped if that is too much of the budget.
STEPS = len(IDLE_TOKENS) * IDLE_TIMES * OUTPUT_TOKENS + 6 * BESIDE_TIMES
# Between half a step and one and a half.
_PLANNED_AHEAD_STEPS = 1.0


class ShortPrompt(NamedTuple):
    """One short prompt. ``step_s``: a decode step's mean, of its stream or of the one beside it."""

    prompt_tokens: int
    ttft_s: float
    step_s: float


class FirstTokens(NamedTuple):
    """As in ``Profile``; ``waited_steps``: beside a stream, before a prompt's own step, mean."""

    first_token_s: float
    plans_ahead: bool
    waited_steps: float


def fit_first_tokens(
    idle: Sequence[ShortPrompt], beside: Sequence[ShortPrompt], constants: Constants
) -> FirstTokens | None:
    """None if there is too little data.

    Args:
        idle: on an otherwise idle engine, of several lengths.
        beside: while a stream decodes, each sent at a random moment of a step.
        constants: as fitted.
    """
    lengths = sorted({probe.prompt_tokens for probe in idle})
    if len(lengths) < 2 or len(beside) < BESIDE_TIMES // 2:
        return None
    # The median of each length: a delayed step is an outlier.
    ttft_s = [_median([p.ttft_s for p in idle if p.prompt_tokens == n]) for n in lengths]
    slope, intercept_s = np.polyfit(lengths, ttft_s, 1)
    fixed_s = max(_median([p.step_s for p in idle]), constants.p2 + constants.p4)
    waited = [
        (p.ttft_s - intercept_s - slope * p.prompt_tokens) / p.step_s for p in beside if p.step_s
    ]
    waited_steps = float(np.mean(waited)) if waited else 0.0
    return FirstTokens(
        max(0.0, float(intercept_s) - fixed_s), waited_steps > _PLANNED_AHEAD_STEPS, waited_steps
    )


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))
