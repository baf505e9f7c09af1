"""The store of replicas' messages for each other: Redis or Valkey.

    {GROUP}:replicas   a set of names; every replica adds itself at each turn
    {GROUP}:NAME       a replica's latest message; its time to live is the lease
    {GROUP}:news       a channel: a replica's name and its news, before the next message

Nothing depends on the channel. If news are lost, or forbidden by an access list, the view is older
by an exchange.

The braces are Redis Cluster's: all keys of a group lie in one slot, so on one node, and one
connection to that node is enough. Another node answers MOVED, which is followed.

Nothing waits for the store (``node.py``), and ``Sharing`` decides when to try again. Its replies
are not trusted: names are checked, sizes and numbers are bounded (``redis.py``).

Every replica adds itself to the set of names at each turn, so that any or all of it may be removed:
a living replica is back a turn later. Each turn looks at ``_MOST_REPLICAS`` names drawn at random,
and removes those that have no message or are not names. Living ones are remembered, so that they
are read whatever else the set holds.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from hetero_gateway.core.sharing.message import MOST_BYTES
from hetero_gateway.files.scheduler_config import SchedulerConfig
from hetero_gateway.scaleout.sharing.node import RedisNode, StoreError, check
from hetero_gateway.scaleout.sharing.redis import RedisConnection, Reply, ReplyError, ServerError

_log = logging.getLogger(__name__)

_NAME_BYTES = 16
_NAME = re.compile(rb"[0-9a-f]{16}")
# More than anybody runs, and few enough to be read at each turn.
_MOST_REPLICAS = 128
# A message of 580 instances. A longer one is read in a second step, for so many replicas.
_SHORT_BYTES = 1 << 16
_MOST_LONG = 16
# Of a turn's replies: all short messages, and as much for names.
_MOST_STEP_BYTES = 2 * _MOST_REPLICAS * _SHORT_BYTES
# Maximum share of a core for reading news.
_MOST_SHARE = 1 / 20
_LEAST_PAUSE_S = 0.001


class Store(Protocol):
    """The interface that ``Sharing`` needs of a store."""

    async def exchange(self, value: bytes | None) -> Mapping[str, bytes]:
        """Store a message (None: keep the last one) and read those of the others.

        Raises StoreError.
        """

    async def tell(self, news: bytes) -> None:
        """Send this to the listeners now. Raises StoreError."""

    async def listen(self, hear: Callable[[str, bytes], None]) -> None:
        """Receive the others' news, until that fails. Raises StoreError."""

    async def leave(self) -> None:
        """Remove our message, if that is quick, and close."""


