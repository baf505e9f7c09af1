"""How far each instance's requests are, as far as it can be seen from outside the engines.

``finish-time`` (docs/scheduling.md) needs more than loads: who waits for a first token, who streams
and how much context that is, how much output is still to come, and how fast the machine really is.
All of it is kept in sums per slot, so that one placement never walks the running requests.

    symbol  row           of each slot                                               unit
    |U|     WAITING       sequences that were sent and have no first token yet       sequences
    |R|     STREAMING     sequences past their first token                           sequences
    Σ_U I   WAITING_PROMPT   prompt tokens of U                                      tokens
    Σ_U P   WAITING_OUTPUT   predicted output tokens of U                            tokens
    Σ_R I+g CONTEXT       cached tokens of R, g being the tokens streamed so far     tokens
    f       SPEED         observed over modelled step time, exponentially forgotten  –
            SILENT_S      since it has owed a first token without giving any; else 0 s

g is not counted token by token. Each slot has a step clock, the decode steps that its engine has
made as the model has it (times f), set right by every observation; all that stream on one engine
advance together, so g is the clock's advance since the first token, and Σ g needs two sums.
Residual lives depend on g by *stage* (powers of two): a heap per slot moves a sequence on when the
clock passes its next stage.

What is observed is kept as rows, too (``observation.py``): the batch and the context of a row
are means over its time, since a batch may come and go between two looks.

A slot without a profile has stand-in constants. What they say is of no account, so its f may be
anything; until it was observed, f is the lowest of its kind, so that it is tried.

The clock of the world is an argument; nothing here knows what a policy makes of the figures.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.costs.cost_model import FloatArray
from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.core.instances.ledger import Dispatch
from hetero_gateway.core.instances.observation import FirstTokenRow, Observations, StepRow, seconds
from hetero_gateway.core.lengths.estimates import STAGE_TOKENS

WAITING, STREAMING, WAITING_PROMPT, WAITING_OUTPUT, CONTEXT, SPEED, SILENT_S = range(7)
# The last is kept as when the slot last gave a first token, or began to owe one. Rows after those
# are our own: the step clock, when it was read, and its rate.
_HEARD_S = SILENT_S
_CLOCK, _READ_S, _STEPS_PER_S = 7, 8, 9
_ROWS = 10

# The speed factor forgets over seconds of observed steps: long enough to average the noise of a
# network, short enough to notice a slow-down within a few answers. It starts as if 0.2 s of steps
# had been as modelled, and the bounds keep a bad observation from shutting an instance out.
_FORGET_S = 5.0
_PRIOR_S = 0.2
_SPEED_BOUNDS = (0.1, 10.0)
_STAND_IN_BOUNDS = (1e-3, 1e3)


class _Stay:
    """One dispatch on its instance."""

    __slots__ = (
        "before",
        "joined",
        "output_tokens",
        "prompt_tokens",
        "sequences",
        "stage",
        "streaming",
    )

    def __init__(self, sequences: int, prompt_tokens: float, output_tokens: float) -> None:
        self.sequences = sequences
        self.prompt_tokens = prompt_tokens  # of all its sequences
        self.output_tokens = output_tokens
        self.streaming = False
        self.stage = -1
        self.joined = 0.0  # the step clock at its first token
        # When it was sent, and what was there: waiting, their prompts, streaming, context.
        self.before: tuple[float, float, float, float, float] | None = None


class _Interval:
    """What happened on a slot since the last observation, for its row."""

    __slots__ = ("context", "prompt_tokens", "prompts", "sequences", "streamed_s")

    def __init__(self) -> None:
        self.streamed_s = 0.0  # time in which anything streamed
        self.sequences = 0.0  # ∫ of streaming sequences, and of their context, over that time
        self.context = 0.0
        # Whose prefill came between the decode steps.
        self.prompts = 0.0
        self.prompt_tokens = 0.0


class Outlook(NamedTuple):
    """What a policy sees of a pool's instances at one moment; arrays of one entry per instance.

    ``constants`` are p1..p8 as rows, ``rows`` those named in this module, ``stages`` the streaming
    sequences by stage, ``residual`` the expected further output by stage (tokens). ``profiled`` is
    False when no instance has constants, and no speed was observed either.
    ``typical_request_time_s`` is T of a request of the lengths that arrive on average. ``queued``
    is how many requests wait in the gateway, ``idle_s`` the time since the last arrival,
    ``mean_gap_s`` that between the arrivals before; ``mean_request_times_s`` computes T of the mean
    queued request on each instance. ``stands_in``: some instance's constants are not its own, so
    its times come from its observed speed.
    """

    constants: FloatArray
    kv_capacity_tokens: FloatArray
    max_num_seqs: FloatArray
    rows: FloatArray
    stages: FloatArray
    residual: FloatArray
    profiled: bool
    typical_request_time_s: FloatArray
    queued: int
    idle_s: float
    mean_gap_s: float
    mean_request_times_s: Callable[[], FloatArray] | None
    stands_in: bool = False


class Estimates(NamedTuple):
    """What ``finish-time`` expects of each candidate: why it chose as it did.

    ``latency_s``: the request's own latency there. ``delay_s``: what it costs those that are there
    already, summed. ``memory_price_s``: what it takes from those to come. ``cost_s``: the sum,
    which the policy compares. ``ttft_s``: until its first token. ``room``: whether the instance may
    be sent a request now.
    """

    latency_s: FloatArray
    delay_s: FloatArray
    memory_price_s: FloatArray
    cost_s: FloatArray
    ttft_s: FloatArray
    room: NDArray[np.bool_]


class Progress:
    """The sums of every slot.

    The order of events of a dispatch is ``placed``, then ``first_token`` or not, then ``left``.

    Args:
        keeps: keep what is observed as rows, too.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._rows: FloatArray = np.zeros((_ROWS, 8))
        self._stages: FloatArray = np.zeros((8, len(STAGE_TOKENS)))
        self._constants: list[Constants | None] = []
        self._requests: list[int] = []
        self._moves: list[list[tuple[float, int, _Stay]]] = []
        self._stays: dict[Dispatch, _Stay] = {}
        self._sequence = 0
        # For the speed factor: observed and modelled seconds, what came since the last observation,
        # and the step clock then.
        self._observed_s: list[float] = []
        self._modelled_s: list[float] = []
        self._intervals: list[_Interval] = []
        self._observed_clock: list[float] = []
        self._observations: list[Observations] = []
        # Slots whose constants stand in for unknown ones, and whether they were observed.
        self._stand_ins: dict[int, bool] = {}

    def open_slot(self, slot: int, constants: Constants | None, *, stand_in: bool = False) -> None:
        """Begin a slot anew, or change its constants: then its speed factor begins anew.

        Args:
            constants: None: its clock stands.
            stand_in: they are not of this machine.
        """
        while slot >= len(self._constants):
            self._constants.append(None)
            self._requests.append(0)
            self._moves.append([])
            self._observed_s.append(_PRIOR_S)
            self._modelled_s.append(_PRIOR_S)
            self._intervals.append(_Interval())
            self._observed_clock.append(math.nan)
            self._observations.append(Observations())
        while slot >= self._rows.shape[1]:
            self._rows = np.concatenate((self._rows, np.zeros_like(self._rows)), axis=1)
            self._stages = np.concatenate((self._stages, np.zeros_like(self._stages)))
        if not stand_in:
            self._stand_ins.pop(slot, None)
        if self._constants[slot] != constants or self._rows[SPEED, slot] == 0:
            self._constants[slot] = constants
            self._observed_s[slot] = self._modelled_s[slot] = _PRIOR_S
            self._rows[SPEED, slot] = 1.0
            if stand_in:
                self._stand_ins[slot] = False
                self._rows[SPEED, slot] = self._lowest_stand_in_speed()
            self._set_rate(slot)
        elif stand_in:
            self._stand_ins.setdefault(slot, False)

    def close_slot(self, slot: int) -> None:
        """Forget a slot's past; its dispatches have left."""
        self._rows[:, slot] = 0.0
        self._stages[slot] = 0.0
        self._moves[slot].clear()
        self._observed_s[slot] = self._modelled_s[slot] = _PRIOR_S
        self._observed_clock[slot] = math.nan
        self._intervals[slot] = _Interval()
        self._observations[slot] = Observations()
        self._constants[slot] = None
        self._stand_ins.pop(slot, None)

    # Events

    def placed(self, dispatch: Dispatch, now_s: float, *, alone: bool = True) -> None:
        """A request was sent: it is in U. ``alone``: nobody is there that is not known here."""
        request = dispatch.request
        n = request.sequences
        stay = _Stay(n, n * request.prompt_tokens, n * request.predicted_output_tokens)
        self._stays[dispatch] = stay
        rows, slot = self._rows, dispatch.slot
        waiting = float(rows[WAITING, slot])
        if waiting == 0:
            rows[_HEARD_S, slot] = now_s
        if alone and self._keeps:
            stay.before = (
                now_s,
                waiting,
                float(rows[WAITING_PROMPT, slot]),
                float(rows[STREAMING, slot]),
                float(rows[CONTEXT, slot]),
            )
        self._requests[slot] += 1
        rows[WAITING, slot] += n
        rows[WAITING_PROMPT, slot] += stay.prompt_tokens
        rows[WAITING_OUTPUT, slot] += stay.output_tokens

    def first_token(self, dispatch: Dispatch, now_s: float, *, seen: bool = True) -> bool:
        """It streams: from U to R. False, and no change, unless it was in U.

        ``seen``: or else only predicted, which nothing is to be learnt from.
        """
        stay = self._stays.get(dispatch)
        if stay is None or stay.streaming:
            return False
        slot = dispatch.slot
        clock = self._read_clock(slot, now_s)
        self._leave_waiting(slot, stay)
        stay.streaming = True
        stay.stage = 0
        stay.joined = clock
        rows, n = self._rows, stay.sequences
        rows[_HEARD_S, slot] = now_s
        if rows[STREAMING, slot] > 0:
            # Only then was its prefill among decode steps that are observed.
            interval = self._intervals[slot]
            interval.prompts += n
            interval.prompt_tokens += stay.prompt_tokens
        if seen and stay.before is not None:
            self._keep_first_token(slot, stay, now_s)
        rows[STREAMING, slot] += n
        # The first token is out: each sequence holds its prompt and that one.
        rows[CONTEXT, slot] += stay.prompt_tokens + n
        self._stages[slot, 0] += n
        self._schedule_move(slot, stay)
        self._set_rate(slot)
        return True

    def left(self, dispatch: Dispatch, now_s: float) -> None:
        """It is no longer there, whatever the reason. Unknown dispatches are ignored."""
        stay = self._stays.pop(dispatch, None)
        if stay is None:
            return
        slot, rows = dispatch.slot, self._rows
        self._requests[slot] -= 1
        if not stay.streaming:
            self._leave_waiting(slot, stay)
            return
        clock = self._read_clock(slot, now_s)
        n = stay.sequences
        rows[STREAMING, slot] -= n
        rows[CONTEXT, slot] -= stay.prompt_tokens + n * (1 + clock - stay.joined)
        self._stages[slot, stay.stage] -= n
        stay.stage = -1
        if rows[STREAMING, slot] == 0:
            # Exactly nothing, so that no remainder of the sums outlives a busy period.
            rows[CONTEXT, slot] = rows[_CLOCK, slot] = 0.0
            # A clock that began anew between two observations is not set by the second.
            self._observed_clock[slot] = math.nan
            self._moves[slot].clear()
        self._set_rate(slot)

    def observe_steps(
        self, slot: int, steps: float, duration_s: float, now_s: float
    ) -> StepRow | None:
        """The engine made ``steps`` decode steps in ``duration_s``, up to now, while it streamed.

        Sets the speed factor, and the step clock right. Returns the row that it was; None: none.
        """
        clock = self._read_clock(slot, now_s)
        interval, self._intervals[slot] = self._intervals[slot], _Interval()
        streaming = self._rows[STREAMING, slot] >= 1
        row = None
        if duration_s > 0 and (streaming or interval.streamed_s > 0):
            # No step at all counts as well: that is an engine that hangs.
            row = self._step_row(slot, steps, duration_s, interval)
            if self._keeps:
                self._observations[slot].add_steps(row)
            c = self._constants[slot]
            if c is not None:
                self._set_speed(slot, duration_s, sum(seconds(row.terms, c)))
            if streaming:
                if duration_s < interval.streamed_s / 2:
                    steps *= interval.streamed_s / duration_s  # it saw a part only
                true_clock = self._observed_clock[slot] + steps
                if not math.isnan(true_clock):
                    self._advance(slot, true_clock - clock)
        self._observed_clock[slot] = float(self._rows[_CLOCK, slot])
        self._set_rate(slot)
        return row

    def _step_row(self, slot: int, steps: float, duration_s: float, interval: _Interval) -> StepRow:
        streamed_s, share = interval.streamed_s, 1.0
        if streamed_s > 0:
            sequences, context = interval.sequences / streamed_s, interval.context / streamed_s
            share = min(1.0, duration_s / streamed_s)
        else:
            sequences = float(self._rows[STREAMING, slot])
            context = float(self._rows[CONTEXT, slot])
        return StepRow(
            duration_s,
            steps,
            sequences,
            context / sequences,
            share * interval.prompts,
            share * interval.prompt_tokens,
        )

    def _keep_first_token(self, slot: int, stay: _Stay, now_s: float) -> None:
        if stay.before is None:
            return
        placed_s, waiting, tokens, streaming, context = stay.before
        if now_s > placed_s:
            cached = context / streaming if streaming else 0.0
            self._observations[slot].add_first_token(
                FirstTokenRow(
                    now_s - placed_s,
                    stay.sequences,
                    stay.prompt_tokens,
                    waiting,
                    tokens,
                    streaming,
                    cached,
                )
            )

    def _set_speed(self, slot: int, observed_s: float, modelled_s: float) -> None:
        keep = math.exp(-observed_s / _FORGET_S)
        observed = self._observed_s[slot] = self._observed_s[slot] * keep + observed_s
        modelled = self._modelled_s[slot] = self._modelled_s[slot] * keep + modelled_s
        low, high = _SPEED_BOUNDS
        if slot in self._stand_ins:
            low, high = _STAND_IN_BOUNDS
            self._stand_ins[slot] = True
        self._rows[SPEED, slot] = min(high, max(low, observed / modelled))
        if slot in self._stand_ins:
            lowest = self._lowest_stand_in_speed()
            for other, observed_once in self._stand_ins.items():
                if not observed_once:
                    self._rows[SPEED, other] = lowest

    def _lowest_stand_in_speed(self) -> float:
        speeds = [float(self._rows[SPEED, s]) for s, seen in self._stand_ins.items() if seen]
        return min(speeds, default=1.0)

    # What a policy sees

    def rows(self, slots: NDArray[np.intp], now_s: float) -> FloatArray:
        """The rows of these slots at ``now_s``, by the names above."""
        rows: FloatArray = self._rows.take(slots, axis=1)
        elapsed_s = np.maximum(now_s - rows[_READ_S], 0.0)
        rows[CONTEXT] += rows[STREAMING] * elapsed_s * rows[_STEPS_PER_S]
        rows[SILENT_S] = (now_s - rows[_HEARD_S]) * (rows[WAITING] > 0)
        return rows

    def stages(self, slots: NDArray[np.intp]) -> FloatArray:
        """Streaming sequences by stage, shape (slots, stages), as of each slot's last event."""
        result: FloatArray = self._stages.take(slots, axis=0)
        return result

    def streams(self, dispatch: Dispatch) -> bool:
        """Whether a dispatch is there and past its first token."""
        stay = self._stays.get(dispatch)
        return stay is not None and stay.streaming

    def speed(self, slot: int) -> float:
        """The speed factor f: above 1 the machine is slower than its constants say."""
        return float(self._rows[SPEED, slot])

    def observed(self, slots: Iterable[int]) -> bool:
        """Whether any of these slots was observed although its constants only stand in."""
        return any(self._stand_ins.get(slot, False) for slot in slots)

    def stand_in(self, slot: int) -> Constants | None:
        """The constants that stand in for this slot's; None: it has its own, or none at all."""
        return self._constants[slot] if slot in self._stand_ins else None

    def requests(self, slot: int) -> int:
        """Requests that are there."""
        return self._requests[slot]

    def observations(self, slot: int) -> Observations:
        """What was seen of the slot."""
        return self._observations[slot]

    def waiting(self, slot: int) -> int:
        """Sequences without a first token."""
        return int(self._rows[WAITING, slot])

    # The step clock

    def _read_clock(self, slot: int, now_s: float) -> float:
        rows = self._rows
        elapsed_s = now_s - float(rows[_READ_S, slot])
        if elapsed_s > 0:
            rows[_READ_S, slot] = now_s
            streaming = float(rows[STREAMING, slot])
            if streaming > 0:
                steps = elapsed_s * float(rows[_STEPS_PER_S, slot])
                interval = self._intervals[slot]
                interval.streamed_s += elapsed_s
                interval.sequences += streaming * elapsed_s
                context = float(rows[CONTEXT, slot]) + 0.5 * steps * streaming
                interval.context += context * elapsed_s
                self._advance(slot, steps)
        return float(rows[_CLOCK, slot])

    def _advance(self, slot: int, steps: float) -> None:
        rows = self._rows
        if steps == 0:
            return
        rows[CONTEXT, slot] += steps * rows[STREAMING, slot]
        clock = rows[_CLOCK, slot] = float(rows[_CLOCK, slot]) + steps
        moves = self._moves[slot]
        while moves and moves[0][0] <= clock:
            _, _, stay = heapq.heappop(moves)
            if stay.stage >= 0:
                self._stages[slot, stay.stage] -= stay.sequences
                stay.stage += 1
                self._stages[slot, stay.stage] += stay.sequences
                self._schedule_move(slot, stay)

    def _schedule_move(self, slot: int, stay: _Stay) -> None:
        following = stay.stage + 1
        if following < len(STAGE_TOKENS):
            self._sequence += 1
            # The first token came before the clock's first step.
            due = stay.joined + STAGE_TOKENS[following] - 1
            heapq.heappush(self._moves[slot], (due, self._sequence, stay))

    def _set_rate(self, slot: int) -> None:
        c, rows = self._constants[slot], self._rows
        if c is None or rows[STREAMING, slot] < 1:
            rows[_STEPS_PER_S, slot] = 0.0
        else:
            step_s = float(rows[SPEED, slot]) * self._step_s(slot, c)
            rows[_STEPS_PER_S, slot] = 1 / max(step_s, 1e-6)

    def _step_s(self, slot: int, c: Constants) -> float:
        """Eq. (4)'s step of all that stream, without f."""
        rows = self._rows
        batch, context = float(rows[STREAMING, slot]), float(rows[CONTEXT, slot])
        return c.p5 * context + c.p6 * batch + c.p7 * context / batch + c.p8

    def _leave_waiting(self, slot: int, stay: _Stay) -> None:
        rows = self._rows
        rows[WAITING, slot] -= stay.sequences
        if rows[WAITING, slot] == 0:
            rows[WAITING_PROMPT, slot] = rows[WAITING_OUTPUT, slot] = 0.0
        else:
            rows[WAITING_PROMPT, slot] -= stay.prompt_tokens
            rows[WAITING_OUTPUT, slot] -= stay.output_tokens
