"""One response on its way from an instance to a client.

An ``Exchange`` is fed by an upstream connection and writes to a downstream, all in callbacks. Per
chunk it writes the bytes, counts the events in them and remembers the last few reads; nothing is
parsed. When it ends, in whatever way, its owner is notified once.

``Deadlines`` watches all exchanges with one timer: a first-byte, an idle and a total time-out.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from hetero_gateway.core.types import Usage
from hetero_gateway.engines.vllm import RESPONSES, failed_in_tail, lacks_model, usage_in_tail
from hetero_gateway.errors import Refusal
from hetero_gateway.files.server_config import TimeoutsConfig
from hetero_gateway.gateway.dataplane.dispatcher import Place
from hetero_gateway.gateway.dataplane.kept import TAIL_READS, KeptReads, Squeezing
from hetero_gateway.gateway.dataplane.routes import OutsidePlace
from hetero_gateway.http.downstream import Downstream, Flow
from hetero_gateway.http.errors import sse_error_event
from hetero_gateway.http.failures import Failure, InstanceError
from hetero_gateway.http.response import ResponseHead
from hetero_gateway.http.upstream import UpstreamConnection

# Answers that are held back complete: another instance may have a better one. All others pass.
_HELD_STATUSES = frozenset((404, 429, 500, 502, 503))
_MOST_HELD_BYTES = 65536
_LAST_CHUNK = b"0\r\n\r\n"
# A longer body is not empty, however it is framed.
MOST_EMPTY_BYTES = len(_LAST_CHUNK)
TAIL_BYTES = 8192
# How long a stream stays on an instance that has fallen silent: it may continue.
_HUNG_S = 3.0
# A NamedTuple's own constructor is a function in Python.
_new_usage: Callable[[type[Usage], tuple[int | None, ...]], Usage] = tuple.__new__


class ExchangeOwner(Protocol):
    """The owner of an exchange. Called from the event loop's callbacks; must not raise."""

    def answer_began(self, exchange: Exchange) -> None:
        """The head of its response is on its way to the client. Called at most once."""
        ...

    def response_began(self, exchange: Exchange, data: bytes) -> None:
        """The first bytes of an answer on /v1/responses are here. Called at most once."""
        ...

    def stream_began(self, exchange: Exchange) -> None:
        """The first bytes of a good stream are here. Called at most once."""
        ...

    def leave_if(self, exchange: Exchange, error: InstanceError) -> None:
        """Its instance is silent, or draining: fail with this if it can continue elsewhere."""
        ...

    def ended(self, exchange: Exchange) -> None:
        """It is ``complete``, or it failed: ``error``."""
        ...

    def broke(self, error: Exception) -> None:
        """Something here has a bug."""
        ...


class HeldAnswer:
    """An answer of which the client has seen nothing yet."""

    __slots__ = ("head", "parts", "size_bytes")

    def __init__(self, head: ResponseHead) -> None:
        self.head = head
        self.parts: list[bytes] = []
        self.size_bytes = 0

    def error(self) -> InstanceError | None:
        """What its status says about its engine; None: nothing, as the request is at fault."""
        status = self.head.status
        if status in (429, 503):
            message = f"its engine is busy: it answered {status}"
            return InstanceError(Failure.BUSY, message, self.retry_after_s())
        if status >= 500:
            return InstanceError(Failure.SERVER_ERROR, f"it answered {status}")
        if status == 404 and lacks_model(b"".join(self.parts)):
            return InstanceError(Failure.MODEL_GONE, "its engine does not have the model")
        return None

    def retry_after_s(self) -> float | None:
        """The engine's Retry-After, if in seconds."""
        for name, value in self.head.headers:
            if name == b"retry-after":
                text = value.strip()
                return float(text) if len(text) <= 9 and text.isdigit() else None
        return None


