"""The clients' usage at all gateways that share, in Redis or Valkey.

    {GROUP}:usage:DAY   a hash: run, client and model to four numbers, for ``MOST_DAYS`` days

A run's name has 64 characters, so that Redis stores every such hash as a table, and HSCAN reads it
in small pieces. Malformed rows are ignored.
"""

import re
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hetero_gateway.files.scheduler_config import SchedulerConfig
from hetero_gateway.gateway.admission.usage import (
    MOST_DAYS,
    NO_AMOUNTS,
    Amounts,
    KeptRow,
    UsageStoreError,
    added,
)
from hetero_gateway.scaleout.sharing.node import RedisNode, StoreError, check
from hetero_gateway.scaleout.sharing.redis import RedisConnection

T = TypeVar("T")

_DAY_S = 86400
_FIELD = re.compile(rb"[0-9a-f]{64}\0[!-~]{1,63}\0[^\0]{1,1024}", re.S)
_AMOUNTS = re.compile(rb"[0-9]{1,18}(,[0-9]{1,18}){3}")
# Rows written at a time, and read.
_AT_ONCE, _PAGE = 200, b"100"
# Rows of one day; more are not read.
_MOST_PAGES = 10_000


class SharedUsage:
    """One run's rows. All methods raise UsageStoreError.

    Args:
        config: ``shared`` is set.
        base_dir: ``ca_file`` is relative to it.
        run: identifies this run's rows: 64 hexadecimal digits.

    Raises:
        ConfigError: the password is missing, or the certificates.
    """

    def __init__(self, config: SchedulerConfig, base_dir: Path, run: str) -> None:
        self._node = RedisNode(config, base_dir, flattens=True)
        self._prefix = f"{{{config.sharing.group}}}:usage:"
        self._run = run

    async def save(self, rows: Sequence[KeptRow]) -> None:
        """Store these, replacing those of the same day, client and model."""
        for start in range(0, len(rows), _AT_ONCE):
            part = rows[start : start + _AT_ONCE]
            commands: list[tuple[bytes, ...]] = []
            for day in {row.day for row in part}:
                key = self._key(day)
                pairs = [word for row in part if row.day == day for word in self._pair(row)]
                end_s = (day + MOST_DAYS + 1) * _DAY_S
                commands += [(b"HSET", key, *pairs), (b"EXPIREAT", key, b"%d" % end_s)]

            async def work(
                connection: RedisConnection, commands: list[tuple[bytes, ...]] = commands
            ) -> None:
                for reply in await connection.ask(commands):
                    check(reply)

            await self._in_time(work)

    async def read(self, *, own: bool) -> list[KeptRow]:
        """The stored rows of this run, or of all others."""
        today, found = int(time.time() // _DAY_S), list[KeptRow]()
        for day in range(today - MOST_DAYS + 1, today + 1):
            # By run, too: a table that grows meanwhile may return a row twice.
            rows: dict[bytes, bytes] = {}
            cursor = b"0"
            for _ in range(_MOST_PAGES):
                cursor = await self._page(self._key(day), cursor, rows)
                if cursor == b"0":
                    break
            sums: dict[tuple[str, str], Amounts] = {}
            for field, value in rows.items():
                run, client, model = field.decode("utf-8", "replace").split("\0")
                if (run == self._run) is own:
                    requests, read, cached, written = map(int, value.split(b","))
                    amounts = requests, read, cached, written
                    sums[client, model] = added(sums.get((client, model), NO_AMOUNTS), amounts)
            found += (KeptRow(day, *key, amounts) for key, amounts in sums.items())
        return found

    async def _page(self, key: bytes, cursor: bytes, rows: dict[bytes, bytes]) -> bytes:
        """Add the rows of one page, and return where the next one begins."""

        async def work(connection: RedisConnection) -> bytes:
            (reply,) = await connection.ask([(b"HSCAN", key, cursor, b"COUNT", _PAGE)])
            check(reply)
            if not isinstance(reply, list) or not reply or not isinstance(reply[0], bytes):
                raise StoreError("what it has under usage is none of ours")
            for field, value in zip(reply[1::2], reply[2::2], strict=False):
                if not isinstance(field, bytes) or not isinstance(value, bytes):
                    continue
                if _FIELD.fullmatch(field) and _AMOUNTS.fullmatch(value):
                    rows[field] = value
            return reply[0]

        return await self._in_time(work)

    async def _in_time(self, work: Callable[[RedisConnection], Coroutine[Any, Any, T]]) -> T:
        try:
            return await self._node.in_time(work)
        except StoreError as error:
            raise UsageStoreError(f"scheduler.shared: {error}") from error

    def _key(self, day: int) -> bytes:
        return f"{self._prefix}{day}".encode()

    def _pair(self, row: KeptRow) -> tuple[bytes, bytes]:
        field = "\0".join((self._run, row.client, row.model)).encode()
        return field, b"%d,%d,%d,%d" % row.amounts

    def close(self) -> None:
        """Close its connection."""
        self._node.drop()
