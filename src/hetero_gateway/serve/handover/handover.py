"""A gateway's part in a handover: taking over when it starts, and handing over on request.

    taking over    ``begin`` before its instances are probed; ``own`` once it is the serving one
    handing over   afterwards it listens at a Unix socket; a process of the same user that asks
                   there gets its listening sockets, and at ``Accepting`` this gateway ends its
                   requests

The successor accepts connections before the predecessor stops, so somebody always does, and
connections that wait in a listening socket wait for both.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero_gateway.files.server_config import ServerConfig
from hetero_gateway.scaleout.workers.messages import Channel, frame
from hetero_gateway.serve.handover import messages
from hetero_gateway.serve.handover.knowledge import Handed, instances_of, take_up, told_of
from hetero_gateway.serve.handover.predecessor import Predecessor, is_same_user, socket_of
from hetero_gateway.serve.handover.twin import Twin

# The successor's time limit from asking for the sockets to serving.
START_S = 120.0
_FAREWELL_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Handover:
    """See above.

    Args:
        server: of the configuration.
        secret: passed to the successor, for the keys of prompts and of /admin.
        end: ends this gateway, with all of its processes.
        predecessor: the gateway to take over from; None: there is none, or no longer.
        clients: the sockets that its workers listen on; none: it listens itself.

    ``taken``: another gateway serves by now.
    """

    server: ServerConfig
    secret: str
    end: Callable[[], None]
    predecessor: Predecessor | None = None
    clients: Sequence[socket.socket] = ()
    taken: bool = False
    _gateway: Handed | None = None
    _path: Path | None = None  # of the Unix socket, once it serves
    _inode: int = 0
    _listen: str = ""
    _sockets: Sequence[tuple[str, int]] = ()  # kinds and descriptors
    _server: asyncio.Server | None = None
    _opening: asyncio.Task[None] | None = None
    _askers: "set[_Asker]" = field(default_factory=set)
    _before: "_Before | None" = None

    @property
    def gateway(self) -> Handed:
        assert self._gateway is not None
        return self._gateway

    # Taking over

    async def begin(self, gateway: Handed) -> None:
        """Take in the predecessor's state, and count its load from now on."""
        self._gateway = gateway
        if (predecessor := self.predecessor) is not None:
            state, predecessor.state = predecessor.state, []
            for told in state:
                take_up(gateway, told, gateway.fleet.admit)
            before = self._before = _Before(self)
            _, before.channel = await asyncio.get_running_loop().create_unix_connection(
                lambda: Channel(messages.FromOld, before), sock=predecessor.connection
            )
            before.start(state)

    @property
    def waits(self) -> bool:
        """Another gateway is still the serving one."""
        return self.predecessor is not None

    def own(self) -> None:
        """This gateway is the serving one now."""
        self.predecessor = None
        if self._path is not None:
            self._opening = asyncio.get_running_loop().create_task(self._open(self._path))

    # Handing over

    def serves(self, clients: Sequence[socket.socket], admin: Sequence[socket.socket]) -> None:
        """It listens on these, and can be taken over once nobody else is asked at its path."""
        self._sockets = [("clients", each.fileno()) for each in clients]
        self._sockets += [("admin", each.fileno()) for each in admin]
        name = clients[0].getsockname()
        port = int(name[1]) if isinstance(name, tuple) else self.server.port
        self._listen = f"{self.server.host}:{port}"
        try:
            self._path = socket_of(self.server, port)
        except OSError as error:
            self._tell_why_not(error)
        if not self.waits:
            self.own()

    async def _open(self, path: Path) -> None:
        try:
            listener, self._inode = _listener_at(path)
            create = asyncio.get_running_loop().create_unix_server
            self._server = await create(self._channel, sock=listener)
        except OSError as error:
            self._tell_why_not(error)

    def _tell_why_not(self, error: OSError) -> None:
        # A read-only container has no place for the socket, and needs none.
        level = logging.INFO if self.server.takeover_socket is None else logging.WARNING
        _log.log(level, "this gateway cannot be taken over: %s", error)

    def _channel(self) -> Channel:
        asker = _Asker(self)
        asker.channel = Channel(messages.FromNew, asker, messages.MOST_ASKED_BYTES)
        self._askers.add(asker)
        return asker.channel

    def refusal(self, claim: messages.Claim) -> str:
        """Why another gateway's request is refused; "": it is not."""
        if claim.protocol != messages.PROTOCOL:
            return (
                f"it hands over by protocol {messages.PROTOCOL}, and version {claim.version} "
                f"by {claim.protocol}: restart it instead"
            )
        if claim.listen != self._listen:
            return f"it serves at {self._listen}, and not at {claim.listen}"
        if self.gateway.draining and not self.taken:
            return "it is about to end"
        if claim.wants == "sockets" and (self.taken or any(s.takes for s in self._askers)):
            return "another gateway is taking over already"
        return ""

    def sockets(self) -> tuple[list[str], list[int]]:
        """Kinds and descriptors."""
        return [kind for kind, _ in self._sockets], [each for _, each in self._sockets]

    def hand_over(self) -> None:
        """The successor serves now."""
        self.taken = True
        _log.warning("another gateway has taken over; this one finishes its requests")
        self._close_server()
        for asker in self._askers:
            asker.say_yours()
        self.gateway.drain()
        self.end()

    def forget(self, asker: "_Asker") -> None:
        self._askers.discard(asker)

    async def close(self) -> None:
        """This gateway's requests have ended."""
        self._close_server()
        if self.taken:
            states = self.gateway.fleet.scheduler.members.table.states.values()
            left = (sum(s.in_flight for s in states), sum(s.load_s for s in states))
            _log.info("this gateway's requests have finished: %d left, with %g s of load", *left)
        if self._before is not None:
            if self.taken:
                await self._before.over.wait()  # the successor hears of it from here
            self._before.close()
        for asker in list(self._askers):
            await asker.farewell()

    def twin_of(self, channel: Channel) -> Twin:
        """The twin of the successor, which also counts what the predecessor still has."""
        before = None if self._before is None else self._before.twin
        return Twin(self.gateway, channel, before=before, earlier=True)

    def _close_server(self) -> None:
        if self._server is None or self._path is None:
            return
        self._server.close()
        self._server = None
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()