@dataclass(slots=True, eq=False, repr=False)
class Exchange:
    """One attempt: a response being relayed. Implements ``upstream.ResponseSink``.

    Times are of the monotonic clock, in seconds, and None until they happen (uvloop's own clock has
    milliseconds only).

    After ``ended``, exactly one of ``complete`` and ``error`` is set; after ``abort`` the owner is
    not called any more.

    ``streams``: its head, once here, announces server-sent events. ``body_bytes``: of a complete
    response's body, as its head says, or at least. ``frees_body``: its owner needs to know when an
    answer has begun. ``keeps_bytes``: up to this length, the owner needs all that has passed of a
    stream, to continue it (``kept``); 0: nothing.

    Args:
        downstream: where the response goes.
        path: the request's; errors look different on some.
        extra_fields: added to the response's, as ``lines_of`` writes them.
        total_deadline_s: monotonic.
        owner: is notified of its events.
        place: where it is.
    """

    _downstream: Downstream
    _path: str
    _extra_fields: bytes
    total_deadline_s: float
    owner: ExchangeOwner
    place: Place | OutsidePlace
    # Bound once: they are used for every chunk.
    _write: Callable[[bytes], None] = field(init=False)
    _flow: Flow = field(init=False)
    _tail: deque[bytes] = field(init=False)
    _usage: Usage | None = None  # once it is complete
    _pending: bytes = b""
    _decode: bool = False
    _rechunk: bool = False
    congested: bool = False
    connection: UpstreamConnection | None = None
    active: bool = False
    started_s: float = field(init=False)
    last_active_s: float = field(init=False)
    first_body_at_s: float | None = None
    status: int = 0
    streams: bool = False
    events: int = 0
    body_bytes: int = 0
    head_sent: bool = False
    frees_body: bool = False
    keeps_bytes: int = 0
    kept: KeptReads | None = None  # includes the tail; None: the tail is all there is
    stays: bool = False  # it can never continue elsewhere
    complete: bool = False
    error: InstanceError | None = None
    # An error, or nothing at all, that the owner passes on or withholds.
    held: HeldAnswer | None = None

    def __post_init__(self) -> None:
        self._write, self._flow = self._downstream.write, self._downstream.flow
        self._tail = deque(maxlen=TAIL_READS)
        self.started_s = self.last_active_s = time.monotonic()

    # ResponseSink

    def on_head(self, head: ResponseHead, *, body_follows: bool) -> bool:
        self.status = head.status
        self.body_bytes = head.content_length or 0
        self.active = True
        self._decode = not self._downstream.passes_framing
        self._rechunk = not self._decode and head.ends_at_close
        if (head.status >= 404 or head.content_length == 0) and _is_held(head):
            self.held = HeldAnswer(head)
        else:
            self._begin_answer(head)
            if not body_follows:
                self._flush_head()
        return self._decode or self._rechunk

    def _begin_answer(self, head: ResponseHead) -> None:
        self.streams = head.streams
        if self.keeps_bytes and head.streams and head.status == 200:
            self.kept = KeptReads(self.keeps_bytes)
            self._tail = self.kept.reads
        fields = head.passed + self._extra_fields
        chunked = not self._decode and (head.chunked or head.ends_at_close)
        self._pending = self._downstream.start(head.status, fields, chunked=chunked)
        self.head_sent = True
        if self.frees_body:
            self.owner.answer_began(self)

    def _flush_head(self) -> None:
        pending, self._pending = self._pending, b""
        if pending:
            self._write(pending)

    def on_data(self, data: bytes) -> None:
        self.active = True
        self.events += data.count(b"data: ")
        self._tail.append(data if len(data) <= TAIL_BYTES else self._of_long(data))
        if self._rechunk:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self.first_body_at_s is None:
            if self.held is not None:
                self._hold(self.held, data)
                return
            self.first_body_at_s = time.monotonic()
            if self._path == RESPONSES and self.status < 400:
                self.owner.response_began(self, data)
            data = self._pending + data
            self._pending = b""
            if self.streams and self.status < 400:
                self.owner.stream_began(self)
        self._write(data)
        if self._flow.write_paused and not self.congested:
            self._hold_up()

    def _hold_up(self) -> None:
        """The client is slow: stop reading, so that the instance's socket fills in turn."""
        self.congested = True
        if self.connection is not None:
            self.connection.pause_reading()

    def _of_long(self, data: bytes) -> bytes:
        """The kept part of a read, which may have 256 KB; thousands of streams keep six each."""
        if self.kept is not None:
            self.look_at_kept(len(data))
        return data[-TAIL_BYTES:] if self.kept is None else data

    def look_at_kept(self, more_bytes: int = 0) -> None:
        """Drop a kept stream that has become too long; call it now and then."""
        if self.kept is not None and self.kept.is_too_long(more_bytes):
            self._tail = deque(self._last_reads(), maxlen=TAIL_READS)
            self.kept = None

    def _last_reads(self) -> list[bytes]:
        tail = self._tail
        return [tail[i] for i in range(max(-TAIL_READS, -len(tail)), 0)]

    @property
    def passes_framing(self) -> bool:
        """Whether a body keeps its instance's framing."""
        return not (self._decode or self._rechunk)

    def _hold(self, held: HeldAnswer, data: bytes) -> None:
        held.parts.append(data)
        held.size_bytes += len(data)
        if held.size_bytes > _MOST_HELD_BYTES:
            self.let_pass()

    def on_complete(self) -> None:
        self.complete = True
        if not self.body_bytes:
            self.body_bytes = sum(map(len, self._last_reads()))
        if self.held is None:
            if self._pending or self._rechunk:
                self._close_body()
            self._downstream.finish()
        self.owner.ended(self)

    def _close_body(self) -> None:
        self._flush_head()  # if there was no body
        if self._rechunk:
            self._write(_LAST_CHUNK)

    def on_error(self, error: InstanceError) -> None:
        if self.error is None and not self.complete:
            self.error = error
            self.owner.ended(self)

    def on_bug(self, error: Exception) -> None:
        self.owner.broke(error)

    # For the owner

    def begin_again(self) -> None:
        """Forget an error caused by a stale connection: nothing has happened."""
        self.error = self.connection = None

    def let_pass(self, extra_fields: bytes = b"") -> None:
        """Write what was held back, unchanged; the client must still be there."""
        held, self.held = self.held, None
        assert held is not None
        self._extra_fields += extra_fields
        self._begin_answer(held.head)
        if held.parts:
            self.first_body_at_s = time.monotonic()
            data, self._pending = self._pending + b"".join(held.parts), b""
            self._write(data)
        if self.complete:
            self._close_body()
            self._downstream.finish()

    def caught_up(self) -> None:
        """The client has read what was written: resume reading."""
        if self.congested:
            self.congested = False
            self.active = True
            if self.connection is not None:
                self.connection.resume_reading()

    def abort(self) -> None:
        """Abandon it: the instance's connection is closed, and the owner is not notified."""
        if self.connection is not None:
            self.connection.abort()

    @property
    def empty(self) -> bool:
        """Whether the response is complete without a body."""
        tail = self._tail
        return not tail or (len(tail) == 1 and tail[0] == _LAST_CHUNK)

    def fail(self, error: InstanceError) -> None:
        """End the exchange from outside: a time-out."""
        if not self.complete and self.error is None:
            self.abort()
            self.on_error(error)

    @property
    def at_event(self) -> bool:
        """Whether an event may follow what the client has of a stream."""
        connection = self.connection
        return not self.passes_framing or (
            connection is not None and connection.passed_whole_chunks
        )

    def break_off(self, error: Refusal) -> None:
        """Tell a client in mid-response that it is broken, and close its connection.

        A stream gets an SSE error event where a chunk may begin, and never a ``[DONE]`` or a last
        chunk; anything else is cut, so that the client sees an incomplete body.
        """
        if self.streams and self.at_event:
            self.write_on(sse_error_event(error, self._path))
        self._downstream.cut()

    def write_on(self, data: bytes, *, last: bool = False) -> None:
        """Write more of a stream whose instance is gone, where a chunk may begin, or its end."""
        if data and not self._decode:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if last and not self._decode:
            data += _LAST_CHUNK
        pending, self._pending = self._pending, b""
        self._write(pending + data)
        if last:
            self._downstream.finish()

    def end_without(self, rest: bytes) -> None:
        """Complete a stream that lacks only its end."""
        self.error, self.complete = None, True
        self.body_bytes = sum(map(len, self._last_reads()))
        self.write_on(rest, last=True)

    # Afterwards

    def __repr__(self) -> str:
        if self.error is not None:
            state = f"failed: {self.error.reason}"
        elif self.complete:
            state = "complete"
        elif self.held is not None:
            state = "held back"
        elif self.head_sent:
            state = "congested" if self.congested else "streaming"
        else:
            state = "connecting" if self.connection is None else "sent"
        return f"<Exchange {self._path} {state}, status {self.status}, {self.events} events>"

    def tail(self) -> bytes:
        """The last bytes of the body, including framing."""
        return b"".join(self._last_reads())[-TAIL_BYTES:]

    def usage(self) -> Usage:
        """The tokens as the engine reported them, if it did."""
        usage = self._usage
        if usage is None:
            tail = self._tail
            last = tail[0] if len(tail) == 1 else self.tail()
            usage = _new_usage(Usage, usage_in_tail(last))
            if self.complete:
                self._usage = usage
        return usage

    def engine_failed(self) -> bool:
        """The HTTP response is complete, but reports that the engine broke off."""
        return self.streams and failed_in_tail(self.tail())


