import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.trace import LoadRequest
from hetero_gateway.lab.load.client import LoadTarget, parse_target
from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind, filler_pool
from hetero_gateway.lab.load.replay import replay
from hetero_gateway.lab.load.result import RequestRecord
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.raw import GOOD, RawInstance
from tests.fakes.vllm import FakeInstance, fake_instances

ASKED = (12, 6)  # tokens; the fake's usage says 10 and as many as it has events


@contextlib.asynccontextmanager
async def faulty(**fault: Any) -> AsyncIterator[FakeInstance]:
    async with fake_instances(1) as (fake,):
        fake.fault = fault
        yield fake


async def send(
    url: str,
    count: int = 1,
    *,
    gap_s: float = 0.0,
    kind: PromptKind = PromptKind.CHAT,
    stream: bool = True,
    api_key: str | None = None,
    timeout_s: float = 30.0,
    concurrency: int | None = None,
) -> list[RequestRecord]:
    maker = BodyMaker("m", kind, stream, 4.0, filler_pool())
    requests = [LoadRequest(k * gap_s, *ASKED) for k in range(count)]
    target = parse_target(url, api_key)
    return await replay(target, requests, maker, concurrency=concurrency, timeout_s=timeout_s)


async def test_a_stream_is_measured_and_its_usage_believed():
    headers = "x-hetero-gateway-instance: one\r\n"
    async with faulty(events=7, delay_s=0.01, head=headers) as fake:
        (record,) = await send(fake.url)
    assert (record.error, record.instance) == (None, "one")
    assert (record.input_tokens, record.output_tokens) == (10, 7)
    assert 0 <= record.sent_s <= record.first_s
    # The fake sends its role chunk at once and then waits after each of seven tokens.
    assert record.end_s - record.first_s >= 7 * 0.01


async def test_without_usage_the_tokens_are_the_events():
    async with faulty(events=4, usage=False) as fake:
        (record,) = await send(fake.url)
    # The event that ends it counts as well: a vLLM's has a token.
    assert (record.input_tokens, record.output_tokens) == (ASKED[0], 5)


@pytest.mark.parametrize("kind", list(PromptKind))
async def test_a_plain_answer_is_read_whole(kind):
    async with faulty() as fake:
        (record,) = await send(fake.url, stream=False, kind=kind)
    assert (record.error, record.output_tokens, record.tpot_s) == (None, 3, None)
    assert fake.heads[0].split()[1].decode() == kind.path


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"status": 503}, "http_503"),
        ({"garbage": "\x16\x03 this is not HTTP\r\n\r\n"}, "protocol"),
        ({"die": "after_events"}, "reset"),
        ({"end": "error"}, "stream_error"),
        ({"end": "abort"}, "aborted"),
        ({"status": 200, "body": 'data: {"choices":[]}\n\n'}, "incomplete"),
        ({"hang": True}, "timeout"),
    ],
)
async def test_every_failure_has_its_kind(fault, error):
    async with faulty(**fault) as fake:
        (record,) = await send(fake.url, timeout_s=0.5)
    assert record.error == error


async def test_nobody_listening_is_a_connect_error():
    async with faulty() as fake:
        url = fake.url
    (record,) = await send(url)
    assert (record.error, record.first_s) == ("connect", None)


async def test_connections_are_used_again():
    async with faulty() as fake:
        records = await send(fake.url, 20, concurrency=2)
    assert [(r.index, r.error) for r in records] == [(k, None) for k in range(20)]
    assert len(fake.peers) == 2


async def test_a_server_that_closes_after_each_answer_costs_no_errors():
    async with RawInstance() as instance:
        instance.posts = [GOOD, None]
        records = await send(instance.url, 4, stream=False, concurrency=1)
    assert [r.error for r in records].count(None) >= 3


async def test_without_a_bound_all_requests_are_in_flight_together():
    async with faulty(delay_s=0.01) as fake:
        records = await send(fake.url, 50)
    assert all(r.error is None for r in records)
    assert len(fake.peers) == 50


async def test_requests_are_sent_when_they_are_due_and_lateness_is_recorded():
    async with faulty() as fake:
        paced = await send(fake.url, 4, gap_s=0.05)
        fake.fault = {"events": 5, "delay_s": 0.01}
        bounded = await send(fake.url, 3, concurrency=1)
    assert all(r.sent_s >= r.due_s for r in paced)
    assert bounded[2].sent_s - bounded[2].due_s >= 10 * 0.01


async def test_the_key_goes_along():
    async with faulty() as fake:
        await send(fake.url, api_key="k-1")
    assert b"authorization: Bearer k-1\r\n" in fake.heads[0]


async def test_a_cancelled_replay_hangs_up():
    async with faulty(hang=True) as fake:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await send(fake.url, 5)
        await asyncio.sleep(0.05)
        assert (fake.requests, fake.aborted) == (5, 5)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://h:8000", LoadTarget("h", 8000, False)),
        ("http://h:8000/v1/", LoadTarget("h", 8000, False)),
        ("https://h/api/v1", LoadTarget("h", 443, True, "/api")),
        ("http://[::1]:9", LoadTarget("::1", 9, False)),
    ],
)
def test_urls_with_and_without_v1_are_understood(url, target):
    assert parse_target(url) == target


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h", "http://", "http://h:99999"])
def test_a_bad_url_is_a_configuration_error(url):
    with pytest.raises(ConfigError, match="http"):
        parse_target(url)
