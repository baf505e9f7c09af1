"""What gateways tell each other of the prompts they have sent, and how they use it. Pure.

Each reports which keys of prompts' beginnings (``core/prefixes``) it has sent to which instance, in
entries of a common log. Every gateway reads the log from where it stopped, and a new one from the
newest entry backwards. What another gateway has sent enters the index like this one's own: whose
request it was makes no difference to an engine's cache.

    note(dispatch)        on the path of a request: only a note
    say(now_s)            the entries that are due
    hear(entry, now_s)    a new entry of any gateway
    recall(entries)       entries older than all that were heard

An entry, little-endian:

    header     "<4sBxxxQQ"  magic, version, the names' mark, the replica
    instance   "<QdH"       its key (``message.instance_key``), when its engine was started (Unix
                            time, s; 0: unknown), n keys that follow
               n × "<Q"     keys, least recently used first
               n × "<H"     the size of each, in the index's units

**Names.** Keys begin with a secret. Entries carry a mark of it, and those of another secret are
ignored: their keys would never match.

**Volume.** A key that was reported within the last ``_AGAIN_S`` is not reported again, so that a
conversation's next turn reports only its own text. An entry has at most ``ENTRY_BYTES``, and one
turn ``ENTRIES`` of them; the rest is left out, and the others know a little less.

**Belief.** An entry is believed only as far as an engine could have done it: for each instance, new
text counts up to filling its cache in ``_FILLED_S``. False claims cost hits that were predicted and
did not come, which the instance's trust learns, and displace real contents at that pace; they never
cost a request. Text sent to an engine that has restarted since counts for nothing.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.prefixes.caches import PrefixCaches
from hetero_gateway.core.prefixes.key_tables import sizes_of
from hetero_gateway.core.sharing.message import MessageError, instance_key
from hetero_gateway.core.types import InstanceId, Outcome

ENTRY_BYTES = 4096
# Of one turn: with one each 0.25 s, 256 KiB/s.
ENTRIES = 16

_VERSION = 1
_MAGIC = b"hgp\0"
_HEADER = struct.Struct("<4sBxxxQQ")
_INSTANCE = struct.Struct("<QdH")
_KEY_BYTES = 10
# An instance's header takes the space of this many keys, and is not worth it for fewer than these.
_HEAD_KEYS, _LEAST_KEYS = 2, 8
_MOST_KEYS = (ENTRY_BYTES - _HEADER.size - _INSTANCE.size) // _KEY_BYTES
_MOST_KEY = 2**60
_MOST_UNITS = 2**16 - 1
# Reported so recently that it need not be repeated; and how many keys are remembered for that.
_AGAIN_S = 20.0
_MOST_SAID = 200_000
# Requests between two turns; further ones are left out.
_MOST_NOTED = 8192
# No engine computes a cache full of prompts faster.
_FILLED_S = 10.0
# An index is never quite full: eviction is in batches.
_FULL = 0.95
# Tolerance between two readings of one process's start.
_SAME_START_S = 1.5


class _Known:
    """An instance here. ``units``: new text that may still count, as of ``at_s``; ``assumed_s``:
    the assumed start of the engine that others report on, until its own report is here.
    """

    __slots__ = ("assumed_s", "at_s", "instance_id", "key", "units")

    def __init__(self, instance_id: InstanceId, key: int) -> None:
        self.instance_id = instance_id
        self.key = key
        self.units = 0.0
        self.at_s = -math.inf
        self.assumed_s = 0.0


def mark_of(secret: bytes) -> int:
    """A mark of a secret that does not reveal it."""
    digest = hashlib.blake2b(secret, digest_size=8, person=b"placements").digest()
    return int.from_bytes(digest, "little")


class PlacementExchange:
    """One gateway's side of shared placements.

    Args:
        caches: what is known here.
        replica: this gateway, 8 bytes.
        started_s: when an instance's engine was started, by its own report; None: unknown.
    """

    def __init__(
        self,
        caches: PrefixCaches,
        replica: int,
        started_s: Callable[[InstanceId], float | None],
    ) -> None:
        self._caches = caches
        self._replica = replica
        self._started_s = started_s
        self._known: dict[int, _Known] = {}
        self._keys: dict[InstanceId, int] = {}
        self._noted: list[Dispatch] = []
        self._said: set[int] = set()
        self._said_since_s = -math.inf
        self.mark: int | None = None  # None: the secret is not agreed yet, and nothing is sent
        # Keys ``said``, ``heard``, and of ours ``left_out``; entries ``rejected``, or ``foreign``:
        # their keys use another secret.
        self.counts: Counter[str] = Counter()

    def set_instances(self, instances: Iterable[tuple[InstanceId, str]]) -> None:
        """Set the present (id, base_url)s, after each change."""
        before, self._known, self._keys = self._known, {}, {}
        for instance_id, base_url in instances:
            key = instance_key(instance_id, base_url)
            self._known[key] = before.get(key) or _Known(instance_id, key)
            self._keys[instance_id] = key

    # Sending

    def note(self, dispatch: Dispatch) -> None:
        """Note a sent request that has keys. On the path of each request."""
        if len(self._noted) < _MOST_NOTED:
            self._noted.append(dispatch)

    def say(self, now_s: float) -> list[bytes]:
        """The entries that are due; they count as sent."""
        noted, self._noted = self._noted, []
        if self.mark is None or not noted:
            return []
        if now_s - self._said_since_s >= _AGAIN_S or len(self._said) > _MOST_SAID:
            self._said, self._said_since_s = set(), now_s
        said = self._said
        told: dict[int, dict[int, int]] = {}
        for dispatch in noted:
            key, keys = self._keys.get(dispatch.instance_id), dispatch.request.prefix
            if key is None or keys is None or _taken_back(dispatch):
                continue
            parts = told.setdefault(key, {})
            sizes = sizes_of(keys)
            # The end first, as in the index.
            for at in range(len(sizes) - 1, -1, -1):
                own = keys.hashes[at]
                if own ^ key not in said:
                    said.add(own ^ key)
                    parts[own] = min(sizes[at], _MOST_UNITS)
        head = _HEADER.pack(_MAGIC, _VERSION, self.mark, self._replica)
        entries = [head + body for body in islice(self._bodies(told), ENTRIES)]
        all_keys = sum(map(len, told.values()))
        said_keys = sum(count for entry in entries for _, _, count, _ in _parts(entry))
        self.counts["said"] += said_keys
        self.counts["left_out"] += all_keys - said_keys
        return entries

    def _bodies(self, told: dict[int, dict[int, int]]) -> Iterator[bytes]:
        """The parts after the headers of entries."""
        parts: list[bytes] = []
        room = _MOST_KEYS
        for key, sizes in told.items():
            started_s = self._started_s(self._known[key].instance_id) or 0.0
            items = iter(sizes.items())
            left = len(sizes)
            while left:
                if room < min(left, _LEAST_KEYS):
                    yield b"".join(parts)
                    parts, room = [], _MOST_KEYS
                count = min(left, room)
                some = dict(islice(items, count))
                parts += (
                    _INSTANCE.pack(key, started_s, count),
                    np.fromiter(some.keys(), "<u8", count).tobytes(),
                    np.fromiter(some.values(), "<u2", count).tobytes(),
                )
                left -= count
                room -= count + _HEAD_KEYS
        if parts:
            yield b"".join(parts)

    def check(self) -> None:
        """Forget what was believed of engines that turn out to have started since."""
        for known in self._known.values():
            here_s = self._started_s(known.instance_id) if known.assumed_s else None
            if here_s is not None:
                if abs(here_s - known.assumed_s) > _SAME_START_S:
                    self._caches.forget(known.instance_id)
                known.assumed_s = 0.0

    def unsaid(self) -> None:
        """Note that recent entries may be lost."""
        self._said = set()

    # Receiving

    def hear(self, entry: bytes, now_s: float) -> None:
        """Take a new entry."""
        index = self._caches.index
        for known, held in self._read(entry):
            capacity = float(index.capacity_units(known.instance_id))
            grown = min(1.0, (now_s - known.at_s) / _FILLED_S) * capacity
            known.units, known.at_s = min(capacity, known.units + grown), now_s
            known.units -= index.learn(known.instance_id, held, int(known.units))
            self.counts["heard"] += len(held)

    def recall(self, entries: Iterable[bytes]) -> bool:
        """Take entries older than all that is known here, newest first: they are evicted first,
        too.

        Returns whether there is room for more.
        """
        index = self._caches.index
        recalled: dict[InstanceId, dict[int, int]] = {}
        for entry in reversed(list(entries)):
            for known, held in self._read(entry, own=True):
                sizes = recalled.setdefault(known.instance_id, {})
                for key, size in held:
                    sizes.pop(key, None)
                    sizes[key] = size
                self.counts["heard"] += len(held)
        for instance_id, sizes in recalled.items():
            index.hold(instance_id, list(sizes.items()))
        ids = [k.instance_id for k in self._known.values() if k.instance_id in index]
        return any(used < _FULL * most for used, most in map(index.bytes_on, ids))

    def _read(
        self, entry: bytes, *, own: bool = False
    ) -> Iterator[tuple[_Known, list[tuple[int, int]]]]:
        """The part of an entry about instances that are here and engines that still run."""
        try:
            if len(entry) > ENTRY_BYTES or len(entry) < _HEADER.size:
                raise MessageError(f"{len(entry)} bytes")
            magic, version, mark, replica = _HEADER.unpack_from(entry)
            if magic != _MAGIC or version != _VERSION:
                raise MessageError("not an entry that this release can read")
            if mark != self.mark:
                self.counts["foreign"] += 1
                return
            if replica == self._replica and not own:
                return
            parts = [
                (key, started_s, _held(entry, offset, count))
                for key, started_s, count, offset in _parts(entry)
            ]
        except MessageError:
            self.counts["rejected"] += 1
            return
        for key, started_s, held in parts:
            known = self._known.get(key)
            if known is None or known.instance_id not in self._caches.index:
                continue
            here_s = self._started_s(known.instance_id)
            if here_s is None:
                known.assumed_s = max(known.assumed_s, started_s)
                if started_s < known.assumed_s - _SAME_START_S:
                    continue
            elif started_s and abs(started_s - here_s) > _SAME_START_S:
                continue  # that engine has gone, and its cache with it
            yield known, held


def _taken_back(dispatch: Dispatch) -> bool:
    """Whether it failed before its first token: its prompt was not all computed."""
    return dispatch.outcome not in (None, Outcome.COMPLETED) and not dispatch.streaming


def _parts(entry: bytes) -> Iterator[tuple[int, float, int, int]]:
    """(instance, its start, keys, their offset). Raises MessageError."""
    offset = _HEADER.size
    while offset < len(entry):
        if offset + _INSTANCE.size > len(entry):
            raise MessageError("an instance is cut short")
        key, started_s, count = _INSTANCE.unpack_from(entry, offset)
        offset += _INSTANCE.size
        if not 0 <= started_s < 2.0**40:  # nor NaN
            raise MessageError("a time is out of range")
        if offset + count * _KEY_BYTES > len(entry):
            raise MessageError("keys are missing")
        yield key, started_s, count, offset
        offset += count * _KEY_BYTES


def _held(entry: bytes, offset: int, count: int) -> list[tuple[int, int]]:
    """(key, size) of the keys at that offset. Raises MessageError."""
    keys = np.frombuffer(entry, "<u8", count, offset)
    sizes = np.frombuffer(entry, "<u2", count, offset + 8 * count)
    if count and (int(keys.max()) >= _MOST_KEY or not sizes.all()):
        raise MessageError("a key is out of range")
    return list(zip(keys.tolist(), sizes.tolist(), strict=True))
