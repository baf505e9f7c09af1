"""Long work on the event loop, done a little at a time: requests have their turns in between."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

_T = TypeVar("_T")


async def in_turns(items: Iterable[_T], at_once: int) -> AsyncIterator[list[_T]]:
    """Lists of so many items, with a turn of the event loop after each.

    Meanwhile anything may change: pass a copy of what does (``tuple`` of 100 000 takes 2 ms).
    """
    remaining = iter(items)
    while batch := list(itertools.islice(remaining, at_once)):
        yield batch
        await asyncio.sleep(0)
