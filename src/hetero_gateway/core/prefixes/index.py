"""Which instances have which beginnings of texts in their caches, by what they were sent.

An engine keeps the KV blocks of what it has computed until it needs the room, the least recently
used first, and of one text the end before the beginning. So does this: of each instance as many
bytes of text as its KV cache has tokens for. It is an estimate; how good it is on each instance,
``trust`` finds out. Nothing of a text is in here, only keys (``keys``).

    key → mask       one bit per instance that has it
    instance → keys  in the order in which they were used last, an insertion-ordered dict each

    lookup           gallops: along a text's keys the masks only shrink, since beginnings outlive
                     ends, so between two keys with equal masks there is nothing to look at
    insert, touch    the end first, so that an instance's dict begins with what goes first
    eviction         some at a time: a dict whose first entries were deleted one by one has to
                     walk past all of them to find the next
    begin, end       how many of the requests that are there now have a key. A block that several
                     refer to is in the cache once, so what is counted twice is not held

A million keys take about 120 MB (``memory_bytes``). Everything is bounded by the instances'
capacities, whatever comes.
"""

from __future__ import annotations

import sys
from itertools import islice

import numpy as np

from hetero_gateway.core.costs.cost_model import FloatArray
from hetero_gateway.core.types import InstanceId, PrefixKeys

# Sizes are counted in units of this many bytes: those of most pieces are ints that Python has
# anyway. A piece counts for one unit at least.
_UNIT_BYTES = 32
# When an instance is full, this fraction of it goes.
_EVICTED_SHARE = 32
# An int of 60 bits.
_KEY_BYTES = 32


class _Member:
    """What one instance has: its keys with their sizes, least recently used first."""

    __slots__ = ("bit", "capacity", "evicted", "running", "shared_bytes", "sizes", "slot", "used")

    def __init__(self, slot: int, capacity: int) -> None:
        self.slot = slot
        self.bit = 1 << slot
        self.capacity = capacity
        self.sizes: dict[int, int] = {}
        self.used = 0
        self.evicted = 0
        # Of what is there now: requests by key, and bytes of text that are not the first of their
        # kind. Along a text the counts only fall.
        self.running: dict[int, int] = {}
        self.shared_bytes = 0


