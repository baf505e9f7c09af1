"""A line of a batch: a request of the gateway's own, without a connection.

It goes the way of all requests from ``Attempts`` on. Its client is known and its instance chosen,
and it never waits in the queue. If it cannot be served now, its batch asks again later: there is no
other attempt and no fallback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from dataclasses import dataclass

from hetero_gateway.core.types import COMPLETED, InstanceId, Outcome, Reject, RejectReason
from hetero_gateway.engines.vllm import work_of_path
from hetero_gateway.gateway.admission.clients import Client
from hetero_gateway.gateway.dataplane.answers import no_instance
from hetero_gateway.gateway.dataplane.attempts import Attempts
from hetero_gateway.gateway.dataplane.dispatcher import Place
from hetero_gateway.gateway.dataplane.intake import Placed
from hetero_gateway.gateway.dataplane.relay import Exchange
from hetero_gateway.gateway.dataplane.rooms import Rooms
from hetero_gateway.gateway.dataplane.routes import Fallback, OutsidePlace
from hetero_gateway.http.downstream import Flow
from hetero_gateway.http.headers import Headers
from hetero_gateway.http.heads import Inbound

_HEADERS: Headers = [(b"content-type", b"application/json")]
_MOST_RETRY_CHARACTERS = 6


class LineAnswer:
    """The answer to a line: its ``Downstream``.

    ``whole``: otherwise it broke off, or is not complete yet. ``status``: 0 if there is none.

    Args:
        most_bytes: maximum length.
        too_long: called once, soon after that is exceeded.
    """

    passes_framing = False
    write_paused = False

    def __init__(self, most_bytes: int, too_long: Callable[[], None]) -> None:
        self._parts: list[bytes] = []
        self._left_bytes = most_bytes
        self._too_long = too_long
        self.gone = False
        self.started = False
        self.whole = False
        self.status = 0
        self.retry_after_s: float | None = None

    @property
    def flow(self) -> Flow:
        return self

    @property
    def body(self) -> bytes:
        return b"".join(self._parts)

    def start(self, status: int, fields: bytes, *, chunked: bool) -> bytes:
        self.started, self.status = True, status
        if status >= 400:
            for line in fields.split(b"\r\n"):
                name, _, value = line.partition(b":")
                value = value.strip()
                if name.lower() == b"retry-after" and value.isdigit():
                    if len(value) <= _MOST_RETRY_CHARACTERS:
                        self.retry_after_s = float(value)
        return b""

    def write(self, data: bytes) -> None:
        if self._left_bytes < 0:
            return
        self._left_bytes -= len(data)
        self._parts.append(data)
        if self._left_bytes < 0:
            self._parts.clear()
            asyncio.get_running_loop().call_soon(self._too_long)

    def finish(self) -> None:
        self.whole = True

    def cut(self) -> None:
        pass


@dataclass(slots=True, eq=False, repr=False)
class LineAttempts(Attempts):
    """Its one attempt. ``usage``: (prompt, output) tokens as its answer reported them.

    Args:
        at: the instance it goes to.
        known: the present instances.
        on_place: called with the instance that it is sent to.
        on_end: called once, when it has ended. Both may be called before ``begin`` returns.
    """

    answer: LineAnswer | None = None
    at: InstanceId | None = None
    known: Container[InstanceId] = ()
    on_place: Callable[[InstanceId], None] = lambda _: None
    on_end: Callable[[LineAttempts], None] | None = None
    usage: tuple[int, int] | None = None

    @classmethod
    def of(
        cls,
        rooms: Rooms,
        path: str,
        client: Client,
        at: InstanceId,
        known: Container[InstanceId],
        on_place: Callable[[InstanceId], None],
        on_end: Callable[[LineAttempts], None],
    ) -> LineAttempts:
        """Make a line that is about to ``begin``.

        Args:
            client: whose request it counts as; its class is the line's.
        """
        work = work_of_path(path)
        assert work is not None
        headers = _HEADERS
        if client.name:
            # If keys have their own caches, those of the same key; it goes no further.
            headers = [*_HEADERS, (b"authorization", b"batch " + client.name.encode())]
        inbound = Inbound(path, path.encode(), work, headers)
        rooms.ids.name(inbound)
        # As much of an answer is held as of a body.
        limits = rooms.intake.limits
        answer = LineAnswer(limits.max_body_bytes, lambda: attempts.client_gone())
        attempts = cls(rooms, inbound, answer)
        attempts._client, attempts.answer, attempts.at = client, answer, at
        attempts.known, attempts.on_place, attempts.on_end = known, on_place, on_end
        rooms.open.add(attempts)
        return attempts

    @property
    def placed_at(self) -> Placed | None:
        """Its instance; None: none yet, or a service elsewhere."""
        place = None if self._exchange is None else self._exchange.place
        return place if isinstance(place, Placed) else None

    @property
    def request_id(self) -> str:
        return self._inbound.request_id.decode()

    # As ``super()`` does not find its way from a class with slots of a dataclass.

    def _place(self) -> None:
        job = self._job
        assert job is not None
        job.waits = False
        if self.at is not None and job.request.only is None:
            if self.at not in self.known:
                self._turn_away(no_instance(f"instance {self.at} is gone"), "unavailable")
                return
            job.request = job.request.replace(only=self.at, whole=True)
        Attempts._place(self)

    def _take(self, place: Place | Reject) -> None:
        job = self._job
        assert job is not None
        if (
            isinstance(place, Reject)
            and place.reason is RejectReason.FITS_NO_INSTANCE
            and self.at is not None
        ):
            # It is longer than estimated: another one may hold it.
            self.at, job.request = None, job.request.replace(only=None)
            Attempts._place(self)
            return
        Attempts._take(self, place)

    def _send(self, placed: Place | OutsidePlace) -> None:
        self.on_place(placed.instance.id)
        Attempts._send(self, placed)

    def _next_fallback(self) -> Fallback | None:
        return None

    def _settle(self, exchange: Exchange, outcome: Outcome, *, final: bool) -> None:
        if outcome is COMPLETED:
            prompt, output, _ = exchange.usage()
            if prompt is not None:
                self.usage = prompt, output or 0
        Attempts._settle(self, exchange, outcome, final=final)

    def _end(self) -> None:
        Attempts._end(self)
        told, self.on_end = self.on_end, None
        if told is not None:
            told(self)
