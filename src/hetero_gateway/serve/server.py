"""uvicorn, set up for the gateway: one process, uvloop, our protocol, a long listen backlog."""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import uvicorn

from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.gateway.settings import Prepared
from hetero_gateway.http.clients import (
    MOST_MESSAGE_BYTES,
    Watch,
    client_limits,
    default_max_connections,
    raise_descriptor_limit,
)
from hetero_gateway.http.listening import cannot_listen, url_host
from hetero_gateway.http.protocol import LAST_CALL_S, Service, engine_protocol
from hetero_gateway.serve.control.access import ADDRESS, ADMIN_LISTENER, UNIX
from hetero_gateway.serve.garbage import freeze_what_start_made
from hetero_gateway.serve.heartbeat import Heartbeat
from hetero_gateway.serve.wiring.gateway import Parts

_log = logging.getLogger(__name__)

# Short backlogs drop connections when hundreds of clients connect at once: with 128, first tokens
# came a second late at 512 clients.
BACKLOG = 4096


class Given(NamedTuple):
    """Sockets that are bound already; no ``clients``: use the configuration's address.

    ``admin``: used if the configuration has their address.
    """

    clients: Sequence[socket.socket] = ()
    admin: Sequence[socket.socket] = ()


NOTHING_GIVEN = Given()


