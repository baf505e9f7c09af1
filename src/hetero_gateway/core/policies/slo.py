"""Latency limits of requests, and how many a placement is expected to violate.

A violation is a request whose first token comes later than ``ttft_s`` after it arrived, or whose
further tokens take longer than ``tpot_s`` each, on average. A placement may cause its own, and
those of the sequences that it joins: ``violations`` is the expected number, and ``finish-time``
prices each at this many seconds (``VIOLATION_PRICE_S``).

It switches itself off where nothing can be won: a request that has waited for ``ttft_s`` has missed
it wherever it goes, and one already beyond its limit is not lost a second time, so that overload
gathers on few instances. If every instance is beyond its limits, all prices are equal.

    symbol   here            what it is                                                 unit
    ρ        estimates.busy  share of the machine's time that prompts take              –
    step     step_s          one decode step of everything there, and of the request    s
    TPOT     step / (1 − ρ)  steps wait for the prompts computed in between             s
    d        held_up_s       what this request's prompt takes                           s
    P        output          tokens of the answer                                       –

ρ follows what was sent there recently: long prompts go to some machines, short ones to others, so
the average of all requests says little about one instance. A prompt holds each stream up by d once,
d / (P − 1) a token. How far a TPOT is off depends on the machine: an idle one decodes as predicted,
and if prompts come in between, few of them make or break a short answer. They arrive as a Poisson
process, whose spread ρ has. Requests that miss the first token's limit behind this prompt (ρ / (1 −
ρ) arrive while it is computed) count as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.policies.estimates import MOST_BUSY, busy
from hetero_gateway.core.policies.member import Member
from hetero_gateway.core.request import Request

# More than what a long prompt costs the streams of a fast machine (some 15 s in sum): otherwise
# long prompts gather on slow machines, whose streams then stand still half of the time. 10 leaves
# them there, 100 is no better.
VIOLATION_PRICE_S: Final = 40.0
# A first token whose predicted wait is between these multiples of what the limit leaves for it is a
# partial violation: later arrivals may get in front of it.
_TTFT_FROM, _TTFT_TO = 0.3, 1.0
# The spread of a TPOT: of a predicted step, a share; and of the prompts in between, as if each had
# this many tokens. That is more than they have, as answers are of unequal lengths, too.
_STEP_SPREAD: Final = 0.05
_PROMPT_TOKENS: Final = 12288.0
# The logistic function approximates the normal distribution's with this factor; beyond this many
# times the spread it is 0 or 1.
_LOGISTIC: Final = 1.7
_MOST_SPREADS: Final = 18.0
# The effect of a prompt on the first tokens behind it counts this many times: those have others
# behind them.
_BEHIND: Final = 1.5
# Each step of an engine computes a chunk of a prompt: vLLM's default token budget.
_CHUNK_TOKENS: Final = 2048.0
# Prompts take no more than this share of a machine, whatever was sent there recently.
_MOST_BUSY: Final = 0.95


class Slo(NamedTuple):
    """Limits of a request, met when neither is exceeded; seconds, inf: none."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf


