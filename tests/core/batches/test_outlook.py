"""When batches will be done."""

import math
import random
from collections import deque

import pytest

from hetero_gateway.core.batches.outlook import (
    LineLengths,
    LineOut,
    Pace,
    Sums,
    drain_s,
    ends_in_s,
    kind_of,
    work_of,
)
from hetero_gateway.core.types import InstanceId

A = InstanceId("a")


def work(model, prompt, output):
    return prompt * 1e-4 + output * 1e-2


def mean(seen, kind, sums):
    *lengths, spread = seen.mean(kind, sums)
    assert spread <= 0.1 * lengths[1]
    return tuple(lengths)


def test_what_lines_were_is_what_others_like_them_will_be():
    short, long = kind_of("m", 100, 1000), kind_of("m", 4000, 1000)
    left = {short: Sums(10, 1000, 10_000), long: Sums(2, 8000, 2000)}
    seen = LineLengths()
    assert work_of(left, [], seen, work)[0] == pytest.approx(
        10 * work("m", 100, 1000) + 2 * work("m", 4000, 1000)
    )
    for _ in range(50):
        seen.note(short, (100, 1000), (120, 200))
    seen.look([])
    # The long ones have none of their own: a fifth of the limit is what limits were worth.
    assert mean(seen, long, left[long]) == (pytest.approx(4800), pytest.approx(200, rel=0.05))
    for _ in range(40):
        seen.note(long, (4000, 1000), (4000, 900))
    seen.look([])
    assert mean(seen, long, left[long]) == (pytest.approx(4000), pytest.approx(900, rel=0.05))
    assert mean(seen, short, left[short]) == (pytest.approx(120), pytest.approx(200, rel=0.05))


def test_lines_that_are_out_count_with_what_they_have_made():
    kind = kind_of("m", 100, 1000)
    out = [LineOut(kind, A, (100, 1000), 0.0), LineOut(kind, A, (100, 1000), 300.0)]
    waits_s, begun_s = work_of({kind: Sums(5, 500, 5000)}, out, LineLengths(), work)
    assert waits_s == pytest.approx(3 * work("m", 100, 1000))
    assert begun_s == pytest.approx(work("m", 100, 300))


def test_what_has_no_output_has_no_lengths():
    kind, seen = kind_of("m", 100, 0), LineLengths()
    for _ in range(40):
        seen.note(kind, (100, 0), (110, 0))
    seen.look([LineOut(kind, A, (100, 0), 0.0)])
    assert seen.mean(kind, Sums(1, 100, 0)) == (pytest.approx(110), 0.0, 0.0)
    assert drain_s([LineOut(kind, A, (100, 0), 0.0)], seen, lambda *_: 1.0) == 0.0


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
        todo_s, begun_s = work_of(left, [], seen, work)
        ends.append(now_s + ends_in_s([todo_s], [0.0], pace.look(now_s, begun_s))[0])
    assert all(end == pytest.approx(now_s, rel=0.01) for end in ends[200:-1])


def test_one_after_the_other():
    assert ends_in_s([10.0, 5.0], [1.0, 2.0], 2.0) == [6.0, 9.5]
    assert ends_in_s([10.0], [1.0], None) == [math.inf]
    # What is out ends at its own time, however fast others went.
    assert ends_in_s([0.0], [3.0], None) == [3.0]


