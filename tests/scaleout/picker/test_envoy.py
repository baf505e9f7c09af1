"""The picker behind a real Envoy with the shipped configuration, in front of unequal instances."""

import asyncio
import collections
import contextlib
import functools
import json
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest

from benchmarks.envoy import (
    cluster,
    configuration,
    ext_proc,
    manager,
    with_keys_file,
    without_guard,
    without_reports,
)
from hetero_gateway.cli import main
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.lab.emulator.settings import EmulatorSettings
from hetero_gateway.scaleout.picker.protocol.messages_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
)
from hetero_gateway.scaleout.picker.service import EXT_PROC as EXT_PROC_SERVICE
from tests.fakes import certificates
from tests.fakes.emulated import emulated
from tests.fakes.envoy import (
    Envoy,
    PickerProcess,
    RunningPicker,
    full_duplex,
    running_envoy,
    running_picker,
    until_picked,
)
from tests.fakes.gateway_files import write
from tests.fakes.pickers import one_picker
from tests.fakes.running import FAST, SLOW, config_for, counted, eventually
from tests.fakes.vllm import FakeInstance, fake_instances

pytestmark = [pytest.mark.system, pytest.mark.slow]

CHAT = "/v1/chat/completions"


def chat(stream: bool = True, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "hello"}
    return {"model": "m", "messages": [message], "stream": stream, "max_tokens": 50} | fields


class Behind(NamedTuple):
    envoy: Envoy
    picker: RunningPicker
    client: httpx.AsyncClient  # of Envoy
    fakes: list[FakeInstance]


@contextlib.asynccontextmanager
async def behind_envoy(
    tmp_path: Path, instances: int = 1, changes: Any = None, **sections: Any
) -> AsyncIterator[Behind]:
    """``changes``: called with Envoy's configuration."""
    sections["picker"] = {"port": 0, "drain_s": 0} | sections.get("picker", {})
    async with (
        fake_instances(instances) as fakes,
        running_picker(config_for(fakes, **sections)) as picker,
    ):
        document = configuration([fake.url for fake in fakes], [picker.ports])
        if changes is not None:
            changes(document)
        async with (
            running_envoy(document, tmp_path) as envoy,
            httpx.AsyncClient(base_url=envoy.url, timeout=60) as client,
        ):
            await until_picked(envoy)
            yield Behind(envoy, picker, client, fakes)


def full_duplex_both_ways(document: dict[str, Any]) -> None:
    full_duplex(document)
    ext_proc(document)["processing_mode"]["response_body_mode"] = "FULL_DUPLEX_STREAMED"


