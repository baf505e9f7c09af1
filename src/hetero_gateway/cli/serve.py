"""``serve``: run the gateway."""

import argparse
import asyncio
import functools
import logging
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from hetero_gateway.cli import standard_streams
from hetero_gateway.cli.arguments import settings
from hetero_gateway.cli.log_lines import start_logging
from hetero_gateway.cli.made_key import MadeKey
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.admin_key import forget, made_admin_key
from hetero_gateway.files.gateway_config import GatewayConfig, load_gateway_config
from hetero_gateway.files.server_config import ServerConfig
from hetero_gateway.files.setup_warnings import access_warnings
from hetero_gateway.gateway.dataplane.access_log import LineWriter
from hetero_gateway.http.clients import check_descriptor_limit
from hetero_gateway.scaleout.workers import SECRET_ENV
from hetero_gateway.serve import server
from hetero_gateway.serve.app import create_app
from hetero_gateway.serve.handover.handover import Handover
from hetero_gateway.serve.handover.predecessor import Predecessor
from hetero_gateway.serve.handover.systemd import given_sockets, tell_ready
from hetero_gateway.serve.heartbeat import Heartbeat

_STDOUT = 1
# Environment variables meant for this process alone.
_OWN = (SECRET_ENV, "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")

_log = logging.getLogger(__name__)
_successors: list[subprocess.Popen[bytes]] = []  # kept so that ended ones are reaped


def run(args: argparse.Namespace) -> int:
    standard_streams.tolerate_output()
    # A signal that reaches a starting process must not end it; it reloads afterwards.
    for number in (signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    flags = settings(args)
    check_descriptor_limit()
    if args.role is not None:
        _run_process(args, flags)
        return 0
    config = load_gateway_config(args.config, flags)
    start_logging(args.log_level, as_json=config.log.format == "json")
    for warning in access_warnings(config.server, named=config.clients.wanted):
        _log.warning("%s: %s", args.config, warning)

    if args.record is not None:
        _check_new(args.record)
    before = _predecessor("sockets", config.server) if args.takeover else None
    given = server.Given(given_sockets())
    if before is not None:
        given = server.Given(before.clients, before.admin)
    secret = before.secret if before is not None else secrets.token_hex(32)
    if config.server.workers > 1:
        return _run_workers(args, config, before, given, secret)
    os.environ[SECRET_ENV] = secret
    app = create_app(config, args.config, record=args.record, flags=flags)
    end = functools.partial(os.kill, os.getpid(), signal.SIGUSR1)
    state = None if before is None else _predecessor("state", config.server)
    handover = app.gateway.handover = Handover(config.server, secret, end, state)
    with (
        closing(MadeKey(app.gateway.made_admin_key)) as key,
        _access_log(config) as app.gateway.access,
    ):
        server.run(app, app.gateway, functools.partial(_announce, config, key, before), given)
        if handover.taken:
            key.leave()
    return 0


def _predecessor(wants: str, config: ServerConfig) -> Predecessor | None:
    """The gateway that now serves where this one will; None: there is none."""
    if not config.port:
        raise ConfigError("--takeover: needs the port of the gateway that runs (--port)")
    try:
        return Predecessor(config, wants)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except OSError as error:
        raise ConfigError(f"--takeover: {error}") from error


def _announce(config: GatewayConfig, key: MadeKey, before: Predecessor | None, url: str) -> None:
    if before is not None:
        before.serving()
    port = urlsplit(url).port
    if port is not None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR2, _start_successor, port)
    tell_ready()
    workers, admin = config.server.workers, config.server.admin_listen
    dashboard = f"dashboard {key.dashboard(url, sys.stderr)}"
    if admin is not None:
        dashboard = f"/admin and the dashboard on {admin}"
    print(
        f"hetero-gateway: serving on {url} (policy {config.scheduler.policy}, "
        f"{len(config.instances)} instances, "
        f"{f'{workers} workers, ' if workers > 1 else ''}{dashboard})",
        file=sys.stderr,
        flush=True,
    )


