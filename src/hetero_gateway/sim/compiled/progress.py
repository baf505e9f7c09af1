"""What is on each instance, how far that is and how fast it is, as ``core/instances/state.py`` has
it: tables with the fields of its objects, so that its own functions change them.

The events are the same (dispatch, first token, settle, observe_steps), of requests of one sequence
that stream, on instances with a profile and without a prefix cache that is known of. What stands
here is what each request puts on and takes off, which ``InstanceState`` does in its methods, and
who is to come to the next stage.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from hetero_gateway.core.costs.arrays import FloatArray, Integers
from hetero_gateway.core.instances.concurrency import NO_LIMIT
from hetero_gateway.core.instances.dispatch import PeerLoad
from hetero_gateway.core.instances.observation import seconds, step_terms
from hetero_gateway.core.instances.speed import PRIOR_S
from hetero_gateway.core.instances.state import (
    SPEED_BOUNDS,
    STREAMS_SAY_S,
    leave_waiting,
    note_prefill,
    observe_speed,
    prefill_s,
    read_clock,
    set_rate,
    step_row,
    steps_missed,
)
from hetero_gateway.core.lengths.predictors import STAGE_TOKENS
from hetero_gateway.core.scheduling.probes import (
    PROBE_EVERY_S,
    REVISE_EVERY_S,
    is_time,
    is_to_be_tried,
    revise_among,
)

_STAGES = len(STAGE_TOKENS)


def _fields(kind: str, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


def _record(*fields: tuple[Any, ...]) -> np.dtype[np.void]:
    return np.dtype([*fields], align=True)


# Fields of ``InstanceState``, and of what it holds; and when the next stream comes to its next
# stage. What is not set stays 0.
_CONSTANTS = "p1 p2 p3 p4 p5 p6 p7 p8 p9"
_STATE = _record(
    *_fields("i8", "waiting streaming waiting_prompt kv_tokens in_flight"),
    *_fields("f8", "waiting_prefill waiting_output context recent_prefill recent_prefill_s"),
    *_fields("f8", "speed heard_s read_s clock steps_per_s owed_s prefilled_s"),
    *_fields("f8", "observed_clock streams_seen_s next_due shared_tokens load_s seats"),
    *_fields("?", "stands_in observed"),
    ("stages", "i8", (_STAGES,)),
    ("constants", _record(*_fields("f8", _CONSTANTS))),
    ("peers", _record(*_fields("f8", " ".join(PeerLoad._fields)))),
    ("interval", _record(
        *_fields("f8", "streamed_s sequences context prompts prompt_tokens shown"),
    )),
    ("estimate", _record(
        *_fields("f8", "factor own lowest highest seen_s revised_s observed_s modelled_s"),
        *_fields("?", "doubted"),
    )),
)  # fmt: skip
# Of ``Probes``; ``doubted``: how many are.
_PROBES = _record(*_fields("i8", "placed doubted"), *_fields("f8", "next_s probed_s every_s"))


class Progress(NamedTuple):
    """By instance: ``states``, and ``members``. ``there``: the requests that stream on it, in no
    order. ``probes``: one row.

    By request: its stage, -1 where it does not stream; the step clock at its first token; its place
    in ``there``; its predicted output tokens.
    """

    states: Any
    members: FloatArray
    there: Integers
    probes: Any
    stage: Integers
    joined: FloatArray
    place: Integers
    predicted: FloatArray


class Waiter(NamedTuple):
    """What a ``Dispatch`` remembers for ``leave_waiting``."""

    prompt_tokens: int
    prefill_tokens: float
    output_tokens: float


def new_progress(members: FloatArray, most_streams: int, requests: int) -> Progress:
    size = len(members)
    states, probes = (
        np.zeros(n, kind).view(np.recarray) for n, kind in ((size, _STATE), (1, _PROBES))
    )
    for i, name in enumerate(_CONSTANTS.split()):
        states["constants"][name] = members[:, i]
    states["observed_clock"] = math.nan
    states["next_due"] = math.inf
    states["streams_seen_s"] = -math.inf
    states["speed"] = 1.0
    states["seats"] = NO_LIMIT
    estimate = states["estimate"]
    estimate["factor"] = estimate["own"] = 1.0
    estimate["lowest"], estimate["highest"] = SPEED_BOUNDS
    estimate["observed_s"] = estimate["modelled_s"] = PRIOR_S
    probes["next_s"] = probes["probed_s"] = -math.inf
    probes["every_s"] = PROBE_EVERY_S
    return Progress(
        states, members, np.zeros((size, most_streams), np.int64), probes,
        np.full(requests, -1, np.int64), np.zeros(requests), np.zeros(requests, np.int64),
        np.zeros(requests),
    )  # fmt: skip


# A request's events


def dispatch(p: Progress, i: int, request: int, prompt: int, now_s: float) -> None:
    """It is sent there, with its prediction as in ``predicted``."""
    s, predicted = p.states[i], p.predicted[request]
    s.kv_tokens += prompt + round(predicted)
    s.in_flight += 1
    if s.waiting == 0:
        s.heard_s = now_s
    s.waiting += 1
    s.waiting_prompt += prompt
    s.waiting_prefill += prompt
    s.waiting_output += predicted
    note_prefill(s, prompt, now_s)
    if now_s - s.streams_seen_s >= STREAMS_SAY_S:
        _read_clock(p, i, now_s, 0.0)
        s.owed_s += prefill_s(s, 1, prompt, prompt)


def first_token(p: Progress, i: int, request: int, prompt: int, now_s: float) -> None:
    clock, s = _read_clock(p, i, now_s, 0.0), p.states[i]
    leave_waiting(s, 1, _waiter(p, request, prompt))
    p.stage[request] = 0
    p.joined[request] = clock
    s.heard_s = now_s
    if s.streaming > 0:
        s.interval.prompts += 1
        s.interval.prompt_tokens += prompt
    p.place[request] = s.streaming
    p.there[i, s.streaming] = request
    s.streaming += 1
    s.context += prompt + 1
    s.stages[0] += 1
    s.next_due = min(s.next_due, clock + STAGE_TOKENS[1] - 1)
    set_rate(s)


def settle(p: Progress, i: int, request: int, prompt: int, now_s: float) -> None:
    s = p.states[i]
    streams = p.stage[request] >= 0
    clock = _read_clock(p, i, now_s, 0.0) if streams else 0.0
    s.kv_tokens -= prompt + round(p.predicted[request])
    s.in_flight -= 1
    if not streams:
        leave_waiting(s, 1, _waiter(p, request, prompt))
        return
    s.streaming -= 1
    s.context -= prompt + (1 + clock - p.joined[request])
    s.stages[p.stage[request]] -= 1
    p.stage[request] = -1
    last = p.there[i, s.streaming]
    p.there[i, p.place[request]] = last
    p.place[last] = p.place[request]
    if s.streaming == 0:
        s.context = s.clock = 0.0
        s.observed_clock = math.nan
        s.next_due = math.inf
    set_rate(s)


def _waiter(p: Progress, request: int, prompt: int) -> Any:
    return Waiter(prompt, prompt, p.predicted[request])


def _read_clock(p: Progress, i: int, now_s: float, steps: float) -> float:
    s = p.states[i]
    clock = read_clock(s, now_s, steps)
    if s.next_due <= clock:
        _move_on(p, i)
    return clock


def _move_on(p: Progress, i: int) -> None:
    """The clock has passed somebody's next stage."""
    s, next_due = p.states[i], math.inf
    for at in range(s.streaming):
        request = p.there[i, at]
        stage = p.stage[request]
        while stage + 1 < _STAGES:
            # The first token came before the clock's first step.
            due = p.joined[request] + STAGE_TOKENS[stage + 1] - 1
            if due > s.clock:
                next_due = min(next_due, due)
                break
            s.stages[stage] -= 1
            stage += 1
            s.stages[stage] += 1
        p.stage[request] = stage
    s.next_due = next_due


