"""What came of an instance's requests decides whether it gets more: the state table, row by row."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetero_gateway.core.instances.outcomes import (
    SILENT,
    SILENT_REASONS,
    SLOW_START_S,
    BreakerState,
    EjectionRules,
    OutcomeRing,
    Outcomes,
    is_quick,
)
from hetero_gateway.core.request import Request
from hetero_gateway.core.types import Outcome
from hetero_gateway.http.failures import Blame, Failure

RULES = EjectionRules()


class SomeRequest:
    """A request on an instance."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None


def fail(outcomes: Outcomes, now_s: float, request: SomeRequest | None = None) -> bool:
    """One failure, and the ejection that follows if nobody objects."""
    too_many = outcomes.failed(now_s, request)
    if too_many:
        outcomes.eject(now_s, "reset")
    return too_many


def ejected(now_s: float = 100.0) -> Outcomes:
    outcomes = Outcomes(RULES)
    for _ in range(5):
        fail(outcomes, now_s)
    assert outcomes.breaker is BreakerState.OPEN
    return outcomes


def half_open() -> tuple[Outcomes, SomeRequest, float]:
    """Ejected, its term over, and its trial under way; and what time it is."""
    outcomes = ejected(100.0)
    assert outcomes.bar(102.0, 0) is None
    trial = SomeRequest()
    outcomes.sent(trial, 102.0)
    return outcomes, trial, 102.0


def test_five_failures_in_a_row_eject_and_four_do_not() -> None:
    outcomes = Outcomes(RULES)
    assert [fail(outcomes, 100.0) for _ in range(4)] == [False] * 4
    outcomes.succeeded(100.0)
    assert [fail(outcomes, 100.0) for _ in range(4)] == [False] * 4
    assert outcomes.bar(100.0, 50) is None


def test_half_of_ten_outcomes_eject_though_never_five_in_a_row() -> None:
    outcomes = Outcomes(RULES)
    came = []
    for i in range(5):
        outcomes.succeeded(100.0 + i)
        came.append(fail(outcomes, 100.0 + i))
    assert came == [False] * 4 + [True]


def test_outcomes_of_more_than_ten_seconds_ago_do_not_count() -> None:
    outcomes = Outcomes(RULES)
    for i in range(40):
        outcomes.succeeded(100.0 + 3 * i)
        assert not fail(outcomes, 100.0 + 3 * i)


def test_the_terms_double_up_to_a_minute_and_begin_anew_after_a_good_while() -> None:
    outcomes = Outcomes(RULES)
    now_s, terms = 100.0, []
    for _ in range(7):
        while not fail(outcomes, now_s):
            pass
        terms.append(outcomes.until_s - now_s)
        now_s = outcomes.until_s
        trial = SomeRequest()
        assert outcomes.bar(now_s, 0) is None
        outcomes.sent(trial, now_s)
        outcomes.succeeded(now_s, trial)
    assert terms == [2, 4, 8, 16, 32, 60, 60]
    now_s += 60
    while not fail(outcomes, now_s):
        pass
    assert outcomes.until_s - now_s == 2


def test_a_failed_trial_ejects_at_once_and_for_longer() -> None:
    outcomes, trial, now_s = half_open()
    assert fail(outcomes, now_s, trial)
    assert outcomes.until_s - now_s == 4


def test_while_it_is_half_open_one_request_tries_it_and_only_its_end_counts() -> None:
    outcomes, trial, now_s = half_open()
    bar = outcomes.bar(now_s, 1)
    assert bar.why == "ejected"
    assert not fail(outcomes, now_s, SomeRequest())  # one from before
    assert not outcomes.succeeded(now_s, SomeRequest())
    assert outcomes.breaker is BreakerState.HALF_OPEN
    trial.outcome = Outcome.CLIENT_DISCONNECTED  # that says nothing: the next one may try
    assert outcomes.bar(now_s, 0) is None
    outcomes.sent(second := SomeRequest(), now_s)
    assert outcomes.bar(now_s, 1) is not None
    assert outcomes.succeeded(now_s, second)
    assert outcomes.breaker is BreakerState.SLOW_START


