"""/v1/realtime over real sockets: a WebSocket to an instance, placed like a request."""

import asyncio
import contextlib
import json
import ssl
from pathlib import Path

import httpx
import pytest
import trustme
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from hetero_gateway.core.types import InstanceId
from tests.fakes.gateway_files import clients
from tests.fakes.realtime import PATH, Speaker, closed, greeted, refusal_of, serving, session
from tests.fakes.running import config_for, eventually, running_gateway


@pytest.mark.parametrize("workers", [1, 2])
async def test_messages_pass_both_ways_and_the_load_is_held_until_it_closes(workers: int) -> None:
    one, other = Speaker(), Speaker()
    scheduler = {"policy": "least-requests"}
    async with serving(one, other, workers=workers, scheduler=scheduler) as running:
        query = "?model=m&x=1"
        async with session(running, query, subprotocols=[Subprotocol("realtime")]) as client:
            assert json.loads(await client.recv()) == {"type": "session.created"}
            assert client.subprotocol == "realtime"
            for message in ("text", b"\x00\xff", "ü" * 100_000, b"x" * 3_000_000, ""):
                await client.send(message)
                assert await client.recv() == message
            await asyncio.sleep(20)
            loads = running.loads()
            assert sum(in_flight for *_, in_flight in loads) == 1
            assert sum(load for load, *_ in loads) > 0
            head = (one.heads or other.heads)[0]
            assert head.path == PATH + query
            assert client.response.headers["x-request-id"] == head.headers["x-request-id"]
            assert client.response.headers["x-hetero-gateway-instance"] in ("i0", "i1")
            async with session(running) as second:
                assert await second.recv()
            assert len(one.heads) == len(other.heads) == 1, "the second goes where there is less"


@pytest.mark.parametrize("workers", [1, 2])
async def test_either_sides_close_reaches_the_other(workers: int) -> None:
    speaker = Speaker()
    async with serving(speaker, workers=workers) as running:
        async with greeted(running) as client:
            await client.close(3007, "bye")
        await eventually(lambda: speaker.closed == [(3007, "bye")])
        async with session(running) as client:
            await client.send("close")
            assert await closed(client) == (4001, "enough")
        async with session(running) as client:
            await client.send("die")
            assert (await closed(client))[0] == 1011
        async with greeted(running) as client:
            client.transport.abort()
        await eventually(lambda: len(speaker.closed) == 4)


async def test_it_is_bounded_in_size_time_and_silence() -> None:
    speaker = Speaker()
    async with serving(speaker, timeouts={"total_s": 60, "idle_s": 20}) as running:
        async with session(running) as client:
            await client.send(b"x" * (1 << 24))
            with contextlib.suppress(ConnectionClosed):
                await client.send(b"y" * ((1 << 24) + 1))
            assert (await closed(client))[0] == 1009
        loop = asyncio.get_running_loop()
        for talks, after_s in ((False, 20), (True, 60)):
            began_s = loop.time()
            async with greeted(running) as client:
                if talks:
                    talking = asyncio.create_task(talk(client))
                assert (await closed(client))[0] == 1001
            assert loop.time() - began_s == pytest.approx(after_s, abs=5)
        talking.cancel()


async def talk(client: ClientConnection) -> None:
    while True:
        await asyncio.sleep(10)
        await client.send("hello")


async def test_keys_models_and_limits_apply(tmp_path: Path) -> None:
    keys = clients(tmp_path, a={"concurrency": 1}, b={"models": ["other"]})
    speaker = Speaker()
    async with serving(speaker, clients=keys) as running:
        mine = {"authorization": "Bearer ka"}
        for headers, query, status, code in (
            ({}, "", 401, "invalid_api_key"),
            ({"authorization": "Bearer kb"}, "?model=m", 403, "model_not_allowed"),
            (mine, "?model=zz", 404, "model_not_found"),
        ):
            refused = await refusal_of(session(running, query, additional_headers=headers))
            assert (refused[0], refused[1]["code"]) == (status, code)
        async with greeted(running, additional_headers=mine):
            assert "authorization" not in speaker.heads[0].headers
            refused = await refusal_of(session(running, additional_headers=mine))
            assert (refused[0], refused[1]["code"]) == (429, "rate_limit_exceeded")
        await eventually(running.settled)
        async with greeted(running, additional_headers=mine):
            pass