def test_the_end_is_known_when_a_tenth_is_done():
    """Exponential answers on so many seats, the fuller the slower, to the very last one."""
    rng, seats, lines, limit = random.Random(1), 50, 2000, 300
    lengths = [min(limit, 1 + int(rng.expovariate(1 / 60))) for _ in range(lines)]
    kind = kind_of("m", 100, limit)

    def step(_, there):
        return 0.01 + 0.001 * there

    def work_s(model, prompt, output):
        return output * step(A, seats) / seats

    left, seen, pace = {kind: Sums(lines, 100 * lines, limit * lines)}, LineLengths(), Pace()
    pace.begin(0.0)
    waiting, out, now_s, ends, told_s = deque(lengths), [], 0.0, [], 0.0
    while waiting or out:
        while waiting and len(out) < seats:
            out.append([waiting.popleft(), 0])
        now_s += step(A, len(out))
        for each in out:
            each[1] += 1
        for length, _ in [each for each in out if each[0] == each[1]]:
            left[kind].add(-100, -limit, -1)
            seen.note(kind, (100, limit), (100, length))
            pace.note(work_s("m", 100, length))
        out = [each for each in out if each[0] > each[1]]
        if now_s >= told_s:
            told_s += 1.0
            there = [LineOut(kind, A, (100, limit), made) for _, made in out]
            seen.look(there)
            waits_s, begun_s = work_of(left, there, seen, work_s)
            drain = drain_s(there, seen, step)
            done = lines - left[kind].lines
            ends.append((done, now_s + ends_in_s([waits_s], [drain], pace.look(now_s, begun_s))[0]))
    errors = [end / now_s - 1 for done, end in ends if done >= lines / 10]
    assert len(errors) > 50
    assert max(map(abs, errors)) < 0.1, (min(errors), max(errors))


def test_a_pause_is_noticed():
    pace = Pace()
    assert pace.look(1.0, 0.0) is None
    pace.begin(0.0)
    per_s = None
    for second in range(1, 301):
        pace.note(3.0 if second <= 150 else 1.0)
        per_s = pace.look(float(second), 0.0)
    assert per_s == pytest.approx(1.0, rel=0.05)


def test_the_last_line_of_all_instances_is_the_end():
    """One is four times as slow: how many are elsewhere makes its last line no sooner."""
    kind, seen, slow = kind_of("m", 100, 1000), LineLengths(), InstanceId("slow")
    for length in range(10, 1000, 5):
        seen.note(kind, (100, 1000), (100, length))
    seen.look([])

    def step_s(at, _):
        return 0.04 if at == slow else 0.01

    few = [LineOut(kind, slow, (100, 1000), 0.0)] * 20
    alone_s = drain_s(few, seen, step_s)
    assert alone_s == pytest.approx(0.04 * 970, rel=0.1)
    many = [LineOut(kind, A, (100, 1000), 0.0)] * 200
    assert drain_s(few + many, seen, step_s) == pytest.approx(alone_s, rel=0.01)
    assert drain_s(many, seen, step_s) == pytest.approx(0.01 * 1000, rel=0.1)


def test_a_few_that_are_far_ahead_do_not_say_how_long_lines_are():
    """Exponential lengths of 100: five of them on a fast machine are at 400, the others at 80."""
    kind, rng, means = kind_of("m", 100, 1000), random.Random(3), []
    for _ in range(50):
        seen, out = LineLengths(), []
        for number in range(400):
            length, made = rng.expovariate(1 / 100), 400.0 if number < 5 else 80.0
            if length < made:
                seen.note(kind, (100, 1000), (100, 1 + int(length)))
            else:
                out.append(LineOut(kind, A, (100, 1000), made))
        seen.look(out)
        means.append(seen.mean(kind, Sums(1, 100, 1000))[1])
    deviation = math.sqrt(sum((mean - 100) ** 2 for mean in means) / len(means))
    assert sum(means) / len(means) == pytest.approx(100, rel=0.08)
    assert deviation < 15


def test_lines_of_unlike_lengths_take_more_than_their_mean():
    kind, seen = kind_of("m", 100, 1000), LineLengths()
    for number in range(100):
        seen.note(kind, (100, 1000), (100, 100 if number % 2 else 900))
    seen.look([])
    waits_s, _ = work_of({kind: Sums(10, 1000, 10_000)}, [], seen, lambda _, __, output: output**2)
    assert waits_s == pytest.approx(10 * (100**2 + 900**2) / 2, rel=0.1)


def test_before_a_minute_was_seen_the_rest_goes_as_the_model_says():
    pace = Pace()
    pace.begin(0.0)
    told = []
    for second in range(1, 121):
        pace.note(0.5)
        told.append(pace.look(float(second), 0.0))
    expected = (15 * 0.5 + 45) / 60, (30 * 0.5 + 30) / 60, 0.5
    assert (told[14], told[29], told[-1]) == pytest.approx(expected)
    pace.begin(120.0)
    pace.note(0.1)
    assert pace.look(121.0, 0.0) == pytest.approx((0.1 + 59 * 0.2) / 60)
