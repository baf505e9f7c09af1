"""What a client sees: bytes pass unchanged, streams flow as they come, failures are clear."""

import asyncio
import itertools
import json
import socket
import time
from typing import Any

import httpx
import pytest

from hetero_gateway.core.lengths.predictors import LengthFeatures
from tests.fakes.raw import RawInstance
from tests.fakes.running import CHAT, eventually, rig
from tests.fakes.vllm import FakeInstance, fake_instances

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n"


def chat(stream: bool = False, model: str = "m", **fake: object) -> dict[str, object]:
    message = {"role": "user", "content": "hello"}
    return {"model": model, "messages": [message], "stream": stream, "fake": fake}


async def streamed(port: int, **fake: object) -> bytes:
    """Everything that a connection: close client gets for a stream."""
    body = json.dumps(chat(stream=True, **fake)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD % len(body) + b"connection: close\r\n\r\n" + body)
    data = await reader.read()
    writer.close()
    return data


def unchunked(data: bytes) -> tuple[bytes, bool]:
    """(body, whether the last chunk came) of a chunked response."""
    rest = data.split(b"\r\n\r\n", 1)[1]
    body = b""
    while rest:
        size, rest = rest.split(b"\r\n", 1)
        if int(size, 16) == 0:
            return body, True
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body, False


def instance_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.headers["x-hetero-gateway-instance"]


def refusal_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


# What passes


async def test_bodies_pass_unchanged_in_both_directions() -> None:
    async with rig() as (_, client, fakes):
        body = b'{ "model":"m" ,"unknown_field": [1, {"a": "\\u00e9\xc3\xa9"}], "messages":[]}'
        answer = '{"odd":   "spacing", "\\u00e9": 1}'
        await client.post(CHAT, content=body)
        response = await client.post(CHAT, json=chat(status=418, body=answer))
        assert fakes[0].bodies[0] == body
        assert (response.status_code, response.text) == (418, answer)


async def test_every_engine_path_is_routed_with_its_query() -> None:
    async with rig() as (_, client, fakes):
        for path in ("/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize"):
            response = await client.post(path + "?a=1&b=%20", json={"model": "m", "input": "x"})
            assert response.status_code == 200
            assert fakes[0].heads[-1].startswith(f"POST {path}?a=1&b=%20 HTTP/1.1\r\n".encode())


async def test_a_stream_arrives_byte_for_byte_however_it_is_framed_and_ends_cleanly() -> None:
    async with rig() as (running, client, fakes):
        direct = unchunked(await streamed(fakes[0].port))
        through = await streamed(running.port)
        assert unchunked(through) == direct
        assert direct[0].endswith(b"data: [DONE]\n\n")
        head = through.split(b"\r\n\r\n", 1)[0].lower()
        assert b"x-hetero-gateway-instance: i0" in head
        assert b"x-request-id: " in head
        for framing in ("close", "bytes"):
            assert unchunked(await streamed(running.port, framing=framing)) == direct
        plain = await client.post(CHAT, json=chat(framing="close"))
        assert plain.json()["usage"]["completion_tokens"] == 3


async def test_chunks_are_passed_on_as_they_come() -> None:
    async with rig() as (_, client, _):
        body, times = chat(stream=True, events=4, delay_s=0.2), []
        async with client.stream("POST", CHAT, json=body) as response:
            async for _ in response.aiter_raw():
                times.append(time.monotonic())
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert len([gap for gap in gaps if gap > 0.1]) >= 3  # held back, they would come at once


async def test_the_clients_request_id_is_kept_and_bad_ones_are_replaced() -> None:
    async with rig() as (_, client, fakes):
        mine = await client.post(CHAT, json=chat(), headers={"x-request-id": "abc-1"})
        for bad in ("x" * 500, "a b"):
            other = await client.post(CHAT, json=chat(), headers={"x-request-id": bad})
            assert other.headers["x-request-id"] != bad
        assert mine.headers["x-request-id"] == "abc-1"
        assert b"x-request-id: abc-1\r\n" in fakes[0].heads[0]
        assert 0 < len(other.headers["x-request-id"]) < 100