def _is_held(head: ResponseHead) -> bool:
    if head.status != 200 and head.status not in _HELD_STATUSES:
        return False
    return head.content_length is None or head.content_length <= _MOST_HELD_BYTES


def _silent() -> InstanceError:
    return InstanceError(Failure.SILENT, "nothing is heard from it")


class Deadlines:
    """The time-outs of all exchanges, by one timer.

    ``exchanges``: the open ones; adding one requires ``watch`` unless it already ``watches``.

    It looks at every exchange each tick instead of arming timers per chunk: a chunk only sets a
    flag. A time-out is late by up to one tick, an eighth of the shortest time-out (20 ms to 1 s).
    """

    def __init__(self, config: TimeoutsConfig) -> None:
        self._loop = asyncio.get_running_loop()
        self.set_config(config)
        self.exchanges: set[Exchange] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._squeezing = Squeezing(self._loop)
        self.watches = False

    def set_config(self, config: TimeoutsConfig) -> None:
        """Use other times from now on, also for open exchanges."""
        self._config = config
        shortest_s = min(config.first_byte_s, config.idle_s, config.total_s)
        self._tick_s = min(1.0, max(0.02, shortest_s / 8))

    @property
    def idle_s(self) -> float:
        """How long a response, or a session, may be silent."""
        return self._config.idle_s

    @property
    def write_s(self) -> float:
        """How long the other side of a connection may read nothing of what was written."""
        return self._config.write_s

    def __len__(self) -> int:
        return len(self.exchanges)

    def watch(self) -> None:
        """Watch the exchanges from now on, as long as there are any."""
        self.watches = True
        self._timer = self._loop.call_later(self._tick_s, self._check)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def leave_silent(self) -> None:
        """Make requests without a byte of an answer leave silent instances at once."""
        for exchange in list(self.exchanges):
            if exchange.place.instance.silent and not exchange.head_sent:
                exchange.owner.leave_if(exchange, _silent())

    def _check(self) -> None:
        now_s = time.monotonic()
        config = self._config
        for exchange in list(self.exchanges):
            if exchange.active:
                exchange.active = False
                exchange.last_active_s = now_s
                exchange.look_at_kept()
            silent_s = now_s - exchange.last_active_s
            if now_s >= exchange.total_deadline_s:
                exchange.fail(
                    InstanceError(Failure.TOTAL_TIMEOUT, f"not done in {config.total_s:g} s")
                )
            elif not exchange.head_sent:
                if silent_s >= config.first_byte_s:
                    message = f"no answer in {config.first_byte_s:g} s"
                    exchange.fail(InstanceError(Failure.FIRST_BYTE_TIMEOUT, message))
                elif exchange.place.instance.silent:
                    exchange.owner.leave_if(exchange, _silent())
            elif exchange.congested:
                pass  # the client is silent
            elif silent_s >= config.idle_s:
                message = f"no bytes for {config.idle_s:g} s"
                exchange.fail(InstanceError(Failure.IDLE_TIMEOUT, message))
            elif silent_s >= _HUNG_S and exchange.place.instance.silent:
                exchange.owner.leave_if(exchange, _silent())
            if now_s >= exchange.place.instance.leave_at_s:
                moved = InstanceError(Failure.MOVED, "it drains, and its deadline is over")
                exchange.owner.leave_if(exchange, moved)
        self._squeezing.look_at(e.kept for e in self.exchanges if e.kept is not None)
        self.watches = bool(self.exchanges)
        self._timer = self._loop.call_later(self._tick_s, self._check) if self.watches else None
