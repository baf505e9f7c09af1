"""When batches will be done."""

import math

import pytest

from hetero_gateway.core.batches.outlook import Pace, Seen, Sums, ends_in_s, kind_of, work_of


def work(model, prompt, output):
    return prompt * 1e-4 + output * 1e-2


def test_what_lines_were_is_what_others_like_them_will_be():
    short, long = kind_of("m", 100, 1000), kind_of("m", 4000, 1000)
    left = {short: Sums(10, 1000, 10_000), long: Sums(2, 8000, 2000)}
    seen = Seen()
    assert work_of(left, seen, work) == pytest.approx(
        10 * work("m", 100, 1000) + 2 * work("m", 4000, 1000)
    )
    for _ in range(20):
        seen.note(short, (100, 1000), (120, 200))
    # The long ones have none of their own: a fifth of the limit is what limits were worth.
    assert seen.mean(long, left[long]) == (pytest.approx(4800), pytest.approx(200))
    for _ in range(8):
        seen.note(long, (4000, 1000), (4000, 900))
    assert seen.mean(long, left[long]) == (pytest.approx(4000), pytest.approx(900))
    assert seen.mean(short, left[short]) == (pytest.approx(120), pytest.approx(200))


def test_the_end_is_right_where_lines_get_longer():
    """Sorted by length, and each takes as long as it says: at any time the end is known."""
    lengths = [10 + i for i in range(2000)]
    left, seen, pace = {}, Seen(), Pace()
    for length in lengths:
        left.setdefault(kind_of("m", length, 0), Sums()).add(length, 0)
    pace.begin(0.0)
    now_s, ends = 0.0, []
    for length in lengths:
        now_s += length * 0.01
        left[kind_of("m", length, 0)].add(-length, 0, -1)
        seen.note(kind_of("m", length, 0), (length, 0), (length, 0))
        pace.note(work("m", length, 0))
        pace.look(now_s)
        ends.append(now_s + ends_in_s([work_of(left, seen, work)], pace.per_s(now_s))[0])
    assert all(end == pytest.approx(now_s, rel=0.01) for end in ends[200:])


def test_one_after_the_other():
    assert ends_in_s([10.0, 5.0], 2.0) == [5.0, 7.5]
    assert ends_in_s([10.0], None) == [math.inf]


def test_a_pause_is_noticed():
    pace = Pace()
    assert pace.per_s(1.0) is None
    pace.begin(0.0)
    for second in range(1, 301):
        pace.note(3.0 if second <= 150 else 1.0)
        pace.look(float(second))
    assert pace.per_s(300.0) == pytest.approx(1.0, rel=0.05)
