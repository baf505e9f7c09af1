"""Whether an instance has fallen silent: a frozen process takes requests and answers none.

Two things are expected of an instance that works: that its streams go on, a step at a time, and
that they begin when it was predicted. What is tolerated is three times as much time as that, and at
least ``FLOOR_S``; a prompt that waits there may hold its streams up for as long as it takes to
prefill. Where the model cannot say (no profile, or a stand-in's whose speed was not seen),
at least ``UNKNOWN_S`` is; of a prompt for another instance, and of an answer to one, at least
``LEG_S``; and twice as long a pause as one that was none lately, as models are wrong (``Pauses``).
Anything heard of the instance begins all of it anew, so one slow request says nothing of an
instance that serves others.

An answer that does not stream is whole when it is, and lengths are hard to predict: where such are
all there is, /health is asked, and its silence counts beside theirs, if it is not always so slow.

    verdict    when                                           what follows
    ---------  ---------------------------------------------  ------------------------------------
    HEARD      something was heard lately                     –
    ASK        nothing was for half of ``FLOOR_S``            its /health is asked
    SUSPECTED  what is tolerated of streams is over; or of    others get what is new
               ``FLOOR_S``, and /health is late
    DEAD       twice ``FLOOR_S``, and /health twice as late;  what has no byte yet goes elsewhere,
               or ten times what is tolerated of streams      too
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
# How late an answer to /health is that says something; or so many times the last one, if that is
# more.
LATE_HEALTH_S: Final = 0.5
_TIMES: Final = 3.0
# So many times what is tolerated of streams is enough without /health: an engine may hang behind a
# server that answers that.
_SURE: Final = 10.0
# Of a request that two instances share each leg is tolerated for so long: nothing is learnt of how
# long prompts take there, and an engine gives the other one up after 5 s itself.
LEG_S: Final = 10.0
_LONGEST_PAUSE_S: Final = 30.0
_FORGOTTEN_S: Final = 60.0


class Silence(enum.Enum):
    HEARD = enum.auto()
    ASK = enum.auto()
    SUSPECTED = enum.auto()
    DEAD = enum.auto()


class Pauses:
    """How long an instance was silent lately, and went on: what a model that is wrong, or cannot
    know what holds it up, would take for its end again and again.
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
    """``asked_s``: when /health was asked that is not answered yet; ``last_s``: how long the last
    answer took; infinite: nobody knows, or it takes long although the instance serves.
    """

    asked_s: float | None
    last_s: float


def next_step_s(state: InstanceState) -> float | None:
    """When its streams' next tokens are expected, s, with the prompts that wait; None: unknown."""
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
    """What an instance's silence means.

    Args:
        outstanding: on it.
        heard_s: when anything was heard of it, or the first of these was sent after a pause.
        streams: some are under way there whose clients read.
        slack_s: how late it may be known here that something was heard.
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
