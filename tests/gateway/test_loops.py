"""Gateways that lead back to themselves, one by one or in rings: each request ends at once."""

import contextlib
import logging
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.ports import free_port
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.http.headers import HOPS
from tests.fakes.proxies import nginx
from tests.fakes.running import CHAT, RunningGateway, eventually, running_gateway
from tests.fakes.vllm import fake_instances

BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
NAME = HOPS.decode()


def config(port: int, *base_urls: str, **sections: Any) -> GatewayConfig:
    instances = [{"id": f"i{n}", "base_url": url, "model": "m"} for n, url in enumerate(base_urls)]
    health = {"probe_interval_s": 0.2, "probe_timeout_s": 5, "scrape_interval_s": 1}
    server = {"port": port, "shutdown_timeout_s": 1}
    data = {"server": server, "health": health, "instances": instances, **sections}
    return GatewayConfig.model_validate(data)


@contextlib.asynccontextmanager
async def gateways(
    *configs: GatewayConfig, workers: int = 1
) -> AsyncIterator[list[RunningGateway]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                running_gateway(each, workers=workers, one_port=workers > 1)
            )
            for each in configs
        ]


async def post(url: str, headers: dict[str, str] | None = None) -> httpx.Response:
    async with httpx.AsyncClient(timeout=None) as client:
        return await client.post(url + CHAT, json=BODY, headers=headers)


def served(running: RunningGateway) -> int:
    """POSTs that a gateway has answered, whatever with."""
    return sum(sum(each.metrics.statuses.values()) for each in running.processes())


def hops_of(head: bytes) -> list[str]:
    fields = re.findall(rb"(?im)^%b: *(.*?)\r$" % re.escape(HOPS), head)
    assert len(fields) == 1
    return fields[0].decode().split(", ")


def is_loop(answer: httpx.Response) -> bool:
    error = answer.json()["error"]
    assert answer.headers["x-should-retry"] == "false"
    assert error["type"] == "server_error"
    return answer.status_code == 508 and error["code"] == "loop_detected"