def _listener_at(path: Path) -> tuple[socket.socket, int]:
    """The listener and its inode. It gets its name once it listens.

    Raises OSError: another gateway is asked there.
    """
    made = path.with_name(f".{os.getpid()}.takeover")
    with socket.socket(socket.AF_UNIX) as probe:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            probe.connect(str(path))
            raise OSError(f"{path}: another gateway is asked there")
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        listener.bind(str(made))
        listener.listen()
        listener.setblocking(False)
        inode = made.stat().st_ino
        made.rename(path)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(mask)
    return listener, inode


class _Before:
    """The predecessor, until its requests have ended."""

    def __init__(self, handover: Handover) -> None:
        self.channel: Channel
        self.over = asyncio.Event()
        self._handover = handover

    def start(self, told: list[Any]) -> None:
        self.twin = Twin(self._handover.gateway, self.channel, earlier=False)
        for each in told:
            self.twin.hear(each)
        self.channel.send(messages.Loads([]))  # from now on its messages are read
        self.twin.start()

    def received(self, told: list[Any]) -> None:
        for each in told:
            if isinstance(each, messages.KnownInstances):
                gateway = self._handover.gateway  # an operator may have changed one since
                take_up(gateway, each, gateway.roster.admit)
            elif isinstance(each, messages.Yours):
                self._handover.own()
            elif isinstance(each, messages.Bye):
                self.close()
            else:
                self.twin.hear(each)

    def unsent(self, message: Any, error: Exception) -> None:
        pass  # a repeated message

    def lost(self) -> None:
        _log.warning("the previous gateway is gone, and its requests with it")
        self._end()
        if self._handover.waits:
            self._handover.own()

    def close(self) -> None:
        if not self.channel.closed:
            self.channel.close()
            self._end()

    def _end(self) -> None:
        self.twin.stop()
        self.over.set()


class _Asker:
    """A connection of another gateway that asks this one."""

    def __init__(self, handover: Handover) -> None:
        self.channel: Channel
        self.takes = False  # it has got the sockets
        self._handover = handover
        self._twin: Twin | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._telling: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()

    def received(self, told: list[Any]) -> None:
        for each in told:
            if isinstance(each, messages.Claim):
                self._claim(each)
            elif isinstance(each, messages.Accepting):
                self._serving()
            elif self._twin is not None:
                self._twin.hear(each)
                if self._telling is not None and self._telling.done():
                    self._telling = None
                    self._twin.start()

    def unsent(self, message: Any, error: Exception) -> None:
        self.channel.abort()

    def lost(self) -> None:
        handover = self._handover
        handover.forget(self)
        if self.takes and not handover.taken:
            _log.warning("the gateway that was taking over is gone; this one continues")
        if self._timer is not None:
            self._timer.cancel()
        if self._telling is not None:
            self._telling.cancel()
        if self._twin is not None:
            self._twin.stop()
        self._gone.set()

    def _claim(self, claim: messages.Claim) -> None:
        handover = self._handover
        with socket.socket(fileno=os.dup(self.channel.fileno())) as connection:
            refusal = handover.refusal(claim)
            if not is_same_user(connection):
                refusal = "another user asks"
            if refusal:
                self._refuse(refusal)
            elif claim.wants == "sockets":
                self._send_sockets(connection)
            else:
                self._twin = handover.twin_of(self.channel)
                self._telling = asyncio.get_running_loop().create_task(self._tell())

    def _refuse(self, reason: str) -> None:
        _log.warning("another gateway cannot take over: %s", reason)
        self.channel.send(messages.Denied(reason))
        self.channel.close()
        self.lost()

    def _send_sockets(self, connection: socket.socket) -> None:
        kinds, descriptors = self._handover.sockets()
        reading, writing = os.pipe()
        try:
            os.write(writing, self._handover.secret.encode())
        finally:
            os.close(writing)
        try:
            told = frame([messages.Sockets(kinds)])
            socket.send_fds(connection, [told], [reading, *descriptors])
        finally:
            os.close(reading)
        self.takes = True
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(START_S, self._is_late)
        _log.info("another gateway is about to take over")

    def _is_late(self) -> None:
        self._refuse(f"it did not serve within {START_S:.0f} s")

    async def _tell(self) -> None:
        """Send the whole state; no more until messages are read."""
        assert self._twin is not None
        self._twin.say(usage=True)
        for told in told_of(self._handover.gateway):
            self.channel.send(told)
            self.channel.flush()
            await asyncio.sleep(0)
        if self._handover.taken:
            self.say_yours()  # a restarted process

    def _serving(self) -> None:
        if not self.takes or self._handover.taken or self._handover.gateway.draining:
            self._refuse("it is about to end")
            return
        self._handover.hand_over()

    def say_yours(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._twin is not None:
            self.channel.send(instances_of(self._handover.gateway.fleet))
        self.channel.send(messages.Yours())

    async def farewell(self) -> None:
        """Send what is left to send."""
        if self._twin is not None and not self.channel.closed:
            self._twin.say(usage=True)
            self.channel.send(messages.Bye())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), _FAREWELL_S)
        self.channel.close()
