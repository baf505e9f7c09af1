"""The folder that batches are kept in: its lock, its SQLite database, its files.

    lock             held by the one gateway that uses the folder
    batches.sqlite   what there is, and how far it is (write-ahead log)
    files/ID         what was uploaded, parts of it, answers

What is in a file is synced before a row says so, and a row before anybody hears of it. A file that
no row knows is left of an end in between, and goes at the next start.
"""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetero_gateway.errors import ConfigError

_VERSION = 1
_BUSY_S = 30.0
_SCHEMA = """
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
    window TEXT NOT NULL, metadata TEXT NOT NULL, created_at INTEGER NOT NULL,
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
    batch INTEGER NOT NULL, number INTEGER NOT NULL, offset INTEGER NOT NULL,
    size INTEGER NOT NULL, model TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL, prefix INTEGER, custom BLOB NOT NULL,
    state INTEGER NOT NULL DEFAULT 0, repeats INTEGER NOT NULL DEFAULT 0, position INTEGER,
    PRIMARY KEY (batch, number)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS lines_next ON lines (batch, state, model, position);
"""


class FolderLock:
    """Of one folder; free again with the process, however that ends."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "lock"
        self._file: int | None = None

    def take(self) -> bool:
        """False: another gateway has it."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._file = file
        return True

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def make_folder(directory: Path) -> None:
    """Raises ConfigError: it cannot be used."""
    try:
        for each in (directory, directory / "files"):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(each, os.R_OK | os.W_OK | os.X_OK):
                raise ConfigError(f"batches.directory: {each} cannot be written")
    except OSError as error:
        raise ConfigError(f"batches.directory: {directory}: {error.strerror}") from error


class Database:
    """One connection, for one thread at a time.

    Raises:
        ConfigError: it is no database of ours.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
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
                raise ConfigError(f"batches.directory: {path} is of a newer version of the gateway")
            if version < _VERSION:
                self._db.executescript(
                    f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version={_VERSION}; COMMIT;"
                )
        except sqlite3.Error as error:
            raise ConfigError(f"batches.directory: {path}: {error}") from error
        os.chmod(path, 0o600)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is changed inside, or nothing; it is synced at the end."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # A full disk may have ended it already.
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
        """One whole number; 0 where it is NULL."""
        return int(self._db.execute(sql, values).fetchone()[0] or 0)

    # Files

    def path(self, file_id: str) -> Path:
        """Of an id that a row has: it is none of a client's making."""
        return self.directory / "files" / file_id

    def sync_names(self) -> None:
        """What was made or renamed among the files is there after any end."""
        folder = os.open(self.directory / "files", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def unlink(self, file_id: str) -> None:
        self.path(file_id).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Remove files that no row knows; returns how many. For the start alone."""
        known = {row[0] for row in self.rows("SELECT id FROM files UNION ALL SELECT id FROM parts")}
        for row in self.rows(
            "SELECT output_file_id, error_file_id FROM batches WHERE ended_at IS NULL"
        ):
            known.update(row)
        stray = [each for each in (self.directory / "files").iterdir() if each.name not in known]
        for each in stray:
            each.unlink(missing_ok=True)
        return len(stray)
