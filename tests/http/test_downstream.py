"""Under any other server the gateway is a plain ASGI application, and serves the same."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import uvicorn

from hetero_gateway.core.types import InstanceId
from hetero_gateway.http.clients import Watch, client_limits
from hetero_gateway.http.protocol import engine_protocol
from hetero_gateway.serve.app import App, create_app
from tests.fakes.running import CHAT, config_for, eventually
from tests.fakes.vllm import fake_instances


def of_the_gateway(app: App) -> type[asyncio.Protocol]:
    return engine_protocol(app, Watch(client_limits(app.gateway.config)))


@contextlib.asynccontextmanager
async def served(app: Any, http: Any) -> AsyncIterator[str]:
    # Named as TCP, or asyncio would leave Nagle's algorithm on, which waits in real time.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as sock:
        sock.bind(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(app, http=http, lifespan="on", log_config=None, access_log=False)
        )
        task = asyncio.ensure_future(server.serve([sock]))
        try:
            await eventually(lambda: server.started)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


async def answers_to(*requests: dict[str, Any], **sections: Any) -> list[list[Any]]:
    """What each of these gets: under our protocol first, then under those of others."""
    answers = []
    async with fake_instances(1) as fakes:
        for http in (None, "httptools", "h11"):
            app = create_app(config_for(fakes, **sections))
            async with (
                served(app, http or of_the_gateway(app)) as url,
                httpx.AsyncClient(base_url=url) as client,
            ):
                got = [await client.post(CHAT, **request) for request in requests]
                answers.append([(a.status_code, a.headers["content-type"], a.text) for a in got])
                await eventually(lambda a=app: len(a.gateway.dataplane) == 0)  # type: ignore[misc]
    return answers


@pytest.mark.parametrize(
    "fake",
    [
        {},
        {"framing": "close"},
        {"framing": "bytes"},
        {"events": 50, "event_bytes": 50_000},
        {"status": 404, "body": "{}"},
        {"die": "before_head"},
        {"end": "error"},
        {"garbage": "SSH-2.0\r\n"},
        {"hang": True},
    ],
    ids=str,
)
async def test_another_http_implementation_gives_the_same_answers(fake: dict[str, object]) -> None:
    body = {"model": "m", "messages": [], "fake": fake}
    requests = [{"json": body | {"stream": stream}} for stream in (False, True)]
    ours, *others = await answers_to(*requests, timeouts={"first_byte_s": 0.3})
    assert others == [ours] * 2
    status, _, text = ours[1]
    assert status != 200 or text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"{", 400), (b'{"model": "nope"}', 404), (b'{"model": "m", "x": "%b"}' % (b"x" * 9000), 413)],
)
async def test_another_http_implementation_refuses_the_same(content: bytes, status: int) -> None:
    answers = await answers_to({"content": content}, server={"max_body_bytes": 4096})
    assert answers[0][0][0] == status
    assert answers == answers[:1] * 3


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
                assert scheduler.members.snapshot(there).in_flight == 1
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
            await eventually(lambda: scheduler.members.snapshot(there).in_flight == 0)
            assert scheduler.members.snapshot(there).load_s == 0
