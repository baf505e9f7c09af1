"""The folder that one gateway keeps batches in: its lock, its files.

    lock             held by the one gateway that uses the folder
    batches.sqlite   the rows and their progress (``database``)
    files/ID         uploads, their parts, answers

A file is synced before a row refers to it, and a row before anybody is told. A file without a row
is left over from a crash, and is removed at the next start.
"""

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from starlette.responses import FileResponse, Response

from hetero_gateway.errors import ConfigError
from hetero_gateway.serve.batches.storage import MEDIA_TYPE


class FolderLock:
    """The lock of one folder; released with the process, however that ends."""

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


class FileSink:
    """A file written as data arrives."""

    def __init__(self, folder: "Folder", name: str) -> None:
        self._folder = folder
        self._name = name
        self._file: BinaryIO | None = folder.path(name).open("xb", buffering=0)

    def write(self, data: bytes) -> None:
        assert self._file is not None
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def finish(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            self._folder.sync_names()

    def drop(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._folder.unlink(self._name)


class Folder:
    """The folder's files."""

    def __init__(self, directory: Path) -> None:
        self._files = directory / "files"

    def path(self, name: str) -> Path:
        """For a name from a row: clients never choose it."""
        return self._files / name

    def create(self, name: str) -> FileSink:
        return FileSink(self, name)

    def open(self, name: str) -> BinaryIO:
        return self.path(name).open("rb")

    def response(self, name: str, size: int) -> Response:
        return FileResponse(self.path(name), media_type=MEDIA_TYPE)

    def sync_names(self) -> None:
        """Sync the directory: created and renamed files survive a crash."""
        folder = os.open(self._files, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def unlink(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def sweep(self, known: set[str]) -> int:
        stray = [each for each in self._files.iterdir() if each.name not in known]
        for each in stray:
            each.unlink(missing_ok=True)
        return len(stray)
