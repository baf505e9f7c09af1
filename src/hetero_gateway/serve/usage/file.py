"""Clients' usage in an SQLite file: one row per run, day, client and model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hetero_gateway.gateway.admission.usage import MOST_DAYS, KeptRow, UsageStoreError

_T = TypeVar("_T")
_VERSION = 1
_TABLE = """
    CREATE TABLE IF NOT EXISTS usage (
        day INTEGER, client TEXT, model TEXT, run TEXT,
        requests INTEGER, input_tokens INTEGER, cached_tokens INTEGER, output_tokens INTEGER,
        PRIMARY KEY (day, client, model, run)
    ) WITHOUT ROWID
"""
_READ = """
    SELECT day, client, model,
           sum(requests), sum(input_tokens), sum(cached_tokens), sum(output_tokens)
    FROM usage WHERE (run = ?) = ? GROUP BY day, client, model
"""
# For another gateway's write in progress.
_TIMEOUT_S = 5.0


class UsageFile:
    """One file. It is created when there is something to store, readable by its owner only.

    Args:
        path: of the file; its folder must exist.
        run: identifies this run's rows.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._path = path
        self._run = run
        self._database: sqlite3.Connection | None = None

    async def save(self, rows: Sequence[KeptRow]) -> None:
        await asyncio.to_thread(self._with, lambda database: self._save(database, rows))

    async def read(self, *, own: bool) -> list[KeptRow]:
        if self._database is None and not self._path.exists():
            return []
        return await asyncio.to_thread(self._with, lambda database: self._read(database, own))

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _with(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            if self._database is None:
                self._database = self._open()
            return work(self._database)
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise UsageStoreError(f"clients.usage_file: {self._path}: {error}") from error

    def _open(self) -> sqlite3.Connection:
        # Usage is private.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        database = sqlite3.connect(self._path, timeout=_TIMEOUT_S, check_same_thread=False)
        try:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version not in (0, _VERSION):
                raise sqlite3.DatabaseError(f"it has format {version}, and this gateway {_VERSION}")
            with database:
                database.execute(_TABLE)
                database.execute(f"PRAGMA user_version = {_VERSION}")
        except sqlite3.Error:
            database.close()
            raise
        return database

    def _save(self, database: sqlite3.Connection, rows: Sequence[KeptRow]) -> None:
        with database:
            database.executemany(
                "INSERT OR REPLACE INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(row.day, row.client, row.model, self._run, *row.amounts) for row in rows],
            )
            newest = max(row.day for row in rows)
            database.execute("DELETE FROM usage WHERE day <= ?", (newest - MOST_DAYS,))

    def _read(self, database: sqlite3.Connection, own: bool) -> list[KeptRow]:
        found = database.execute(_READ, (self._run, own))
        return [KeptRow(day, client, model, tuple(rest)) for day, client, model, *rest in found]
