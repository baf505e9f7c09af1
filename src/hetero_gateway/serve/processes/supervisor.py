"""Starts the scheduler process and the workers, and restarts those that die or hang
(``heartbeat``).

It holds their listening sockets. While a worker is away or silent, the others accept connections at
its socket, so only its open connections are lost with it. It serves nothing itself.

    signal            effect
    SIGHUP            the scheduler process reads the configuration again, and informs the workers
    SIGTERM, SIGINT   the workers end as ``serve`` does, then the scheduler process
    SIGUSR1           from the scheduler process: another gateway serves. They end in this order,
                      but their requests have no time limit
    its own end       for whatever reason: the others notice, and end as after SIGTERM
"""

import asyncio
import atexit
import contextlib
import fcntl
import logging
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.whole_file import write_whole
from hetero_gateway.http.listening import cannot_listen
from hetero_gateway.scaleout.workers import SECRET_ENV
from hetero_gateway.scaleout.workers.hub import listen
from hetero_gateway.serve.heartbeat import LOOK_S, Condition, Pulse, is_stopped, tell_cover
from hetero_gateway.serve.server import BACKLOG, NOTHING_GIVEN, Given, url_of

# A process that lived for less is restarted after a pause.
_SHORT_LIFE_S, _PAUSE_S = 5.0, 1.0
# After the time limit for requests to end.
_GRACE_S = 10.0
_HUB, _CONTROL, _CONFIG = "scheduler.sock", "control.sock", "gateway.json"
_PREFIX, _LOCK = "hetero-gateway-", "lock"

_log = logging.getLogger(__name__)


class Role(msgspec.Struct):
    """The role of one process of the gateway.

    Args:
        worker: its number; None: the scheduler process.
        listeners: descriptors of the sockets that it listens on: a worker's for clients; or the
            workers' and the control paths'.
        heart: descriptor of its end of the ``heartbeat`` sockets.
        life: descriptor that is closed when the supervisor ends.
        directory: of the Unix sockets.
        clients, admin: for the scheduler process, descriptors of all sockets for clients, which
            it can hand over, and of the inherited ones for /admin.
        takes_over: it asks the predecessor for its state.
    """

    worker: int | None
    listeners: list[int]
    heart: int
    life: int
    directory: str
    clients: list[int] = []
    admin: list[int] = []
    takes_over: bool = False

    @property
    def hub_path(self) -> str:
        return str(Path(self.directory) / _HUB)

    @property
    def control_path(self) -> str:
        return str(Path(self.directory) / _CONTROL)

    def config(self) -> GatewayConfig:
        """The configuration in effect: the user's file may be broken by now."""
        return _config_in(self.directory)

    def keep_config(self, config: GatewayConfig) -> None:
        """Store another configuration, for processes started from now on."""
        try:
            write_whole(Path(self.directory) / _CONFIG, config.model_dump_json(), mode=0o600)
        except OSError as error:
            _log.error(
                "%s: %s; a restarted process has the previous configuration",
                self.directory,
                error.strerror,
            )

    def sockets(self) -> list[socket.socket]:
        return sockets_of(self.listeners)

    def die_with_supervisor(self) -> None:
        """End as after SIGTERM, when the supervisor is gone; and leave nothing behind."""

        def wait() -> None:
            os.read(self.life, 1)
            atexit.register(shutil.rmtree, self.directory, ignore_errors=True)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=wait, daemon=True, name="supervisor").start()

    def supervisor_gone(self) -> bool:
        """Whether it has ended, before this process."""
        return bool(select.select([self.life], [], [], 0)[0])


def sockets_of(descriptors: list[int]) -> list[socket.socket]:
    """The sockets that a process has inherited."""
    sockets = [socket.socket(fileno=fd) for fd in descriptors]
    for listener in sockets:
        listener.setblocking(False)
    return sockets


def _config_in(directory: str) -> GatewayConfig:
    return GatewayConfig.model_validate_json((Path(directory) / _CONFIG).read_bytes())


class _Process:
    def __init__(self, name: str, worker: int | None, listeners: list[socket.socket]) -> None:
        self.name = name
        self.worker = worker
        self.listeners = listeners
        self.running: asyncio.subprocess.Process | None = None
        self.ready = asyncio.Event()  # set once it has been up
        self.pulse: Pulse | None = None  # None: it does not run
        self.link: socket.socket | None = None
        self.is_covered = False
        self.is_replaced = False  # it was killed because it hung

    @property
    def is_up(self) -> bool:
        return self.pulse is not None and self.pulse.up

    def send(self, number: int) -> None:
        if self.running is not None and self.running.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.running.send_signal(number)


