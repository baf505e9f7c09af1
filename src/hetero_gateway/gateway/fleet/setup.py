"""Warns of set-ups that are allowed but hardly intended, once instances report what they serve, and
of instances that are far from as fast as their profiles.

``files/setup_warnings`` decides what is odd. Each warning is logged once when it begins to apply,
and once when it is resolved.
"""

from __future__ import annotations

import asyncio
import logging

from hetero_gateway.core.types import InstanceId
from hetero_gateway.files.setup_warnings import Seen, SetupWarning, setup_warnings
from hetero_gateway.gateway.fleet.instances import Fleet, Instance
from hetero_gateway.gateway.fleet.places import servers

_log = logging.getLogger(__name__)

# Changes are rare, and their warnings not urgent.
_LOOK_EVERY_S = 5.0
# Observed over modelled time of a step, below which an instance is odd, and above which it no
# longer is; one look may fall on a moment of it. ``core/instances/slowness.py`` detects slow ones.
_FAST, _FAST_AGAIN, _LOOKS = 0.5, 0.6, 2


class SetupWatch:
    """Logs what is odd about a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._looked_at = self._made_at = -1
        self._made: list[SetupWarning] = []
        self._logged: dict[str, SetupWarning] = {}
        self._looks: dict[InstanceId, int] = {}  # in succession at which it was odd

    def warnings(self) -> list[SetupWarning]:
        """What is odd now; recomputed if anything has changed."""
        if self._made_at != self._fleet.setups:
            self._made_at = self._fleet.setups
            self._made = setup_warnings([_seen(each) for each in servers(self._fleet)])
        return self._made

    def look(self) -> None:
        """Log what is newly odd."""
        if self._looked_at == self._fleet.setups:
            return
        self._looked_at = self._fleet.setups
        now = {str(each): each for each in self.warnings()}
        for text in now:
            if text not in self._logged:
                _log.warning("%s", text)
        for text, each in self._logged.items():
            if text not in now and each.instance_id in self._fleet.instances:
                _log.info("resolved: %s", text)
        self._logged = now
        odd = {each.instance_id for each in now.values() if each.key in ("model", "profile")}
        for instance in self._fleet.instances.values():
            if instance.id in odd:
                instance.problems.add("other_model")
            else:
                instance.problems.discard("other_model")

    def look_at_speeds(self) -> None:
        """Log instances whose speed has left its profile's range, or has returned."""
        looks, self._looks = self._looks, {}
        members = self._fleet.scheduler.members
        for instance in self._fleet.instances.values():
            slowness = members.slowness.get(instance.id)
            if slowness is None:
                continue  # it has no profile
            slow, speed = slowness.since_s is not None, members.table[instance.id].speed
            if "speed" in instance.problems:
                if not slow and speed >= _FAST_AGAIN:
                    instance.problems.discard("speed")
                    _log.info("instance %s is as fast as its profile says again", instance.id)
            elif slow or speed < _FAST:
                self._looks[instance.id] = seen = looks.get(instance.id, 0) + 1
                if seen >= _LOOKS:
                    instance.problems.add("speed")
                    _log.warning(
                        "instance %s: its steps take %.2g times as long as its profile says: "
                        "other work runs there, or the profile is of another machine", instance.id,
                        slowness.factor if slow else speed,
                    )  # fmt: skip

    async def run(self) -> None:
        """Look repeatedly, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.look()
            self.look_at_speeds()


def _seen(instance: Instance) -> Seen:
    return Seen(
        instance.id,
        instance.config.base_url,
        instance.models,
        instance.listed,
        None if instance.profile is None else instance.profile.model,
        frozenset(card.root for card in instance.cards.values() if card.root and not card.parent),
    )
