"""A response as far as it was seen, here or elsewhere: the basis of counting and learning."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from hetero_gateway.core.types import Usage
from hetero_gateway.http.failures import InstanceError


class ObservedResponse(Protocol):
    """A response: an ``Exchange``, or what another data plane reports. Must be hashable.

    ``status``: 0 before its head; ``first_body_at_s``: monotonic; ``events``: server-sent ones, so
    far; ``congested``: its client reads too slowly, and delays it; ``complete``: it reached its
    regular end; ``body_bytes``: as announced, or of the kept part; ``usage``: the tokens reported
    at its end. None: not seen.
    """

    @property
    def status(self) -> int: ...

    @property
    def error(self) -> InstanceError | None: ...

    @property
    def first_body_at_s(self) -> float | None: ...

    @property
    def events(self) -> int: ...

    @property
    def congested(self) -> bool: ...

    @property
    def complete(self) -> bool: ...

    @property
    def body_bytes(self) -> int: ...

    @property
    def empty(self) -> bool: ...

    def usage(self) -> Usage: ...


class ReportedResponse(NamedTuple):
    """A response that passed elsewhere, as far as it was reported."""

    status: int = 0
    error: InstanceError | None = None
    first_body_at_s: float | None = None
    events: int = 0
    complete: bool = False
    tokens: Usage = Usage()
    body_bytes: int = 0
    empty: bool = False
    congested: bool = False

    def usage(self) -> Usage:
        return self.tokens