def test_one_more_tries_it_when_the_others_have_gone_on_for_twice_as_long() -> None:
    outcomes, _, began_s = half_open()
    sent_s = []
    for tenth in range(200):
        now_s = began_s + tenth / 10
        if outcomes.bar(now_s, 1) is None:
            outcomes.sent(SomeRequest(), now_s)
            sent_s.append(now_s - began_s)
        assert outcomes.bar(now_s, 1) is not None
    assert sent_s == pytest.approx([1, 2, 4, 8, 16])
    assert outcomes.succeeded(began_s + 20, outcomes.trials[3])  # any of them is as good
    assert outcomes.trials == []


def test_of_several_trials_the_first_that_fails_ends_it() -> None:
    outcomes, _, now_s = half_open()
    outcomes.sent(second := SomeRequest(), now_s + 1)
    assert fail(outcomes, now_s + 1.1, second)
    assert outcomes.until_s == pytest.approx(now_s + 5.1)
    assert outcomes.trials == []


def test_who_takes_long_to_answer_tries_it_half_a_second_later() -> None:
    outcomes = ejected(100.0)
    for at_s, due_s in [(0.0, 102.0), (102.5, 103.5)]:
        if at_s:
            outcomes.sent(SomeRequest(), at_s)
        assert outcomes.bar(due_s - 0.01, 0) is not None
        assert outcomes.bar(due_s, 0) is None
        assert outcomes.bar(due_s, 0, quick=False) is not None
        assert outcomes.until_s == due_s + 0.5  # when who waits is looked at again
        assert outcomes.bar(due_s + 0.5, 0, quick=False) is None


@pytest.mark.parametrize(
    ("streams", "output_tokens", "quick"), [(True, 4000.0, True), (False, 9.0, True),
                                             (False, 0.0, True), (False, 400.0, False)]
)  # fmt: skip
def test_streams_and_short_answers_show_soon_that_an_instance_works(
    streams: bool, output_tokens: float, quick: bool
) -> None:
    assert is_quick(Request("m", 100, output_tokens, streams=streams)) is quick


def test_a_good_health_speaks_for_a_trial_that_goes_on_and_for_nothing_else() -> None:
    outcomes = ejected(100.0)
    assert not outcomes.vouched(101.0, 101.0)
    assert not outcomes.vouched(103.0, 103.0)  # nothing tries it
    outcomes.sent(trial := SomeRequest(), 103.0)
    assert not outcomes.vouched(104.4, 104.6)  # it was asked too early
    assert outcomes.vouched(104.5, 104.6)
    assert outcomes.breaker is BreakerState.SLOW_START
    assert not outcomes.succeeded(110.0, trial)
    assert outcomes.breaker is BreakerState.SLOW_START


def test_a_good_health_says_nothing_of_one_that_was_ejected_for_its_silence() -> None:
    for reason in SILENT_REASONS - {SILENT}:
        assert Failure(reason).blame is Blame.SILENCE
        outcomes = Outcomes(RULES)
        outcomes.eject(100.0, reason)
        outcomes.advance(102.0)
        outcomes.sent(SomeRequest(), 102.0)
        assert not outcomes.vouched(110.0, 110.0)
        assert outcomes.breaker is BreakerState.HALF_OPEN


def test_a_trial_that_fails_after_health_spoke_for_it_ejects_for_longer() -> None:
    outcomes, trial, now_s = half_open()
    assert outcomes.vouched(now_s + 2, now_s + 2)
    assert not fail(outcomes, now_s + 3, SomeRequest())
    assert fail(outcomes, now_s + 4, trial)
    assert outcomes.until_s == now_s + 8
    outcomes, trial, now_s = half_open()
    outcomes.vouched(now_s + 2, now_s + 2)
    outcomes.advance(now_s + 13)
    assert not fail(outcomes, now_s + 600, trial)  # much has come between


def test_time_alone_and_successes_of_earlier_requests_bring_nobody_back() -> None:
    outcomes = ejected(100.0)
    outcomes.succeeded(101.0, SomeRequest())
    bar = outcomes.bar(101.9, 3)
    assert bar.why == "ejected"
    outcomes.advance(1000.0)
    assert outcomes.ejected


