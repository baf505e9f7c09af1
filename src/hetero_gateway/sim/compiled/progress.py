"""The load, progress and speed of each instance, as in ``core/instances/state.py``: tables with the
fields of its objects, so that its own functions change them.

The events are the same (dispatch, first token, settle, observe_steps), for requests of one sequence
that stream, on instances with a profile and without a known prefix cache. This module has the
additions and removals of each request, which ``InstanceState`` does in its methods, and the order
of the next stages.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hetero_gateway.core.costs.arrays import Integers
from hetero_gateway.core.instances.concurrency import NO_LIMIT
from hetero_gateway.core.instances.dispatch import PeerLoad
from hetero_gateway.core.instances.observation import seconds, step_terms
from hetero_gateway.core.instances.speed import DOUBTED, PRIOR_S
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
from hetero_gateway.core.policies.member import Member
from hetero_gateway.core.scheduling.probes import (
    PROBE_EVERY_S,
    REVISE_EVERY_S,
    is_time,
    is_to_be_tried,
    revise_among,
)
from hetero_gateway.sim.compiled.tables import (
    MEMBER,
    Row,
    Table,
    fields,
    record,
    set_members,
    table,
)

_STAGES = len(STAGE_TOKENS)

# Fields of ``InstanceState``, and of its parts; and when the next stream reaches its next stage.
# Unset fields stay 0. The last ones are ``late_binding``'s: T of a typical request; the engine's
# work at the last tick; and its rating as a candidate.
STATE = record(
    *fields("i8", "waiting streaming waiting_prompt kv_tokens in_flight"),
    *fields("f8", "waiting_prefill waiting_output context recent_prefill recent_prefill_s"),
    *fields("f8", "speed heard_s read_s clock steps_per_s owed_s prefilled_s"),
    *fields("f8", "observed_clock streams_seen_s next_due shared_tokens load_s seats"),
    *fields("?", "stands_in observed"),
    ("stages", "i8", (_STAGES,)),
    ("constants", MEMBER),
    ("peers", record(*fields("f8", " ".join(PeerLoad._fields)))),
    ("interval", record(
        *fields("f8", "streamed_s sequences context prompts prompt_tokens shown"),
    )),
    ("estimate", record(
        *fields("f8", "factor own lowest highest seen_s revised_s observed_s modelled_s"),
        *fields("f8", "prior_s doubted_from"),
        *fields("?", "doubted"),
    )),
    *fields("i8", "told_steps"),
    *fields("f8", "told_s typical_s latency_s delay_s cost_s price ttft_s slo_price_s own_price_s"),
    *fields("?", "slot room"),
)  # fmt: skip
# Of ``Probes``; ``doubted``: how many are.
PROBES = record(*fields("i8", "placed doubted"), *fields("f8", "next_s probed_s every_s"))


class Progress(NamedTuple):
    """``there``: by instance the requests that stream on it, in no order."""

    requests: Table
    states: Table
    there: Integers


class Waiter(NamedTuple):
    """A ``Dispatch``'s data for ``leave_waiting``."""

    prompt_tokens: int
    prefill_tokens: float
    output_tokens: float


def new_progress(requests: Table, members: Sequence[Member], most_streams: int) -> Progress:
    states = table(len(members), STATE)
    set_members(states["constants"], members)
    states["observed_clock"] = math.nan
    states["next_due"] = math.inf
    states["streams_seen_s"] = -math.inf
    states["speed"] = states["typical_s"] = 1.0
    states["seats"] = NO_LIMIT
    estimate = states["estimate"]
    estimate["factor"] = estimate["own"] = 1.0
    estimate["lowest"], estimate["highest"] = SPEED_BOUNDS
    estimate["observed_s"] = estimate["modelled_s"] = estimate["prior_s"] = PRIOR_S
    estimate["doubted_from"] = DOUBTED
    requests["stage"] = -1
    return Progress(requests, states, np.zeros((len(members), most_streams), np.int64))


def set_probes(probes: Row) -> None:
    probes["next_s"] = probes["probed_s"] = -math.inf
    probes["every_s"] = PROBE_EVERY_S


# A request's events


def dispatch(p: Progress, i: int, r: Row, now_s: float) -> None:
    """It is sent there."""
    s, prompt, predicted = p.states[i], r.prompt_tokens, r.predicted_tokens
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


def first_token(p: Progress, i: int, request: int, now_s: float) -> None:
    clock, s, r = _read_clock(p, i, now_s, 0.0), p.states[i], p.requests[request]
    prompt = r.prompt_tokens
    leave_waiting(s, 1, _waiter(r))
    r.stage = 0
    r.joined = clock
    s.heard_s = now_s
    if s.streaming > 0:
        s.interval.prompts += 1
        s.interval.prompt_tokens += prompt
    r.place = s.streaming
    p.there[i, s.streaming] = request
    s.streaming += 1
    s.context += prompt + 1
    s.stages[0] += 1
    s.next_due = min(s.next_due, clock + STAGE_TOKENS[1] - 1)
    set_rate(s)


def settle(p: Progress, i: int, r: Row, now_s: float) -> None:
    s, prompt = p.states[i], r.prompt_tokens
    streams = r.stage >= 0
    clock = _read_clock(p, i, now_s, 0.0) if streams else 0.0
    s.kv_tokens -= prompt + round(r.predicted_tokens)
    s.in_flight -= 1
    if not streams:
        leave_waiting(s, 1, _waiter(r))
        return
    s.streaming -= 1
    s.context -= prompt + (1 + clock - r.joined)
    s.stages[r.stage] -= 1
    r.stage = -1
    last = p.there[i, s.streaming]
    p.there[i, r.place] = last
    p.requests[last].place = r.place
    if s.streaming == 0:
        s.context = s.clock = 0.0
        s.observed_clock = math.nan
        s.next_due = math.inf
    set_rate(s)


def _waiter(r: Row) -> Any:
    return Waiter(r.prompt_tokens, r.prompt_tokens, r.predicted_tokens)


def _read_clock(p: Progress, i: int, now_s: float, steps: float) -> float:
    s = p.states[i]
    clock = read_clock(s, now_s, steps)
    if s.next_due <= clock:
        _move_on(p, i)
    return clock


def _move_on(p: Progress, i: int) -> None:
    """The clock has passed a request's next stage."""
    s, next_due = p.states[i], math.inf
    for at in range(s.streaming):
        r = p.requests[p.there[i, at]]
        stage = r.stage
        while stage + 1 < _STAGES:
            # The first token came before the clock's first step.
            due = r.joined + STAGE_TOKENS[stage + 1] - 1
            if due > s.clock:
                next_due = min(next_due, due)
                break
            s.stages[stage] -= 1
            stage += 1
            s.stages[stage] += 1
        r.stage = stage
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


# Instances of doubtful speed


def revise(states: Table, probes: Row, now_s: float) -> None:
    """``Probes.revise``, when it is due."""
    if now_s < probes.next_s:
        return
    probes.next_s = now_s + REVISE_EVERY_S
    revise_among(states, 1.0, now_s)
    probes.doubted = 0
    for state in states:
        probes.doubted += state.estimate.doubted
    if probes.doubted == 0:
        probes.every_s = PROBE_EVERY_S


def due(states: Table, probes: Row, now_s: float) -> int:
    """The instance that a request should try, alone; -1: none, or not this request."""
    if probes.doubted > 0 and is_time(probes, now_s):
        for i in range(len(states)):
            if is_to_be_tried(states[i], now_s):
                return i
    return -1