async def test_a_stream_holds_its_load_until_its_last_byte(tmp_path):
    async with behind_envoy(tmp_path, 2) as (_, picker, client, _):
        body = chat(fake={"events": 10, "delay_s": 0.05})
        seen = []
        async with client.stream("POST", CHAT, json=body) as answer:
            assert answer.status_code == 200
            assert answer.headers["x-hetero-gateway-instance"] == "i0"
            async for line in answer.aiter_lines():
                if line.startswith("data:"):
                    seen.append(picker.loads()[0])
        assert len(seen) > 8
        # On a busy machine the last lines are read together, when all is over.
        half = seen[: len(seen) // 2]
        assert all(load > 0 and in_flight == 1 for load, _, in_flight in half)
        await eventually(picker.settled)


async def test_a_destination_that_a_client_sends_is_ignored_and_goes_no_further(tmp_path):
    async with behind_envoy(tmp_path, 2) as (_, _, client, fakes):
        forged = {"x-gateway-destination-endpoint": f"127.0.0.1:{fakes[1].port}"}
        for _ in range(5):
            answer = await client.post(CHAT, json=chat(stream=False), headers=forged)
            assert answer.headers["x-hetero-gateway-instance"] == "i0"
        assert (fakes[0].requests, fakes[1].requests) == (5, 0)
        assert not any(b"x-gateway-destination" in head.lower() for head in fakes[0].heads)


@pytest.mark.parametrize("changes", [None, full_duplex, full_duplex_both_ways])
async def test_a_body_of_2_mb_arrives_byte_for_byte(tmp_path, changes):
    async with behind_envoy(tmp_path, 2, changes) as (_, picker, client, fakes):
        body = json.dumps(chat(metadata=random.Random(1).randbytes(2**20).hex()))
        answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        (fake,) = (fake for fake in fakes if fake.requests)
        assert fake.bodies == [body.encode()]
        await eventually(picker.settled)


FAULTS: list[dict[str, object]] = [
    *({} for _ in range(4)),
    {"events": 20, "delay_s": 0.005},
    {"first_delay_s": 0.05},
    {"framing": "close"},
    {"die": "before_head"},
    {"die": "after_head"},
    {"die": "after_events"},
    {"die_mid_body": True},
    {"end": "error"},
    {"status": 400},
    {"status": 503},
    {"hang": True},
]


async def one_request(port: int, rng: random.Random) -> str:
    """A raw client that may leave at any moment; the first line that it got."""
    body = json.dumps(
        chat(
            model=rng.choice(["m"] * 9 + ["nope"]),
            stream=rng.random() < 0.6,
            # None of them cached.
            prompt=[rng.randrange(10**6)] * rng.choice([10, 10, 10, 2000]),
            max_tokens=rng.randrange(1, 1000),
            fake=rng.choice(FAULTS),
        )
    ).encode()
    if rng.random() < 0.05:
        body = body[:-5]  # broken JSON
    patience_s = rng.choice([0.0, 0.01, 0.05]) if rng.random() < 0.3 else 3.0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    line = b""
    try:
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(patience_s):
            line = await reader.readline()
            await reader.read()
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort() if rng.random() < 0.5 else writer.close()
    return line.decode()[9:12]


@pytest.mark.parametrize("changes", [None, full_duplex])
async def test_what_500_mixed_requests_were_charged_comes_off_once_each(tmp_path, changes):
    queue = {"max_requests": 20, "timeout_s": 0.5}
    sections = {"scheduler": {"prefill_depth": 2, "queue": queue}}
    async with behind_envoy(tmp_path, 2, changes, **sections) as (envoy, picker, _, _):
        scheduler = picker.gateway.fleet.scheduler
        dispatched: list[object] = []
        settled: list[object] = []
        dispatch, settle = scheduler.dispatch, scheduler.settle

        def counted_dispatch(*args: Any, **options: Any) -> Any:
            dispatched.append(made := dispatch(*args, **options))
            return made

        def counted_settle(one: Any, *args: Any) -> Any:
            settled.append(one)
            return settle(one, *args)

        scheduler.dispatch, scheduler.settle = counted_dispatch, counted_settle
        rng = random.Random(12)
        port = int(envoy.url.rsplit(":", 1)[1])
        limit = asyncio.Semaphore(40)

        async def limited() -> str:
            async with limit:
                return await one_request(port, rng)

        statuses: collections.Counter[str] = collections.Counter()
        retries = picker.gateway.metrics.retries
        # Every kind is among them, on a busy machine too: nearly always among the first ones.
        for _ in range(5):
            statuses.update(await asyncio.gather(*(limited() for _ in range(500))))
            await eventually(picker.settled)
            if retries["reset"] and statuses["429"] and statuses["503"]:
                break
        assert statuses["200"] > 10
        assert statuses["400"] > 5
        assert statuses["404"] > 5
        assert statuses["429"] > 0
        assert statuses["503"] > 0
        assert statuses[""] > 20  # left before the first byte
        assert retries["reset"] > 0
        assert len(dispatched) > 20
        assert len(settled) == len({id(each) for each in settled}) == len(dispatched)
        assert {id(each) for each in settled} == {id(each) for each in dispatched}
        assert picker.loads() == [(0.0, 0, 0)] * 2
        for instance in picker.gateway.fleet.instances:
            snapshot = scheduler.members.snapshot(instance)
            assert (snapshot.waiting, snapshot.streaming, snapshot.context_tokens) == (0, 0, 0)


async def test_what_envoy_sends_elsewhere_is_charged_there(tmp_path):
    health = {"probe_interval_s": 60.0, "scrape_interval_s": 60.0}
    async with behind_envoy(tmp_path, 2, health=health) as (_, picker, client, fakes):
        await fakes[0].kill()
        body = chat(fake={"events": 6, "delay_s": 0.05})
        async with client.stream("POST", CHAT, json=body) as answer:
            assert answer.headers["x-hetero-gateway-instance"] == "i1"
            (first, _, _), (second, _, in_flight) = picker.loads()
            assert first == 0.0
            assert second > 0
            assert in_flight == 1
            await answer.aread()
        await eventually(picker.settled)
        metrics = picker.gateway.metrics
        assert metrics.upstream_errors["i0", "reset"] == 1
        assert metrics.series("m", "i1").outcomes["completed"] == 1
        # A probe was asked for, and found it gone: nothing is picked there any more.
        await eventually(lambda: picker.gateway.fleet.instances["i0"].failed_probes > 0)


@pytest.mark.parametrize("changes", [None, full_duplex])
async def test_first_bytes_and_usage_are_reported(tmp_path, changes):
    async with behind_envoy(tmp_path, 1, changes) as (_, picker, client, _):
        # The first report on a connection says that there are any.
        answer = await client.post(CHAT, json=chat(stream=False))
        told = answer.json()["usage"]
        await eventually(picker.settled)
        metrics = picker.gateway.metrics
        metrics.catch_up()
        series = metrics.series("m", "i0")
        assert series.output_tokens == told["completion_tokens"]
        assert series.input_tokens == told["prompt_tokens"]
        body = chat(fake={"events": 8, "first_delay_s": 0.3, "delay_s": 0.05})
        scheduler = picker.gateway.fleet.scheduler
        async with client.stream("POST", CHAT, json=body) as answer:
            assert scheduler.members.snapshot("i0").waiting == 1  # though its head is here
            lines = answer.aiter_lines()
            await anext(lines)
            await eventually(lambda: scheduler.members.snapshot("i0").streaming == 1)
            async for _ in lines:
                pass
        await eventually(picker.settled)
        metrics.catch_up()
        assert series.outcomes == {"completed": 2}
        assert sum(series.ttft.counts) == 1
        # The usage that the stream told, as a client of serve would see it counted.
        assert series.output_tokens == told["completion_tokens"] + 8
        # A client that leaves in the middle is known to have left.
        async with client.stream("POST", CHAT, json=body) as answer:
            await anext(answer.aiter_lines())
        await eventually(picker.settled)
        metrics.catch_up()
        assert series.outcomes == {"completed": 2, "client_disconnected": 1}


async def test_without_reports_first_tokens_are_predicted(tmp_path):
    async with behind_envoy(tmp_path, 2, without_reports) as (_, picker, client, _):
        scheduler = picker.gateway.fleet.scheduler
        body = chat(fake={"events": 8, "first_delay_s": 0.5})
        async with client.stream("POST", CHAT, json=body) as answer:
            assert answer.status_code == 200
            await asyncio.sleep(0.1)  # its prefill takes less by the profile
            await client.post(CHAT, json=chat(stream=False))  # a decision looks at what is due
            assert scheduler.members.snapshot("i0").streaming == 1
        await eventually(picker.settled)


async def test_a_report_that_makes_no_sense_harms_nobody(tmp_path):
    async with one_picker() as picker:
        async with grpc.aio.insecure_channel(picker.address) as channel:
            report = channel.unary_unary("/hetero_gateway.Reports/Report")
            await report(b"00000000000000000077 first" + bytes(b" " * 40))  # of no request
            await report(b"00000000000000000077 end 1 2 - 3")
            for bad in (b"", b"77 first", b"00000000000000000077 end -1 2 - 3", b"x" * 70_000):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await report(bad)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            # Of this picker's own it believes that there are any; after another's it does not.
            ours = picker.server.picker.resources.tickets.prefix + b"0000000077 first"
            (server,) = picker.server.picker._servers
            for said, believed in (
                (b"00000000000000000077 first", False),
                (ours, False),
            ):
                await report(said)
                (peer,) = server.register
                assert peer.reports is believed
            peer.stray_until_s = 0.0
            await report(ours)
            assert peer.reports is True


@pytest.mark.parametrize("changes", [None, full_duplex])
async def test_what_is_not_for_clients_gets_no_further_than_the_picker(tmp_path, changes):
    headers = {
        "x-data-parallel-rank": "1",
        "x-prefiller-host-port": "10.0.0.1:1",
        "x_prefiller_host_port": "10.0.0.1:1",
        "x-vllm-priority": "-5",
        "x-request-id": "___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.1:2",
    }
    async with behind_envoy(tmp_path, 1, changes) as (_, picker, client, fakes):
        plain = json.dumps(chat(kv_transfer_params={"remote_port": 1}, stream=False))
        for body in (
            plain,
            plain.replace("kv_", "kv\\u005f"),
            plain.replace("kv_", '": NaN, "kv_'),
        ):
            answer = await client.post(CHAT, content=body, headers=headers)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["code"] == "field_not_allowed"
        assert fakes[0].requests == 0
        answer = await client.post(
            CHAT, json=chat(stream=False), headers=headers | {"x-session-id": "s"}
        )
        assert answer.status_code == 200
        (head,) = (head.lower() for head in fakes[0].heads)
        assert not any(f"{name}:".encode() in head for name in headers if name != "x-request-id")
        assert b"_addr_" not in head
        assert b"x-session-id: s" in head
        await eventually(picker.settled)


async def test_errors_of_the_pickers_own_have_openais_body(tmp_path, monkeypatch):
    monkeypatch.setenv("PICKER_TEST_KEY", "secret")
    server = {"port": 0, "api_key_env": "PICKER_TEST_KEY", "max_body_bytes": 4096}
    async with behind_envoy(tmp_path, 2, server=server) as (_, picker, client, fakes):
        answer = await client.post(CHAT, json=chat())
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        client.headers["authorization"] = "Bearer secret"
        cases: list[tuple[Any, int, str]] = [
            (chat(model="nope"), 404, "model_not_found"),
            (chat(model=5), 400, "invalid_type"),
            (chat(prompt=[1] * 3000), 413, "request_too_large"),
        ]
        for body, status, code in cases:
            answer = await client.post(CHAT, json=body)
            assert answer.status_code == status, answer.text
            assert answer.json()["error"]["code"] == code, answer.text
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["x-request-id"]
        answer = await client.get("/v1/models")
        assert [model["id"] for model in answer.json()["data"]] == ["m"]
        answer = await client.get("/v1/files")
        assert answer.status_code == 404
        # The client's key was for the picker.
        assert (await client.post(CHAT, json=chat(stream=False))).status_code == 200
        assert b"secret" not in fakes[0].heads[0]
        for fake in fakes:
            fake.healthy = False
        await eventually(lambda: not picker.gateway.fleet.ready())
        answer = await client.post(CHAT, json=chat())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_healthy_instance")
        assert answer.headers["retry-after"] == "2"


async def test_waiting_for_room_outlasts_the_message_timeout_and_too_many_are_shed(tmp_path):
    def hurried(document: dict[str, Any]) -> None:
        ext_proc(document)["message_timeout"] = "1s"

    sections = {"scheduler": {"prefill_depth": 1, "queue": {"max_requests": 6}}}
    async with behind_envoy(tmp_path, 2, hurried, **sections) as (envoy, picker, client, _):
        bodies = [
            # None of them cached.
            chat(stream=False, n=4, prompt=[i] * 4000, max_tokens=10, fake={"first_delay_s": 0.6})
            for i in range(40)
        ]
        tasks = [asyncio.ensure_future(client.post(CHAT, json=body)) for body in bodies]
        await eventually(lambda: picker.gateway.fleet.scheduler.queued > 3)
        tasks[-1].cancel()  # its client leaves
        done = await asyncio.gather(*tasks, return_exceptions=True)
        statuses = collections.Counter(a.status_code for a in done if isinstance(a, httpx.Response))
        assert set(statuses) == {200, 429}
        assert statuses[200] >= 6
        shed = next(a for a in done if isinstance(a, httpx.Response) and a.status_code == 429)
        assert shed.json()["error"]["code"] == "queue_full"
        assert int(shed.headers["retry-after"]) >= 1
        stats = await envoy.stats("override_message_timeout_received")
        assert sum(stats.values()) >= 4
        await eventually(picker.settled)


def hint(document: dict[str, Any], endpoints: list[str]) -> None:
    """Let Envoy say which endpoints the picker may choose from."""
    manager(document)["http_filters"].insert(
        0,
        {
            "name": "envoy.filters.http.set_metadata",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config",
                "metadata": [
                    {
                        "metadata_namespace": "envoy.lb.subset_hint",
                        "value": {"x-gateway-destination-endpoint-subset": endpoints},
                    }
                ],
            },
        },
    )


