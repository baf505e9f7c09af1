"""Detects whether an instance has fallen silent: a frozen process accepts requests, answers none.

Two things are expected of a working instance: that its streams continue, a step at a time, and
that they begin when predicted. Three times that is tolerated, and at least ``FLOOR_S``; a prompt
waiting there may hold its streams up for as long as its prefill takes. If the model cannot say (no
profile, or a stand-in whose speed was not seen), at least ``UNKNOWN_S`` is tolerated; for a prompt
for another instance, and for an answer to one, at least ``LEG_S``; and twice any recent pause that
turned out harmless, as models may be wrong (``Pauses``). Anything heard from the instance restarts
all of this, so one slow request does not condemn an instance that serves others.

An answer that does not stream arrives complete, and lengths are hard to predict. If there are only
such answers, /health is asked, and its silence counts too, unless it is always that slow.

    verdict    when                                           what follows
    ---------  ---------------------------------------------  ------------------------------------
    HEARD      something was heard recently                   –
    ASK        nothing for half of ``FLOOR_S``                its /health is asked
    SUSPECTED  the tolerance of streams is exceeded; or       others get new requests
               ``FLOOR_S`` is, and /health is late
    DEAD       twice ``FLOOR_S``, and /health twice as late;  requests without a byte go elsewhere,
               or ten times the tolerance of streams          too
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.instances.state import InstanceState, prefill_s
from hetero_gateway.core.types import PREFILL, WHOLE

FLOOR_S: Final = 0.75
UNKNOWN_S: Final = 5.0
# How late an answer to /health has to be to mean something; or this many times the last one, if
# that is more.
LATE_HEALTH_S: Final = 0.5
_TIMES: Final = 3.0
# This many times the tolerance of streams suffices without /health: an engine may hang behind a
# server that answers it.
_SURE: Final = 10.0
# Tolerance for each leg of a request that two instances share: prefill times are not learnt there,
# and an engine gives up the other one after 5 s itself.
LEG_S: Final = 10.0
_LONGEST_PAUSE_S: Final = 30.0
_FORGOTTEN_S: Final = 60.0


class Silence(enum.Enum):
    HEARD = enum.auto()
    ASK = enum.auto()
    SUSPECTED = enum.auto()
    DEAD = enum.auto()


class Pauses:
    """Recent pauses of an instance that continued afterwards: a model that is wrong, or cannot know
    what holds the instance up, would take them for its end again and again.
    """

    __slots__ = ("_longest_s", "_noted_s")

    def __init__(self) -> None:
        self._longest_s = self._noted_s = 0.0

    def note(self, pause_s: float, now_s: float) -> None:
        if pause_s <= _LONGEST_PAUSE_S and pause_s > self.longest_s(now_s):
            self._longest_s, self._noted_s = pause_s, now_s

    def longest_s(self, now_s: float) -> float:
        return self._longest_s * math.exp((self._noted_s - now_s) / _FORGOTTEN_S)


class Health(NamedTuple):
    """``asked_s``: when the unanswered /health was asked; ``last_s``: how long the last answer
    took; infinite: unknown, or slow although the instance serves.
    """

    asked_s: float | None
    last_s: float


def next_step_s(state: InstanceState) -> float | None:
    """When its streams' next tokens are due, s, given the waiting prompts; None: unknown."""
    if state.constants is None or (state.stands_in and not state.observed):
        return None
    step_s = 1 / state.steps_per_s if state.steps_per_s > 0 else 0.0
    if state.waiting:
        step_s += prefill_s(state, state.waiting, state.waiting_prompt, state.waiting_prefill)
    return step_s


def judge(
    state: InstanceState,
    outstanding: Iterable[Dispatch],
    heard_s: float,
    streams: bool,
    health: Health,
    pauses: Pauses,
    now_s: float,
    slack_s: float = 0.0,
) -> Silence:
    """Judge an instance's silence.

    Args:
        outstanding: on it.
        heard_s: when it was last heard, or when the first of these was sent after a pause.
        streams: some of them stream to clients that read.
        slack_s: how late news of the instance may arrive here.
    """
    floor_s, silent_s, share = FLOOR_S + slack_s, now_s - heard_s, 0.0
    if silent_s < floor_s / 2:
        return Silence.HEARD
    usual_s = 2 * pauses.longest_s(now_s)
    step_s = next_step_s(state)
    least_s = max(usual_s, UNKNOWN_S + slack_s if step_s is None else floor_s)
    if streams:
        share = silent_s / max(least_s, _TIMES * (step_s or 0.0))
    for entry in outstanding:
        owes = entry.request.streams or (entry.leg is PREFILL and not entry.pinned)
        if owes and entry.tracked and not entry.streaming:
            tolerated_s = least_s if entry.leg is WHOLE else max(least_s, LEG_S + slack_s)
            most_s = max(tolerated_s, _TIMES * entry.expected_s)
            share = max(share, (now_s - max(heard_s, entry.sent_s)) / most_s)
    late = 0.0
    if health.asked_s is not None:
        late = (now_s - health.asked_s) / max(LATE_HEALTH_S, _TIMES * health.last_s)
    if share >= _SURE or (silent_s >= 2 * floor_s and late >= 2):
        return Silence.DEAD
    if share >= 1 or (silent_s >= floor_s and late >= 1):
        return Silence.SUSPECTED
    return Silence.ASK
