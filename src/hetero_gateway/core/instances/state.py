"""The state of one instance as seen from outside: its load, its progress and its speed.

A request's life is a sequence of events, which change its instance as follows:

    event         from                  to           what changes
    dispatch      –                     WAITING      load, KV tokens and count grow; it joins U
    first_token   WAITING               STREAMING    it moves from U to R
    observe_steps –                     –            the step clock and f follow the observation
    observe_cache –                     –            so many prompt tokens were not prefilled
    prefilled     WAITING               PINNED       a prefill leg: it leaves U, its KV stays
    settle        all of these          settled      everything it added is taken off, once
    leave         (of the instance)     –            everything outstanding is settled

Any other event changes nothing: a second first token, a second ``settle``, a token after it. An
event that raises has changed nothing either: everything that can fail comes before the sums.

Rules:

1. A dispatch remembers what it was charged. ``settle`` takes off exactly that; nothing is
   recomputed. The first call returns True, every later one False.
2. Loads, KV tokens and counts are the sums over what is outstanding, and exactly 0 if nothing is.
   Loads are whole numbers of 2^-40 s, so that no residue stays (erratum 3: as floats of
   size e^(θu), the residue of a burst can outweigh real loads for the rest of the run). Sums of
   floats are set to 0 when their terms are gone.

``finish-time`` (docs/design/scheduling.md) needs more than loads. Everything is kept in sums, so
that a placement never walks the running requests:

    symbol  attribute              what it is                                          unit
    |U|     waiting                sent, without a first token yet                     sequences
    |R|     streaming              past the first token                                sequences
    Σ_U I   waiting_prompt         prompt tokens of U, and of what is PINNED           tokens
            waiting_prefill        the part of them that the engine has to compute     tokens
    Σ_U P   waiting_output         predicted output tokens of U                        tokens
    Σ_R I+g context                cached tokens of R; g: tokens streamed so far       tokens
            shared_tokens          of both, tokens shared by several: held once        tokens
    f       speed                  observed over modelled step time, forgetting        –
            heard_s                when it last gave a first token, or began to owe one
            recent_prefill         prompt tokens to compute, recently sent, forgetting tokens

g is not counted token by token. The step clock counts the engine's modelled decode steps (times f),
corrected by every observation; all streams of one engine advance together, so g is the clock's
advance since the first token, and Σ g needs two sums. Residual lives depend on g by *stage* (powers
of two): a heap moves a sequence on when the clock passes its next stage.

Observations are kept as rows, too (``observation.py``): batch and context of a row are means over
its time, since a batch may come and go between two looks. How much of the prompts was prefilled,
and how much was in the engine's prefix cache, is known later (``prefix_hits.py``).

An instance without a profile has stand-in constants from its first dispatch on. Their scale means
nothing, so its f may be anything. ``speed.py`` has f itself, and when it is doubted.

Load of another gateway in front of the same instance is kept separately (``PeerLoad``). It is added
where a policy looks, and to the batch of a modelled decode step: the engine's steps serve everyone.
Others' observations of its speed are averaged with ours, weighted by modelled time. The time is an
argument.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import astuple
from typing import Final

from hetero_gateway.core.costs.cost_model import attended_pairs
from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.core.instances.concurrency import NO_LIMIT, PATIENCE, PATIENCE_S, Concurrency
from hetero_gateway.core.instances.dispatch import NO_PEERS, UNITS_PER_S, Dispatch, Holder, PeerLoad
from hetero_gateway.core.instances.learnt import Learnt
from hetero_gateway.core.instances.observation import StepRow, seconds
from hetero_gateway.core.instances.prefix_hits import Interval, reported_hits
from hetero_gateway.core.instances.sightings import Sightings
from hetero_gateway.core.instances.slowness import HTTP_S
from hetero_gateway.core.instances.speed import (
    SpeedEstimate,
    first_token_times_s,
    guess,
    observe,
    revise,
    weigh,
)
from hetero_gateway.core.lengths.predictors import STAGE_TOKENS
from hetero_gateway.core.request import Request
from hetero_gateway.core.types import DECODE, MOST_TOKENS, PREFILL, InstanceId, Outcome, Usage

_STAGES = len(STAGE_TOKENS)

# The bounds keep a bad observation from shutting an instance out.
SPEED_BOUNDS = (0.1, 10.0)
_STAND_IN_BOUNDS = (1e-3, 1e3)
# A request whose tokens are not seen informs the speed if streams have not for this long.
STREAMS_SAY_S: Final = 2.0
_MOST_MISS: Final = 4.0
# Recently sent prompt tokens are forgotten over this time: about as long as an answer takes.
PREFILL_OVER_S: Final = 10.0
# Prompts that others report as begun occupy an engine for no longer than has passed, plus this: a
# long one is counted at its end.
_MOST_BEGUN_S: Final = 2.0


class InstanceState(Holder):
    """The sums of one instance.

    Args:
        instance_id: its id.
        slot: its small number in ``Table``.
        keeps: also keep observations as rows.
    """

    __slots__ = (
        "_begun_at_s",
        "_begun_s",
        "_freed_s",
        "_keeps",
        "_load_units",
        "_moves",
        "_outstanding",
        "_peer_loads",
        "_prefill_tokens",
        "_prompt_tokens",
        "_prompts",
        "_sequence",
        "_sightings",
        "checked_modelled_s",
        "checked_s",
        "clock",
        "concurrency",
        "constants",
        "context",
        "estimate",
        "first_token_s",
        "heard_s",
        "interval",
        "kv_tokens",
        "load_s",
        "observations",
        "observed",
        "observed_clock",
        "owed_s",
        "peers",
        "prefilled_s",
        "read_s",
        "recent_prefill",
        "recent_prefill_s",
        "row_modelled_s",
        "seats",
        "slot",
        "speed",
        "stages",
        "stands_in",
        "steps_per_s",
        "streaming",
        "streams_seen_s",
        "tracked",
        "waiting",
        "waiting_output",
        "waiting_prefill",
        "waiting_prompt",
    )

    def __init__(
        self,
        instance_id: InstanceId,
        slot: int,
        *,
        keeps: bool = True,
    ) -> None:
        self.instance_id = instance_id
        self.slot = slot
        self._keeps = keeps
        self._outstanding: set[Dispatch] = set()
        self._load_units = 0
        self.load_s = 0.0
        self.kv_tokens = 0
        self.in_flight = 0
        self.tracked = 0  # those in flight that are followed
        self.waiting = 0
        self.streaming = 0
        self.waiting_prompt = 0
        self.waiting_prefill = 0.0
        self.waiting_output = 0.0
        self.context = 0.0
        self.shared_tokens = 0.0
        self.heard_s = 0.0
        self.recent_prefill = 0.0
        self.recent_prefill_s = 0.0
        self.stages = [0] * _STAGES  # streaming sequences by stage
        self.peers = NO_PEERS
        self._peer_loads: dict[str, PeerLoad] = {}
        # Engine time left for what others say they began, s, and as of when.
        self._begun_s, self._begun_at_s = _MOST_BEGUN_S, 0.0
        # Counted for the other gateways, which do not see them: prompts between decode steps, and
        # their tokens to compute.
        self._prompts = 0
        self._prefill_tokens = 0.0
        self._prompt_tokens = 0.0
        # The step clock, when it was read, and its rate.
        self.clock = 0.0
        self.read_s = 0.0
        self.steps_per_s = 0.0
        # If the steps are not seen: the time that the engine will spend on prompts first, and the
        # time it has had.
        self.owed_s = self.prefilled_s = 0.0
        self._moves: list[tuple[float, int, Dispatch]] = []
        self._sequence = 0
        # The constants in use; ``stands_in``: they are another machine's; ``observed``: its speed
        # was seen all the same.
        self.constants: Constants | None = None
        # Of its profile: what the server takes beside the engine's steps, however slow these are.
        self.first_token_s = 0.0
        self.stands_in = False
        self.observed = False
        self.speed = 1.0
        # Of an engine whose slots are unknown; and when a streaming request last ended there.
        self.concurrency = Concurrency()
        self.seats = NO_LIMIT  # learnt limit of sequences there
        self._freed_s = -math.inf
        self.estimate = SpeedEstimate(*SPEED_BOUNDS)
        self.streams_seen_s = -math.inf
        self._sightings = Sightings()
        self.prefix = self._sightings.prefix
        self.observations = self._sightings.observations
        self.interval = Interval()
        self.observed_clock = math.nan
        # The model's time for the last row; None: that row says nothing about the speed. And of
        # complete answers that ``slowness.py`` has not looked at yet: how long they took, and how
        # long they should have taken.
        self.row_modelled_s: float | None = None
        self.checked_s = self.checked_modelled_s = 0.0

    def __repr__(self) -> str:
        return (
            f"<InstanceState {self.instance_id}: {self.in_flight} in flight, "
            f"{self.waiting} waiting, {self.streaming} streaming, load {self.load_s:.4g} s, "
            f"{self.kv_tokens} KV tokens, f={self.speed:.3g}>"
        )

    def outstanding(self) -> frozenset[Dispatch]:
        """Dispatches outstanding on it."""
        return frozenset(self._outstanding)

    # Constants

    def set_constants(self, constants: Constants | None, *, stands_in: bool = False) -> None:
        """Set its own constants (None: it has no profile). Other constants restart f."""
        if constants == self.constants and stands_in == self.stands_in:
            return
        if constants != self.constants or not stands_in:
            self.observed = False
        if constants != self.constants:
            self.constants = constants
            self.estimate = SpeedEstimate(*SPEED_BOUNDS)
            self.speed = 1.0
        if stands_in != self.stands_in:
            self.concurrency = Concurrency()
            self.seats = NO_LIMIT
        self.stands_in = stands_in
        bounds = _STAND_IN_BOUNDS if stands_in else SPEED_BOUNDS
        self.estimate.set_kind(*bounds, stands_in=stands_in)
        set_rate(self)

    def learnt(self) -> Learnt:
        """What was observed of it, for a process that takes over."""
        e, slots = self.estimate, self.concurrency
        return Learnt(
            None if self.constants is None else list(astuple(self.constants)),
            self.stands_in,
            self.observed,
            (e.factor, e.own, e.observed_s, e.modelled_s, e.seen_s),
            slots.learnt,
            slots.most,
        )

    def take_over(self, learnt: Learnt) -> None:
        """Continue from another process's observations; for other constants they say nothing."""
        c = self.constants
        if learnt.constants is None or self.stands_in != learnt.stands_in:
            return
        constants = Constants(*learnt.constants)
        if c is None and self.stands_in:
            self.set_constants(constants, stands_in=True)
        elif c != constants:
            return
        e = self.estimate
        e.factor, e.own, e.observed_s, e.modelled_s, e.seen_s = learnt.speed
        self.observed, self.speed = learnt.observed, e.factor
        self.concurrency.learnt = learnt.slots
        self.concurrency.most = self.seats = learnt.most_slots
        set_rate(self)

    def set_speed(self, speed: float) -> None:
        """Assume this speed until it is observed (a stand-in's)."""
        if speed != self.speed:
            self.speed = speed
            self.estimate.factor = self.estimate.own = speed
            set_rate(self)

    # A request's events

    def dispatch(
        self,
        request: Request,
        workload: float,
        now_s: float,
        kv_tokens: int | None = None,
        prefill_tokens: float | None = None,
        *,
        tracked: bool = True,
        alone: bool = True,
    ) -> Dispatch:
        """Send it a request. Raises ValueError for what cannot be charged (``Dispatch``).

        Args:
            workload: what it adds to the load, s, 0 or more.
            kv_tokens: tokens it will hold in the cache; None: ``Request.kv_tokens``.
            prefill_tokens: prompt tokens to compute, of all its sequences; None: every one.
            tracked: follow its progress.
            alone: every other request there is followed; its first token may be learnt from.
        """
        if kv_tokens is None:
            kv_tokens = request.kv_tokens
        if prefill_tokens is None:
            prefill_tokens = request.sequences * request.prompt_tokens
        entry = Dispatch(self, request, workload, kv_tokens, prefill_tokens, tracked=tracked)
        load_units = self._load_units + entry.units
        self.load_s = load_units / UNITS_PER_S
        self._load_units = load_units
        self._outstanding.add(entry)
        self.kv_tokens += kv_tokens
        self.in_flight += 1
        if tracked:
            entry.sent_s = now_s
            if self.waiting == 0:
                self.heard_s = now_s
            if alone and self._keeps:
                peers = self.peers
                entry.before = (
                    now_s,
                    self.waiting + peers.waiting,
                    self.waiting_prefill + peers.waiting_prefill,
                    self.streaming + peers.streaming,
                    self.context + peers.context,
                )
            self.tracked += 1
            self.waiting += request.sequences
            self.waiting_prompt += entry.prompt_tokens
            self.waiting_prefill += prefill_tokens
            self.waiting_output += entry.output_tokens
            note_prefill(self, prefill_tokens, now_s)
            if now_s - self.streams_seen_s >= STREAMS_SAY_S:
                # The steps are not seen: the engine computes this prompt before its next ones.
                clock = read_clock(self, now_s, 0.0)
                if self._moves and self._moves[0][0] <= clock:
                    self._move_on()
                if self.constants is not None:
                    ratio = self.prefix.ratio
                    new_tokens = prefill_tokens * (1.0 if ratio is None else ratio)
                    self.owed_s += prefill_s(
                        self, request.sequences, request.prompt_tokens, new_tokens
                    )
        return entry

    def first_token(self, entry: Dispatch, now_s: float, *, seen: bool = True) -> bool:
        """Note its first token. False, and no change, unless it was WAITING (and is followed).

        ``seen``: otherwise only predicted, and nothing is learnt from it.
        """
        if entry.streaming or not entry.tracked or entry.outcome is not None:
            return False
        clock = read_clock(self, now_s, 0.0)
        if self._moves and self._moves[0][0] <= clock:
            self._move_on()
        n = entry.request.sequences
        leave_waiting(self, n, entry)
        entry.streaming = True
        entry.stage = 0
        entry.joined = clock
        entry.prefilled_s = self.prefilled_s
        self.heard_s = now_s
        computed = entry.leg is not DECODE
        if computed and self.streaming > 0:
            # Only then was its prefill between observed decode steps.
            interval = self.interval
            interval.prompts += n
            interval.prompt_tokens += entry.prompt_tokens
            if not self.prefix.off:
                # Its cached tokens have not been reported yet.
                interval.untold += 1
                interval.untold_tokens += entry.prompt_tokens
                interval.untold_charged += entry.prefill_tokens
                interval.open += 1
                entry.interval = interval
        if computed:
            self._prompts += n
            self._prefill_tokens += entry.prefill_tokens
            self._prompt_tokens += entry.prompt_tokens
        if seen and entry.before is not None:
            self._sightings.keep_first_token(entry, entry.before, now_s)
        self.streaming += n
        # The first token is out: each sequence holds its prompt and that token.
        self.context += entry.prompt_tokens + n
        self.stages[0] += n
        self._schedule_move(entry)
        set_rate(self)
        if self.stands_in and seen and computed:
            self._learn_concurrency(entry, now_s)
        return True

    def prefilled(self, entry: Dispatch, now_s: float) -> bool:
        """Note that a prefill leg's prompt is computed; its KV stays until it settles. False, and
        no change, unless it was WAITING (and is followed).
        """
        if (
            entry.leg is not PREFILL
            or entry.pinned
            or not entry.tracked
            or entry.outcome is not None
        ):
            return False
        leave_waiting(self, entry.request.sequences, entry)
        self.waiting_prompt += entry.prompt_tokens
        entry.pinned = True
        self.heard_s = now_s
        return True

    def settle(
        self, entry: Dispatch, outcome: Outcome, now_s: float, usage: Usage | None = None
    ) -> bool:
        """Take off what it added. True the first time; False and no change after.

        ``usage``: what its answer reported at the end. Raises KeyError for another instance's
        dispatch.
        """
        if entry.outcome is not None:
            return False
        if entry.streaming and now_s > self.read_s:
            clock = read_clock(self, now_s, 0.0)
            if self._moves and self._moves[0][0] <= clock:
                self._move_on()
        self._outstanding.remove(entry)
        entry.outcome = outcome
        if entry.streaming:
            self._freed_s = now_s
        prefix = self.prefix
        if not prefix.off:
            if (
                prefix.counts
                or entry.first_token is not None
                or (usage is not None and usage.cached_tokens is not None)
            ):
                self._sightings.end(entry, usage)
            elif entry.interval is not None:
                # Its cached tokens were not reported: its interval waits for the next scrape.
                entry.interval.open -= 1
                entry.interval = None
        if entry.tracked:
            self.tracked -= 1
            n = entry.request.sequences
            if not entry.streaming:
                if entry.pinned:
                    self.waiting_prompt -= entry.prompt_tokens
                else:
                    leave_waiting(self, n, entry)
            else:
                self.streaming -= n
                self.context -= entry.prompt_tokens + n * (1 + self.clock - entry.joined)
                self.stages[entry.stage] -= n
                entry.stage = -1
                if self.streaming == 0:
                    # Exactly nothing, so that no remainder of the sums outlives a busy period.
                    self.context = self.clock = 0.0
                    # A clock restarted between two observations is not set by the second.
                    self.observed_clock = math.nan
                    self._moves.clear()
                set_rate(self)
        self._load_units -= entry.units
        self.load_s = self._load_units / UNITS_PER_S
        self.kv_tokens -= entry.kv_tokens
        self.in_flight -= 1
        return True

    def made_tokens(self, entry: Dispatch, now_s: float) -> float:
        """Tokens that an outstanding request has made by now, by the step clock."""
        if not entry.streaming:
            return 0.0
        return entry.request.sequences * (1.0 + self._read_clock(now_s) - entry.joined)

    def leave(self, now_s: float) -> list[Dispatch]:
        """Remove the instance: settle everything; returns what was outstanding."""
        orphans = list(self._outstanding)
        for entry in orphans:
            self.settle(entry, Outcome.INSTANCE_REMOVED, now_s)
        return orphans

    def own_load(self, now_s: float) -> PeerLoad:
        """Our load on it now, as other gateways need it."""
        self._read_clock(now_s)
        observed_s, modelled_s = self.estimate.sums()
        return PeerLoad(
            self.load_s,
            self.kv_tokens,
            self.in_flight,
            self.waiting,
            self.streaming,
            self.waiting_prompt,
            self.waiting_prefill,
            self.waiting_output,
            self.context,
            observed_s,
            modelled_s,
            self._prompts,
            self._prefill_tokens,
        )

    def set_peer(self, peer: str, load: PeerLoad | None, now_s: float = 0.0) -> None:
        """Replace another gateway's load on it; None: that gateway is gone."""
        self._read_clock(now_s)
        before = self._peer_loads.get(peer)
        if load is None:
            self._peer_loads.pop(peer, None)
        else:
            self._peer_loads[peer] = load
            # What waits was sent just now, by a peer that is new here or had nothing left.
            already = self.recent_prefill
            sent, prompts, more = load.waiting_prefill, 0.0, 0.0
            if before is not None:
                prompts, more = self._begun(load, before, now_s)
                sent += more - before.waiting_prefill
            note_prefill(self, max(0.0, sent), now_s)
            if (c := self.constants) is not None and c.p1 > 0:
                # As much as the engine can do in this time, whatever they claim.
                most = max(already, PREFILL_OVER_S / (self.speed * c.p1))
                self.recent_prefill = min(self.recent_prefill, most)
            if before is not None and self.streaming > 0:
                interval = self.interval
                interval.prompts += prompts
                interval.prompt_tokens += more
                if more > 0 and not self.prefix.off:
                    interval.untold += 1
                    interval.untold_tokens += more
                    interval.untold_charged += more
        loads = self._peer_loads.values()
        had_seen = self.peers.modelled_s > 0
        self.peers = PeerLoad(*map(sum, zip(*loads, strict=True))) if loads else NO_PEERS
        if (had_seen or self.peers.modelled_s > 0) and self.constants is not None:
            peers = self.peers
            self.observed = self.observed or self.stands_in
            self.speed = weigh(self.estimate, peers.observed_s, peers.modelled_s)
        set_rate(self)

    def _begun(self, load: PeerLoad, before: PeerLoad, now_s: float) -> tuple[float, float]:
        """(prompts, tokens) that a peer began in between, limited to what the engine can have
        done."""
        # A peer that restarted its counters has fewer.
        prompts = max(0.0, load.prompts - before.prompts)
        tokens = max(0.0, load.prompt_tokens - before.prompt_tokens)
        c = self.constants
        if c is None:
            return prompts, tokens
        left_s = self._begun_s + max(0.0, now_s - self._begun_at_s)
        left_s = min(left_s, _MOST_BEGUN_S)
        self._begun_at_s = max(self._begun_at_s, now_s)
        takes_s = self.speed * (c.p1 * tokens + c.p2 * prompts)
        share = min(1.0, left_s / takes_s) if takes_s > 0 else 1.0
        self._begun_s = left_s - share * takes_s
        return share * prompts, share * tokens

    # What is observed

    def observe_steps(self, steps: float, duration_s: float, now_s: float) -> StepRow | None:
        """Note that the engine made ``steps`` decode steps in the last ``duration_s`` while
        streaming.

        Sets the speed factor and corrects the step clock. Returns the resulting row, or None.
        """
        self._read_clock(now_s)
        interval, self.interval = self.interval, Interval()
        streaming = self.streaming >= 1
        row = None
        self.row_modelled_s = None
        if duration_s > 0 and (streaming or interval.streamed_s > 0):
            if self.waiting and self.prefix.ratio is None:
                # A prefill may be under way that counts in the next row and is not known here.
                interval.untold += 1
            # No steps at all count as well: that is an engine that hangs.
            row = step_row(self, interval, steps, duration_s, interval.hits(None))
            if self._keeps:
                self._sightings.keep_steps(row, interval)
            modelled_s = self.row_modelled_s = self._modelled_s(row, interval)
            if modelled_s is not None:
                observe_speed(self, duration_s, modelled_s, now_s)
                self.streams_seen_s = now_s
            if streaming:
                self._read_clock(now_s, steps_missed(self, interval, steps, duration_s))
        self.observed_clock = self.clock
        set_rate(self)
        return row

    def _modelled_s(self, row: StepRow, interval: Interval) -> float | None:
        """The model's time for a row, s; None: the row says nothing about the speed."""
        c = self.constants
        if c is None:
            return None
        if not row.known:
            row = row._replace(hit_tokens=interval.shown * interval.hits(self.prefix.ratio))
        if row.known:
            return sum(seconds(row.terms, c))
        # It is slower than believed even if all was prefilled, or faster even if nothing was;
        # otherwise nothing is learnt.
        least_s = sum(seconds(row._replace(hit_tokens=row.prompt_tokens).terms, c))
        waiting = self.waiting_prefill  # a part of which may have been prefilled by now
        most_s = sum(seconds(row._replace(hit_tokens=0.0).terms, c))
        most_s += c.p1 * waiting + c.p9 * attended_pairs(waiting)
        believed_s = row.duration_s / self.speed
        modelled_s = min(most_s, max(least_s, believed_s))
        return None if modelled_s == believed_s else modelled_s

    def waiting_modelled_s(self) -> float:
        """Modelled time to prefill the prompts that wait for their first token here, s."""
        c, waiting = self.constants, self.waiting_prefill
        if c is None or not self.waiting:
            return 0.0
        return c.p1 * waiting + c.p2 * self.waiting + c.p9 * attended_pairs(waiting)

    def take_checked(self) -> tuple[float, float]:
        """Observed and modelled time of complete answers since the last call, s."""
        checked = self.checked_s, self.checked_modelled_s
        self.checked_s = self.checked_modelled_s = 0.0
        return checked

    def observe_cache(
        self, caching: bool | None, counters: tuple[float, float] | None, now_s: float
    ) -> bool:
        """Take a scrape: whether the engine has a prefix cache, and the tokens that it looked for
        and found there since it started; None: not reported. Returns whether it has restarted.
        """
        self.prefix.caching = caching
        renewed = self.prefix.count(counters, self._prompt_tokens, self._prefill_tokens, now_s)
        self._sightings.scraped(now_s)
        return renewed

    def observe_answer(
        self, entry: Dispatch, output_tokens: float, now_s: float, usage: Usage | None = None
    ) -> None:
        """Learn from a complete request whose tokens were not seen: its whole time, and the
        predicted.

        Call it right before ``settle``, with the ``usage`` of its answer, if any. Nothing is learnt
        while streams give better information.
        """
        if (
            entry.outcome is not None
            or entry.predicted_s is None
            or entry.request.sequences != 1
            or self.constants is None
            or now_s - self.streams_seen_s < STREAMS_SAY_S
        ):
            return
        # What the engine took, and should have taken: the server's own part says nothing of it.
        took_s = now_s - entry.predicted_s[0] - self.first_token_s
        engine_s = entry.predicted_s[1] - self.first_token_s
        steps = output_tokens - 1 if output_tokens > 1 else 0.0
        if steps > MOST_TOKENS:
            steps = float(MOST_TOKENS)
        clock, c, hits = read_clock(self, now_s, 0.0), self.constants, None
        if self._moves and self._moves[0][0] <= clock:
            self._move_on()
        if usage is not None and usage.cached_tokens is not None:
            hits = reported_hits(entry, usage)
        others_s = made = 0.0
        if entry.streaming:
            # While it streamed, the engine computed other requests' prompts as well.
            others_s, made = self.prefilled_s - entry.prefilled_s, clock - entry.joined
        if self.steps_per_s > 0:
            step_s = 1 / self.steps_per_s
        else:
            prompt = entry.prompt_tokens
            step_s = self.speed * (c.p5 * prompt + c.p6 + c.p7 * prompt + c.p8)
        least_s, most_s = math.inf, -math.inf
        ttfts_s = first_token_times_s(entry, engine_s, hits, self.prefix, c, self.speed)
        for ttft_s in ttfts_s:
            decoding_s = took_s - ttft_s - others_s
            # As many streamed as the clock knows: that is the mean step of all this time.
            mean_s = decoding_s / made if made > 0 and decoding_s > 0 else step_s
            may_be_s = ttft_s + others_s + steps * mean_s
            if may_be_s < least_s:
                least_s = may_be_s
            if may_be_s > most_s:
                most_s = may_be_s
        predicted_s = took_s
        if took_s < least_s:
            predicted_s = least_s
        elif took_s > most_s:
            predicted_s = most_s
        if len(ttfts_s) > 1 and predicted_s == took_s:
            return  # it may be as believed: learn nothing
        # All that run at once say the same: together they weigh as much as the time they took.
        share = 1 / (self.in_flight if self.in_flight > 1 else 1)
        if took_s > 0 and predicted_s > 0:
            # One answer, whose length the engine reports, is not believed beyond this.
            if predicted_s > _MOST_MISS * took_s:
                predicted_s = _MOST_MISS * took_s
            elif predicted_s < took_s / _MOST_MISS:
                predicted_s = took_s / _MOST_MISS
            modelled_s = predicted_s / self.speed
            observe_speed(self, share * took_s, share * modelled_s, now_s)
            self.checked_s += share * took_s
            if took_s - modelled_s <= HTTP_S:
                modelled_s = took_s
            self.checked_modelled_s += share * modelled_s
            if self.streaming and not entry.streaming:  # otherwise it does when it leaves
                set_rate(self)

    # How many run at once, if unknown

    def _learn_concurrency(self, entry: Dispatch, now_s: float) -> None:
        c = self.constants
        if c is None:
            return
        n, prompt = entry.request.sequences, entry.request.prompt_tokens
        own_s = prefill_s(self, n, prompt, entry.prefill_tokens) + self.speed * c.p4
        # Of the others, as if all had the mean length.
        attended = (self.waiting_prompt - self.waiting_prefill / 2) / max(self.waiting, 1)
        others_s = self.speed * self.waiting_prefill * (c.p1 + c.p9 * attended)
        step_s = 1 / self.steps_per_s if self.steps_per_s > 0 else 0.0
        running = round(self.streaming + self.peers.streaming)
        self.concurrency.began(
            running,
            now_s - entry.sent_s,
            now_s - self._freed_s,
            PATIENCE * (own_s + step_s) + PATIENCE_S,
            # Others' prompts may come first, each with a step.
            PATIENCE * (others_s + self.waiting * step_s),
            now_s,
        )
        self._set_seats()

    def observe_queue(self, running: int, waiting: int, now_s: float) -> None:
        """Take the engine's own numbers of running and queued requests."""
        if self.stands_in:
            peers = self.peers
            there = self.waiting + self.streaming + round(peers.waiting + peers.streaming)
            # Streaming requests run, whatever the engine reported a moment ago.
            running = max(running, self.streaming)
            self.concurrency.queues(running, waiting, there, now_s)
            self._set_seats()

    def let_pass(self, now_s: float) -> None:
        """Let time pass: the engine may run more by now."""
        self.concurrency.let_pass(now_s)
        self._set_seats()

    def _set_seats(self) -> None:
        if self.seats != self.concurrency.most:
            self.seats = self.concurrency.most

    # The step clock

    def _read_clock(self, now_s: float, steps: float = 0.0) -> float:
        """Read the step clock; ``steps``: observed beyond the modelled ones."""
        clock = read_clock(self, now_s, steps)
        if self._moves and self._moves[0][0] <= clock:
            self._move_on()
        return clock

    def _move_on(self) -> None:
        """Move on the sequences whose next stage the clock has passed."""
        moves = self._moves
        while moves and moves[0][0] <= self.clock:
            _, _, entry = heapq.heappop(moves)
            if entry.stage >= 0:
                n = entry.request.sequences
                self.stages[entry.stage] -= n
                entry.stage += 1
                self.stages[entry.stage] += n
                self._schedule_move(entry)

    def _schedule_move(self, entry: Dispatch) -> None:
        following = entry.stage + 1
        if following < _STAGES:
            self._sequence += 1
            # The first token came before the clock's first step.
            due = entry.joined + STAGE_TOKENS[following] - 1
            heapq.heappush(self._moves, (due, self._sequence, entry))


