"""CORS, off and on: which pages may use the gateway from a browser; /admin is never theirs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.server_config import CorsConfig
from hetero_gateway.files.yaml_file import parse_model
from tests.fakes.running import CHAT, faked, rig
from tests.fakes.vllm import FakeInstance

PAGE, OTHER = "https://chat.example", "https://evil.example"
ALLOWED = "access-control-allow-origin"


@asynccontextmanager
async def serving(
    *origins: str, workers: int = 1
) -> AsyncIterator[tuple[FakeInstance, httpx.AsyncClient]]:
    server = {"cors": {"origins": origins, "max_age_s": 60}}
    async with rig(workers=workers, server=server) as (_, client, fakes):
        yield fakes[0], client


def asks(origin: str, method: str = "POST") -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_page_that_is_named_may_and_another_may_not(workers: int) -> None:
    async with serving(PAGE, workers=workers) as (_, client):
        for path in (CHAT, "/v1/models", "/v1/responses/resp_1", "/health"):
            told = await client.options(path, headers=asks(PAGE))
            assert told.status_code == 204
            assert told.headers[ALLOWED] == PAGE
            assert "POST" in told.headers["access-control-allow-methods"]
            assert "x-stainless-os" in told.headers["access-control-allow-headers"]
            assert told.headers["access-control-max-age"] == "60"
            assert told.headers["vary"] == "origin"
            assert "access-control-allow-credentials" not in told.headers
            refused = await client.options(path, headers=asks(OTHER))
            assert refused.status_code == 405
            assert ALLOWED not in refused.headers
        for origin, allowed in ((PAGE, PAGE), (OTHER, None), ("null", None), (PAGE + ".x", None)):
            mine = {"origin": origin}
            answers = [
                await client.post(CHAT, json=faked(), headers=mine),
                await client.post(CHAT, json=faked(events=2), headers=mine),
                await client.post(CHAT, json={"model": "none"}, headers=mine),
                await client.post(CHAT, json=faked(status=503), headers=mine),
                await client.get("/v1/models", headers=mine),
                await client.get("/nothing", headers=mine),
            ]
            assert [a.status_code for a in answers] == [200, 200, 404, 503, 200, 404]
            for answer in answers:
                assert answer.headers.get(ALLOWED) == allowed
                assert answer.headers["vary"] == "origin"
            if allowed:
                assert "x-request-id" in answers[0].headers["access-control-expose-headers"]


async def test_any_page_may_where_that_is_said() -> None:
    async with serving("*") as (_, client):
        told = await client.options(CHAT, headers=asks(OTHER))
        assert (told.status_code, told.headers[ALLOWED]) == (204, "*")
        answer = await client.post(CHAT, json=faked(), headers={"origin": OTHER})
        assert answer.headers[ALLOWED] == "*"


async def test_admin_and_what_shows_it_are_never_a_pages() -> None:
    async with serving("*") as (_, client):
        for path in ("/admin/instances", "/admin", "/dashboard", "/docs", "/metrics",
                     "/openapi.json"):  # fmt: skip
            told = await client.options(path, headers=asks(PAGE, "GET"))
            assert told.status_code in (404, 405)
            answer = await client.get(path, headers={"origin": PAGE})
            for one in (told, answer):
                assert not [name for name in one.headers if name.startswith("access-control")]


async def test_off_nothing_is_said_whatever_the_engine_says() -> None:
    async with serving() as (_, client):
        told = await client.options(CHAT, headers=asks(PAGE))
        assert told.status_code == 405
        fake = {"status": 200, "head": "access-control-allow-origin: *\r\nx-other: 1\r\n"}
        answer = await client.post(CHAT, json=faked(**fake), headers={"origin": PAGE})
        assert answer.status_code == 200
        assert answer.headers["x-other"] == "1"
        assert ALLOWED not in answer.headers
        assert "vary" not in answer.headers


@pytest.mark.parametrize(
    "origin", ["chat.example", "https://chat.example/", "https://u@chat.example", "null", ""]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="origin"):
        parse_model(GatewayConfig, {"server": {"cors": {"origins": [origin]}}}, "gateway.yaml")
    assert CorsConfig(origins=["HTTPS://Chat.example:8443"]).origins == [
        "https://chat.example:8443"
    ]
