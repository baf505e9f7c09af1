"""A body is kept once, and all of them together within a budget."""

import tracemalloc

import pytest

from hetero_gateway.errors import Refusal
from hetero_gateway.http.bodies import SMALL_BYTES, BodyBuffer, BodyLimits

MB = 1 << 20


def filled(limits: BodyLimits, size: int, piece: int) -> BodyBuffer:
    body = BodyBuffer(limits)
    for start in range(0, size, piece):
        body.add(b"x" * min(piece, size - start))
    return body


@pytest.mark.parametrize(
    ("size", "piece"),
    [(0, 1), (1, 1), (5000, 1), (SMALL_BYTES, 999), (SMALL_BYTES + 1, 999), (5 * MB, 65_536)],
)
def test_what_was_added_is_taken_and_nothing_is_held_in_the_end(size: int, piece: int) -> None:
    limits = BodyLimits(8 * MB, 16 * MB)
    body = filled(limits, size, piece)
    assert limits.buffered_bytes == (size if size > SMALL_BYTES else 0)
    taken = body.take()
    assert type(taken) is bytes
    assert taken == b"x" * size
    assert body.holds == (size > SMALL_BYTES)
    for _ in range(2):
        body.release()
        assert limits.buffered_bytes == 0


def test_a_long_body_is_never_there_twice() -> None:
    size = 32 * MB
    piece = b"x" * 65_536
    limits = BodyLimits(64 * MB, 512 * MB)
    tracemalloc.start()
    body = BodyBuffer(limits)
    for _ in range(size // len(piece)):
        body.add(piece)
    taken = body.take()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(taken) == size
    assert most < 1.3 * size


def test_a_body_in_single_bytes_takes_no_more_room_than_it_has() -> None:
    limits = BodyLimits(8 * MB, 16 * MB)
    tracemalloc.start()
    body = BodyBuffer(limits)
    for i in range(SMALL_BYTES):
        body.add(bytes((i % 256,)))
    now = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert body.size_bytes == SMALL_BYTES
    assert now < 2 * SMALL_BYTES


def test_who_comes_when_the_budget_is_spent_is_refused_and_holds_nothing() -> None:
    limits = BodyLimits(4 * MB, 6 * MB)
    first = filled(limits, 4 * MB, 65_536)
    limits.check(2 * MB)
    with pytest.raises(Refusal) as announced:
        limits.check(2 * MB + 1)
    with pytest.raises(Refusal) as arrived:
        filled(limits, 3 * MB, 65_536)
    for caught in (announced, arrived):
        assert caught.value.status == 503
        assert caught.value.retry_after_s
    assert limits.buffered_bytes == 4 * MB
    filled(limits, SMALL_BYTES, 4096)  # small ones are let in
    first.release()
    limits.check(4 * MB)


def test_one_that_is_too_large_holds_nothing() -> None:
    limits = BodyLimits(MB, 6 * MB)
    for act in (lambda: filled(limits, MB + 1, 65_536), lambda: limits.check(MB + 1)):
        with pytest.raises(Refusal) as caught:
            act()
        assert caught.value.status == 413
    assert limits.buffered_bytes == 0
