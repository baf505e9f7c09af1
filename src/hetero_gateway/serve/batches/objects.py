"""The files of batches in S3-compatible storage, under one prefix of a bucket.

An upload is collected on this machine, in an unnamed file, and sent to the store when it is whole;
reading uses such a copy as well. So the store never has an incomplete file.
"""

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import BinaryIO

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store
from starlette.responses import Response, StreamingResponse

from hetero_gateway.errors import ConfigError
from hetero_gateway.serve.batches.storage import MEDIA_TYPE, StorageUnavailable

_READ_BYTES = 1 << 20
# Parts of 5 MiB each, in memory.
_PARTS_AT_ONCE = 2
# An object without a row may be an upload in progress at another gateway.
_STRAY = timedelta(days=1)


class ObjectSink:
    """Goes to the store when it is whole."""

    def __init__(self, objects: "Objects", name: str) -> None:
        self._objects = objects
        self._name = name
        self._file: BinaryIO | None = tempfile.TemporaryFile()
        self._there = False

    def write(self, data: bytes) -> None:
        assert self._file is not None
        self._file.write(data)

    def finish(self) -> None:
        if self._file is not None:
            self._objects.put(self._name, self._file)
            self._there = True
            self._file.close()
            self._file = None

    def drop(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._there:
            self._objects.unlink(self._name)


class Objects:
    """A bucket, or a prefix of it. Keys and region are in the environment (AWS_*).

    Args:
        bucket: its name. prefix: "" or without a slash at its end.
        endpoint: of a provider other than AWS.

    Raises:
        ConfigError: such a store is impossible.
    """

    def __init__(self, bucket: str, prefix: str, endpoint: str | None) -> None:
        options: dict[str, str] = {}
        if endpoint is not None:
            options["endpoint"] = endpoint
        plain = endpoint is not None and endpoint.startswith("http://")
        try:
            self._store = S3Store(
                bucket,
                prefix=prefix or None,
                client_options={"allow_http": plain, "timeout": "60s"},
                retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=30)},
                **options,  # type: ignore[arg-type]
            )
        except BaseError as error:
            raise ConfigError(f"batches.storage: {_first_line(error)}") from error

    def put(self, name: str, file: BinaryIO) -> None:
        file.seek(0)
        with _in_words():
            obstore.put(self._store, name, file, max_concurrency=_PARTS_AT_ONCE)

    def create(self, name: str) -> ObjectSink:
        return ObjectSink(self, name)

    def open(self, name: str) -> BinaryIO:
        file: BinaryIO = tempfile.TemporaryFile()
        try:
            with _in_words():
                for data in obstore.get(self._store, name).stream(min_chunk_size=_READ_BYTES):
                    file.write(data)
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file

    def response(self, name: str, size: int) -> Response:
        async def data() -> AsyncIterator[bytes]:
            with _in_words():
                found = await obstore.get_async(self._store, name)
                async for each in found.stream(min_chunk_size=_READ_BYTES):
                    yield bytes(each)

        headers = {"content-length": str(size)}
        return StreamingResponse(data(), media_type=MEDIA_TYPE, headers=headers)

    def unlink(self, name: str) -> None:
        with _in_words():
            obstore.delete(self._store, name)

    def sweep(self, known: set[str]) -> int:
        old = datetime.now(UTC) - _STRAY
        swept = 0
        with _in_words():
            for chunk in obstore.list(self._store):
                stray = [
                    each["path"]
                    for each in chunk
                    if each["path"] not in known and each["last_modified"] < old
                ]
                for each in stray:
                    obstore.delete(self._store, each)
                swept += len(stray)
        return swept


@contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except BaseError as error:
        raise StorageUnavailable(f"S3: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """Of the store's error; it never contains the signed headers."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
