"""What an engine had in its prefix cache does not count as prefilled: not in rows, nor in anything
that is made of them. With right constants an instance neither drifts nor gets faster, whatever its
hit share is; and where nobody tells it, nothing is learnt from what is not known.
"""

import dataclasses
import math
from collections import deque
from typing import Literal, NamedTuple

import numpy as np
import pytest

from hetero_gateway.core.costs.cost_model import decode_step_time_s, prefill_time_s
from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.instances.calibration import refit
from hetero_gateway.core.instances.dispatch import Dispatch, PeerLoad
from hetero_gateway.core.instances.observation import FirstTokenRow, StepRow, merged
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId, InstanceSpec, Outcome, Usage

C = Constants(1.2e-4, 2e-3, 0.0, 8e-3, 1e-7, 3e-4, 0.0, 1.2e-2, 6e-9)
PROFILE = Profile("GPU", "m", 1, C, 400_000, 64)
I0 = InstanceId("i0")
SCRAPE_S = 5.0
Tells = Literal["answers", "counters", "both", "nothing", "off"]


class Sent(NamedTuple):
    dispatch: Dispatch
    prompt: int
    hits: int
    output: int


class Engine:
    """One engine with a prefix cache behind a scheduler, in virtual time, step by step.

    ``hit_share``: of all prompt tokens; most prompts are found nearly whole, others not at all.
    """

    def __init__(
        self, hit_share: float, tells: Tells, *, seed: int = 0, even: bool = False
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.share, self.tells, self.even = hit_share, tells, even
        self.scheduler = Scheduler(
            make_policy("finish-time"), self.rng, 2.0, (500, 50), observes=True
        )
        caching: bool | None = {"off": False, "nothing": None}.get(tells, True)
        self.caching = caching
        self.scheduler.add(InstanceSpec(I0, frozenset(("m",)), PROFILE))
        self.scheduler.observe_cache(I0, caching, None, 0.0)
        self.now_s = 0.0
        self.queries = self.hits = 0
        self.waiting: deque[Sent] = deque()
        self.running: list[list[Sent | int]] = []
        self.speeds: list[float] = []
        self.alarms = 0
        self._steps, self._busy_s, self._looked_s, self._scraped_s = 0, 0.0, 0.0, -SCRAPE_S

    @property
    def state(self) -> InstanceState:
        return self.scheduler.members.table[I0]

    def arrive(self) -> None:
        prompt, output = int(self.rng.integers(100, 1500)), int(self.rng.integers(10, 120))
        request = Request("m", prompt, float(output))
        ticket = self.scheduler.place(request, self.now_s)
        assert ticket.dispatch is not None  # type: ignore[union-attr]
        found = min(1.0, self.share / 0.95)  # of prompts; each but for its last words
        hits = self.share if self.even else 0.95 * (self.rng.random() < found)
        self.waiting.append(Sent(ticket.dispatch, prompt, int(hits * prompt), output))  # type: ignore[union-attr, arg-type]

    def run(self, seconds: float, rate_per_s: float = 3.0) -> None:
        end_s = self.now_s + seconds
        next_s = self.now_s
        while self.now_s < end_s:
            while next_s <= self.now_s:
                self.arrive()
                next_s += float(self.rng.exponential(1 / rate_per_s))
            if self.waiting or self.running:
                self._step()
            else:
                self.now_s = min(next_s, self._looked_s + 1)
            if self.now_s - self._looked_s >= 1:
                self._look()

    def _step(self) -> None:
        batch = len(self.running)
        took_s, first = 0.0, None
        if batch:
            cached = sum(s.prompt + made for s, made in self.running) / batch  # type: ignore[union-attr, operator]
            took_s = decode_step_time_s(C, batch, cached)
        if self.waiting:
            first = self.waiting.popleft()
            self.queries += first.prompt
            self.hits += first.hits
            prefilled = first.prompt - first.hits
            alone_s = prefill_time_s(C, 1, prefilled, first.hits)
            took_s += alone_s - C.p4 if batch else alone_s
        self.now_s += took_s
        if batch:
            self._steps += 1
            self._busy_s += took_s
        for running in list(self.running):
            running[1] += 1  # type: ignore[operator]
            sent: Sent = running[0]  # type: ignore[assignment]
            if running[1] >= sent.output:  # type: ignore[operator]
                self.running.remove(running)
                told = sent.hits if self.tells in ("answers", "both") else None
                usage = Usage(sent.prompt, sent.output, told)
                self.scheduler.settle(sent.dispatch, Outcome.COMPLETED, self.now_s, usage)
        if first is not None:
            self.scheduler.first_token(first.dispatch, self.now_s)
            self.running.append([first, 1])

    def _look(self) -> None:
        changed = self.scheduler.members.observe_steps(I0, self._steps, self._busy_s, self.now_s)
        self.alarms += changed
        if self.now_s - self._scraped_s >= SCRAPE_S:
            self._scraped_s = self.now_s
            counters = (float(self.queries), float(self.hits))
            tells = self.tells in ("counters", "both")
            self.scheduler.observe_cache(I0, self.caching, counters if tells else None, self.now_s)
        self._steps, self._busy_s, self._looked_s = 0, 0.0, self.now_s
        self.speeds.append(self.state.speed)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5, 0.8, 0.9])
