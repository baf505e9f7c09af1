"""Decides whether a failed request is retried."""

from __future__ import annotations

import time
from collections import OrderedDict

from hetero_gateway.errors import Refusal
from hetero_gateway.files.gateway_config import RetryConfig
from hetero_gateway.http.failures import Failure, InstanceError

_WINDOW_S = 10.0
# How often a stream may break off and continue in that time, on average over open streams.
_MOST_EACH = 6
# A lost instance affects all of its requests at once, whenever they came.
_ALL_AT_ONCE = frozenset((Failure.CONNECT, Failure.RESET, Failure.SILENT, Failure.MOVED))
# How long bodies under which instances died are remembered, about the time that engines take to
# start, and how many. A request that was merely on the same two instances as the culprit looks just
# like it, so it gets another chance, on one instance.
_DEADLY_S = 300.0
_MOST_DEADLY = 256
_MOST_DEATHS = 3


class RetryBudget:
    """Retries as a share of recent requests, so that an outage is not multiplied by them.

    ``requests``: counted on arrival. Windows begin when one is needed: the first has ten seconds'
    worth of the arrivals since the last. ``deadly``: bodies under which instances died in turn, by
    their hash: when the last one died, and how many.
    """

    def __init__(self, config: RetryConfig) -> None:
        self.config = config
        self.requests = 0
        self.deadly: OrderedDict[int, tuple[float, int]] = OrderedDict()
        self._window_start_s = time.monotonic()
        self._recent = 0.0  # of a window, before it began
        self._retries = 0
        self._continued = 0
        self._most_open = 0  # requests at once, as far as asked

    def may_retry(
        self, error: InstanceError, attempts: int, open_requests: int, *, counts: bool = True
    ) -> bool:
        """Whether a request may be retried; if so it is counted, if it ``counts``.

        ``attempts``: without those whose connection was refused. After an instance is lost, the
        number of requests open at once is a bound beside recent arrivals: requests waiting there
        for their first byte arrived over minutes.
        """
        config = self.config
        most = config.max_attempts
        if error.failure is Failure.SERVER_ERROR:
            # It may be the request that breaks engines: two of them at most.
            most = min(most, 2)
        if not error.failure.retryable or max(attempts, 1) >= most:
            return False
        self._roll(open_requests)
        retries = config.budget_min + config.budget_ratio * (self._recent + self.requests)
        if attempts <= 1 and config.budget_ratio and error.failure in _ALL_AT_ONCE:
            retries += self._most_open
        if self._retries >= retries:
            return False
        self._retries += counts
        return True

    def may_continue(self, open_requests: int, *, counts: bool = True) -> bool:
        """Whether a broken stream may be continued elsewhere; if so it is counted, if it
        ``counts``.

        An instance that dies breaks all of its streams at once, which began over minutes: the bound
        is the number of requests open at once. Without retries there are no continuations.
        """
        config = self.config
        self._roll(open_requests)
        if not (config.budget_ratio or config.budget_min):
            return False
        if self._continued >= config.budget_min + _MOST_EACH * self._most_open:
            return False
        self._continued += counts
        return True

    def _roll(self, open_requests: int) -> None:
        now_s = time.monotonic()
        since_s = now_s - self._window_start_s
        if since_s >= _WINDOW_S:
            self._recent = self.requests * _WINDOW_S / since_s
            self._window_start_s, self.requests = now_s, 0
            self._retries = self._continued = self._most_open = 0
        # At the end of a wave few are open, and all were counted.
        self._most_open = max(self._most_open, open_requests)

    def deaths_under(self, body: bytes) -> int:
        """How many instances have recently died under such a request."""
        deadly, oldest_s = self.deadly, time.monotonic() - _DEADLY_S
        while deadly and next(iter(deadly.values()))[0] <= oldest_s:
            deadly.popitem(last=False)
        return deadly[hash(body)][1] if deadly and hash(body) in deadly else 0

    def note_deaths(self, body: bytes, instances: int) -> None:
        """Note this many more deaths."""
        deaths = self.deaths_under(body) + instances
        self.deadly.pop(hash(body), None)
        self.deadly[hash(body)] = time.monotonic(), deaths
        if len(self.deadly) > _MOST_DEADLY:
            self.deadly.popitem(last=False)

    def check(self, body: bytes) -> None:
        """Call it while any are ``deadly``. Raises Refusal: this one is."""
        if self.deaths_under(body) >= _MOST_DEATHS:
            minutes = round(_DEADLY_S / 60)
            message = (
                f"Instances died under this very request, {_MOST_DEATHS} in {minutes} minutes."
            )
            raise Refusal(422, "deadly_request", message)
