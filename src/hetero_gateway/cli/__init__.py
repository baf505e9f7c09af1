"""The console script ``hetero-gateway``: one file per command; each parses, calls, prints.

Exit codes: 0 success, 1 a failure, 2 a usage or configuration error (one line, no traceback).
A command module has ``add_parser(subparsers)``, which sets ``run=`` to a function that takes the
parsed arguments and returns the exit code.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from hetero_gateway import __version__
from hetero_gateway.errors import ConfigError, HeteroGatewayError, ProfileError

# The module of a command has its name.
COMMANDS = (
    *("init", "serve", "validate", "emulate", "profile", "demo", "plan", "simulate", "bench"),
    *("predictor", "status", "explain", "picker", "key"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse ``argv`` (default: the process's own) and run one command; returns the exit code."""
    try:
        args = _parse(argv)
        exit_code: int = args.run(args)
        sys.stdout.flush()
    except HeteroGatewayError as error:
        for line in error.lines if isinstance(error, ConfigError) else (str(error),):
            # One line, whatever a key or a file name has in it.
            text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in line)
            print(f"hetero-gateway: {text}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | ProfileError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has left, as `| head` does; the interpreter's own flush at the end
        # must find something to write to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return exit_code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hetero-gateway",
        description="A load-balancing gateway for unequal vLLM instances.",
    )
    parser.add_argument("--version", action="version", version=f"hetero-gateway {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    words = list(sys.argv[1:] if argv is None else argv)
    # Only the command that was asked for is imported; --help and a wrong name list them all. Here
    # and not above, so that a Ctrl-C while it loads is as quiet as a later one.
    if words[:1] != ["--version"]:
        for name in words[:1] if words and words[0] in COMMANDS else COMMANDS:
            importlib.import_module(f"hetero_gateway.cli.{name}").add_parser(subparsers)
    return parser.parse_args(words)
