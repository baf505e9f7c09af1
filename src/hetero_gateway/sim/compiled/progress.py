"""``core/instances/state.py`` over arrays: what is on each instance, and how far that is.

The events are the same (dispatch, first token, settle, observe_steps), of requests of one sequence
that stream, on instances with a profile and without a prefix cache that is known of.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from hetero_gateway.core.costs.arrays import FloatArray
from hetero_gateway.core.costs.cost_model import attended_pairs
from hetero_gateway.core.instances.concurrency import NO_LIMIT
from hetero_gateway.core.instances.dispatch import NO_PEERS, PeerLoad
from hetero_gateway.core.instances.state import PREFILL_OVER_S, STREAMS_SAY_S
from hetero_gateway.core.lengths.predictors import STAGE_TOKENS
from hetero_gateway.sim.arrays import Integers
from hetero_gateway.sim.compiled import speeds
from hetero_gateway.sim.compiled.speeds import FACTOR, Speeds

_STAGES = len(STAGE_TOKENS)

# Fields of an instance's integers, and of its floats: attributes of ``InstanceState``.
WAITING, STREAMING, WAITING_PROMPT, KV_TOKENS = range(4)
_INTEGERS = 4
WAITING_PREFILL, WAITING_OUTPUT, CONTEXT, CLOCK, READ_S, STEPS_PER_S, OBSERVED_CLOCK = range(7)
# Of the interval since the last observation; and when the next stream comes to its next stage.
STREAMED_S, SEQUENCES, CONTEXT_S, PROMPTS, PROMPT_TOKENS, NEXT_DUE = range(7, 13)
STREAMS_SEEN_S, OWED_S, RECENT_PREFILL, RECENT_PREFILL_S = range(13, 17)
_FLOATS = 17


class Progress(NamedTuple):
    """By instance: ``n`` and ``x``, their fields; sequences by stage; constants p1..p9 and what
    else a ``Member`` has. ``there``: the requests that stream on it, in no order.

    By request: its stage, -1 where it does not stream; the step clock at its first token; its place
    in ``there``; its predicted output tokens.
    """

    n: Integers
    x: FloatArray
    in_flight: Integers
    heard_s: FloatArray
    stages: Integers
    members: FloatArray
    there: Integers
    speeds: Speeds
    stage: Integers
    joined: FloatArray
    place: Integers
    predicted: FloatArray


class StateRow(NamedTuple):
    """What ``policies/estimates.py`` reads of an ``InstanceState``."""

    waiting: int
    streaming: int
    waiting_prompt: int
    waiting_prefill: float
    waiting_output: float
    context: float
    shared_tokens: float
    speed: float
    load_s: float
    kv_tokens: int
    in_flight: int
    stages: Integers
    peers: PeerLoad
    read_s: float
    steps_per_s: float
    heard_s: float
    seats: float
    recent_prefill: float
    recent_prefill_s: float


def new_progress(members: FloatArray, most_streams: int, requests: int) -> Progress:
    size = len(members)
    x = np.zeros((size, _FLOATS))
    x[:, OBSERVED_CLOCK] = math.nan
    x[:, NEXT_DUE] = math.inf
    x[:, STREAMS_SEEN_S] = -math.inf
    return Progress(
        np.zeros((size, _INTEGERS), np.int64), x, np.zeros(size, np.int64), np.zeros(size),
        np.zeros((size, _STAGES), np.int64), members, np.zeros((size, most_streams), np.int64),
        speeds.new_speeds(size), np.full(requests, -1, np.int64), np.zeros(requests),
        np.zeros(requests, np.int64), np.zeros(requests),
    )  # fmt: skip


def state_row(p: Progress, i: int) -> Any:
    """A ``StateRow``, which stands where an ``InstanceState`` would."""
    n, x = p.n[i], p.x[i]
    return StateRow(
        n[WAITING], n[STREAMING], n[WAITING_PROMPT], x[WAITING_PREFILL], x[WAITING_OUTPUT],
        x[CONTEXT], 0.0, p.speeds.estimates[i, FACTOR], 0.0, n[KV_TOKENS], p.in_flight[i],
        p.stages[i], NO_PEERS, x[READ_S], x[STEPS_PER_S], p.heard_s[i], NO_LIMIT,
        x[RECENT_PREFILL], x[RECENT_PREFILL_S],
    )  # fmt: skip


# A request's events


def dispatch(p: Progress, i: int, request: int, prompt: int, now_s: float) -> None:
    """It is sent there, with its prediction as in ``predicted``."""
    n, x, predicted = p.n[i], p.x[i], p.predicted[request]
    n[KV_TOKENS] += prompt + round(predicted)
    p.in_flight[i] += 1
    if n[WAITING] == 0:
        p.heard_s[i] = now_s
    n[WAITING] += 1
    n[WAITING_PROMPT] += prompt
    x[WAITING_PREFILL] += prompt
    x[WAITING_OUTPUT] += predicted
    since_s = x[RECENT_PREFILL_S] - now_s
    x[RECENT_PREFILL] = x[RECENT_PREFILL] * math.exp(since_s / PREFILL_OVER_S) + prompt
    x[RECENT_PREFILL_S] = now_s
    if now_s - x[STREAMS_SEEN_S] >= STREAMS_SAY_S:
        _read_clock(p, i, now_s)
        c = p.members[i]
        prefill_s = c[0] * prompt + c[1] + c[8] * attended_pairs(prompt, 0.0)
        x[OWED_S] += p.speeds.estimates[i, FACTOR] * prefill_s


def first_token(p: Progress, i: int, request: int, prompt: int, now_s: float) -> None:
    clock = _read_clock(p, i, now_s)
    n, x = p.n[i], p.x[i]
    _leave_waiting(p, i, request, prompt)
    p.stage[request] = 0
    p.joined[request] = clock
    p.heard_s[i] = now_s
    if n[STREAMING] > 0:
        x[PROMPTS] += 1
        x[PROMPT_TOKENS] += prompt
    p.place[request] = n[STREAMING]
    p.there[i, n[STREAMING]] = request
    n[STREAMING] += 1
    x[CONTEXT] += prompt + 1
    p.stages[i, 0] += 1
    x[NEXT_DUE] = min(x[NEXT_DUE], clock + STAGE_TOKENS[1] - 1)
    set_rate(p, i)


def settle(p: Progress, i: int, request: int, prompt: int, now_s: float) -> None:
    n, x = p.n[i], p.x[i]
    streams = p.stage[request] >= 0
    clock = _read_clock(p, i, now_s) if streams else 0.0
    n[KV_TOKENS] -= prompt + round(p.predicted[request])
    p.in_flight[i] -= 1
    if not streams:
        _leave_waiting(p, i, request, prompt)
        return
    n[STREAMING] -= 1
    x[CONTEXT] -= prompt + (1 + clock - p.joined[request])
    p.stages[i, p.stage[request]] -= 1
    p.stage[request] = -1
    last = p.there[i, n[STREAMING]]
    p.there[i, p.place[request]] = last
    p.place[last] = p.place[request]
    if n[STREAMING] == 0:
        x[CONTEXT] = 0.0
        x[CLOCK] = 0.0
        x[OBSERVED_CLOCK] = math.nan
        x[NEXT_DUE] = math.inf
    set_rate(p, i)


def _leave_waiting(p: Progress, i: int, request: int, prompt: int) -> None:
    n, x = p.n[i], p.x[i]
    n[WAITING] -= 1
    if n[WAITING] == 0:
        x[OWED_S] = 0.0
        n[WAITING_PROMPT] = 0
        x[WAITING_PREFILL] = 0.0
        x[WAITING_OUTPUT] = 0.0
    else:
        n[WAITING_PROMPT] -= prompt
        x[WAITING_PREFILL] -= prompt
        x[WAITING_OUTPUT] -= p.predicted[request]


# The step clock


def _read_clock(p: Progress, i: int, now_s: float) -> float:
    n, x = p.n[i], p.x[i]
    elapsed_s = now_s - x[READ_S]
    if elapsed_s > 0:
        x[READ_S] = now_s
        batch, decoding_s = n[STREAMING], elapsed_s
        if x[OWED_S] > 0:
            prefilled_s = min(x[OWED_S], elapsed_s)
            x[OWED_S] -= prefilled_s
            decoding_s -= prefilled_s
        if batch > 0:
            steps = decoding_s * x[STEPS_PER_S]
            x[STREAMED_S] += elapsed_s
            x[SEQUENCES] += batch * elapsed_s
            x[CONTEXT_S] += (x[CONTEXT] + 0.5 * steps * batch) * elapsed_s
            _advance(p, i, steps)
    return float(x[CLOCK])


def _advance(p: Progress, i: int, steps: float) -> None:
    n, x = p.n[i], p.x[i]
    if steps == 0:
        return
    x[CONTEXT] += steps * n[STREAMING]
    x[CLOCK] += steps
    if x[NEXT_DUE] > x[CLOCK]:
        return
    next_due = math.inf
    for at in range(n[STREAMING]):
        request = p.there[i, at]
        stage = p.stage[request]
        while stage + 1 < _STAGES:
            # The first token came before the clock's first step.
            due = p.joined[request] + STAGE_TOKENS[stage + 1] - 1
            if due > x[CLOCK]:
                next_due = min(next_due, due)
                break
            p.stages[i, stage] -= 1
            stage += 1
            p.stages[i, stage] += 1
        p.stage[request] = stage
    x[NEXT_DUE] = next_due


def set_rate(p: Progress, i: int) -> None:
    n, x, c = p.n[i], p.x[i], p.members[i]
    batch = n[STREAMING]
    if batch < 1:
        x[STEPS_PER_S] = 0.0
        return
    context = x[CONTEXT]
    step_s = c[4] * context + c[5] * batch + c[6] * context / batch + c[7]
    x[STEPS_PER_S] = 1 / max(p.speeds.estimates[i, FACTOR] * step_s, 1e-6)


# What is observed


def observe_steps(p: Progress, i: int, made: int, duration_s: float, now_s: float) -> None:
    """The engine made so many decode steps in the last ``duration_s``."""
    clock = _read_clock(p, i, now_s)
    n, x = p.n[i], p.x[i]
    streamed_s = x[STREAMED_S]
    if duration_s > 0 and (n[STREAMING] >= 1 or streamed_s > 0):
        modelled_s = _modelled_s(p, i, made, duration_s)
        speeds.observe(p.speeds, i, duration_s, modelled_s, now_s)
        x[STREAMS_SEEN_S] = now_s
        if n[STREAMING] >= 1:
            steps = float(made)
            if duration_s < streamed_s / 2:
                steps *= streamed_s / duration_s
            true_clock = x[OBSERVED_CLOCK] + steps
            if not math.isnan(true_clock):
                _advance(p, i, true_clock - clock)
    x[STREAMED_S : PROMPT_TOKENS + 1] = 0.0
    x[OBSERVED_CLOCK] = x[CLOCK]
    set_rate(p, i)


def _modelled_s(p: Progress, i: int, made: int, duration_s: float) -> float:
    """``StepRow`` of the interval, and ``observation.seconds`` of it."""
    n, x, c = p.n[i], p.x[i], p.members[i]
    share = 1.0
    if x[STREAMED_S] > 0:
        sequences, context = x[SEQUENCES] / x[STREAMED_S], x[CONTEXT_S] / x[STREAMED_S]
        share = min(1.0, duration_s / x[STREAMED_S])
    else:
        sequences, context = float(n[STREAMING]), x[CONTEXT]
    cached = context / sequences
    prompts, tokens = share * x[PROMPTS], share * x[PROMPT_TOKENS]
    attended = 0.0
    if prompts != 0:
        attended = prompts * attended_pairs(tokens / prompts, 0.0)
    prefill_s = c[0] * tokens + c[1] * prompts + c[8] * attended
    at_once = made * sequences
    decode_s = c[4] * (at_once * cached) + c[5] * at_once + c[6] * (made * cached) + c[7] * made
    return float(prefill_s + decode_s)
