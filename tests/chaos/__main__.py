"""``python -m tests.chaos``: what ``scripts/chaos`` runs."""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from tests.chaos.run import Options, Result, Run

_EPILOG = """\
example:
  scripts/chaos --seed 1 --seconds 60

The same seed draws the same requests and disturbances; when they meet is the machine's affair.
Exits with 1 when a promise is broken.
"""


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "scripts/chaos",
        description="Emulated instances that are killed, stopped, reset and broken, clients that "
        "leave, reloads, a gateway that is replaced: every request has one outcome, no answer is "
        "mixed, and nothing is left.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="default: %(default)g")
    parser.add_argument("--clients", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--instances", type=int, default=8, help="default: %(default)s")
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        help="of the gateway; with several, they and its scheduler process are killed in turn",
    )
    parser.add_argument("--json", action="store_true", help="one document instead of tables")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and files there")
    args = parser.parse_args(words)
    if args.seconds < 8 or args.clients < 1 or args.instances < 2:
        parser.error("at least 8 seconds, 1 client and 2 instances")
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        options = Options(
            args.seed, args.seconds, args.clients, args.instances, directory, args.workers
        )
        result = asyncio.run(Run(options).run())
    if args.json:
        print(json.dumps(_document(result), indent=1))
    else:
        _print_tables(result)
    return 1 if result.violations else 0


def _document(result: Result) -> dict[str, object]:
    return {
        "figures": result.figures,
        "outcomes": dict(sorted(result.outcomes.items())),
        "disturbances": dict(sorted(result.disturbances.items())),
        "violations": result.violations,
    }


def _print_tables(result: Result) -> None:
    for title, rows in (
        ("outcomes", sorted(result.outcomes.items())),
        ("disturbances", sorted(result.disturbances.items())),
        ("figures", list(result.figures.items())),
    ):
        print(f"\n{title}")
        for name, value in rows:
            print(f"  {name:24} {value!s:>12}")
    print(f"\n{len(result.violations)} violations")
    for text in result.violations[:40]:
        print(f"  {text}")


if __name__ == "__main__":
    sys.exit(main())
