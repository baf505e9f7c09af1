"""Passive health: the outcomes of an instance's requests, and whether it gets more of them.

Each instance has a circuit breaker, and only the outcomes of real requests drive it. A good answer
to a health probe alone does not: an engine may answer that and fail everything else.

    event            closed          busy, open        half-open            slow start
    ---------------  --------------  ----------------  -------------------  ---------------
    success          –               – (noted)         of a trial:          –
                                                       slow start
    failure          open, if it is  – (noted)         of a trial: open,    as closed; of a
                     one too many                      for longer; else     trial: open
                                                       noted
    busy answer      slow start, or  –                 of a trial: busy     as closed
                     busy if it has
                     nothing else
    no outcome       –               –                 of a trial: another  –
                                                       one may be it
    good /health     –               –                 slow start, if a     –
                                                       trial goes on
    its term ends    –               open: half-open,  –                    closed
                                     if it is alive;
                                     busy: slow start
    silence          open            –                 of a trial: open     open
    heard again      –               open for silence: –                    –
                                     slow start, or
                                     closed
    retracted        –               open: as before,  –                    –
                                     if too few are
                                     left
    reprieved        –               slow start        slow start           –

"One too many": ``consecutive_failures`` in a row, or ``failure_ratio`` of at least
``min_outcomes`` within 10 s. An ejection (the breaker is open) lasts base_s·2^k, at most max_s; k
is the number of ejections before it, and is reset once the last one ended max_s ago. Slow start:
as many requests at once as the instance had, and twice as many every 1.4 s, for 10 s. Busy: its
engine answered 503 or 429, which is no failure; for 0.5 s·2^k it gets nothing while others can.

Half-open: one request tries the instance, and one more after the first has been under way for 1 s,
2 s, 4 s, …; requests whose first bytes come soon have precedence for half a second. Most failures
come at once, so a trial that has not failed after 1.5 s, together with a good /health asked for
after that, is proof enough, unless the instance was ejected for silence. If the trial fails later,
that counts as if the instance had been half-open all the time.

Silence (``silence.py``) ejects like one failure too many, but says nothing about how the instance
treats requests: it ends as soon as anything is heard from the instance, and if that was within two
seconds, as if it had not happened. If nothing is outstanding there that could be heard, the
instance is half-open once its term has ended and its /health was good since, or 10 s later.

These are not outcomes: 4xx answers, clients that left, errors of the gateway's own. A time-out is
one only if nothing good was heard from the instance since the request was sent: a long request
says nothing about an instance that serves others.

``ejections.py`` has the panic rule (never more than half of a model's instances), and decides
which failures are the request's own fault. The clock is an argument.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from hetero_gateway.core.request import Request
from hetero_gateway.core.types import Outcome

# Seconds that the ring covers, in slots of one second.
WINDOW_PARTS: Final = 10
# Slow start: its duration, the requests it begins with, and how soon twice as many are allowed.
SLOW_START_S: Final = 10.0
_FIRST_REQUESTS: Final = 2
_DOUBLING_S: Final = 1.4
# How long a busy engine gets nothing: this, doubled by each such answer in a row. An engine's own
# Retry-After counts instead, up to the same limit.
_BUSY_BASE_S: Final = 0.5
_BUSY_MAX_S: Final = 10.0
# Half-open: when a second request may try it after the first, and how much later one that takes
# long; and how long a trial has to go on before a good /health means anything.
_SECOND_TRIAL_S: Final = 1.0
_LATER_IF_LONG_S: Final = 0.5
_PROOF_S: Final = 1.5
# An answer of at most this many tokens is complete about as soon as a stream begins.
_QUICK_TOKENS: Final = 64.0
# Of ejections for silence: a good /health does not count against them.
SILENT: Final = "silent"
SILENT_REASONS: Final = frozenset((SILENT, "first_byte_timeout", "idle_timeout"))
# An instance ejected for silence is not tried for this long without a sign of life.
_LIFELESS_S: Final = 10.0


class EjectionRules(NamedTuple):
    """When an instance is ejected, and for how long; see the module. Never unless ``enabled``."""

    enabled: bool = True
    consecutive_failures: int = 5
    failure_ratio: float = 0.5
    min_outcomes: int = 10
    base_s: float = 2.0
    max_s: float = 60.0


class BreakerState(enum.Enum):
    """Whether an instance is sent requests, by its outcomes: the states of a circuit breaker.

    The values are /admin's words, where "open" means that the instance gets requests.
    """

    CLOSED = "open"
    SLOW_START = "recovering"
    BUSY = "busy"
    OPEN = "ejected"
    HALF_OPEN = "half-open"


# The breaker's state and its end; the last ejection's reason, the number of ejections, and its end.
Standing = tuple[str, float, str, int, float]


class Bar(NamedTuple):
    """Why an instance should get no request now. ``rank``: the lower, the sooner it still gets one.

    ``RETRY_RANK`` and lower is good enough for a second attempt, too.
    """

    rank: int
    why: str


RETRY_RANK: Final = 0
_FULL: Final = Bar(0, "recovering")  # its slow start allows no more
_BUSY: Final = Bar(1, "busy")
_TRIED: Final = Bar(2, "ejected")  # other requests try it now
_EJECTED: Final = Bar(3, "ejected")


class Sent(Protocol):
    """A request on its instance. ``outcome``: None until it ends."""

    outcome: Outcome | None


def is_quick(request: Request) -> bool:
    """Whether it soon shows that its instance works: by its first bytes, or a short answer."""
    return request.streams or request.predicted_output_tokens <= _QUICK_TOKENS


class OutcomeRing:
    """Successes and failures of the last ten seconds."""

    __slots__ = ("_failed", "_good", "_part", "_part_ends_s", "_place", "failed", "good")

    def __init__(self) -> None:
        self._part = self._place = 0
        self._part_ends_s = 1.0
        self._good = [0] * WINDOW_PARTS
        self._failed = [0] * WINDOW_PARTS
        self.good = 0
        self.failed = 0

    def __repr__(self) -> str:
        return f"<OutcomeRing {self.good} good, {self.failed} failed>"

    def advance(self, now_s: float) -> None:
        """Forget what is too old."""
        part = int(now_s)
        while self._part < part:
            # Everything is older than the whole ring.
            self._part = max(self._part + 1, part - WINDOW_PARTS)
            place = self._part % WINDOW_PARTS
            self.good -= self._good[place]
            self.failed -= self._failed[place]
            self._good[place] = self._failed[place] = 0
        self._place = self._part % WINDOW_PARTS
        self._part_ends_s = self._part + 1.0

    def add_good(self, now_s: float, count: int = 1) -> None:
        if now_s >= self._part_ends_s:
            self.advance(now_s)
        self._good[self._place] += count
        self.good += count

    def add_failed(self, now_s: float) -> None:
        self.advance(now_s)
        self._failed[self._place] += 1
        self.failed += 1

    def take_failed(self, at_s: float) -> None:
        """Take back a failure added at ``at_s``, if it still counts."""
        place = int(at_s) % WINDOW_PARTS
        if int(at_s) > self._part - WINDOW_PARTS and self._failed[place]:
            self._failed[place] -= 1
            self.failed -= 1

    def clear(self) -> None:
        self._good = [0] * WINDOW_PARTS
        self._failed = [0] * WINDOW_PARTS
        self.good = self.failed = 0


class _Grounds:
    """What an ejection rests on: the failures in a row, and the ring, as they were."""

    __slots__ = ("at_s", "failed", "good", "run", "trial")

    def __init__(self, at_s: float, run: int, ring: OutcomeRing, *, trial: bool) -> None:
        self.at_s = at_s
        self.run = run
        self.good = ring.good
        self.failed = ring.failed
        self.trial = trial  # its trial failed

    def suffice(self, rules: EjectionRules) -> bool:
        count = self.good + self.failed
        by_ratio = count >= rules.min_outcomes and self.failed >= rules.failure_ratio * count
        return self.run >= rules.consecutive_failures or by_ratio


@dataclass(slots=True, eq=False, repr=False)
class Outcomes:
    """The outcomes of one instance.

    Attributes:
        breaker: its state as of the last event or ``advance``.
        until_s: when that ends by itself; infinite if it does not.
        reason: of the last ejection, a short label; "" if there was none.
        ejections: k + 1, of those that still count.
        trials: requests that try it while it is half-open; those that /health spoke for also during
            the slow start.
        ring: the last ten seconds.
    """

    rules: EjectionRules
    breaker: BreakerState = BreakerState.CLOSED
    until_s: float = math.inf
    reason: str = ""
    ejections: int = 0
    trials: list[Sent] = field(default_factory=list)
    ring: OutcomeRing = field(default_factory=OutcomeRing)
    _run: int = 0  # failures in a row
    _run_began_s: float = 0.0
    _busy_run: int = 0
    heard_s: float = -math.inf  # the last success, or bytes of a stream if noted
    _good_s: float = -math.inf  # the last success
    _ejected_s: float = -math.inf
    # What silence interrupted: the state, and until when.
    _broken_off: tuple[BreakerState, float] | None = None
    _alive_s: float = -math.inf  # when the last good /health was asked
    _ended_s: float = -math.inf  # of the last ejection
    _grounds: _Grounds | None = None
    _since_s: float = 0.0  # half-open, or slow start: since when
    _first_requests: int | None = None  # with how many it begins slowly
    _tried_s: float = 0.0  # when the first trial was sent
    _trial_failed: bool = False

    def __repr__(self) -> str:
        return f"<Outcomes {self.breaker.value}: {self.ring!r}, {self._run} failed in a row>"

    @property
    def ejected(self) -> bool:
        """Whether it gets nothing, or only its trials."""
        return self.breaker in (BreakerState.OPEN, BreakerState.HALF_OPEN)

    @property
    def shut(self) -> bool:
        """Whether it gets nothing at all, until ``until_s``."""
        return self.breaker is BreakerState.OPEN

    # For another process

    def standing(self) -> Standing:
        """Its state, as ``resume`` takes it."""
        return self.breaker.value, self.until_s, self.reason, self.ejections, self._ended_s

    def resume(self, standing: Standing, now_s: float) -> bool:
        """Take over the state of another process's ``standing``. Returns whether it is not closed.

        Requests that were trying it are not known here: half-open starts over.
        """
        breaker, until_s, self.reason, self.ejections, self._ended_s = standing
        state = BreakerState(breaker)
        if state is BreakerState.OPEN or state is BreakerState.HALF_OPEN:
            self._ejected_s = now_s
            self._turn(BreakerState.OPEN, until_s if state is BreakerState.OPEN else now_s)
        elif state is BreakerState.BUSY:
            self._turn(state, until_s)
        elif state is BreakerState.SLOW_START:
            self._begin_slow(now_s, None)
        return self.breaker is not BreakerState.CLOSED

    # Events of its requests

    def succeeded(self, now_s: float, request: Sent | None = None) -> bool:
        """Note a good answer, or the start of a stream. Returns whether its state has changed."""
        self.ring.add_good(now_s)
        self._good_s = self.heard_s = now_s
        self._run = self._busy_run = 0
        if request not in self.trials:
            return False
        if self.breaker is BreakerState.SLOW_START:
            self.trials.clear()
            return False
        self._recover(now_s)
        return True

    def vouched(self, asked_s: float, now_s: float) -> bool:
        """Note a good /health, asked at ``asked_s``. Returns whether its state has changed."""
        self._alive_s = asked_s
        if self.breaker is BreakerState.OPEN and now_s >= self._ended_s:
            self.until_s = now_s
        was = self.breaker
        self.advance(now_s)
        if self.breaker is not BreakerState.HALF_OPEN or self.reason in SILENT_REASONS:
            return self.breaker is not was
        trials = self._on_trial()
        if not trials or asked_s < self._tried_s + _PROOF_S:
            return False
        self._recover(now_s)
        self.trials = trials
        return True

    def heard(self, now_s: float) -> bool:
        """Note bytes of its streams. Returns whether its state has changed."""
        self.heard_s = now_s
        if not self.ejected or self.reason != SILENT:
            return False
        if now_s < self._ejected_s + self.rules.base_s and self._broken_off is not None:
            # An instance need not recover from so short a pause.
            self._ended_s = now_s
            self.trials = []
            self._turn(*self._broken_off)
        else:
            self._recover(now_s)
        self.ejections -= 1
        return True

    @property
    def seen_alive_s(self) -> float:
        """When it last answered well, or when its last good /health was asked."""
        return max(self.heard_s, self._alive_s)

    @property
    def is_heard_again(self) -> bool:
        """Whether it was ejected for silence and has answered since."""
        return self.ejected and self.reason == SILENT and self.heard_s > self._ejected_s

    def answered(self, last_s: float, count: int) -> None:
        """Note a number of good answers within a moment, up to ``last_s``, none of them a trial."""
        self.ring.add_good(last_s, count)
        self._good_s = self.heard_s = max(self._good_s, last_s)
        self._run = self._busy_run = 0

    def failed(self, now_s: float, request: Sent | None = None) -> bool:
        """Note a failure that is the instance's fault. Returns whether it is one too many."""
        self.ring.add_failed(now_s)
        if self._run == 0:
            self._run_began_s = now_s
        self._run += 1
        self.advance(now_s)
        if not self.rules.enabled:
            return False
        self._trial_failed = request in self.trials
        if self.breaker is BreakerState.HALF_OPEN or self._trial_failed:
            return self._trial_failed and self.breaker is not BreakerState.OPEN
        if self.breaker is BreakerState.OPEN or self.breaker is BreakerState.BUSY:
            return False
        return _Grounds(now_s, self._run, self.ring, trial=False).suffice(self.rules)

    def heard_since(self, sent_s: float) -> bool:
        """Whether it has answered anything well since then."""
        return self._good_s >= sent_s

    def eject(self, now_s: float, reason: str) -> None:
        """Send it nothing for its term."""
        rules = self.rules
        if now_s - self._ended_s >= rules.max_s:
            self.ejections = 0
        term_s = min(rules.max_s, rules.base_s * 2.0 ** min(self.ejections, 60))
        trial = self.breaker is BreakerState.HALF_OPEN or self._trial_failed
        self._grounds = _Grounds(now_s, self._run, self.ring, trial=trial)
        self.ejections += 1
        self._broken_off = None
        if reason == SILENT and self.breaker in (BreakerState.CLOSED, BreakerState.SLOW_START):
            self._broken_off = self.breaker, self.until_s
        self.reason = reason
        self._ejected_s = now_s
        self.trials.clear()
        self._trial_failed = False
        self._ended_s = now_s + term_s
        self._turn(BreakerState.OPEN, self._ended_s)

    def retract(self, at_s: float, now_s: float) -> bool:
        """Take back a failure at ``at_s``: not its fault. Returns whether an ejection has ended."""
        self.ring.take_failed(at_s)
        if self._run and at_s >= self._run_began_s:
            self._run -= 1
        grounds = self._grounds
        if self.breaker is not BreakerState.OPEN or grounds is None or at_s > grounds.at_s:
            return False
        if self.reason == SILENT:
            return False
        grounds.run -= 1
        grounds.failed -= 1
        if grounds.trial:
            if at_s < grounds.at_s:
                return False
            self._open_half(now_s)
        elif grounds.suffice(self.rules):
            return False
        else:
            self._turn(BreakerState.CLOSED, math.inf)
        self.ejections -= 1
        self._grounds = None
        return True

    def busy(
        self,
        now_s: float,
        others: int,
        request: Sent | None = None,
        retry_after_s: float | None = None,
    ) -> bool:
        """Note that its engine accepted no more. Returns whether its state has changed.

        Args:
            others: other requests in flight there.
            request: the one that was not accepted.
            retry_after_s: the engine's own Retry-After, if any.
        """
        self.advance(now_s)
        breaker = self.breaker
        if not self.rules.enabled or breaker in (BreakerState.OPEN, BreakerState.BUSY):
            return False
        if breaker is BreakerState.HALF_OPEN and request not in self.trials:
            return False
        if others > 0 and breaker is not BreakerState.HALF_OPEN:
            # It serves as many as these; no more until time has shown that it can.
            self._begin_slow(now_s, others)
            return True
        told_s = _BUSY_BASE_S * 2.0 ** min(self._busy_run, 10)
        if retry_after_s is not None and retry_after_s > 0:
            told_s = retry_after_s
        self._busy_run += 1
        self.trials.clear()
        self._turn(BreakerState.BUSY, now_s + min(_BUSY_MAX_S, told_s))
        return True

    def reprieve(self, now_s: float) -> None:
        """End its ejection: too few other instances are left."""
        self._recover(now_s)

    def _recover(self, now_s: float) -> None:
        self._ended_s = now_s
        self._run = 0
        self.ring.clear()
        self._begin_slow(now_s, None)

    def _begin_slow(self, now_s: float, first_requests: int | None) -> None:
        self.trials = []
        self._grounds = None
        self._since_s = now_s
        self._first_requests = first_requests
        self._turn(BreakerState.SLOW_START, now_s + SLOW_START_S)

    def _turn(self, breaker: BreakerState, until_s: float) -> None:
        self.breaker = breaker
        self.until_s = until_s

    # Time, and whether it may be sent a request

    def advance(self, now_s: float) -> bool:
        """End a term that is over. Returns whether its state has changed."""
        if now_s < self.until_s:
            return False
        if self.breaker is BreakerState.HALF_OPEN:
            self.until_s = self._next_trial_s(now_s)
            return False
        if self.breaker is BreakerState.OPEN:
            lifeless_s = self._ejected_s + _LIFELESS_S
            if self.reason == SILENT and self._alive_s < self._ejected_s and now_s < lifeless_s:
                self.until_s = lifeless_s
                return False
            self._open_half(now_s)
        elif self.breaker is BreakerState.BUSY:
            self._begin_slow(now_s, None)
        else:
            self.trials = []
            self._turn(BreakerState.CLOSED, math.inf)
        return True

    def bar(self, now_s: float, in_flight: int, *, quick: bool = True) -> Bar | None:
        """Why it should get no request now; None: it may.

        ``in_flight``: requests on it; ``quick``: the request ``is_quick``.
        """
        self.advance(now_s)
        breaker = self.breaker
        if breaker is BreakerState.SLOW_START:
            if self._first_requests is None:
                # What was there before it recovered is not new load.
                self._first_requests = max(_FIRST_REQUESTS, in_flight + 1)
            growth = 2.0 ** ((now_s - self._since_s) / _DOUBLING_S)
            return _FULL if in_flight >= self._first_requests * growth else None
        if breaker is BreakerState.BUSY:
            return _BUSY
        if breaker is BreakerState.OPEN:
            return _EJECTED
        if breaker is BreakerState.HALF_OPEN and not self._may_try(now_s, quick):
            return _TRIED
        return None

    def sent(self, request: Sent, now_s: float) -> None:
        """Note that it was sent a request, whether there was a ``bar`` or not."""
        if not self.ejected or now_s < self._trial_due_s():
            return
        if not self.trials:
            self._tried_s = now_s
        self.trials.append(request)
        if self.breaker is BreakerState.HALF_OPEN:
            self.until_s = self._next_trial_s(now_s)

    @property
    def trials_since_s(self) -> float:
        """When the first of its trials was sent; there must be one."""
        return self._tried_s

    # Half-open

    def _open_half(self, now_s: float) -> None:
        self._since_s = now_s
        self._turn(BreakerState.HALF_OPEN, math.inf)
        self.until_s = self._next_trial_s(now_s)

    def _on_trial(self) -> list[Sent]:
        """The trials that have not ended."""
        self.trials = [trial for trial in self.trials if trial.outcome is None]
        return self.trials

    def _trial_due_s(self) -> float:
        """When one more request may try it."""
        trials = len(self._on_trial())
        if not trials:
            return self._since_s if self.breaker is BreakerState.HALF_OPEN else -math.inf
        return self._tried_s + _SECOND_TRIAL_S * 2.0 ** (trials - 1)

    def _may_try(self, now_s: float, quick: bool) -> bool:
        due_s = self._trial_due_s()
        return now_s >= (due_s if quick else due_s + _LATER_IF_LONG_S)

    def _next_trial_s(self, now_s: float) -> float:
        """When more requests than now may try it; infinite: no more than now."""
        due_s = self._trial_due_s()
        times = (due_s, due_s + _LATER_IF_LONG_S)
        return min((time_s for time_s in times if time_s > now_s), default=math.inf)
