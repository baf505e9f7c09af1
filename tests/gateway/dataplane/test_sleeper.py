"""Placement as others than a client drive it: any object that can sleep, wake and be gone."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.types import Outcome, Reject, Request
from hetero_gateway.gateway.dataplane.dispatcher import Placed
from hetero_gateway.gateway.dataplane.placement import Placement, SleeperGone
from tests.fakes.running import RunningGateway, eventually
from tests.gateway.dataplane.test_placement import serving

REQUEST = Request("m", 5000, 10.0)


class Worker:
    """Sleeps until it is woken."""

    def __init__(self) -> None:
        self.gone = False
        self.woken = asyncio.Event()

    def wake(self) -> None:
        self.woken.set()

    async def wait(self) -> None:
        await self.woken.wait()
        self.woken.clear()


def placed(placement: Placement) -> Placed:
    place = placement.submit(REQUEST, ())
    assert isinstance(place, Placed)
    return place


def waiting(placement: Placement, worker: Worker) -> Coroutine[Any, Any, Placed | Reject]:
    """What one more waits for, for ever."""
    ticket = placement.submit(REQUEST, ())
    assert isinstance(ticket, Ticket)
    return placement.wait(ticket, worker, asyncio.get_running_loop().time() + 1e6)


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


async def test_who_waits_is_woken_and_gets_the_room_of_who_leaves() -> None:
    async with serving() as (running, *_):
        placement, worker = running.gateway.placement, Worker()
        first = placed(placement)
        task = asyncio.create_task(waiting(placement, worker))
        await asyncio.sleep(0)
        assert len(placement) == 1
        placement.settle(first.dispatch, Outcome.COMPLETED)
        second = await task
        assert isinstance(second, Placed)
        placement.settle(second.dispatch, Outcome.COMPLETED)
        assert running.settled()


@pytest.mark.parametrize("moment", ["before it sleeps", "asleep", "placed and not yet awake"])
async def test_a_sleeper_that_is_gone_leaves_nothing_behind(moment: str) -> None:
    async with serving() as (running, *_):
        placement, worker = running.gateway.placement, Worker()
        first = placed(placement)
        worker.gone = moment == "before it sleeps"
        task = asyncio.create_task(waiting(placement, worker))
        await asyncio.sleep(0)
        if moment == "placed and not yet awake":
            placement.settle(first.dispatch, Outcome.COMPLETED)  # the pump comes later in this turn
        worker.gone = True
        worker.wake()
        with pytest.raises(SleeperGone):
            await task
        placement.settle(first.dispatch, Outcome.COMPLETED)
        await eventually(running.settled)
        await eventually(lambda: placement.idle)


async def test_every_pass_of_deciding_is_counted_once_whoever_it_places() -> None:
    async with serving() as (running, *_):
        placement, worker = running.gateway.placement, Worker()
        first = placed(placement)
        assert observed(running) == 1
        wait = waiting(placement, worker)
        assert observed(running) == 2  # it placed nobody
        placement.settle(first.dispatch, Outcome.COMPLETED)
        place = await wait
        assert isinstance(place, Placed)
        placement.settle(place.dispatch, Outcome.COMPLETED)
        assert isinstance(placement.submit(Request("nope", 1, 1.0), ()), Reject)
        assert observed(running) >= 3
