"""Which instance has which keys of prompts' beginnings: the tables of ``PrefixIndex``, who is in
them, what is told of them from elsewhere, and what goes when an instance is full.

What a request does to them is ``caches``' part: every request passes there and none here, unless
an instance is full.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from typing import Final

from hetero_gateway.core.types import InstanceId, PrefixKeys

# Sizes are counted in units of this many bytes: those of most pieces are ints that Python has
# anyway. A piece counts for one unit at least.
UNIT_BYTES: Final = 32
# When an instance is full, this fraction of it goes.
_EVICTED_SHARE: Final = 32
# An int of 60 bits.
_KEY_BYTES: Final = 32
# Dicts of masks.
_PARTS: Final = 1024
LAST_BITS: Final = _PARTS - 1


class HeldKeys:
    """What one instance has: its keys with their sizes, least recently used first."""

    __slots__ = ("bit", "capacity", "running", "shared_bytes", "sizes", "slot", "used")

    def __init__(self, slot: int, capacity: int) -> None:
        self.slot = slot
        self.bit = 1 << slot
        self.capacity = capacity
        self.sizes: dict[int, int] = {}
        self.used = 0
        # Of what is there now: requests by key, and bytes of text that are not the first of their
        # kind. Along a text the counts only fall.
        self.running: dict[int, int] = {}
        self.shared_bytes = 0


class KeyTables:
    """The keys of all instances. Instances have slots, small and used again."""

    def __init__(self) -> None:
        self._masks: list[dict[int, int]] = [{} for _ in range(_PARTS)]
        self._members: dict[InstanceId, HeldKeys] = {}

    def __len__(self) -> int:
        """Different keys."""
        return sum(map(len, self._masks))

    # Membership

    def join(self, instance_id: InstanceId, capacity_bytes: float, slot: int | None = None) -> None:
        """An instance with an empty cache.

        Args:
            capacity_bytes: bytes of text that its KV cache has room for; 0: it keeps nothing.
            slot: its bit; None: the lowest that is free.

        Raises:
            ValueError: the id or the slot is taken.
        """
        taken = {member.slot for member in self._members.values()}
        if slot is None:
            slot = next(i for i in range(len(taken) + 1) if i not in taken)
        if instance_id in self._members or slot in taken:
            raise ValueError(f"instance {instance_id!r} or its slot {slot} is there already")
        self._members[instance_id] = HeldKeys(slot, _units(capacity_bytes))

    def leave(self, instance_id: InstanceId) -> None:
        """It is gone, and what it had. KeyError: unknown."""
        self.forget(instance_id)
        del self._members[instance_id]

    def forget(self, instance_id: InstanceId) -> None:
        """Its cache is empty: it was started anew, slept, or was reset. KeyError: unknown."""
        member = self._members[instance_id]
        for key in member.sizes:
            self._clear(key, member.bit)
        member.sizes = {}
        member.used = 0

    def resize(self, instance_id: InstanceId, capacity_bytes: float) -> None:
        """Its KV cache is of another size. KeyError: unknown."""
        member = self._members[instance_id]
        member.capacity = _units(capacity_bytes)
        self._evict(member)

    def __contains__(self, instance_id: InstanceId) -> bool:
        return instance_id in self._members

    def slot(self, instance_id: InstanceId) -> int:
        """Its bit in ``PrefixIndex.levels``. KeyError: unknown."""
        return self._members[instance_id].slot

    # What goes

    def _evict(self, member: HeldKeys) -> None:
        if member.used <= member.capacity:
            return
        sizes, masks, bit = member.sizes, self._masks, member.bit
        used, aim = member.used, member.capacity - member.capacity // _EVICTED_SHARE
        batch = max(16, len(sizes) // _EVICTED_SHARE)
        while used > aim:
            for key in list(islice(sizes, batch)):
                used -= sizes.pop(key)
                # ``_clear``, written out: as many keys go as come.
                part = masks[key & LAST_BITS]
                mask = part[key]
                if mask == bit:
                    del part[key]
                else:
                    part[key] = mask ^ bit
                if used <= aim:
                    break
        member.used = used

    def _clear(self, key: int, bit: int) -> None:
        part = self._masks[key & LAST_BITS]
        mask = part[key] ^ bit
        if mask:
            part[key] = mask
        else:
            del part[key]

    # What another process has learnt

    def held(self, instance_id: InstanceId) -> list[tuple[int, int]]:
        """(key, size) of what one instance has, least recently used first. KeyError: unknown."""
        return list(self._members[instance_id].sizes.items())

    def hold(self, instance_id: InstanceId, held: Sequence[tuple[int, int]]) -> None:
        """Know what ``held`` said, in front of what was used here. KeyError: unknown."""
        member = self._members[instance_id]
        here, masks = member.sizes, self._masks
        sizes = {key: max(1, size) for key, size in held if key not in here}
        member.used += sum(sizes.values())
        for key in sizes:
            part = masks[key & LAST_BITS]
            part[key] = part.get(key, 0) | member.bit
        sizes.update(here)
        member.sizes = sizes
        self._evict(member)

    def learn(
        self, instance_id: InstanceId, told: Sequence[tuple[int, int]], most_units: int
    ) -> int:
        """Others have sent (key, size) there just now, what was used first in front.

        Of what is new no more counts than ``most_units``; returns how much does. KeyError: unknown.
        """
        member = self._members[instance_id]
        sizes, masks, bit, new = member.sizes, self._masks, member.bit, 0
        for key, size in told:
            known = sizes.pop(key, 0)
            if not known:
                if new + size > most_units:
                    continue
                known = max(1, size)
                new += known
                part = masks[key & LAST_BITS]
                part[key] = part.get(key, 0) | bit
            sizes[key] = known
        member.used += new
        if member.used > member.capacity:
            self._evict(member)
        return new

    # What an engine tells of its cache

    def drop(self, instance_id: InstanceId, key: int) -> None:
        """It has a key no longer; one that it had not is no error. KeyError: unknown."""
        member = self._members[instance_id]
        size = member.sizes.pop(key, 0)
        if size:
            member.used -= size
            self._clear(key, member.bit)

    def confirm(self, instance_id: InstanceId, held: Sequence[tuple[int, int]]) -> None:
        """It has keys of so many bytes for certain. KeyError: unknown."""
        told = [(key, size_bytes // UNIT_BYTES or 1) for key, size_bytes in reversed(held)]
        self.learn(instance_id, told, self._members[instance_id].capacity)

    # What there is to show

    def keys_on(self, instance_id: InstanceId) -> int:
        """Keys of one instance. KeyError: unknown."""
        return len(self._members[instance_id].sizes)

    def capacity_units(self, instance_id: InstanceId) -> int:
        """What one instance has room for. KeyError: unknown."""
        return self._members[instance_id].capacity

    def bytes_on(self, instance_id: InstanceId) -> tuple[int, int]:
        """(bytes of text that one instance has, and has room for). KeyError: unknown."""
        member = self._members[instance_id]
        return member.used * UNIT_BYTES, member.capacity * UNIT_BYTES

    def memory_bytes(self) -> int:
        """What all of it takes, about."""
        return (
            sum(map(sys.getsizeof, self._masks))
            + len(self) * _KEY_BYTES
            + sum(
                sys.getsizeof(member.sizes) + sys.getsizeof(member.running)
                for member in self._members.values()
            )
        )


def sizes_of(keys: PrefixKeys) -> list[int]:
    """How much each key of a text takes, in the index's units."""
    begins = (0, *keys.ends)  # of the pieces, in front of the last end
    pieces = zip(begins, keys.ends, strict=False)
    return [(end - begin) // UNIT_BYTES or 1 for begin, end in pieces]


def _units(capacity_bytes: float) -> int:
    return max(0, int(min(capacity_bytes, 2.0**60)) // UNIT_BYTES)
