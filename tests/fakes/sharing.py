"""Gateways as their exchange sees them: schedulers over instances that are never asked."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.request import Request
from hetero_gateway.core.types import Outcome, PrefixKeys, Reject
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.gateway.fleet.instances import Fleet
from hetero_gateway.scaleout.sharing.peers import Sharing, make_sharing
from hetero_gateway.scaleout.sharing.store import Store


def sharing_config(url: str, *profiles: str, seed: int = 0, **sharing: Any) -> GatewayConfig:
    """Of gateways over an instance of each of these profiles, i0 and so on."""
    instances = [
        {"id": f"i{i}", "base_url": f"http://h{i}", "model": "m", "profile": profile}
        for i, profile in enumerate(profiles)
    ]
    scheduler = {"shared": url, "seed": seed, "sharing": sharing}
    return GatewayConfig.model_validate({"scheduler": scheduler, "instances": instances})


def fleet_of(settings: GatewayConfig) -> Fleet:
    """All of its instances are up."""
    fleet = Fleet(settings, Path())
    for instance in fleet.instances.values():
        fleet.mark_up(instance)
    return fleet


class SharingGateway:
    """A scheduler, and its exchange: by the configuration, or with a store of the test's."""

    def __init__(self, settings: GatewayConfig, store: Store | None = None, name: str = "") -> None:
        self.fleet = fleet_of(settings)
        made = (
            make_sharing(settings.scheduler, self.fleet, Path())
            if store is None
            else Sharing(settings.scheduler, self.fleet, store, name)
        )
        assert made is not None
        self.sharing: Sharing = made

    def place(
        self,
        prompt_tokens: int = 64,
        output_tokens: float = 80.0,
        now_s: float | None = None,
        prefix: PrefixKeys | None = None,
    ) -> Any:
        """Its dispatch; None where it waits."""
        request = Request("m", prompt_tokens, output_tokens, prefix=prefix)
        ticket = self.fleet.scheduler.place(request, time.monotonic() if now_s is None else now_s)
        assert not isinstance(ticket, Reject)
        return ticket.dispatch

    def settle(self, dispatch: Dispatch) -> None:
        self.fleet.scheduler.settle(dispatch, Outcome.COMPLETED, time.monotonic())

    def seen(self) -> dict[str, float]:
        """In flight by instance, as a decision has it: the others' included."""
        decision = self.fleet.scheduler.explain(Request("m", 10, 10.0), time.monotonic())
        assert not isinstance(decision, Reject)
        return {row.instance_id: row.in_flight or 0 for row in decision.explain()}

    def matched(self, keys: PrefixKeys) -> int:
        """Most bytes of a text that an instance has, as far as is known here."""
        caches = self.fleet.scheduler.caches
        assert caches is not None
        return max((depth for _, depth in caches.index.levels(keys)), default=0)

    def in_flight(self) -> float:
        states = self.fleet.scheduler.members.table.states.values()
        return sum(state.in_flight + state.peers.in_flight for state in states)


@contextlib.asynccontextmanager
async def exchanging(*gateways: SharingGateway) -> AsyncIterator[tuple[SharingGateway, ...]]:
    """They exchange until the block ends."""
    async with asyncio.TaskGroup() as tasks:
        for each in gateways:
            await each.sharing.start(tasks)
        try:
            yield gateways
        finally:
            for each in gateways:
                await each.sharing.stop()
