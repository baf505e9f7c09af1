"""The splice leans on uvicorn's inside; this fails loudly when uvicorn changes it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from hetero_gateway.core.types import InstanceId
from hetero_gateway.gateway.app import create_app
from hetero_gateway.gateway.wire.downstream import (
    CYCLE_ATTRIBUTES,
    AsgiDownstream,
    UvicornDownstream,
    downstream_of,
)
from tests.fakes.running import config_for, eventually
from tests.fakes.vllm import fake_instances

CHAT = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def served(app: Any, http: str) -> AsyncIterator[str]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(app, http=http, lifespan="on", log_config=None, access_log=False)  # type: ignore[arg-type]
        )
        task = asyncio.ensure_future(server.serve([sock]))
        try:
            await eventually(lambda: server.started)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


async def test_uvicorns_cycle_has_all_that_the_splice_uses() -> None:
    seen: list[tuple[Any, type]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        seen.append((send.__self__, type(downstream_of(scope, receive, send))))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with served(app, "httptools") as url, httpx.AsyncClient() as client:
        await client.get(url)
    [(cycle, chosen)] = seen
    assert isinstance(cycle, RequestResponseCycle)
    assert [name for name in CYCLE_ATTRIBUTES if not hasattr(cycle, name)] == []
    assert hasattr(cycle.flow, "write_paused")
    assert callable(cycle.flow.drain)
    assert chosen is UvicornDownstream


async def test_a_server_without_the_splice_is_served_through_send() -> None:
    downstream = downstream_of({"http_version": "1.1"}, None, lambda _: None)  # type: ignore[arg-type]
    assert isinstance(downstream, AsgiDownstream)


@pytest.mark.parametrize("fake", [{}, {"framing": "close"}, {"events": 50, "event_bytes": 50_000}])
async def test_another_http_implementation_gives_the_same_stream(fake: dict[str, object]) -> None:
    body = {"model": "m", "messages": [], "stream": True, "fake": fake}
    texts = []
    async with fake_instances(1) as fakes:
        for http in ("httptools", "h11"):
            app = create_app(config_for(fakes))
            async with served(app, http) as url, httpx.AsyncClient(base_url=url) as client:
                texts.append((await client.post(CHAT, json=body)).text)
    assert texts[0] == texts[1]
    assert texts[0].endswith("data: [DONE]\n\n")


async def test_the_fallback_settles_when_its_client_leaves_or_its_instance_dies() -> None:
    async with fake_instances(1) as fakes:
        app = create_app(config_for(fakes))
        scheduler = app.gateway.fleet.scheduler
        there = InstanceId("i0")
        async with served(app, "h11") as url, httpx.AsyncClient(base_url=url) as client:
            slow = {"model": "m", "stream": True, "fake": {"events": 500, "delay_s": 0.01}}
            async with client.stream("POST", CHAT, json=slow) as response:
                async for _ in response.aiter_raw():
                    break
                assert scheduler.snapshot(there).in_flight == 1
            await eventually(lambda: fakes[0].aborted == 1)
            dying = {"model": "m", "stream": True, "fake": {"die": "after_events"}}
            text = b""
            with contextlib.suppress(httpx.RemoteProtocolError):
                async with client.stream("POST", CHAT, json=dying) as response:
                    async for part in response.aiter_raw():
                        text += part
                    text += b"ended well"
            assert b"upstream_error" in text
            assert b"[DONE]" not in text
            assert b"ended well" not in text
            await eventually(lambda: scheduler.snapshot(there).in_flight == 0)
            assert scheduler.snapshot(there).load_s == 0
