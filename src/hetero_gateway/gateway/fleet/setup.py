"""Watches for set-ups that are allowed and hardly meant, once instances have said what they serve.

What is odd is ``files/setup_warnings``' to say. Each warning is logged once while it holds.
"""

from __future__ import annotations

import asyncio
import logging

from hetero_gateway.files.setup_warnings import Seen, SetupWarning, setup_warnings
from hetero_gateway.gateway.fleet.instances import Fleet, Instance

_log = logging.getLogger(__name__)

# A change is seldom, and its warning not urgent.
_LOOK_EVERY_S = 10.0


class SetupWatch:
    """Logs what is odd about a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._looked_at = self._made_at = -1
        self._made: list[SetupWarning] = []
        self._logged: frozenset[str] = frozenset()

    def warnings(self) -> list[SetupWarning]:
        """What is odd now; made anew where anything has changed."""
        if self._made_at != self._fleet.setups:
            self._made_at = self._fleet.setups
            self._made = setup_warnings([_seen(each) for each in self._fleet.instances.values()])
        return self._made

    def look(self) -> None:
        """Log what was not odd at the last look."""
        if self._looked_at == self._fleet.setups:
            return
        self._looked_at = self._fleet.setups
        texts = [str(each) for each in self.warnings()]
        for text in texts:
            if text not in self._logged:
                _log.warning("%s", text)
        self._logged = frozenset(texts)

    async def run(self) -> None:
        """Look again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.look()


def _seen(instance: Instance) -> Seen:
    return Seen(
        instance.id,
        instance.config.base_url,
        instance.models,
        instance.listed,
        None if instance.profile is None else instance.profile.model,
        frozenset(card.root for card in instance.cards.values() if card.root and not card.parent),
    )