# The functions below use a state's fields alone: the simulator's compiled loop has them in a table
# (``sim/compiled/progress.py``). What a stream adds and takes off is written out once more there,
# as a call of each would cost every request.


def note_prefill(state: InstanceState, tokens: float, now_s: float) -> None:
    """Add prompt tokens that were sent now."""
    # Without a time, or with one in the past, the age of the others is unknown.
    if now_s < state.recent_prefill_s:
        now_s = state.recent_prefill_s
    since_s = state.recent_prefill_s - now_s
    state.recent_prefill = state.recent_prefill * math.exp(since_s / PREFILL_OVER_S) + tokens
    state.recent_prefill_s = now_s


def leave_waiting(state: InstanceState, sequences: int, entry: Dispatch) -> None:
    """Take a request with this many sequences out of U."""
    state.waiting -= sequences
    state.waiting_prompt -= entry.prompt_tokens
    if state.waiting == 0:
        state.owed_s = 0.0
        state.waiting_prefill = state.waiting_output = 0.0
    else:
        state.waiting_prefill -= entry.prefill_tokens
        state.waiting_output -= entry.output_tokens


def prefill_s(state: InstanceState, sequences: int, prompt_tokens: int, new_tokens: float) -> float:
    """Time, s, that a prefill of this many of a request's tokens adds to a decode step."""
    c, n = state.constants, sequences
    assert c is not None
    alone_s = c.p1 * new_tokens + c.p2 * n
    if c.p9:
        alone_s += c.p9 * (n * attended_pairs(new_tokens / n, prompt_tokens - new_tokens / n))
    return state.speed * alone_s