async def test_connections_to_the_instance_are_reused() -> None:
    async with rig() as (running, client, fakes):
        for stream in (False, True) * 3:
            await client.post(CHAT, json=chat(stream=stream))
        assert len(fakes[0].peers) == 1
        assert running.gateway.fleet.instances["i0"].pool.open_connections == 1


async def test_slow_clients_pause_the_instance() -> None:
    async with rig() as (running, _, fakes):
        events, size = 400, 65536  # 26 MB, far beyond what sockets hold
        body = json.dumps(chat(stream=True, events=events, event_bytes=size)).encode()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", running.port))
        await loop.sock_sendall(sock, HEAD % len(body) + b"\r\n" + body)
        await asyncio.sleep(0.5)
        # The fake's own drain() has stopped it: most of the stream is not even produced yet.
        assert fakes[0].open == 1
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            part = await asyncio.wait_for(loop.sock_recv(sock, 1 << 20), 10)
            assert part
            received = received[-64:] + part
        sock.close()


# Clients that leave


async def test_a_disconnect_in_mid_stream_closes_the_instances_connection_and_settles() -> None:
    async with rig() as (running, client, fakes):
        request = chat(stream=True, events=1000, delay_s=0.01)
        async with client.stream("POST", CHAT, json=request) as response:
            async for _ in response.aiter_raw():
                break
            assert not running.settled()
        await eventually(lambda: fakes[0].aborted == 1 and fakes[0].open == 0)
        await eventually(running.settled)
        assert 'client_disconnects_total{backend="i0"} 1.0' in await running.metrics()


async def test_a_disconnect_before_the_first_byte_aborts_too() -> None:
    async with rig() as (running, client, fakes):
        for number, stream in enumerate((False, True), 1):
            with pytest.raises(httpx.ReadTimeout):
                await client.post(CHAT, json=chat(stream=stream, hang=True), timeout=0.2)
            await eventually(lambda n=number: fakes[0].aborted == n)  # type: ignore[misc]
            await eventually(running.settled)


async def test_half_closing_a_request_counts_as_leaving() -> None:
    async with rig() as (running, _, fakes):
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        body = json.dumps(chat(hang=True)).encode()
        writer.write(HEAD % len(body) + b"\r\n" + body)
        await eventually(lambda: fakes[0].open == 1)
        writer.write_eof()
        await eventually(lambda: fakes[0].aborted == 1)
        assert running.settled()
        assert await reader.read() == b""
        writer.close()


# Answers that break off


async def test_a_stream_that_dies_gets_an_error_event_and_no_done_or_is_cut_within_a_chunk() -> (
    None
):
    async with rig() as (running, *_):
        for die in ("after_head", "after_events"):
            body, last_chunk = unchunked(await streamed(running.port, die=die))
            event = body.rstrip().split(b"\n\n")[-1]
            error = json.loads(event.removeprefix(b"data: "))["error"]
            assert error["code"] == "upstream_error"
            assert "i0" in error["message"]
            assert b"[DONE]" not in body
            assert not last_chunk
            await eventually(running.settled)
        assert (await streamed(running.port, die="mid_chunk")).endswith(b"ff\r\ndata: {")


STREAMED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("framing", "body", "whole"),
    [
        (CHUNKED, b"a\r\ndata: a\n\r\n\r\n", True),
        (CHUNKED, b"40\r\ndata: a\n\r\n", False),  # which only looks like a chunk's end
        (CHUNKED, b"b;x=\n\r\ndata", True),  # a line that is none was never passed on
        (CHUNKED, b"a\r\ndata: a\n\r\n\r\n40\r\ndata: b\n\r\n", False),
        (CHUNKED, b"a\r\ndata: a\n\r\n\r\n0\r\nx: y\r\n", True),
        (b"content-length: 99\r\n\r\n", b"data: a\n\r\n", False),  # of a known length
    ],
)
async def test_an_error_event_stands_where_a_chunk_may_begin_and_nowhere_else(
    framing: bytes, body: bytes, whole: bool
) -> None:
    instance = RawInstance()
    instance.posts = [STREAMED + framing, *([body] if whole else [body, b""]), None]
    instance.pause_s = 0.1
    async with rig([instance], profiles=(None,)) as (running, *_):
        data = await streamed(running.port)
        assert (b'"upstream_error"' in data) == whole
        assert running.settled()
    if not whole:
        assert data.endswith(body)


