"""The tables of ``PrefixIndex``: which instance has which keys of prompts' beginnings, their
membership, knowledge from elsewhere, and eviction.

``caches`` changes them for each request: every request passes through there, and none through here
unless an instance is full.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from typing import Final

from hetero_gateway.core.types import InstanceId, PrefixKeys

# Sizes are counted in units of this many bytes: most pieces then have sizes that are cached ints in
# Python. A piece counts for at least one unit.
UNIT_BYTES: Final = 32
# When an instance is full, this fraction of it is evicted.
_EVICTED_SHARE: Final = 32
# An int of 60 bits.
_KEY_BYTES: Final = 32
# Number of dicts of masks.
_PARTS: Final = 1024
LAST_BITS: Final = _PARTS - 1


class HeldKeys:
    """The keys of one instance with their sizes, least recently used first."""

    __slots__ = ("bit", "capacity", "running", "shared_bytes", "sizes", "slot", "used")

    def __init__(self, slot: int, capacity: int) -> None:
        self.slot = slot
        self.bit = 1 << slot
        self.capacity = capacity
        self.sizes: dict[int, int] = {}
        self.used = 0
        # Of present requests: requests by key, and bytes of text that others have as well. Along a
        # text the counts only fall.
        self.running: dict[int, int] = {}
        self.shared_bytes = 0


class KeyTables:
    """The keys of all instances. Instances have slots, small and reused."""

    def __init__(self) -> None:
        self._masks: list[dict[int, int]] = [{} for _ in range(_PARTS)]
        self._members: dict[InstanceId, HeldKeys] = {}

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
        self._members[instance_id] = HeldKeys(slot, _units(capacity_bytes))

    def leave(self, instance_id: InstanceId) -> None:
        """Remove an instance and its keys. KeyError: unknown."""
        self.forget(instance_id)
        del self._members[instance_id]

    def forget(self, instance_id: InstanceId) -> None:
        """Empty its cache: it was restarted, slept, or was reset. KeyError: unknown."""
        member = self._members[instance_id]
        for key in member.sizes:
            self._clear(key, member.bit)
        member.sizes = {}
        member.used = 0

    def resize(self, instance_id: InstanceId, capacity_bytes: float) -> None:
        """Change the size of its KV cache. KeyError: unknown."""
        member = self._members[instance_id]
        member.capacity = _units(capacity_bytes)
        self._evict(member)

    def __contains__(self, instance_id: InstanceId) -> bool:
        return instance_id in self._members

    def slot(self, instance_id: InstanceId) -> int:
        """Its bit in ``PrefixIndex.levels``. KeyError: unknown."""
        return self._members[instance_id].slot

    # Eviction

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

    # Another process's knowledge

    def held(self, instance_id: InstanceId) -> list[tuple[int, int]]:
        """(key, size) of an instance's keys, least recently used first. KeyError: unknown."""
        return list(self._members[instance_id].sizes.items())

    def hold(self, instance_id: InstanceId, held: Sequence[tuple[int, int]]) -> None:
        """Add what ``held`` returned, before what was used here. KeyError: unknown."""
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
        """Other gateways have just sent (key, size) there, least recently used first.

        Of new keys, at most ``most_units`` count; returns how many do. KeyError: unknown.
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

    # Reports of engines

    def drop(self, instance_id: InstanceId, key: int) -> None:
        """Drop a key of an instance; one that it did not have is ignored. KeyError: unknown."""
        member = self._members[instance_id]
        size = member.sizes.pop(key, 0)
        if size:
            member.used -= size
            self._clear(key, member.bit)

    def confirm(self, instance_id: InstanceId, held: Sequence[tuple[int, int]]) -> None:
        """It certainly has keys of this many bytes. KeyError: unknown."""
        told = [(key, size_bytes // UNIT_BYTES or 1) for key, size_bytes in reversed(held)]
        self.learn(instance_id, told, self._members[instance_id].capacity)

    # For display

    def keys_on(self, instance_id: InstanceId) -> int:
        """The number of keys of one instance. KeyError: unknown."""
        return len(self._members[instance_id].sizes)

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
                sys.getsizeof(member.sizes) + sys.getsizeof(member.running)
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
