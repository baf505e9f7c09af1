"""Where replicas leave their messages for each other: Redis or Valkey.

    {GROUP}:replicas   a set of names; everybody adds itself at each turn
    {GROUP}:NAME       a replica's latest message; its time to live is the lease
    {GROUP}:news       a channel: a replica's name and its news, before the next message

Nothing depends on the channel. News that are lost, or that an access list forbids, are a view that
is older by an exchange.

The braces are Redis Cluster's: all keys of a group lie in one slot, so on one node, and one
connection to that node is enough. Another node answers MOVED, which is followed.

redis-py's defaults are made for programs that would rather wait than fail: three retries with
growing pauses, time-outs of seconds. Here nothing waits for the store; so there are no retries, one
time-out over each turn, and after any failure a new connection. ``Sharing`` decides when to try
again. What the store says is not believed: names are checked, sizes and numbers are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

from hetero_gateway.core.sharing.message import MOST_BYTES
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.scheduler_config import SchedulerConfig
from hetero_gateway.files.secrets import password

if TYPE_CHECKING:
    from redis.asyncio import Redis

_log = logging.getLogger(__name__)

T = TypeVar("T")

_NAME_BYTES = 16
_NAME = re.compile(rb"[0-9a-f]{16}")
_MOST_REPLICAS = 256
_DEFAULT_PORT = 6379
_MOST_MOVES = 3


class StoreError(Exception):
    """The store does not answer, or not as it should. The text holds no secret."""


class Store(Protocol):
    """What ``Sharing`` needs of a store."""

    async def exchange(self, value: bytes | None) -> Mapping[str, bytes]:
        """Leave a message (None: the last one holds) and read those of the others.

        Raises StoreError.
        """
        ...

    async def tell(self, news: bytes) -> None:
        """Have those who listen hear this now. Raises StoreError."""
        ...

    async def listen(self, hear: Callable[[str, bytes], None]) -> None:
        """Hear the others' news, until that fails. Raises StoreError."""
        ...

    async def leave(self) -> None:
        """Take our message away, if that is quickly done, and close."""
        ...