@pytest.mark.parametrize("tells", ["answers", "counters", "both"])
def test_what_was_cached_makes_no_machine_look_faster(share: float, tells: Tells) -> None:
    engine = Engine(share, tells)
    engine.run(400)
    assert engine.hits == pytest.approx(share * engine.queries, rel=0.1)
    assert engine.alarms == 0
    seen = engine.state.observations
    # Single seconds scatter: nearly all of a prompt is cached, or nothing.
    assert np.mean(engine.speeds) == pytest.approx(1, abs=0.02)
    assert np.mean([0.95 <= f <= 1.05 for f in engine.speeds]) > 0.9
    verdict = engine.scheduler.members.drifts.get(I0).verdict()  # type: ignore[union-attr]
    assert verdict.decode == pytest.approx(1, abs=0.05)
    assert verdict.prefill is None or verdict.prefill == pytest.approx(1, abs=0.12)
    steps = list(seen.steps)
    known_s = sum(row.duration_s for row in steps if row.known)
    assert 0.9 * seen.observed_s < known_s < 1.001 * seen.observed_s
    # Whatever it was taken for: the constants are its own. (Of the counters there is a row for each
    # scrape, and hardly any prefill in it where nearly all is cached: there the fit leans on them.)
    for wrong in (1.0,) if tells == "counters" else (1.0, 0.3):
        present = dataclasses.replace(C, p1=wrong * C.p1)
        fit = refit(steps, list(seen.first_tokens), present)
        assert fit.constants.p1 == pytest.approx(C.p1, rel=0.1), wrong


@pytest.mark.parametrize("share", [0.0, 0.5, 0.8, 0.9])
def test_what_nobody_tells_changes_nothing(share: float) -> None:
    engine = Engine(share, "nothing")
    engine.run(300)
    assert engine.alarms == 0
    assert np.mean(engine.speeds) == pytest.approx(1, abs=0.02)
    seen = engine.state.observations
    assert not any(row.known and row.prompts for row in seen.steps)
    assert not any(row.clear for row in seen.first_tokens)
    fit = refit(list(seen.steps), list(seen.first_tokens), C)
    assert fit is None or fit.constants.p1 == pytest.approx(C.p1, rel=0.1)
    assert fit is None or "p1" not in fit.identified


def test_a_machine_that_nobody_tells_of_is_still_known_to_be_slow() -> None:
    # Ten times: no hit share explains that.
    engine = Engine(0.8, "nothing")
    engine.state.set_constants(C.scaled(0.1))
    engine.run(60)
    assert engine.state.speed > 4


@pytest.mark.parametrize("tells", ["answers", "counters", "both"])
def test_without_hits_rows_are_what_they_are_without_a_cache(tells: Tells) -> None:
    plain, cached = Engine(0, "off"), Engine(0, tells)
    for engine in (plain, cached):
        engine.run(60)
    rows = list(plain.state.observations.steps)
    same = [row for row in cached.state.observations.steps if row.duration_s < 2]
    assert len(rows) == len(same) > 40
    for row, other in zip(rows, same, strict=True):
        assert row[:6] == other[:6]  # to the bit
        assert row.terms == other.terms or not other.known
        assert row.terms[:2] == (row.prompt_tokens, row.prompts)
    # The last ones wait for an end, or for the counters.
    merged_rows = [row for row in cached.state.observations.steps if row.duration_s > 2]
    assert all(row.hit_tokens == 0 for row in merged_rows)
    if tells == "counters":
        assert len(merged_rows) > 8
    else:
        assert sum(not row.known for row in same) <= 8
    first_tokens = list(plain.state.observations.first_tokens)
    assert sorted(first_tokens)[-1] in list(cached.state.observations.first_tokens)
    if tells != "answers":
        assert plain.speeds == cached.speeds
    assert plain.speeds[-1] == pytest.approx(cached.speeds[-1], rel=1e-3)


