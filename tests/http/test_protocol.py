"""Engine paths from uvicorn's callbacks: order, limits, ends, and what of uvicorn that leans on."""

import asyncio
import contextlib
import inspect
import json
import re
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from hetero_gateway import compiled
from hetero_gateway.gateway.dataplane.intake import Intake
from hetero_gateway.gateway.dataplane.records import Recorder
from hetero_gateway.gateway.dataplane.relay import Exchange
from hetero_gateway.http.protocol import EngineCycle, EngineProtocol, _CycleTransport
from tests.fakes.running import RunningGateway, config_for, counted, eventually, running_gateway
from tests.fakes.vllm import FakeInstance, fake_instances

CHAT = "/v1/chat/completions"
SPLIT = b"\r\n\r\n"
# Configurations of the server: small bodies, and a key.
SMALL = {"max_body_bytes": 2000}


def post(fake: dict[str, object] | None = None, *, path: str = CHAT, **fields: object) -> bytes:
    body = json.dumps({"model": "m", "fake": fake or {}} | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


class Connection:
    """A client that writes what it likes and reads one response at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def response(self) -> tuple[int, bytes]:
        """(status, body) of the next response, which has a content-length."""
        head = await asyncio.wait_for(self.reader.readuntil(SPLIT), 10)
        match = re.search(rb"content-length: (\d+)", head)
        body = await self.reader.readexactly(int(match[1])) if match else b""
        return int(head.split(b" ")[1]), body

    async def rest(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), 10)


@contextlib.asynccontextmanager
async def connected(running: RunningGateway) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def serving(
    count: int = 1, **sections: Any
) -> AsyncIterator[tuple[RunningGateway, list[FakeInstance]]]:
    """A gateway of which nothing is left at the end, and in which nothing is settled twice."""
    async with fake_instances(count, max_model_len=32768) as fakes:
        async with running_gateway(config_for(fakes, **sections)) as running:
            scheduler = running.gateway.fleet.scheduler
            settle, twice = scheduler.settle, []

            def once(dispatch: Any, *event: Any) -> bool:
                done: bool = settle(dispatch, *event)
                if not done:
                    twice.append(dispatch)
                return done

            if compiled.form() == "interpreted":  # else nobody can be put in between
                scheduler.settle = once  # type: ignore[method-assign]
            yield running, fakes
            await eventually(lambda: len(running.gateway.dataplane) == 0)
            await eventually(running.settled)
            await eventually(lambda: len(running.gateway.dataplane.open_exchanges) == 0)
            assert not twice


# What is leant on


def test_uvicorns_protocol_uses_no_more_of_a_cycle_than_ours_has() -> None:
    inherited = [
        name
        for name, member in vars(HttpToolsProtocol).items()
        if inspect.isfunction(member) and name not in NEVER_CALLED
    ]
    assert {"connection_lost", "shutdown", "_start_asgi_task"} <= set(inherited)
    source = "".join(inspect.getsource(getattr(HttpToolsProtocol, name)) for name in inherited)
    used = set(re.findall(r"\bcycle\.(\w+)", source)) - {"run_asgi"}
    assert used == {"disconnected", "keep_alive", "message_event", "response_complete"}
    assert [name for name in used if not hasattr(EngineCycle, name)] == []
    # Nothing is ever fed to uvicorn's parser, and its pipeline stays empty.
    made = inspect.getsource(HttpToolsProtocol.__init__)
    assert "self.parser." not in source.replace(made, "")
    assert "self.pipeline" not in source.replace(made, "")


# What EngineProtocol does itself, and what only those call.
NEVER_CALLED = {
    "data_received", "on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body",
    "on_message_complete", "on_response_complete", "handle_websocket_upgrade", "send_400_response",
    "_get_upgrade", "_should_upgrade", "_should_upgrade_to_ws", "_unsupported_upgrade_warning",
    "timeout_keep_alive_handler",
}  # fmt: skip


def test_a_cycle_of_uvicorns_is_made_of_what_it_takes() -> None:
    taken = set(inspect.signature(RequestResponseCycle).parameters)
    made = inspect.getsource(EngineProtocol._uvicorn_cycle)
    assert taken == set(re.findall(r"^            (\w+)=", made, re.MULTILINE))


def test_a_cycle_of_uvicorns_uses_no_more_of_a_transport_than_it_gets() -> None:
    used = set(re.findall(r"self\.transport\.(\w+)", inspect.getsource(RequestResponseCycle)))
    assert used == set(_CycleTransport.__slots__)


def test_a_responses_end_is_uvicorns_own() -> None:
    end = inspect.getsource(RequestResponseCycle.send).split("# Handle response completion")[1]
    steps = ["self.response_complete = True", "self.transport.close()", "self.on_response()"]
    assert [step for step in steps if step not in end] == []


# Order


async def test_pipelined_requests_of_both_kinds_are_answered_in_order() -> None:
    async with serving() as (running, fakes), connected(running) as client:
        client.writer.write(
            post({"status": 200, "body": '"one"'})
            + get("/version")
            + post({"status": 200, "body": '"two"'}, path="/v1/embeddings")
            + post({"status": 200, "body": '"three"'})
            + get("/livez")
            + get("/livez")
        )
        answers = [await client.response() for _ in range(6)]
        assert [status for status, _ in answers] == [200] * 6
        assert [body for _, body in answers][0::2][:2] == [b'"one"', b'"two"']
        assert b"version" in answers[1][1]
        assert answers[3][1] == b'"three"'
        assert b"ok" in answers[4][1]
        assert fakes[0].requests == 3


async def test_only_one_pipelined_request_is_served_at_a_time() -> None:
    async with serving() as (running, fakes), connected(running) as client:
        client.writer.write(post({"first_delay_s": 0.3}) + post())
        await eventually(lambda: fakes[0].open == 1)
        await asyncio.sleep(0.05)
        assert (fakes[0].requests, len(running.gateway.dataplane)) == (1, 1)
        assert [(await client.response())[0] for _ in range(2)] == [200, 200]


async def test_more_pipelined_requests_than_the_stack_is_deep_are_all_refused() -> None:
    many = 3000
    async with serving() as (running, _), connected(running) as client:
        client.writer.write(b"POST /score HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n" * many)
        for _ in range(many):
            assert (await client.response())[0] == 400


async def test_a_connection_serves_one_request_after_the_other() -> None:
    async with serving() as (running, fakes), connected(running) as client:
        for i in range(5):
            client.writer.write(post({"status": 200, "body": str(i)}))
            assert await client.response() == (200, str(i).encode())
            client.writer.write(get("/livez"))
            assert (await client.response())[0] == 200
        assert fakes[0].requests == 5


@pytest.mark.parametrize("pieces", [1, 7])
async def test_a_request_may_come_in_any_pieces(pieces: int) -> None:
    async with serving() as (running, fakes), connected(running) as client:
        request = post({"status": 200, "body": '"x"'}, text="y" * 200)
        for start in range(0, len(request), pieces):
            client.writer.write(request[start : start + pieces])
            await asyncio.sleep(0)
        assert await client.response() == (200, b'"x"')
        assert fakes[0].bodies[0] == request.split(SPLIT, 1)[1]


@pytest.mark.parametrize(
    ("target", "sent"),
    [
        ("/v1/chat/completions?a=1&b=%20", "/v1/chat/completions?a=1&b=%20"),
        ("http://host:1/v1/completions?x", "/v1/completions?x"),
        ("/v1/completions?a=%2e%2e/../x", "/v1/completions?a=%2e%2e/../x"),
    ],
)
async def test_targets_are_sent_on_as_they_came(target: str, sent: str) -> None:
    async with serving() as (running, fakes), connected(running) as client:
        client.writer.write(post(path=target))
        assert (await client.response())[0] == 200
        assert fakes[0].heads[0].startswith(f"POST {sent} HTTP/1.1\r\n".encode())


# Limits


async def test_an_announced_body_that_is_too_large_is_refused_before_it_comes() -> None:
    async with serving(server=SMALL) as (running, _), connected(running) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n"
        client.writer.write(head)
        status, body = await client.response()
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
        # What comes of it is discarded, and the connection goes on.
        client.writer.write(b"x" * 5000 + post())
        assert (await client.response())[0] == 200


async def test_a_chunked_body_is_refused_as_soon_as_it_is_too_large() -> None:
    async with serving(server=SMALL) as (running, _), connected(running) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        client.writer.write(head + b"bb8\r\n" + b"x" * 3000 + b"\r\n")
        assert (await client.response())[0] == 413
        client.writer.write(b"3\r\nxxx\r\n0\r\n\r\n" + post())
        assert (await client.response())[0] == 200


async def test_a_pipelined_body_that_is_too_large_is_refused_in_its_turn() -> None:
    async with serving(server=SMALL) as (running, _), connected(running) as client:
        large = post(text="y" * 3000).replace(b"content-length", b"x-length")
        chunk = large.split(SPLIT, 1)[1]
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(chunk), chunk)
        client.writer.write(post({"first_delay_s": 0.1}) + head + framed + post())
        assert [(await client.response())[0] for _ in range(3)] == [200, 413, 200]


async def test_a_client_that_expects_a_100_gets_it_in_its_turn() -> None:
    async with serving() as (running, _), connected(running) as client:
        head, body = post().split(SPLIT, 1)
        client.writer.write(post({"first_delay_s": 0.1}) + head)
        client.writer.write(b"\r\nexpect: 100-continue" + SPLIT)
        assert (await client.response())[0] == 200
        assert (await client.response())[0] == 100
        client.writer.write(body)
        assert (await client.response())[0] == 200


async def test_garbage_behind_a_request_never_gets_into_its_response() -> None:
    async with serving() as (running, fakes), connected(running) as client:
        client.writer.write(post({"events": 50, "delay_s": 0.02}, stream=True))
        head = await client.reader.readuntil(SPLIT)
        assert b" 200 " in head
        client.writer.write(b"\x00\x01 not http\r\n\r\n")
        stream, _, behind = (await client.rest()).partition(b"\r\n0\r\n\r\n")
        assert b"HTTP/1.1" not in stream
        assert stream.endswith(b"data: [DONE]\n\n")
        assert behind.startswith(b"HTTP/1.1 400 ")
        await eventually(lambda: fakes[0].open == 0)


# Ends


async def gone_while_reading(client: Connection, running: RunningGateway, fake: Any) -> None:
    client.writer.write(post()[:-5])
    await eventually(lambda: len(running.gateway.dataplane) == 1)


async def gone_while_waiting(client: Connection, running: RunningGateway, fake: Any) -> None:
    async with connected(running) as other:
        other.writer.write(post({"hang": True}, prompt=[1] * 5000, stream=True))
        await eventually(lambda: fake.open == 1)
        client.writer.write(post(prompt=[1] * 5000))
        await eventually(lambda: running.gateway.fleet.scheduler.queued == 1)
        client.writer.transport.abort()
        await eventually(lambda: running.gateway.fleet.scheduler.queued == 0)


async def gone_while_unanswered(client: Connection, running: RunningGateway, fake: Any) -> None:
    client.writer.write(post({"hang": True}))
    await eventually(lambda: fake.open == 1)


async def gone_while_streaming(client: Connection, running: RunningGateway, fake: Any) -> None:
    client.writer.write(post({"events": 500, "delay_s": 0.01}, stream=True))
    await client.reader.readuntil(SPLIT)


async def gone_while_others_are_pipelined(
    client: Connection, running: RunningGateway, fake: Any
) -> None:
    client.writer.write(
        post({"events": 500, "delay_s": 0.01}, stream=True) + post() + get("/livez")
    )
    await client.reader.readuntil(SPLIT)


GONE = [
    gone_while_reading,
    gone_while_waiting,
    gone_while_unanswered,
    gone_while_streaming,
    gone_while_others_are_pipelined,
]


@pytest.mark.parametrize("moment", GONE, ids=lambda f: f.__name__)
async def test_a_client_that_leaves_is_forgotten(moment: Any) -> None:
    async with serving(scheduler={"prefill_depth": 1}) as (running, fakes):
        async with connected(running) as client:
            await moment(client, running, fakes[0])
        await eventually(lambda: fakes[0].open == 0)
        assert 'outcome="internal_error"} 0.0' in await running.metrics()


async def test_a_client_that_leaves_while_its_connection_is_made_is_forgotten() -> None:
    held = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await held.wait()
        writer.transport.abort()

    async with serving(timeouts={"connect_s": 5}) as (running, _):
        # TCP comes up there, and the TLS handshake never ends.
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        pool = running.gateway.fleet.instances["i0"].pool  # type: ignore[index]
        pool.port = server.sockets[0].getsockname()[1]
        pool._ssl = ssl.create_default_context()
        async with connected(running) as client:
            client.writer.write(post())
            await eventually(lambda: pool._connecting == 1)
            assert not running.settled()
        await eventually(running.settled)
        assert 'client_disconnects_total{backend="i0"} 1.0' in await running.metrics()
        held.set()
        await eventually(lambda: pool._connecting == 0)
        server.close()


ENDINGS: list[dict[str, Any]] = [
    {},
    {"status": 404},
    {"die": "before_head"},
    {"die": "after_head"},
    {"die": "mid_chunk"},
    {"die_mid_body": True},
    {"garbage": "no http\r\n\r\n"},
    {"end": "error"},
    {"framing": "close"},
    {"hang": True},
    {"events": 2, "delay_s": 60},
    {"extra": "more"},
]


@pytest.mark.parametrize("ending", ENDINGS, ids=str)
@pytest.mark.parametrize("stream", [False, True])
async def test_however_it_ends_it_is_settled_once(ending: dict[str, Any], stream: bool) -> None:
    timeouts = {"first_byte_s": 0.3, "idle_s": 0.3}
    async with serving(2, timeouts=timeouts) as (running, _), connected(running) as client:
        client.writer.write(post(ending, stream=stream))
        await client.reader.read(1)
        await eventually(lambda: len(running.gateway.dataplane) == 0)


@pytest.mark.parametrize(
    ("broken", "method", "status"),
    [
        (Intake, "read", 500),
        (Exchange, "on_head", 500),
        pytest.param(
            Recorder, "record", 200, marks=pytest.mark.interpreted("it replaces a method")
        ),
    ],
)
async def test_a_bug_costs_one_request_and_nothing_else(
    broken: type, method: str, status: int, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    async with serving() as (running, _), connected(running) as client:
        with monkeypatch.context() as patch:

            def bug(*args: object, **options: object) -> None:
                raise RuntimeError("a bug")

            patch.setattr(broken, method, bug)
            client.writer.write(post())
            assert (await client.response())[0] == status
        client.writer.write(post())
        assert (await client.response())[0] == 200
        assert "a bug" in caplog.text
        assert 'outcome="internal_error"} 1.0' in await running.metrics()


async def test_a_stale_idle_connection_is_replaced_and_counted_nowhere() -> None:
    async with serving() as (running, fakes), connected(running) as client:
        fakes[0].close_after_response = True
        for _ in range(20):
            client.writer.write(post())
            assert (await client.response())[0] == 200
        text = await running.metrics()
        assert counted(text, "upstream_errors_total") == 0
        assert counted(text, "retries_total") == 0
        assert 'outcome="completed"} 20.0' in text
        fakes[0].close_after_response = False
        client.writer.write(post() + post({"die": "before_head"}))
        assert [(await client.response())[0] for _ in range(2)] == [200, 502]


# The server's end


async def test_a_forced_end_answers_what_is_unanswered_and_cuts_what_is_not() -> None:
    async with fake_instances(2) as fakes:
        config = config_for(fakes, server={"port": 0, "shutdown_timeout_s": 1})
        async with contextlib.AsyncExitStack() as clients:
            async with running_gateway(config) as running:
                connect = lambda: clients.enter_async_context(connected(running))  # noqa: E731
                hanging, streaming, reading, idle = [await connect() for _ in range(4)]
                hanging.writer.write(post({"hang": True}))
                streaming.writer.write(post({"events": 500, "delay_s": 0.02}, stream=True))
                reading.writer.write(post()[:-5])
                idle.writer.write(get("/livez"))
                await streaming.reader.readuntil(SPLIT)
                await idle.response()
                await eventually(lambda: len(running.gateway.dataplane) == 3)
            assert (await idle.rest()) == b""
            for client in (hanging, reading):
                status, body = await client.response()
                assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down")
            assert not (await streaming.rest()).endswith(b"0\r\n\r\n")
        assert running.settled()
        assert len(running.gateway.dataplane) == 0


async def test_a_graceful_end_lets_a_stream_finish_and_closes_its_connection() -> None:
    async with fake_instances(1) as fakes:
        config = config_for(fakes, server={"port": 0, "shutdown_timeout_s": 20})
        async with running_gateway(config) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(post({"events": 20, "delay_s": 0.03}, stream=True))
            await reader.readuntil(SPLIT)
        assert (await asyncio.wait_for(reader.read(), 10)).endswith(b"0\r\n\r\n")
        writer.close()
        assert running.settled()


async def test_a_request_on_its_way_as_the_end_begins_is_answered() -> None:
    async with fake_instances(1) as fakes:
        config = config_for(fakes, server={"port": 0, "shutdown_timeout_s": 20})
        async with contextlib.AsyncExitStack() as clients, running_gateway(config) as running:
            connect = lambda: clients.enter_async_context(connected(running))  # noqa: E731
            new, half, silent, served = [await connect() for _ in range(4)]
            half.writer.write(post()[:20])
            served.writer.write(post())
            assert (await served.response())[0] == 200
            running.server.should_exit = True
            new.writer.write(post())
            half.writer.write(post()[20:])
            served.writer.write(post())
            for client in (new, half, served):
                answer = await client.rest()
                assert answer.startswith(b"HTTP/1.1 200 ")
                assert b"connection: close" in answer
            assert await silent.rest() == b""
        assert running.settled()


async def test_where_a_head_could_not_say_that_it_was_the_last_the_next_one_does() -> None:
    async with fake_instances(1) as fakes:
        config = config_for(fakes, server={"port": 0, "shutdown_timeout_s": 20})
        async with contextlib.AsyncExitStack() as clients, running_gateway(config) as running:
            connect = lambda: clients.enter_async_context(connected(running))  # noqa: E731
            streaming, quiet, waiting = [await connect() for _ in range(3)]
            for client in (streaming, quiet):
                client.writer.write(post({"events": 5, "delay_s": 0.2}, stream=True))
                await client.reader.readuntil(b"data: ")  # its head has gone
            waiting.writer.write(post({"first_delay_s": 0.5}))
            await eventually(lambda: fakes[0].requests == 3)
            running.server.should_exit = True
            await streaming.reader.readuntil(b"0\r\n\r\n")
            streaming.writer.write(post())
            answer = await streaming.rest()
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close" in answer
            assert b"connection: close" in await waiting.rest()  # whose head had not
            assert (await quiet.rest()).endswith(b"0\r\n\r\n")
        assert running.settled()


async def test_an_idle_connection_is_closed_and_a_busy_one_is_not() -> None:
    async with serving(timeouts={"keep_alive_s": 0.1}) as (running, _):
        async with connected(running) as client:
            client.writer.write(post({"first_delay_s": 4}))
            assert (await client.response())[0] == 200
            assert await client.rest() == b""
