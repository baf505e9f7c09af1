"""A real Envoy within the picker's limits: certificates, calls, the longest bodies."""

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from benchmarks.envoy import cluster, configuration, ext_proc
from hetero_gateway.scaleout.picker.http2 import connection, frames
from hetero_gateway.scaleout.picker.http2.carrier import HELD_BYTES
from tests.fakes import certificates
from tests.fakes.envoy import running_envoy, until_picked
from tests.fakes.pickers import one_picker, server_of
from tests.fakes.running import eventually
from tests.scaleout.picker.test_envoy import CHAT, behind_envoy, chat, full_duplex, over_tls

pytestmark = [pytest.mark.system, pytest.mark.slow]


@pytest.mark.parametrize("shows", ["envoy", ""])
async def test_an_envoy_is_answered_by_its_certificate_alone(tmp_path, shows):
    files = certificates.issued(tmp_path, "picker", "envoy")
    async with one_picker(picker=certificates.secured(files, "picker")) as it:
        url = it.gateway.fleet.instances["i0"].config.base_url
        document = configuration([url], [it.ports])
        over_tls(document, files, shows)
        async with (
            running_envoy(document, tmp_path) as envoy,
            httpx.AsyncClient(base_url=envoy.url) as client,
        ):
            if shows:
                await until_picked(envoy)
                answer = await client.post(CHAT, json=chat(stream=False))
                assert answer.headers["x-hetero-gateway-instance"] == "i0"
                return
            failures = "cluster.picker.health_check.network_failure"
            async with asyncio.timeout(30):
                while (await envoy.stats(f"^{failures}$")).get(failures, 0) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            healthy = "cluster.picker.membership_healthy"
            assert (await envoy.stats(healthy))[healthy] == 0
            assert not any(each.heard or each.has_spoken for each in server_of(it).register)


async def test_an_envoy_opens_another_connection_for_more_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "MAX_CALLS", 4)
    told = frames.settings({frames.HEADER_TABLE_SIZE: 0, frames.MAX_CONCURRENT_STREAMS: 4})
    monkeypatch.setattr(connection, "_GREETING", told)

    def four(document: dict[str, Any]) -> None:
        options = cluster(document, "picker")["typed_extension_protocol_options"]
        (options,) = options.values()
        options["explicit_http_config"]["http2_protocol_options"]["max_concurrent_streams"] = 4

    async with behind_envoy(tmp_path, 2, four) as (_, picker, client, _):
        body = chat(fake={"events": 5, "delay_s": 0.1})
        answers = await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(40)))
        assert {answer.status_code for answer in answers} == {200}
        assert all("x-hetero-gateway-instance" in answer.headers for answer in answers)
        assert len(server_of(picker).register) >= 10
        await eventually(picker.settled)


# FULL_DUPLEX would take a minute for as much: the fake instance joins what comes in pieces.
# 24 MB through Envoy, the picker and an instance, and read as JSON: 1 s of CPU.
@pytest.mark.parametrize(("duplex", "size_bytes"), [(False, 24 * 2**20), (True, 8 * 2**20)])
async def test_long_bodies_arrive_and_hold_nothing_afterwards(tmp_path, duplex, size_bytes):
    def patient(document: dict[str, Any]) -> None:
        if duplex:
            full_duplex(document)
        ext_proc(document)["message_timeout"] = "60s"  # a busy machine takes seconds for a body

    async with behind_envoy(tmp_path, 1, patient) as (_, picker, client, fakes):
        body = json.dumps(chat(metadata=random.Random(1).randbytes(size_bytes // 2).hex()))
        answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-hetero-gateway-instance"] == "i0"
        assert fakes[0].bodies == [body.encode()]
        await eventually(picker.settled)
        server = server_of(picker)
        assert server.limits.buffered_bytes == 0
        assert server.held_bytes < HELD_BYTES / 100