@pytest.mark.parametrize("end", ["error", "abort"])
async def test_done_does_not_prove_success(end: str) -> None:
    async with rig() as (running, client, _):
        response = await client.post(CHAT, json=chat(stream=True, end=end))
        assert response.text.endswith("data: [DONE]\n\n")  # passed unchanged
        text = await running.metrics()
        assert 'outcome="upstream_error"} 1.0' in text
        assert 'upstream_errors_total{backend="i0",reason="engine"} 1.0' in text


async def test_bytes_after_the_end_of_a_response_never_reach_a_client() -> None:
    async with rig() as (_, client, _):
        evil = "HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
        for stream in (False, True):
            try:
                response = await client.post(CHAT, json=chat(stream=stream, extra=evil))
                assert "evil" not in response.text
            except httpx.RemoteProtocolError:
                pass
            response = await client.post(CHAT, json=chat())
            assert response.json()["id"] == "chatcmpl-1"


async def test_a_bug_in_mid_stream_cuts_the_response_and_leaves_no_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: object, error: object) -> None:
        raise RuntimeError("a bug")

    async with rig() as (running, *_):
        monkeypatch.setattr("hetero_gateway.gateway.dataplane.relay.Exchange.break_off", broken)
        data = await streamed(running.port, die="after_events")
        assert data.count(b"HTTP/1.1") == 1
        assert not unchunked(data)[1]
        await eventually(running.settled)
        assert "a bug" in caplog.text
        assert 'outcome="internal_error"} 1.0' in await running.metrics()


# Time-outs


@pytest.mark.parametrize("timeouts", [{"first_byte_s": 0.2}, {"total_s": 0.3, "first_byte_s": 10}])
async def test_silent_instances_time_out(timeouts: dict[str, float]) -> None:
    async with rig(timeouts=timeouts) as (running, client, fakes):
        response = await client.post(CHAT, json=chat(hang=True))
        assert refusal_of(response) == (504, "upstream_timeout")
        await eventually(lambda: fakes[0].aborted == 1)
        assert running.settled()


async def test_a_stream_that_falls_silent_is_ended_and_one_that_keeps_sending_is_not() -> None:
    async with rig(timeouts={"idle_s": 0.4}) as (running, client, _):
        text, last_chunk = unchunked(await streamed(running.port, events=2, delay_s=60))
        assert b'"code":"upstream_timeout"' in text
        assert not last_chunk
        await eventually(running.settled)
        response = await client.post(CHAT, json=chat(stream=True, events=12, delay_s=0.1))
        assert response.text.endswith("[DONE]\n\n")


# Instances that are gone


async def test_with_every_instance_down_the_answer_is_503_at_once() -> None:
    async with rig(2) as (running, client, fakes):
        for fake in fakes:
            await fake.kill()
        for _ in range(2):  # found out by the first, known by the second
            response = await client.post(CHAT, json=chat(), timeout=5)
            assert refusal_of(response) == (503, "no_healthy_instance")
            assert int(response.headers["retry-after"]) >= 1
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/v1/models")).json()["data"] == []
        assert running.settled()


async def test_an_instance_that_comes_back_is_used_again() -> None:
    async with rig() as (running, client, fakes):
        await fakes[0].kill()
        assert (await client.post(CHAT, json=chat())).status_code == 503
        await fakes[0].start()
        await eventually(running.gateway.fleet.ready)
        assert (await client.post(CHAT, json=chat())).status_code == 200


async def test_an_unreachable_instance_at_start_does_not_stop_the_gateway() -> None:
    async with fake_instances(1) as fakes:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            dead = {"id": "dead", "base_url": f"http://127.0.0.1:{unused.getsockname()[1]}"}
            alive = {"id": "alive", "base_url": fakes[0].url}
            async with rig(fakes, instances=[dead, alive]) as (_, client, _):
                assert instance_of(await client.post(CHAT, json=chat())) == "alive"
                # A name that only the silent instance might serve is not "never known".
                unknown = await client.post(CHAT, json=chat(model="other"))
                assert unknown.status_code == 503


