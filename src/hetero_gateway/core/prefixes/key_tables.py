"""The tables of ``PrefixIndex``: which instance has which keys of prompts' beginnings, their
membership, knowledge from elsewhere, and eviction.

``caches`` changes them for each request: every request passes through there, and none through here
unless an instance is full.

A dict keeps the slots of deleted keys, and when they run out it is copied at once, to twice the
size: a million keys that come and go would take twice their first memory, and one of the steps half
a second. So no dict here is large. Masks are in many dicts, by a key's last bits; one that has
become too roomy is copied (``_tidy``). An instance's keys are in a row of dicts, in the order of
use: a used key goes into the newest, which is full at a size that fills a dict's slots well, and is
then copied without its holes (``{**it}``: ``copy`` may keep them); evicted keys leave the oldest.
Neighbours with little left are merged. A key's mask says whether an instance has it at all.
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
# When an instance is full, this fraction of it is evicted, or this many units, this many keys at a
# time.
_EVICTED_SHARE: Final = 32
_MOST_EVICTED_UNITS: Final = 8192
_EVICTED_KEYS: Final = 128
# Per insert; the rest of what is too much, or was forgotten, goes with the next ones.
_MOST_EVICTED_KEYS: Final = 2048
_FORGOTTEN_KEYS: Final = 512
# Keys in one of an instance's dicts: initially, and at most. Doubled from one to the other, they
# fill 91 % of a dict's slots: the newest has an eighth to a quarter of all keys.
_LEAST_NEW: Final = 312
_MOST_NEW: Final = 16 * _LEAST_NEW
# A dict with more bytes per key is copied; a copy takes 27 to 54.
_ROOMY_BYTES: Final = 56
# Keys that are deleted between two such checks.
_LEAST_BETWEEN: Final = 32
# An int of 60 bits.
_KEY_BYTES: Final = 32
# Number of dicts of masks.
_PARTS: Final = 4096
LAST_BITS: Final = _PARTS - 1


class HeldKeys:
    """The keys of one instance with their sizes, least recently used first.

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
        # Of present requests: requests by key, and bytes of text that others have as well. Along a
        # text the counts only fall.
        self.running: dict[int, int] = {}
        self.shared_bytes = 0

    def clear(self) -> None:
        """Forget all its keys."""
        self.newest: dict[int, int] = {}
        self.parts = [self.newest]
        self.most_new = _LEAST_NEW
        self.used = 0

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def find(self, key: Any) -> dict[int, int]:
        """The part that has a key; if none has it, the newest."""
        for part in reversed(self.parts):
            if key in part:
                return part
        return self.newest

    def begin_part(self) -> None:
        """Begin a new dict, as the newest is full."""
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
        # Keys of forgotten instances, with their bits; and those bits: masks do not count for them
        # until all of these keys are deleted.
        self._forgotten: list[tuple[int, dict[int, int]]] = []
        self._hidden = 0
        # The dict of masks that was checked last, and the deletions until the next check.
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
        """Delete a few forgotten keys; all of them if the instance with this bit had some, and is
        about to have keys again.
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
        """Change the size of its KV cache; excess keys go with the next inserts. KeyError."""
        self._members[instance_id].capacity = _units(capacity_bytes)

    def __contains__(self, instance_id: InstanceId) -> bool:
        return instance_id in self._members

    def slot(self, instance_id: InstanceId) -> int:
        """Its bit in ``PrefixIndex.levels``. KeyError: unknown."""
        return self._members[instance_id].slot

    # Eviction

    def _evict(self, member: HeldKeys) -> None:
        """Make room, as far as that takes no long step; call it only if it is full."""
        parts, masks, bit, capacity = member.parts, self._masks, member.bit, member.capacity
        used, gone = member.used, 0
        aim = capacity - min(capacity // _EVICTED_SHARE, _MOST_EVICTED_UNITS)
        while used > aim and gone < _MOST_EVICTED_KEYS:
            oldest = parts[0]
            # In batches: iteration walks past all deleted first entries each time.
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
        """(key, size) of an instance's keys, least recently used first. KeyError: unknown."""
        parts = self._members[instance_id].parts
        return [each for part in parts for each in part.items()]

    def hold(self, instance_id: InstanceId, held: Sequence[tuple[Any, int]]) -> None:
        """Add what ``held`` returned, before what was used here. KeyError: unknown."""
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
        """Delete a key of an instance, if present; returns its dict, ``at`` if that has it."""
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
