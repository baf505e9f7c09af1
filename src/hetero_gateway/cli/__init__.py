"""The console script ``hetero-gateway``: one file per command; each parses, calls, prints.

Exit codes: 0 success, 1 a failure, 2 a usage or configuration error (one line, no traceback).
``commands/NAME.yaml`` declares a command's arguments; ``run`` of its module takes the parsed
arguments and returns the exit code.
"""

import argparse
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from hetero_gateway import __version__, compiled
from hetero_gateway.cli import standard_streams
from hetero_gateway.errors import ConfigError, HeteroGatewayError, OutputError, ProfileError

COMMANDS = (
    *("init", "serve", "validate", "emulate", "profile", "demo", "plan", "simulate", "bench"),
    *("batch", "predictor", "status", "explain", "why", "drain", "picker", "key", "doctor"),
    *("schema", "completion"),
)


class _Parser(argparse.ArgumentParser):
    """Answers an unknown command with the one probably meant, before listing all of them."""

    def error(self, message: str) -> NoReturn:
        found = re.fullmatch(r"argument COMMAND: invalid choice: '([^']*)'.*", message, re.DOTALL)
        if found is not None:
            from hetero_gateway.core.nearest import nearest_names

            near = nearest_names(found[1], COMMANDS, 1, least=0.5)
            meant = f"did you mean {near[0]}? " if near else ""
            message = f"there is no command {found[1]!r}; {meant}`hetero-gateway --help` lists them"
        super().error(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse ``argv`` (default: the process's own) and run one command; returns the exit code."""
    if argv is None:
        standard_streams.prepare()
    try:
        code = _run(argv)
    except SystemExit:  # raised by --help and usage errors
        if code := _write_out():
            return code
        raise
    return _write_out() or code


def _run(argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if argv is None and words and words[0] in ("serve", "picker", "plan", "--version"):
        # These commands decide on requests, simulate without numba, or report decisions: set up
        # before the scheduler is imported.
        why_not = compiled.take()
        if why_not:
            print(f"hetero-gateway: {why_not}", file=sys.stderr)
    try:
        args = parse(words)
        code: int = args.run(args)
    except HeteroGatewayError as error:
        return _report(error)
    except KeyboardInterrupt:
        # A second Ctrl-C during the cleanup must not print a traceback.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        return 130
    except BrokenPipeError:
        # The reader of the output has left, as `| head` does.
        standard_streams.discard_output()
        return 141
    return code


def _report(error: HeteroGatewayError) -> int:
    for line in error.lines if isinstance(error, ConfigError) else (str(error),):
        # One line, even if a key or a file name contains newlines.
        text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in line)
        print(f"hetero-gateway: {text}", file=sys.stderr)
    if isinstance(error, OutputError):
        standard_streams.discard_output()
    return 2 if isinstance(error, ConfigError | ProfileError) else 1


def _write_out() -> int:
    """Flush the output; returns the exit code if that fails, else 0."""
    try:
        sys.stdout.flush()
    except OutputError as error:
        return _report(error)
    except BrokenPipeError:
        standard_streams.discard_output()
        return 141
    return 0


def _documentation() -> str | None:
    """Where the documentation is: the project's address from the package, or the checkout."""
    from importlib import metadata
    from pathlib import Path

    for entry in metadata.metadata("hetero-gateway").get_all("Project-URL") or ():
        name, _, url = entry.partition(", ")
        if name == "Documentation":
            return f"documentation: {url}"
    index = Path(__file__).parents[3] / "docs" / "index.md"
    return f"documentation: {index}" if index.exists() else None


def parse(words: Sequence[str]) -> argparse.Namespace:
    """``run(args)`` of the result runs the command."""
    parser = _Parser(
        prog="hetero-gateway",
        description="A load-balancing gateway for unequal vLLM instances.",
        epilog=_documentation() if words and words[0] in ("-h", "--help") else None,
    )
    version = f"hetero-gateway {__version__} (scheduler: {compiled.form()})"
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    if words[:1] != ["--version"]:
        # Imported here so that a Ctrl-C during loading is as quiet as a later one.
        from hetero_gateway.cli.arguments import add_command

        # Only the requested command's file is read; --help and a wrong name read them all.
        for name in words[:1] if words and words[0] in COMMANDS else COMMANDS:
            add_command(subparsers, name)
    return parser.parse_args(words)
