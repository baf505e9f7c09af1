"""A client's connection: what is smuggled, who takes too long, who is one too many, who leaves."""

import asyncio
import json
import re

import pytest

from hetero_gateway.http import protocol
from hetero_gateway.http.clients import default_max_connections
from tests.fakes.running import eventually
from tests.http.test_protocol import CHAT, SMALL, SPLIT, connected, get, post, serving

ADMIN = b"GET /admin/instances HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+) ", answer)]


# Offers to upgrade


@pytest.mark.parametrize("path", [CHAT, "/admin/reload", "/nope"])
@pytest.mark.parametrize("offer", [b"h2c", b"websocket", b"TLS/1.3, HTTP/1.1"])
async def test_a_body_behind_an_offer_to_upgrade_is_a_body(path: str, offer: bytes) -> None:
    async with serving() as (running, _), connected(running) as client:
        upgrade = b"connection: Upgrade, HTTP2-Settings, close\r\nupgrade: %b\r\n" % offer
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(ADMIN)}\r\n".encode()
        client.writer.write(head + upgrade + b"http2-settings: AAMAAABkAAQAAP__\r\n\r\n" + ADMIN)
        answer = await client.rest()
        assert len(statuses(answer)) == 1
        assert b"base_url" not in answer


async def test_javas_default_client_is_served() -> None:
    async with serving() as (running, fakes), connected(running) as client:
        request = post({"status": 200, "body": '"x"'}).replace(
            b"host: x\r\n",
            b"Connection: Upgrade, HTTP2-Settings\r\nHost: x\r\n"
            b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n"
            b"X-Named: 1\r\n",
        )
        for _ in range(2):
            client.writer.write(request)
            assert await client.response() == (200, b'"x"')
        sent = fakes[0].heads[0].lower()
        assert b"upgrade" not in sent
        assert b"http2-settings" not in sent
        assert b"x-named: 1" in sent


async def test_what_connection_names_is_not_sent_on() -> None:
    async with serving() as (running, fakes), connected(running) as client:
        client.writer.write(
            post().replace(b"host: x", b"host: x\r\nX-A: 1\r\nconnection: x-a, X-B\r\nx-b: 2")
        )
        assert (await client.response())[0] == 200
        assert b"x-a" not in fakes[0].heads[0].lower()
        assert b"x-b" not in fakes[0].heads[0].lower()


# Paths


SPELLINGS = [
    "/v1/../sleep", "/v1/./completions", "/v1/%2e%2e/sleep", "/v1/%2E%2E/sleep", "/v1/..%2fsleep",
    "/v1/..%2Fsleep", "/v1%2f..%2fsleep", "/v1/%252e%252e/sleep", "/v1//sleep",
    "//v1/chat/completions", "/v1//chat/completions", "/v1/chat/completions/",
    "/v1/chat%2Fcompletions", "/v1/chat/completions;a=b", "/v1/chat/completions%00",
    "/v1/chat/%63ompletions", "/v1/..;/sleep", "/v1/..\\sleep", "/v1\\..\\sleep", "/V1/completions",
    "/v1/something/new", "/sleep", "/wake_up", "/reset_prefix_cache", "/v1/load_lora_adapter",
    "/v1/files", "/collective_rpc", "/v1/chat/completions/../../../sleep", "/v1/.", "/..", "/%2e",
    "/v1/models/../../sleep", "/v1/models/%2e%2e/%2e%2e/sleep", "/admin/../sleep",
    "/v1/\x7f", "/v1/completions%20", "/v1/completions%0d%0ax:1",
]  # fmt: skip


@pytest.mark.parametrize("end", ["%", '"', "/", "//", "%2f", "a"])
async def test_no_path_holds_the_event_loop(end: str) -> None:
    async with serving() as (running, _):
        for path in ("a" * 60_000, "a/" * 30_000, "admin/models/" + "a" * 50_000):
            async with connected(running) as client:
                client.writer.write(get("/" + path + end))
                # It was tried in 2^60000 ways.
                assert (await client.response())[0] in (401, 403, 404)


async def test_no_spelling_of_a_path_reaches_an_engine_but_its_own() -> None:
    async with serving() as (running, fakes):
        for path in SPELLINGS:
            for method in ("POST", "GET", "PUT", "DELETE"):
                async with connected(running) as client:
                    request = post(path=path).replace(b"POST", method.encode(), 1)
                    client.writer.write(request)
                    status, body = await client.response()
                    assert status in (400, 403, 404, 405), path
                    assert set(json.loads(body)) == {"error"}, path
        assert fakes[0].requests == 0


