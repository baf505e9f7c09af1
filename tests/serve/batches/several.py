"""Several gateways' batches in memory: SQLite in place of PostgreSQL, a dict in place of S3."""

import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from starlette.responses import Response

from hetero_gateway.files.batches_config import BatchesConfig
from hetero_gateway.serve.batches.database import Database
from hetero_gateway.serve.batches.shared_ledger import SHARED_SCHEMA, SharedLedger, gateway_name
from hetero_gateway.serve.batches.sharing import SharedWork


class MemoryBlobs:
    """Bytes by name; what is begun and not finished is nowhere."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def create(self, name: str) -> "MemorySink":
        return MemorySink(self, name)

    def open(self, name: str) -> BinaryIO:
        file: BinaryIO = tempfile.TemporaryFile()
        file.write(self.kept[name])
        file.seek(0)
        return file

    def response(self, name: str, size: int) -> Response:
        return Response(self.kept[name])

    def unlink(self, name: str) -> None:
        self.kept.pop(name, None)

    def sweep(self, known: set[str]) -> int:
        return 0


class MemorySink:
    def __init__(self, blobs: MemoryBlobs, name: str) -> None:
        self._blobs, self._name, self._data = blobs, name, b""

    def write(self, data: bytes) -> None:
        self._data += data

    def finish(self) -> None:
        self._blobs.kept[self._name] = self._data

    def drop(self) -> None:
        self._blobs.unlink(self._name)


class MemoryStore:
    """What ``SharedBatchStore`` is, for one of several gateways."""

    is_here = True
    waits_for = ""

    def __init__(self, directory: Path, blobs: MemoryBlobs, config: BatchesConfig) -> None:
        self._directory, self.blobs, self._config = directory, blobs, config
        self.name = gateway_name()

    def take(self) -> bool:
        return True

    def release(self) -> None:
        pass

    def rows(self) -> Database:
        return Database(self._directory)

    def ledger(self, rows: Any) -> SharedLedger:
        return SharedLedger(rows, self.blobs, self._config, self.name)

    def share(self, *of: Any) -> SharedWork:
        return SharedWork(self.rows(), self.name, *of)


def make_tables(directory: Path) -> None:
    database = Database(directory)
    database._db.executescript(SHARED_SCHEMA)
    database.close()
