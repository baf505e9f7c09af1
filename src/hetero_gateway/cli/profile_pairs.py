"""``profile URL --pairs URL …``: transfers between instances, measured for ``serve``."""

import argparse
import asyncio
import json
import sys

import uvloop

from hetero_gateway.cli.reports.report import print_table
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.pairs_file import write_pairs
from hetero_gateway.files.secrets import secret
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.profiler.pairs import MeasuredPair, document, measure_pairs

_ONLY_ALONE = ("samples", "from_gateway", "resume", "plot", "report")


def run(args: argparse.Namespace) -> int:
    """0: at least one pair can hand over; 1: none can."""
    if args.url is None:
        raise ConfigError("profile --pairs: put the first URL before the flag: URL --pairs URL")
    for name in _ONLY_ALONE:
        if getattr(args, name):
            raise ConfigError(f"profile --pairs: --{name.replace('_', '-')} is not for pairs")
    if args.output.suffix not in (".yaml", ".yml") or not args.output.parent.is_dir():
        raise ConfigError(f"-o {args.output}: must be a .yaml file in an existing folder")
    key = secret(args.api_key_env, "--api-key-env")
    targets = [parse_target(url, key) for url in dict.fromkeys((args.url, *args.pairs))]
    if len(targets) < 2:
        raise ConfigError("--pairs: name an instance other than the first")

    async def measured() -> list[MeasuredPair]:
        return await measure_pairs(
            targets,
            args.connector,
            model=args.model,
            passes=args.passes,
            seed=args.seed,
            watch=lambda text: print(f"profile: {text}", file=sys.stderr),
        )

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measured())
    told = document(found, args.connector)
    write_pairs(args.output, told)
    if args.json:
        print(json.dumps({"output": str(args.output), **told}, default=str))
    else:
        print_table(
            ("PREFILL", "DECODE", "START MS", "TOKENS/S", "GBIT/S", "REFUSED"),
            [
                (
                    pair.prefill,
                    pair.decode,
                    "-" if pair.start_s is None else f"{pair.start_s * 1000:.3g}",
                    "-" if pair.tokens_per_s is None else f"{pair.tokens_per_s:.0f}",
                    "-" if pair.gbit_per_s is None else f"{pair.gbit_per_s:.3g}",
                    pair.refused or "",
                )
                for pair in found
            ],
        )
        print(f"wrote {args.output}; name it in scheduler.pairs_file")
    return 0 if any(pair.refused is None for pair in found) else 1
