"""A real Envoy within the picker's limits: certificates, calls, the longest bodies."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from benchmarks.envoy import cluster, configuration
from hetero_gateway.scaleout.picker.http2 import connection, frames
from hetero_gateway.scaleout.picker.http2.shares import HELD_BYTES
from tests.fakes.envoy import running_envoy, running_picker, until_picked
from tests.fakes.pickers import server_of
from tests.fakes.running import config_for, eventually
from tests.fakes.vllm import fake_instances
from tests.scaleout.picker.test_envoy import CHAT, behind_envoy, chat, full_duplex

pytestmark = pytest.mark.slow

TLS = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"


def write(made: trustme.LeafCert, folder: Path, name: str) -> tuple[str, str]:
    """(certificate, key): their files."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    made.private_key_pem.write_to_path(str(key))
    for blob in made.cert_chain_pems:
        blob.write_to_path(str(certificate), append=True)
    return str(certificate), str(key)


@pytest.mark.parametrize("shows_one", [True, False])
async def test_an_envoy_is_answered_by_its_certificate_alone(tmp_path, shows_one):
    authority = trustme.CA()
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    certificate, key = write(authority.issue_cert("127.0.0.1"), tmp_path, "picker")
    own = write(authority.issue_cert(common_name="envoy"), tmp_path, "envoy")
    common: dict[str, Any] = {
        "validation_context": {"trusted_ca": {"filename": str(ca)}},
        "alpn_protocols": ["h2"],
    }
    if shows_one:
        common["tls_certificates"] = [
            {"certificate_chain": {"filename": own[0]}, "private_key": {"filename": own[1]}}
        ]
    section = {
        "port": 0,
        "drain_s": 0,
        "certificate_file": certificate,
        "key_file": key,
        "client_ca_file": str(ca),
    }
    async with fake_instances(1) as fakes, running_picker(config_for(fakes, picker=section)) as it:
        document = configuration([fakes[0].url], [it.ports])
        cluster(document, "picker")["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {"@type": TLS, "common_tls_context": common},
        }
        async with (
            running_envoy(document, tmp_path) as envoy,
            httpx.AsyncClient(base_url=envoy.url) as client,
        ):
            if shows_one:
                await until_picked(envoy)
                answer = await client.post(CHAT, json=chat(stream=False))
                assert answer.headers["x-hetero-gateway-instance"] == "i0"
            else:
                name = "cluster.picker.health_check.network_failure"
                async with asyncio.timeout(30):
                    while (await envoy.stats(f"^{name}$")).get(name, 0) < 2:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                assert (await envoy.stats("membership_healthy"))[
                    "cluster.picker.membership_healthy"
                ] == 0
                assert not any(each.heard or each.has_spoken for each in server_of(it).register)


async def test_an_envoy_opens_another_connection_for_more_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "MAX_CALLS", 4)
    told = frames.settings({frames.HEADER_TABLE_SIZE: 0, frames.MAX_CONCURRENT_STREAMS: 4})
    monkeypatch.setattr(connection, "_GREETING", told)

    def four(document: dict[str, Any]) -> None:
        options = cluster(document, "picker")["typed_extension_protocol_options"]
        (options,) = options.values()
        options["explicit_http_config"]["http2_protocol_options"]["max_concurrent_streams"] = 4

    async with (
        fake_instances(2) as fakes,
        behind_envoy(tmp_path, fakes, four) as (envoy, picker),
        httpx.AsyncClient(base_url=envoy.url, timeout=60) as client,
    ):
        body = chat(fake={"events": 5, "delay_s": 0.1})
        answers = await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(40)))
        assert {answer.status_code for answer in answers} == {200}
        assert all("x-hetero-gateway-instance" in answer.headers for answer in answers)
        assert len(server_of(picker).register) >= 10
        await eventually(picker.settled)


# FULL_DUPLEX would take a minute for as much: the fake instance joins what comes in pieces.
# 60 MB through Envoy, the picker and an instance, and read as JSON: 2 s of CPU.
@pytest.mark.parametrize(("changes", "size_bytes"), [(None, 60 * 2**20), (full_duplex, 8 * 2**20)])
async def test_long_bodies_arrive_and_hold_nothing_afterwards(tmp_path, changes, size_bytes):
    async with (
        fake_instances(1) as fakes,
        behind_envoy(tmp_path, fakes, changes) as (envoy, picker),
        httpx.AsyncClient(base_url=envoy.url, timeout=60) as client,
    ):
        body = json.dumps(chat(metadata=random.Random(1).randbytes(size_bytes // 2).hex()))
        answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-hetero-gateway-instance"] == "i0"
        assert fakes[0].bodies == [body.encode()]
        await eventually(picker.settled)
        server = server_of(picker)
        assert server.limits.buffered_bytes == 0
        assert server.pool.held_bytes < HELD_BYTES / 100