@dataclass(eq=False)
class Supervisor:
    """See above. ``run`` needs a running event loop.

    Args:
        _config: of the gateway.
        _command: starts a process of it; ``Role`` as JSON is appended.
        _on_ready: called with the gateway's URL, once all serve.
        _secret: shared by all processes, across restarts.
        _given: sockets to serve at; no ``clients``: the configuration says where.
        _takes_over: there is a gateway before this one.

    ``taken``: another gateway serves by now.
    """

    _config: GatewayConfig
    _command: list[str]
    _on_ready: Callable[[str], None]
    _secret: str
    _given: Given = NOTHING_GIVEN
    _takes_over: bool = False
    taken: bool = False
    _ending: asyncio.Future[int] | None = None
    _signal: int = signal.SIGTERM

    async def run(self) -> int:
        """Until SIGINT or SIGTERM; returns the exit code.

        Raises:
            HeteroGatewayError: the address is taken.
        """
        loop = asyncio.get_running_loop()
        server = self._config.server
        given = list(self._given.clients)
        clients = given or listen_together(server.host, server.port, server.workers)
        url = url_of(clients[0])
        if server.certificate_file is not None:
            url = url.replace("http:", "https:", 1)
        held = SocketDirectory()
        self._directory = held.path
        try:
            directory = Path(self._directory)
            write_whole(directory / _CONFIG, self._config.model_dump_json(), mode=0o600)
            hub, control = listen(str(directory / _HUB)), listen(str(directory / _CONTROL))
        except OSError as error:
            held.remove()
            raise HeteroGatewayError(f"{self._directory}: {error.strerror or error}") from error
        self._life, lifeline = os.pipe()
        scheduler = _Process("the scheduler process", None, [hub, control])
        self._clients = clients
        # Inherited: as many sockets as the predecessor had workers; each needs somebody who
        # accepts.
        workers = [
            _Process(f"worker {i}", i, clients[i :: server.workers] or [clients[i % len(clients)]])
            for i in range(server.workers)
        ]
        self._workers = workers
        self._ending = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end, number, [scheduler, *workers])
        loop.add_signal_handler(signal.SIGHUP, scheduler.send, signal.SIGHUP)
        loop.add_signal_handler(signal.SIGUSR1, self._hand_over, [scheduler, *workers])
        tasks = [loop.create_task(self._watch([scheduler, *workers]))]
        try:
            for each in (scheduler, *workers):
                tasks.append(loop.create_task(self._keep(each)))
                if each is scheduler:
                    await self._or_end(scheduler)
            for each in workers:
                await self._or_end(each)
            problem = None
            if not self._ending.done():
                try:
                    self._on_ready(url)
                except HeteroGatewayError as error:
                    problem = error
                    self._end(signal.SIGINT, [])
            code = await self._ending
            await self._stop(scheduler, workers, clients)
            if problem is not None:
                raise problem
        finally:
            for task in tasks:
                task.cancel()
            for each in (scheduler, *workers):
                each.send(signal.SIGKILL)
            await asyncio.gather(*tasks, return_exceptions=True)
            os.close(lifeline)
            os.close(self._life)
            for listener in (*clients, hub, control):
                listener.close()
            held.remove()
        return code

    def _hand_over(self, processes: list[_Process]) -> None:
        """The scheduler process reports that another gateway serves."""
        assert self._ending is not None
        if not self._ending.done():
            self.taken = True
            self._end(signal.SIGUSR1, processes)

    def _end(self, number: int, processes: list[_Process]) -> None:
        assert self._ending is not None
        if self._ending.done():
            for process in processes:
                process.send(number)  # a second time: at once
        else:
            self._signal = number
            self._ending.set_result(0)

    async def _or_end(self, process: _Process) -> None:
        """Wait until a process serves, or the gateway ends."""
        assert self._ending is not None
        ready = asyncio.ensure_future(process.ready.wait())
        either: set[asyncio.Future[Any]] = {ready, self._ending}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()

    async def _stop(
        self, scheduler: _Process, workers: list[_Process], clients: list[socket.socket]
    ) -> None:
        for worker in workers:
            self._cover(worker, on=False)
        for listener in clients:
            listener.close()  # new connections are refused, not kept waiting
        config = _config_in(self._directory)
        limit_s = config.server.drain_s + config.server.shutdown_timeout_s + _GRACE_S
        # Nobody checks whether the scheduler process is ready once the workers are gone.
        for group, number in ((workers, self._signal), ([scheduler], signal.SIGINT)):
            running = []
            for process in group:
                process.send(number)
                if process.running is not None:
                    running.append(asyncio.ensure_future(process.running.wait()))
            if running:
                await asyncio.wait(running, timeout=None if self.taken else limit_s)

    async def _keep(self, process: _Process) -> None:
        """Run a process, restarting it until the end."""
        assert self._ending is not None
        while not self._ending.done():
            began_s = time.monotonic()
            code = await self._run_once(process)
            if self._ending.done():
                return
            if not process.ready.is_set():
                # It could not even start: its own message is on stderr.
                self._ending.set_result(code if code > 0 else 1)
                return
            how = f"signal {-code}" if code < 0 else f"code {code}"
            _log.error("%s ended by %s; restarting it", process.name, how)
            if process.is_replaced:
                process.is_replaced = False
            elif time.monotonic() - began_s < _SHORT_LIFE_S:
                await asyncio.sleep(_PAUSE_S)

    async def _run_once(self, process: _Process) -> int:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        role = Role(
            process.worker,
            [listener.fileno() for listener in process.listeners],
            theirs.fileno(),
            self._life,
            self._directory,
        )
        if process.worker is None:
            role.clients = [listener.fileno() for listener in self._clients]
            role.admin = [listener.fileno() for listener in self._given.admin]
            role.takes_over = self._takes_over
        handed = (*role.clients, *role.admin)
        try:
            process.running = await asyncio.create_subprocess_exec(
                *self._command,
                msgspec.json.encode(role).decode(),
                pass_fds=(*role.listeners, *handed, role.heart, self._life),
                stdin=subprocess.DEVNULL,
                env={**os.environ, SECRET_ENV: self._secret},
                # A terminal's SIGINT is for the supervisor, which ends the processes in order.
                start_new_session=True,
            )
        finally:
            theirs.close()
        loop = asyncio.get_running_loop()
        process.link, process.pulse = ours, Pulse(self._config.server.worker_timeout_s)
        loop.add_reader(ours, self._heard, ours, process)
        code = await process.running.wait()
        process.link = process.pulse = None
        loop.remove_reader(ours)
        ours.close()
        self._cover(process, on=True)
        return code

    def _heard(self, link: socket.socket, process: _Process) -> None:
        try:
            said = link.recv(4096)
        except OSError:
            said = b""
        if not said:
            asyncio.get_running_loop().remove_reader(link)
        elif process.pulse is not None:
            was_up = process.is_up
            process.pulse.beat()
            process.ready.set()
            if not was_up:
                self._came_up(process)

    # Hanging processes

    async def _watch(self, processes: list[_Process]) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for process in processes:
                try:
                    self._look(process)
                except Exception:  # the boundary of a loop that must go on
                    _log.exception("%s cannot be checked", process.name)

    def _look(self, process: _Process) -> None:
        if process.pulse is None or process.running is None:
            return
        condition = process.pulse.look(stopped=is_stopped(process.running.pid))
        if condition in (Condition.STOPPED, Condition.HANGS):
            why = "is stopped" if condition is Condition.STOPPED else "has hung for too long"
            _log.error("%s (process %d) %s: killing it", process.name, process.running.pid, why)
            process.is_replaced = True
            process.send(signal.SIGKILL)
        elif process.is_up:
            self._cover(process, on=condition is Condition.SILENT)

    def _came_up(self, process: _Process) -> None:
        self._cover(process, on=False)
        if process.worker is not None and process.link is not None:
            for other in self._workers:
                if other.is_covered:
                    for listener in other.listeners:
                        tell_cover(process.link, self._clients.index(listener), listener)

    def _cover(self, process: _Process, *, on: bool) -> None:
        """Whether the other workers accept connections at this one's socket."""
        assert self._ending is not None
        on = on and not self._ending.done()
        if process.worker is None or process.is_covered == on:
            return
        process.is_covered = on
        for other in self._workers:
            if other is not process and other.is_up and other.link is not None:
                for listener in process.listeners:
                    number = self._clients.index(listener)
                    tell_cover(other.link, number, listener if on else None)


