"""The engines of a cluster's instances in one virtual time: ``kernel.advance``, and its tables.

Where numba is installed (the extra ``fast``) and asked for, the tables are numpy arrays and the
kernel is compiled; otherwise they are lists and it runs as it is written. The results are the
same.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from hetero_gateway.core.profile import Profile
from hetero_gateway.sim import kernel
from hetero_gateway.sim.engine import (
    DEFAULT_MAX_BATCHED_TOKENS,
    Scheduling,
    fits,
    instance_rows,
    list_heads,
)

# Room for what many instances log between two external events, beside one full step.
_LOG_ENTRIES = 4096


def can_compile() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def compile_kernel() -> tuple[Any, Any, Any]:
    """``submit``, ``change_slowdown`` and ``advance``, compiled; numba caches them on disk."""
    import numba
    from numba.extending import register_jitable

    entries = (kernel.submit, kernel.change_slowdown, kernel.advance)
    for name, function in vars(kernel).items():
        if callable(function) and getattr(function, "__module__", "") == kernel.__name__:
            # In the order of definition: a function's callees are registered before it is used.
            if function not in entries or name == "rank":
                register_jitable(function)
    compiled = [numba.njit(cache=True)(function) for function in entries]
    return compiled[0], compiled[1], compiled[2]


class Fleet:
    """Instances by position, sequences by slot.

    Args:
        profiles: what each instance runs.
        compiled: run the kernel compiled; needs numba.

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
    ) -> None:
        rows = [
            instance_rows(
                profile, 3 * i, scheduling=scheduling, max_batched_tokens=max_batched_tokens
            )
            for i, profile in enumerate(profiles)
        ]
        leaves = 1 << (len(rows) - 1).bit_length()
        if leaves > len(rows):  # one more instance, never busy, fills the tournament up
            rows.append(instance_rows(profiles[0], 0, max_num_seqs=1))
        width = max(len(n) for n, _ in rows)
        self._compiled = compiled
        self._n = self._table([n + [0] * (width - len(n)) for n, _ in rows])
        self._x = self._table([x for _, x in rows])
        self._q = self._table([row for i in range(len(profiles)) for row in list_heads(3 * i)])
        self._free_slots: list[int] = []
        first = [0] * leaves + [min(i, len(rows) - 1) for i in range(leaves)]
        for i in range(0, leaves, 2):
            kernel.rank(self._n, self._x, first, i)
        entries = _LOG_ENTRIES + 2 * max(n[kernel.MAX_SEQS] for n, _ in rows)
        self._first = self._vector(first)
        self._log = self._vector([0] * entries)
        self._log_s = self._vector([0.0] * entries)
        self._submit, self._change_slowdown, self._advance = (
            compile_kernel()
            if compiled
            else (kernel.submit, kernel.change_slowdown, kernel.advance)
        )

    def _table(self, rows: list[list[Any]]) -> Any:
        return np.array(rows) if self._compiled else rows

    def _vector(self, values: list[Any]) -> Any:
        return np.array(values) if self._compiled else values

    def new_slot(self) -> int:
        """A slot for one sequence; ``free_slot`` takes it back."""
        if not self._free_slots:
            size = len(self._q)
            if self._compiled:
                self._q = np.concatenate((self._q, np.zeros_like(self._q)))
            else:
                self._q += [[0] * kernel.SEQUENCE_FIELDS for _ in range(size)]
            self._free_slots.extend(range(2 * size - 1, size - 1, -1))
        return self._free_slots.pop()

    def free_slot(self, slot: int) -> None:
        self._free_slots.append(slot)

    def fits(self, i: int, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether instance i can ever finish a sequence of these lengths."""
        return fits(self._n[i], prompt_tokens, output_tokens)

    def submit(self, i: int, slot: int, prompt: int, output: int, now_s: float) -> None:
        """Queue a sequence that fits; the step that begins at ``now_s`` or next may admit it."""
        self._submit(self._q, self._n, self._x, self._first, i, slot, prompt, output, now_s)

    def set_slowdown(self, i: int, slowdown: float, now_s: float) -> None:
        """Stretch the steps that begin at ``now_s`` or later; above 0."""
        self._change_slowdown(self._n, self._x, self._first, i, slowdown, now_s)

    def advance(self, until_s: float, stop: bool) -> bool:
        """See ``kernel.advance``; ``events`` are then the ones of this call."""
        return bool(
            self._advance(
                self._q, self._n, self._x, self._first, self._log, self._log_s, until_s, stop
            )
        )
