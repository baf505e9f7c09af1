"""The breaker: growing pauses, and closed again at once."""

from hetero_gateway.core.sharing.breaker import Breaker


def test_pauses_double_up_to_the_longest_and_end_with_a_success() -> None:
    b = Breaker(0.05, 1.0)
    now_s, pauses = 0.0, []
    assert b.pause_s(now_s) == 0
    for i in range(8):
        assert b.failed(now_s) == (i == 0)
        pauses.append(round(b.pause_s(now_s), 6))
        now_s += pauses[-1]
        assert b.pause_s(now_s) < 1e-9
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert b.succeeded()
    assert not b.succeeded()
    assert b.pause_s(now_s) == 0
    b.failed(now_s)
    assert round(b.pause_s(now_s), 6) == 0.05


def test_weeks_of_failures_are_no_overflow() -> None:
    b = Breaker(0.05, 1.0)
    for _ in range(100_000):
        b.failed(0.0)
    assert b.pause_s(0.0) == 1.0
