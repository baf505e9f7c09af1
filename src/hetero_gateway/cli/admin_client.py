"""The flags of commands that ask a running gateway; ``load.admin`` asks it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hetero_gateway.lab.load.admin import fetch_document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """URL, --admin-key-env and --json."""
    parser.add_argument("url", metavar="URL", help="the gateway, as http://HOST:PORT")
    add_key_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_from_gateway(options: argparse._ActionsContainer, text: str) -> None:
    """--from-gateway, of a command that works on what a gateway has seen; ``text`` is its help."""
    options.add_argument("--from-gateway", metavar="URL", help=text)


def add_key_argument(options: argparse._ActionsContainer) -> None:
    """--admin-key-env."""
    options.add_argument(
        "--admin-key-env",
        metavar="NAME",
        help="environment variable with the gateway's admin key, where it wants one",
    )


def fetch(args: argparse.Namespace, path: str, params: dict[str, Any]) -> dict[str, Any]:
    """What GET ``path`` answers; ``args`` as ``add_arguments`` has them. See fetch_document."""
    return fetch_document(args.url, args.admin_key_env, path, params)


def print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document))
