"""When to retry what has failed. Pure: the time is an argument.

After a failure nothing is tried for a while, twice as long after each further one, so that a store
that is away costs one time-out now and then, and is found again within ``most_s`` of its return.
"""

from __future__ import annotations


class Breaker:
    """Closed while all goes well; open, with growing pauses, while it does not.

    Args:
        first_s: pause after the first failure, above 0, s.
        most_s: longest pause, s.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self.failures = 0  # in a row
        self.next_try_s = 0.0

    def __repr__(self) -> str:
        state = "open" if self.failures else "closed"
        return f"<Breaker {state}, {self.failures} failures in a row>"

    def pause_s(self, now_s: float) -> float:
        """How long to wait before the next try, s; 0: try now."""
        return max(0.0, self.next_try_s - now_s) if self.failures else 0.0

    def failed(self, now_s: float) -> bool:
        """Note a failure. Returns whether it is the first in a row."""
        # The exponent is bounded: a store may be away for weeks.
        pause_s = min(self._most_s, self._first_s * 2.0 ** min(self.failures, 32))
        self.failures += 1
        self.next_try_s = now_s + pause_s
        return self.failures == 1

    def succeeded(self) -> bool:
        """Note a success. Returns whether it is the first after failures."""
        ended, self.failures = self.failures > 0, 0
        return ended
