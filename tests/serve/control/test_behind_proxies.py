"""/admin of a gateway on loopback without a key of its operator's, behind real proxies."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_gateway.core.types import InstanceId
from tests.fakes.envoy import running_picker
from tests.fakes.proxies import SET_UPS, SetUp
from tests.fakes.running import RunningGateway, config_for, running_gateway
from tests.fakes.vllm import fake_instances

pytestmark = pytest.mark.system

HOSTS = ("localhost", "127.0.0.1", "[::1]", "gateway.example")
KEYS: tuple[dict[str, str], ...] = (
    {},
    {"authorization": "Bearer guessed"},
    {"authorization": "Basic YWRtaW46"},
)
# What a stranger says of where it comes from, and what it says at all.
CLAIM = dict.fromkeys(("x-forwarded-for", "x-real-ip", "x-hetero-gateway-peer"), "127.0.0.1")
SAID = ({}, CLAIM, KEYS[1] | CLAIM)
ADDED = {"id": "strangers", "base_url": "http://127.0.0.1:9"}
ASKED: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/admin/instances", None),
    ("POST", "/admin/instances", ADDED),
    ("PATCH", "/admin/instances/i0", {"draining": True}),
    ("DELETE", "/admin/instances/i0", None),
    ("POST", "/admin/instances/i0/engine/sleep", None),
    ("POST", "/admin/models/m/engine/reset_prefix_cache", None),
    ("POST", "/admin/reload", None),
    ("GET", "/admin/events", None),
    ("GET", "/admin/decisions", None),
    ("GET", "/admin/requests", None),
    ("GET", "/admin/explain?prompt_tokens=9", None),
    ("GET", "/admin/observations?instance=i0", None),
    ("GET", "/admin/clients", None),
    ("GET", "/admin/usage", None),
    ("GET", "/admin/following", None),
)


@asynccontextmanager
async def behind(
    set_up: SetUp, folder: Path, workers: int
) -> AsyncIterator[tuple[RunningGateway, httpx.AsyncClient]]:
    async with (
        fake_instances(1) as fakes,
        running_gateway(config_for(fakes), workers=workers) as running,
        set_up(folder, running.port) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client,
    ):
        yield running, client


@pytest.mark.parametrize(
    ("name", "workers"), [*((name, 1) for name in SET_UPS), ("nginx, HTTP/1.1", 2), ("HAProxy", 2)]
)
async def test_a_stranger_has_no_admin_whatever_proxy_it_comes_through(
    name: str, workers: int, tmp_path: Path
) -> None:
    async with behind(SET_UPS[name], tmp_path, workers) as (running, client):

        async def status(method: str, path: str, body: Any, headers: dict[str, str]) -> int:
            content = None if body is None else json.dumps(body)
            # Its head alone: events that are open to somebody never end.
            async with client.stream(method, path, content=content, headers=headers) as answer:
                return answer.status_code

        for host, told in itertools.product(HOSTS, SAID):
            headers = {"host": host, **told}
            answers = await asyncio.gather(*(status(*asked, headers) for asked in ASKED))
            assert set(answers) <= {401, 403}, headers
        (instance,) = running.gateway.fleet.instances.values()
        assert (instance.id, instance.draining) == (InstanceId("i0"), False)
        # What is for everybody comes through, and so does who has the key.
        assert await status("GET", "/health", None, {"host": "localhost"}) == 200
        assert running.gateway.admin_key is not None
        right = {"authorization": f"Bearer {running.gateway.admin_key}"}
        for host in HOSTS:
            assert await status("GET", "/admin/instances", None, {"host": host, **right}) == 200
        assert await status("GET", "/admin/events", None, right) == 200
        assert await status(*ASKED[2], right) == 200
        assert instance.draining


async def test_the_pickers_control_paths_are_closed_to_strangers_as_well(tmp_path: Path) -> None:
    async with (
        fake_instances(1) as fakes,
        running_picker(config_for(fakes, picker={"port": 0, "drain_s": 0})) as picker,
        SET_UPS["nginx, HTTP/1.1"](tmp_path, picker.ports[1]) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client,
    ):
        for host, key in itertools.product(HOSTS, KEYS):
            answer = await client.post("/admin/instances", json=ADDED, headers={"host": host} | key)
            assert answer.status_code in (401, 403)
        right = {"authorization": f"Bearer {picker.server.made_admin_key}"}
        answer = await client.get("/admin/instances", headers=right)
        assert [row["id"] for row in answer.json()["instances"]] == ["i0"]
