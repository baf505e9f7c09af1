"""The gateways' shared log of placements: a stream of Redis or Valkey.

    {GROUP}:placements   a stream of entries (``core/sharing/placements``); each gateway appends,
                         and reads from where it stopped
    {GROUP}:names        the secret that keys of prompts begin with, if none is configured: the
                         first gateway's, which the others use too

Both expire ``AGE_S`` after a gateway last looked, and only the latest ``_MOST_ENTRIES`` entries of
the stream are kept: 64 MiB at most. Redis numbers entries by its own clock in milliseconds, so that
their age is known without any gateway's clock.

With the secret, a reader of this Redis can test whether a text that he guesses as a whole was sent;
it serves for nothing else. ``scheduler.prefix_key_env`` keeps it out of there.
"""

import re
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hetero_gateway.core.sharing.placements import ENTRIES, ENTRY_BYTES
from hetero_gateway.files.scheduler_config import SchedulerConfig
from hetero_gateway.scaleout.sharing.node import RedisNode, StoreError, check
from hetero_gateway.scaleout.sharing.redis import RedisConnection, Reply, ReplyError, ServerError

T = TypeVar("T")

# Older prompts are no longer in any engine's cache, or were sent again.
AGE_S = 3600
_MOST_ENTRIES = 1 << 14
# Entries read at a time: three values each.
_PAGE = 128
_MOST_PAGE_BYTES = 2 * _PAGE * ENTRY_BYTES
_SECRET = re.compile(rb"[0-9a-f]{64}")
_NUMBER = re.compile(rb"[0-9]{1,18}-[0-9]{1,18}")

Number = tuple[int, int]
NO_NUMBER: Number = (0, 0)


class Read(NamedTuple):
    """Args:
    entries: in the requested order.
    first, last: numbers of the first and the last of them; if none, where the reading began.
    more: there may be more.
    """

    entries: list[bytes]
    first: Number
    last: Number
    more: bool


class PlacementLog:
    """One gateway's access to it. All methods raise StoreError.

    Args:
        config: ``shared`` is set.
        base_dir: ``ca_file`` is relative to it.

    Raises:
        ConfigError: the password is missing, or the certificates.
    """

    def __init__(self, config: SchedulerConfig, base_dir: Path) -> None:
        self._node = RedisNode(config, base_dir, flattens=True)
        tag = f"{{{config.sharing.group}}}"
        self._stream = f"{tag}:placements".encode()
        self._names = f"{tag}:names".encode()
        self._spoilt = False  # there may be oversized entries: start again

    async def agree(self, secret: bytes) -> bytes:
        """The shared secret: this one, if nobody has stored one."""

        async def work(connection: RedisConnection) -> bytes:
            age = b"%d" % AGE_S
            own = secret.hex().encode()
            replies = await connection.ask(
                [
                    (b"SET", self._names, own, b"NX", b"EX", age),
                    (b"EXPIRE", self._names, age),
                    (b"GETRANGE", self._names, b"0", b"64"),
                ]
            )
            for reply in replies:
                self._check(reply)
            told = replies[-1]
            if not isinstance(told, bytes) or not _SECRET.fullmatch(told):
                self._spoilt = True
                raise StoreError("what it has under names is none of ours")
            return bytes.fromhex(told.decode())

        return await self._work(work)

    async def append(self, entries: Sequence[bytes]) -> Number | None:
        """Append these; returns the number of the first, None: there are none."""
        if not entries:
            return None

        async def work(connection: RedisConnection) -> Number:
            most = b"%d" % _MOST_ENTRIES
            commands: list[tuple[bytes, ...]] = [
                (b"XADD", self._stream, b"MAXLEN", b"~", most, b"*", b"d", entry)
                for entry in entries[:ENTRIES]
            ]
            commands.append((b"EXPIRE", self._stream, b"%d" % AGE_S))
            replies = await connection.ask(commands)
            for reply in replies:
                self._check(reply)
            return _number(replies[0])

        return await self._work(work)

    async def after(self, last: Number) -> Read:
        """The entries after this one, oldest first, as many as are read at a time."""
        begin = b"%d-%d" % (last[0], last[1] + 1)
        return await self._range(b"XRANGE", begin, b"+", last)

    async def before(self, last: Number | None) -> Read:
        """The entries before this one, newest first; None: the newest."""
        if last is None:
            return await self._range(b"XREVRANGE", b"+", b"-", NO_NUMBER)
        if last == NO_NUMBER:
            return Read([], last, last, more=False)
        end = (last[0], last[1] - 1) if last[1] else (last[0] - 1, 10**18 - 1)
        return await self._range(b"XREVRANGE", b"%d-%d" % end, b"-", last)

    async def _range(self, command: bytes, begin: bytes, end: bytes, last: Number) -> Read:
        async def work(connection: RedisConnection) -> Read:
            count = b"%d" % _PAGE
            try:
                (reply,) = await connection.ask(
                    [(command, self._stream, begin, end, b"COUNT", count)], _MOST_PAGE_BYTES
                )
            except ReplyError:
                self._spoilt = True
                raise
            self._check(reply)
            if not isinstance(reply, list) or len(reply) % 3 or len(reply) > 3 * _PAGE:
                self._spoilt = True
                raise StoreError("what it has under placements is none of ours")
            entries = [entry for entry in reply[2::3] if isinstance(entry, bytes)]
            if not reply:
                return Read([], last, last, more=False)
            ends = _number(reply[0]), _number(reply[-3])
            return Read(entries, *ends, more=len(reply) == 3 * _PAGE)

        return await self._work(work)

    async def _work(self, work: Callable[[RedisConnection], Coroutine[Any, Any, T]]) -> T:
        async def cleared(connection: RedisConnection) -> T:
            if self._spoilt:
                await connection.ask([(b"DEL", self._stream, self._names)])
                self._spoilt = False
            return await work(connection)

        return await self._node.in_time(cleared)

    def _check(self, reply: Reply) -> None:
        if isinstance(reply, ServerError) and reply.code == "WRONGTYPE":
            self._spoilt = True
        check(reply)

    def close(self) -> None:
        self._node.drop()


def _number(reply: Reply) -> Number:
    if not isinstance(reply, bytes) or not _NUMBER.fullmatch(reply):
        raise StoreError("an entry has no number")
    milliseconds, _, count = reply.partition(b"-")
    return int(milliseconds), int(count)
