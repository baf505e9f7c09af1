"""A connection to a Redis or Valkey: the few commands that sharing needs, and bounded replies.

A store is not trusted: it may be broken, another program, or somebody else's. A client library
believes what a reply declares about itself; ``*1000000000`` alone, 13 bytes, makes hiredis allocate
8 GB. Here every length is checked before anything is kept for it:

    a line (status, error, number)   ``_LONGEST_LINE`` bytes
    a string                         ``MOST_BYTES``, a message of another gateway
    an array                         ``_MOST_ELEMENTS``, and as many bytes as two strings; nested
                                     arrays are refused, or flattened for readers of a log's
                                     entries
    all replies to one request       as many bytes as the caller allows

Anything beyond that, or not a reply at all, is a ``ReplyError``: the connection cannot be used any
more. Only RESP2: nothing is sent that would change it.
"""

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hetero_gateway.core.sharing.message import MOST_BYTES

# Redis quotes at most 128 bytes in an error, but its own advice may be long: that of protected mode
# has 983 bytes in version 7.
_LONGEST_LINE = 4096
_MOST_ELEMENTS = 1024
_READ_BYTES = 1 << 16
_LENGTH = re.compile(rb"-?[0-9]{1,18}")
_NOT_SHOWN = re.compile(r"[^ -~]")


class ReplyError(Exception):
    """Malformed data, or a reply that is too long. The text quotes nothing of it."""


class ServerError(NamedTuple):
    """An error that the server replied. ``code``: its first word."""

    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.code} {self.text}"[:200]


Value = bytes | int | ServerError | None
Reply = Value | list[Value]
_PENDING = object()


class ReplyReader:
    """Takes bytes as they come and yields whole replies. Does no I/O.

    Args:
        flattens: the contents of a nested array become part of the outer one.
    """

    def __init__(self, *, flattens: bool = False) -> None:
        self._flattens = flattens
        self._buffer = bytearray()
        self._at = 0  # everything before it was read
        self._searched = 0  # there is no line's end before it
        self._string: int | None = None  # bytes of the string that is being read
        self._array: list[Value] | None = None
        self._left = 0  # elements missing in the array
        self._array_bytes = 0

    def feed(self, data: bytes) -> Iterator[Reply]:
        """The replies that end in these bytes. Raises ReplyError."""
        self._buffer += data
        while (value := self._next()) is not _PENDING:
            if self._array is None:
                yield value  # type: ignore[misc]
                continue
            if value is not self._array:
                self._array.append(value)  # type: ignore[arg-type]
                self._left -= 1
            if not self._left:
                whole, self._array = self._array, None
                yield whole
        del self._buffer[: self._at]
        self._searched -= self._at
        self._at = 0

    def _next(self) -> object:
        """The next value; a new array becomes ``_array``."""
        if self._string is not None:
            return self._rest_of_string()
        line = self._line()
        if line is None:
            return _PENDING
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            code, _, text = rest.decode("latin-1").partition(" ")
            return ServerError(_NOT_SHOWN.sub("?", code), _NOT_SHOWN.sub("?", text))
        if kind not in b":$*" or not _LENGTH.fullmatch(rest):
            raise ReplyError("what came is no reply of Redis")
        number = int(rest)
        if kind == b":":
            return number
        if number == -1:
            return None
        if not 0 <= number <= (MOST_BYTES if kind == b"$" else _MOST_ELEMENTS):
            raise ReplyError("a reply is too long")
        if kind == b"$":
            self._array_bytes += number
            if self._array is not None and self._array_bytes > 2 * MOST_BYTES:
                raise ReplyError("a reply is too long")
            self._string = number
            return self._rest_of_string()
        if self._array is not None:
            if not self._flattens or len(self._array) + self._left + number > _MOST_ELEMENTS:
                raise ReplyError("a reply is an array of arrays")
            self._left += number - 1
            return self._array
        self._array, self._left, self._array_bytes = [], number, 0
        return self._array

    def _line(self) -> bytes | None:
        start, end = self._at, self._buffer.find(b"\r\n", max(self._at, self._searched))
        if end < 0:
            # The last byte may be the first half of the line's end.
            self._searched = max(start, len(self._buffer) - 1)
            end = len(self._buffer)
            line = None
        else:
            line = bytes(self._buffer[start:end]) if end - start <= _LONGEST_LINE else None
            self._at = self._searched = end + 2
        if end - start > _LONGEST_LINE:
            raise ReplyError("a line of a reply is too long")
        return line

    def _rest_of_string(self) -> object:
        assert self._string is not None
        end = self._at + self._string
        if len(self._buffer) < end + 2:
            return _PENDING
        value = bytes(self._buffer[self._at : end])
        if self._buffer[end : end + 2] != b"\r\n":
            raise ReplyError("what came is no reply of Redis")
        self._at, self._string = end + 2, None
        return value


def login(username: str | None, password: str | None, database: int) -> list[tuple[bytes, ...]]:
    """The first commands of a connection. ``password``: None: none is needed."""
    commands: list[tuple[bytes, ...]] = []
    if password is not None:
        user = () if username is None else (username.encode(),)
        commands.append((b"AUTH", *user, password.encode()))
    if database:
        commands.append((b"SELECT", b"%d" % database))
    return commands


class RedisConnection:
    """One connection; made by ``connect``. After any exception it has to be closed."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, replies: ReplyReader
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._replies = replies

    async def ask(
        self, commands: Sequence[tuple[bytes, ...]], most_bytes: int = MOST_BYTES
    ) -> list[Reply]:
        """The replies, one each, together at most so many bytes. Raises OSError, ReplyError."""
        self.send(commands)
        replies: list[Reply] = []
        received_bytes = 0
        while len(replies) < len(commands):
            data = await self._read()
            received_bytes += len(data)
            if received_bytes > most_bytes:
                raise ReplyError("replies are too long")
            replies += self._replies.feed(data)
        if len(replies) > len(commands):
            raise ReplyError("there are more replies than commands")
        return replies

    def send(self, commands: Sequence[tuple[bytes, ...]]) -> None:
        """Send commands; ``receive`` gets their replies."""
        parts = []
        for command in commands:
            parts.append(b"*%d\r\n" % len(command))
            parts += (b"$%d\r\n%b\r\n" % (len(word), word) for word in command)
        self._writer.write(b"".join(parts))

    async def receive(self) -> list[Reply]:
        """The replies received, perhaps none that is whole. Raises OSError, ReplyError."""
        return list(self._replies.feed(await self._read()))

    async def _read(self) -> bytes:
        data = await self._reader.read(_READ_BYTES)
        if not data:
            raise ConnectionError("it closed the connection")
        return data

    def close(self) -> None:
        self._writer.transport.abort()


async def connect(
    address: tuple[str, int],
    commands: list[tuple[bytes, ...]],
    context: ssl.SSLContext | None,
    *,
    flattens: bool = False,
) -> RedisConnection:
    """Connect, and begin with these commands (``login``). ``flattens``: see ``ReplyReader``.

    Raises OSError, ReplyError; PermissionError: it refuses the login.
    """
    reader, writer = await asyncio.open_connection(*address, ssl=context)
    connection = RedisConnection(reader, writer, ReplyReader(flattens=flattens))
    try:
        raw: socket.socket | None = writer.get_extra_info("socket")
        if raw is not None:
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for reply in await connection.ask(commands):
            if isinstance(reply, ServerError):
                raise PermissionError(str(reply))
    except BaseException:
        connection.close()
        raise
    return connection
