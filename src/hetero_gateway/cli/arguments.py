"""The arguments of the commands: declared in ``commands/NAME.yaml``, parsed by argparse.

A file has the command's ``help``, ``description`` and ``epilog``, and its ``arguments``: by name,
the arguments of ``add_argument``, with ``type`` a name of ``_TYPES``. An argument without ``help``
is hidden; ``sets`` is the configuration key that a flag overrides. Arguments under ``one of``
exclude each other; those under any other name with ``arguments`` of its own form a group with that
title. ``actions`` are subcommands. ``run`` names the function that runs the command, by default
``run`` of the module with its name.
"""

import argparse
import importlib
import math
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from hetero_gateway.errors import ConfigError


def add_command(subparsers: Any, name: str) -> None:
    """Declare a command; its imports wait until ``run`` of the parsed arguments."""
    _add(subparsers, name, _read(name), f"{name}.run")


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags set in the configuration, by key; None: nothing."""
    return {key: getattr(args, name) for name, key in args.sets.items()}


def _read(name: str) -> dict[str, Any]:
    file = resources.files("hetero_gateway.cli").joinpath("commands", f"{name}.yaml")
    told: dict[str, Any] = yaml.load(file.read_bytes(), yaml.CSafeLoader)
    return told


@cache
def _shared() -> dict[str, Any]:
    return _read("shared")


def _add(subparsers: Any, name: str, told: Mapping[str, Any], run: str) -> None:
    epilog = told.get("epilog")
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=told["help"],
        description=told["description"],
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter
        if epilog and "\n" in epilog
        else argparse.HelpFormatter,
    )
    sets: dict[str, str] = {}
    _add_arguments(parser, told.get("arguments", {}), sets)
    parser.set_defaults(run=partial(_run, told.get("run", run)), sets=sets)
    if "actions" in told:
        actions = parser.add_subparsers(**told["subparsers"])
        for action, of_action in told["actions"].items():
            _add(actions, action, of_action, run)


def _add_arguments(
    container: argparse._ActionsContainer, arguments: Mapping[str, Any], sets: dict[str, str]
) -> None:
    for names, told in arguments.items():
        words = dict(_shared()[names] if told is None else told)
        if "arguments" in words:
            group: argparse._ArgumentGroup
            if names == "one of":
                group = container.add_mutually_exclusive_group(
                    required=words.get("required", False)
                )
            else:
                group = container.add_argument_group(names)
            _add_arguments(group, words["arguments"], sets)
            continue
        key = words.pop("sets", None)
        if "type" in words:
            words["type"] = _TYPES[words["type"]]
        if words.get("action") == "boolean":
            words["action"] = argparse.BooleanOptionalAction
        if words.get("choices") == "policies":
            from hetero_gateway.core.policies import POLICY_NAMES

            words["choices"] = POLICY_NAMES
        words.setdefault("help", argparse.SUPPRESS)
        added = container.add_argument(*names.split(", "), **words)
        if key is not None:
            sets[added.dest] = key


def _run(name: str, args: argparse.Namespace) -> int:
    """A command's function, imported on its first call."""
    module, _, function = name.partition(".")
    if (authorities := getattr(args, "ca_file", None)) is not None:
        if not authorities.is_file():
            raise ConfigError(f"--ca-file {authorities}: there is no such file")
        os.environ["SSL_CERT_FILE"] = str(authorities)  # where OpenSSL and httpx look
    code: int = getattr(importlib.import_module(f"hetero_gateway.cli.{module}"), function)(args)
    return code


# argparse reports a ValueError itself.


def _number(
    name: str, kind: Callable[[str], float], allowed: Callable[[Any], bool], said: str
) -> Any:
    def parse(text: str) -> float:
        value = kind(text)
        if not allowed(value):
            raise argparse.ArgumentTypeError(f"must be {said}")
        return value

    parse.__name__ = name  # the name argparse uses in its errors
    return parse


def _several(name: str, kind: Callable[[str], float]) -> Any:
    def parse(text: str) -> tuple[float, ...]:
        return tuple(dict.fromkeys(kind(part) for part in text.split(",")))

    parse.__name__ = name
    return parse


def tokens(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def names(text: str) -> tuple[str, ...]:
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(parts):
        raise argparse.ArgumentTypeError("must be names with commas between them")
    return parts


_rate = _number("rate", float, lambda value: value > 0, "above 0, or inf")
_positive_float = _number("positive_float", float, lambda v: 0 < v < math.inf, "above 0")
_TYPES: dict[str, Callable[[str], Any]] = {"path": Path} | {
    kind.__name__: kind
    for kind in (
        int,
        float,
        names,
        tokens,
        _rate,
        _several("rates", _rate),
        _positive_float,
        _several("positive_floats", _positive_float),
        _number("positive_int", int, lambda value: value >= 1, "at least 1"),
        _number("port", int, lambda value: 1 <= value <= 65535, "from 1 to 65535"),
        _number("seconds", float, lambda value: 1 <= value <= 3600, "between 1 and 3600"),
        _number("share", float, lambda value: 0 <= value <= 1, "from 0 to 1"),
        _number("inner_share", float, lambda value: 0 < value < 1, "above 0 and below 1"),
    )
}
