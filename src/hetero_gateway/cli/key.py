"""``key``: create, list and hash clients' keys; print a gateway's own; write hashes for Envoy."""

import argparse
import json
import sys
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from hetero_gateway.cli.arguments import settings
from hetero_gateway.cli.made_key import dashboard_address
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.admin_key import find
from hetero_gateway.files.client_keys import (
    ClientsConfig,
    KeyConfig,
    add_group,
    add_key,
    hash_of,
    new_key,
    read_keys,
)
from hetero_gateway.files.envoy_keys import envoy_keys
from hetero_gateway.files.gateway_config import load_gateway_config
from hetero_gateway.files.secrets import secret
from hetero_gateway.files.whole_file import write_keys
from hetero_gateway.files.yaml_file import parse_model, read_yaml

_DEFAULT_FILE = Path("keys.yaml")


def run_new(args: argparse.Namespace) -> int:
    clients, path = _place(args)
    groups = clients.groups | (read_keys(path).groups if path.exists() else {})
    if args.group is not None and args.group not in groups:
        where = f"-c {args.config}" if args.config else f"--keys-file {path}"
        raise ConfigError(
            f"{path}: there is no group {args.group!r}; make it first: "
            f"hetero-gateway key group {args.group} {where}"
        )
    hash_key = secret(clients.hash_key_env, "clients.hash_key_env")
    key = sys.stdin.readline().strip() if args.stdin else new_key()
    entry = {"name": args.name, "hash": hash_of(key, hash_key), **_wanted(args)}
    parse_model(KeyConfig, entry, "key new")
    add_key(path, entry)
    if args.json:
        told = {"name": args.name, "file": str(path)}
        print(json.dumps(told if args.stdin else told | {"key": key}))
        return 0
    if not args.stdin:
        print(key)
    shown = "" if args.stdin else "; this is the only time that the key is shown"
    print(f"{args.name} is in {path}{shown}", file=sys.stderr)
    return 0


def run_group(args: argparse.Namespace) -> int:
    clients, path = _place(args)
    if args.name in clients.groups:
        raise ConfigError(f"{args.config}: clients.groups has {args.name!r} already")
    add_group(path, args.name, _wanted(args))
    if args.json:
        print(json.dumps({"name": args.name, "file": str(path)}))
    else:
        print(f"group {args.name} is in {path}", file=sys.stderr)
    return 0


def _wanted(args: argparse.Namespace) -> dict[str, Any]:
    wanted = settings(args)
    for name in ("models", "classes"):
        if wanted.get(name):
            wanted[name] = wanted[name].split(",")
    wanted["expires"] = _date_of(wanted.get("expires"))
    return {name: value for name, value in wanted.items() if value is not None}


def _date_of(text: str | None) -> str | None:
    """Also accepts durations such as ``90d``."""
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
            f"{args.url}: no gateway of yours on this machine has made a key for this address; "
            "give the URL as `serve` prints it"
        )
    print(dashboard_address(found.url, found.key) if args.link else found.key)
    return 0


def run_envoy(args: argparse.Namespace) -> int:
    config = load_gateway_config(args.config)
    text, notes = envoy_keys(config, args.config.parent, any_model=args.any_model)
    if args.output is None:
        print(text, end="")
    else:
        write_keys(args.output, text)
    for note in notes:
        print(f"hetero-gateway: {note}", file=sys.stderr)
    return 0


def _place(args: argparse.Namespace) -> tuple[ClientsConfig, Path]:
    """The configuration's section on clients, and the file of their keys. Raises ConfigError."""
    if args.config is None:
        return ClientsConfig(), args.keys_file or _DEFAULT_FILE
    section = read_yaml(args.config).get("clients") or {}
    clients = parse_model(ClientsConfig, section, f"{args.config}: clients")
    if clients.keys_file is None:
        raise ConfigError(f"{args.config}: clients.keys_file: name a file there first")
    return clients, args.config.parent / clients.keys_file
