"""When batches will be done."""

import heapq
import math
import random

import pytest

from hetero_gateway.core.batches.outlook import LineLengths, Pace, Sums, ends_in_s, kind_of, work_of


def work(model, prompt, output):
    return prompt * 1e-4 + output * 1e-2


def test_what_lines_were_is_what_others_like_them_will_be():
    short, long = kind_of("m", 100, 1000), kind_of("m", 4000, 1000)
    left = {short: Sums(10, 1000, 10_000), long: Sums(2, 8000, 2000)}
    seen = LineLengths()
    assert work_of(left, {}, seen, work)[0] == pytest.approx(
        10 * work("m", 100, 1000) + 2 * work("m", 4000, 1000)
    )
    for _ in range(20):
        seen.note(short, (100, 1000), (120, 200))
    # The long ones have none of their own: a fifth of the limit is what limits were worth.
    assert seen.mean(long, left[long])[:2] == (pytest.approx(4800), pytest.approx(200))
    for _ in range(8):
        seen.note(long, (4000, 1000), (4000, 900))
    assert seen.mean(long, left[long])[:2] == (pytest.approx(4000), pytest.approx(900))
    assert seen.mean(short, left[short])[:2] == (pytest.approx(120), pytest.approx(200))


def test_the_end_is_right_where_lines_get_longer():
    """Sorted by length, and each takes as long as it says: at any time the end is known."""
    lengths = [10 + i for i in range(2000)]
    left, seen, pace = {}, LineLengths(), Pace()
    for length in lengths:
        left.setdefault(kind_of("m", length, 0), Sums()).add(length, 0)
    pace.begin(0.0)
    now_s, ends = 0.0, []
    for length in lengths:
        now_s += length * 0.01
        left[kind_of("m", length, 0)].add(-length, 0, -1)
        seen.note(kind_of("m", length, 0), (length, 0), (length, 0))
        pace.note(work("m", length, 0))
        todo_s, begun_s = work_of(left, {}, seen, work)
        ends.append(now_s + ends_in_s([todo_s], pace.look(now_s, begun_s))[0])
    assert all(end == pytest.approx(now_s, rel=0.01) for end in ends[200:-1])


def test_one_after_the_other():
    assert ends_in_s([10.0, 5.0], 2.0) == [5.0, 7.5]
    assert ends_in_s([10.0], None) == [math.inf]


def test_what_is_out_is_longer_than_what_is_done():
    """Exponential answers on so many seats: the end is known when a tenth is done."""
    rng, seats, lines = random.Random(1), 50, 2500
    lengths = [1 + int(rng.expovariate(1 / 200)) for _ in range(lines)]
    kind = kind_of("m", 100, 1000)
    left, seen, pace = {kind: Sums(lines, 100 * lines, 1000 * lines)}, LineLengths(), Pace()
    pace.begin(0.0)
    out = [(length, length) for length in lengths[:seats]]
    heapq.heapify(out)
    waiting, ends = lengths[seats:], []
    while out:
        now_s, length = heapq.heappop(out)
        left[kind].add(-100, -1000, -1)
        seen.note(kind, (100, 1000), (100, length))
        pace.note(work("m", 100, length))
        if waiting:
            following = waiting.pop(0)
            heapq.heappush(out, (now_s + following, following))
        todo_s, begun_s = work_of(left, {kind: len(out)}, seen, work)
        ends.append(now_s + ends_in_s([todo_s], pace.look(float(now_s), begun_s))[0])
    # All seats are taken until then; how long the very last answer is nobody can know.
    full_s = sum(lengths) / seats
    errors = [end / full_s - 1 for end in ends[250:2000]]
    assert max(map(abs, errors)) < 0.15, (min(errors), max(errors))


def test_a_pause_is_noticed():
    pace = Pace()
    assert pace.look(1.0, 0.0) is None
    pace.begin(0.0)
    per_s = None
    for second in range(1, 301):
        pace.note(3.0 if second <= 150 else 1.0)
        per_s = pace.look(float(second), 0.0)
    assert per_s == pytest.approx(1.0, rel=0.05)
