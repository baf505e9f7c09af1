"""The running gateway, as its successor asks it: before there is an event loop."""

import contextlib
import logging
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hetero_gateway import __version__
from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.files.admin_key import opened_private, private_directories
from hetero_gateway.files.server_config import ServerConfig
from hetero_gateway.scaleout.workers.messages import FrameReader, frame
from hetero_gateway.serve.handover import messages

# It answers from its event loop, which may be busy.
_ANSWER_S = 10.0
_MOST_SECRET_BYTES = 256
_MOST_SOCKETS = 253  # descriptors that Linux passes in one message
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid

_log = logging.getLogger(__name__)


def socket_of(server: ServerConfig, port: int) -> Path:
    """The socket of a gateway's handover: the configuration's path, or one next to /admin's key.

    Raises OSError: there is no directory that belongs to this user alone.
    """
    if server.takeover_socket is not None:
        with opened_private(server.takeover_socket.absolute().parent):
            return server.takeover_socket
    problem = OSError("there is no directory for it")
    for directory in private_directories():
        try:
            directory.mkdir(0o700, exist_ok=True)
            with opened_private(directory):
                return directory / f"{server.host.replace('/', '_')}-{port}.takeover"
        except OSError as error:
            problem = error
    raise problem


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's, as far as the system says."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the private directory has to suffice
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, user, _ = _PEER.unpack(data)
    return bool(user == os.geteuid())


class _Gone(HeteroGatewayError):
    """It has ended meanwhile."""


class Predecessor:
    """A connection to it. Raises HeteroGatewayError for anything that goes wrong there.

    Args:
        server: of the configuration, with the port of the running gateway.
        wants: see ``Claim``.

    Raises:
        FileNotFoundError, ConnectionRefusedError: nobody is there.
    """

    def __init__(self, server: ServerConfig, wants: str) -> None:
        self._path = socket_of(server, server.port)
        self._told: list[Any] = []
        most = messages.MOST_TOLD_BYTES
        self._reader = FrameReader(messages.FromOld, self._told.extend, most)
        self._descriptors: list[int] = []
        self.clients: list[socket.socket] = []
        self.admin: list[socket.socket] = []
        self.secret = ""
        self.state: list[Any] = []  # its whole state
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(_ANSWER_S)
        try:
            self.connection.connect(str(self._path))
            with self._clearly():
                if not is_same_user(self.connection):
                    raise ValueError("another user's process listens there")
                listen = f"{server.host}:{server.port}"
                claim = messages.Claim(messages.PROTOCOL, __version__, wants, listen)
                self.connection.sendall(frame([claim]))
                if wants == "sockets":
                    self._take_sockets()
                else:
                    self._take_state()
        except (OSError, HeteroGatewayError):
            self.connection.close()
            raise

    @contextlib.contextmanager
    def _clearly(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            reason = "it does not answer" if isinstance(error, TimeoutError) else str(error)
            raise HeteroGatewayError(f"--takeover: {self._path}: {reason}") from error

    def _next(self) -> Any:
        while not self._told:
            data, descriptors, _, _ = socket.recv_fds(self.connection, 1 << 20, _MOST_SOCKETS)
            self._descriptors += descriptors
            if not data:
                raise _Gone(f"--takeover: {self._path}: the gateway there is gone")
            self._reader.feed(data)
        told = self._told.pop(0)
        if isinstance(told, messages.Denied):
            raise HeteroGatewayError(f"--takeover: the gateway that runs refuses: {told.reason}")
        return told

    def _take_sockets(self) -> None:
        told = self._next()
        if not isinstance(told, messages.Sockets) or len(self._descriptors) != 1 + len(told.kinds):
            raise ValueError("the gateway there has sent no sockets")
        with os.fdopen(self._descriptors[0], "rb") as pipe:
            self.secret = pipe.read(_MOST_SECRET_BYTES).decode("ascii")
        for kind, descriptor in zip(told.kinds, self._descriptors[1:], strict=True):
            listener = socket.socket(fileno=descriptor)
            listener.setblocking(False)
            (self.admin if kind == "admin" else self.clients).append(listener)

    def _take_state(self) -> None:
        until_s = time.monotonic() + _ANSWER_S
        while not self.state or not isinstance(self.state[-1], messages.AllKnown):
            if time.monotonic() > until_s:
                raise TimeoutError
            self.state.append(self._next())
        self.connection.setblocking(False)

    def serving(self) -> None:
        """This gateway accepts connections: the predecessor should end."""
        try:
            with self._clearly():
                with contextlib.suppress(BrokenPipeError):  # it refused, or is gone
                    self.connection.sendall(frame([messages.Accepting()]))
                self._next()
        except _Gone:
            _log.warning("the previous gateway is gone; this one has its sockets")
        finally:
            self.connection.close()
