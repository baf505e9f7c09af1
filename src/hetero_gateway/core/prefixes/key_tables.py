"""The tables of ``PrefixIndex``: which instance has which keys of prompts' beginnings, their
membership, knowledge from elsewhere, and eviction.

What a request does to them is ``caches``' part: every request passes there and none here, unless
an instance is full.

A dict keeps places for what has left it, and is copied at once, twice as large, when they are used
up: a million keys that come and go take twice as much as they did at first, and one of their steps
half a second. So no dict here is large. Of masks there are many, by a key's last bits; one that has
become too roomy is copied (``_tidy``). Of an instance's keys there is a row of dicts, in the order
of use: what is used goes into the newest, which is full at a size that fills a dict's places well,
and then copied without its holes (``{**it}``: ``copy`` may keep them); what is evicted leaves the
oldest. Neighbours of which little is left are put together. Whether an instance has a key at all,
its mask says.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any, Final

from hetero_gateway.core.types import InstanceId, PrefixKeys

# Sizes are counted in units of this many bytes: most pieces then have sizes that are cached ints in
# Python. A piece counts for at least one unit.
UNIT_BYTES: Final = 32
# When an instance is full, this fraction of it goes, or so many units, and so many keys at a time.
_EVICTED_SHARE: Final = 32
_MOST_EVICTED_UNITS: Final = 8192
_EVICTED_KEYS: Final = 128
# Of one insert; what is too much then, or was forgotten, goes with the next ones.
_MOST_EVICTED_KEYS: Final = 2048
_FORGOTTEN_KEYS: Final = 512
# Keys of one dict of an instance's: at first, and at most. Doubled from one to the other they fill
# 91 % of a dict's places: an eighth to a quarter of all keys is in the newest.
_LEAST_NEW: Final = 312
_MOST_NEW: Final = 16 * _LEAST_NEW
# Bytes for each key of a dict that is copied, as a copy takes 27 to 54.
_ROOMY_BYTES: Final = 56
# Keys that go between two looks whether one is.
_LEAST_BETWEEN: Final = 32
# An int of 60 bits.
_KEY_BYTES: Final = 32
# Dicts of masks.
_PARTS: Final = 4096
LAST_BITS: Final = _PARTS - 1


class HeldKeys:
    """What one instance has: its keys with their sizes, least recently used first.

    Each key is in one of ``parts``, whose last is ``newest``.
    """

    __slots__ = (
        *("bit", "capacity", "most_new", "newest", "parts", "running"),
        *("shared_bytes", "slot", "used"),
    )

    def __init__(self, slot: int, capacity: int) -> None:
        self.slot = slot
        self.bit = 1 << slot
        self.capacity = capacity
        self.clear()
        # Of what is there now: requests by key, and bytes of text that are not the first of their
        # kind. Along a text the counts only fall.
        self.running: dict[int, int] = {}
        self.shared_bytes = 0

    def clear(self) -> None:
        """It has nothing."""
        self.newest: dict[int, int] = {}
        self.parts = [self.newest]
        self.most_new = _LEAST_NEW
        self.used = 0

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def find(self, key: Any) -> dict[int, int]:
        """The part that has a key; if none has, the newest."""
        for part in reversed(self.parts):
            if key in part:
                return part
        return self.newest

    def begin_part(self) -> None:
        """The newest is full: from now on another one is."""
        parts, most = self.parts, self.most_new
        if sys.getsizeof(self.newest) > _ROOMY_BYTES * len(self.newest):
            parts[-1] = {**self.newest}
        if 4 * most * (len(parts) - 2) > 5 * len(self):
            pairs = [len(one) + len(next_one) for one, next_one in pairwise(parts)]
            at = pairs.index(min(pairs))
            if pairs[at] <= most:
                parts[at : at + 2] = [{**parts[at], **parts[at + 1]}]
        self.newest = {}
        parts.append(self.newest)
        if most < _MOST_NEW and len(self) >= 8 * most:
            self.most_new = 2 * most


class KeyTables:
    """The keys of all instances. Instances have slots, small and reused."""

    def __init__(self) -> None:
        self._masks: list[dict[int, int]] = [{} for _ in range(_PARTS)]
        self._members: dict[InstanceId, HeldKeys] = {}
        # What instances had that were forgotten, with their bits; and those bits: what masks say
        # of them does not count until all of it has gone.
        self._forgotten: list[tuple[int, dict[int, int]]] = []
        self._hidden = 0
        # The dict of masks that was looked at last, and the keys that go until the next one is.
        self._tidied = 0
        self._until_tidied = _LEAST_BETWEEN

    def __len__(self) -> int:
        """Number of different keys."""
        return sum(map(len, self._masks))

    # Membership

    def join(self, instance_id: InstanceId, capacity_bytes: float, slot: int | None = None) -> None:
        """Add an instance with an empty cache.

        Args:
            capacity_bytes: bytes of text that its KV cache can hold; 0: it keeps nothing.
            slot: its bit; None: the lowest that is free.

        Raises:
            ValueError: the id or the slot is taken.
        """
        taken = {member.slot for member in self._members.values()}
        if slot is None:
            slot = next(i for i in range(len(taken) + 1) if i not in taken)
        if instance_id in self._members or slot in taken:
            raise ValueError(f"instance {instance_id!r} or its slot {slot} is there already")
        self._forget_more(1 << slot)
        self._members[instance_id] = HeldKeys(slot, _units(capacity_bytes))

    def leave(self, instance_id: InstanceId) -> None:
        """Remove an instance and its keys. KeyError: unknown."""
        self.forget(instance_id)
        del self._members[instance_id]

    def forget(self, instance_id: InstanceId) -> None:
        """Empty its cache: it was restarted, slept, or was reset. KeyError: unknown."""
        member = self._members[instance_id]
        self._forget_more(member.bit)
        self._forgotten += [(member.bit, part) for part in member.parts]
        self._hidden |= member.bit
        member.clear()
        self._forget_more(0)

    def _forget_more(self, bit: int) -> None:
        """A step of what was forgotten, a few keys; all of it, if an instance that had some comes
        to have anything again: that of this bit.
        """
        left = _FORGOTTEN_KEYS
        while self._forgotten and (left > 0 or self._hidden & bit):
            of, part = self._forgotten[-1]
            for key in list(islice(part, _EVICTED_KEYS)):
                del part[key]
                self._clear(key, of)
            left -= _EVICTED_KEYS
            if not part:
                self._forgotten.pop()
                if all(of != other for other, _ in self._forgotten):
                    self._hidden ^= of

    def resize(self, instance_id: InstanceId, capacity_bytes: float) -> None:
        """Its KV cache is of another size; what is too much goes with what comes next. KeyError."""
        self._members[instance_id].capacity = _units(capacity_bytes)

    def __contains__(self, instance_id: InstanceId) -> bool:
        return instance_id in self._members

    def slot(self, instance_id: InstanceId) -> int:
        """Its bit in ``PrefixIndex.levels``. KeyError: unknown."""
        return self._members[instance_id].slot

    # Eviction

    def _evict(self, member: HeldKeys) -> None:
        """Make room, as far as that takes no long step; only where there is none."""
        parts, masks, bit, capacity = member.parts, self._masks, member.bit, member.capacity
        used, gone = member.used, 0
        aim = capacity - min(capacity // _EVICTED_SHARE, _MOST_EVICTED_UNITS)
        while used > aim and gone < _MOST_EVICTED_KEYS:
            oldest = parts[0]
            # A dict whose first entries are gone is walked past all of them, each time.
            batch = list(islice(oldest, _EVICTED_KEYS))
            gone += len(batch)
            for key in batch:
                used -= oldest.pop(key)
                # ``_clear``, written out: as many keys go as come.
                part = masks[key & LAST_BITS]
                mask = part[key]
                if mask == bit:
                    del part[key]
                else:
                    part[key] = mask ^ bit
                if used <= aim:
                    break
            if not oldest and len(parts) > 1:
                del parts[0]
        member.used = used
        self._until_tidied -= gone
        while self._until_tidied < 0:
            self._tidy()

    def _tidy(self) -> None:
        """Look at the next dict of masks: four times while as many keys go as it has."""
        at = self._tidied = (self._tidied + 1) & LAST_BITS
        part = self._masks[at]
        self._until_tidied += max(_LEAST_BETWEEN, len(part) // 4)
        if sys.getsizeof(part) > _ROOMY_BYTES * (len(part) + 8):
            self._masks[at] = {**part}

    def _clear(self, key: int, bit: int) -> None:
        part = self._masks[key & LAST_BITS]
        mask = part[key] ^ bit
        if mask:
            part[key] = mask
        else:
            del part[key]

    # Another process's knowledge

    def held(self, instance_id: InstanceId) -> list[tuple[int, int]]:
        """(key, size) of what one instance has, least recently used first. KeyError: unknown."""
        parts = self._members[instance_id].parts
        return [each for part in parts for each in part.items()]

    def hold(self, instance_id: InstanceId, held: Sequence[tuple[Any, int]]) -> None:
        """Know what ``held`` said, in front of what was used here. KeyError: unknown."""
        member = self._members[instance_id]
        masks, bit, new = self._masks, member.bit, []
        self._forget_more(bit)
        for key, size in held:
            part = masks[key & LAST_BITS]
            mask = part.get(key, 0)
            if not mask & bit:
                part[key] = mask | bit if mask else bit
                member.used += max(1, size)
                new.append((key, max(1, size)))
        begins = range(0, len(new), _MOST_NEW)
        member.parts[:0] = [dict(new[begin : begin + _MOST_NEW]) for begin in begins]
        while member.used > member.capacity:
            self._evict(member)

    def learn(
        self, instance_id: InstanceId, told: Sequence[tuple[Any, int]], most_units: int
    ) -> int:
        """Other gateways have just sent (key, size) there, least recently used first.

        Of new keys, at most ``most_units`` count; returns how many do. KeyError: unknown.
        """
        member = self._members[instance_id]
        masks, bit, new = self._masks, member.bit, 0
        at = newest = member.newest
        self._forget_more(bit)
        for key, size in told:
            part = masks[key & LAST_BITS]
            mask = part.get(key, 0)
            if mask & bit:
                if key not in at:
                    at = member.find(key)
                newest[key] = at.pop(key)
            elif new + size <= most_units:
                new += max(1, size)
                part[key] = mask | bit if mask else bit
                newest[key] = max(1, size)
        member.used += new
        if len(newest) > member.most_new:
            member.begin_part()
        if member.used > member.capacity:
            self._evict(member)
        return new

    # Reports of engines

    def drop(self, instance_id: InstanceId, key: int) -> None:
        """Drop a key of an instance; one that it did not have is ignored. KeyError: unknown."""
        member = self._members[instance_id]
        self._take(member, key, member.newest)

    def _take(self, member: HeldKeys, key: Any, at: dict[int, int]) -> dict[int, int]:
        """It goes from an instance, if it is there; returns where, which is asked first: ``at``."""
        if key not in at:
            at = member.find(key)
        size = at.pop(key, 0)
        if size:
            member.used -= size
            self._clear(key, member.bit)
            self._until_tidied -= 1
            if self._until_tidied < 0:
                self._tidy()
        return at

    def confirm(self, instance_id: InstanceId, held: Sequence[tuple[int, int]]) -> None:
        """It certainly has keys of this many bytes. KeyError: unknown."""
        told = [(key, size_bytes // UNIT_BYTES or 1) for key, size_bytes in reversed(held)]
        self.learn(instance_id, told, self._members[instance_id].capacity)

    # For display

    def keys_on(self, instance_id: InstanceId) -> int:
        """Keys of one instance. KeyError: unknown."""
        return len(self._members[instance_id])

    def capacity_units(self, instance_id: InstanceId) -> int:
        """The capacity of one instance. KeyError: unknown."""
        return self._members[instance_id].capacity

    def bytes_on(self, instance_id: InstanceId) -> tuple[int, int]:
        """(bytes of text that one instance has, bytes it can hold). KeyError: unknown."""
        member = self._members[instance_id]
        return member.used * UNIT_BYTES, member.capacity * UNIT_BYTES

    def memory_bytes(self) -> int:
        """Approximate memory of everything here."""
        return (
            sum(map(sys.getsizeof, self._masks))
            + len(self) * _KEY_BYTES
            + sum(
                sum(map(sys.getsizeof, member.parts)) + sys.getsizeof(member.running)
                for member in self._members.values()
            )
        )


def sizes_of(keys: PrefixKeys) -> list[int]:
    """The size of each key of a text, in the index's units."""
    begins = (0, *keys.ends)  # of the pieces, before the last end
    pieces = zip(begins, keys.ends, strict=False)
    return [(end - begin) // UNIT_BYTES or 1 for begin, end in pieces]


def _units(capacity_bytes: float) -> int:
    return max(0, int(min(capacity_bytes, 2.0**60)) // UNIT_BYTES)
