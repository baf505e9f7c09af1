"""Who may ask for /admin and the other control paths, over real sockets; and the audit."""

import asyncio
import contextlib
import json
import logging
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.files.admin_key import made_admin_key
from hetero_gateway.files.server_config import ServerConfig
from hetero_gateway.serve.control.docs_page import docs_page
from tests.fakes.reloads import from_file
from tests.fakes.running import Rig, RunningGateway, rig

ADMIN_KEY = "admin-secret-31415"
CLIENT_KEY = "client-secret-2718"
OPENED = {"authorization": f"Bearer {ADMIN_KEY}"}
WORKERS = pytest.mark.parametrize("workers", [1, 2])
OTHERS = ("/metrics", "/docs", "/openapi.json", "/dashboard")


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN_KEY_9", ADMIN_KEY)
    monkeypatch.setenv("CLIENT_KEY_9", CLIENT_KEY)


def gateway(workers: int = 1, **server: object) -> contextlib.AbstractAsyncContextManager[Rig]:
    return rig(workers=workers, server=server)


async def raw(running: RunningGateway, *lines: str, version: str = "1.1") -> int:
    """The status of GET /admin/instances with just these header lines."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    head = "\r\n".join((f"GET /admin/instances HTTP/{version}", *lines, "connection: close"))
    writer.write(head.encode() + b"\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1])


@WORKERS
async def test_where_a_request_came_from_opens_nothing_and_the_key_that_was_made_does(
    workers: int,
) -> None:
    fields = (
        "x-forwarded-for: 127.0.0.1",
        "forwarded: for=127.0.0.1",
        "x-real-ip: 127.0.0.1",
        "x-hetero-gateway-peer: 127.0.0.1",
        "authorization: Bearer",
        f"authorization: Bearer {'0' * 64}",
        "origin: http://127.0.0.1",
    )
    async with gateway(workers) as (running, _, _):
        key = f"authorization: Bearer {running.gateway.made_admin_key}"
        for host in ("127.0.0.1", "localhost", "[::1]", f"127.0.0.1:{running.port}", "10.0.0.1"):
            for version in ("1.0", "1.1"):
                assert await raw(running, f"host: {host}", version=version) == 401
                assert await raw(running, f"host: {host}", key, version=version) == 200
            for field in fields:
                assert await raw(running, f"host: {host}", field) == 401
        assert await raw(running, "host: 127.0.0.1", "via: 1.1 proxy", key) == 200
        assert await raw(running, "host: 127.0.0.1", "host: 127.0.0.1", key) == 400
        assert await raw(running, "host: user@127.0.0.1", key) == 400


async def test_a_key_is_made_on_loopback_alone_and_where_nothing_else_is_said() -> None:
    made = {"::1", "127.0.0.1", "127.0.0.2", "localhost"}
    for host in (*made, "0.0.0.0", "::", "10.0.0.1", "gateway.example", ""):
        key = made_admin_key(ServerConfig(host=host), None)
        assert (key is not None) == (host in made), host
        named = ServerConfig(host=host, admin_key_env="ADMIN_KEY_9")
        own_listener = ServerConfig(host=host, admin_listen="unix:admin.sock")
        assert made_admin_key(named, None) is made_admin_key(own_listener, "secret") is None
    keys = {made_admin_key(ServerConfig(), None) for _ in range(50)}
    assert len(keys) == 50
    assert all(key is not None and len(bytes.fromhex(key)) == 32 for key in keys)


async def test_elsewhere_admin_is_off_without_a_key() -> None:
    async with gateway(host="0.0.0.0") as (running, _, _):
        assert running.gateway.made_admin_key is None
        for key in ((), ("authorization: Bearer",), ("authorization: Bearer None",)):
            assert await raw(running, "host: 127.0.0.1", *key) == 403


async def test_a_clients_key_is_none_for_admin_and_keyed_clients_change_nothing() -> None:
    async with gateway(api_key_env="CLIENT_KEY_9") as (running, client, _):
        assert await raw(running, "host: 127.0.0.1") == 401
        bearer = f"authorization: Bearer {CLIENT_KEY}"
        assert await raw(running, "host: 127.0.0.1", bearer) == 401
        key = f"authorization: Bearer {running.gateway.made_admin_key}"
        assert await raw(running, "host: 127.0.0.1", key) == 200
        headers = {"authorization": f"Bearer {running.gateway.made_admin_key}"}
        asked = await client.post("/v1/chat/completions", json={"model": "m"}, headers=headers)
        assert asked.status_code == 401
    async with gateway(api_key_env="CLIENT_KEY_9", admin_key_env="ADMIN_KEY_9") as (
        running,
        client,
        _,
    ):
        assert await raw(running, "host: 127.0.0.1") == 401
        bearer = f"authorization: Bearer {ADMIN_KEY}"
        assert await raw(running, "host: gateway.example", "via: 1.1 proxy", bearer) == 200


@WORKERS
async def test_the_key_that_was_made_stands_in_no_answer_and_no_log(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with gateway(workers) as (running, client, _):
        key = running.gateway.made_admin_key
        assert key is not None
        paths = [
            path
            for path, calls in (await client.get("/openapi.json")).json()["paths"].items()
            if "get" in calls and path != "/admin/events"
        ]
        assert "/admin/instances" in paths
        answers = [await client.get(path) for path in (*paths, "/dashboard/dashboard.js", "/docs")]
        headers = {"authorization": f"Bearer {key}x"}
        answers.append(await client.post("/admin/reload", headers=headers))
        answers.append(await client.post("/admin/reload"))
        answers.append(await client.patch("/admin/instances/i0", json={"weight": 2}))
    assert [answer.status_code for answer in answers[-3:]] == [401, 409, 200]
    for answer in answers:
        assert key not in answer.text + json.dumps(dict(answer.headers))
    assert key not in caplog.text
    assert "by key, from 127.0.0.1" in caplog.text


@WORKERS
async def test_a_unix_socket_of_its_own(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    server = {"api_key_env": "CLIENT_KEY_9", "admin_listen": f"unix:{path}"}
    async with gateway(workers, **server) as (running, _, _):
        assert path.stat().st_mode & 0o777 == 0o600
        assert await raw(running, "host: 127.0.0.1") == 403
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            answer = await client.get("/admin/instances")
            assert (answer.status_code, len(answer.json()["instances"])) == (200, 1)
            assert [(await client.get(each)).status_code for each in OTHERS] == [200] * 4
            # An engine's path wants a client's key there as everywhere.
            answer = await client.post("/v1/chat/completions", json={"model": "m"})
            assert answer.status_code == 401
        with pytest.raises(HeteroGatewayError, match="admin_listen"):
            async with gateway(admin_listen=f"unix:{path}"):
                pass


async def test_an_address_of_its_own_answers_by_address_alone() -> None:
    async with gateway(admin_listen="127.0.0.1:0") as (running, _, _):
        assert await raw(running, "host: 127.0.0.1") == 403
        async with httpx.AsyncClient(base_url=running.server.admin_url) as client:
            assert (await client.get("/admin/instances")).status_code == 200
            names = ("rebound.example", "rebound.example:80", "127.0.0.1.rebound.example", "")
            origins = ("http://evil.example", "http://localhost:1", "null", "http://[", "")
            foreign = [*({"host": each} for each in names), *({"origin": o} for o in origins)]
            for headers in foreign:
                answer = await client.get("/admin/instances", headers=headers)
                assert answer.status_code == 403, headers
            for host in ("localhost@rebound.example", "[::1"):  # which are no hosts at all
                answer = await client.get("/admin/instances", headers={"host": host})
                assert answer.status_code == 400
    server = {"admin_listen": "127.0.0.1:0", "admin_key_env": "ADMIN_KEY_9"}
    async with gateway(**server) as (running, _, _):
        async with httpx.AsyncClient(base_url=running.server.admin_url) as client:
            assert (await client.get("/admin/instances")).status_code == 401
            assert (await client.get("/admin/instances", headers=OPENED)).status_code == 200
            assert (await client.get("/metrics")).status_code == 401


@pytest.mark.parametrize("path", OTHERS)
async def test_the_other_paths_have_a_setting_each(path: str) -> None:
    name = path.strip("/").partition(".")[0]
    statuses = {}
    for exposure in ("open", "clients", "admin", "off"):
        keys = {"api_key_env": "CLIENT_KEY_9", "admin_key_env": "ADMIN_KEY_9"}
        async with gateway(expose={name: exposure}, **keys) as (_, client, _):
            statuses[exposure] = [
                (await client.get(path, headers=headers)).status_code
                for headers in ({}, {"x-api-key": CLIENT_KEY}, OPENED)
            ]
            others = [(await client.get(each)).status_code for each in OTHERS if each != path]
            assert others == [200] * 3
    assert statuses == {
        "open": [200, 200, 200],
        "clients": [401, 200, 200],
        "admin": [401, 401, 200],
        "off": [404, 404, 404],
    }


async def test_docs_need_nothing_from_elsewhere_and_run_no_script() -> None:
    async with gateway() as (_, client, _):
        page = await client.get("/docs")
        style = await client.get("/dashboard/docs.css")
        document = (await client.get("/openapi.json")).json()
    assert (page.status_code, style.status_code) == (200, 200)
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "<script" not in page.text
    assert "//" not in page.text.replace("http://HOST", "")
    for path in document["paths"]:
        assert f"<code>{path}</code>" in page.text


def test_what_stands_in_the_document_is_no_markup() -> None:
    evil = "<img src=x onerror=alert(1)>"
    info = {"title": evil, "version": "1", "summary": evil}
    operation = {"description": evil, "parameters": [{"name": evil, "in": "query"}]}
    assert "<img" not in docs_page({"info": info, "paths": {"/x": {"get": operation}}})


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"base_url": "http://169.254.169.254"}, "link-local"),
        ({"base_url": "http://[::ffff:a9fe:a9fe]"}, "link-local"),
        ({"base_url": "https://127.0.0.1:1", "ca_file": "/etc/passwd"}, "ca_file: only"),
        ({"base_url": "https://127.0.0.1:1", "ca_file": "/no/such/file"}, "ca_file: only"),
        ({"base_url": "http://127.0.0.1:1", "profile": "/etc/passwd"}, "profile: a built-in"),
        ({"base_url": "http://127.0.0.1:1", "profile": "../../x.yaml"}, "profile: a built-in"),
    ],
)
async def test_what_is_added_is_no_means_to_look_around(body: dict[str, Any], told: str) -> None:
    async with gateway() as (_, client, _):
        answer = await client.post("/admin/instances", json={"id": "x", **body})
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


async def test_a_name_that_leads_to_a_link_local_address_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with gateway() as (_, client, _):
        loop = asyncio.get_running_loop()

        async def look_up(host: str, port: object, **_: object) -> list[Any]:
            assert host == "innocent.example"
            return [(socket.AF_INET, 1, 6, "", ("169.254.169.254", 0))]

        await client.get("/health")
        monkeypatch.setattr(loop, "getaddrinfo", look_up, raising=False)
        body = {"id": "x", "base_url": "http://innocent.example"}
        answer = await client.post("/admin/instances", json=body)
    assert (answer.status_code, "leads to 169.254.169.254" in answer.text) == (400, True)


@WORKERS
async def test_each_change_leaves_a_line_and_no_secret(
    workers: int, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "hetero_gateway.audit")
    server = {"admin_key_env": "ADMIN_KEY_9"}
    async with from_file(tmp_path, workers=workers, server=server) as (*_, client, fakes):
        client.headers.update(OPENED)
        entry = {"id": "late", "base_url": fakes[0].url}
        await client.post("/admin/instances", content=json.dumps(entry))
        await client.patch("/admin/instances/late", json={"draining": True})
        await client.delete("/admin/instances/late")
        await client.delete("/admin/instances/nobody")
        await client.post("/admin/reload")
        await client.post("/admin/reload", headers={"authorization": "Bearer guessed"})
        await client.get("/admin/instances")
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split("; ")[0] for line in lines] == [
        "audit: POST /admin/instances: 201",
        "audit: PATCH /admin/instances/late: 200",
        "audit: DELETE /admin/instances/late: 200",
        "audit: DELETE /admin/instances/nobody: 404",
        "audit: POST /admin/reload: 200",
        "audit: POST /admin/reload: 401",
    ]
    assert f"instance late added, at {fakes[0].url}; by key, from 127.0.0.1" in lines[0]
    assert "{'draining': True}" in lines[1]
    assert "nobody who may, from 127.0.0.1" in lines[5]
    assert not any(ADMIN_KEY in line or "guessed" in line for line in lines)
    levels = {record.levelno for record in caplog.records[:3]}
    assert levels == {logging.INFO}
