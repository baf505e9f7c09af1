"""``python -m tests.fuzz TARGET``: what ``scripts/fuzz`` runs."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from tests.fuzz.fuzzing import fuzz_bodies, fuzz_heads

_TARGETS = {"bodies": fuzz_bodies, "heads": fuzz_heads}


def main() -> int:
    parser = argparse.ArgumentParser(
        "scripts/fuzz",
        description="Mutations of a corpus, sent to a gateway: 2xx or 4xx, and the next is served.",
        epilog="example:\n  scripts/fuzz bodies --seed 3 --count 20000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", choices=_TARGETS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=5000, help="inputs (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write what fails there")
    args = parser.parse_args()
    findings = asyncio.run(_TARGETS[args.target](args.seed, args.count))
    print(f"{findings.sent} sent; statuses (0: none) {dict(sorted(findings.statuses.items()))}")
    for number, (text, data) in enumerate(findings.violations):
        if number < 20:
            print(f"{text}: {data[:300]!r}")
        if args.keep is not None:
            args.keep.mkdir(parents=True, exist_ok=True)
            (args.keep / f"{args.target}-{args.seed}-{number}").write_bytes(data)
    print(f"{len(findings.violations)} violations")
    return 1 if findings.violations else 0


if __name__ == "__main__":
    sys.exit(main())
