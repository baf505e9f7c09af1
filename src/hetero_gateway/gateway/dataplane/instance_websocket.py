"""An instance's WebSocket, through the client of the ``websockets`` package.

It follows no redirect and accepts no link-local address: an instance does not decide where a
session goes. It is closed within bounds, whatever its other end does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.typing import Subprotocol

from hetero_gateway.errors import Refusal
from hetero_gateway.files.link_local import is_link_local
from hetero_gateway.gateway.fleet.instances import Instance
from hetero_gateway.http.clients import MOST_MESSAGE_BYTES
from hetero_gateway.http.failures import Failure, InstanceError
from hetero_gateway.http.hops import LOOP_DETECTED

# A message that waits to be written, and pongs behind it.
_MOST_WAITING_BYTES = MOST_MESSAGE_BYTES + (1 << 20)
# Not held against the instance: otherwise one client's key or origin could get it ejected for all.
_CLIENTS_FAULT = (400, 401, 403)
# Time for a close frame to be written and answered.
CLOSE_S = 5.0

_log = logging.getLogger(__name__)
# Its debug lines show heads, including keys.
_log.setLevel(logging.WARNING)


class InstanceWebSocket(ClientConnection):
    """A connection that does not accumulate pongs for a peer that sends pings and reads nothing."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.get_write_buffer_size() > _MOST_WAITING_BYTES:
            self.transport.abort()


class _Connect(connect):
    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


async def open_websocket(
    instance: Instance,
    target: bytes,
    headers: list[tuple[str, str]],
    subprotocols: Sequence[str],
    connect_timeout_s: float,
) -> InstanceWebSocket:
    """Open one; see ``close_websocket``.

    Args:
        target: path and query, without the instance's own prefix.

    Raises:
        InstanceError: it cannot be opened.
        Refusal: it refuses this client because of what the client sent.
    """
    pool = instance.pool
    parts = urlsplit(instance.config.base_url)
    scheme = "wss" if parts.scheme == "https" else "ws"
    try:
        websocket = await _Connect(
            f"{scheme}://{parts.netloc}{(pool.path_prefix + target).decode('ascii')}",
            additional_headers=headers,
            subprotocols=[Subprotocol(name) for name in subprotocols] or None,
            ssl=instance.ssl_context if scheme == "wss" else None,
            open_timeout=connect_timeout_s,
            close_timeout=CLOSE_S,
            max_size=MOST_MESSAGE_BYTES,
            max_queue=4,
            compression=None,
            ping_interval=None,
            user_agent_header=None,
            proxy=None,
            logger=_log,
            create_connection=InstanceWebSocket,
        )
    except InvalidStatus as error:
        status = error.response.status_code
        message = f"it answered {status}"
        if status in _CLIENTS_FAULT:
            detail = f"instance {instance.id}: {message}"
            raise Refusal(502, "upstream_error", detail, kind="server_error") from error
        failure = Failure.LOOP if status == LOOP_DETECTED else Failure.PROTOCOL
        raise InstanceError(failure, message) from error
    except TimeoutError as error:
        raise InstanceError(Failure.CONNECT, "no connection in time") from error
    except (OSError, EOFError, WebSocketException) as error:
        raise InstanceError(Failure.CONNECT, f"no WebSocket: {error}") from error
    assert isinstance(websocket, InstanceWebSocket)
    address = str((websocket.remote_address or ("",))[0])
    if is_link_local(address) and not pool.allows_link_local:
        websocket.transport.abort()
        raise InstanceError(Failure.CONNECT, f"{address}: link-local addresses are not allowed")
    return websocket


async def close_websocket(websocket: InstanceWebSocket, code: int, reason: str) -> None:
    """Close it, or cut it if it does not answer within ``CLOSE_S``. Nothing else may use it."""
    try:
        # Output for an instance that does not read would otherwise wait for ever.
        with contextlib.suppress(TimeoutError, ConnectionClosed):
            async with asyncio.timeout(CLOSE_S):
                await websocket.close(code, reason)
    finally:
        websocket.transport.abort()