class PrefixIndex:
    """The estimate for all instances. Instances have slots, small and used again."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._members: dict[InstanceId, _Member] = {}

    def __len__(self) -> int:
        """Different keys."""
        return len(self._masks)

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self._masks)} keys of {len(self._members)} instances>"

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
        self._members[instance_id] = _Member(slot, _units(capacity_bytes))

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
        """Its bit in ``levels``. KeyError: unknown."""
        return self._members[instance_id].slot

    # What was sent

    def insert(self, instance_id: InstanceId, keys: PrefixKeys) -> int:
        """A text was sent there; returns how many of its first keys were there. KeyError: unknown.

        The same again, when it is finished, is a ``touch``.
        """
        member = self._members[instance_id]
        sizes, masks, bit = member.sizes, self._masks, member.bit
        hashes, ends = keys.hashes, keys.ends
        known = 0
        for i in range(len(hashes) - 1, -1, -1):
            key = hashes[i]
            size = sizes.pop(key, 0)
            if size:
                known += 1
            else:
                size = (ends[i] - (ends[i - 1] if i else 0)) // _UNIT_BYTES or 1
                member.used += size
                mask = masks.get(key)
                # The bit itself is one object for all keys that only this instance has.
                masks[key] = bit if mask is None else mask | bit
            sizes[key] = size
        if member.used > member.capacity:
            self._evict(member)
        return known

    def touch(self, instance_id: InstanceId, keys: PrefixKeys) -> None:
        """A text was used there once more, or is there for certain now. KeyError: unknown."""
        self.insert(instance_id, keys)

    def withdraw(self, instance_id: InstanceId, keys: PrefixKeys, known: int) -> None:
        """It was not computed there after all: take off what ``insert`` added.

        Args:
            known: what ``insert`` returned.

        An instance that is gone meanwhile is no error.
        """
        member = self._members.get(instance_id)
        if member is None:
            return
        for key in keys.hashes[known:]:
            size = member.sizes.pop(key, 0)
            if size:
                member.used -= size
                self._clear(key, member.bit)

    # What is there now

    def begin(self, instance_id: InstanceId, keys: PrefixKeys) -> int:
        """A text's request is there from now on, until ``end``. KeyError: unknown.

        Returns bytes of the texts that are there now and that others there have in common: what
        the engine holds once and each of them counts.
        """
        member = self._members[instance_id]
        running = member.running
        shared = 0
        for i, key in enumerate(keys.hashes):
            count = running.get(key, 0)
            running[key] = count + 1
            if count:
                shared = i + 1
        if shared:
            member.shared_bytes += keys.ends[shared - 1]
        return member.shared_bytes

    def end(self, instance_id: InstanceId, keys: PrefixKeys) -> int:
        """It is over; returns as ``begin``. KeyError: unknown, or it had not begun."""
        member = self._members[instance_id]
        running = member.running
        shared = 0
        for i, key in enumerate(keys.hashes):
            count = running[key]
            if count > 1:
                running[key] = count - 1
                shared = i + 1
            else:
                del running[key]
        if shared:
            member.shared_bytes -= keys.ends[shared - 1]
        return member.shared_bytes

    def _evict(self, member: _Member) -> None:
        if member.used <= member.capacity:
            return
        sizes, aim = member.sizes, member.capacity - member.capacity // _EVICTED_SHARE
        batch = max(16, len(sizes) // _EVICTED_SHARE)
        while member.used > aim:
            for key in list(islice(sizes, batch)):
                member.used -= sizes.pop(key)
                member.evicted += 1
                self._clear(key, member.bit)
                if member.used <= aim:
                    break

    def _clear(self, key: int, bit: int) -> None:
        mask = self._masks[key] ^ bit
        if mask:
            self._masks[key] = mask
        else:
            del self._masks[key]

    # What is there

    def levels(self, keys: PrefixKeys) -> list[tuple[int, int]]:
        """(mask, matched bytes) for each depth at which some instances' match ends, deepest last.

        A mask has the bit ``1 << slot`` of each instance; every instance that has any of the text
        is in exactly one.
        """
        hashes, get = keys.hashes, self._masks.get
        if not hashes:
            return []
        low, here = 0, get(hashes[0], 0)
        result: list[tuple[int, int]] = []
        last = len(hashes) - 1
        while here:
            # The deepest key at which all of these are still there.
            step, high, beyond = 1, last + 1, 0
            while low + step <= last:
                mask = get(hashes[low + step], 0) & here
                if mask != here:
                    high, beyond = low + step, mask
                    break
                low += step
                step *= 2
            else:
                high, beyond = self._probe(hashes, low, last, here)
            while high - low > 1:
                middle = (low + high) // 2
                mask = get(hashes[middle], 0) & here
                if mask == here:
                    low = middle
                else:
                    high, beyond = middle, mask
            result.append((here ^ beyond, keys.ends[low]))
            low, here = high, beyond
        return result

    def _probe(self, hashes: tuple[int, ...], low: int, last: int, here: int) -> tuple[int, int]:
        """Where the galloping went past the end: (the first key that not all have, who has it)."""
        if low == last:
            return last + 1, 0
        mask = self._masks.get(hashes[last], 0) & here
        return (last + 1, 0) if mask == here else (last, mask)

    def lookup(self, keys: PrefixKeys) -> dict[InstanceId, int]:
        """Matched bytes of each instance that has any of the text. For many, see ``by_slot``."""
        levels = self.levels(keys)
        if not levels:
            return {}
        return {
            instance_id: matched
            for instance_id, member in self._members.items()
            for mask, matched in levels
            if mask & member.bit
        }

    def by_slot(self, keys: PrefixKeys, slots: int) -> FloatArray:
        """Matched bytes by slot, for the first this many; 0 where there is nothing."""
        result = np.zeros(slots)
        size = (slots + 7) // 8
        within = (1 << slots) - 1
        for mask, matched in self.levels(keys):
            bits = np.frombuffer((mask & within).to_bytes(size, "little"), np.uint8)
            result[np.unpackbits(bits, count=slots, bitorder="little").view(bool)] = matched
        return result

    # What there is to show

    def keys_on(self, instance_id: InstanceId) -> int:
        """Keys of one instance. KeyError: unknown."""
        return len(self._members[instance_id].sizes)

    def bytes_on(self, instance_id: InstanceId) -> tuple[int, int]:
        """(bytes of text that one instance has, and has room for). KeyError: unknown."""
        member = self._members[instance_id]
        return member.used * _UNIT_BYTES, member.capacity * _UNIT_BYTES

    def memory_bytes(self) -> int:
        """What all of it takes, about."""
        return (
            sys.getsizeof(self._masks)
            + len(self._masks) * _KEY_BYTES
            + sum(
                sys.getsizeof(member.sizes) + sys.getsizeof(member.running)
                for member in self._members.values()
            )
        )


def _units(capacity_bytes: float) -> int:
    return max(0, int(min(capacity_bytes, 2.0**60)) // _UNIT_BYTES)
