"""Long work on the event loop, done a little at a time: requests have turns in between."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")

# A computation in steps, so that its driver can pause: it returns the result.
Result = TypeVar("Result")
Steps = Generator[None, None, Result]


def finish(steps: Steps[Result]) -> Result:
    """Take all steps at once."""
    result = advance(steps, math.inf)
    assert result is not None
    return result


def advance(steps: Steps[Result], for_s: float) -> Result | None:
    """Take steps for this long, in seconds; None: there are more."""
    until_s = time.perf_counter() + for_s
    try:
        next(steps)
        while time.perf_counter() < until_s:
            next(steps)
    except StopIteration as end:
        result: Result = end.value
        return result
    return None


def batches(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Lists of this many items; the last one may be shorter."""
    remaining = iter(items)
    while batch := list(itertools.islice(remaining, size)):
        yield batch


async def in_turns(items: Iterable[_T], at_once: int) -> AsyncIterator[list[_T]]:
    """Lists of this many items, with a turn of the event loop after each.

    Anything may change meanwhile: pass a copy of what does (``tuple`` of 100 000 takes 2 ms).
    """
    for batch in batches(items, at_once):
        yield batch
        await asyncio.sleep(0)
