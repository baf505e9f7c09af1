"""The rows of batches in PostgreSQL, for gateways that share them.

They are in a schema of their own, `hetero_gateway_batches`, which the first gateway creates. The
SQL is SQLite's as far as both understand it (``ledger``, ``files``).
"""

import errno
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

from hetero_gateway.errors import ConfigError
from hetero_gateway.serve.batches.database import SCHEMA
from hetero_gateway.serve.batches.shared_ledger import SHARED_SCHEMA
from hetero_gateway.serve.batches.storage import StorageUnavailable

_log = logging.getLogger(__name__)

_VERSION = 1
_NAMESPACE = "hetero_gateway_batches"
# Writers hold this lock: transactions run one after the other, as in SQLite.
_LOCK = 0x68672D62
_CONNECT_S = 5
# How long a gateway that stops in the middle of a transaction may block the others.
_IDLE_S, _STATEMENT_S = 10, 60
_OPTIONS = (
    f"-c search_path={_NAMESPACE} -c idle_in_transaction_session_timeout={_IDLE_S}s"
    f" -c statement_timeout={_STATEMENT_S}s -c timezone=UTC"
)
_DIALECT = (
    ("INTEGER PRIMARY KEY AUTOINCREMENT", "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"),
    ("INTEGER", "BIGINT"),
    ("BLOB", "BYTEA"),
    (" WITHOUT ROWID", ""),
)


class NamedRow(tuple[Any, ...]):
    """Its columns by number and by name."""

    names: dict[str, int]

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self.names[key] if isinstance(key, str) else key)


def _row_factory(cursor: psycopg.Cursor[Any]) -> Any:
    names = {each.name: i for i, each in enumerate(cursor.description or ())}
    kind = type("NamedRow", (NamedRow,), {"names": names})
    return kind


class PostgresDatabase:
    """One connection, reopened after it was lost.

    Args:
        url: without a password. password: None: as libpq finds one.

    Every query may raise StorageUnavailable.
    """

    def __init__(self, url: str, password: str | None) -> None:
        self._url = url
        self._password = password
        self._db: psycopg.Connection[Any] | None = None
        self._in_transaction = False

    def _connected(self) -> psycopg.Connection[Any]:
        if self._db is None or self._db.closed:
            if self._in_transaction:
                raise psycopg.OperationalError("the connection was lost")
            more: dict[str, Any] = {} if self._password is None else {"password": self._password}
            self._db = psycopg.connect(
                self._url,
                autocommit=True,
                connect_timeout=_CONNECT_S,
                application_name="hetero-gateway batches",
                options=_OPTIONS,
                row_factory=_row_factory,
                # Prepared statements do not work behind a pooler.
                prepare_threshold=None,
                keepalives_idle=10,
                keepalives_interval=5,
                keepalives_count=3,
                **more,
            )
        return self._db

    def prepare(self) -> None:
        """Create what is missing. Raises ConfigError: the schema is from a newer gateway."""
        with self._in_words():
            db = self._connected()
            with db.transaction():
                db.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
                # A user without the right to create a schema may have been given one.
                there = "SELECT 1 FROM pg_namespace WHERE nspname = %s"
                if db.execute(there, (_NAMESPACE,)).fetchone() is None:
                    db.execute(f"CREATE SCHEMA {_NAMESPACE}")
                db.execute("CREATE TABLE IF NOT EXISTS version (version BIGINT NOT NULL)")
                row = db.execute("SELECT MAX(version) FROM version").fetchone()
                version = 0 if row is None or row[0] is None else int(row[0])
                if version == 0:
                    for statement in _statements(SCHEMA + SHARED_SCHEMA):
                        db.execute(statement.encode())
                    db.execute("INSERT INTO version VALUES (%s)", (_VERSION,))
        if version > _VERSION:
            raise ConfigError("batches.database: it was written by a newer version of the gateway")

    def close(self) -> None:
        if self._db is not None:
            self._db.close()

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            if isinstance(error, psycopg.errors.DiskFull):
                raise OSError(errno.ENOSPC, "PostgreSQL's disk is full") from error
            if isinstance(error, psycopg.DataError | psycopg.ProgrammingError):
                _log.error("PostgreSQL: %s", _first_line(error))
            raise StorageUnavailable(f"PostgreSQL: {_first_line(error)}") from error

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._in_words():
            db = self._connected()
            self._in_transaction = True
            try:
                with db.transaction():
                    db.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
                    yield
            except psycopg.OperationalError:
                # The connection may be broken.
                db.close()
                raise
            finally:
                self._in_transaction = False

    def run(self, sql: str, *values: Any) -> psycopg.Cursor[Any]:
        with self._in_words():
            return self._connected().execute(_translated(sql), values)

    def run_many(self, sql: str, rows: Iterable[Iterable[Any]]) -> None:
        several: Sequence[Any] = [tuple(row) for row in rows]
        if several:
            with self._in_words(), self._connected().cursor() as cursor:
                cursor.executemany(_translated(sql), several)

    def row(self, sql: str, *values: Any) -> Any:
        return self.run(sql, *values).fetchone()

    def rows(self, sql: str, *values: Any) -> list[Any]:
        return self.run(sql, *values).fetchall()

    def number(self, sql: str, *values: Any) -> int:
        return int(self.row(sql, *values)[0] or 0)

    def now_s(self) -> float:
        return float(self.row("SELECT EXTRACT(EPOCH FROM clock_timestamp())")[0])


def _translated(sql: str) -> bytes:
    return sql.replace("?", "%s").encode()


def _statements(schema: str) -> Iterator[str]:
    for ours, theirs in _DIALECT:
        schema = schema.replace(ours, theirs)
    return (each for each in schema.split(";") if each.strip())


def _first_line(error: Exception) -> str:
    """Of an error of PostgreSQL or its library: neither quotes a password."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
