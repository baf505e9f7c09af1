"""``serve``: run the gateway."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from hetero_gateway.cli.arguments import add_log_level, start_logging
from hetero_gateway.core.policies import POLICY_NAMES
from hetero_gateway.files.gateway_config import load_gateway_config


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="run the gateway",
        description="Run the gateway.",
        epilog="example: hetero-gateway serve -c configs/gateway.yaml --port 8000",
    )
    parser.add_argument("-c", "--config", type=Path, required=True, metavar="FILE")
    parser.add_argument("--host", help="address to listen on (default: the file's)")
    parser.add_argument("--port", type=int, help="port; 0 takes a free one and prints it")
    parser.add_argument("--policy", choices=POLICY_NAMES, help="the policy (default: the file's)")
    parser.add_argument("--workers", type=int, help="always 1; more is refused, with the reason")
    add_log_level(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = load_gateway_config(
        args.config,
        {
            "server.host": args.host,
            "server.port": args.port,
            "server.workers": args.workers,
            "scheduler.policy": args.policy,
        },
    )
    start_logging(args.log_level)
    # Imported late: validate and --help need no server.
    from hetero_gateway.gateway import server
    from hetero_gateway.gateway.app import create_app

    app = create_app(config, args.config)

    def announce(url: str) -> None:
        print(
            f"hetero-gateway: serving on {url} (policy {config.scheduler.policy}, "
            f"{len(config.instances)} instances, dashboard {url}/dashboard)",
            file=sys.stderr,
            flush=True,
        )

    server.run(app, announce)
    return 0
