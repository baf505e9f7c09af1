"""``python -m tests.fuzz TARGET``: what ``scripts/fuzz`` runs."""

import argparse
import asyncio
import resource
import sys
import time
from pathlib import Path

from tests.fuzz.answers import fuzz_answers
from tests.fuzz.cache_news import fuzz_cache_news
from tests.fuzz.fuzzing import fuzz_bodies, fuzz_heads
from tests.fuzz.key_files import fuzz_keys
from tests.fuzz.kubernetes import fuzz_kubernetes
from tests.fuzz.picking import fuzz_grpc, fuzz_http2
from tests.fuzz.redis_rows import fuzz_redis
from tests.fuzz.short_ways import fuzz_short_ways
from tests.fuzz.websockets import fuzz_websocket

_TARGETS = {
    "answers": fuzz_answers,
    "bodies": fuzz_bodies,
    "cache-news": fuzz_cache_news,
    "grpc": fuzz_grpc,
    "heads": fuzz_heads,
    "http2": fuzz_http2,
    "keys": fuzz_keys,
    "kubernetes": fuzz_kubernetes,
    "redis": fuzz_redis,
    "short-ways": fuzz_short_ways,
    "websocket": fuzz_websocket,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        "scripts/fuzz",
        description="Mutations of a corpus, for a gateway: requests are answered with 2xx or 4xx, "
        "and the next is served; files are read or refused in words; a store costs only its view.",
        epilog="example:\n  scripts/fuzz bodies --seed 3 --count 20000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", choices=_TARGETS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=5000, help="inputs (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="go on with further seeds for so long")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write what fails there")
    args = parser.parse_args()
    fuzz, seed = _TARGETS[args.target], args.seed
    until_s = time.monotonic() + 60 * (args.minutes or 0)
    findings = asyncio.run(fuzz(seed, args.count))
    while time.monotonic() < until_s:
        seed += 1
        more = asyncio.run(fuzz(seed, args.count))
        findings.sent += more.sent
        findings.statuses += more.statuses
        findings.violations += more.violations
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{peak_mb:.0f} MB at most")
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
