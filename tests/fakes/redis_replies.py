"""A server that speaks as much of Redis as sharing needs, and whose replies can be spoilt."""

import asyncio
from collections.abc import Callable

from tests.fakes.servers import FakeServer


def bulk(value: bytes | None) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


def array(*values: bytes) -> bytes:
    return b"*%d\r\n" % len(values) + b"".join(map(bulk, values))


class Replies(FakeServer):
    """Keeps values and one set; ``spoil`` makes other bytes of what is to be sent.

    Leases are not kept: what was set stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spoil: Callable[[bytes], bytes] = lambda data: data
        self.values: dict[bytes, bytes] = {}
        self.names: set[bytes] = set()
        self.listeners: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def reply(self, command: list[bytes], writer: asyncio.StreamWriter) -> bytes:
        """What this command gets, unspoilt."""
        name, args = command[0], command[1:]
        if name == b"SET":
            self.values[args[0]] = args[1]
            return b"+OK\r\n"
        if name == b"SADD":
            self.names |= {*args[1:]}
            return b":1\r\n"
        if name == b"SREM":
            self.names -= {*args[1:]}
            return b":1\r\n"
        if name == b"SRANDMEMBER":
            return array(*[*self.names][: int(args[1])])
        if name == b"GETRANGE":
            return bulk(self.values.get(args[0], b"")[: int(args[2]) + 1])
        if name == b"DEL":
            self.values.pop(args[0], None)
            if args[0].endswith(b":replicas"):
                self.names.clear()
            return b":1\r\n"
        if name == b"PUBLISH":
            for listener in self.listeners:
                listener.write(self.spoil(array(b"message", *args)))
            return b":1\r\n"
        if name == b"SUBSCRIBE":
            self.listeners.append(writer)
            return b"*3\r\n" + bulk(name) + bulk(args[0]) + b":1\r\n"
        return b"-ERR unknown command\r\n"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        words = []
        for _ in range(int((await reader.readuntil(b"\n"))[1:])):
            length = int((await reader.readuntil(b"\n"))[1:])
            words.append((await reader.readexactly(length + 2))[:-2])
        writer.write(self.spoil(self.reply(words, writer)))
        await writer.drain()
        return True

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await super()._connection(reader, writer)
        self.listeners = [each for each in self.listeners if each is not writer]