def slow_one(document: dict[str, Any]) -> str:
    (group,) = cluster(document, "instances")["load_assignment"]["endpoints"]
    where = group["lb_endpoints"][1]["endpoint"]["address"]["socket_address"]
    return f"{where['address']}:{where['port_value']}"


async def test_a_subset_that_envoy_hints_at_is_kept_to(tmp_path):
    def slow(document: dict[str, Any]) -> None:
        hint(document, [slow_one(document), "10.9.9.9:1"])

    async with behind_envoy(tmp_path, 2, slow) as (_, _, client, _):
        for _ in range(3):
            answer = await client.post(CHAT, json=chat(stream=False))
            assert answer.headers["x-hetero-gateway-instance"] == "i1"
    for subset in ([], ["10.9.9.9:1"]):
        none = functools.partial(hint, endpoints=subset)
        async with behind_envoy(tmp_path, 2, none) as (_, picker, client, _):
            answer = await client.post(CHAT, json=chat(stream=False))
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "no_healthy_instance"
            await eventually(picker.settled)


@contextlib.asynccontextmanager
async def two_emulated() -> AsyncIterator[list[str]]:
    """URLs of two unequal emulated instances, ten times faster than their hardware."""
    fast, slow = (
        EmulatorSettings(load_profile(name), ("m",), time_scale=10) for name in (FAST, SLOW)
    )
    async with emulated(fast) as (first, _), emulated(slow) as (second, _):
        yield [first, second]