def fresh(caching: bool | None = True) -> InstanceState:
    state = InstanceState(I0, 0)
    state.set_constants(C)
    state.prefix.caching = caching
    return state


def begin(state: InstanceState, prompt: int, now_s: float, sequences: int = 1) -> Dispatch:
    entry = state.dispatch(Request("m", prompt, 50.0, sequences), 0.0, now_s)
    state.first_token(entry, now_s)
    return entry


def row_of(state: InstanceState) -> StepRow:
    (row,) = state.observations.steps.last(1)
    return row


def test_a_row_is_known_when_the_last_of_its_requests_has_told() -> None:
    state = fresh()
    begin(state, 10, 0.0)
    state.observe_steps(0, 0.0, 0.1)
    first, second = begin(state, 400, 0.2), begin(state, 200, 0.3)
    row = state.observe_steps(40, 1.0, 1.0)
    assert not row.known
    assert state.observations.take_fresh_steps() == []
    state.settle(first, Outcome.COMPLETED, 2.0, Usage(400, 9, 300))
    assert not row_of(state).known
    # Its prompt was estimated; the engine counted half as many, and all but ten were cached.
    state.settle(second, Outcome.COMPLETED, 3.0, Usage(100, 9, 90))
    known = row_of(state)
    assert known == row._replace(hit_tokens=300.0 + 180.0)
    assert state.observations.take_fresh_steps() == [known]
    assert known.terms[0] == 600 - 480


@pytest.mark.parametrize(
    ("usage", "outcome", "sequences"),
    [
        (Usage(400, 9, None), Outcome.COMPLETED, 1),
        (None, Outcome.CLIENT_DISCONNECTED, 1),
        (Usage(400, 9, 300), Outcome.COMPLETED, 2),  # of which of the two?
    ],
)
def test_who_tells_nothing_is_known_by_the_counters_or_not_at_all(usage, outcome, sequences):
    for counters in (True, False):
        state = fresh()
        if counters:
            state.observe_cache(True, (0.0, 0.0), 0.0)
        begin(state, 10, 0.0)
        state.observe_steps(0, 0.0, 0.1)
        entry = begin(state, 400, 0.2, sequences)
        state.observe_steps(40, 0.5, 1.0)
        state.settle(entry, outcome, 2.0, usage)
        assert not row_of(state).known
        state.observe_cache(True, (400.0, 100.0) if counters else None, 5.0)
        row = row_of(state)
        assert row.known is counters
        if counters:
            assert row.hit_tokens == pytest.approx(row.prompt_tokens / 4)


def test_0_is_told_and_none_is_not() -> None:
    for cached, known in ((0, True), (None, False)):
        state = fresh()
        entry = begin(state, 400, 1.0)
        state.settle(entry, Outcome.COMPLETED, 2.0, Usage(400, 9, cached))
        assert (entry.hit_tokens == 0) is known
        assert state.prefix.ratio == (1.0 if known else None)


def test_a_lie_hurts_only_its_own_row() -> None:
    state = fresh()
    entry = begin(state, 400, 1.0)
    state.settle(entry, Outcome.COMPLETED, 2.0, Usage(1, 9, 10**15))
    assert entry.hit_tokens == 400
    assert state.prefix.ratio == 0.0
    for _ in range(100):
        state.settle(begin(state, 400, 3.0), Outcome.COMPLETED, 4.0, Usage(400, 9, 0))
    assert state.prefix.ratio == pytest.approx(1, abs=0.01)
    state.observe_cache(True, (100.0, 10.0), 5.0)
    state.observe_cache(True, (200.0, 10**15), 6.0)
    assert 0 <= state.prefix.ratio <= 1  # type: ignore[operator]


def test_an_engine_that_was_started_anew_begins_anew() -> None:
    state = fresh()
    state.observe_cache(True, (1e6, 9e5), 0.0)
    assert state.prefix.share == pytest.approx(0.9)
    state.observe_cache(True, (1e6 + 1e4, 9e5 + 5e3), 5.0)
    assert 0.5 < state.prefix.share < 0.7  # type: ignore[operator]
    state.observe_cache(True, (500.0, 0.0), 10.0)
    assert state.prefix.share == 0
    state.observe_cache(True, None, 15.0)
    assert (state.prefix.share, state.prefix.ratio) == (None, None)