class Slos:
    """Which requests have which limits.

    Args:
        default: for requests that no other entry applies to.
        models: by the name that the client asked for.
        classes: by ``Request.request_class``; they take precedence over models.
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
        """Whether a class has its own limits."""
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
    """Expected number of requests that miss their limits because of this placement: 0 or more.

    Args:
        ttft_s, step_s: predicted for the request there (``estimates.estimate``).
        prefill: prompt tokens to compute, of all its sequences.
        n_r, prompt_tokens, output: its sequences, and the tokens of each.
        waited_s: since it arrived.
        slo: its limits; requests already there are assumed to have the same.
    """
    if waited_s >= slo.ttft_s:
        return 0.0
    p1, p5, p6 = member[0], member[4], member[5]
    f = state.speed
    n = float(state.waiting + state.streaming)
    n += state.peers.waiting + state.peers.streaming
    left = 1.0 - busy(state, p1, now_s)
    if left < 1.0 - _MOST_BUSY:
        left = 1.0 - _MOST_BUSY
    if state.streaming:
        # Steps go on between the chunks of prompts.
        ttft_s += step_s * (state.waiting_prefill + prefill) / _CHUNK_TOKENS
    added_s = f * n_r * (p6 + p5 * (prompt_tokens + output / 2))
    prompt_token_s = f * p1
    held_up_s = prompt_token_s * prefill
    after = too_slow(step_s, left, held_up_s, prompt_token_s, output, slo.tpot_s)
    before = too_slow(step_s - added_s, left, 0.0, prompt_token_s, output, slo.tpot_s)
    own_s = held_up_s + (step_s * prefill / _CHUNK_TOKENS if state.streaming else 0.0)
    late = too_late(ttft_s, own_s, slo.ttft_s - waited_s)
    # The first token is the prefill's: an answer of one has no TPOT.
    slow = too_slow(step_s, left, 0.0, prompt_token_s, output, slo.tpot_s) if output > 1 else 0.0
    missed = n_r * (1.0 - (1.0 - late) * (1.0 - slow)) + n * (after - before)
    return missed + late_behind(ttft_s, held_up_s, left, slo.ttft_s)


# Inputs of ``violations`` for a request whose prompt is computed elsewhere than its answer
# (``legs.py``). ``token_s``: a step as an answer has to wait for it, over the share of the
# machine's time that prompts leave; ``there``: sequences there.


def missed_by_prompt(
    state: InstanceState,
    member: Member,
    ttft_s: float,
    token_s: float,
    prefill: float,
    n_r: float,
    output: float,
    there: float,
    now_s: float,
    waited_s: float,
    slo: Slo,
) -> float:
    """Expected number of requests that miss their limits because of this prompt there."""
    prompt_token_s, left = state.speed * member[0], 1.0 - busy(state, member[0], now_s)
    step_s = token_s * max(1.0 - MOST_BUSY, left)
    left, held_up_s = max(1.0 - _MOST_BUSY, left), prompt_token_s * prefill
    late = n_r * too_late(ttft_s, held_up_s, slo.ttft_s - waited_s)
    late += late_behind(ttft_s, held_up_s, left, slo.ttft_s)
    if not state.streaming:
        return late
    after = too_slow(step_s, left, held_up_s, prompt_token_s, output, slo.tpot_s)
    return late + there * (after - too_slow(step_s, left, 0.0, prompt_token_s, output, slo.tpot_s))


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
    """Expected number of requests that miss their limits because of this answer there."""
    p1, p5, p6 = member[0], member[4], member[5]
    prompt_token_s, left = state.speed * p1, 1.0 - busy(state, p1, now_s)
    step_s = token_s * max(1.0 - MOST_BUSY, left)
    left = max(1.0 - _MOST_BUSY, left)
    added_s = state.speed * n_r * (p6 + p5 * (prompt_tokens + output / 2))
    after = too_slow(step_s, left, 0.0, prompt_token_s, output, slo.tpot_s)
    before = too_slow(step_s - added_s, left, 0.0, prompt_token_s, output, slo.tpot_s)
    return n_r * after + there * (after - before)


def too_slow(
    step_s: float,
    left: float,
    held_up_s: float,
    prompt_token_s: float,
    output: float,
    tpot_s: float,
) -> float:
    """Probability that an answer's further tokens take longer than ``tpot_s``.

    Args:
        step_s: a decode step.
        left: 1 − ρ, above 0.
        held_up_s: by one more prompt.
        prompt_token_s: time of one prompt token.
        output: tokens of the answer.
    """
    steps = output - 1.0 if output > 2.0 else 1.0
    mean_s, own_s = step_s / left, _STEP_SPREAD * step_s
    spread_s = math.sqrt(
        _PROMPT_TOKENS * prompt_token_s * (mean_s - step_s) / steps + own_s * own_s
    )
    room_s = tpot_s - mean_s - held_up_s / steps
    if room_s >= _MOST_SPREADS * spread_s:
        return 0.0
    if room_s <= -_MOST_SPREADS * spread_s:
        return 1.0
    return 1.0 / (1.0 + math.exp(_LOGISTIC * room_s / spread_s))


def too_late(ttft_s: float, own_s: float, limit_s: float) -> float:
    """Probability that a first token comes later than ``limit_s`` from now.

    Its own prompt's time (``own_s``, part of ``ttft_s``) is certain; its wait is not: other
    requests may get in front.
    """
    if ttft_s >= limit_s:
        return 1.0
    wait_s = ttft_s - own_s
    if wait_s <= 0.0:
        return 0.0
    return surely(wait_s / (limit_s - own_s), _TTFT_FROM, _TTFT_TO)


def late_behind(ttft_s: float, held_up_s: float, left: float, limit_s: float) -> float:
    """Number of requests that miss their first token's limit behind a prompt that takes this long,
    predicted where its own first token comes after ``ttft_s``."""
    then = surely((ttft_s + held_up_s) / limit_s, _TTFT_FROM, _TTFT_TO)
    then -= surely(ttft_s / limit_s, _TTFT_FROM, _TTFT_TO)
    return _BEHIND * then * (1.0 - left) / left


def surely(ratio: float, start: float, end: float) -> float:
    """Probability that a limit is missed, if the prediction is this many times the limit."""
    share = (ratio - start) / (end - start)
    if share <= 0.0:
        return 0.0
    return share if share < 1.0 else 1.0