async def test_a_wrong_method_of_a_head_request_is_405_without_a_body() -> None:
    async with serving() as (running, _), connected(running) as client:
        client.writer.write(
            f"HEAD {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
        )
        head, _, body = (await client.rest()).partition(SPLIT)
        assert (head.startswith(b"HTTP/1.1 405 "), b"allow: POST" in head, body) == (
            True,
            True,
            b"",
        )


async def test_a_bug_of_the_gateways_own_paths_is_500_in_the_same_form(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as (running, _), connected(running) as client:
        monkeypatch.setattr(running.gateway.metrics, "exposition", None)
        client.writer.write(get("/metrics"))
        status, body = await client.response()
        assert (status, json.loads(body)["error"]["code"]) == (500, "internal_error")
        assert "TypeError" in caplog.text


async def test_a_models_name_may_be_escaped_and_head_is_get_without_a_body() -> None:
    async with serving() as (running, _), connected(running) as client:
        client.writer.write(get("/v1/models/a%2Fb"))
        status, body = await client.response()
        assert (status, "`a/b`" in json.loads(body)["error"]["message"]) == (404, True)
        client.writer.write(get("/livez").replace(b"GET", b"HEAD") + get("/livez"))
        assert b" 200 " in await client.reader.readuntil(SPLIT)
        assert (await client.response())[0] == 200


# HTTP/1.0


async def test_http_10_gets_no_chunks_and_a_closed_connection() -> None:
    async with serving() as (running, _), connected(running) as client:
        request = post({"events": 3}, stream=True).replace(b"HTTP/1.1\r\nhost: x", b"HTTP/1.0")
        client.writer.write(request)
        head, _, body = (await client.rest()).partition(SPLIT)
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")


async def test_http_10_keeps_a_connection_where_it_asks_and_the_length_is_known() -> None:
    async with serving() as (running, _), connected(running) as client:
        request = post({"status": 200, "body": '"x"'})
        for _ in range(2):
            client.writer.write(
                request.replace(b"HTTP/1.1\r\nhost: x", b"HTTP/1.0\r\nconnection: keep-alive")
            )
            head = await client.reader.readuntil(SPLIT)
            assert b"connection: keep-alive" in head
            assert await client.reader.readexactly(3) == b'"x"'
        client.writer.write(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (await client.rest()).endswith(b'\r\n\r\n"x"')


# Bodies


@pytest.mark.parametrize("path", [CHAT, "/admin/instances"])
async def test_a_malformed_chunk_ends_the_connection(path: str) -> None:
    async with serving() as (running, fakes), connected(running) as client:
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n"
        client.writer.write(head.encode() + b"5\r\nabcde\r\nzz\r\n" + ADMIN)
        assert statuses(await client.rest()) == [400]
        assert fakes[0].requests == 0


async def test_a_body_of_tiny_chunks_and_a_request_behind_it_are_served() -> None:
    async with serving() as (running, fakes), connected(running) as client:
        head, body = post({"status": 200, "body": '"x"'}, text="y" * 5000).split(SPLIT, 1)
        head = re.sub(rb"content-length: \d+", b"transfer-encoding: chunked", head)
        framed = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\nx-t: 1\r\n\r\n"
        for _ in range(2):
            client.writer.write(head + SPLIT + framed + get("/livez"))
        for _ in range(2):
            assert await client.response() == (200, b'"x"')
            assert (await client.response())[0] == 200
        assert fakes[0].bodies == [body, body]
        assert b"x-t" not in fakes[0].heads[0]


async def test_a_body_of_small_parts_takes_no_more_memory_than_its_bytes() -> None:
    async with serving() as (running, fakes), connected(running) as client:
        head, body = post({"status": 200, "body": '"x"'}, text="y" * 20_000).split(SPLIT, 1)
        client.writer.write(head + SPLIT)
        for at in range(0, len(body) - 1, 7):
            client.writer.write(body[at : min(at + 7, len(body) - 1)])
            await asyncio.sleep(0)
        (connection,) = running.server.server_state.connections
        await eventually(lambda: connection.body_bytes == len(body) - 1)  # type: ignore[union-attr]
        assert len(connection.cycle._body._parts) <= 16  # type: ignore[union-attr]
        client.writer.write(body[-1:])
        assert await client.response() == (200, b'"x"')
        assert fakes[0].bodies == [body]


async def test_a_final_answer_in_place_of_a_100_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whether the body comes now is not known: what comes could be that, or a request.
    monkeypatch.setenv("GATEWAY_KEY", "front")
    async with (
        serving(server={"api_key_env": "GATEWAY_KEY"}) as (running, _),
        connected(running) as client,
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n"
        client.writer.write(head + b"expect: 100-continue\r\n\r\n")
        assert (await client.response())[0] == 401
        client.writer.write(get("/livez"))
        assert await client.rest() == b""


@pytest.mark.parametrize(
    "framing",
    [b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", b"content-length: 0\r\n\r\n", b"\r\n"],
)
async def test_an_empty_body_that_was_announced_leaves_the_connection_open(framing: bytes) -> None:
    async with serving() as (running, _), connected(running) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
        client.writer.write(head + framing + get("/livez"))
        assert (await client.response())[0] == 400
        assert (await client.response())[0] == 200


async def test_a_refused_body_that_is_far_too_large_ends_the_connection() -> None:
    async with serving(server=SMALL) as (running, _), connected(running) as client:
        length = protocol._MOST_DROPPED_BYTES + 1
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n"
        client.writer.write(head.encode() + b"x" * 5000)
        assert statuses(await client.rest()) == [413]


@pytest.mark.parametrize("path", ["/v1/completions", "/admin/instances", "/nope"])
async def test_who_is_refused_while_it_writes_can_write_on_and_read_why(path: str) -> None:
    async with serving(server=SMALL) as (running, _), connected(running) as client:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        client.writer.write(head.encode() + b"content-length: 4000000\r\n\r\n")
        for _ in range(30):
            client.writer.write(b"x" * 100_000)
            await client.writer.drain()
            await asyncio.sleep(0.01)
        (status,) = statuses(await client.rest())
        assert status in (401, 404, 413)


async def test_who_is_refused_amid_a_long_body_can_write_on_and_read_why() -> None:
    # As much has been read by then, and as much is to come, as is dropped of one.
    most = protocol._MOST_DROPPED_BYTES
    half, piece = most + 2**20, b"x" * 2**18
    limits = {"max_body_bytes": 3 * half, "max_buffered_bytes": 4 * half}
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {3 * half}\r\n\r\n"
    async with serving(server=limits) as (running, _):
        async with connected(running) as one, connected(running) as other:
            # Both are let in: there is room for one, and for the beginning of another.
            for client in (one, other):
                client.writer.write(head.encode())
            for _ in range(3 * half // len(piece)):
                for client in (one, other):
                    client.writer.write(piece)
                    await client.writer.drain()
                await asyncio.sleep(0.001)
            answers = [await client.response() for client in (one, other)]
            # The other is read to its end, and is no JSON.
            assert sorted(status for status, _ in answers) == [400, 503]


# Those who take too long

QUICK = {"header_s": 1, "body_s": 1, "write_s": 1, "keep_alive_s": 3}
SLOW: dict[str, tuple[bytes, list[int]]] = {
    "nothing": (b"", []),
    "empty lines": (b"\r\n\r\n", []),
    "a part of a request line": (b"POST /v1/ch", [408]),
    "a part of a head": (b"GET /livez HTTP/1.1\r\nhost: x\r\nx-a: ", [408]),
    "a part of a body": (post()[:-5], [408]),
    "a part of a chunk": (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
        [408],
    ),
    "a part of a body for uvicorn": (
        b"POST /admin/instances HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 50\r\n"
        b"authorization: Bearer admin-secret-31415\r\n\r\n{",
        [408],
    ),
    "a part of a refused body": (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n\r\n{",
        [413],
    ),
    "a request and a part of one": (get("/livez") + b"GET /", [200, 408]),
}


@pytest.mark.parametrize(("data", "expected"), SLOW.values(), ids=SLOW)
async def test_who_never_finishes_is_answered_and_closed(
    data: bytes, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_ADMIN_KEY", "admin-secret-31415")
    server = {"max_body_bytes": 5000, "admin_key_env": "TEST_ADMIN_KEY"}
    async with serving(timeouts=QUICK, server=server) as (running, _):
        async with connected(running) as client:
            client.writer.write(data)
            assert statuses(await asyncio.wait_for(client.reader.read(), 60)) == expected
        await eventually(lambda: not running.server.server_state.connections)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /livez HTTP/1.1\r\nx: ",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n",
    ],
)
async def test_a_byte_now_and_then_does_not_help(head: bytes) -> None:
    async with serving(timeouts=QUICK) as (running, _), connected(running) as client:
        client.writer.write(head)
        for _ in range(40):
            await asyncio.sleep(0.25)
            client.writer.write(b"a")
            if client.reader.at_eof() or running.server.watch.timeouts:
                break
        assert statuses(await client.rest()) == [408]


async def test_a_slow_body_that_goes_on_is_served() -> None:
    async with serving(timeouts=QUICK) as (running, _), connected(running) as client:
        request = post({"status": 200, "body": '"x"'}, text="y" * 20_000)
        for at in range(0, len(request), 1000):
            client.writer.write(request[at : at + 1000])
            await asyncio.sleep(0.3)
        assert await client.response() == (200, b'"x"')


async def test_a_slow_answer_is_nobodys_time_out() -> None:
    async with serving(timeouts=QUICK) as (running, _), connected(running) as client:
        client.writer.write(post({"first_delay_s": 8}))
        assert (await client.response())[0] == 200
        assert not running.server.watch.timeouts


async def test_who_reads_nothing_is_closed_and_who_reads_slowly_is_not() -> None:
    async with serving(timeouts=QUICK) as (running, fakes):
        stream = post({"events": 300, "event_bytes": 50_000}, stream=True)
        async with connected(running) as slow, connected(running) as stuck:
            stuck.writer.write(stream)
            stuck.reader._transport.pause_reading()  # type: ignore[attr-defined]
            slow.writer.write(stream)
            size = 0
            while data := await slow.reader.read(200_000):
                size += len(data)
                if size > 15_000_000 and data.endswith(b"0\r\n\r\n"):
                    break
                await asyncio.sleep(0.1)
            assert size > 15_000_000
            await eventually(lambda: running.server.watch.timeouts["write"] == 1)
            await eventually(lambda: fakes[0].open == 0)


# Those who are one too many


async def test_who_is_one_too_many_gets_503_and_the_others_are_served() -> None:
    async with serving(server={"max_connections": 2}) as (running, _):
        async with connected(running) as first, connected(running) as second:
            for client in (first, second):
                client.writer.write(get("/livez"))
                assert (await client.response())[0] == 200
            async with connected(running) as third:
                third.writer.write(post())
                answer = await third.rest()
                assert statuses(answer) == [503]
                assert b"retry-after: " in answer
                assert json.loads(answer.partition(SPLIT)[2])["error"]["code"]
            first.writer.write(post())
            assert (await first.response())[0] == 200
            # Made in pieces, so chunked: read to its end.
            second.writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            found = await second.rest()
            assert b'hetero_gateway_client_refusals_total{status="503"} 1.0' in found
            assert b"hetero_gateway_client_connections 2.0" in found
        await eventually(lambda: not running.server.server_state.connections)
        async with connected(running) as client:
            client.writer.write(get("/livez"))
            assert (await client.response())[0] == 200


async def test_idle_connections_make_room_when_there_is_little() -> None:
    async with serving(server={"max_connections": 2}) as (running, _):
        async with connected(running) as busy, connected(running) as idle:
            busy.writer.write(post({"first_delay_s": 9}))
            # 5 s in place of 75.
            assert await asyncio.wait_for(idle.reader.read(), 9) == b""
            async with connected(running) as third:
                third.writer.write(get("/livez"))
                assert (await third.response())[0] == 200
            assert (await busy.response())[0] == 200


def test_half_of_the_descriptors_are_for_clients() -> None:
    assert default_max_connections(1024) == 448
    assert default_max_connections(20_000) == 9936
    assert default_max_connections(10**9) == 100_000
    assert default_max_connections(-1) == 100_000
    assert default_max_connections(100) == 1


# What comes behind a request waits


async def test_what_is_pipelined_is_kept_within_bounds() -> None:
    async with serving() as (running, fakes), connected(running) as client:
        client.writer.write(post({"first_delay_s": 2}))
        await eventually(lambda: fakes[0].open == 1)
        written = 0
        for _ in range(400):
            client.writer.write(get("/livez") * 1000)
            written += 1
            await asyncio.sleep(0)
        (connection,) = running.server.server_state.connections
        await eventually(lambda: connection.flow.read_paused)  # type: ignore[union-attr]
        kept = len(connection._buffer)  # type: ignore[union-attr, arg-type]
        assert kept <= protocol._MOST_KEPT_BYTES + 2**18
        assert (await client.response())[0] == 200
        for _ in range(1000):
            assert (await client.response())[0] == 200
