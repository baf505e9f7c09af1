"""Instances that speak /v1/realtime, a gateway in front of them, and sessions with it."""

import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request, Response

from tests.fakes.running import RunningGateway, config_for, eventually, running_gateway
from tests.fakes.vllm import FakeInstance

PATH = "/v1/realtime"


class Speaker:
    """An instance that transcribes: it says which it is, then sends back what it gets."""

    def __init__(self, model: str = "m") -> None:
        self.model = model
        self.heads: list[Request] = []
        self.closed: list[tuple[int | None, str | None]] = []
        self.messages: list[str | bytes] = []
        self.refuses = 0
        self.chooses = True  # a subprotocol
        self._server: Server

    async def start(self, context: ssl.SSLContext | None = None) -> FakeInstance:
        self._server = await serve(
            self._session,
            "127.0.0.1",
            0,
            process_request=self._answer,
            select_subprotocol=lambda _, offered: offered[0] if offered and self.chooses else None,
            max_size=None,
            ssl=context,
        )
        port = next(iter(self._server.sockets)).getsockname()[1]
        return FakeInstance((self.model,)).at(f"http://127.0.0.1:{port}")

    async def stop(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    def _answer(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path.startswith(PATH):
            self.heads.append(request)
            return connection.respond(self.refuses, "no") if self.refuses else None
        cards = {"data": [{"id": self.model, "max_model_len": 4096}]}
        return connection.respond(200, json.dumps(cards) if "models" in request.path else "")

    async def _session(self, connection: ServerConnection) -> None:
        await connection.send(json.dumps({"type": "session.created"}))
        try:
            async for message in connection:
                self.messages.append(message)
                if message == "close":
                    await connection.close(4001, "enough")
                elif message == "die":
                    connection.transport.abort()
                else:
                    await connection.send(message)
        except ConnectionClosed:
            pass
        self.closed.append((connection.close_code, connection.close_reason))


@asynccontextmanager
async def serving(
    *speakers: Speaker, workers: int = 1, **sections: Any
) -> AsyncIterator[RunningGateway]:
    fakes = [await speaker.start() for speaker in speakers]
    async with running_gateway(config_for(fakes, **sections), workers=workers) as running:
        yield running
        await eventually(running.settled)
    for speaker in speakers:
        await speaker.stop()


def session(running: RunningGateway, query: str = "", **options: Any) -> connect:
    return connect(
        f"ws://127.0.0.1:{running.port}{PATH}{query}", proxy=None, max_size=None, **options
    )


@asynccontextmanager
async def greeted(
    running: RunningGateway, query: str = "", **options: Any
) -> AsyncIterator[ClientConnection]:
    """A session whose instance has said that it begins."""
    async with session(running, query, **options) as client:
        assert json.loads(await client.recv()) == {"type": "session.created"}
        yield client


async def refusal_of(opening: connect) -> tuple[int, dict[str, Any]]:
    with pytest.raises(InvalidStatus) as caught:
        await opening
    answer = caught.value.response
    return answer.status_code, json.loads(answer.body or b"{}")["error"]


async def closed(client: ClientConnection) -> tuple[int | None, str | None]:
    with contextlib.suppress(ConnectionClosed):
        async for _ in client:
            pass
    return client.close_code, client.close_reason
