"""Decides which failures count against instances, and how many instances may be ejected at once.

Two rules over all instances together; ``outcomes.py`` decides what one instance's outcomes mean.

*Panic*: at most half (rounded down) of the instances that serve a model are ejected: none of one,
one of two. Beyond that, a failing instance goes on getting requests. When other instances leave,
the ejections that would end first end at once.

*Poison*: a request that fails on one instance and then on another, and was never answered well, is
itself at fault. Its failures are taken back, and no more of them count. Once it is answered well
somewhere, all of them count after all. Requests are identified by a fingerprint of their body; the
last 256 that failed are remembered, each for a minute.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

from hetero_gateway.core.instances.outcomes import (
    SILENT,
    BreakerState,
    EjectionRules,
    Outcomes,
    Sent,
)
from hetero_gateway.core.types import InstanceId

_MOST_SUSPECTS = 256
_SUSPECT_S = 60.0
# Failures of one request that are kept so that they can be taken back.
_MOST_CHARGES = 32

# Instances that could take requests, for each model of an instance, itself included: one set each.
PoolsOf = Callable[[InstanceId], Iterable[Collection[InstanceId]]]


class _Suspect:
    """A failed request: where and when it failed, and whether that counts."""

    __slots__ = ("charges", "counts", "innocent", "since_s")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.charges: list[tuple[InstanceId, float, str]] = []
        self.counts = True
        self.innocent = False  # it was answered well somewhere


class Ejections:
    """The outcomes of all instances.

    Args:
        rules: for each instance.
        pools_of: finds the instances that serve the same models.

    ``suspects``: failed requests, by fingerprint. While there are any, successes are worth a
    fingerprint too.
    """

    def __init__(self, rules: EjectionRules, pools_of: PoolsOf) -> None:
        self.rules = rules
        self._pools_of = pools_of
        self._by_id: dict[InstanceId, Outcomes] = {}
        self.suspects: OrderedDict[int, _Suspect] = OrderedDict()

    def __getitem__(self, instance_id: InstanceId) -> Outcomes:
        return self._by_id[instance_id]

    def set_rules(self, rules: EjectionRules) -> None:
        """Apply other rules from now on; past outcomes and running terms stay."""
        self.rules = rules
        for outcomes in self._by_id.values():
            outcomes.rules = rules

    def join(self, instance_id: InstanceId) -> Outcomes:
        outcomes = self._by_id[instance_id] = Outcomes(self.rules)
        return outcomes

    def leave(self, instance_id: InstanceId) -> None:
        self._by_id.pop(instance_id, None)

    # Each returns the instances whose state has changed.

    def succeeded(
        self, instance_id: InstanceId, now_s: float, request: Sent | None, fingerprint: int | None
    ) -> list[InstanceId]:
        """Note a good answer. ``fingerprint``: of its body, if there are suspects."""
        changed = [instance_id] if self._by_id[instance_id].succeeded(now_s, request) else []
        suspect = None if fingerprint is None else self.suspects.get(fingerprint)
        if suspect is not None and not suspect.innocent:
            suspect.innocent = True
            if not suspect.counts:
                suspect.counts = True
                for charged_id, _, reason in suspect.charges:
                    if charged_id != instance_id:
                        changed += self._charge(charged_id, now_s, None, reason)
            suspect.charges.clear()
        return changed

    def failed(
        self,
        instance_id: InstanceId,
        now_s: float,
        request: Sent | None,
        reason: str,
        fingerprint: int,
    ) -> list[InstanceId]:
        """Note a failure. ``reason``: a short label."""
        suspect = self._suspect(fingerprint, now_s)
        if suspect.innocent:
            return self._charge(instance_id, now_s, request, reason)
        changed: list[InstanceId] = []
        elsewhere = any(charged_id != instance_id for charged_id, _, _ in suspect.charges)
        if elsewhere and suspect.counts:
            suspect.counts = False
            for charged_id, at_s, _ in suspect.charges:
                outcomes = self._by_id.get(charged_id)
                if outcomes is not None and outcomes.retract(at_s, now_s):
                    changed.append(charged_id)
        if len(suspect.charges) < _MOST_CHARGES:
            suspect.charges.append((instance_id, now_s, reason))
        if suspect.counts:
            changed += self._charge(instance_id, now_s, request, reason)
        return changed

    def _suspect(self, fingerprint: int, now_s: float) -> _Suspect:
        self.forget(now_s)
        suspects = self.suspects
        suspect = suspects.get(fingerprint)
        if suspect is None:
            suspect = suspects[fingerprint] = _Suspect(now_s)
            if len(suspects) > _MOST_SUSPECTS:
                suspects.popitem(last=False)
        return suspect

    @property
    def next_forget_s(self) -> float:
        """When the first suspect may be forgotten; there must be one."""
        return next(iter(self.suspects.values())).since_s + _SUSPECT_S

    def forget(self, now_s: float) -> None:
        """Forget requests that failed long ago."""
        while self.suspects and self.next_forget_s <= now_s:
            self.suspects.popitem(last=False)

    def _charge(
        self, instance_id: InstanceId, now_s: float, request: Sent | None, reason: str
    ) -> list[InstanceId]:
        outcomes = self._by_id.get(instance_id)
        if outcomes is None or not outcomes.failed(now_s, request):
            return []
        if outcomes.breaker is not BreakerState.HALF_OPEN and not self.may_eject(instance_id):
            return []
        outcomes.eject(now_s, reason)
        return [instance_id]

    def fell_silent(self, instance_id: InstanceId, now_s: float) -> list[InstanceId]:
        """Note that the instance has fallen silent."""
        outcomes = self._by_id[instance_id]
        outcomes.advance(now_s)
        if not self.rules.enabled or outcomes.shut:
            return []
        half_open = outcomes.breaker is BreakerState.HALF_OPEN
        if not (outcomes.trials if half_open else self.may_eject(instance_id)):
            return []
        outcomes.eject(now_s, SILENT)
        return [instance_id]

    # Panic

    def may_eject(self, instance_id: InstanceId) -> bool:
        """Whether half of each of its pools would be left."""
        by_id = self._by_id
        for pool in self._pools_of(instance_id):
            ejected = sum(by_id[i].ejected for i in pool if i != instance_id and i in by_id)
            if ejected + 1 > len(pool) // 2:
                return False
        return True

    def review(self, now_s: float) -> list[InstanceId]:
        """The set of instances has changed: end the ejections that are too many."""
        ended: list[InstanceId] = []
        # Those whose term ends first go first, half-open ones before them.
        ejected = sorted(
            (i for i, o in self._by_id.items() if o.ejected),
            key=lambda i: (self._by_id[i].breaker is BreakerState.OPEN, self._by_id[i].until_s),
        )
        for instance_id in ejected:
            for pool in self._pools_of(instance_id):
                count = sum(self._by_id[i].ejected for i in pool if i in self._by_id)
                if instance_id in pool and count > len(pool) // 2:
                    self._by_id[instance_id].reprieve(now_s)
                    ended.append(instance_id)
                    break
        return ended
