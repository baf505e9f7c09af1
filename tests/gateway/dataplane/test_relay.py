"""What a client sees: bytes pass unchanged, streams flow as they come, failures are clear."""

import asyncio
import itertools
import json
import socket
import time

import httpx
import pytest

from hetero_gateway.core.lengths.predictors import LengthFeatures
from tests.fakes.raw import raw_instance
from tests.fakes.running import config_for, eventually, running_gateway
from tests.fakes.vllm import FakeInstance, fake_instances

CHAT = "/v1/chat/completions"


def chat(stream: bool = False, model: str = "m", **fake: object) -> dict[str, object]:
    message = {"role": "user", "content": "hello"}
    return {"model": model, "messages": [message], "stream": stream, "fake": fake}


async def raw_exchange(port: int, body: bytes, *, headers: bytes = b"") -> bytes:
    """Everything that a connection: close client gets."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        b"content-type: application/json\r\n" + headers + b"content-length: %d\r\n\r\n" % len(body)
    )
    writer.write(body)
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


async def test_bodies_pass_unchanged_in_both_directions() -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        body = b'{ "model":"m" ,"unknown_field": [1, {"a": "\\u00e9\xc3\xa9"}], "messages":[]}'
        answer = '{"odd":   "spacing", "\\u00e9": 1}'
        async with httpx.AsyncClient(base_url=running.url) as client:
            await client.post(CHAT, content=body)
            response = await client.post(CHAT, json=chat(status=418, body=answer))
        assert fakes[0].bodies[0] == body
        assert (response.status_code, response.text) == (418, answer)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize"]
)
async def test_every_engine_path_is_routed_with_its_query(path: str) -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        async with httpx.AsyncClient(base_url=running.url) as client:
            response = await client.post(path + "?a=1&b=%20", json={"model": "m", "input": "x"})
        assert response.status_code == 200
        assert fakes[0].heads[0].startswith(f"POST {path}?a=1&b=%20 HTTP/1.1\r\n".encode())


async def test_a_stream_arrives_byte_for_byte_and_ends_the_connection_cleanly() -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        direct = unchunked(
            await raw_exchange(fakes[0].port, json.dumps(chat(stream=True)).encode())
        )
        through = await raw_exchange(running.port, json.dumps(chat(stream=True)).encode())
        assert unchunked(through) == direct
        assert direct[0].endswith(b"data: [DONE]\n\n")
        head = through.split(b"\r\n\r\n", 1)[0].lower()
        assert b"x-hetero-gateway-instance: i0" in head
        assert b"x-request-id: " in head


@pytest.mark.parametrize("framing", ["close", "bytes"])
async def test_other_framings_give_the_same_body(framing: str) -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        plain = await raw_exchange(running.port, json.dumps(chat(stream=True)).encode())
        body = json.dumps(chat(stream=True, framing=framing)).encode()
        assert unchunked(await raw_exchange(running.port, body)) == unchunked(plain)
        await eventually(running.settled)


async def test_an_answer_without_framing_reaches_the_client_whole() -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        async with httpx.AsyncClient(base_url=running.url) as client:
            response = await client.post(CHAT, json=chat(framing="close"))
        assert response.json()["usage"]["completion_tokens"] == 3


async def test_chunks_are_passed_on_as_they_come() -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        times = []
        async with (
            httpx.AsyncClient(base_url=running.url, timeout=30) as client,
            client.stream("POST", CHAT, json=chat(stream=True, events=4, delay_s=0.2)) as response,
        ):
            async for _ in response.aiter_raw():
                times.append(time.monotonic())
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert len([gap for gap in gaps if gap > 0.1]) >= 3  # held back, they would come at once


async def test_the_clients_request_id_is_kept_and_bad_ones_are_replaced() -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        async with httpx.AsyncClient(base_url=running.url) as client:
            mine = await client.post(CHAT, json=chat(), headers={"x-request-id": "abc-1"})
            for bad in ("x" * 500, "a b"):
                other = await client.post(CHAT, json=chat(), headers={"x-request-id": bad})
                assert other.headers["x-request-id"] != bad
        assert mine.headers["x-request-id"] == "abc-1"
        assert b"x-request-id: abc-1\r\n" in fakes[0].heads[0]
        assert 0 < len(other.headers["x-request-id"]) < 100


async def test_connections_to_the_instance_are_reused() -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        async with httpx.AsyncClient(base_url=running.url) as client:
            for stream in (False, True) * 3:
                await client.post(CHAT, json=chat(stream=stream))
        assert len(fakes[0].peers) == 1
        assert running.gateway.fleet.instances["i0"].pool.open_connections == 1


async def test_a_stale_pooled_connection_is_replaced_by_a_fresh_one() -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        pool = running.gateway.fleet.instances["i0"].pool
        async with httpx.AsyncClient(base_url=running.url) as client:
            await client.post(CHAT, json=chat())
            # The fake closes as soon as it sees the next request, before answering it.
            connection = pool.take_idle()
            assert connection is not None
            pool.release(connection)
            body = chat(die="before_head")
            response = await client.post(CHAT, json=body)
            assert response.status_code == 502
            fakes[0].close_after_response = True
            for _ in range(20):
                response = await client.post(CHAT, json=chat())
                assert response.status_code == 200


async def test_slow_clients_pause_the_instance() -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        events, size = 400, 65536  # 26 MB, far beyond what sockets hold
        body = json.dumps(chat(stream=True, events=events, event_bytes=size)).encode()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", running.port))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        await loop.sock_sendall(sock, head % len(body) + body)
        await asyncio.sleep(0.5)
        # The fake's own drain() has stopped it: most of the stream is not even produced yet.
        assert fakes[0].open == 1
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            part = await asyncio.wait_for(loop.sock_recv(sock, 1 << 20), 10)
            assert part
            received = received[-64:] + part
        sock.close()
        await eventually(running.settled)


async def test_a_disconnect_in_mid_stream_closes_the_instances_connection_and_settles() -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        async with httpx.AsyncClient(base_url=running.url) as client:
            request = chat(stream=True, events=1000, delay_s=0.01)
            async with client.stream("POST", CHAT, json=request) as response:
                async for _ in response.aiter_raw():
                    break
                assert not running.settled()
        await eventually(lambda: fakes[0].aborted == 1 and fakes[0].open == 0)
        await eventually(running.settled)
        assert 'client_disconnects_total{backend="i0"} 1.0' in await running.metrics()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_before_the_first_byte_aborts_too(stream: bool) -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        async with httpx.AsyncClient(base_url=running.url) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(CHAT, json=chat(stream=stream, hang=True), timeout=0.2)
        await eventually(lambda: fakes[0].aborted == 1)
        await eventually(running.settled)


async def test_an_instance_that_dies_before_answering_is_replaced_by_another() -> None:
    async with fake_instances(2) as fakes, running_gateway(config_for(fakes)) as running:
        await fakes[0].kill()
        async with httpx.AsyncClient(base_url=running.url) as client:
            responses = [await client.post(CHAT, json=chat()) for _ in range(5)]
        assert {r.status_code for r in responses} == {200}
        assert {r.headers["x-hetero-gateway-instance"] for r in responses} == {"i1"}
        assert running.settled()


@pytest.mark.parametrize("die", ["after_head", "after_events"])
async def test_a_stream_that_dies_gets_an_error_event_and_no_done(die: str) -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        data = await raw_exchange(running.port, json.dumps(chat(stream=True, die=die)).encode())
        body, last_chunk = unchunked(data)
        event = body.rstrip().split(b"\n\n")[-1]
        error = json.loads(event.removeprefix(b"data: "))["error"]
        assert error["code"] == "upstream_error"
        assert "i0" in error["message"]
        assert b"[DONE]" not in body
        assert not last_chunk
        await eventually(running.settled)


async def test_a_stream_that_dies_within_a_chunk_is_cut() -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        body = json.dumps(chat(stream=True, die="mid_chunk")).encode()
        data = await raw_exchange(running.port, body)
        assert data.endswith(b"ff\r\ndata: {")
        await eventually(running.settled)


STREAMED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


@pytest.mark.parametrize(
    ("body", "whole"),
    [
        (b"a\r\ndata: a\n\r\n\r\n", True),
        (b"40\r\ndata: a\n\r\n", False),  # which only looks like a chunk's end
        (b"b;x=\n\r\ndata", True),  # a line that is none was never passed on
        (b"a\r\ndata: a\n\r\n\r\n40\r\ndata: b\n\r\n", False),
        (b"a\r\ndata: a\n\r\n\r\n0\r\nx: y\r\n", True),
    ],
)
async def test_an_error_event_stands_where_a_chunk_may_begin_and_nowhere_else(
    body: bytes, whole: bool
) -> None:
    async with raw_instance() as instance:
        pieces = [body] if whole else [body, b""]
        instance.posts = [STREAMED + b"transfer-encoding: chunked\r\n\r\n", *pieces, None]
        instance.pause_s = 0.1
        config = config_for([instance], profiles=(None,))  # type: ignore[list-item]
        async with running_gateway(config) as running:
            data = await raw_exchange(running.port, json.dumps(chat(stream=True)).encode())
            assert (b'"upstream_error"' in data) == whole
            assert running.settled()
        if not whole:
            assert data.endswith(body)


async def test_a_broken_stream_of_a_known_length_gets_nothing_into_it() -> None:
    async with raw_instance() as instance:
        instance.posts = [STREAMED + b"content-length: 99\r\n\r\n", b"data: a\n\r\n", None]
        instance.pause_s = 0.1
        config = config_for([instance], profiles=(None,))  # type: ignore[list-item]
        async with running_gateway(config) as running:
            data = await raw_exchange(running.port, json.dumps(chat(stream=True)).encode())
        assert data.endswith(b"\r\n\r\ndata: a\n\r\n")


async def test_a_plain_answer_that_stops_half_way_is_cut_short() -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        async with httpx.AsyncClient(base_url=running.url) as client:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post(CHAT, json=chat(die_mid_body=True))
        await eventually(running.settled)


@pytest.mark.parametrize("end", ["error", "abort"])
async def test_done_does_not_prove_success(end: str) -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        async with httpx.AsyncClient(base_url=running.url) as client:
            response = await client.post(CHAT, json=chat(stream=True, end=end))
        assert response.text.endswith("data: [DONE]\n\n")  # passed unchanged
        text = await running.metrics()
        assert 'outcome="upstream_error"} 1.0' in text
        assert 'upstream_errors_total{backend="i0",reason="engine"} 1.0' in text


async def test_bytes_after_the_end_of_a_response_never_reach_a_client() -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        evil = "HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
        async with httpx.AsyncClient(base_url=running.url) as client:
            for stream in (False, True):
                try:
                    response = await client.post(CHAT, json=chat(stream=stream, extra=evil))
                    assert "evil" not in response.text
                except httpx.RemoteProtocolError:
                    pass
                response = await client.post(CHAT, json=chat())
                assert response.json()["id"] == "chatcmpl-1"


async def test_garbage_from_an_instance_is_a_502() -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        async with httpx.AsyncClient(base_url=running.url) as client:
            response = await client.post(CHAT, json=chat(garbage="SSH-2.0-OpenSSH_9.2\r\n"))
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "upstream_error"
        assert running.settled()


@pytest.mark.parametrize(
    ("timeouts", "request_body", "status"),
    [
        ({"first_byte_s": 0.2}, chat(hang=True), 504),
        ({"total_s": 0.3, "first_byte_s": 10}, chat(hang=True), 504),
    ],
)
async def test_silent_instances_time_out(
    timeouts: dict[str, float], request_body: dict[str, object], status: int
) -> None:
    async with (
        fake_instances(1) as fakes,
        running_gateway(config_for(fakes, timeouts=timeouts)) as running,
    ):
        async with httpx.AsyncClient(base_url=running.url, timeout=20) as client:
            response = await client.post(CHAT, json=request_body)
        assert response.status_code == status
        assert response.json()["error"]["code"] == "upstream_timeout"
        await eventually(lambda: fakes[0].aborted == 1)
        assert running.settled()


async def test_a_stream_that_falls_silent_is_ended_with_an_error_event() -> None:
    async with (
        fake_instances(1) as fakes,
        running_gateway(config_for(fakes, timeouts={"idle_s": 0.2})) as running,
    ):
        body = json.dumps(chat(stream=True, events=2, delay_s=60)).encode()
        text, last_chunk = unchunked(await raw_exchange(running.port, body))
        assert b'"code":"upstream_timeout"' in text
        assert not last_chunk
        await eventually(running.settled)


async def test_a_stream_that_keeps_sending_outlives_the_idle_timeout() -> None:
    async with (
        fake_instances(1) as fakes,
        running_gateway(config_for(fakes, timeouts={"idle_s": 0.4})) as running,
    ):
        async with httpx.AsyncClient(base_url=running.url, timeout=20) as client:
            request = chat(stream=True, events=12, delay_s=0.1)
            response = await client.post(CHAT, json=request)
        assert response.text.endswith("[DONE]\n\n")


async def test_with_every_instance_down_the_answer_is_503_at_once() -> None:
    async with fake_instances(2) as fakes, running_gateway(config_for(fakes)) as running:
        for fake in fakes:
            await fake.kill()
        async with httpx.AsyncClient(base_url=running.url, timeout=5) as client:
            for _ in range(2):  # found out by the first, known by the second
                response = await client.post(CHAT, json=chat())
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "no_healthy_instance"
                assert int(response.headers["retry-after"]) >= 1
            assert (await client.get("/readyz")).status_code == 503
            assert (await client.get("/livez")).status_code == 200
            assert (await client.get("/v1/models")).json()["data"] == []
        assert running.settled()


async def test_an_instance_that_comes_back_is_used_again() -> None:
    fake = FakeInstance()
    await fake.start()
    async with running_gateway(config_for([fake])) as running:
        await fake.kill()
        async with httpx.AsyncClient(base_url=running.url) as client:
            assert (await client.post(CHAT, json=chat())).status_code == 503
            await fake.start()
            await eventually(running.gateway.fleet.ready)
            assert (await client.post(CHAT, json=chat())).status_code == 200
    await fake.close()


async def test_an_unreachable_instance_at_start_does_not_stop_the_gateway() -> None:
    async with fake_instances(1) as fakes:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            dead = {"id": "dead", "base_url": f"http://127.0.0.1:{unused.getsockname()[1]}"}
            alive = {"id": "alive", "base_url": fakes[0].url}
            async with running_gateway(config_for(fakes, instances=[dead, alive])) as running:
                async with httpx.AsyncClient(base_url=running.url) as client:
                    response = await client.post(CHAT, json=chat())
                    # A name that only the silent instance might serve is not "never known".
                    unknown = await client.post(CHAT, json=chat(model="other"))
                assert response.headers["x-hetero-gateway-instance"] == "alive"
                assert unknown.status_code == 503


async def test_a_bug_in_mid_stream_cuts_the_response_and_leaves_no_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: object, error: object) -> None:
        raise RuntimeError("a bug")

    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        body = json.dumps(chat(stream=True, die="after_events")).encode()
        monkeypatch.setattr("hetero_gateway.gateway.dataplane.relay.Exchange.break_off", broken)
        data = await raw_exchange(running.port, body)
        assert data.count(b"HTTP/1.1") == 1
        assert not unchunked(data)[1]
        await eventually(running.settled)
        assert "a bug" in caplog.text
        assert 'outcome="internal_error"} 1.0' in await running.metrics()


async def test_retries_stop_at_the_budget() -> None:
    async with fake_instances(3) as fakes:
        retry = {"budget_min": 2, "budget_ratio": 0.0, "max_attempts": 3}
        async with running_gateway(config_for(fakes, retry=retry)) as running:
            async with httpx.AsyncClient(base_url=running.url) as client:
                for _ in range(5):
                    response = await client.post(CHAT, json=chat(die="before_head"))
                    assert response.status_code == 502
            assert sum(fake.requests for fake in fakes) == 5 + 2
            assert 'retries_total{reason="reset"} 2.0' in await running.metrics()
            assert running.settled()


async def test_unreachable_instances_are_503_even_without_a_retry_left() -> None:
    async with fake_instances(2) as fakes:
        retry = {"budget_min": 0, "budget_ratio": 0.0}
        async with running_gateway(config_for(fakes, retry=retry)) as running:
            for fake in fakes:
                await fake.kill()
            async with httpx.AsyncClient(base_url=running.url) as client:
                response = await client.post(CHAT, json=chat())
        assert response.status_code == 503
        assert response.headers["retry-after"]


async def test_the_gateways_key_is_wanted_and_not_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GATEWAY_KEY", "front")
    monkeypatch.setenv("INSTANCE_KEY", "back")
    async with fake_instances(1) as fakes:
        instance = {"id": "i0", "base_url": fakes[0].url, "api_key_env": "INSTANCE_KEY"}
        config = config_for(
            fakes, server={"port": 0, "api_key_env": "GATEWAY_KEY"}, instances=[instance]
        )
        async with running_gateway(config) as running:
            async with httpx.AsyncClient(base_url=running.url) as client:
                refused = [
                    await client.post(CHAT, json=chat()),
                    await client.post("/tokenize", json={"model": "m"}),
                    await client.get("/v1/models"),
                    await client.post(CHAT, json=chat(), headers={"authorization": "Bearer back"}),
                ]
                good = {"authorization": "Bearer front"}
                response = await client.post(CHAT, json=chat(), headers=good)
        assert [r.status_code for r in refused] == [401] * 4
        assert refused[0].json()["error"]["code"] == "invalid_api_key"
        assert response.status_code == 200
        assert b"authorization: Bearer back\r\n" in fakes[0].heads[0]
        assert b"front" not in fakes[0].heads[0]


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b'{"model": "m", ', 400, "invalid_json"),
        (b"[1,2]", 400, "invalid_json"),
        (b"", 400, "invalid_json"),
        (b'{"model": "m\xff"}', 400, "invalid_json"),
        (b'{"model": 5}', 400, "invalid_type"),
        (b'{"model": "nope"}', 404, "model_not_found"),
        (b'{"model": "m", "prompt": [%b1]}' % (b"1," * 5000), 400, "context_length_exceeded"),
        (b'{"model": "m", "messages": "%b"}' % (b"x" * 2_000_000), 413, "request_too_large"),
    ],
)
async def test_bad_requests_get_a_clear_error(content: bytes, status: int, code: str) -> None:
    async with (
        fake_instances(1) as fakes,
        running_gateway(config_for(fakes, server={"port": 0, "max_body_bytes": 10**6})) as running,
    ):
        async with httpx.AsyncClient(base_url=running.url) as client:
            response = await client.post(CHAT, content=content)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (status, code)
            assert set(error) == {"message", "type", "param", "code"}
            assert (await client.post(CHAT, json=chat())).status_code == 200
        assert running.settled()


async def test_without_a_model_the_only_one_is_meant_and_of_several_none() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    async with fake_instances(2) as fakes:
        config = config_for(fakes)
        async with running_gateway(config) as running, httpx.AsyncClient() as client:
            assert (await client.post(running.url + CHAT, json=body)).status_code == 200
        models = (["m"], ["m", "n"])
        several = [
            {"id": fake.url[-5:], "base_url": fake.url, "model": names}
            for fake, names in zip(fakes, models, strict=True)
        ]
        config = config_for(fakes, instances=several)
        async with running_gateway(config) as running, httpx.AsyncClient() as client:
            refused = await client.post(running.url + CHAT, json=body)
            assert refused.status_code == 400
            assert refused.json()["error"] == {
                "message": "you must provide a model parameter; served: m, n",
                "type": "invalid_request_error",
                "param": "model",
                "code": "missing_required_parameter",
            }
            unknown = await client.post(running.url + CHAT, json=body | {"model": "nn"})
            assert unknown.status_code == 404
            said = unknown.json()["error"]["message"]
            assert said == "The model `nn` does not exist; served: `n`, `m`."


async def test_a_chunked_body_over_the_limit_is_refused() -> None:
    async with (
        fake_instances(1) as fakes,
        running_gateway(config_for(fakes, server={"port": 0, "max_body_bytes": 2048})) as running,
    ):

        async def parts():  # type: ignore[no-untyped-def]
            for _ in range(10):
                yield b"x" * 1024

        async with httpx.AsyncClient(base_url=running.url) as client:
            response = await client.post(CHAT, content=parts())
        assert response.status_code == 413


async def test_a_prompt_that_only_may_be_too_long_is_the_engines_to_judge() -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        body = {"model": "m", "messages": "x" * 20_000}  # about 5 000 tokens by the prior
        async with httpx.AsyncClient(base_url=running.url) as client:
            assert (await client.post(CHAT, json=body)).status_code == 200


async def test_the_predictors_learn_from_usage() -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        gateway = running.gateway
        asked = LengthFeatures("m", 10)
        before = gateway.predictor.predict(asked), gateway.bytes_per_token.ratio("m")
        async with httpx.AsyncClient(base_url=running.url) as client:
            for stream in (False, True) * 10:
                await client.post(CHAT, json=chat(stream=stream))
        gateway.dataplane.recorder.catch_up()
        after = gateway.predictor.predict(asked), gateway.bytes_per_token.ratio("m")
        assert after[0] < before[0]
        assert after[1] < before[1] or after[1] > before[1]


async def test_without_usage_the_events_are_counted() -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        async with httpx.AsyncClient(base_url=running.url) as client:
            await client.post(CHAT, json=chat(stream=True, events=7, usage=False))
        # role, 7 deltas, finish, [DONE]: the finish event of the fake carries no token
        assert 'output_tokens_total{backend="i0",model="m"} 8.0' in await running.metrics()


async def test_the_union_of_models_is_served_and_routed_by_name() -> None:
    async with fake_instances(1) as one, fake_instances(1, models=("n", "alias")) as two:
        async with running_gateway(config_for(one + two)) as running:
            async with httpx.AsyncClient(base_url=running.url) as client:
                cards = (await client.get("/v1/models")).json()["data"]
                assert sorted(card["id"] for card in cards) == ["alias", "m", "n"]
                for name, instance in (("m", "i0"), ("n", "i1"), ("alias", "i1")):
                    response = await client.post(CHAT, json=chat(model=name))
                    assert response.headers["x-hetero-gateway-instance"] == instance
                assert (await client.get("/v1/models/alias")).json()["max_model_len"] == 4096
                assert (await client.get("/v1/models/zz")).status_code == 404


async def test_a_models_card_is_its_engines() -> None:
    permission = [{"id": "modelperm-1", "object": "model_permission", "allow_view": True}]
    base: dict[str, object] = {
        "id": "m", "object": "model", "created": 1700000000, "owned_by": "vllm", "root": "/m",
        "parent": None, "max_model_len": 4096, "permission": permission,
    }  # fmt: skip
    lora = base | {"id": "lora", "root": "/adapters/lora", "parent": "m", "max_model_len": None}
    async with fake_instances(2) as fakes:
        for fake, window in zip(fakes, (4096, 8192), strict=True):
            cards = [base | {"max_model_len": window}, lora]
            fake.models_body = json.dumps({"object": "list", "data": cards}).encode()
        async with running_gateway(config_for(fakes)) as running:
            async with httpx.AsyncClient(base_url=running.url) as client:
                shown = {c["id"]: c for c in (await client.get("/v1/models")).json()["data"]}
                assert shown["m"] == base | {"max_model_len": 8192}
                assert shown["lora"] == lora | {"max_model_len": 8192}
                assert (await client.get("/v1/models/lora")).json() == shown["lora"]


async def test_the_engines_kv_pool_and_usage_are_read() -> None:
    async with fake_instances(1) as fakes:
        fakes[0].metrics = (
            'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n'
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1.0\n'
        )
        async with running_gateway(config_for(fakes)) as running:
            spec = running.gateway.fleet.scheduler.spec("i0")  # type: ignore[arg-type]
            assert spec.profile is not None
            assert spec.profile.kv_capacity_tokens == 1600
            text = await running.metrics()
            assert 'instance_kv_usage_ratio{backend="i0",source="engine"} 0.25' in text


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        for text in ("one", "two"):
            body = json.dumps(chat(status=200, body=f'"{text}"')).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
        data = b""
        while data.count(b"HTTP/1.1 200") < 2 or not data.endswith(b'"two"'):
            part = await asyncio.wait_for(reader.read(65536), 5)
            assert part
            data += part
        assert data.index(b'"one"') < data.index(b'"two"')
        writer.close()


async def test_half_closing_a_request_counts_as_leaving() -> None:
    async with fake_instances(1) as fakes, running_gateway(config_for(fakes)) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        body = json.dumps(chat(hang=True)).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await eventually(lambda: fakes[0].open == 1)
        writer.write_eof()
        await eventually(lambda: fakes[0].aborted == 1)
        assert running.settled()
        assert await reader.read() == b""
        writer.close()
