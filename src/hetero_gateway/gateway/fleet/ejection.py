"""Passive health: the outcomes of requests decide which instances get more of them.

The core has the rules (``core/instances/outcomes.py``, ``ejections.py``). This module has the
clock, one timer for all instances, the log and the counts. Normally a request costs one count; a
timer runs only while an instance's breaker is not closed, or one has just failed.

Failing fast must not pay: a failed request stays charged to its instance for its predicted
duration, beside what is outstanding there (like the load of a peer). Otherwise an instance that
answers 500 at once would always be the emptiest.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from typing import NamedTuple

from hetero_gateway.core.instances.dispatch import Dispatch, PeerLoad
from hetero_gateway.core.instances.outcomes import SILENT, BreakerState, Standing
from hetero_gateway.core.types import InstanceId
from hetero_gateway.gateway.fleet.instances import Fleet, Instance
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.http.failures import Blame, InstanceError

_log = logging.getLogger(__name__)

# The load of failed requests has this name among an instance's peers.
_FAILED = "failed requests"
_MOST_CHARGED = 64
_MOST_CHARGED_S = 10.0
# Limit of failures charged: an engine with few slots must not look full.
_MOST_SEQUENCES = 8
# Bodies are distinguished by their length, and this many bytes of either end.
_FINGERPRINT_BYTES = 2048


class _Charged(NamedTuple):
    until_s: float
    load: PeerLoad


def fingerprint(body: bytes) -> int:
    """Distinguishes requests within this process."""
    return hash((len(body), body[:_FINGERPRINT_BYTES], body[-_FINGERPRINT_BYTES:]))


class OutcomeWatch:
    """Records outcomes. Needs a running event loop.

    Args:
        fleet: its instances; it reports its changes from now on.
        metrics: counts ejections.
    """

    def __init__(self, fleet: Fleet, metrics: Metrics) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._ejections = fleet.ejections
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._charged: dict[InstanceId, deque[_Charged]] = {}
        # The last reported state of each instance whose breaker is not closed.
        self._breakers: dict[InstanceId, BreakerState] = {}
        self._closed = False
        fleet.on_membership = self._review
        fleet.on_good_health = self._vouched

    @property
    def idle(self) -> bool:
        """Whether no timer runs."""
        return self._timer is None

    def close(self) -> None:
        self._closed = True
        self._fleet.on_membership = self._fleet.on_good_health = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Outcomes

    def succeeded(self, instance: Instance, dispatch: Dispatch, body: bytes, now_s: float) -> None:
        """Note a good answer, or the start of a stream. ``now_s``: monotonic."""
        ejections = self._ejections
        if not ejections.suspects and dispatch not in instance.outcomes.trials:
            instance.outcomes.succeeded(now_s)  # the usual case
            return
        mark = fingerprint(body) if ejections.suspects else None
        changed = ejections.succeeded(instance.id, now_s, dispatch, mark)
        if changed:
            self._apply(changed, now_s)

    def failed(
        self,
        instance: Instance,
        dispatch: Dispatch,
        error: InstanceError,
        body: bytes,
        sent_s: float,
        expected_s: float,
    ) -> None:
        """Note that a request failed there, and is settled.

        Args:
            sent_s: when it was sent, monotonic.
            expected_s: its expected duration.
        """
        blame = error.failure.blame
        if not self._ejections.rules.enabled or blame is Blame.NONE:
            return
        now_s = time.monotonic()
        outcomes = instance.outcomes
        changed: list[InstanceId] = []
        if blame is Blame.BUSY:
            others = dispatch.state.in_flight
            if outcomes.busy(now_s, others, dispatch, error.retry_after_s):
                changed = [instance.id]
        elif blame is Blame.FAULT or not outcomes.heard_since(sent_s):
            changed = self._ejections.failed(
                instance.id, now_s, dispatch, error.reason, fingerprint(body)
            )
            if not outcomes.ejected:
                self._charge(instance, dispatch, now_s, sent_s + expected_s)
        if changed:
            self._apply(changed, now_s)
        self._arm(now_s)

    def _vouched(self, instance: Instance, asked_s: float) -> None:
        now_s = time.monotonic()
        if instance.outcomes.vouched(asked_s, now_s):
            self._apply([instance.id], now_s)

    def resume(self, instance: Instance, standing: Standing, now_s: float) -> None:
        """Restore its state from the previous process (``Outcomes.standing``)."""
        if instance.outcomes.resume(standing, now_s):
            self._apply([instance.id], now_s)

    def fell_silent(self, instance: Instance, now_s: float) -> None:
        """Note that it has fallen silent; no change if it is ejected already."""
        self._apply(self._ejections.fell_silent(instance.id, now_s), now_s)

    def heard(self, instance: Instance, now_s: float) -> None:
        """Note bytes of its streams."""
        if instance.outcomes.heard(now_s):
            self._apply([instance.id], now_s)

    # Failed requests stay charged

    def _charge(self, instance: Instance, dispatch: Dispatch, now_s: float, until_s: float) -> None:
        model = dispatch.request.model
        alone = not any(
            other is not instance and other.up and not other.draining and model in other.models
            for other in self._fleet.instances.values()
        )
        until_s = min(until_s, now_s + _MOST_CHARGED_S)
        charged = self._charged.setdefault(instance.id, deque())
        if alone or until_s <= now_s or len(charged) >= _MOST_CHARGED:
            return
        load = PeerLoad(
            load_s=dispatch.workload,
            kv_tokens=dispatch.kv_tokens,
            in_flight=1,
            streaming=dispatch.request.sequences,
            context=dispatch.prompt_tokens,
        )
        charged.append(_Charged(until_s, load))
        self._show_charged(instance.id, now_s)

    def _show_charged(self, instance_id: InstanceId, now_s: float) -> None:
        """Show the scheduler what is still charged."""
        charged = self._charged[instance_id]
        left = deque(entry for entry in charged if entry.until_s > now_s)
        if instance_id not in self._fleet.instances:
            del self._charged[instance_id]
            return
        if not left:
            del self._charged[instance_id]
            self._fleet.scheduler.members.table[instance_id].set_peer(_FAILED, None, now_s)
            return
        self._charged[instance_id] = left
        total = PeerLoad(*map(sum, zip(*(entry.load for entry in left), strict=True)))
        sequences = min(total.streaming, float(_MOST_SEQUENCES))
        shown = total._replace(
            streaming=sequences, context=total.context * sequences / total.streaming
        )
        self._fleet.scheduler.members.table[instance_id].set_peer(_FAILED, shown, now_s)

    # States of instances

    def _review(self) -> None:
        """The instances have changed: too many of those left may be ejected."""
        if self._breakers:
            now_s = time.monotonic()
            self._apply(self._ejections.review(now_s), now_s)

    def _apply(self, changed: list[InstanceId], now_s: float) -> None:
        for instance_id in changed:
            instance = self._fleet.instances.get(instance_id)
            if instance is not None:
                self._show(instance, now_s)
        if changed:
            self._arm(now_s)
            if self._fleet.on_change is not None:
                self._fleet.on_change()

    def _show(self, instance: Instance, now_s: float) -> None:
        """Inform scheduler, log and counts of an instance's state."""
        outcomes = instance.outcomes
        breaker = outcomes.breaker
        self._fleet.scheduler.restraints.heed(instance.id, outcomes)
        if instance.silent and not outcomes.shut:
            self._fleet.set_silent(instance, silent=False)
        before = self._breakers.get(instance.id, BreakerState.CLOSED)
        if breaker is BreakerState.CLOSED:
            self._breakers.pop(instance.id, None)
        else:
            self._breakers[instance.id] = breaker
        if breaker is BreakerState.OPEN:
            self._metrics.ejections[instance.id, outcomes.reason] += 1
            _log.warning(
                "instance %s is ejected for %.3g s: %s (%s)",
                instance.id,
                outcomes.until_s - now_s,
                "nothing is heard from it" if outcomes.reason == SILENT else "its requests fail",
                outcomes.reason,
            )
        elif breaker is not before:
            _log.info("instance %s: %s", instance.id, _TOLD[breaker])

    # Time

    def _arm(self, now_s: float) -> None:
        due_s = self._due_s()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_s < math.inf and not self._closed:
            # libuv's timers count whole milliseconds.
            self._timer = self._loop.call_later(max(0.0, due_s - now_s) + 0.001, self._tick)

    def _due_s(self) -> float:
        instances = self._fleet.instances
        times = [instances[i].outcomes.until_s for i in self._breakers if i in instances]
        times += [entry.until_s for charged in self._charged.values() for entry in charged]
        if self._ejections.suspects:
            times.append(self._ejections.next_forget_s)
        return min(times, default=math.inf)

    def _tick(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        self._ejections.forget(now_s)
        for instance_id in list(self._charged):
            self._show_charged(instance_id, now_s)
        changed = []
        for instance_id, before in list(self._breakers.items()):
            instance = self._fleet.instances.get(instance_id)
            if instance is None:
                del self._breakers[instance_id]
                continue
            # It may have moved on already: asking for a place has advanced it.
            instance.outcomes.advance(now_s)
            if instance.outcomes.breaker is not before:
                changed.append(instance_id)
        self._apply(changed, now_s)
        self._arm(now_s)
        if self._fleet.on_change is not None:
            self._fleet.on_change()


_TOLD = {
    BreakerState.CLOSED: "takes requests normally again",
    BreakerState.SLOW_START: "gets requests again, slowly at first",
    BreakerState.BUSY: "its engine is busy; other instances come first",
    BreakerState.HALF_OPEN: "its ejection has ended; requests will try it",
}
