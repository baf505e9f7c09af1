"""Requests over two simulated instances: times by hand, conservation, and nothing left behind."""

import dataclasses

import numpy as np
import pytest

from hetero_gateway.core.instances.pairs import Link, Pairs
from hetero_gateway.core.lengths.predictors import ConstantPredictor
from hetero_gateway.core.policies.legs import RolePrice
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId
from hetero_gateway.sim import kernel
from hetero_gateway.sim.cluster import Records, simulate
from hetero_gateway.sim.fleet import EngineFleet
from hetero_gateway.sim.workload import Fault, FaultKind, Workload
from tests.sim.builders import FAST, SLOW, instances, make_scheduler, random_workload

P, D = InstanceId("i0"), InstanceId("i1")
LINK = Link(0.01, 1e9)
TOKEN_BYTES = 1e5
Roles = dict[InstanceId, RolePrice] | None
ROLES: Roles = {P: RolePrice(decode_s=1e3), D: RolePrice(prefill_s=1e3)}


def run(
    workload: Workload, *, roles: Roles = ROLES, servers_s: tuple[float, float] = (0.0, 0.0)
) -> tuple[Records, Scheduler, EngineFleet]:
    """``servers_s``: ``first_token_s`` of each."""
    scheduler, fleets = make_scheduler("finish-time"), []
    profiles = (
        dataclasses.replace(profile, first_token_s=server_s)
        for profile, server_s in zip((FAST, SLOW), servers_s, strict=True)
    )
    records = simulate(
        instances(*profiles), workload, scheduler, ConstantPredictor(50.0),
        pairs=Pairs(TOKEN_BYTES, {(P, D): LINK, (D, P): LINK}), watch=fleets.append,
        roles=roles,
    )  # fmt: skip
    return records, scheduler, fleets[0]


def one(prompt: int, output: int) -> Workload:
    return Workload(np.zeros(1), np.array([prompt]), np.array([output]))


def test_prefill_transfer_and_decode_take_what_each_takes() -> None:
    records, _, _ = run(one(1000, 3))
    p, d = FAST.constants, SLOW.constants
    prefill_s = p.p1 * 1000 + p.p2 + p.p3 * 1000 + p.p4
    transfer_s = LINK.start_s + 1000 * TOKEN_BYTES / LINK.bytes_per_s
    # The decode instance computes the last token of the prompt, and makes the first one of it.
    first_s = d.p1 + d.p2 + d.p3 + d.p4
    steps_s = sum(d.p5 * k + d.p6 + d.p7 * k + d.p8 for k in (1001, 1002))
    expected_s = prefill_s + transfer_s + first_s
    assert records.first_token_s[0] == pytest.approx(expected_s)
    assert records.finish_s[0] == pytest.approx(expected_s + steps_s)
    assert records.instance[0] == 1


def test_both_servers_take_their_time_before_their_legs() -> None:
    plain, served = (run(one(1000, 3), servers_s=s)[0] for s in ((0.0, 0.0), (0.5, 0.2)))
    assert served.split[0] == 1
    assert served.first_token_s[0] - plain.first_token_s[0] == pytest.approx(0.7)
    assert served.finish_s[0] - plain.finish_s[0] == pytest.approx(0.7)


def test_transfers_of_one_link_follow_each_other() -> None:
    many = Workload(np.zeros(2), np.array([500, 500]), np.array([2, 2]))
    records, _, _ = run(many)
    takes_s = LINK.takes_s(500 * TOKEN_BYTES)
    apart_s = float(np.diff(np.sort(records.first_token_s))[0])
    assert apart_s == pytest.approx(takes_s, abs=0.035)  # a step, at most


@pytest.mark.parametrize("roles", [ROLES, {}])
def test_every_request_ends_and_nothing_is_left(roles: Roles) -> None:
    workload = random_workload(400, 12.0)
    records, scheduler, fleet = run(workload, roles=roles)
    assert np.isfinite(records.finish_s).all()
    assert (records.first_token_s > workload.arrival_s).all()
    assert (records.finish_s >= records.first_token_s).all()
    for state in scheduler.members.table.states.values():
        assert (state.load_s, state.kv_tokens, state.in_flight) == (0.0, 0, 0)
        assert (state.waiting_prompt, state.context) == (0, 0.0)
    tables = fleet.tables()
    for instance in tables[1]:
        assert instance[kernel.FREE_BLOCKS] == instance[kernel.TOTAL_BLOCKS]


def test_the_same_comes_out_again() -> None:
    first, second = (run(random_workload(200, 10.0))[0] for _ in range(2))
    assert (first.finish_s == second.finish_s).all()


def test_without_roles_the_pairs_change_nothing() -> None:
    workload = random_workload(300, 8.0)
    plain = simulate(
        instances(FAST, SLOW), workload, make_scheduler("finish-time"), ConstantPredictor(50.0)
    )
    assert (run(workload, roles=None)[0].finish_s == plain.finish_s).all()


def test_instances_that_die_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot die"):
        simulate(
            instances(FAST, SLOW), one(10, 2), make_scheduler("finish-time"),
            ConstantPredictor(50.0), faults=[Fault(0, FaultKind.DEAD, 1.0, 2.0)],
            pairs=Pairs(TOKEN_BYTES, {}),
        )  # fmt: skip