class RedisStore:
    """One replica's place in a Redis.

    Args:
        config: ``shared`` is set.
        base_dir: ``ca_file`` is relative to it.
        name: of this replica: 16 hexadecimal digits.

    Raises:
        ConfigError: the password is missing, or the certificates.
    """

    def __init__(self, config: SchedulerConfig, base_dir: Path, name: str) -> None:
        sharing = config.sharing
        self._node = RedisNode(config, base_dir)
        self._name = name.encode()
        self._ttl_s = sharing.ttl_s
        self._timeout_s = sharing.timeout_s
        tag = f"{{{sharing.group}}}"
        self._index = f"{tag}:replicas".encode()
        self._prefix = f"{tag}:".encode()
        self._channel = f"{tag}:news".encode()
        self._may_tell = True
        self._known: tuple[bytes, ...] = ()  # those with a message at the last turn
        self._begins_anew = False  # the set of names could not be read

    async def exchange(self, value: bytes | None) -> Mapping[str, bytes]:
        return await self._node.in_time(lambda connection: self._turn(connection, value))

    async def tell(self, news: bytes) -> None:
        if self._may_tell:
            await self._node.in_time(lambda to: self._publish(to, self._name + news))

    async def _publish(self, connection: RedisConnection, news: bytes) -> None:
        (reply,) = await connection.ask([(b"PUBLISH", self._channel, news)])
        if isinstance(reply, ServerError) and reply.code == "NOPERM":
            self._may_tell = False
            _log.warning(
                "scheduler.shared: this user may not publish on %s: other gateways learn of "
                "requests late; grant it the channel",
                self._channel.decode(),
            )
            return
        check(reply)

    async def listen(self, hear: Callable[[str, bytes], None]) -> None:
        connection: RedisConnection | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                # A connection of its own, since one that listens can do nothing else.
                connection = await self._node.connect()
            connection.send([(b"SUBSCRIBE", self._channel)])
            alive = True
            while True:
                try:
                    async with asyncio.timeout(self._ttl_s):
                        replies = await connection.receive()
                except TimeoutError:
                    # A silently cut connection stays silent.
                    if not alive:
                        raise
                    alive = False
                    connection.send([(b"PING",)])
                    continue
                alive = True
                begun_s = time.process_time()
                for reply in replies:
                    self._hear_reply(reply, hear)
                # In a flood, the store may keep or cut off the rest.
                pause_s = (time.process_time() - begun_s) / _MOST_SHARE
                if pause_s > _LEAST_PAUSE_S:
                    await asyncio.sleep(pause_s)
        except (TimeoutError, OSError, ReplyError) as error:
            raise self._node.failed(error) from error
        finally:
            if connection is not None:
                connection.close()

    def _hear_reply(self, reply: Reply, hear: Callable[[str, bytes], None]) -> None:
        """Raises StoreError: it refuses."""
        if isinstance(reply, ServerError):
            raise StoreError(str(reply))
        if not isinstance(reply, list) or len(reply) != 3 or reply[0] != b"message":
            return
        news = reply[2]
        if isinstance(news, bytes):
            name, data = news[:_NAME_BYTES], news[_NAME_BYTES:]
            if name != self._name and _NAME.fullmatch(name):
                hear(name.decode(), data)

    async def _turn(self, connection: RedisConnection, value: bytes | None) -> Mapping[str, bytes]:
        known = self._known
        commands: list[tuple[bytes, ...]] = []
        if self._begins_anew:
            commands.append((b"DEL", self._index))
        # Our message is there before our name is: a name without a message belongs to nobody.
        if value is not None:
            lease_ms = b"%d" % round(1000 * self._ttl_s)
            commands.append((b"SET", self._prefix + self._name, value, b"PX", lease_ms))
        commands.append((b"SADD", self._index, self._name))
        commands.append((b"SRANDMEMBER", self._index, b"%d" % _MOST_REPLICAS))
        commands += self._reads(known, _SHORT_BYTES)
        try:
            replies = await connection.ask(commands, _MOST_STEP_BYTES)
        except ReplyError:
            self._begins_anew = True  # there may be oversized names in it
            raise
        told = len(replies) - len(known)
        names = replies[told - 1]
        self._begins_anew = isinstance(names, ServerError) and names.code == "WRONGTYPE"
        for reply in replies[:told]:
            check(reply)
        drawn = {n for n in names if isinstance(n, bytes)} if isinstance(names, list) else set()
        values = _values(known, replies[told:])
        drawn -= {self._name, *values}
        fresh = [n for n in drawn if _NAME.fullmatch(n)][: _MOST_REPLICAS - len(values)]
        if fresh:
            got = await connection.ask([*self._reads(fresh, _SHORT_BYTES)], _MOST_STEP_BYTES)
            values |= _values(fresh, got)
        await self._read_long(connection, values)
        self._known = tuple(values)
        if dead := [n for n in drawn if n not in values and (n in fresh or not _NAME.fullmatch(n))]:
            # A replica whose message is just arriving is back in the set with its next turn.
            await connection.ask([(b"SREM", self._index, *dead)])
        return {name.decode(): data for name, data in values.items()}

    def _reads(self, names: Iterable[bytes], most_bytes: int) -> Iterable[tuple[bytes, ...]]:
        # Not GET: a value larger than any message is not worth reading whole.
        last = b"%d" % (most_bytes - 1)
        return ((b"GETRANGE", self._prefix + name, b"0", last) for name in names)

    async def _read_long(self, connection: RedisConnection, values: dict[bytes, bytes]) -> None:
        """Complete the messages read in part; those that are too many count as empty."""
        # Those known before come first.
        for number, name in enumerate([n for n, v in values.items() if len(v) == _SHORT_BYTES]):
            del values[name]
            if number < _MOST_LONG:
                got = await connection.ask([*self._reads([name], MOST_BYTES)], 2 * MOST_BYTES)
                values |= _values([name], got)

    async def leave(self) -> None:
        name = self._prefix + self._name
        with contextlib.suppress(StoreError):
            await self._node.in_time(
                lambda connection: connection.ask(
                    [(b"DEL", name), (b"SREM", self._index, self._name)]
                )
            )
        self._node.drop()


def _values(names: Iterable[bytes], replies: Iterable[Reply]) -> dict[bytes, bytes]:
    """Those that have a message."""
    found = zip(names, replies, strict=True)
    return {name: data for name, data in found if isinstance(data, bytes) and data}