def listen_together(host: str, port: int, number: int) -> list[socket.socket]:
    """This many sockets that share an address; the kernel distributes connections among them.

    Raises HeteroGatewayError: the address is taken, or unavailable.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # First without sharing: a shared socket would join a stranger's that is shared as well.
        with socket.socket(family, socket.SOCK_STREAM) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
            address = alone.getsockname()
        listeners = []
        for _ in range(number):
            listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            listeners.append(listener)
        for listener in listeners:
            listener.listen(BACKLOG)
    except OSError as error:
        raise HeteroGatewayError(cannot_listen(host, port, error)) from error
    return listeners


class SocketDirectory:
    """A new directory for Unix sockets, in the system's temporary one, held until ``remove``.

    It goes with the gateway: the supervisor removes it; if that was killed, its processes do as
    they end; if all were killed at once, the next gateway that starts.

    Raises HeteroGatewayError: there is no room for it.
    """

    def __init__(self) -> None:
        path = None
        try:
            parent = Path(tempfile.gettempdir())
            _remove_abandoned(parent)
            path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
            self._lock = _held(Path(path))
        except OSError as error:
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
            raise HeteroGatewayError(
                "no directory for sockets can be made in the temporary one (TMPDIR): "
                f"{error.strerror}"
            ) from error
        self.path = path

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _held(path: Path) -> int:
    """A lock in a directory, as a descriptor."""
    made = path / "new-lock"
    lock = os.open(made, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # It gets its name once it is locked: no other gateway finds it unlocked.
    made.rename(made.with_name(_LOCK))
    return lock


def _remove_abandoned(parent: Path) -> None:
    """Remove directories of this user whose supervisors are gone."""
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            seen = path.lstat()
            if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid():
                continue
            # One without a lock is just being made.
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its supervisor lives
        else:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
