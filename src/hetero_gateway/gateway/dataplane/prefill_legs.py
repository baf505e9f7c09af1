"""Tracks prefill legs: the instance that computes a prompt, until another one has fetched it.

The leg of the answer is a dispatch like any other (``placement``).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.types import COMPLETED, InstanceId, Outcome
from hetero_gateway.gateway.dataplane.intake import Placed, PrefillLeg
from hetero_gateway.gateway.fleet.instances import Fleet

# A prompt's cache counts as fetched after this many times its transfer's time, plus this.
_LATE, _LEAST_S = 1.5, 0.05


class PrefillLegs:
    """The prefill legs of one scheduler.

    Args:
        fleet: whose scheduler.
        settle: takes a dispatch off its instance.
        pump_soon: there may be room.
    """

    def __init__(
        self,
        fleet: Fleet,
        settle: Callable[[Dispatch, Outcome], None],
        pump_soon: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._scheduler = fleet.scheduler
        self._settle = settle
        self._pump_soon = pump_soon

    def of(self, dispatch: Dispatch) -> PrefillLeg:
        """A leg that was just placed."""
        instance = self._fleet.instances[dispatch.instance_id]
        transfer = instance.config.kv_transfer
        assert transfer is not None
        return PrefillLeg(instance, dispatch, transfer)

    def prefilled(self, leg: PrefillLeg) -> None:
        """Its prompt is computed, and waits to be fetched."""
        self._scheduler.legs.prefilled(leg.dispatch, time.monotonic())
        self._pump_soon()

    def asked(self, leg: PrefillLeg, place: Placed) -> None:
        """The decode instance has been asked."""
        leg.sent_s = time.monotonic()
        self._scheduler.legs.asked(leg.dispatch, place.dispatch, leg.sent_s)

    def fetched(self, place: Placed) -> None:
        """The decode instance has fetched a prompt; if that was seen, its duration is learnt."""
        leg, pairs = place.leg, self._scheduler.legs.pairs
        if leg is None or leg.dispatch.outcome is not None:
            return
        decision, choice = place.decision, place.decision.choice
        if place.dispatch.request.streams and leg.sent_s is not None and pairs is not None:
            request, prefix = decision.request, decision.prefix
            tokens = float(request.prompt_tokens)
            if prefix is not None:
                tokens -= prefix.cached_tokens[choice.position]
            step_s = (choice.ttft_s or 0.0) - choice.prefill_s - choice.transfer_s
            took_s = max(0.0, time.monotonic() - leg.sent_s - max(0.0, step_s))
            size_bytes = request.sequences * tokens * pairs.kv_bytes_per_token
            with contextlib.suppress(KeyError):  # no longer a pair
                pairs.observe(leg.instance.id, place.instance.id, size_bytes, took_s)
        self.over(leg, COMPLETED)

    def fetched_unseen(self, place: Placed, prefill_s: float = 0.0) -> None:
        """Assume the fetch, if it cannot be seen, after the transfer's time and a margin.

        ``prefill_s``: until its prompt is computed.
        """
        after_s = prefill_s + self.late_s(place)
        asyncio.get_running_loop().call_later(after_s, self.fetched, place)

    def late_s(self, place: Placed) -> float:
        """After how long a transfer counts as finished."""
        return _LATE * place.decision.choice.transfer_s + _LEAST_S

    def over(self, leg: PrefillLeg | None, outcome: Outcome) -> None:
        """Take a leg off, unless that has been done."""
        if leg is not None and leg.dispatch.outcome is None:
            self._settle(leg.dispatch, outcome)

    def refuse(self, leg: PrefillLeg, decode: InstanceId) -> None:
        """A pair could not hand over: it is not used for some minutes."""
        pairs = self._scheduler.legs.pairs
        if pairs is not None:
            with contextlib.suppress(KeyError):
                pairs.refuse(leg.instance.id, decode, time.monotonic())