# What is observed


def observe_steps(p: Progress, i: int, made: int, duration_s: float, now_s: float) -> None:
    """The engine made so many decode steps in the last ``duration_s``."""
    _read_clock(p, i, now_s, 0.0)
    s = p.states[i]
    interval = s.interval
    if duration_s > 0 and (s.streaming >= 1 or interval.streamed_s > 0):
        row = step_row(s, interval, made, duration_s, 0.0)
        prefilled_s, decoded_s = seconds(step_terms(row), s.constants)
        observe_speed(s, duration_s, prefilled_s + decoded_s, now_s)
        s.streams_seen_s = now_s
        if s.streaming >= 1:
            _read_clock(p, i, now_s, steps_missed(s, interval, made, duration_s))
    interval.streamed_s = interval.sequences = interval.context = 0.0
    interval.prompts = interval.prompt_tokens = 0.0
    s.observed_clock = s.clock
    set_rate(s)


# Whose speed is doubted


def revise(p: Progress, now_s: float) -> None:
    """``Probes.revise``, when it is due."""
    probes = p.probes[0]
    if now_s < probes.next_s:
        return
    probes.next_s = now_s + REVISE_EVERY_S
    revise_among(p.states, 1.0, now_s)
    probes.doubted = 0
    for state in p.states:
        probes.doubted += state.estimate.doubted
    if probes.doubted == 0:
        probes.every_s = PROBE_EVERY_S


def due(p: Progress, now_s: float) -> int:
    """The instance that a request is to try, alone; -1: none, or not this request."""
    probes = p.probes[0]
    if probes.doubted > 0 and is_time(probes, now_s):
        for i in range(len(p.states)):
            if is_to_be_tried(p.states[i], now_s):
                return i
    return -1