def _start_successor(port: int) -> None:
    """A gateway that takes over, started like this one; ``port``: where this one serves."""
    _successors[:] = [each for each in _successors if each.poll() is None]
    command = [each for each in sys.orig_argv if each != "--takeover"]
    environment = {name: value for name, value in os.environ.items() if name not in _OWN}
    try:
        successor = subprocess.Popen(
            [*command, "--takeover", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except OSError as error:
        _log.error("SIGUSR2: cannot start a gateway: %s", error.strerror)
        return
    _successors.append(successor)
    _log.info("SIGUSR2: process %d is taking over", successor.pid)


@contextmanager
def _access_log(config: GatewayConfig) -> Iterator[Callable[[list[bytes]], None] | None]:
    """Where the access log's lines go; None: it is off."""
    writer = None
    if config.log.access:
        with suppress(OSError):  # closed: nobody reads
            writer = LineWriter(_STDOUT)
    try:
        yield None if writer is None else writer.write
    finally:
        if writer is not None:
            writer.close()


def _check_new(record: Path) -> None:
    """Several runs in one file would look like one; and no run may be lost."""
    if record.exists() and record.stat().st_size > 0:
        raise ConfigError(f"--record {record}: it exists already; name a new file")
    if not record.absolute().parent.is_dir():
        raise ConfigError(f"--record {record}: there is no such folder")
    try:
        record.open("ab").close()
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--record {record}: cannot be written: {reason}") from error


# Modules for several processes are imported only when needed: a single one saves the memory.


def _run_workers(
    args: argparse.Namespace,
    config: GatewayConfig,
    before: Predecessor | None,
    given: server.Given,
    secret: str,
) -> int:
    from hetero_gateway.serve.processes.supervisor import Supervisor

    # Errors in the setup show here once, rather than in each process.
    create_app(config, args.config)
    command = [sys.executable, "-m", "hetero_gateway", "serve", "--config", str(args.config)]
    command += ["--log-level", args.log_level]
    for name in ("host", "port", "policy", "workers", "record"):
        if (value := getattr(args, name)) is not None:
            command += [f"--{name}", str(value)]
    with closing(MadeKey(made_admin_key(config.server, secret))) as key:
        announce = functools.partial(_announce, config, key, before)
        command.append("--role")
        takes_over = before is not None
        supervisor = Supervisor(config, command, announce, secret, given, takes_over)
        code = asyncio.run(supervisor.run())
        if supervisor.taken:
            key.leave()
        return code


def _run_process(args: argparse.Namespace, flags: dict[str, Any]) -> None:
    """One process of several: the scheduler's, or a worker."""
    from hetero_gateway.serve.processes.supervisor import Role, sockets_of
    from hetero_gateway.serve.processes.worker import Worker

    role = msgspec.json.decode(args.role, type=Role)
    role.die_with_supervisor()
    config = role.config()
    start_logging(args.log_level, as_json=config.log.format == "json")

    heartbeat = Heartbeat(role.heart)

    def ready(_: str) -> None:
        """The supervisor prints where it serves."""

    if role.worker is None:
        hub, control = role.sockets()
        clients, given = sockets_of(role.clients), server.Given([control], sockets_of(role.admin))
        app = create_app(config, args.config, hub, args.record, flags)
        app.gateway.keep_config = role.keep_config
        end = functools.partial(os.kill, os.getppid(), signal.SIGUSR1)
        before = _predecessor("state", config.server) if role.takes_over else None
        secret = os.environ[SECRET_ENV]
        handover = Handover(config.server, secret, end, before, clients)
        app.gateway.handover = handover
        server.run(app, app.gateway, ready, given, heartbeat)
        if role.supervisor_gone() and not handover.taken and app.gateway.made_admin_key is not None:
            forget(app.gateway.made_admin_key)  # kept by the supervisor until now
    else:
        given = server.Given(role.sockets())
        worker = Worker(config, args.config, role.worker, role.hub_path, role.control_path)
        with _access_log(config) as worker.access:
            server.run(worker.app, worker, ready, given, heartbeat)
