"""Where a gateway's batches are: the storage that the service opens, and waits for."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hetero_gateway.files.batches_config import BatchesConfig
from hetero_gateway.serve.batches.database import Database
from hetero_gateway.serve.batches.folder import Folder, FolderLock, make_folder
from hetero_gateway.serve.batches.folder_ledger import FolderLedger
from hetero_gateway.serve.batches.ledger import Batch, Ledger
from hetero_gateway.serve.batches.runner import InThread, Runner
from hetero_gateway.serve.batches.storage import BatchRows, Blobs


class WorkSharing(Protocol):
    """A gateway's part in shared work (``sharing``)."""

    async def renew(self) -> None: ...
    async def run(self) -> None: ...
    def close(self) -> None: ...


class BatchStore(Protocol):
    """Storage of batches.

    ``is_here``: on this machine; ``waits_for``: a text on what ``take`` waits for.
    """

    blobs: Blobs
    is_here: bool
    waits_for: str

    def take(self) -> bool:
        """Begin to use it; False: not now. It may take seconds. Raises ConfigError."""

    def release(self) -> None:
        """It is no longer used."""

    def rows(self) -> BatchRows:
        """A connection of its own, for a thread. Raises ConfigError, OSError."""

    def ledger(self, rows: BatchRows) -> Ledger: ...

    def share(
        self,
        ledger: Ledger,
        call: InThread,
        runner: Runner,
        look_at: Callable[[Batch], None],
    ) -> WorkSharing | None:
        """The shared work of several gateways; None: it is not shared."""


class FolderStore:
    """A folder that one gateway uses at a time.

    Raises:
        ConfigError: it cannot be used.
    """

    def __init__(self, directory: Path, config: BatchesConfig) -> None:
        make_folder(directory)
        self._directory = directory
        self._config = config
        self._lock = FolderLock(directory)
        self._folder = Folder(directory)
        self.blobs: Blobs = self._folder
        self.is_here = True
        self.waits_for = f"another gateway has {directory}"

    def take(self) -> bool:
        return self._lock.take()

    def release(self) -> None:
        self._lock.release()

    def rows(self) -> Database:
        return Database(self._directory)

    def ledger(self, rows: BatchRows) -> FolderLedger:
        return FolderLedger(rows, self._folder, self._config)

    def share(self, *_: object) -> None:
        return None


def store_of(config: BatchesConfig, base_dir: Path) -> BatchStore:
    """The storage that a configuration names. Raises ConfigError."""
    if config.directory is not None:
        return FolderStore(base_dir / config.directory, config)
    # Its libraries are loaded with it.
    from hetero_gateway.serve.batches.shared_store import SharedBatchStore

    return SharedBatchStore(config)
