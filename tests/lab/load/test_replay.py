from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.trace import LoadRequest
from hetero_gateway.lab.load.client import LoadTarget, parse_target
from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind, filler_pool
from hetero_gateway.lab.load.replay import ReplayOptions, replay
from hetero_gateway.lab.load.result import RequestRecord
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time

Serve = Callable[[], contextlib.AbstractAsyncContextManager[Any]]


async def send(
    url: str,
    model: str = "fast",
    count: int = 1,
    *,
    gap_s: float = 0.0,
    kind: PromptKind = PromptKind.CHAT,
    stream: bool = True,
    options: ReplayOptions | None = None,
    api_key: str | None = None,
) -> list[RequestRecord]:
    maker = BodyMaker(model, kind, stream, 4.0, filler_pool())
    requests = [LoadRequest(k * gap_s, 10, 6) for k in range(count)]
    target = parse_target(url, api_key)
    return await replay(target, requests, maker, options or ReplayOptions(timeout_s=30.0))


async def test_a_stream_is_measured_and_its_usage_believed(serve: Serve) -> None:
    async with serve() as fake:
        (record,) = await send(fake.url, "slow")
    assert record.error is None
    assert (record.input_tokens, record.output_tokens) == (7, 6)
    assert record.instance == "one"
    assert record.first_s is not None
    assert 0 <= record.sent_s <= record.first_s
    # The fake sends its role chunk at once and then waits before each of six tokens.
    assert record.end_s - record.first_s >= 5 * fake.token_gap_s


async def test_without_usage_the_tokens_are_the_events(serve: Serve) -> None:
    async with serve() as fake:
        (record,) = await send(fake.url, "no-usage")
    assert record.output_tokens == 6
    assert record.input_tokens == 10


@pytest.mark.parametrize("kind", list(PromptKind))
async def test_a_plain_answer_is_read_whole(serve: Serve, kind: PromptKind) -> None:
    async with serve() as fake:
        (record,) = await send(fake.url, stream=False, kind=kind)
    assert record.error is None
    assert record.output_tokens == 6
    assert record.tpot_s is None
    assert fake.paths == [kind.path]


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("refused", "http_503"),
        ("garbage", "protocol"),
        ("cut", "reset"),
        ("dead-engine", "stream_error"),
        ("aborts", "aborted"),
        ("no-done", "incomplete"),
        ("silent", "timeout"),
    ],
)
async def test_every_failure_has_its_kind(serve: Serve, model: str, error: str) -> None:
    async with serve() as fake:
        (record,) = await send(fake.url, model, options=ReplayOptions(timeout_s=0.5))
    assert record.error == error


async def test_nobody_listening_is_a_connect_error(serve: Serve) -> None:
    async with serve() as fake:
        url = fake.url
    (record,) = await send(url)
    assert record.error == "connect"
    assert record.first_s is None


async def test_connections_are_used_again(serve: Serve) -> None:
    async with serve() as fake:
        records = await send(fake.url, count=20, options=ReplayOptions(concurrency=2))
    assert [r.index for r in records] == list(range(20))
    assert all(r.error is None for r in records)
    assert fake.connections == 2


async def test_a_server_that_closes_after_each_answer_costs_no_errors(serve: Serve) -> None:
    async with serve() as fake:
        records = await send(fake.url, "closes", 4, options=ReplayOptions(concurrency=1))
        assert [r.error for r in records].count(None) >= 3


async def test_without_a_bound_all_requests_are_in_flight_together(serve: Serve) -> None:
    async with serve() as fake:
        records = await send(fake.url, "slow", 50)
    assert all(r.error is None for r in records)
    assert fake.connections == 50


async def test_requests_are_sent_when_they_are_due_and_lateness_is_recorded(serve: Serve) -> None:
    async with serve() as fake:
        paced = await send(fake.url, count=4, gap_s=0.05)
        bounded = await send(fake.url, "slow", 3, options=ReplayOptions(concurrency=1))
    assert all(r.sent_s >= r.due_s for r in paced)
    assert bounded[2].sent_s - bounded[2].due_s >= 10 * fake.token_gap_s


async def test_the_key_goes_along(serve: Serve) -> None:
    async with serve() as fake:
        await send(fake.url, api_key="k-1")
    assert fake.headers[0]["authorization"] == "bearer k-1"


async def test_a_cancelled_replay_hangs_up(serve: Serve) -> None:
    async with serve() as fake:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await send(fake.url, "silent", 5)
        await asyncio.sleep(0.05)
        assert (len(fake.bodies), fake.hung_up) == (5, 5)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://h:8000", LoadTarget("h", 8000, False)),
        ("http://h:8000/v1/", LoadTarget("h", 8000, False)),
        ("https://h/api/v1", LoadTarget("h", 443, True, "/api")),
        ("http://[::1]:9", LoadTarget("::1", 9, False)),
    ],
)
def test_urls_with_and_without_v1_are_understood(url: str, target: LoadTarget) -> None:
    assert parse_target(url) == target


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h", "http://", "http://h:99999"])
def test_a_bad_url_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match="http"):
        parse_target(url)
