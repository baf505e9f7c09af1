"""``serve``: run the gateway."""

import argparse
import asyncio
import functools
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from hetero_gateway.cli import standard_streams
from hetero_gateway.cli.arguments import settings
from hetero_gateway.cli.log_lines import start_logging
from hetero_gateway.cli.made_key import MadeKey
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.admin_key import forget, made_admin_key
from hetero_gateway.files.gateway_config import GatewayConfig, load_gateway_config
from hetero_gateway.gateway.dataplane.access_log import LineWriter
from hetero_gateway.serve import server
from hetero_gateway.serve.app import create_app
from hetero_gateway.serve.heartbeat import Heartbeat

_STDOUT = 1


def run(args: argparse.Namespace) -> int:
    standard_streams.tolerate_output()
    # Nobody is to be ended by it who only starts, and will reload at it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    flags = settings(args)
    if args.role is not None:
        _run_process(args, flags)
        return 0
    config = load_gateway_config(args.config, flags)
    start_logging(args.log_level, as_json=config.log.format == "json")

    if args.record is not None:
        _check_new(args.record)
    if config.server.workers > 1:
        return _run_workers(args, config)
    app = create_app(config, args.config, record=args.record, flags=flags)
    with (
        closing(MadeKey(app.gateway.made_admin_key)) as key,
        _access_log(config) as app.gateway.access,
    ):
        server.run(app, app.gateway, functools.partial(_announce, config, key))
    return 0


def _announce(config: GatewayConfig, key: MadeKey, url: str) -> None:
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


@contextmanager
def _access_log(config: GatewayConfig) -> Iterator[Callable[[list[bytes]], None] | None]:
    """What takes the access log's lines; None: it is off."""
    writer = None
    if config.log.access:
        with suppress(OSError):  # it is closed: nobody reads
            writer = LineWriter(_STDOUT)
    try:
        yield None if writer is None else writer.write
    finally:
        if writer is not None:
            writer.close()


def _check_new(record: Path) -> None:
    """Several runs in one file would be taken for one; and none is to be lost."""
    if record.exists() and record.stat().st_size > 0:
        raise ConfigError(f"--record {record}: it exists already; name a new file")
    if not record.absolute().parent.is_dir():
        raise ConfigError(f"--record {record}: there is no such folder")


# What several processes take is imported where there are several: one is spared the memory.


def _run_workers(args: argparse.Namespace, config: GatewayConfig) -> int:
    from hetero_gateway.serve.processes.supervisor import Supervisor

    # What cannot be put together shows here, once, rather than in each process.
    create_app(config, args.config)
    command = [sys.executable, "-m", "hetero_gateway", "serve", "--config", str(args.config)]
    command += ["--log-level", args.log_level]
    for name in ("host", "port", "policy", "workers", "record"):
        if (value := getattr(args, name)) is not None:
            command += [f"--{name}", str(value)]
    secret = secrets.token_hex(32)
    with closing(MadeKey(made_admin_key(config.server, secret))) as key:
        announce = functools.partial(_announce, config, key)
        return asyncio.run(Supervisor(config, [*command, "--role"], announce, secret).run())


def _run_process(args: argparse.Namespace, flags: dict[str, Any]) -> None:
    """One process of several: the scheduler's, or a worker."""
    from hetero_gateway.serve.processes.supervisor import Role
    from hetero_gateway.serve.processes.worker import Worker

    role = msgspec.json.decode(args.role, type=Role)
    role.die_with_supervisor()
    config = role.config()
    start_logging(args.log_level, as_json=config.log.format == "json")

    heartbeat = Heartbeat(role.heart)

    def ready(_: str) -> None:
        """The supervisor says where it serves."""

    if role.worker is None:
        hub, control = role.sockets()
        app = create_app(config, args.config, hub, args.record, flags)
        app.gateway.keep_config = role.keep_config
        server.run(app, app.gateway, ready, control, heartbeat)
        if role.supervisor_gone() and app.gateway.made_admin_key is not None:
            forget(app.gateway.made_admin_key)  # which the supervisor had kept
    else:
        (clients,) = role.sockets()
        worker = Worker(config, args.config, role.worker, role.hub_path, role.control_path)
        with _access_log(config) as worker.access:
            server.run(worker.app, worker, ready, clients, heartbeat)
