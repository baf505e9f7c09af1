"""Limits that requests should be within, and what a placement is expected to do to them.

A violation is a request whose first token comes later than ``ttft_s`` after it arrived, or whose
further tokens take longer than ``tpot_s`` each, in the mean. A placement may cause its own, and
those of the sequences that it joins: ``violations`` is how many are to be expected of it, and
``finish-time`` takes each for so many seconds of cost (``VIOLATION_PRICE_S``).

It switches itself off where nothing can be won: who has waited for ``ttft_s`` has missed it
wherever he goes, and who is beyond his limit already is not lost a second time, so that what is too
much gathers on few instances. Where every instance is beyond its limits, all prices are equal.

    symbol   here            what it is                                                 unit
    ρ        estimates.busy  share of the machine's time that prompts take              –
    step     step_s          one decode step of all that are there, and of the request  s
    TPOT     step / (1 − ρ)  steps wait for the prompts that are computed in between    s

ρ is what was sent there lately: long prompts go to some machines, short ones to others, so what is
typical of all requests says little of one instance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from hetero_gateway.core.instances.state import PREFILL_OVER_S, InstanceState
from hetero_gateway.core.policies.estimates import MOST_BUSY, busy
from hetero_gateway.core.policies.member import Member
from hetero_gateway.core.request import Request

# More than what a long prompt costs the streams of a fast machine (some 15 s in sum): long prompts
# gather on slow machines otherwise, whose streams then stand still half of the time. 10 leaves them
# there, 100 is no better.
VIOLATION_PRICE_S: Final = 40.0
# A predicted TPOT between these multiples of the limit is a violation in part: it holds for a while
# and is averaged over a whole answer. A first token is predicted worse, as what comes meanwhile
# may be in front of it.
_TPOT_FROM, _TPOT_TO = 0.9, 1.3
_TTFT_FROM, _TTFT_TO = 0.3, 1.0
# Each step of an engine computes a chunk of a prompt: vLLM's default budget of tokens.
_CHUNK_TOKENS: Final = 2048.0
# Prompts take no more than this share of a machine, whatever was sent there lately.
_MOST_BUSY: Final = 0.95


class Slo(NamedTuple):
    """Limits that a request is within when neither is exceeded; seconds, inf: none."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf


class Slos:
    """Whose requests have which limits.

    Args:
        default: of those that no other applies to.
        models: by the name that the client asked for.
        classes: by ``Request.request_class``; they go before models.
    """

    __slots__ = ("_classes", "_default", "_models")

    def __init__(
        self,
        default: Slo,
        models: Mapping[str, Slo] | None = None,
        classes: Mapping[str, Slo] | None = None,
    ) -> None:
        self._default = default
        self._models = dict(models or {})
        self._classes = dict(classes or {})

    def of(self, request: Request) -> Slo:
        found = self._classes.get(request.request_class)
        return found or self._models.get(request.model, self._default)

    def has_class(self, name: str) -> bool:
        """Whether a class has limits of its own."""
        return name in self._classes

    def everyones(self) -> Slo | None:
        """The limits of every request; None: they differ."""
        return None if self._models or self._classes else self._default


def violations(
    state: InstanceState,
    member: Member,
    ttft_s: float,
    step_s: float,
    prefill: float,
    n_r: float,
    prompt_tokens: float,
    output: float,
    now_s: float,
    waited_s: float,
    slo: Slo,
) -> float:
    """How many requests are expected to miss their limits by this placement: 0 or more.

    Args:
        ttft_s, step_s: as predicted of the request there (``estimates.estimate``).
        prefill: prompt tokens to compute, of all its sequences.
        n_r, prompt_tokens, output: its sequences, and the tokens of each.
        waited_s: since it arrived.
        slo: its limits; those that are there are taken to have the same.
    """
    if waited_s >= slo.ttft_s:
        return 0.0
    p1, p5, p6 = member[0], member[4], member[5]
    f = state.speed
    n = float(state.waiting + state.streaming)
    n += state.peers.waiting + state.peers.streaming
    left = 1.0 - busy(state, p1, now_s)
    # The steps that come wait for this prompt, too, and those that run go on between its chunks.
    left_then = left - f * p1 * prefill / PREFILL_OVER_S
    if left < 1.0 - _MOST_BUSY:
        left = 1.0 - _MOST_BUSY
    if left_then < 1.0 - _MOST_BUSY:
        left_then = 1.0 - _MOST_BUSY
    if state.streaming:
        ttft_s += step_s * (state.waiting_prefill + prefill) / _CHUNK_TOKENS
    added_s = f * n_r * (p6 + p5 * (prompt_tokens + output / 2))
    after = surely(step_s / left_then / slo.tpot_s, _TPOT_FROM, _TPOT_TO)
    before = surely((step_s - added_s) / left / slo.tpot_s, _TPOT_FROM, _TPOT_TO)
    late = surely((waited_s + ttft_s) / slo.ttft_s, _TTFT_FROM, _TTFT_TO)
    # The first token is the prefill's: an answer of one has no TPOT.
    slow = after if output > 1 else 0.0
    return n_r * (1.0 - (1.0 - late) * (1.0 - slow)) + n * (after - before)


# What ``violations`` counts, for a request whose prompt is computed elsewhere than its answer
# (``legs.py``). ``token_s``: a step as an answer has to wait for it, over what prompts leave of the
# machine's time; ``there``: sequences there.


def missed_by_prompt(
    state: InstanceState,
    member: Member,
    ttft_s: float,
    token_s: float,
    prefill: float,
    n_r: float,
    there: float,
    now_s: float,
    waited_s: float,
    slo: Slo,
) -> float:
    """How many requests are expected to miss their limits by this prompt there."""
    late = n_r * surely((waited_s + ttft_s) / slo.ttft_s, _TTFT_FROM, _TTFT_TO)
    if not state.streaming:
        return late
    p1, left = member[0], 1.0 - busy(state, member[0], now_s)
    step_s = token_s * max(1.0 - MOST_BUSY, left)
    left_then = max(1.0 - _MOST_BUSY, left - state.speed * p1 * prefill / PREFILL_OVER_S)
    after = surely(step_s / left_then / slo.tpot_s, _TPOT_FROM, _TPOT_TO)
    left = max(1.0 - _MOST_BUSY, left)
    return late + there * (after - surely(step_s / left / slo.tpot_s, _TPOT_FROM, _TPOT_TO))


def missed_by_answer(
    state: InstanceState,
    member: Member,
    token_s: float,
    n_r: float,
    prompt_tokens: float,
    output: float,
    there: float,
    now_s: float,
    slo: Slo,
) -> float:
    """How many requests are expected to miss their limits by this answer there."""
    p1, p5, p6 = member[0], member[4], member[5]
    left = 1.0 - busy(state, p1, now_s)
    step_s = token_s * max(1.0 - MOST_BUSY, left)
    left = max(1.0 - _MOST_BUSY, left)
    added_s = state.speed * n_r * (p6 + p5 * (prompt_tokens + output / 2))
    after = surely(step_s / left / slo.tpot_s, _TPOT_FROM, _TPOT_TO)
    before = surely((step_s - added_s) / left / slo.tpot_s, _TPOT_FROM, _TPOT_TO)
    return n_r * after + there * (after - before)


def surely(ratio: float, start: float, end: float) -> float:
    """How surely a limit is missed, where the prediction is so many times the limit."""
    share = (ratio - start) / (end - start)
    if share <= 0.0:
        return 0.0
    return share if share < 1.0 else 1.0