async def test_a_gateway_that_points_at_itself_says_so_and_sends_nothing() -> None:
    port = free_port()
    async with gateways(config(port, f"http://127.0.0.1:{port}")) as [running]:
        [instance] = running.gateway.fleet.instances.values()
        await eventually(lambda: "508" in instance.down_reason)
        async with httpx.AsyncClient(base_url=running.url) as client:
            [row] = (await client.get("/admin/instances")).json()["instances"]
        assert not row["up"]
        assert "it is this gateway itself" in row["down_reason"]
        assert (await post(running.url)).status_code == 503
        assert served(running) == 1


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
async def test_a_ring_of_gateways_costs_one_round(
    size: int, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    ports = [free_port() for _ in range(size)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    configs = [config(ports[n], urls[(n + 1) % size]) for n in range(size)]
    # With workers, each of them is at the port: it is the same gateway, whichever is asked. It is
    # made last, as what its processes share would be taken for the others' as well.
    async with gateways(*configs[1:]) as others, gateways(configs[0], workers=workers) as first:
        ring = [*first, *others]
        for each in ring:
            await eventually(lambda each=each: "m" in each.gateway.fleet.models())
        caplog.clear()
        for _ in range(3):
            before = [served(each) for each in ring]
            answer = await post(urls[0])
            assert is_loop(answer)
            rounds = [served(each) - b for each, b in zip(ring, before, strict=True)]
            assert rounds == [2] + [1] * (size - 1)
        for each in ring:
            await eventually(each.settled)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert 1 <= len([text for text in told if "came back" in text]) <= workers


async def test_requests_that_an_instance_leads_back_have_it_ejected() -> None:
    a, b = free_port(), free_port()
    async with fake_instances(1) as fakes:
        one = config(a, f"http://127.0.0.1:{b}", fakes[0].url)
        async with gateways(one, config(b, f"http://127.0.0.1:{a}")) as [first, second]:
            for each in (first, second):
                await eventually(lambda each=each: "m" in each.gateway.fleet.models())
            statuses = [(await post(first.url)).status_code for _ in range(40)]
            assert statuses.count(508) <= 12
            assert statuses[-5:] == [200] * 5


async def test_gateways_in_a_chain_are_served_and_four_are_the_most() -> None:
    ports = [free_port() for _ in range(5)]
    async with fake_instances(1) as fakes:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        configs = [
            config(port, url)
            for port, url in zip(ports, [*urls[1:], fakes[0].url], strict=True)
        ]  # fmt: skip
        async with gateways(*reversed(configs)) as running:
            for each in running:
                await eventually(lambda each=each: "m" in each.gateway.fleet.models())
            for number in range(4):
                assert (await post(urls[4 - number])).status_code == 200
                assert len(set(hops_of(fakes[0].heads[-1]))) == number + 1
            assert is_loop(await post(urls[0]))
            assert fakes[0].requests == 4


FORGED = [
    "a, b, c", "a, b, c, d", "x" * 200, ",,,,,,,", "0123456789abcdef, 0123456789abcdef", "'; drop",

]  # fmt: skip


@pytest.mark.parametrize("value", FORGED)
async def test_what_a_client_writes_there_hurts_its_own_request_alone(
    value: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "hetero_gateway")
    a, b = free_port(), free_port()
    async with fake_instances(1) as fakes:
        chain = [config(a, f"http://127.0.0.1:{b}"), config(b, fakes[0].url)]
        async with gateways(*chain) as [first, second]:
            for each in (first, second):
                await eventually(lambda each=each: "m" in each.gateway.fleet.models())
            for _ in range(12):
                answer = await post(first.url, {NAME: value})
                assert answer.status_code == 200 or is_loop(answer)
                shown = answer.text + repr(answer.headers)
                assert value.strip() not in shown or value.strip() in ("a",)
            assert (await post(first.url)).status_code == 200
            [instance] = first.gateway.fleet.instances.values()
            assert not instance.outcomes.ejected
            for head in fakes[0].heads:
                assert len(hops_of(head)) <= 4
        assert not [r for r in caplog.records if "drop" in r.getMessage()]


async def test_a_fallback_that_is_the_gateway_itself_is_a_loop_too() -> None:
    port = free_port()
    fallback = {"model": "m", "base_url": f"http://127.0.0.1:{port}"}
    models = {"m": {"fallbacks": [fallback]}}
    dead = f"http://127.0.0.1:{free_port()}"
    async with gateways(config(port, dead, models=models)) as [running]:
        assert is_loop(await post(running.url))
        assert served(running) == 2


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/nothing", CHAT])
async def test_every_path_is_refused_to_what_has_been_here(path: str) -> None:
    async with fake_instances(1) as fakes, gateways(config(0, fakes[0].url)) as [running]:
        await eventually(lambda: "m" in running.gateway.fleet.models())
        await post(running.url)
        [own_id] = hops_of(fakes[0].heads[-1])
        async with httpx.AsyncClient(base_url=running.url) as client:
            method = "POST" if path == CHAT else "GET"
            for value in (own_id, f"other, {own_id}"):
                answer = await client.request(method, path, headers={NAME: value}, json=BODY)
                assert answer.status_code == 508
                assert answer.json()["error"]["code"] == "loop_detected"
                assert own_id not in answer.text
        assert fakes[0].requests == 1


async def test_a_session_by_websocket_that_comes_back_is_refused() -> None:
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidStatus

    a, b = free_port(), free_port()
    ring = [config(a, f"http://127.0.0.1:{b}"), config(b, f"http://127.0.0.1:{a}")]
    async with gateways(*ring) as running:
        for each in running:
            await eventually(lambda each=each: "m" in each.gateway.fleet.models())
        with pytest.raises(InvalidStatus) as refused:
            async with connect(f"ws://127.0.0.1:{a}/v1/realtime?model=m", proxy=None):
                pass
        assert refused.value.response.status_code == 508
        for each in running:
            await eventually(each.settled)


async def test_admin_takes_no_instance_that_is_the_gateway_itself() -> None:
    port = free_port()
    async with gateways(config(port)) as [running]:
        async with httpx.AsyncClient(base_url=running.url) as client:
            for host in ("127.0.0.1", "localhost", "127.1", "[::ffff:127.0.0.1]"):
                instance = {"id": "me", "base_url": f"http://{host}:{port}/path"}
                answer = await client.post("/admin/instances", json=instance)
                assert answer.status_code == 400, host
                assert "where this gateway listens" in answer.json()["error"]["message"]


@pytest.mark.system
@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
async def test_a_gateway_behind_nginx_that_points_at_nginx(tmp_path: Path) -> None:
    port = free_port()
    async with nginx(tmp_path, port) as front, gateways(config(port, front)) as [running]:
        [instance] = running.gateway.fleet.instances.values()
        await eventually(lambda: "508" in instance.down_reason)
        answer = await post(front)
        assert answer.status_code == 503  # its only instance is down
        # Even where it is taken for one that is up.
        running.gateway.fleet.mark_up(instance)
        before = served(running)
        assert is_loop(await post(front))
        assert served(running) - before == 2
