"""Usage within the last minute: never more than the limit in any 60 s. Pure.

A token bucket would let twice the limit through within a minute (the bucket, and what flows in),
and so would windows that restart with each minute. Here each second has a slot, and its contents
count until they are at least 60 s old: 61 slots, since a second's last moment is 60 s old only as
the 61st second begins. All counts are whole numbers, so that what is returned leaves no residue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

WINDOW_S: Final = 60
SLOTS: Final = WINDOW_S + 1
# Stands for no limit: more than anyone uses.
UNLIMITED: Final = 1 << 62


class Window:
    """One limit, and the usage of it.

    ``limit``: per minute; None: unlimited. ``free``: what is left to this gateway now; below 0 if
    more was used. Callers take their usage off it (after ``advance``). ``second``: the whole second
    to which that refers, of a clock that never goes back.
    """

    __slots__ = ("_noted", "_others", "_room", "_slots", "free", "limit", "second")

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._others = 0
        self._room = self.free = UNLIMITED if limit is None else limit
        # Usage in each second, and its sum. The current second is noted only when asked for, so
        # that a request changes one number and no list.
        self._slots = [0] * SLOTS
        self._noted = 0
        self.second = 0

    def set_limit(self, limit: int | None) -> None:
        """Apply another limit from now on; past usage stays."""
        used = self.used
        self.limit = limit
        self._room = (UNLIMITED if limit is None else limit) - self._others
        self.free = self._room - used

    @property
    def used(self) -> int:
        """Usage within the last minute, here."""
        return self._room - self.free

    @property
    def slots(self) -> list[int]:
        """Usage of each second modulo 61: their sum is ``used``, and none is below 0."""
        used = self._room - self.free
        self._slots[self.second % SLOTS] += used - self._noted
        self._noted = used
        return self._slots

    @property
    def others(self) -> int:
        """Usage of other gateways within the last minute."""
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
        """Advance to this second: usage older than a minute no longer counts."""
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
        """Add the ``slots`` of another process that ended in that second."""
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
        """Use this much now (``advance`` first), whatever the limit."""
        self.free -= amount

    def correct(self, charged_in: int, difference: int, second: int) -> None:
        """Correct the charge of that second by this much, up or down.

        More is used now; less is returned where it was charged, if that still counts.
        """
        self.advance(second)
        if difference < 0:
            if self.second - charged_in >= SLOTS:
                return
            self.slots[charged_in % SLOTS] += difference
            self._noted += difference
        self.free -= difference

    def wait_s(self, amount: int, now_s: float) -> float:
        """How long until this much is free, if nothing more is used; at most 61 s."""
        excess = amount - self.free
        if excess <= 0:
            return 0.0
        slots = self.slots
        oldest = self.second - SLOTS + 1
        for each in range(oldest, self.second + 1):
            excess -= slots[each % SLOTS]
            if excess <= 0:
                return each + SLOTS - now_s
        return float(SLOTS)  # the others' usage has expired by then
