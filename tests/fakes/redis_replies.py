"""A server that speaks as much of Redis as sharing needs, and whose replies can be spoilt."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field


def bulk(value: bytes | None) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


def array(*values: bytes) -> bytes:
    return b"*%d\r\n" % len(values) + b"".join(map(bulk, values))


@dataclass
class Replies:
    """Keeps values and one set; ``spoil`` makes other bytes of what is to be sent.

    Leases are not kept: what was set stays.
    """

    port: int = 0
    spoil: Callable[[bytes], bytes] = lambda data: data
    values: dict[bytes, bytes] = field(default_factory=dict)
    names: set[bytes] = field(default_factory=set)
    listeners: list[asyncio.StreamWriter] = field(default_factory=list)
    commands: int = 0
    connections: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def reply(self, command: list[bytes], writer: asyncio.StreamWriter) -> bytes:
        """What this command gets, unspoilt."""
        self.commands += 1
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

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.connections[task] = writer
        try:
            while line := await reader.readline():
                words = []
                for _ in range(int(line[1:])):
                    length = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(length + 2))[:-2])
                writer.write(self.spoil(self.reply(words, writer)))
                await writer.drain()
        except (OSError, ValueError, asyncio.IncompleteReadError):
            pass
        finally:
            if writer in self.listeners:
                self.listeners.remove(writer)
            del self.connections[task]
            writer.close()


@contextlib.asynccontextmanager
async def replies() -> AsyncIterator[Replies]:
    """Such a server on a free loopback port."""
    made = Replies()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        connections = dict(made.connections)
        for writer in connections.values():
            writer.transport.abort()
        if connections:
            await asyncio.wait(connections)
