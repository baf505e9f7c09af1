"""TLS towards clients: certificates that are renewed while serving, and clients' own."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.serve.app import create_app
from tests.fakes.reloads import from_file
from tests.fakes.running import CHAT, eventually, faked

PORT = {"port": 0, "shutdown_timeout_s": 1}
PEMS = {"certificate_file": "own.pem", "key_file": "own.key"}


def identify(authority: trustme.CA, directory: Path, name: str = "own") -> None:
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(directory / f"{name}.key")
    issued.cert_chain_pems[0].write_to_path(directory / f"{name}.pem")


def trust(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def serial(url: str, context: ssl.SSLContext) -> str:
    """Of the certificate that a new connection is shown."""
    host, _, port = url.partition("://")[2].partition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    shown = writer.get_extra_info("peercert")
    writer.transport.abort()
    return str(shown["serialNumber"])


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_certificate_is_renewed_and_open_streams_go_on(
    tmp_path: Path, workers: int
) -> None:
    authority = trustme.CA()
    identify(authority, tmp_path)
    context = trust(authority)
    rig = from_file(tmp_path, workers=workers, verify=context, server=PORT | PEMS)
    async with rig as (_, _, running, client, fakes):
        assert running.url.startswith("https:")
        first = await serial(running.url, context)
        body = faked(events=20, delay_s=0.5, event_bytes=3000)
        under_way = asyncio.ensure_future(client.post(CHAT, json=body))
        await eventually(lambda: fakes[0].open == 1)
        (tmp_path / "own.pem").write_text("garbage")
        with pytest.raises(ConfigError, match=r"own\.pem"):
            await running.gateway.reloader.reload("a test")
        assert await serial(running.url, context) == first
        identify(authority, tmp_path)
        await running.gateway.reloader.reload("a test")
        await asyncio.sleep(1)
        assert await serial(running.url, context) != first
        answer = await under_way
        assert answer.text.count("x" * 3000) == 20
        assert answer.text.endswith("data: [DONE]\n\n")
        assert (await client.get("/readyz")).status_code == 200
        with pytest.raises(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=5) as plain:
                await plain.get(running.url.replace("https", "http") + "/livez")


async def test_a_watched_certificate_is_renewed_by_itself(tmp_path: Path) -> None:
    authority = trustme.CA()
    identify(authority, tmp_path)
    context = trust(authority)
    async with from_file(tmp_path, server=PORT | PEMS | {"watch_files_s": 0.5}) as rig:
        running = rig.running
        await asyncio.sleep(2)
        first = await serial(running.url, context)
        identify(authority, tmp_path)
        await eventually(lambda: bool(running.gateway.metrics.reloads))
        assert await serial(running.url, context) != first


async def test_without_a_certificate_of_the_right_authority_no_client_is_served(
    tmp_path: Path,
) -> None:
    authority, clients, strangers = trustme.CA(), trustme.CA(), trustme.CA()
    identify(authority, tmp_path)
    clients.cert_pem.write_to_path(tmp_path / "clients.pem")
    server = PORT | PEMS | {"client_ca_file": "clients.pem"}
    async with from_file(tmp_path, server=server) as (_, _, running, _, fakes):
        for whose, served in ((clients, True), (strangers, False), (None, False)):
            context = trust(authority)
            if whose is not None:
                whose.issue_cert("client.test").configure_cert(context)
            async with httpx.AsyncClient(verify=context, timeout=5) as client:
                try:
                    answer = await client.post(running.url + CHAT, json=faked())
                except httpx.HTTPError:
                    assert not served
                else:
                    assert served
                    assert answer.status_code == 200
        assert fakes[0].requests == 1


@pytest.mark.parametrize(
    ("server", "what"),
    [
        ({"certificate_file": "own.pem"}, "one needs the other"),
        ({"client_ca_file": "own.pem"}, "needs certificate_file"),
        (PEMS | {"client_ca_file": "nowhere.pem"}, r"nowhere\.pem"),
        ({"certificate_file": "own.pem", "key_file": "none.key"}, r"none\.key"),
    ],
)
def test_what_cannot_be_served_with_is_an_error_at_the_start(
    tmp_path: Path, server: dict[str, Any], what: str
) -> None:
    identify(trustme.CA(), tmp_path)
    with pytest.raises((ConfigError, ValueError), match=what):
        create_app(
            GatewayConfig.model_validate({"server": PORT | server}),
            tmp_path / "gateway.yaml",
        )