def test_prompts_of_other_gateways_are_known_by_the_counters() -> None:
    state = fresh()
    state.observe_cache(True, (0.0, 0.0), 0.0)
    begin(state, 10, 0.0)
    state.set_peer("other", PeerLoad(), 0.0)
    state.observe_steps(0, 0.0, 0.1)
    state.set_peer("other", PeerLoad(prompts=2, prompt_tokens=800), 0.5)
    state.observe_steps(40, 0.5, 1.0)
    state.observe_cache(True, (800.0, 600.0), 5.0)
    row = row_of(state)
    assert row.prompts > 0
    assert row.hit_tokens == pytest.approx(0.75 * row.prompt_tokens)


def test_rows_of_one_scrape_are_merged() -> None:
    rows = [StepRow(1.0, 40, 2, 300, 1, 500, 400), StepRow(0.5, 10, 4, 100, 2, 100, 0)]
    one = merged(rows)
    assert (one.duration_s, one.steps, one.prompts) == (1.5, 50, 3)
    assert (one.prompt_tokens, one.hit_tokens) == (600, 400)
    both = np.array([row.terms for row in rows]).sum(axis=0)
    # All but what a mean length says of attention, and of p7's context.
    assert one.terms[:6] == pytest.approx(both[:6])
    assert merged([StepRow(1.0, 0, 2, 300, 0, 0)] * 2) == StepRow(2.0, 0, 2, 300, 0, 0)


def test_rows_that_never_end_are_bounded() -> None:
    state = fresh()
    begin(state, 10, 0.0)
    for second in range(1, 3000):
        begin(state, 10, second - 0.5)  # and never settled
        state.observe_steps(40, 1.0, float(second))
    assert len(state._sightings._awaited) <= 1025
    assert not any(row.known for row in state.observations.steps.last(100))


def test_a_first_token_counts_once_it_is_known_what_was_prefilled() -> None:
    for caching, usage, hits in (
        (False, None, 0.0),
        (True, Usage(800, 9, 640), 640.0),
        (True, Usage(800, 9, 0), 0.0),
        (True, None, math.nan),
    ):
        state = fresh(caching)
        entry = state.dispatch(Request("m", 800, 50.0), 0.0, 0.0)
        state.first_token(entry, 0.5)
        assert len(state.observations.first_tokens) == (caching is False)
        state.settle(entry, Outcome.COMPLETED, 2.0, usage)
        (row,) = state.observations.first_tokens
        assert row == FirstTokenRow(0.5, 1, 800, 0, 0, 0, 0, pytest.approx(hits, nan_ok=True))
        assert row.clear is not math.isnan(hits)
        assert len(state.observations.take_fresh()) == row.clear


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("tells", ["answers", "counters", "nothing"])
def test_answers_that_do_not_stream_say_nothing_wrong_of_the_speed(share, tells):
    # Alone on the machine, one after the other: each takes what the model says of what it prefills.
    state = fresh(None if tells == "nothing" else True)
    queries = hits = now_s = 0.0
    for i in range(60):
        prompt, output = 500 + 100 * (i % 7), 20
        entry = state.dispatch(Request("m", prompt, float(output), streams=False), 0.0, now_s)
        entry.predicted_s = (now_s, prefill_time_s(C, 1, prompt))
        cached = int(share * prompt)
        ttft_s = prefill_time_s(C, 1, prompt - cached, cached)
        queries, hits = queries + prompt, hits + cached
        if tells == "counters":
            state.observe_cache(True, (queries, hits), now_s)
        now_s += ttft_s + sum(decode_step_time_s(C, 1, prompt + k) for k in range(1, output))
        told = Usage(prompt, output, cached if tells == "answers" else None)
        state.observe_answer(entry, output, now_s, told)
        state.settle(entry, Outcome.COMPLETED, now_s, told)
    assert state.speed == pytest.approx(1, abs=0.05)


def test_predicted_and_actual_hits_are_counted_of_those_that_are_known() -> None:
    state = fresh()
    for cached in (300, None):
        entry = state.dispatch(Request("m", 400, 50.0), 0.0, 0.0, prefill_tokens=160.0)
        state.first_token(entry, 0.1)
        state.settle(entry, Outcome.COMPLETED, 1.0, Usage(400, 9, cached))
    assert (state.prefix.predicted_tokens, state.prefix.actual_tokens) == (240, 300)
