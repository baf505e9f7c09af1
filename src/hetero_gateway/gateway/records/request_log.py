"""The outcomes of the last requests: to explain one of them, and where all of them wait.

A row is made by C code alone, from what is there when a request is counted. It is joined with the
decisions (``core/scheduling/decision_log.py``) on demand. Failed attempts are noted one by one: a
request that is served at once pays nothing for them. No prompts, keys or addresses; bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol

from hetero_gateway.core.types import Outcome

# About half a MB.
MOST_ENDED: Final = 2048
_MOST_FAILED: Final = 1024
# Of a ``SettledAttempt``; in the order of ``EndedRequest``. Each is a chain of attributes.
ROW_OF: Final = attrgetter(
    "job.inbound.request_id",
    "job.inbound.received_s",
    "placed.waited_s",
    "placed.placed_s",
    "seen.first_body_at_s",
    "ended_s",
    "seen.status",
    "outcome",
    "placed.instance.id",
    "job.client.name",
    "job.parsed.stream",
    "told",
)


class Tokens(Protocol):
    """Tokens of an answer; ``prompt``: None, its engine did not report it."""

    prompt: int | None
    output: int


class EndedRequest(NamedTuple):
    """One ended request that an instance had.

    Args:
        request_id: the gateway's.
        received_s, placed_s, first_body_at_s, ended_s: monotonic, of its last byte in, its last
            attempt, and the answer; None: nothing of it came.
        waited_s: in the queue, before the last attempt.
        status: of the instance's answer; 0: none came.
        outcome: of the last attempt.
        instance_id: that had it last.
        client: the name of its key; "" without one.
        stream: it asked for one.
        tokens: None: it was not answered.
    """

    request_id: bytes
    received_s: float
    waited_s: float
    placed_s: float
    first_body_at_s: float | None
    ended_s: float
    status: int
    outcome: Outcome
    instance_id: str
    client: str
    stream: bool
    tokens: Tokens | None


class FailedAttempt(NamedTuple):
    """A failed attempt, whatever followed it: its reason and time (monotonic).

    ``instance_id``: "": the request was turned away, and ``reason`` is how that counts.
    """

    request_id: bytes
    instance_id: str
    reason: str
    failed_s: float


class WaitParts(NamedTuple):
    """What a request's client waited for until its first token, s: the parts add up to the TTFT.

    Args:
        queue_s: in the gateway, for a place on an instance and for its own work.
        retry_s: for failed attempts.
        network_s: to the instance and back, with HTTP; as its last probe took.
        prefill_s: for the engine: its own queue, and its prefill.
    """

    queue_s: float
    retry_s: float
    network_s: float
    prefill_s: float


class RequestLog:
    """The last of them. ``add`` takes rows of ``ROW_OF``; reading makes objects."""

    def __init__(self) -> None:
        self._ended: deque[tuple[Any, ...]] = deque(maxlen=MOST_ENDED)
        self.add = self._ended.extend  # bound once: saves a Python call per request
        self._failed: deque[FailedAttempt] = deque(maxlen=_MOST_FAILED)

    def add_failed(self, attempt: FailedAttempt) -> None:
        self._failed.append(attempt)

    def newest_first(self, since_s: float = 0.0) -> Iterator[EndedRequest]:
        """Those that have ended since then (monotonic)."""
        for row in reversed(self._ended):
            if row[5] < since_s:
                return
            yield EndedRequest(*row)

    def by_placement(self) -> Callable[[bytes, float], EndedRequest | None]:
        """Finds them by id and ``placed_s``: clients may repeat ids."""
        rows = {(row[0], row[3]): row for row in self._ended}

        def find(request_id: bytes, placed_s: float) -> EndedRequest | None:
            row = rows.get((request_id, placed_s))
            return None if row is None else EndedRequest(*row)

        return find

    def of(self, request_id: bytes) -> list[EndedRequest]:
        """Those with this id, oldest first."""
        return [EndedRequest(*row) for row in self._ended if row[0] == request_id]

    def failed(self, request_id: bytes) -> list[FailedAttempt]:
        """A request's failed attempts, oldest first."""
        return [each for each in self._failed if each.request_id == request_id]

    def failed_ids(self) -> dict[bytes, int]:
        """The number of failed attempts of each request."""
        counts: dict[bytes, int] = {}
        for each in self._failed:
            if not each.instance_id:
                continue
            counts[each.request_id] = counts.get(each.request_id, 0) + 1
        return counts


def parts_of(ended: EndedRequest, failed: int, round_trip_s: float | None) -> WaitParts | None:
    """What its client waited for; None: nothing came of it.

    Args:
        failed: its failed attempts.
        round_trip_s: of its instance's last probe; None: not known.
    """
    if ended.first_body_at_s is None:
        return None
    here_s = max(0.0, ended.placed_s - ended.received_s)
    retry_s = max(0.0, here_s - ended.waited_s) if failed else 0.0
    there_s = max(0.0, ended.first_body_at_s - ended.placed_s)
    network_s = min(there_s, round_trip_s or 0.0)
    return WaitParts(here_s - retry_s, retry_s, network_s, there_s - network_s)
