"""``picker``: the scheduler as Envoy's endpoint picker."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from hetero_gateway.cli import standard_streams
from hetero_gateway.cli.arguments import add_log_level, start_logging
from hetero_gateway.cli.made_key import MadeKey
from hetero_gateway.core.policies import POLICY_NAMES
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import load_gateway_config


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "picker",
        help="choose instances for Envoy (ext_proc)",
        description="Run the scheduler as an endpoint picker: Envoy moves the bytes, and asks here "
        "over gRPC (ext_proc) where each request goes. /metrics, /admin and /dashboard are on the "
        "HTTP port of the configuration's server section.",
        epilog="example: hetero-gateway picker -c gateway.yaml --port 9002",
    )
    parser.add_argument(
        "-c",
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="the gateway's configuration",
    )
    parser.add_argument("--host", help="address of ext_proc (default: the file's picker.host)")
    parser.add_argument(
        "--port", type=int, help="port of ext_proc (default: the file's picker.port); 0: a free one"
    )
    parser.add_argument("--http-port", type=int, help="port of /metrics, /admin and /dashboard")
    parser.add_argument("--policy", choices=POLICY_NAMES, help="the policy (default: the file's)")
    add_log_level(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    standard_streams.tolerate_output()
    flags = {
        "picker.host": args.host,
        "picker.port": args.port,
        "server.port": args.http_port,
        "scheduler.policy": args.policy,
    }
    config = load_gateway_config(args.config, flags)
    if config.scheduler.isolate_clients:
        raise ConfigError(
            f"{args.config}: scheduler.isolate_clients: the picker cannot add a cache_salt to what "
            "Envoy sends; use serve, or have each client send a salt of its own"
        )
    if config.scheduler.engine_priorities:
        raise ConfigError(
            f"{args.config}: scheduler.engine_priorities: the picker cannot write a priority into "
            "what Envoy sends; use serve"
        )
    start_logging(args.log_level, as_json=config.log.format == "json")
    try:
        from hetero_gateway.serve import picker as server
    except ImportError as error:
        raise ConfigError(
            f"the picker needs its extra: pip install 'hetero-gateway[picker]' ({error})"
        ) from error

    def announce(address: str, url: str) -> None:
        print(
            f"hetero-gateway: picking for Envoy on {address}, serving on {url} (policy "
            f"{config.scheduler.policy}, {len(config.instances)} instances, dashboard "
            f"{key.dashboard(url, sys.stderr)})",
            file=sys.stderr,
            flush=True,
        )

    picker = server.make_server(config, args.config, announce, flags)
    with closing(MadeKey(picker.made_admin_key)) as key:
        server.run(picker)
    return 0
