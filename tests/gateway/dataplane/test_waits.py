"""Placement as others than a client's request drive it: any owner of a place."""

import asyncio
from typing import Any

import pytest

from hetero_gateway.core.request import Request
from hetero_gateway.core.types import Outcome, Reject
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.dataplane.intake import Placed
from hetero_gateway.gateway.dataplane.placement import Placement
from hetero_gateway.gateway.dataplane.waits import QueueWait
from tests.fakes.running import RunningGateway, eventually
from tests.gateway.dataplane.test_placement import serving

REQUEST = Request("m", 5000, 10.0)


class Waiter:
    """An owner that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.noted: list[Placed] = []

    def placed(self, place: Placed | Reject) -> None:
        self.heard.append(place)

    def turned_away(self, refusal: Refusal) -> None:
        self.heard.append(refusal)

    def broke(self, error: Exception) -> None:
        self.heard.append(error)


def placed(placement: Placement) -> Placed:
    place = placement.submit(REQUEST, ())
    assert isinstance(place, Placed)
    return place


def waiting(placement: Placement, owner: Waiter, for_s: float = 1e6) -> QueueWait:
    """One more, for which there is no room."""
    wait = placement.submit(REQUEST, ())
    assert isinstance(wait, QueueWait)
    deadline_s = asyncio.get_running_loop().time() + for_s
    placement.begin(wait, owner, deadline_s, owner.noted.append)
    return wait


def observed(running: RunningGateway) -> int:
    decisions = running.gateway.metrics.decision_s
    decisions.count_noted()
    return sum(decisions.counts)


async def test_where_there_is_room_a_place_is_given_at_once() -> None:
    async with serving() as (running, *_):
        placement = running.gateway.placement
        place = placed(placement)
        assert (place.instance.id, place.waited_s) == ("i0", 0.0)
        assert len(placement) == 0
        placement.settle(place.dispatch, Outcome.COMPLETED)
        assert running.settled()


async def test_who_waits_hears_of_the_room_of_who_leaves_and_is_noted_before() -> None:
    async with serving() as (running, *_):
        placement, owner = running.gateway.placement, Waiter()
        first = placed(placement)
        waiting(placement, owner)
        assert (len(placement), owner.heard) == (1, [])
        placement.settle(first.dispatch, Outcome.COMPLETED)
        await eventually(lambda: bool(owner.heard))
        (second,) = owner.heard
        assert isinstance(second, Placed)
        assert owner.noted == [second]
        placement.settle(second.dispatch, Outcome.COMPLETED)
        assert running.settled()


@pytest.mark.parametrize("moment", ["at once", "later", "placed and not yet told"])
async def test_an_owner_that_leaves_leaves_nothing_behind_and_hears_nothing(moment: str) -> None:
    async with serving() as (running, *_):
        placement, owner = running.gateway.placement, Waiter()
        first = placed(placement)
        wait = waiting(placement, owner)
        if moment != "at once":
            await asyncio.sleep(0)
        if moment == "placed and not yet told":
            placement.settle(first.dispatch, Outcome.COMPLETED)
            await asyncio.sleep(0)  # the pump
            assert not wait.ticket.waits
        wait.leave()
        wait.leave()  # which means nothing any more
        placement.settle(first.dispatch, Outcome.COMPLETED)
        await eventually(running.settled)
        await eventually(lambda: placement.idle)
        assert owner.heard == owner.noted == []


@pytest.mark.parametrize(("ends", "status"), [("its deadline", 504), ("the gateway", 503)])
async def test_who_has_no_place_in_time_hears_why(ends: str, status: int) -> None:
    async with serving() as (running, *_):
        placement, owner = running.gateway.placement, Waiter()
        first = placed(placement)
        waiting(placement, owner, for_s=0.05 if ends == "its deadline" else 1e6)
        if ends == "the gateway":
            placement.close()
        await eventually(lambda: bool(owner.heard))
        (refusal,) = owner.heard
        assert refusal.status == status
        placement.settle(first.dispatch, Outcome.COMPLETED)
        await eventually(running.settled)


async def test_every_pass_of_deciding_is_counted_once_whoever_it_places() -> None:
    async with serving() as (running, *_):
        placement, owner = running.gateway.placement, Waiter()
        first = placed(placement)
        assert observed(running) == 1
        waiting(placement, owner)
        assert observed(running) == 2  # it placed nobody
        placement.settle(first.dispatch, Outcome.COMPLETED)
        await eventually(lambda: bool(owner.heard))
        placement.settle(owner.heard[0].dispatch, Outcome.COMPLETED)
        assert isinstance(placement.submit(Request("nope", 1, 1.0), ()), Reject)
        assert observed(running) >= 3