async def streamed(client: httpx.AsyncClient, tokens: int) -> str:
    body = chat(max_tokens=tokens, ignore_eos=True)
    answer = await client.post(CHAT, json=body)
    answer.raise_for_status()
    return answer.text


@contextlib.asynccontextmanager
async def behind_processes(
    folder: Path, pickers: int, changes: Any = None, **sections: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, list[PickerProcess]]]:
    """Envoy's client, and so many pickers as processes, in front of two emulated instances.

    ``changes``: called with Envoy's configuration.
    """
    async with two_emulated() as urls:
        instances = [
            {"id": f"i{i}", "base_url": url, "profile": profile}
            for i, (url, profile) in enumerate(zip(urls, (FAST, SLOW), strict=True))
        ]
        health = {"probe_interval_s": 0.5, "probe_timeout_s": 60}
        document = {"health": health, "instances": instances} | sections
        path = write(folder / "gateway.yaml", document)
        running = [PickerProcess(path) for _ in range(pickers)]
        try:
            document = configuration(urls, [await picker.ports() for picker in running])
            # Of a request to one that is killed.
            keys = folder / "envoy.keys"
            assert main(["key", "envoy", "-c", str(path), "-o", str(keys)]) == 0
            with_keys_file(document, keys)
            if changes is not None:
                changes(document)
            async with (
                running_envoy(document, folder) as envoy,
                httpx.AsyncClient(base_url=envoy.url, timeout=60) as client,
            ):
                await until_picked(envoy, pickers)
                yield client, running
        finally:
            for picker in running:
                picker.stop(signal.SIGKILL)


