"""Roles that are found by simulation: with prompts and answers that disturb each other, or not."""

import functools

import numpy as np

from hetero_gateway.core.instances.pairs import Link, Pairs
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.core.types import InstanceId
from hetero_gateway.planner.roles import Roles, advantage_order, candidates, find_roles, run_under
from hetero_gateway.sim.workload import Workload
from tests.sim.builders import FAST, SLOW, instances

CLUSTER = instances(FAST, FAST, SLOW, SLOW)
IDS = [one.instance_id for one in CLUSTER]


def mix(count: int = 150, per_s: float = 12.0, output: int = 60) -> Workload:
    rng = np.random.default_rng(0)
    return Workload(
        np.cumsum(rng.exponential(1 / per_s, count)),
        rng.integers(200, 2000, count),
        rng.integers(1, 2 * output, count),
    )


def pairs_at(bytes_per_s: float) -> Pairs:
    link = Link(0.002, bytes_per_s)
    return Pairs(131072.0, {(a, b): link for a in IDS for b in IDS if a != b})


def test_candidates_follow_comparative_advantage() -> None:
    order, balanced = advantage_order(CLUSTER, 1000.0, 200.0)
    assert sorted(order) == sorted(IDS)
    assert 1 <= balanced < len(order)
    first, second, *others = candidates(CLUSTER, 1000.0, 200.0)
    assert (first, second) == (None, {})
    for roles in others:
        assert roles is not None
        assert set(roles) == set(IDS)
        assert {bool(one.prefill_s) for one in roles.values()} == {True, False}


def test_nothing_is_split_where_links_are_slow() -> None:
    assert find_roles(CLUSTER, mix(), lambda: pairs_at(1e7), Slo()) is None


def test_nothing_is_split_where_nobody_can_pair_or_nothing_is_answered() -> None:
    assert find_roles(CLUSTER, mix(), lambda: Pairs(1.0, {}), Slo()) is None
    prompts = mix()
    prompts.output_tokens[:] = 1
    assert find_roles(CLUSTER, prompts, lambda: pairs_at(1e10), Slo()) is None


def test_roles_are_found_where_limits_are_tight_and_are_the_same_again() -> None:
    slo = Slo(2.0, 0.03)
    found = [find_roles(CLUSTER, mix(), lambda: pairs_at(1.25e10), slo) for _ in range(2)]
    assert found[0] is not None
    assert found[0] == found[1]
    assert all(isinstance(instance, str) for instance in map(InstanceId, found[0]))


def test_a_backlog_that_grows_speaks_against_a_split() -> None:
    slo, asked = Slo(2.0, 0.03), mix(300, 30.0)
    reference = float(np.mean(asked.prompt_tokens)), float(np.mean(asked.output_tokens))
    longer = Workload(
        np.concatenate((asked.arrival_s, asked.arrival_s[-1] + asked.arrival_s)),
        np.tile(asked.prompt_tokens, 2),
        np.tile(asked.output_tokens, 2),
    )

    def share(roles: Roles, workload: Workload) -> float:
        pairs = functools.partial(pairs_at, 1.25e10)
        return run_under(roles, CLUSTER, workload, pairs, slo, reference).slo_share

    found = find_roles(CLUSTER, asked, lambda: pairs_at(1.25e10), slo)
    tempting = max(candidates(CLUSTER, *reference), key=lambda roles: share(roles, asked))
    assert share(tempting, asked) > share(found, asked)
    assert share(tempting, longer) < share(found, longer)