async def test_retries_stop_at_the_budget() -> None:
    retry = {"budget_min": 2, "budget_ratio": 0.0, "max_attempts": 3}
    async with rig(3, retry=retry) as (running, client, fakes):
        for _ in range(5):
            response = await client.post(CHAT, json=chat(die="before_head"))
            assert response.status_code == 502
        assert sum(fake.requests for fake in fakes) == 5 + 2
        assert 'retries_total{reason="reset"} 2.0' in await running.metrics()
        assert running.settled()


@pytest.mark.parametrize("ratio", [0.0, 0.01])
async def test_all_that_waits_for_its_first_byte_is_served_elsewhere_when_its_instance_dies(
    ratio: float,
) -> None:
    retry = {"budget_min": 1, "budget_ratio": ratio}
    async with rig(2, retry=retry) as (running, client, fakes):
        asking = [
            asyncio.create_task(client.post(CHAT, json=chat(first_delay_s=1.0))) for _ in range(60)
        ]
        await eventually(lambda: sum(len(fake.bodies) for fake in fakes) == len(asking))
        lost = len(fakes[0].bodies)
        await fakes[0].kill()
        statuses = [response.status_code for response in await asyncio.gather(*asking)]
        assert lost > 10
        # Without a share of what is open or recent, the budget is what is always allowed.
        assert statuses.count(502) == (0 if ratio else lost - 1)
        assert statuses.count(200) == len(statuses) - statuses.count(502)
        assert running.settled()


@pytest.mark.parametrize(("most", "status"), [(1, 503), (2, 200)])
async def test_a_refused_connection_is_no_attempt(most: int, status: int) -> None:
    async with rig(4, retry={"max_attempts": most}) as (running, client, fakes):
        for fake in fakes[:3]:
            await fake.kill()
        assert (await client.post(CHAT, json=chat())).status_code == status
        assert fakes[3].requests == (status == 200)
        assert running.settled()


async def test_unreachable_instances_are_503_even_without_a_retry_left() -> None:
    async with rig(2, retry={"budget_min": 0, "budget_ratio": 0.0}) as (_, client, fakes):
        for fake in fakes:
            await fake.kill()
        response = await client.post(CHAT, json=chat())
        assert response.status_code == 503
        assert response.headers["retry-after"]


# What is refused


async def test_the_gateways_key_is_wanted_and_not_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GATEWAY_KEY", "front")
    monkeypatch.setenv("INSTANCE_KEY", "back")
    async with fake_instances(1) as fakes:
        instance = {"id": "i0", "base_url": fakes[0].url, "api_key_env": "INSTANCE_KEY"}
        server = {"api_key_env": "GATEWAY_KEY"}
        async with rig(fakes, server=server, instances=[instance]) as (_, client, _):
            for refused in (
                await client.post(CHAT, json=chat()),
                await client.post("/tokenize", json={"model": "m"}),
                await client.get("/v1/models"),
                await client.post(CHAT, json=chat(), headers={"authorization": "Bearer back"}),
            ):
                assert refusal_of(refused) == (401, "invalid_api_key")
            good = {"authorization": "Bearer front"}
            assert (await client.post(CHAT, json=chat(), headers=good)).status_code == 200
        assert b"authorization: Bearer back\r\n" in fakes[0].heads[0]
        assert b"front" not in fakes[0].heads[0]


BAD: list[tuple[bytes, int, str]] = [
    (b'{"model": "m", ', 400, "invalid_json"),
    (b"[1,2]", 400, "invalid_json"),
    (b"", 400, "invalid_json"),
    (b'{"model": "m\xff"}', 400, "invalid_json"),
    (b'{"model": 5}', 400, "invalid_type"),
    (b'{"model": "nope"}', 404, "model_not_found"),
    (b'{"model": "m", "prompt": [%b1]}' % (b"1," * 5000), 400, "context_length_exceeded"),
    (b'{"model": "m", "messages": "%b"}' % (b"x" * 2_000_000), 413, "request_too_large"),
]


