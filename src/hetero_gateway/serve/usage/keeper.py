"""Keeps clients' usage beyond this process: in a file next to the keys, or in Redis.

The counts stay where they are (``admission/usage``), and no request waits for a store: every
``SAVE_EVERY_S`` seconds, and at the end, changes are written. Each run of a gateway has rows of its
own; a row is written whole, so that writing it twice counts nothing twice. A restarted scheduler
process, and a gateway that takes over, continue the same run: the former counts on from the stored
rows, the latter has been told everything. Rows of other runs (earlier ones, or other gateways that
share the store) are read when somebody asks for the total.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from hetero_gateway.gateway.admission.usage import (
    ClientUsage,
    KeptRow,
    UsageStoreError,
    added,
)

_log = logging.getLogger(__name__)

SAVE_EVERY_S = 10.0


class UsageStore(Protocol):
    """The storage of rows. Both methods raise UsageStoreError."""

    async def save(self, rows: Sequence[KeptRow]) -> None:
        """Store these rows of this run, replacing those of the same day, client and model."""

    async def read(self, *, own: bool) -> list[KeptRow]:
        """The stored rows of this run, or of all others."""

    def close(self) -> None:
        """Close it."""


class UsageKeeper:
    """Saves one gateway's counts.

    Args:
        usage: the counts.
        store: where they are kept.
        catch_up: called first, to count what is still pending.
    """

    def __init__(self, usage: ClientUsage, store: UsageStore, catch_up: Callable[[], None]) -> None:
        self._usage = usage
        self._store = store
        self._catch_up = catch_up
        self._saved: dict[tuple[int, str, str], KeptRow] = {}
        # What this run had stored before this process started; None: not known yet.
        self._before: dict[tuple[int, str, str], KeptRow] | None = None
        self._problem = ""
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    def start(self, tasks: asyncio.TaskGroup, *, continues: bool) -> None:
        """Save periodically, until ``stop``.

        ``continues``: this process has been told this run's usage so far.
        """
        if continues:
            self._before = {}
        self._task = tasks.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            await self.save()

    async def save(self) -> None:
        """Write the changes since the last time."""
        async with self._turn:
            self._catch_up()
            if not self._usage.days():
                return
            try:
                before = await self._what_was_before()
                rows = await asyncio.to_thread(self._changed, before)
                if not rows:
                    return
                await self._store.save(rows)
            except UsageStoreError as error:
                if str(error) != self._problem:
                    _log.error(
                        "clients' usage cannot be saved and would be lost at a restart: %s", error
                    )
                self._problem = str(error)
                return
            self._saved |= {row[:3]: row for row in rows}
            if self._problem:
                _log.info("clients' usage is saved again")
                self._problem = ""

    async def _what_was_before(self) -> dict[tuple[int, str, str], KeptRow]:
        if self._before is None:
            self._before = {row[:3]: row for row in await self._store.read(own=True)}
        return self._before

    def _changed(self, before: dict[tuple[int, str, str], KeptRow]) -> list[KeptRow]:
        changed = []
        for key, amounts in self._usage.counted().items():
            if (kept := before.get(key)) is not None:
                amounts = added(kept.amounts, amounts)
            row = KeptRow(*key, amounts)
            if self._saved.get(key) != row:
                changed.append(row)
        return changed

    async def others(self) -> list[KeptRow]:
        """The usage not counted here. Raises UsageStoreError."""
        before = await self._what_was_before()
        return [*await self._store.read(own=False), *before.values()]

    async def stop(self, *, taken: bool = False) -> None:
        """``taken``: another process continues the run, and has all of it."""
        if self._task is not None:
            self._task.cancel()
        if not taken:
            await self.save()
        self._store.close()
