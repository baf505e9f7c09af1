"""What one process has learnt, another one goes on from: it decides as the first would have."""

from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.instances.outcomes import BreakerState, EjectionRules, Outcomes
from hetero_gateway.core.lengths.predictors import (
    BucketMeanPredictor,
    BytesPerToken,
    LengthFeatures,
    ResidualLives,
)
from hetero_gateway.core.limits.window import Window
from hetero_gateway.core.prefixes.caches import PrefixCaches, PrefixIndex
from hetero_gateway.core.types import InstanceId, PrefixKeys
from tests.core.builders import SLOW, request, scheduler, spec, state

A, B = InstanceId("a"), InstanceId("b")
LENGTHS = st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 5000)), max_size=300)


@given(LENGTHS)
def test_lengths(seen: list[tuple[str, int]]) -> None:
    lives, lives_after = ResidualLives(256.0), ResidualLives(256.0)
    ratios, ratios_after = BytesPerToken(4.0), BytesPerToken(4.0)
    means, means_after = BucketMeanPredictor(256.0), BucketMeanPredictor(256.0)
    asked = [LengthFeatures(model, size, beginning=size % 7) for model, size in seen]
    for (model, size), features in zip(seen, asked, strict=True):
        lives.observe(model, float(size))
        ratios.observe(model, 3 * size, size)
        means.observe(features, float(size))
    lives_after.observe_many(lives.finished())
    ratios_after.observe_many(ratios.reports())
    means_after.take_over(means.means())
    assert lives_after.finished() == lives.finished()
    assert ratios_after.reports() == ratios.reports()
    for features in asked:
        assert means_after.predict(features) == means.predict(features)


def test_bytes_per_token_go_on_with_the_oldest_report_first() -> None:
    before, after = BytesPerToken(4.0), BytesPerToken(4.0)
    for size in range(1, 200):
        before.observe("m", 10 * size, size)
    after.observe_many(before.reports())
    for ratios in (before, after):
        for _ in range(64):
            ratios.observe("m", 3000, 1000)
    assert before.reports() == after.reports()


@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(0, 50)), max_size=20),
    st.integers(0, 70),
    st.integers(0, 200),
)
def test_what_counts_against_a_limit_counts_as_long(
    steps: list[tuple[int, int]], later_s: int, here: int
) -> None:
    before, after, both = Window(100), Window(100), Window(100)
    second = 1000
    for passed_s, amount in steps:
        second += passed_s
        for window in (before, both):
            window.advance(second)
            window.use(amount)
    before.advance(second)
    for window in (after, both):
        window.advance(second + later_s)
        window.use(here)
    after.take_over(list(before.slots), second)
    for passed_s in (0, 1, 30, 61):
        for window in (after, both):
            window.advance(second + later_s + passed_s)
        assert (after.used, after.free) == (both.used, both.free)


def text(*keys: int) -> PrefixKeys:
    return PrefixKeys(keys, tuple(1024 * (i + 1) for i in range(len(keys))), 1024 * len(keys))


@given(st.lists(st.tuples(st.sampled_from((A, B)), st.integers(0, 30)), max_size=60))
def test_what_is_thought_to_be_cached(sent: list[tuple[InstanceId, int]]) -> None:
    before, after = PrefixIndex(), PrefixIndex()
    for index in (before, after):
        index.join(A, 20 * 1024)
        index.join(B, 10 * 1024)
    for instance_id, key in sent:
        before.insert(instance_id, text(key // 10 + 100, key))
    for instance_id in (A, B):
        after.hold(instance_id, before.held(instance_id))
    for index in (before, after):  # what goes first is the same
        index.insert(B, text(*range(200, 205)))
    for instance_id in (A, B):
        assert after.held(instance_id) == before.held(instance_id)
        assert after.bytes_on(instance_id) == before.bytes_on(instance_id)
    for key in range(31):
        assert after.levels(text(key // 10 + 100, key)) == before.levels(text(key // 10 + 100, key))


def test_how_far_that_is_believed_and_what_capacities_are_reckoned_with() -> None:
    before, after = PrefixCaches(), PrefixCaches()
    for caches in (before, after):
        caches.join(spec("a"), 0)
    after.take_over_lately(9000.0, 1000.0, 9.0)
    after.take_over(A, [(7, 32)], (8000.0, 2000.0))
    assert after.eta(A) < before.eta(A) == 1.0
    assert after.lately() == (9000.0, 1000.0, 9.0)
    assert after.index.bytes_on(A)[1] > 2 * before.index.bytes_on(A)[1]


def test_an_ejected_instance_stays_so_for_its_term() -> None:
    before, after = Outcomes(EjectionRules()), Outcomes(EjectionRules())
    before.eject(100.0, "reset")
    assert after.resume(before.standing(), 101.0)
    assert (after.breaker, after.until_s) == (BreakerState.OPEN, before.until_s)
    after.advance(before.until_s)
    assert after.breaker is BreakerState.HALF_OPEN
    assert not Outcomes(EjectionRules()).resume(Outcomes(EjectionRules()).standing(), 101.0)


def test_the_speed_of_the_same_machine_and_of_no_other() -> None:
    queues = {"policy": "finish-time"}  # which has stand-ins
    before = scheduler(spec("a"), spec("b", None), **queues)
    for _ in range(20):
        state(before, "a").first_token(state(before, "a").dispatch(request(), 1.0, 0.0), 0.0)
        before.members.observe_steps(A, 10.0, 5.0, 1.0)
    before.members.stand_in_for(state(before, "b"), "m")
    assert state(before, "a").speed > 1.0
    same = scheduler(spec("a"), spec("b", None), **queues)
    other = scheduler(spec("a", SLOW), **queues)
    for s in (same, other):
        state(s, "a").take_over(state(before, "a").learnt())
    state(same, "b").take_over(state(before, "b").learnt())
    assert state(same, "a").speed == state(before, "a").speed
    assert state(same, "b").constants == state(before, "b").constants
    assert state(other, "a").speed == 1.0