def test_after_recovery_its_share_grows_within_ten_seconds() -> None:
    outcomes, trial, now_s = half_open()
    outcomes.succeeded(now_s, trial)
    most = []
    for second in range(10):
        at_s = now_s + second
        most.append(next(n for n in range(1000) if outcomes.bar(at_s, n) is not None))
    assert most[0] == 2
    assert most == sorted(most)
    assert most[-1] > 100
    assert outcomes.bar(now_s + SLOW_START_S, 10**6) is None
    assert outcomes.breaker is BreakerState.CLOSED


def test_slow_start_begins_above_what_was_under_way() -> None:
    outcomes, trial, now_s = half_open()
    outcomes.succeeded(now_s, trial)
    assert outcomes.bar(now_s, 40) is None  # streams from before are no new load
    assert outcomes.bar(now_s, 41) is not None


def test_a_failure_that_is_taken_back_ends_the_ejection_that_rests_on_it() -> None:
    outcomes = Outcomes(RULES)
    for i in range(5):
        fail(outcomes, 100.0 + i / 10)
    assert outcomes.retract(100.4, 100.5)
    assert outcomes.breaker is BreakerState.CLOSED
    assert outcomes.ring.failed == 4
    fail(outcomes, 100.6)
    assert outcomes.until_s == 102.6  # and it was no first one


def test_enough_other_failures_keep_an_ejection_up() -> None:
    outcomes = Outcomes(EjectionRules(consecutive_failures=3))
    for _ in range(2):
        outcomes.failed(100.0)
    assert outcomes.failed(100.0)
    assert outcomes.failed(100.0)  # the panic rule was against it until now
    outcomes.eject(100.0, "reset")
    assert not outcomes.retract(100.0, 100.1)
    assert outcomes.breaker is BreakerState.OPEN
    assert outcomes.retract(100.0, 100.1)


def test_a_trial_that_failed_by_its_own_fault_is_made_again() -> None:
    outcomes, trial, now_s = half_open()
    fail(outcomes, now_s, trial)
    trial.outcome = Outcome.UPSTREAM_ERROR
    assert outcomes.retract(now_s, now_s + 0.1)
    assert outcomes.breaker is BreakerState.HALF_OPEN
    assert outcomes.bar(now_s + 0.1, 0) is None


def test_a_busy_engine_keeps_what_it_has_and_gets_more_as_time_passes() -> None:
    outcomes = Outcomes(RULES)
    assert outcomes.busy(100.0, others=8)
    assert outcomes.bar(100.0, 7) is None
    bar = outcomes.bar(100.0, 8)
    assert bar is not None
    assert outcomes.bar(101.5, 15) is None
    assert outcomes.bar(100.0 + SLOW_START_S, 10_000) is None


def test_a_busy_engine_with_nothing_to_do_is_left_alone_for_longer_and_longer() -> None:
    outcomes = Outcomes(RULES)
    now_s, terms = 100.0, []
    for _ in range(7):
        assert outcomes.busy(now_s, others=0)
        bar = outcomes.bar(now_s, 0)
        assert bar.why == "busy"
        terms.append(outcomes.until_s - now_s)
        now_s = outcomes.until_s
        assert outcomes.bar(now_s, 0) is None
    assert terms == [0.5, 1, 2, 4, 8, 10, 10]
    outcomes.succeeded(now_s)
    outcomes.busy(now_s, others=0)
    assert outcomes.until_s - now_s == 0.5


def test_what_an_engine_says_of_its_own_return_is_bounded() -> None:
    outcomes = Outcomes(RULES)
    outcomes.busy(100.0, others=0, retry_after_s=3.0)
    assert outcomes.until_s == 103.0
    outcomes.advance(103.0)
    outcomes.busy(103.0, others=0, retry_after_s=10.0**9)
    assert outcomes.until_s == 113.0


def test_busy_answers_are_no_failures() -> None:
    outcomes = Outcomes(RULES)
    for i in range(100):
        outcomes.busy(100.0 + i, others=i % 2)
        assert not outcomes.ejected
    assert outcomes.ring.failed == 0


def test_switched_off_nothing_follows_from_anything() -> None:
    outcomes = Outcomes(EjectionRules(enabled=False))
    assert not any(fail(outcomes, 100.0) for _ in range(100))
    assert not outcomes.busy(100.0, others=0)
    assert outcomes.bar(100.0, 1000) is None


