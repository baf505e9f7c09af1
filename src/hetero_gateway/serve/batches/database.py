"""The rows of batches, and the SQLite database of one gateway's folder (write-ahead log)."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetero_gateway.errors import ConfigError

_VERSION = 1
_BUSY_S = 30.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
    filename TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS files_of ON files (owner, seq);
CREATE TABLE IF NOT EXISTS uploads (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, filename TEXT NOT NULL, bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, status TEXT NOT NULL, file_id TEXT
);
CREATE TABLE IF NOT EXISTS parts (
    id TEXT PRIMARY KEY, upload_id TEXT NOT NULL, bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS parts_of ON parts (upload_id);
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
    status TEXT NOT NULL, outcome TEXT, input_file_id TEXT NOT NULL, endpoint TEXT,
    "window" TEXT NOT NULL, metadata TEXT NOT NULL, created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL, in_progress_at INTEGER, finalizing_at INTEGER,
    cancelling_at INTEGER, ended_at INTEGER,
    output_file_id TEXT NOT NULL, error_file_id TEXT NOT NULL,
    output_bytes INTEGER NOT NULL DEFAULT 0, error_bytes INTEGER NOT NULL DEFAULT 0,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, repeated INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0, output_tokens INTEGER NOT NULL DEFAULT 0,
    problems TEXT NOT NULL DEFAULT '[]'
);
CREATE INDEX IF NOT EXISTS batches_of ON batches (owner, seq);
CREATE TABLE IF NOT EXISTS lines (
    batch INTEGER NOT NULL, number INTEGER NOT NULL, "offset" INTEGER NOT NULL,
    size INTEGER NOT NULL, model TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL, prefix INTEGER, custom BLOB NOT NULL,
    state INTEGER NOT NULL DEFAULT 0, repeats INTEGER NOT NULL DEFAULT 0, position INTEGER,
    PRIMARY KEY (batch, number)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS lines_next ON lines (batch, state, model, position);
"""


class Database:
    """One connection, for one thread at a time.

    Raises:
        ConfigError: the file is not a database of ours.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "batches.sqlite"
        try:
            self._db = sqlite3.connect(
                path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA temp_store=FILE")
            self._db.execute("PRAGMA cache_size=-4096")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version > _VERSION:
                raise ConfigError(
                    f"batches.directory: {path} was written by a newer version of the gateway"
                )
            if version < _VERSION:
                self._db.executescript(
                    f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version={_VERSION}; COMMIT;"
                )
        except sqlite3.Error as error:
            raise ConfigError(f"batches.directory: {path}: {error}") from error
        os.chmod(path, 0o600)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes inside, or none; synced at the end."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # A full disk may have ended the transaction already.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def run(self, sql: str, *values: Any) -> sqlite3.Cursor:
        return self._db.execute(sql, values)

    def run_many(self, sql: str, rows: Any) -> None:
        self._db.executemany(sql, rows)

    def row(self, sql: str, *values: Any) -> sqlite3.Row | None:
        found: sqlite3.Row | None = self._db.execute(sql, values).fetchone()
        return found

    def rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        return self._db.execute(sql, values).fetchall()

    def number(self, sql: str, *values: Any) -> int:
        """One integer; 0 for NULL."""
        return int(self._db.execute(sql, values).fetchone()[0] or 0)

    def now_s(self) -> float:
        return time.time()
