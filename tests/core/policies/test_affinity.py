"""Policies that keep together what belongs together."""

from collections import Counter

import numpy as np
import pytest

from hetero_gateway.core.policies import View, make_policy
from hetero_gateway.core.policies.base import Decision, Prefix
from hetero_gateway.core.request import keys_of
from hetero_gateway.core.types import Outcome
from tests.core.builders import candidates, chosen, request, scheduler, spec


def matching(matches: list[float], in_flight: list[int], prompt_tokens: int = 1000) -> View:
    view = candidates([0.0] * len(matches), in_flight=in_flight)
    nothing = [0.0] * len(matches)
    view.prefix = Prefix(matches, nothing, nothing) if any(matches) else None
    view.request = request(prompt_tokens)
    return view


def affinity(view: View, seed: int = 0) -> int:
    choice = make_policy("prefix-affinity").choose(view, np.random.default_rng(seed))
    return choice.position


@pytest.mark.parametrize(
    ("matches", "in_flight", "expected"),
    [
        ([600, 900, 0], [5, 20, 0], 1),  # the deepest match
        ([900, 900, 0], [20, 5, 0], 1),  # of equals the less loaded
        ([500, 500, 0], [5, 20, 0], 2),  # no more than half: the fewest
        ([0, 0, 0], [5, 20, 3], 2),
        ([900, 0, 0], [33, 0, 9], 1),  # 33 more than the fewest: out of balance
        ([900, 0, 0], [32, 0, 9], 0),
        ([900, 0, 0], [363, 330, 340], 0),  # but not by a tenth
        ([900, 0, 0], [364, 330, 340], 1),
    ],
)
def test_prefix_affinity_is_cache_aware_s_rule(matches, in_flight, expected):
    assert affinity(matching(matches, in_flight)) == expected


def test_prefix_affinity_follows_a_conversation_and_explains_itself() -> None:
    s = scheduler(spec("a"), spec("b"), policy="prefix-affinity")
    text = [b"x" * 5000]
    seen = set()
    for i in range(20):
        text += [b"%d " % i * 100]
        turn = request(1000 + 30 * i).replace(prefix=keys_of(text, 0))
        decision = chosen(s.choose(turn))
        seen.add(decision.instance_id)
        dispatch = s.dispatch(decision)
        s.settle(dispatch, Outcome.COMPLETED)
    assert len(seen) == 1
    assert "most of the prompt" in because(decision)
    fresh = request().replace(prefix=keys_of([b"y" * 5000], 0))
    assert "half of the prompt" in because(chosen(s.choose(fresh)))


def because(decision: Decision) -> str:
    return decision.policy.because(decision)


def session(view: View, number: int | None, seed: int = 0) -> int:
    view.request = request().replace(session=number)
    choice = make_policy("session").choose(view, np.random.default_rng(seed))
    return choice.position


SESSIONS = [int(n) for n in np.random.default_rng(0).integers(0, 1 << 63, 4000)]


def test_a_session_stays_where_it_is_whatever_the_seed() -> None:
    view = candidates([0.0] * 5)
    for number in SESSIONS[:200]:
        assert len({session(view, number, seed) for seed in range(5)}) == 1


def test_sessions_are_spread_by_capacity() -> None:
    view = candidates([0.0] * 3, capacity=[1.0, 2.0, 5.0], in_flight=[1000, 2000, 5000])
    counts = Counter(session(view, number) for number in SESSIONS)
    for position, share in enumerate((1 / 8, 2 / 8, 5 / 8)):
        assert abs(counts[position] / len(SESSIONS) - share) < 0.03


def test_an_instance_that_leaves_moves_its_own_sessions_only() -> None:
    view, fewer = candidates([0.0] * 5), candidates([0.0] * 4)
    for number in SESSIONS[:500]:
        before, after = session(view, number), session(fewer, number)
        assert after == before or before == 4


def test_no_instance_gets_more_than_its_bound_of_one_session() -> None:
    in_flight = [0] * 4
    for _ in range(100):
        view = candidates([0.0] * 4, capacity=[1.0, 1.0, 1.0, 5.0], in_flight=list(in_flight))
        in_flight[session(view, SESSIONS[0])] += 1
    for n, capacity in zip(in_flight, (1, 1, 1, 5), strict=True):
        assert n <= np.ceil(1.25 * 100 * capacity / 8)
    assert sum(in_flight) == 100


def test_without_a_session_the_fewest_per_capacity_gets_it() -> None:
    view = candidates([0.0] * 2, capacity=[1.0, 4.0], in_flight=[1, 4])
    assert session(view, None) == 1


def test_session_explains_itself() -> None:
    s = scheduler(spec("a"), spec("b"), policy="session")
    assert "order of this session" in because(chosen(s.choose(request().replace(session=7))))
    assert "no session" in because(chosen(s.choose(request())))
    assert chosen(s.choose(request().replace(session=7))).instance_id in ("a", "b")
