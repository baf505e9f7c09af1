"""What batches are kept in, behind two interfaces: rows, and bytes under a name.

Of one gateway these are SQLite and files in a folder (``database``, ``folder``); of several that
share the work, PostgreSQL and S3-compatible storage (``postgres``, ``objects``). What rows mean is
``ledger``'s and ``files``', whose SQL both databases take.
"""

import errno
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, Protocol

from starlette.responses import Response

MEDIA_TYPE = "application/octet-stream"


class StorageUnavailable(OSError):
    """The storage cannot be reached now: what was begun is not done, and may be tried again."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EIO, message)


class BatchRows(Protocol):
    """One connection to a database, for one thread at a time.

    Values stand for ``?``; a row has its columns by number and by name. Of several connections one
    at a time is in a transaction.
    """

    def transaction(self) -> AbstractContextManager[None]:
        """All that is changed inside, or nothing; at the end it stays."""

    def run(self, sql: str, *values: Any) -> Any:
        """A cursor: it can be iterated, and has ``rowcount``."""

    def run_many(self, sql: str, rows: Iterable[Iterable[Any]]) -> None: ...

    def row(self, sql: str, *values: Any) -> Any: ...

    def rows(self, sql: str, *values: Any) -> list[Any]: ...

    def number(self, sql: str, *values: Any) -> int:
        """One whole number; 0 where it is NULL."""

    def now_s(self) -> float:
        """Unix time by the database's clock."""

    def close(self) -> None: ...


class BlobSink(Protocol):
    """Bytes on their way in."""

    def write(self, data: bytes) -> None: ...

    def finish(self) -> None:
        """They are all here, whatever happens from now on."""

    def drop(self) -> None:
        """They are not wanted; may be called after ``finish``, too."""


class Blobs(Protocol):
    """Bytes under a name that a row has: none is of a client's making. All raise OSError."""

    def create(self, name: str) -> BlobSink: ...

    def open(self, name: str) -> BinaryIO:
        """To read anywhere in it: a file of this machine, or a copy that goes when it is closed."""

    def response(self, name: str, size: int) -> Response:
        """That sends it to a client. ``size``: its bytes."""

    def unlink(self, name: str) -> None:
        """It may be gone already."""

    def sweep(self, known: set[str]) -> int:
        """Remove what no row knows; returns how many. For a start alone."""
