"""``profile`` and the engine that it measures, in one process and in virtual time.

    python -m tests.fakes.profile_command COUNT profile URL ...

The URL is replaced by that of the process's own engine. At the engine's COUNT-th completion the
process stops itself by SIGSTOP, so that whoever started it can kill or interrupt it right there; 0:
it does not stop.
"""

import sys
from contextlib import closing
from typing import Any

import pytest
import uvloop

from hetero_gateway.cli import main, profile
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.profiler.live import MeasuredProfile, measure
from tests.fakes.clock import VirtualClock
from tests.fakes.engine import engine


def run(stop_after: int, words: list[str]) -> int:
    async def measure_own(_target: object, *args: Any, **options: Any) -> MeasuredProfile:
        async with engine(stop_after=stop_after) as (url, _):
            return await measure(parse_target(url), *args, **options)

    with closing(VirtualClock()) as clock, pytest.MonkeyPatch.context() as patch:
        clock.install(patch)
        patch.setattr(uvloop, "new_event_loop", clock.new_loop)
        patch.setattr(profile, "measure", measure_own)
        return main(words)


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
