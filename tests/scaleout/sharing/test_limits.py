"""Limits over two gateways and a real redis-server."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.gateway_files import clients
from tests.fakes.redis import RedisServer
from tests.fakes.running import FAST, RunningGateway, config_for, eventually, rig, running_gateway

pytestmark = pytest.mark.system

HEADERS = {"authorization": "Bearer ka"}
CHAT = "/v1/chat/completions"
SHARING = {"interval_s": 0.02, "ttl_s": 2.0, "timeout_s": 1.0}


@contextlib.asynccontextmanager
async def two_gateways(
    server: RedisServer, directory: Path, **limits: int
) -> AsyncIterator[tuple[httpx.AsyncClient, list[RunningGateway]]]:
    """Two of them, over the same instances, with one key."""
    sections: dict[str, Any] = {
        "clients": clients(directory, a=limits),
        "scheduler": {"shared": server.url, "sharing": SHARING},
    }
    async with rig(2, profiles=(FAST,), **sections) as (first, client, fakes):
        async with running_gateway(config_for(fakes, profiles=(FAST,), **sections)) as second:
            both: Any = [first.gateway.sharing, second.gateway.sharing]
            await eventually(lambda: [sharing.replicas for sharing in both] == [1, 1])
            yield client, [first, second]


def chat(**fake: object) -> dict[str, object]:
    message = {"role": "user", "content": "hello"}
    return {"model": "m", "messages": [message], "stream": "events" in fake, "fake": fake}


async def ask(client: httpx.AsyncClient, running: RunningGateway, **fake: object) -> httpx.Response:
    return await client.post(f"{running.url}{CHAT}", json=chat(**fake), headers=HEADERS)


def used(gateways: list[RunningGateway]) -> list[int]:
    """What each gateway knows to have been used, by all."""
    accounts = [next(iter(running.gateway.admission.accounts())) for running in gateways]
    return [account.requests.used + account.requests.others for account in accounts]


async def test_once_both_have_heard_a_limit_is_exact(server: RedisServer, tmp_path: Path) -> None:
    async with two_gateways(server, tmp_path, requests_per_minute=20) as (client, gateways):
        for i in range(20):
            assert (await ask(client, gateways[i % 2])).status_code == 200
            await eventually(lambda i=i: used(gateways) == [i + 1] * 2)
        for running in gateways:
            refused = await ask(client, running)
            assert refused.status_code == 429
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
            assert 1 <= int(refused.headers["retry-after"]) <= 61


async def test_all_at_once_each_passes_a_limit_by_what_it_has_not_heard(
    server: RedisServer, tmp_path: Path
) -> None:
    async with two_gateways(server, tmp_path, requests_per_minute=40) as (client, gateways):
        answers = Counter(
            r.status_code
            for r in await asyncio.gather(*(ask(client, gateways[i % 2]) for i in range(200)))
        )
        assert 40 <= answers[200] <= 80
        assert answers[200] + answers[429] == 200
        await eventually(lambda: used(gateways) == [answers[200]] * 2)
        for running in gateways:
            assert (await ask(client, running)).status_code == 429


async def test_concurrency_and_tokens_hold_over_both(server: RedisServer, tmp_path: Path) -> None:
    async with two_gateways(server, tmp_path, concurrency=3, tokens_per_minute=10**6) as (
        client,
        gateways,
    ):
        first, second = gateways
        streams = [
            asyncio.ensure_future(ask(client, first, events=20, delay_s=0.1)) for _ in range(3)
        ]
        account = next(iter(second.gateway.admission.accounts()))
        await eventually(lambda: account.others_in_flight == 3)
        assert (await ask(client, second)).status_code == 429
        assert [r.status_code for r in await asyncio.gather(*streams)] == [200] * 3
        await eventually(lambda: account.others_in_flight == 0)
        first.gateway.metrics.catch_up()
        used = next(iter(first.gateway.admission.accounts())).tokens.used
        assert used > 0
        await eventually(lambda: account.tokens.others == used)
        answer = await ask(client, second)
        assert answer.status_code == 200
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 10**6 - used


async def test_without_redis_each_goes_on_and_has_not_forgotten(
    server: RedisServer, tmp_path: Path
) -> None:
    async with two_gateways(server, tmp_path, requests_per_minute=6) as (client, gateways):
        for _ in range(4):
            assert (await ask(client, gateways[0])).status_code == 200
        account = next(iter(gateways[1].gateway.admission.accounts()))
        await eventually(lambda: account.requests.others == 4)
        server.kill()
        answers = [(await ask(client, gateways[1])).status_code for _ in range(4)]
        assert answers == [200, 200, 429, 429]
