"""``key``: make, list and hash clients' keys; print a gateway's own; write Envoy's hashes."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from hetero_gateway.cli.made_key import dashboard_address
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.admin_key import find
from hetero_gateway.files.client_keys import (
    ClientsConfig,
    KeyConfig,
    add_key,
    hash_of,
    new_key,
    read_keys,
)
from hetero_gateway.files.envoy_keys import envoy_keys
from hetero_gateway.files.gateway_config import load_gateway_config
from hetero_gateway.files.secrets import secret
from hetero_gateway.files.whole_file import write_whole
from hetero_gateway.files.yaml_file import parse_model, read_yaml

_DEFAULT_FILE = Path("keys.yaml")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "key",
        help="make clients' keys, and list them",
        description="Make clients' keys, list them, and hash those that there are already.",
        epilog="example: hetero-gateway key new alice -c gateway.yaml --requests-per-minute 60",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser(
        "new",
        help="make a key, print it once, and write its hash into the file of keys",
        description="Make a key of 256 random bits. It is printed, once, and kept nowhere; its "
        "hash is added to the file of keys. A running gateway takes it up when it is reloaded.",
        epilog="example: hetero-gateway key new alice -c gateway.yaml --group team-a "
        "--tokens-per-minute 100000 --expires 2027-01-01",
    )
    new.add_argument("name", metavar="NAME", help="by which metrics and /admin call it")
    _add_place(new)
    new.add_argument("--group", metavar="G", help="whose limits it shares")
    new.add_argument("--models", metavar="A,B", help="the models that it may ask for")
    for flag in ("requests-per-minute", "tokens-per-minute", "concurrency"):
        new.add_argument(f"--{flag}", type=int, metavar="N", help=f"its limit of {flag}")
    new.add_argument("--class", dest="request_class", metavar="C", help="of its requests")
    new.add_argument("--share", type=float, metavar="W", help="its weight in contention")
    new.add_argument("--expires", metavar="DATE", help="from then on it is refused; or 90d")
    new.add_argument(
        "--stdin",
        action="store_true",
        help="do not make a key: read one from standard input (one that clients have already)",
    )
    new.add_argument("--json", action="store_true", help="print one JSON document")
    new.set_defaults(run=run_new)
    shown = actions.add_parser(
        "list",
        help="list the keys of a file",
        description="List the keys of a file: names and limits; there is nothing else in it.",
        epilog="example: hetero-gateway key list -c gateway.yaml",
    )
    _add_place(shown)
    shown.add_argument("--json", action="store_true", help="print one JSON document")
    shown.set_defaults(run=run_list)
    admin = actions.add_parser(
        "admin",
        help="print the key of /admin that a gateway on this machine made at its start",
        description="Print the key of /admin that a gateway on this machine made at its start: "
        "one that you run, listens on loopback, and has neither server.admin_key_env nor "
        "server.admin_listen.",
        epilog="example: hetero-gateway key admin http://127.0.0.1:8000",
    )
    admin.add_argument("url", metavar="URL", help="the gateway, as http://127.0.0.1:PORT")
    admin.add_argument(
        "--link", action="store_true", help="print the dashboard's address with the key in it"
    )
    admin.set_defaults(run=run_admin)
    envoy = actions.add_parser(
        "envoy",
        help="write the hashes by which Envoy knows keys while no picker answers",
        description="Write the file by which docker/envoy/envoy.yaml knows clients' keys while no "
        "picker answers: hashes and expiry times of all keys of a gateway's configuration, and no "
        "key. Run it again when keys change; Envoy looks at the file again by itself.",
        epilog="example: hetero-gateway key envoy -c gateway.yaml "
        "-o /etc/envoy/hetero-gateway.keys",
    )
    envoy.add_argument("-c", "--config", type=Path, required=True, metavar="FILE",
                       help="the picker's configuration")  # fmt: skip
    envoy.add_argument("-o", "--output", type=Path, metavar="FILE", help="of Envoy; default: "
                       "standard output. A new one is its owner's alone")  # fmt: skip
    envoy.add_argument(
        "--any-model",
        action="store_true",
        help="also keys with `models`: without a picker nothing keeps them to these",
    )
    envoy.set_defaults(run=run_envoy)


def _add_place(parser: argparse.ArgumentParser) -> None:
    place = parser.add_mutually_exclusive_group()
    place.add_argument("-c", "--config", type=Path, metavar="FILE", help="the gateway's: it says "
                       "where its keys are")  # fmt: skip
    place.add_argument(
        "--keys-file", type=Path, metavar="FILE", help=f"of keys (default: {_DEFAULT_FILE})"
    )


def run_new(args: argparse.Namespace) -> int:
    clients, path = _place(args)
    groups = clients.groups | (read_keys(path).groups if path.exists() else {})
    if args.group is not None and args.group not in groups:
        raise ConfigError(f"{path}: there is no group {args.group!r}; write it there first")
    hash_key = secret(clients.hash_key_env, "clients.hash_key_env")
    key = sys.stdin.readline().strip() if args.stdin else new_key()
    entry = {"name": args.name, "hash": hash_of(key, hash_key), **_wanted(args)}
    parse_model(KeyConfig, entry, "key new")
    add_key(path, entry)
    if args.json:
        print(
            json.dumps(
                {"name": args.name, "file": str(path)} | ({} if args.stdin else {"key": key})
            )
        )
        return 0
    if not args.stdin:
        print(key)
    shown = "" if args.stdin else "; this is the only time that the key is shown"
    print(f"{args.name} is in {path}{shown}", file=sys.stderr)
    return 0


def _wanted(args: argparse.Namespace) -> dict[str, Any]:
    wanted = {
        "group": args.group,
        "models": args.models.split(",") if args.models else None,
        "requests_per_minute": args.requests_per_minute,
        "tokens_per_minute": args.tokens_per_minute,
        "concurrency": args.concurrency,
        "class": args.request_class,
        "share": args.share,
        "expires": _date_of(args.expires),
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _date_of(text: str | None) -> str | None:
    """``90d`` is a date, too."""
    if text is not None and text.endswith("d") and text[:-1].isdigit():
        return (date.today() + timedelta(days=int(text[:-1]))).isoformat()
    return text


def run_list(args: argparse.Namespace) -> int:
    keys = read_keys(_place(args)[1]).keys
    rows = [
        key.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"hash"})
        for key in keys
    ]
    if args.json:
        print(json.dumps({"keys": rows}))
        return 0
    for row in rows:
        limits = ", ".join(f"{name} {value}" for name, value in row.items() if name != "name")
        print(f"{row['name']}: {limits or 'no limits'}")
    return 0


def run_admin(args: argparse.Namespace) -> int:
    if (found := find(args.url)) is None:
        raise ConfigError(
            f"{args.url}: no gateway that you run on this machine has made a key for this address; "
            "URL is as `serve` prints it"
        )
    print(dashboard_address(found.url, found.key) if args.link else found.key)
    return 0


def run_envoy(args: argparse.Namespace) -> int:
    config = load_gateway_config(args.config)
    text, notes = envoy_keys(config, args.config.parent, any_model=args.any_model)
    if args.output is None:
        print(text, end="")
    else:
        path: Path = args.output
        try:
            mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
            write_whole(path, text, mode=mode)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    for note in notes:
        print(f"hetero-gateway: {note}", file=sys.stderr)
    return 0


def _place(args: argparse.Namespace) -> tuple[ClientsConfig, Path]:
    """What the configuration says of clients, and where their keys are. Raises ConfigError."""
    if args.config is None:
        return ClientsConfig(), args.keys_file or _DEFAULT_FILE
    section = read_yaml(args.config).get("clients") or {}
    clients = parse_model(ClientsConfig, section, f"{args.config}: clients")
    if clients.keys_file is None:
        raise ConfigError(f"{args.config}: clients.keys_file: name a file there first")
    return clients, args.config.parent / clients.keys_file