async def test_where_none_can_be_had_the_answer_is_http() -> None:
    one, other = Speaker(), Speaker("other")
    async with serving(one, other) as running:
        refused = await refusal_of(session(running))
        assert refused[1]["code"] == "missing_required_parameter"
        one.refuses = 403
        status, error = await refusal_of(session(running, "?model=m"))
        assert (status, error["code"]) == (502, "upstream_error")
        assert "403" in error["message"]
        instance = running.gateway.fleet.instances[InstanceId("i1")]
        instance.draining = True
        running.gateway.fleet.publish(instance)
        status, error = await refusal_of(session(running, "?model=other"))
        assert (status, error["code"]) == (503, "no_healthy_instance")
        async with httpx.AsyncClient(base_url=running.url) as client:
            plain = await client.get(PATH)
            assert (plain.status_code, plain.headers["upgrade"]) == (426, "websocket")
            assert plain.json()["error"]["code"] == "upgrade_required"
            elsewhere = await client.get("/v1/models", headers={"upgrade": "websocket"})
            assert elsewhere.status_code == 200, "an offer to upgrade is ignored"


async def test_another_sites_page_opens_none_unless_it_is_named() -> None:
    page = {"origin": "https://chat.example"}
    # A page without a site is another site's, too.
    others = [{"origin": origin} for origin in ("https://evil.example", "null", "")]
    for origins in ([], ["https://chat.example"]):
        server = {"port": 0, "cors": {"origins": origins}}
        async with serving(Speaker(), server=server) as running:
            for other in others:
                refused = await refusal_of(session(running, additional_headers=other))
                assert (refused[0], refused[1]["code"]) == (403, "origin_not_allowed")
            if not origins:
                assert (await refusal_of(session(running, additional_headers=page)))[0] == 403
                continue
            own = {"origin": f"http://127.0.0.1:{running.port}"}
            for allowed in (page, own):
                async with greeted(running, additional_headers=allowed):
                    pass


async def test_another_instance_is_tried_where_one_refuses() -> None:
    one, other = Speaker(), Speaker()
    async with serving(one, other) as running:
        one.refuses = 500
        for _ in range(4):
            async with greeted(running) as client:
                assert client.response.headers["x-hetero-gateway-instance"] == "i1"


async def test_the_gateways_end_closes_it() -> None:
    speaker = Speaker()
    fake = await speaker.start()
    async with running_gateway(config_for([fake])) as running:
        client = await session(running)
        await client.recv()
    assert (await closed(client))[0] == 1012
    await eventually(lambda: len(speaker.closed) == 1)
    await speaker.stop()


async def test_it_speaks_tls_on_both_sides(tmp_path: Path) -> None:
    authority = trustme.CA()
    identity = authority.issue_cert("127.0.0.1")
    trusted, own = tmp_path / "ca.pem", tmp_path / "own.pem"
    authority.cert_pem.write_to_path(str(trusted))
    identity.private_key_and_cert_chain_pem.write_to_path(str(own))
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    identity.configure_cert(theirs)
    speaker = Speaker()
    fake = await speaker.start(theirs)
    there = {"id": "i0", "base_url": fake.url.replace("http:", "https:"), "ca_file": str(trusted)}
    server = {"port": 0, "certificate_file": str(own), "key_file": str(own)}
    config = config_for([], instances=[there], server=server)
    async with running_gateway(config) as running:
        context = ssl.create_default_context(cafile=str(trusted))
        url = f"wss://127.0.0.1:{running.port}{PATH}"
        async with connect(url, ssl=context, proxy=None) as client:
            await client.recv()
            await client.send("over TLS")
            assert await client.recv() == "over TLS"
        await eventually(running.settled)
    await speaker.stop()