def read_clock(state: InstanceState, now_s: float, steps: float) -> float:
    """Read the step clock; ``steps``: observed beyond the modelled ones.

    Sequences whose next stage it has passed are yet to be moved on.
    """
    elapsed_s = now_s - state.read_s
    streaming = state.streaming
    if elapsed_s > 0:
        state.read_s = now_s
        decoding_s = elapsed_s
        if state.owed_s > 0:
            prefilled_s = state.owed_s if state.owed_s < elapsed_s else elapsed_s
            state.owed_s -= prefilled_s
            state.prefilled_s += prefilled_s
            decoding_s -= prefilled_s
        if streaming > 0:
            steps += decoding_s * state.steps_per_s
            interval = state.interval
            interval.streamed_s += elapsed_s
            batch = streaming + state.peers.streaming
            context = state.context + state.peers.context
            interval.sequences += batch * elapsed_s
            interval.context += (context + 0.5 * steps * batch) * elapsed_s
    if steps != 0:
        state.context += steps * streaming
        state.clock += steps
    return state.clock


def set_rate(state: InstanceState) -> None:
    """Set the step clock's rate: Eq. (4)'s step of everything that streams, times f."""
    c = state.constants
    if c is None or state.streaming < 1:
        state.steps_per_s = 0.0
        return
    batch = state.streaming + state.peers.streaming
    context = state.context + state.peers.context
    step_s = c.p5 * context + c.p6 * batch + c.p7 * context / batch + c.p8
    step_s *= state.speed
    state.steps_per_s = 1 / (step_s if step_s > 1e-6 else 1e-6)