class RedisStore:
    """One replica's place in a Redis.

    Args:
        config: ``shared`` is set.
        base_dir: what ``ca_file`` is relative to.
        name: of this replica: 16 hexadecimal digits.

    Raises:
        ConfigError: the package is missing, or the password, or the certificates.
    """

    def __init__(self, config: SchedulerConfig, base_dir: Path, name: str) -> None:
        try:
            import redis.asyncio as redis
            from redis.exceptions import MovedError, NoPermissionError
        except ImportError as error:
            raise ConfigError(
                "scheduler.shared: needs the package redis: pip install hetero-gateway[redis]"
            ) from error
        assert config.shared is not None
        self._redis = redis
        self._moved = MovedError
        self._no_permission = NoPermissionError
        sharing = config.sharing
        parts = urlsplit(config.shared)
        self._address = (parts.hostname or "localhost", parts.port or _DEFAULT_PORT)
        self._name = name.encode()
        self._ttl_s = sharing.ttl_s
        self._timeout_s = sharing.timeout_s
        tag = f"{{{sharing.group}}}"
        self._index = f"{tag}:replicas"
        self._prefix = f"{tag}:".encode()
        self._channel = f"{tag}:news".encode()
        self._may_tell = True
        self._options: dict[str, Any] = {
            "db": int(parts.path.strip("/") or 0),
            "username": parts.username,
            "password": password(sharing.password_env, "scheduler.sharing.password_env"),
            "single_connection_client": False,
            "max_connections": 1,
            "socket_timeout": sharing.timeout_s,
            "socket_connect_timeout": sharing.timeout_s,
            "socket_keepalive": True,
            "retry": _no_retry(),
            "health_check_interval": 0,
            "protocol": 2,
        }
        if parts.scheme in ("rediss", "valkeys"):
            ca_file = None if sharing.ca_file is None else base_dir / sharing.ca_file
            if ca_file is not None and not ca_file.is_file():
                raise ConfigError(f"scheduler.sharing.ca_file: {ca_file} is not there")
            self._options |= {"ssl": True, "ssl_ca_certs": ca_file and str(ca_file)}
        self._client: Redis | None = None
        self._known: tuple[bytes, ...] = ()
        self._empty_since_s: dict[bytes, float] = {}

    async def exchange(self, value: bytes | None) -> Mapping[str, bytes]:
        return await self._in_time(lambda: self._turn(value))

    async def tell(self, news: bytes) -> None:
        if self._may_tell:
            await self._in_time(lambda: self._publish(self._name + news))

    async def _in_time(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do this in time, on the node that it is for; or drop the connection: StoreError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                for _ in range(_MOST_MOVES):
                    try:
                        return await work()
                    except self._redis.RedisError as error:
                        if not self._follow(error):
                            raise
                        await self._drop()
            raise StoreError("it is sent from node to node")
        except (TimeoutError, OSError, self._redis.RedisError, ValueError) as error:
            await self._drop()
            raise StoreError(_in_words(error)) from error
        except BaseException:
            # Cancelled in the middle of an answer: nobody may read the rest of it.
            await self._drop()
            raise

    def _connected(self) -> Redis:
        if self._client is None:
            host, port = self._address
            self._client = self._redis.Redis(host=host, port=port, **self._options)
        return self._client

    async def _publish(self, news: bytes) -> None:
        try:
            await self._connected().publish(self._channel, news)
        except self._no_permission:
            self._may_tell = False
            _log.warning(
                "scheduler.shared: this user may not publish on %s: others hear of requests late; "
                "grant it the channel",
                self._channel.decode(),
            )

    async def listen(self, hear: Callable[[str, bytes], None]) -> None:
        host, port = self._address
        # A connection of its own, since one that listens can do nothing else.
        client = self._redis.Redis(host=host, port=port, **self._options | {"socket_timeout": None})
        connection: Any = client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.connect()
                await connection.send_command("SUBSCRIBE", self._channel)
            alive = True
            while True:
                try:
                    async with asyncio.timeout(self._ttl_s):
                        told = await connection.read_response(disconnect_on_error=False)
                except TimeoutError:
                    # A connection that was cut in silence stays silent.
                    if not alive:
                        raise
                    alive = False
                    await connection.send_command("PING")
                    continue
                alive = True
                if told[0] == b"message":
                    name, data = told[2][:_NAME_BYTES], told[2][_NAME_BYTES:]
                    if name != self._name and _NAME.fullmatch(name):
                        hear(name.decode(), data)
        except (TimeoutError, OSError, self._redis.RedisError, ValueError) as error:
            raise StoreError(_in_words(error)) from error
        finally:
            with contextlib.suppress(Exception):
                await connection.disconnect(nowait=True)

    async def _turn(self, value: bytes | None) -> Mapping[str, bytes]:
        client = self._connected()
        pipe = client.pipeline(transaction=False)
        if value is not None:
            pipe.set(self._prefix + self._name, value, px=round(1000 * self._ttl_s))
        pipe.sadd(self._index, self._name)
        pipe.srandmember(self._index, _MOST_REPLICAS)
        known = self._known
        for name in known:
            # Not GET: what is larger than any message is not worth reading whole.
            pipe.getrange(self._prefix + name, 0, MOST_BYTES)
        answers = await pipe.execute()
        told = answers[1 if value is None else 2]
        there = {n for n in told if _NAME.fullmatch(n)} - {self._name}
        values = dict(zip(known, answers[len(answers) - len(known) :], strict=True))
        if fresh := there.difference(known):
            pipe = client.pipeline(transaction=False)
            for name in fresh:
                pipe.getrange(self._prefix + name, 0, MOST_BYTES)
            values |= zip(fresh, await pipe.execute(), strict=True)
        self._known = tuple(there)
        await self._tidy([name for name in there if not values[name]])
        return {name.decode(): values[name] for name in there if values[name]}

    async def _tidy(self, empty: list[bytes]) -> None:
        """Names whose message has been gone for two leases leave the set; who lives comes back."""
        now_s = time.monotonic()
        since_s = {name: self._empty_since_s.get(name, now_s) for name in empty}
        dead = [name for name in empty if now_s - since_s[name] > 2 * self._ttl_s]
        self._empty_since_s = since_s
        if dead and self._client is not None:
            await self._client.srem(self._index, *dead)

    def _follow(self, error: Exception) -> bool:
        """Whether the slot is on another node, which is asked from now on."""
        if not isinstance(error, self._moved):
            return False
        # An empty host means the one that was asked.
        self._address = (error.host or self._address[0], int(error.port))
        return True

    async def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            # A socket that is closed without a farewell: it takes no time.
            with contextlib.suppress(Exception):
                await client.connection_pool.disconnect()

    async def leave(self) -> None:
        with contextlib.suppress(TimeoutError, OSError, self._redis.RedisError):
            async with asyncio.timeout(self._timeout_s):
                pipe = self._connected().pipeline(transaction=False)
                pipe.delete(self._prefix + self._name)
                pipe.srem(self._index, self._name)
                await pipe.execute()
        await self._drop()


def _no_retry() -> Any:
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    return Retry(NoBackoff(), 0)


def _in_words(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    return f"{type(error).__name__}: {error}"[:200]
