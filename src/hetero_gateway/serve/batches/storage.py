"""The storage of batches, behind two interfaces: rows, and bytes under a name.

For one gateway these are SQLite and files in a folder (``database``, ``folder``); for several that
share the work, PostgreSQL and S3-compatible storage (``postgres``, ``objects``). The meaning of
rows is up to ``ledger`` and ``files``, whose SQL works in both databases.
"""

import errno
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, Protocol

from starlette.responses import Response

MEDIA_TYPE = "application/octet-stream"


class StorageUnavailable(OSError):
    """The storage is not reachable now: the operation was not done, and may be retried."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EIO, message)


class BatchRows(Protocol):
    """One connection to a database, for one thread at a time.

    ``?`` are placeholders for values; a row has its columns by number and by name. Of several
    connections one at a time is in a transaction.
    """

    def transaction(self) -> AbstractContextManager[None]:
        """All changes inside, or none; durable at the end."""

    def run(self, sql: str, *values: Any) -> Any:
        """A cursor: it can be iterated, and has ``rowcount``."""

    def run_many(self, sql: str, rows: Iterable[Iterable[Any]]) -> None: ...

    def row(self, sql: str, *values: Any) -> Any: ...

    def rows(self, sql: str, *values: Any) -> list[Any]: ...

    def number(self, sql: str, *values: Any) -> int:
        """One integer; 0 for NULL."""

    def now_s(self) -> float:
        """Unix time by the database's clock."""

    def close(self) -> None: ...


class BlobSink(Protocol):
    """Bytes being received."""

    def write(self, data: bytes) -> None: ...

    def finish(self) -> None:
        """Make them durable."""

    def drop(self) -> None:
        """Discard them; may also be called after ``finish``."""


class Blobs(Protocol):
    """Bytes under a name from a row: clients never choose it. All methods raise OSError."""

    def create(self, name: str) -> BlobSink: ...

    def open(self, name: str) -> BinaryIO:
        """A seekable file: on this machine, or a copy that is removed when closed."""

    def response(self, name: str, size: int) -> Response:
        """The response that sends it to a client. ``size``: its bytes."""

    def unlink(self, name: str) -> None:
        """Remove it; it may be gone already."""

    def sweep(self, known: set[str]) -> int:
        """Remove contents without a row; returns how many. Only at a start."""