class GatewayServer(uvicorn.Server):
    """uvicorn with our protocol, its limits for clients, and a long listen backlog.

    It is unready as soon as it is asked to stop.

    Args:
        service: serves engine paths, and is an ASGI application for all others.
        gateway: its configuration says where to listen.
        on_ready: called with the URL once it serves.
        given: sockets that are bound already.
        heartbeat: for a process that has a supervisor.
    """

    def __init__(
        self,
        service: Service,
        gateway: Parts,
        on_ready: Callable[[str], None],
        given: Given = NOTHING_GIVEN,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.gateway = gateway
        self._given = given
        self._problem: HeteroGatewayError | None = None
        self._on_ready = on_ready
        self._heartbeat = heartbeat
        self._takes_signals = False
        self._is_taken = False  # another gateway serves by now
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()
        # The servers that accept clients, with the factories of their connections.
        self._accepting: dict[asyncio.base_events.Server, Callable[[], asyncio.Protocol]] = {}
        # The servers that accept at others' listeners, by their numbers.
        self._covering: dict[int, asyncio.Task[asyncio.Server | None]] = {}
        self.admin_url = ""  # of its listener, if it has one
        metrics, settings, config = gateway.metrics, gateway.settings, gateway.config.server
        self.watch = Watch(
            client_limits(gateway.config), metrics.client_timeouts, metrics.client_refusals
        )
        metrics.client_connections = self.watch.__len__
        limits = ("server.max_connections", "server.drain_s", "server.shutdown_timeout_s")
        settings.add((*limits, "timeouts"), self._prepare)
        tls = self._tls = gateway.tls
        if tls is not None:

            def renewed(_: GatewayConfig) -> Prepared:
                tls.check()
                return Prepared(tls.renew)

            settings.add((), renewed, always=True)
            settings.files.append(lambda _: tls.files)
        super().__init__(
            uvicorn.Config(
                cast(Any, service),
                host=config.host,
                port=config.port,
                http=engine_protocol(service, self.watch),
                loop="uvloop",
                ws="none",  # our protocol serves WebSockets
                ws_max_size=MOST_MESSAGE_BYTES,
                ws_per_message_deflate=False,
                lifespan="on",
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                log_config=None,
                timeout_graceful_shutdown=round(config.shutdown_timeout_s),
                backlog=BACKLOG,
            )
        )

    @property
    def url(self) -> str:
        """Where it listens, once it has started."""
        url = url_of(self.servers[0].sockets[0])
        return url if self.config.ssl is None else url.replace("http:", "https:", 1)

    @property
    def _is_local(self) -> bool:
        """Whether it serves the gateway's own workers, over a Unix socket."""
        given = self._given.clients
        return bool(given) and all(each.family == socket.AF_UNIX for each in given)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        sockets = list(self._given.clients) or None
        try:
            await super().serve(sockets)
        finally:
            if self._heartbeat is not None:
                self._heartbeat.stop()

    async def main_loop(self) -> None:
        """Run until told to end. (uvicorn's own loop polls ten times a second.)"""
        await self.on_tick(0)  # makes the default headers, without a date
        await self._ending.wait()

    @property
    def should_exit(self) -> bool:
        return self._should_exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        # May be set by a signal handler, or from another thread.
        self._should_exit = value
        if value and self._loop is not None:
            self._loop.call_soon_threadsafe(self._ending.set)

    def taken_over(self) -> None:
        """Another gateway serves: this one ends, without a time limit for its requests."""
        self._is_taken = True
        self.config.timeout_graceful_shutdown = None
        self.should_exit = True

    def _cut(self) -> None:
        self.force_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._is_taken and sig == signal.SIGTERM and self._loop is not None:
            limit_s = self.gateway.config.server.shutdown_timeout_s
            self._loop.call_soon_threadsafe(self._loop.call_later, limit_s, self._cut)
        first = not self.gateway.draining
        self.gateway.drain()
        drain_s = self.gateway.config.server.drain_s
        if sig != signal.SIGTERM or not first or not drain_s or self._loop is None:
            super().handle_exit(sig, frame)
            return
        # Gives load balancers in front of gateways time to see that this one is unready.
        end = functools.partial(super().handle_exit, sig, frame)
        self._loop.call_soon_threadsafe(self._loop.call_later, drain_s, end)

    def serve_until_signal(self) -> None:
        """Until SIGINT or SIGTERM. Raises HeteroGatewayError if the address is taken."""
        # uvicorn raises the signal again once it has shut down, for the earlier handler.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        # Ignored until reloading is possible, and once it no longer is.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._takes_signals = True
        try:
            self.run()
        except SystemExit as error:
            config, cause = self.gateway.config.server, error.__context__
            if isinstance(cause, OSError):
                text = cannot_listen(config.host, config.port, cause)
            else:
                text = "the gateway cannot start: the log says why"
            raise HeteroGatewayError(text) from error
        if self._problem is not None:
            raise self._problem

    def _prepare(self, fresh: GatewayConfig) -> Prepared:
        def apply() -> None:
            self.watch.set_limits(client_limits(fresh))
            self.config.timeout_graceful_shutdown = round(fresh.server.shutdown_timeout_s)

        return Prepared(apply)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        where = self.gateway.config.server.admin_listen
        # Taken first: an unusable address is reported before anything serves.
        given = self._given.admin
        admin = _bound(where, given) if where is not None and self.gateway.has_admin else None
        if self._tls is not None and not self._is_local:
            self.config.ssl = self._tls.context
        await super().startup(sockets)
        loop = self._loop = asyncio.get_running_loop()
        if self._takes_signals and self.started:
            loop.add_signal_handler(signal.SIGHUP, self.gateway.reload_soon, "SIGHUP")
            loop.add_signal_handler(signal.SIGUSR1, self.taken_over)
        await self._serve_client_socket()
        clients = [each for server in self.servers for each in server.sockets]
        self._accepting = {server: self._connections({}) for server in self.servers}
        if admin is not None:
            is_unix = admin.family == socket.AF_UNIX
            connection = self._connections({ADMIN_LISTENER: UNIX if is_unix else ADDRESS})
            if not is_unix:
                served = await loop.create_server(connection, sock=admin)
            elif sys.version_info >= (3, 13):  # another gateway may have its path by then
                served = await loop.create_unix_server(connection, sock=admin, cleanup_socket=False)
            else:
                served = await loop.create_unix_server(connection, sock=admin)
            self.servers.append(served)
            self.admin_url = url_of(admin)
            _log.info("/admin is on %s", self.admin_url)
        if self.started:
            self.gateway.serves(clients, [] if admin is None else [admin])
            try:
                self._on_ready(self.url)
            except HeteroGatewayError as error:
                # Connections accepted by now are still answered.
                self._problem = error
                self.should_exit = True
            if self._heartbeat is not None:
                self._heartbeat.start(self)

    async def _serve_client_socket(self) -> None:
        """The Unix socket, if configured and not inherited from an earlier gateway."""
        path = self.gateway.client_socket
        if path is None or not self.started:
            return
        if any(_is_at(each, path) for each in self._given.clients):
            return
        listener = _bound(f"unix:{path}", setting="server.client_socket")
        path.chmod(0o660)
        self.servers.append(
            await asyncio.get_running_loop().create_unix_server(
                self._connections({}), sock=listener, ssl=self.config.ssl, backlog=BACKLOG
            )
        )
        _log.info("clients are also served on %s", url_of(listener))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.watch.ending = True
        waiting = self._accept_what_waits()
        for server in self.servers:
            server.close()
        for each in sockets or ():
            each.close()
        if waiting:  # also for TLS
            await asyncio.wait(waiting, timeout=LAST_CALL_S)
        await super().shutdown(sockets)

    def _accept_what_waits(self) -> list[asyncio.Task[Any]]:
        """Accept all connections that wait: the kernel resets those when a listener is closed.

        (One turn of uvloop's loop accepts one, and may serve hundreds before it.)
        """
        assert self._loop is not None
        waiting = []
        for server, connection in self._accepting.items():
            for each in server.sockets:
                listener = socket.socket(fileno=os.dup(each.fileno()))
                # Until none is left, or no descriptor.
                with listener, contextlib.suppress(OSError):
                    while True:
                        client = listener.accept()[0]
                        opened = self._loop.connect_accepted_socket(
                            connection, client, ssl=self.config.ssl
                        )
                        waiting.append(self._loop.create_task(opened))
        return waiting

    def _connections(self, state: dict[str, Any]) -> Callable[[], asyncio.Protocol]:
        """Makes connections as uvicorn does for its own listener."""
        return functools.partial(
            cast(Any, self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state={**self.lifespan.state, **state},
        )

    def cover(self, number: int, listener: socket.socket) -> None:
        """Also accept connections at another process's listener, until ``leave``."""
        assert self._loop is not None
        self.leave(number)
        self._covering[number] = self._loop.create_task(self._cover(listener))

    async def _cover(self, listener: socket.socket) -> asyncio.Server | None:
        if self.should_exit or self._loop is None:
            listener.close()
            return None
        connection = self._connections({})
        try:
            server = await self._loop.create_server(
                connection, sock=listener, ssl=self.config.ssl, backlog=BACKLOG
            )
        except OSError as error:
            _log.error("cannot accept connections for another worker: %s", error)
            listener.close()
            return None
        if self.should_exit:
            server.close()
            return None
        self.servers.append(server)  # shutdown closes it with the others
        self._accepting[server] = connection
        return server

    def leave(self, number: int) -> None:
        covering = self._covering.pop(number, None)
        if covering is not None:
            covering.add_done_callback(self._uncover)

    def _uncover(self, covering: asyncio.Task[asyncio.Server | None]) -> None:
        server = covering.result()
        if server is not None and server in self.servers:
            self.servers.remove(server)
            del self._accepting[server]
            server.close()


def _is_at(listener: socket.socket, path: Path) -> bool:
    """Whether a bound socket is the Unix socket of that path."""
    if listener.family != socket.AF_UNIX:
        return False
    return str(os.path.abspath(listener.getsockname())) == os.path.abspath(path)


def _bound(
    where: str, given: Sequence[socket.socket] = (), *, setting: str = "server.admin_listen"
) -> socket.socket:
    """A socket at this address: one of these, or a new one. Raises HeteroGatewayError."""
    try:
        address: Any = where.removeprefix("unix:")
        for each in given:
            if each.family == socket.AF_UNIX and each.getsockname() == address:
                return each
        if address == where:
            parts = urlsplit("//" + where)
            family, kind, protocol, _, address = socket.getaddrinfo(
                parts.hostname, parts.port, type=socket.SOCK_STREAM
            )[0]
            for each in given:
                if each.family == family and each.getsockname() == address:
                    return each
            # With an explicit protocol, as asyncio turns Nagle's algorithm off only for those.
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            _unlink_stale(Path(address))
            listener = socket.socket(socket.AF_UNIX)
        # A Unix socket is private to its owner from the first moment.
        mask = os.umask(0o177)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
        finally:
            os.umask(mask)
        return listener
    except OSError as error:
        reason = error.strerror or str(error)
        raise HeteroGatewayError(f"{setting}: {where}: {reason}") from error


def _unlink_stale(path: Path) -> None:
    """Remove a socket that nobody listens at any more, as a killed process leaves it."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def url_of(listener: socket.socket) -> str:
    """The URL of a bound socket; for a Unix socket its path."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://{url_host(host)}:{port}"


def run(
    service: Service,
    gateway: Parts,
    on_ready: Callable[[str], None],
    given: Given = NOTHING_GIVEN,
    heartbeat: Heartbeat | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; see ``GatewayServer``.

    Raises HeteroGatewayError if the address is taken.
    """

    def ready(url: str) -> None:
        freeze_what_start_made()
        on_ready(url)

    raise_descriptor_limit()
    most = gateway.config.server.max_connections
    if most is not None and most > (allowed := default_max_connections()):
        _log.warning(
            "server.max_connections is %d, but there are descriptors for only %d clients and their "
            "instances' connections: raise the process's limit (ulimit -n)", most, allowed,
        )  # fmt: skip
    GatewayServer(service, gateway, ready, given, heartbeat).serve_until_signal()
