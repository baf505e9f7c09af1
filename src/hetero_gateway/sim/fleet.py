"""The engines of a cluster's instances in one virtual time: ``kernel.advance``, and its tables.

If numba is installed (the extra ``fast``) and requested, the tables are numpy arrays and the kernel
is compiled; otherwise they are lists and it runs as plain Python. The results are the same.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.sim import block_cache, jit, kernel
from hetero_gateway.sim.engine import (
    DEFAULT_MAX_BATCHED_TOKENS,
    Scheduling,
    instance_rows,
    list_heads,
)

# The functions called from here; these call the rest of the kernel.
ENTRIES = (
    kernel.submit, kernel.unpin, kernel.change_slowdown, kernel.advance, kernel.decoded,
)  # fmt: skip
# Room for the logs of many instances between two external events, besides one full step.
_LOGENTRIES = 4096


def compile_kernel() -> tuple[Any, ...]:
    """The kernel functions that a fleet calls, compiled."""
    return tuple(jit.compiled(function) for function in ENTRIES)


class EngineFleet:
    """Instances by index, sequences by slot.

    Args:
        profiles: of each instance.
        compiled: run the kernel compiled; needs numba.
        prefix_caching: by instance, whether it has a prefix cache; empty: none has.
        most_blocks: of any one sequence, if there is a prefix cache.

    Raises:
        ValueError: as ``Engine``.
    """

    def __init__(
        self,
        profiles: Sequence[Profile],
        *,
        scheduling: Scheduling = "chunked",
        max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
        compiled: bool = False,
        prefix_caching: Sequence[bool] = (),
        most_blocks: int = 0,
    ) -> None:
        self.profiles = tuple(profiles)
        self._scheduling, self._max_batched_tokens = scheduling, max_batched_tokens
        self._prefix_caching = tuple(prefix_caching) or (False,) * len(profiles)
        rows = [self._rows(i, 1.0) for i in range(len(profiles))]
        # By instance: the largest prompt + output - 1 that it can ever finish.
        self.capacity_tokens = [n[kernel.TOTAL_BLOCKS] * n[kernel.BLOCK_TOKENS] for n, _ in rows]
        leaves = 1 << (len(rows) - 1).bit_length()
        if leaves > len(rows):  # one more, idle instance fills up the tournament
            rows.append(instance_rows(profiles[0], 0, max_num_seqs=1))
        width = max(len(n) for n, _ in rows)
        self.compiled = compiled
        self._n = self._array([n + [0] * (width - len(n)) for n, _ in rows])
        self._x = self._array([x for _, x in rows])
        self._q = self._array([row for i in range(len(profiles)) for row in list_heads(3 * i)])
        self._c = self._caches([n for n, _ in rows])
        self._most_blocks = 0 if self._c is None else max(1, most_blocks)
        self._k = self._key_rows(len(self._q))
        self.free_slots: list[int] = []
        first = [0] * leaves + [min(i, len(rows) - 1) for i in range(leaves)]
        for i in range(0, leaves, 2):
            kernel.rank(self._n, self._x, first, i)
        entries = _LOGENTRIES + 2 * max(n[kernel.MAX_SEQS] for n, _ in rows)
        self._first = self._array(first)
        self._log = self._array([0] * entries)
        self._log_s = self._array([0.0] * entries)
        self._steps = self._array([0] * len(profiles))
        self._seconds = self._array([0.0] * len(profiles))
        self._submit, self._unpin, self._change_slowdown, self._advance, self._decoded = (
            compile_kernel() if compiled else ENTRIES
        )
        # Reading single numbers from a memoryview is as fast as from a list.
        self.log: kernel.Row = self._view(self._log)
        self.log_s: kernel.Times = self._view(self._log_s)

    def _rows(self, i: int, slowdown: float) -> tuple[kernel.Row, kernel.Times]:
        return instance_rows(
            self.profiles[i],
            3 * i,
            scheduling=self._scheduling,
            max_batched_tokens=self._max_batched_tokens,
            slowdown=slowdown,
            prefix_caching=self._prefix_caching[i],
        )

    def _view(self, vector: Any) -> Any:
        return memoryview(vector) if self.compiled else vector

    def _array(self, values: list[Any]) -> Any:
        return np.array(values) if self.compiled else values

    def _caches(self, instances: kernel.Rows) -> Any:
        if not any(n[kernel.CACHING] for n in instances):
            return None
        caches = [
            block_cache.cache_rows(n[kernel.TOTAL_BLOCKS]) if n[kernel.CACHING] else [[0]]
            for n in instances
        ]
        if not self.compiled:
            return caches
        width = max(len(row) for cache in caches for row in cache)
        table = np.zeros((len(caches), max(map(len, caches)), width), dtype=np.int64)
        for i, cache in enumerate(caches):
            for field, row in enumerate(cache):
                table[i, field, : len(row)] = row
        return table

    def _key_rows(self, slots: int) -> Any:
        """Two rows for each slot: the keys of its blocks, and its blocks."""
        if self.compiled:
            return np.zeros((2 * slots, max(1, self._most_blocks)), dtype=np.int64)
        return [[0] * self._most_blocks for _ in range(2 * slots)]

    def new_slot(self) -> int:
        """A slot for one sequence; its owner returns it to ``free_slots``."""
        if not self.free_slots:
            size = len(self._q)
            more = self._key_rows(size if self._most_blocks else 0)
            self._k = np.concatenate((self._k, more)) if self.compiled else self._k + more
            if self.compiled:
                self._q = np.concatenate((self._q, np.zeros_like(self._q)))
            else:
                self._q += [[0] * kernel.SEQUENCE_FIELDS for _ in range(size)]
            self.free_slots.extend(range(2 * size - 1, size - 1, -1))
        return self.free_slots.pop()

    def tables(self) -> tuple[Any, ...]:
        """The kernel's tables, for a caller's own loop: q, n, x, c, k, first, log, log_s."""
        engines = (self._q, self._n, self._x, self._c, self._k, self._first)
        return (*engines, self._log, self._log_s)

    def submit(
        self,
        i: int,
        slot: int,
        prompt: int,
        output: int,
        now_s: float,
        keys: Sequence[int] = (),
        *,
        fetched: int = 0,
        pins: bool = False,
    ) -> None:
        """Queue a sequence that fits; the step that begins at ``now_s`` or next may admit it.

        ``keys`` are those of ``Sequence``: at most ``most_blocks``; an array if it is
            compiled.

        Args:
            fetched: prompt tokens, at most all but one, whose KV has come from another
                instance.
            pins: its output is one token, and its blocks stay until ``unpin``.
        """
        if self._most_blocks:
            self._k[2 * slot][: len(keys)] = keys
        q = self._q[slot]
        q[kernel.FETCHED], q[kernel.PINS] = fetched, int(pins)
        tables = (self._q, self._n, self._x, self._first)
        self._submit(*tables, i, slot, prompt, output, len(keys), now_s)

    def unpin(self, i: int, slot: int, now_s: float) -> None:
        """The remaining blocks of a finished, pinning sequence on instance i were fetched."""
        tables = (self._q, self._n, self._x, self._c, self._k, self._first)
        self._unpin(*tables, i, slot, now_s)

    def cached_tokens(self, slot: int) -> int:
        """Prompt tokens of a sequence that its instance had in its prefix cache."""
        return int(self._q[slot][kernel.CACHED_TOKENS])

    def set_slowdown(self, i: int, slowdown: float, now_s: float) -> None:
        """Stretch the steps that begin at ``now_s`` or later; above 0."""
        self._change_slowdown(self._n, self._x, self._first, i, slowdown, now_s)

    def clear(self, i: int) -> None:
        """Drop everything on instance i, as a crash does; its slow-down stays."""
        n, x = self._rows(i, self._x[i][kernel.SLOWDOWN])
        if self._prefix_caching[i]:
            cache = block_cache.cache_rows(n[kernel.TOTAL_BLOCKS])
            for field, cached in enumerate(cache):
                self._c[i][field][: len(cached)] = cached
        self._n[i][: len(n)] = n
        self._x[i][:] = x
        for head, row in enumerate(list_heads(3 * i), 3 * i):
            self._q[head][:] = row
        kernel.rank(self._n, self._x, self._first, i)

    def advance(self, until_s: float, stop: bool) -> bool:
        """Let time pass; ``log`` and ``log_s`` then have this call's events. See
        ``kernel.advance``."""
        tables = (self._q, self._n, self._x, self._c, self._k, self._first)
        return bool(self._advance(*tables, self._log, self._log_s, until_s, stop))

    def decoded(self, now_s: float) -> tuple[list[int], list[float]]:
        """By instance: the decode steps that have ended at ``now_s``, and how long they took."""
        self._decoded(self._n, self._x, now_s, self._steps, self._seconds)
        return list(self._steps), list(self._seconds)
