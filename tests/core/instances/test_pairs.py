"""Who can hand a prompt over to whom, and how long that takes."""

import math

import pytest

from hetero_gateway.core.instances.pairs import REFUSED_FOR_S, Link, Pairs, between
from hetero_gateway.core.types import InstanceId
from tests.core.builders import spec

A, B = InstanceId("a"), InstanceId("b")
TOKEN_BYTES = 1000.0


LINK = Link(0.002, 1e9)


def pairs(link: Link = LINK) -> Pairs:
    return Pairs(TOKEN_BYTES, {(A, B): link})


def test_a_transfer_takes_its_start_and_its_bytes() -> None:
    assert pairs().transfer_s(A, B, 1000, 0.0) == pytest.approx(0.003)
    assert pairs().transfer_s(B, A, 1000, 0.0) == math.inf


def test_a_busy_link_is_waited_for_until_its_transfers_are_long_ago() -> None:
    busy = pairs(Link(0.0, 1e6))
    for k in range(10):
        busy.sent(A, B, 700, k)
    assert busy.transfer_s(A, B, 1000, 10.0) > 1.2
    assert busy.transfer_s(A, B, 1000, 200.0) == pytest.approx(1.0)


def test_a_pair_is_fitted_to_what_is_seen() -> None:
    seen = pairs()
    for k in range(1000):
        size_bytes = 1e6 * (1 + k % 100)
        seen.observe(A, B, size_bytes, 0.01 + size_bytes / 2e8)
    link = seen.link(A, B, 0.0)
    assert link is not None
    assert link.start_s == pytest.approx(0.01, rel=0.01)
    assert link.bytes_per_s == pytest.approx(2e8, rel=0.01)


@pytest.mark.parametrize("took_s", [0.0, math.nan, math.inf, -1.0, 1e9])
def test_what_is_absurd_leaves_a_link_that_can_be_reckoned_with(took_s: float) -> None:
    seen = pairs()
    for _ in range(100):
        seen.observe(A, B, 1e6, took_s)
    assert 0 <= seen.transfer_s(A, B, 1000, 0.0) < math.inf


def test_who_refused_is_left_alone_for_some_minutes() -> None:
    refusing = pairs()
    refusing.refuse(A, B, 7.0)
    assert refusing.refused(8.0) == {(A, B): REFUSED_FOR_S - 1}
    assert refusing.refused(7.0 + REFUSED_FOR_S) == {}
    assert refusing.transfer_s(A, B, 1, 8.0) == math.inf
    assert refusing.transfer_s(A, B, 1, 7.0 + REFUSED_FOR_S) < math.inf


def test_roles_and_models_forbid() -> None:
    specs = [
        spec("p", kv_role="prefill"),
        spec("d", kv_role="decode"),
        spec("x"),
        spec("y", models=frozenset({"n"})),
    ]
    found = between(specs, Link(0.0, 1.0), TOKEN_BYTES)
    can = [
        (str(one.instance_id), str(other.instance_id))
        for one in specs
        for other in specs
        if found.link(one.instance_id, other.instance_id, 0.0)
    ]
    assert can == [("p", "d"), ("p", "x"), ("x", "d")]