@pytest.mark.slow
async def test_streams_and_new_requests_go_on_without_their_picker(tmp_path):
    async with behind_processes(tmp_path, 1) as (client, [picker]):
        open_ones = [asyncio.ensure_future(streamed(client, 1500)) for _ in range(20)]
        await asyncio.sleep(0.7)
        assert not any(task.done() for task in open_ones)
        picker.stop(signal.SIGKILL)
        fresh = await asyncio.gather(*(streamed(client, 20) for _ in range(20)))
        for text in [*fresh, *await asyncio.gather(*open_ones)]:
            assert text.endswith("data: [DONE]\n\n")


@pytest.mark.slow
async def test_of_two_pickers_one_is_killed_and_no_request_fails(tmp_path):
    async with behind_processes(tmp_path, 2) as (client, pickers):
        tasks = []
        for number in range(150):
            tasks.append(asyncio.ensure_future(streamed(client, 50)))
            await asyncio.sleep(0.02)
            if number == 50:
                pickers[0].stop(signal.SIGKILL)
        for text in await asyncio.gather(*tasks):
            assert text.endswith("data: [DONE]\n\n")
        seen = (await client.get(f"{pickers[1].url}/metrics")).text
        assert counted(seen, "routing_decisions_total") > 30


def stand_alone(document: dict[str, Any], files: dict[str, str]) -> None:
    """As llm-d and the Inference Extension lay out an Envoy of their own."""
    full_duplex_both_ways(document)
    without_guard(document)
    # They forward no metadata, and give no attributes; a hung picker is waited for.
    for key in ("metadata_options", "response_attributes", "max_message_timeout"):
        del ext_proc(document)[key]
    ext_proc(document)["message_timeout"] = "1000s"
    ext_proc(document)["failure_mode_allow"] = False
    clusters = document["static_resources"]["clusters"]
    clusters[0] = {
        "name": "instances",
        "type": "ORIGINAL_DST",
        "connect_timeout": "5s",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {
            "use_http_header": True,
            "http_header_name": "x-gateway-destination-endpoint",
        },
    }
    # There the router needs the header.
    del manager(document)["route_config"]["request_headers_to_remove"]
    over_tls(document, files)


