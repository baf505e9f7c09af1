"""Limits how often a source is asked, whatever it answers.

Both classes use the event loop's own time, in seconds.
"""

from __future__ import annotations

import asyncio
import random

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
# Pauses differ by up to this share, or gateways that began together would always ask together.
_JITTER = 0.5
# The longest accepted Retry-After: a server must not decide when we look again.
_MOST_RETRY_AFTER_S = 60.0


class Backoff:
    """Pauses between tries, each twice as long as the previous one."""

    def __init__(self) -> None:
        self._next_s = FIRST_PAUSE_S

    def reset(self) -> None:
        """Start over: it has gone well for a while."""
        self._next_s = FIRST_PAUSE_S

    async def pause(self, retry_after_s: float = 0.0) -> None:
        """Wait. ``retry_after_s``: as the server asked, within bounds."""
        pause_s = self._next_s * (1 + _JITTER * random.random())
        self._next_s = min(2 * self._next_s, LONGEST_PAUSE_S)
        await asyncio.sleep(max(pause_s, min(retry_after_s, _MOST_RETRY_AFTER_S)))


class Allowance:
    """A rate limit with a burst.

    Args:
        per_s: in the long run.
        burst: at once, after a quiet time.
    """

    def __init__(self, per_s: float, burst: int) -> None:
        self._each_s = 1 / per_s
        self._burst_s = burst / per_s
        self._used_until_s = 0.0

    async def take(self) -> None:
        """Returns once another request may be made."""
        now_s = asyncio.get_running_loop().time()
        self._used_until_s = max(self._used_until_s, now_s) + self._each_s
        wait_s = self._used_until_s - self._burst_s - now_s
        if wait_s > 0:
            await asyncio.sleep(wait_s)