@given(st.lists(st.tuples(st.floats(0, 4), st.booleans()), max_size=60))
def test_the_ring_holds_what_happened_in_the_last_ten_seconds(events):
    ring, now_s = OutcomeRing(), 50.0
    seen: list[tuple[int, bool]] = []
    for wait_s, good in events:
        now_s += wait_s
        (ring.add_good if good else ring.add_failed)(now_s)
        seen.append((int(now_s), good))
        recent = [well for part, well in seen if part > int(now_s) - 10]
        assert (ring.good, ring.failed) == (recent.count(True), recent.count(False))
    ring.advance(now_s + 10)
    assert (ring.good, ring.failed) == (0, 0)


class AnyEvents(RuleBasedStateMachine):
    """Whatever happens in whatever order."""

    @initialize()
    def begin(self) -> None:
        self.now_s = 1000.0
        self.outcomes = Outcomes(RULES)
        self.open: list[SomeRequest] = []
        self.shut_until_s = -math.inf
        self.failures: list[float] = []

    @rule(wait_s=st.floats(0, 5))
    def wait(self, wait_s: float) -> None:
        self.now_s += wait_s

    @rule()
    def send(self) -> None:
        if self.outcomes.bar(self.now_s, len(self.open)) is None:
            assert self.now_s >= self.shut_until_s
            self.open.append(request := SomeRequest())
            self.outcomes.sent(request, self.now_s)
            if self.outcomes.breaker is BreakerState.HALF_OPEN:
                tried_s = self.now_s - self.outcomes.trials_since_s
                assert len(self.outcomes.trials) <= 2 + math.log2(max(0.5, tried_s))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), how=st.sampled_from(["good", "failed", "busy", "gone"]))
    def end(self, data: st.DataObject, how: str) -> None:
        request = data.draw(st.sampled_from(self.open))
        self.open.remove(request)
        request.outcome = Outcome.COMPLETED
        before = self.outcomes.breaker
        if how == "good":
            self.outcomes.succeeded(self.now_s, request)
        elif how == "failed":
            self.failures.append(self.now_s)
            if fail(self.outcomes, self.now_s, request):
                term_s = self.outcomes.until_s - self.now_s
                assert term_s in (2, 4, 8, 16, 32, 60)
                self.shut_until_s = self.outcomes.until_s
        elif how == "busy":
            self.outcomes.busy(self.now_s, len(self.open), request)
        else:
            assert self.outcomes.breaker is before

    @rule()
    def vouch(self) -> None:
        self.outcomes.advance(self.now_s)
        tried = self.outcomes.breaker is BreakerState.HALF_OPEN and self.outcomes.trials
        lifeless = self.outcomes.reason == SILENT
        assert tried or lifeless or not self.outcomes.vouched(self.now_s, self.now_s)

    @rule()
    def fall_silent(self) -> None:
        if not self.outcomes.shut:
            self.outcomes.eject(self.now_s, SILENT)
            self.shut_until_s = self.outcomes.until_s

    @rule()
    def hear(self) -> None:
        ejected = self.outcomes.ejected and self.outcomes.reason == SILENT
        assert self.outcomes.heard(self.now_s) is ejected
        if ejected:
            assert not self.outcomes.ejected
            self.shut_until_s = -math.inf

    @precondition(lambda self: self.failures)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        at_s = data.draw(st.sampled_from(self.failures))
        self.failures.remove(at_s)
        if self.outcomes.retract(at_s, self.now_s):
            self.shut_until_s = -math.inf

    @rule()
    def spare(self) -> None:
        if self.outcomes.ejected:
            self.outcomes.reprieve(self.now_s)
            self.shut_until_s = -math.inf

    @invariant()
    def sound(self) -> None:
        outcomes = self.outcomes
        ring = outcomes.ring
        ring.advance(self.now_s)
        assert ring.good >= 0
        assert ring.failed >= 0
        assert outcomes.ejections >= 0
        if outcomes.trials:
            assert outcomes.ejected or outcomes.breaker is BreakerState.SLOW_START
        if outcomes.breaker is not BreakerState.HALF_OPEN:
            assert math.isinf(outcomes.until_s) is (outcomes.breaker is BreakerState.CLOSED)


TestAnyEvents = AnyEvents.TestCase