def over_tls(document: dict[str, Any], files: dict[str, str], shows: str = "") -> None:
    """Have Envoy ask its pickers so, and show them a certificate of this name."""
    common: dict[str, Any] = {
        "validation_context": {"trusted_ca": {"filename": files["ca"]}},
        "alpn_protocols": ["h2"],
    }
    if shows:
        pair = {"certificate_chain": files[shows], "private_key": files[f"{shows}.key"]}
        common["tls_certificates"] = [{name: {"filename": pair[name]} for name in pair}]
    tls = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
    cluster(document, "picker")["transport_socket"] = {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {"@type": tls, "common_tls_context": common},
    }


async def test_the_layout_of_llm_ds_stand_alone_envoy_is_accepted(tmp_path):
    files = certificates.issued(tmp_path, "picker")
    section = certificates.secured(files, "picker", clients=False)
    changes = functools.partial(stand_alone, files=files)
    async with behind_envoy(tmp_path, 2, changes, picker=section) as (_, picker, client, fakes):
        body = chat(fake={"events": 10, "delay_s": 0.05})
        # The filter in front of ext_proc strips what a client sends itself.
        forged = {"x-gateway-destination-endpoint": f"127.0.0.1:{fakes[1].port}"}
        held = []
        async with client.stream("POST", CHAT, json=body, headers=forged) as answer:
            assert answer.status_code == 200
            assert answer.headers["x-hetero-gateway-instance"] == "i0"
            lines = []
            async for line in answer.aiter_lines():
                if line:
                    lines.append(line)
                    held.append(picker.loads()[0][2])
        assert lines[-1] == "data: [DONE]"
        assert len(lines) > 12
        assert all(in_flight == 1 for in_flight in held[: len(held) // 2])
        assert fakes[0].bodies == [json.dumps(body, separators=(",", ":")).encode()]
        await eventually(picker.settled)


async def test_grpc_health_answers_for_life_readiness_and_the_service(tmp_path):
    async with one_picker() as picker:
        async with grpc.aio.insecure_channel(picker.address) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")

            async def status(service: str) -> int:
                asked = HealthCheckRequest(service=service).SerializeToString()
                return HealthCheckResponse.FromString(await check(asked)).status

            names = ["", "liveness", "readiness", EXT_PROC_SERVICE]
            assert [await status(name) for name in names] == [1, 1, 1, 1]
            picker.gateway.draining = True
            assert [await status(name) for name in names] == [1, 1, 2, 2]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await status("something else")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_http_port_has_the_gateways_limits_and_serves_no_engine_path():
    async with fake_instances(1) as fakes:
        config = config_for(fakes, picker={"port": 0, "drain_s": 0})
        async with (
            running_picker(config) as picker,
            httpx.AsyncClient(base_url=picker.url) as client,
        ):
            answer = await client.post(CHAT, json=chat())
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
            assert (await client.get("/readyz")).status_code == 200
            answer = await client.get("/metrics", headers={"x-long": "x" * 300_000})
            assert answer.status_code == 431
            reader, writer = await asyncio.open_connection("127.0.0.1", picker.ports[1])
            writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\nx: 1\r\n y: folded\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"400"
            writer.close()
        assert fakes[0].requests == 0


async def test_an_instances_name_is_resolved_and_without_an_address_it_gets_nothing(tmp_path):
    async with fake_instances(2) as fakes:
        config = config_for(fakes, picker={"port": 0, "drain_s": 0})
        first, second = config.instances
        named = first.model_copy(update={"base_url": f"http://localhost:{fakes[0].port}"})
        lost = second.model_copy(update={"base_url": "http://no-such-host.invalid:8000"})
        config = config.model_copy(update={"instances": [named, lost]})
        async with running_picker(config) as picker:
            endpoints = picker.server.picker.endpoints
            fleet = picker.gateway.fleet
            known = endpoints.known(fleet.instances["i0"]).destination
            assert known is not None
            assert known.endpoint == f"127.0.0.1:{fakes[0].port}"
            assert endpoints.instance_at(known.endpoint) == "i0"
            assert endpoints.known(fleet.instances["i1"]).destination is None
            assert endpoints.unresolved == ("i1",)
            allowed = endpoints.instances_at([known.endpoint, "10.9.9.9:1"])
            assert endpoints.outside(allowed) == ("i1",)
