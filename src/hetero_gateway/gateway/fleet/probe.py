"""GETs to one instance, for its health and its own reports: bounded in bytes and in time.

Over connections of their own, so that a full or busy pool hides nothing. Answers are untrusted:
none is kept beyond its limit, decompressed or redirected, and there is one deadline for the whole
exchange, however slowly its bytes drip.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hetero_gateway.files.server_config import PoolConfig
from hetero_gateway.gateway.fleet.instances import Instance
from hetero_gateway.gateway.fleet.lag import LoopLag
from hetero_gateway.http.failures import Failure, InstanceError
from hetero_gateway.http.hops import Hops
from hetero_gateway.http.response import ResponseHead
from hetero_gateway.http.upstream import InstancePool, UpstreamConnection

# One is in use at a time; a second one if the first went stale. A GET may be sent again, so an idle
# connection is used as long as its instance leaves it open (vLLM: 5 s).
_POOL = PoolConfig(max_connections=4, max_idle=1, idle_expiry_s=60)


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """An answer. ``problem``: why its body is missing, if it is wanted and there is a reason."""

    status: int
    body: bytes
    problem: str = ""

    @property
    def good(self) -> bool:
        """Whether the request succeeded; a redirection is no success."""
        return 200 <= self.status < 300


# The share of a probe's time-out by which the event loop may be behind while the probe counts.
_LATE_SHARE = 0.25


class LateProbe(InstanceError):
    """No answer in time, but the gateway was too short of CPU time to blame the instance."""

    def __init__(self, behind_s: float) -> None:
        super().__init__(
            Failure.LOCAL,
            f"the gateway was short of CPU time: its event loop is {behind_s:.1f} s late",
        )


class _Gathering:
    """Gathers one answer: a ``ResponseSink``."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._parts: list[bytes] = []
        self._size = 0
        self._status = 0
        self.answer: asyncio.Future[ProbeAnswer] = asyncio.get_running_loop().create_future()
        self.complete = False

    def on_head(self, head: ResponseHead, *, body_follows: bool) -> bool:
        self._status = head.status
        if not self._most_bytes:
            self._answer()
        for name, value in head.headers:
            if name == b"content-encoding" and value.lower() != b"identity":
                self._answer("its body is encoded, which was not asked for")
        if head.content_length is not None and head.content_length > self._most_bytes:
            self._answer(f"its body is larger than {self._most_bytes} bytes")
        return True

    def on_data(self, data: bytes) -> None:
        if self.answer.done():
            return
        self._size += len(data)
        if self._size > self._most_bytes:
            self._answer(f"its body is larger than {self._most_bytes} bytes")
        else:
            self._parts.append(data)

    def on_complete(self) -> None:
        self.complete = True
        self._answer()

    def on_error(self, error: InstanceError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def on_bug(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def _answer(self, problem: str = "") -> None:
        if not self.answer.done():
            body = b"" if problem else b"".join(self._parts)
            self.answer.set_result(ProbeAnswer(self._status, body, problem))


class Probe:
    """Asks one instance.

    Args:
        instance: at a link-local address only if its requests may go there.
        timeout_s: for one exchange from connecting to its last byte.
        hops: of the gateway, which must not mistake itself for an instance.
        lag: says whether a late probe is the instance's fault.
    """

    def __init__(
        self, instance: Instance, timeout_s: float, hops: Hops, lag: LoopLag | None = None
    ) -> None:
        self._lag = lag or LoopLag()
        self._pool = InstancePool(instance.config.base_url, _POOL, timeout_s, instance.ssl_context)
        self._pool.allows_link_local = instance.pool.allows_link_local
        self._pool.addresses = instance.pool.addresses
        self.timeout_s = timeout_s
        fields = b"host: %b\r\naccept-encoding: identity\r\n" % self._pool.host_header
        fields += hops.field
        if instance.api_key is not None:
            fields += b"authorization: Bearer %b\r\n" % instance.api_key.encode()
        self._fields = fields

    async def get(self, path: str, most_bytes: int = 0) -> ProbeAnswer:
        """GET a path. If ``most_bytes`` is 0, nothing of the body is kept or waited for.

        Raises InstanceError; ``Failure.LOCAL`` (and so ``LateProbe``) says nothing about the
        instance.
        """
        return await self.ask(b"GET", path.encode(), most_bytes)

    async def ask(
        self,
        method: bytes,
        target: bytes,
        most_bytes: int,
        body: bytes = b"",
        content_type: bytes = b"",
    ) -> ProbeAnswer:
        """The same for another method, with a body, and for a target as written on the wire."""
        fields = b"" if method == b"GET" and not body else b"content-length: %d\r\n" % len(body)
        if content_type:
            fields += b"content-type: %b\r\n" % content_type
        request = b"%b %b%b HTTP/1.1\r\n%b%b\r\n%b" % (
            method, self._pool.path_prefix, target, self._fields, fields, body
        )  # fmt: skip
        with self._lag:
            return await self._ask(request, most_bytes, self._lag.behind_s)

    async def _ask(self, request: bytes, most_bytes: int, behind_s: float) -> ProbeAnswer:
        """``behind_s``: the event loop's lag until now."""
        try:
            self._pool.leave_old_addresses()
            async with asyncio.timeout(self.timeout_s):
                return await asked_of(self._pool, request, most_bytes)
        except TimeoutError as error:
            behind_s = self._lag.behind_s - behind_s
            if behind_s >= _LATE_SHARE * self.timeout_s:
                raise LateProbe(behind_s) from error
            message = f"no answer within {self.timeout_s:g} s"
            raise InstanceError(Failure.TOTAL_TIMEOUT, message) from error

    def close(self) -> None:
        """Close its connections."""
        self._pool.close()


async def asked_of(pool: InstancePool, request: bytes, most_bytes: int) -> ProbeAnswer:
    """The answer to a whole request; on cancellation its connection is closed. Raises
    InstanceError.

    The request may be sent twice, if it first meets an idle connection that was being closed.
    """
    connection = pool.take_idle() or await pool.connect()
    try:
        return await _exchange(connection, request, most_bytes)
    except InstanceError as error:
        if not (connection.stale and error.failure is Failure.RESET):
            raise
    return await _exchange(await pool.connect(), request, most_bytes)


async def _exchange(connection: UpstreamConnection, request: bytes, most_bytes: int) -> ProbeAnswer:
    gathering = _Gathering(most_bytes)
    connection.send(request, gathering)
    try:
        return await gathering.answer
    finally:
        if not gathering.complete:
            connection.abort()
