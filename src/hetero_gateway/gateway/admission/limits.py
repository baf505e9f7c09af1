"""Applies a client's limits: charges requests, and words refusals."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import lru_cache

from hetero_gateway.core.limits import accounts
from hetero_gateway.core.limits.accounts import Charge, Denial, Limit, LimitStanding
from hetero_gateway.core.limits.window import SLOTS
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.admission.clients import Client
from hetero_gateway.gateway.admission.usage import ClientUsage
from hetero_gateway.http.headers import fields_in

# One of the client's own requests has to end first, at an unknown time.
_CONCURRENCY_RETRY_S = 1
_UNITS = {
    Limit.REQUESTS: "requests per minute (RPM)",
    Limit.TOKENS: "tokens per minute (TPM)",
    Limit.CONCURRENCY: "concurrent requests",
}


class Limiter:
    """Charges requests.

    Args:
        usage: where refusals are counted.
        catch_up: settles requests that have ended and wait to be counted.
    """

    def __init__(self, usage: ClientUsage, catch_up: Callable[[], None] = lambda: None) -> None:
        self._denied = usage.denied
        self._catch_up = catch_up

    def charge(self, client: Client, tokens: int) -> Charge:
        """Charge a request of this many tokens, as estimated.

        Raises:
            Refusal: 429; nothing was charged.
        """
        now_s = time.monotonic()
        charge = accounts.admit(client.accounts, tokens, now_s)
        if isinstance(charge, Charge):
            return charge
        if charge.limit is Limit.TOKENS:
            self._catch_up()  # may return some
            charge = accounts.admit(client.accounts, tokens, now_s)
            if isinstance(charge, Charge):
                return charge
        raise self._denied_for(client, charge)

    def extend(self, client: Client, charge: Charge, tokens: int) -> None:
        """Charge an open session for all of its tokens so far.

        Raises:
            Refusal: 429; nothing more was charged.
        """
        added = tokens - charge.tokens
        if added <= 0:
            return
        denial = charge.extend(added, time.monotonic())
        if denial is not None:
            self._catch_up()  # may return some
            denial = charge.extend(added, time.monotonic())
        if denial is not None:
            raise self._denied_for(client, denial)

    def adopt(self, client: Client, tokens: int) -> Charge:
        """Charge a request that is already being served."""
        return accounts.adopt(client.accounts, tokens, time.monotonic())

    def _denied_for(self, client: Client, denial: Denial) -> Refusal:
        self._denied[client.name, denial.limit.value] += 1
        return _refusal(denial, accounts.standing(client.accounts))


def rate_limit_fields(standing: LimitStanding) -> bytes:
    """``x-ratelimit-*`` fields as in OpenAI's API, as written; none without a limit.

    ``reset``: until everything is free again, if nothing more is asked; the latest usage is new.
    """
    requests, requests_left, tokens, tokens_left = standing
    left: tuple[int, ...] = (requests_left, tokens_left)
    if requests is None or tokens is None:
        left = left[requests is None : 2 - (tokens is None)]
    return _fields(requests, tokens) % left


@lru_cache(256)
def _fields(requests: int | None, tokens: int | None) -> bytes:
    """The fields of these limits, with placeholders for what remains of each."""
    limits = ((b"requests", requests), (b"tokens", tokens))
    given = [(of, limit) for of, limit in limits if limit is not None]
    line = b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-reset-%b: %ds\r\n"
    lines = [line % (of, limit, of, SLOTS) for of, limit in given]
    return b"".join(lines + [b"x-ratelimit-remaining-%b: %%d\r\n" % of for of, _ in given])


def _refusal(denial: Denial, standing: LimitStanding) -> Refusal:
    unit = _UNITS[denial.limit]
    message = f"Rate limit reached for {denial.account} on {unit}: limit {denial.allowed}."
    after_s = _CONCURRENCY_RETRY_S
    if denial.wait_s is not None:
        after_s = max(1, math.ceil(denial.wait_s))
        message += f" Please try again in {denial.wait_s:.3f}s."
    return Refusal(
        429,
        "rate_limit_exceeded",
        message,
        kind="rate_limit_error",
        retry_after_s=after_s,
        headers=fields_in(rate_limit_fields(standing)),
    )