def step_row(
    state: InstanceState, interval: Interval, steps: float, duration_s: float, hit_tokens: float
) -> StepRow:
    """The row of an interval, of whose prompts this many tokens were not prefilled."""
    streamed_s, share = interval.streamed_s, 1.0
    sequences = state.streaming + state.peers.streaming
    context = state.context + state.peers.context
    if streamed_s > 0:
        sequences, context = interval.sequences / streamed_s, interval.context / streamed_s
        share = interval.shown = min(1.0, duration_s / streamed_s)
    return StepRow(
        duration_s,
        steps,
        sequences,
        context / sequences,
        share * interval.prompts,
        share * interval.prompt_tokens,
        share * hit_tokens,
    )


def steps_missed(
    state: InstanceState, interval: Interval, steps: float, duration_s: float
) -> float:
    """How far the step clock, just read, is behind the observation."""
    if duration_s < interval.streamed_s / 2:
        steps *= interval.streamed_s / duration_s  # it saw only a part
    missed = state.observed_clock + steps - state.clock
    return 0.0 if math.isnan(missed) else missed


def observe_speed(state: InstanceState, observed_s: float, modelled_s: float, now_s: float) -> None:
    """Set f from everything observed of a machine with known constants, including by others."""
    state.observed = state.observed or state.stands_in
    peers = state.peers
    state.speed = observe(
        state.estimate, observed_s, modelled_s, now_s, peers.observed_s, peers.modelled_s
    )


def guess_speed(state: InstanceState, others: float, now_s: float) -> None:
    """Assume that an instance never observed is as far off its constants as the others are."""
    guess(state.estimate, others, now_s)
    if state.speed != state.estimate.factor:
        state.speed = state.estimate.factor
        set_rate(state)


def revise_speed(state: InstanceState, best: float, now_s: float) -> None:
    """Doubt f if it is far above ``best`` and was not observed."""
    if state.constants is None or (state.stands_in and not state.observed):
        return
    revise(state.estimate, best, now_s)
    if state.speed != state.estimate.factor:
        state.speed = state.estimate.factor
        set_rate(state)
