"""What was used within the last minute: never more than the limit in any 60 s. Pure.

A token bucket would let twice the limit through within a minute (the bucket, and what flows in),
and so would windows that begin anew with each minute. Here each second has a slot, and what is in
it counts until it is at least 60 s old: 61 slots, since a second's last moment is 60 s old only as
the 61st second begins. All counts are whole numbers, so that what is given back leaves no residue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

WINDOW_S: Final = 60
SLOTS: Final = WINDOW_S + 1
# Where there is no limit: more than anybody uses.
UNLIMITED: Final = 1 << 62


class Window:
    """One limit, and what was used of it.

    ``limit``: per minute; None: nobody asks. ``free``: what it leaves to this gateway now; below 0
    where more was used. Whoever uses some takes it off (``advance`` first). ``second``: as of which
    that is, a whole one, of a clock that never goes back.
    """

    __slots__ = ("_noted", "_others", "_room", "_slots", "free", "limit", "second")

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._others = 0
        self._room = self.free = UNLIMITED if limit is None else limit
        # What was used in each second, and how much that is. Of this second it is only noted as
        # somebody asks, so that a request changes one number and no list.
        self._slots = [0] * SLOTS
        self._noted = 0
        self.second = 0

    def set_limit(self, limit: int | None) -> None:
        """Another limit from now on; what was used stays so."""
        used = self.used
        self.limit = limit
        self._room = (UNLIMITED if limit is None else limit) - self._others
        self.free = self._room - used

    @property
    def used(self) -> int:
        """Within the last minute, here."""
        return self._room - self.free

    @property
    def slots(self) -> list[int]:
        """Of each second modulo 61: together they are ``used``, and none of them is below 0."""
        used = self._room - self.free
        self._slots[self.second % SLOTS] += used - self._noted
        self._noted = used
        return self._slots

    @property
    def others(self) -> int:
        """What other gateways have used within the last minute."""
        return self._others

    @others.setter
    def others(self, used: int) -> None:
        here = self.used
        self._room += self._others - used
        self._others = used
        self.free = self._room - here

    def __repr__(self) -> str:
        return f"<Window {self.used} + {self.others} of {self.limit}>"

    def advance(self, second: int) -> None:
        """It is that second now: what is older than a minute counts no more."""
        passed = second - self.second
        if passed <= 0:
            return
        if self.used:
            slots = self.slots
            for each in range(self.second + 1, self.second + 1 + min(passed, SLOTS)):
                old, slots[each % SLOTS] = slots[each % SLOTS], 0
                self.free += old
                self._noted -= old
        self.second = second

    def take_over(self, slots: Sequence[int], second: int) -> None:
        """Count what another process's ``slots`` have, as of that second, of which it is gone."""
        self.advance(second)
        own = self.slots
        for each in range(self.second - SLOTS + 1, second + 1):
            used = slots[each % SLOTS]
            own[each % SLOTS] += used
            self._noted += used
            self.free -= used

    def remaining(self) -> int:
        """What may still be used now, at least 0."""
        return max(0, self.free)

    def use(self, amount: int) -> None:
        """Use so much, now (``advance`` first), whatever the limit is."""
        self.free -= amount

    def correct(self, charged_in: int, difference: int, second: int) -> None:
        """What was charged in that second turns out now to be so much more, or less.

        More is used now; less is given back where it was charged, if that still counts.
        """
        self.advance(second)
        if difference < 0:
            if self.second - charged_in >= SLOTS:
                return
            self.slots[charged_in % SLOTS] += difference
            self._noted += difference
        self.free -= difference

    def wait_s(self, amount: int, now_s: float) -> float:
        """How long until so much is free, if nothing more is used; at most 61 s."""
        excess = amount - self.free
        if excess <= 0:
            return 0.0
        slots = self.slots
        oldest = self.second - SLOTS + 1
        for each in range(oldest, self.second + 1):
            excess -= slots[each % SLOTS]
            if excess <= 0:
                return each + SLOTS - now_s
        return float(SLOTS)  # the others': they are gone by then