async def test_bad_requests_get_a_clear_error_and_the_next_is_served() -> None:
    async with rig(server={"max_body_bytes": 10**6}) as (running, client, _):

        async def parts() -> Any:
            for _ in range(2000):
                yield b"x" * 1024

        for content, status, code in (*BAD, (parts(), 413, "request_too_large")):
            response = await client.post(CHAT, content=content)
            assert refusal_of(response) == (status, code)
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert (await client.post(CHAT, json=chat())).status_code == 200
            assert running.settled()


async def test_without_a_model_the_only_one_is_meant_and_of_several_none() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    async with rig(2) as (_, client, _):
        assert (await client.post(CHAT, json=body)).status_code == 200
    async with fake_instances(2) as fakes:
        several = [
            {"id": fake.url[-5:], "base_url": fake.url, "model": names}
            for fake, names in zip(fakes, (["m"], ["m", "n"]), strict=True)
        ]
        async with rig(fakes, instances=several) as (_, client, _):
            refused = await client.post(CHAT, json=body)
            assert refused.status_code == 400
            assert refused.json()["error"] == {
                "message": "you must provide a model parameter; served: m, n",
                "type": "invalid_request_error",
                "param": "model",
                "code": "missing_required_parameter",
            }
            unknown = await client.post(CHAT, json=body | {"model": "nn"})
            assert unknown.status_code == 404
            said = unknown.json()["error"]["message"]
            assert said == "The model `nn` does not exist; served: `n`, `m`."


# What is learnt of answers and of instances


async def test_the_predictors_learn_from_usage() -> None:
    async with rig() as (running, client, _):
        gateway = running.gateway
        asked = LengthFeatures("m", 10)
        before = gateway.predictor.predict(asked), gateway.bytes_per_token.ratio("m")
        for stream in (False, True) * 10:
            await client.post(CHAT, json=chat(stream=stream))
        gateway.dataplane.recorder.catch_up()
        after = gateway.predictor.predict(asked), gateway.bytes_per_token.ratio("m")
        assert after[0] < before[0]
        assert after[1] != before[1]


async def test_without_usage_the_events_are_counted() -> None:
    async with rig() as (running, client, _):
        await client.post(CHAT, json=chat(stream=True, events=7, usage=False))
        # role, 7 deltas, finish, [DONE]: the finish event of the fake carries no token
        assert 'output_tokens_total{backend="i0",model="m"} 8.0' in await running.metrics()


async def test_the_union_of_models_is_served_and_routed_by_name() -> None:
    fakes = [FakeInstance(), FakeInstance(("n", "alias"))]
    async with rig(fakes) as (_, client, _):
        cards = (await client.get("/v1/models")).json()["data"]
        assert sorted(card["id"] for card in cards) == ["alias", "m", "n"]
        for name, instance in (("m", "i0"), ("n", "i1"), ("alias", "i1")):
            assert instance_of(await client.post(CHAT, json=chat(model=name))) == instance
        assert (await client.get("/v1/models/alias")).json()["max_model_len"] == 4096
        assert (await client.get("/v1/models/zz")).status_code == 404


async def test_a_models_card_is_its_engines() -> None:
    permission = [{"id": "modelperm-1", "object": "model_permission", "allow_view": True}]
    base: dict[str, object] = {
        "id": "m", "object": "model", "created": 1700000000, "owned_by": "vllm", "root": "/m",
        "parent": None, "max_model_len": 4096, "permission": permission,
    }  # fmt: skip
    lora = base | {"id": "lora", "root": "/adapters/lora", "parent": "m", "max_model_len": None}
    fakes = [FakeInstance(), FakeInstance()]
    for fake, window in zip(fakes, (4096, 8192), strict=True):
        cards = [base | {"max_model_len": window}, lora]
        fake.models_body = json.dumps({"object": "list", "data": cards}).encode()
    async with rig(fakes) as (_, client, _):
        shown = {c["id"]: c for c in (await client.get("/v1/models")).json()["data"]}
        assert shown["m"] == base | {"max_model_len": 8192}
        assert shown["lora"] == lora | {"max_model_len": 8192}
        assert (await client.get("/v1/models/lora")).json() == shown["lora"]
