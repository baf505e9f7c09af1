"""Whether a request that failed is tried again."""

from __future__ import annotations

from hetero_gateway.files.gateway_config import RetryConfig
from hetero_gateway.http.failures import Failure, InstanceError

_WINDOW_S = 10.0


class RetryBudget:
    """Retries as a share of recent requests, so that an outage is not multiplied by them."""

    def __init__(self, config: RetryConfig) -> None:
        self.config = config
        self._window_start_s = 0.0
        self._requests = 0
        self._retries = 0

    def note_request(self, now_s: float) -> None:
        if now_s - self._window_start_s >= _WINDOW_S:
            self._window_start_s = now_s
            self._requests = self._retries = 0
        self._requests += 1

    def may_retry(self, error: InstanceError, attempts: int) -> bool:
        """Whether a request may be tried once more; if so it is counted."""
        config = self.config
        most = config.max_attempts
        if error.failure is Failure.SERVER_ERROR:
            # It may be the request that breaks engines: two of them at most.
            most = min(most, 2)
        if not error.failure.retryable or attempts >= most:
            return False
        if self._retries >= config.budget_min + config.budget_ratio * self._requests:
            return False
        self._retries += 1
        return True
