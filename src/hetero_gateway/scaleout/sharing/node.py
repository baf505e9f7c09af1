"""One node of a Redis or Valkey, with a time limit, following moved keys.

Nothing waits for it: there are no retries, one timeout for each piece of work, and a new connection
after any failure.
"""

import asyncio
import os
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.scheduler_config import SchedulerConfig
from hetero_gateway.files.secrets import password
from hetero_gateway.scaleout.sharing.redis import (
    RedisConnection,
    Reply,
    ReplyError,
    ServerError,
    connect,
    login,
)

T = TypeVar("T")

_DEFAULT_PORT = 6379
_MOST_MOVES = 3


class StoreError(Exception):
    """The store does not answer, or not as it should. The text holds no secret."""


class RedisNode:
    """The node that has a group's keys.

    Args:
        config: ``shared`` is set.
        base_dir: ``ca_file`` is relative to it.
        flattens: see ``ReplyReader``.

    Raises:
        ConfigError: the password is missing, or the certificates.
    """

    def __init__(self, config: SchedulerConfig, base_dir: Path, *, flattens: bool = False) -> None:
        assert config.shared is not None
        sharing = config.sharing
        parts = urlsplit(config.shared)
        self._home = self._address = (parts.hostname or "localhost", parts.port or _DEFAULT_PORT)
        self._login = login(
            parts.username,
            password(sharing.password_env, "scheduler.sharing.password_env"),
            int(parts.path.strip("/") or 0),
        )
        self._context: ssl.SSLContext | None = None
        if parts.scheme in ("rediss", "valkeys"):
            self._context = _context(
                None if sharing.ca_file is None else base_dir / sharing.ca_file
            )
        self._timeout_s = sharing.timeout_s
        self._flattens = flattens
        self._connection: RedisConnection | None = None

    async def connect(self) -> RedisConnection:
        """A connection of the caller's own. Raises OSError, ReplyError, PermissionError."""
        return await connect(self._address, self._login, self._context, flattens=self._flattens)

    async def in_time(self, work: Callable[[RedisConnection], Coroutine[Any, Any, T]]) -> T:
        """Do this within the time limit, on the right node; else drop the connection:
        StoreError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                for _ in range(_MOST_MOVES):
                    if self._connection is None:
                        self._connection = await self.connect()
                    try:
                        return await work(self._connection)
                    except _Moved as moved:
                        # An empty host means the one that was asked.
                        self._address = (moved.host or self._address[0], moved.port)
                        self.drop()
            raise StoreError(f"{self._named()}: it redirects from node to node")
        except BaseException as error:
            # Also if cancelled in the middle of an answer: nobody may read the rest of it.
            self.drop()
            self._address = self._home  # even if it was moved
            if isinstance(error, TimeoutError | OSError | ReplyError):
                raise self.failed(error) from error
            raise

    def failed(self, error: Exception) -> StoreError:
        """A failure, with the address that the configuration names."""
        return StoreError(f"{self._named()}: {in_words(error)}")

    def _named(self) -> str:
        return f"{self._home[0]}:{self._home[1]}"

    def drop(self) -> None:
        """Close its connection; the next work opens another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class _Moved(Exception):
    """The slot is on another node. ``host``: "": the one that was asked."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"{host}:{port}")
        self.host = host
        self.port = port


def check(reply: Reply) -> None:
    """Raises StoreError, _Moved: the reply is an error."""
    if not isinstance(reply, ServerError):
        return
    if reply.code == "MOVED":
        host, _, port = reply.text.partition(" ")[2].rpartition(":")
        if port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 2**16:
            raise _Moved(host, int(port[:6]))
    raise StoreError(str(reply))


def _context(ca_file: Path | None) -> ssl.SSLContext:
    """Raises ConfigError."""
    if ca_file is not None and not ca_file.is_file():
        raise ConfigError(f"scheduler.sharing.ca_file: {ca_file} is not there")
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"scheduler.sharing.ca_file: {ca_file}: {error}") from error


def in_words(error: Exception) -> str:
    """What a failure was, for people."""
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)  # asyncio's own text repeats the address
    return str(getattr(error, "strerror", None) or error or type(error).__name__)[:200]
