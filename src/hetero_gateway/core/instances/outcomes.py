"""What became of an instance's requests, and whether it is sent more of them: passive health.

Each instance has a circuit breaker, and only what real requests met moves it on. A good answer to a
probe of its health alone does not: an engine may answer that and fail all that it is asked for.

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
                                     if it lives;
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
is how many came before it, and is forgotten when the last one ended max_s ago. Slow start: as many
requests at once as it had, and twice as many every 1.4 s, for 10 s. Busy: its engine said 503 or
429, which is no failure; for 0.5 s·2^k it gets nothing while others can.

Half-open: one request tries it, and one more once the first has been under way for 1 s, 2 s, 4 s,
…; requests whose first bytes come soon have precedence for half a second. What fails mostly fails
at once, so a trial that has not after 1.5 s, and a good /health that was asked for then, are proof
enough, unless the instance was ejected for its silence; if the trial fails later, that is as if it
had been half-open all the time.

Silence (``silence.py``) ejects like one failure too many, but that says nothing of what the
instance does with requests: once anything is heard of what it has, it is over, and if that was
within two seconds, as if nothing had been. Where nothing is left there to be heard of, it is
half-open when its term is over and its /health was good since, or 10 s later.

What is no outcome: 4xx answers, clients that left, errors of the gateway's own. A time-out is one
only if nothing good was heard of the instance since the request was sent: a long request says
nothing of an instance that serves others.

The panic rule (never more than half of a model's instances) is ``ejections.py``'s, and which
failures are the request's fault. The clock is an argument.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from hetero_gateway.core.request import Request
from hetero_gateway.core.types import Outcome

# Seconds that the ring holds, in parts of one second.
WINDOW_PARTS: Final = 10
# Slow start: how long it lasts, how many requests it begins with, and how soon twice as many.
SLOW_START_S: Final = 10.0
_FIRST_REQUESTS: Final = 2
_DOUBLING_S: Final = 1.4
# How long an engine that is busy gets nothing: this, doubled by each such answer in a row. An
# engine's own Retry-After counts instead, up to the same limit.
_BUSY_BASE_S: Final = 0.5
_BUSY_MAX_S: Final = 10.0
# Half-open: when the second request may try it, after the first, and how much later one that takes
# long; and how long a trial has to go on before a good /health means anything.
_SECOND_TRIAL_S: Final = 1.0
_LATER_IF_LONG_S: Final = 0.5
_PROOF_S: Final = 1.5
# An answer of no more tokens is whole about as soon as a stream begins.
_QUICK_TOKENS: Final = 64.0
# Of ejections for silence: that an instance answers /health says nothing against it.
SILENT: Final = "silent"
SILENT_REASONS: Final = frozenset((SILENT, "first_byte_timeout", "idle_timeout"))
# For so long an instance that was ejected for its silence is not tried without a sign of life.
_LIFELESS_S: Final = 10.0


class EjectionRules(NamedTuple):
    """When an instance is ejected, and for how long; see the module. ``enabled``: or else never."""

    enabled: bool = True
    consecutive_failures: int = 5
    failure_ratio: float = 0.5
    min_outcomes: int = 10
    base_s: float = 2.0
    max_s: float = 60.0


class BreakerState(enum.Enum):
    """Whether an instance is sent requests, as far as outcomes go: a circuit breaker's states.

    The values are /admin's words, in which an instance, and not its breaker, is open.
    """

    CLOSED = "open"
    SLOW_START = "recovering"
    BUSY = "busy"
    OPEN = "ejected"
    HALF_OPEN = "half-open"


# The breaker's state, until when; the last ejection's reason, how many there were, and its end.
Standing = tuple[str, float, str, int, float]


class Bar(NamedTuple):
    """Why an instance should not get a request now. ``rank``: the lower, the sooner all the same.

    ``RETRY_RANK`` and lower is good enough for a second attempt, too.
    """

    rank: int
    why: str


RETRY_RANK: Final = 0
_FULL: Final = Bar(0, "recovering")  # it has as many as its slow start allows
_BUSY: Final = Bar(1, "busy")
_TRIED: Final = Bar(2, "ejected")  # others try it now
_EJECTED: Final = Bar(3, "ejected")


class Sent(Protocol):
    """A request on its instance. ``outcome``: None until it is over."""

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
            # Nothing is older than the whole ring.
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
        """Take one back that was added at ``at_s``, if it still counts."""
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
        self.trial = trial  # it was its trial that failed

    def suffice(self, rules: EjectionRules) -> bool:
        count = self.good + self.failed
        by_ratio = count >= rules.min_outcomes and self.failed >= rules.failure_ratio * count
        return self.run >= rules.consecutive_failures or by_ratio


@dataclass(slots=True, eq=False, repr=False)
class Outcomes:
    """One instance's.

    Attributes:
        breaker: its state as of the last event or ``advance``.
        until_s: when that ends by itself; infinite where it does not.
        reason: of the last ejection, a short label; "" where there was none.
        ejections: k + 1, of those that still count.
        trials: the requests that try it while it is half-open; of those that /health spoke for,
            which go on in the slow start, too.
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
    heard_s: float = -math.inf  # the last success, or bytes of a stream, as far as they are noted
    _good_s: float = -math.inf  # the last success
    _ejected_s: float = -math.inf
    # What silence put an end to: what it was, and until when.
    _broken_off: tuple[BreakerState, float] | None = None
    _alive_s: float = -math.inf  # when its /health was asked that was good
    _ended_s: float = -math.inf  # of the last ejection
    _grounds: _Grounds | None = None
    _since_s: float = 0.0  # half-open, or slow start: since when
    _first_requests: int | None = None  # with how many it begins slowly
    _tried_s: float = 0.0  # when the first of the trials was sent
    _trial_failed: bool = False

    def __repr__(self) -> str:
        return f"<Outcomes {self.breaker.value}: {self.ring!r}, {self._run} failed in a row>"

    @property
    def ejected(self) -> bool:
        """It gets nothing, or only its trials."""
        return self.breaker in (BreakerState.OPEN, BreakerState.HALF_OPEN)

    @property
    def shut(self) -> bool:
        """It gets nothing at all, until ``until_s``."""
        return self.breaker is BreakerState.OPEN

    # What another process knows of it

    def standing(self) -> Standing:
        """As ``resume`` takes it."""
        return self.breaker.value, self.until_s, self.reason, self.ejections, self._ended_s

    def resume(self, standing: Standing, now_s: float) -> bool:
        """Stand as another process's ``standing`` said. Returns whether it is not closed now.

        What had begun to try it is not known here: half-open it begins anew.
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

    # What happens to its requests

    def succeeded(self, now_s: float, request: Sent | None = None) -> bool:
        """One was answered well, or began to stream. Returns whether it stands elsewhere now."""
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
        """Its /health, asked at ``asked_s``, is good. Returns whether it stands elsewhere now."""
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
        """Bytes of its streams came. Returns whether it stands elsewhere now."""
        self.heard_s = now_s
        if not self.ejected or self.reason != SILENT:
            return False
        if now_s < self._ejected_s + self.rules.base_s and self._broken_off is not None:
            # So short a pause is nothing that an instance has to recover from.
            self._ended_s = now_s
            self.trials = []
            self._turn(*self._broken_off)
        else:
            self._recover(now_s)
        self.ejections -= 1
        return True

    @property
    def seen_alive_s(self) -> float:
        """When it last answered well, or its /health was asked that was good."""
        return max(self.heard_s, self._alive_s)

    @property
    def is_heard_again(self) -> bool:
        """It was ejected for its silence, and answered since."""
        return self.ejected and self.reason == SILENT and self.heard_s > self._ejected_s

    def answered(self, last_s: float, count: int) -> None:
        """So many were answered well within a moment, up to ``last_s``, none of them a trial."""
        self.ring.add_good(last_s, count)
        self._good_s = self.heard_s = max(self._good_s, last_s)
        self._run = self._busy_run = 0

    def failed(self, now_s: float, request: Sent | None = None) -> bool:
        """One failed, and it is the instance's fault. Returns whether this is one too many."""
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
        """A failure at ``at_s`` was not its fault. Returns whether it is ejected no more."""
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
        """Its engine took no more. Returns whether it stands elsewhere now.

        Args:
            others: requests that are in flight there.
            request: the one that it did not take.
            retry_after_s: what the engine said, if it did.
        """
        self.advance(now_s)
        breaker = self.breaker
        if not self.rules.enabled or breaker in (BreakerState.OPEN, BreakerState.BUSY):
            return False
        if breaker is BreakerState.HALF_OPEN and request not in self.trials:
            return False
        if others > 0 and breaker is not BreakerState.HALF_OPEN:
            # It serves as many as these; no more until some time has shown that it can.
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
        """End its ejection: too few others are left."""
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
        """Move on where a term is over. Returns whether it stands elsewhere now."""
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
        """Why it should not get a request now; None: it may.

        ``in_flight``: requests on it; ``quick``: the request ``is_quick``.
        """
        self.advance(now_s)
        breaker = self.breaker
        if breaker is BreakerState.SLOW_START:
            if self._first_requests is None:
                # What was there before it recovered is no new load.
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
        """It got a request, whether there was a ``bar`` or not."""
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
        """The trials that are not over."""
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
        """When more requests than now may try it; infinite: as many as ever may."""
        due_s = self._trial_due_s()
        times = (due_s, due_s + _LATER_IF_LONG_S)
        return min((time_s for time_s in times if time_s > now_s), default=math.inf)
