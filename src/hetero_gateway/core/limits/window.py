"""What was used within the last minute: never more than the limit in any 60 s. Pure.

A token bucket would let twice the limit through within a minute (the bucket, and what flows in),
and so would windows that begin anew with each minute. Here each second has a slot, and what is in
it counts until it is at least 60 s old: 61 slots, since a second's last moment is 60 s old only as
the 61st second begins. All counts are whole numbers, so that what is given back leaves no residue.
"""

from __future__ import annotations

WINDOW_S = 60
SLOTS = WINDOW_S + 1
# Where there is no limit: more than anybody uses.
_UNLIMITED = 1 << 62


class Window:
    """One limit, and what was used of it.

    ``limit``: per minute; None: nobody asks. ``used``: within the last minute, here; ``others``:
    the same of other gateways. ``room``: what the limit leaves of that to this one. ``second``: as
    of which that is, a whole one, of a clock that never goes back. ``slots``: of each second modulo
    61; together they are ``used``, and none of them is ever below 0.
    """

    __slots__ = ("_others", "limit", "room", "second", "slots", "used")

    def __init__(self, limit: int | None) -> None:
        self._others = 0
        self.set_limit(limit)
        self.used = 0
        self.slots = [0] * SLOTS
        self.second = 0

    def set_limit(self, limit: int | None) -> None:
        """Another limit from now on; what was used stays so."""
        self.limit = limit
        self.room = (_UNLIMITED if limit is None else limit) - self._others

    @property
    def others(self) -> int:
        return self._others

    @others.setter
    def others(self, used: int) -> None:
        self._others = used
        self.set_limit(self.limit)

    def __repr__(self) -> str:
        return f"<Window {self.used} + {self.others} of {self.limit}>"

    def advance(self, second: int) -> None:
        """It is that second now: what is older than a minute counts no more."""
        passed = second - self.second
        if passed <= 0:
            return
        first, self.second = self.second + 1, second
        if not self.used:
            return
        if passed >= SLOTS:
            self.slots = [0] * SLOTS
            self.used = 0
            return
        slots = self.slots
        for each in range(first, second + 1):
            self.used -= slots[each % SLOTS]
            slots[each % SLOTS] = 0

    def remaining(self) -> int:
        """What may still be used now, at least 0."""
        return max(0, self.room - self.used)

    def use(self, amount: int) -> None:
        """Use so much, now (``advance`` first), whatever the limit is."""
        self.slots[self.second % SLOTS] += amount
        self.used += amount

    def correct(self, charged_in: int, difference: int, second: int) -> None:
        """What was charged in that second turns out now to be so much more, or less.

        More is used now; less is given back where it was charged, if that still counts.
        """
        if self.second != second:
            self.advance(second)
        if difference > 0:
            charged_in = self.second
        elif self.second - charged_in >= SLOTS:
            return
        self.slots[charged_in % SLOTS] += difference
        self.used += difference

    def wait_s(self, amount: int, now_s: float) -> float:
        """How long until so much is free, if nothing more is used; at most 61 s."""
        excess = self.used + amount - self.room
        if excess <= 0:
            return 0.0
        oldest = self.second - SLOTS + 1
        for each in range(oldest, self.second + 1):
            excess -= self.slots[each % SLOTS]
            if excess <= 0:
                return each + SLOTS - now_s
        return float(SLOTS)  # the others': they are gone by then
