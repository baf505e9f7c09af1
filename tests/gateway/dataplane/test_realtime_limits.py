"""What a session may ask for and use, who may open one from a browser, and how it ends."""

import asyncio
import base64
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from tests.fakes.gateway_files import clients
from tests.fakes.realtime import PATH, Speaker, closed, greeted, refusal_of, serving, session
from tests.fakes.running import RunningGateway, config_for, eventually, rig, running_gateway

MINE = {"authorization": "Bearer ka"}
SECOND = base64.b64encode(bytes(32_000)).decode()  # of PCM16 at 16 kHz


def audio(characters: str = SECOND) -> str:
    return json.dumps({"type": "input_audio_buffer.append", "audio": characters})


async def event(client: ClientConnection) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await client.recv())
    return found


async def used(running: RunningGateway) -> tuple[int, dict[str, int]]:
    """Tokens of client a within the last minute, and all that it was counted."""
    async with httpx.AsyncClient(base_url=running.url) as http:
        answer = await http.get("/admin/clients", headers={"authorization": "Bearer admin"})
    (client,) = answer.json()["clients"]
    (limits,) = client["limits"] or [{"within_a_minute": {"tokens": 0}}]
    return limits["within_a_minute"]["tokens"], client["usage"]


@pytest.fixture(autouse=True)
def _admin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN", "admin")


SERVER = {"port": 0, "admin_key_env": "ADMIN"}


def limited(folder: Path, tokens_per_minute: int) -> dict[str, Any]:
    """Sections: client a may use so many tokens."""
    keys = clients(folder, a={"tokens_per_minute": tokens_per_minute})
    return {"clients": keys, "server": SERVER}


# Models


@pytest.mark.parametrize(
    "other",
    [
        '{"type":"session.update","model":"other"}',
        '{"type":"session.update","mod\\u0065l":"other"}',
        '{"type":"session.update","model":"m","model":"other"}',
        '{"type":"session.update","model":"other","x":NaN}',
        '{"type":"session.update","model":"other","x":"\\ud800"}',
        '{"type":"session.update","session":{"model":"other"}}',
        '{"type":"session.update","session":{"audio":{"input":{"transcription":{"model":"o"}}}}}',
        '{"type":"input_audio_buffer.append","audio":"AAAA","model":"other"}',
        '{"type":"made.up","a":[{"model":"other"}]}',
        '{"type":"session.update","model":["other"]}',
        '  {"type":"session.update","model":"other"}',
        b'{"type":"session.update","model":"other"}',
        b'\xef\xbb\xbf{"type":"session.update","model":"other"}',
        '{"type":"session.update","model":"other"}'.encode("utf-16"),
        '{"type":"session.update","model":"other"}'.encode("utf-32-be"),
        '{"a":' * 5000 + '{"model":"other"}' + "}" * 5000,
        json.dumps({"type": "session.update", "x": "x" * 2_000_000, "model": "other"}),
    ],
)
async def test_a_session_keeps_to_its_model(tmp_path: Path, other: str | bytes) -> None:
    speaker, keys = Speaker(), clients(tmp_path, a={"models": ["m"]})
    async with serving(speaker, Speaker("other"), clients=keys) as running:
        async with greeted(running, "?model=m", additional_headers=MINE) as client:
            await client.send(other)
            refused = await event(client)
            assert refused["type"] == "error"
            codes = ("model_not_allowed", "invalid_json", "event_too_large")
            assert refused["error"]["code"] in codes
            # The session goes on, and its own model may be said.
            for own in (
                '{"type":"session.update","model":"m"}',
                '{"type":"session.update","tools":[{"properties":{"model":{"type":"string"}}}]}',
                "no event at all",
            ):
                await client.send(own)
                assert await client.recv() == own
    assert other not in speaker.messages
    assert len(speaker.messages) == 3


async def test_a_name_that_stands_for_its_model_is_rewritten() -> None:
    speaker = Speaker()
    models = {"alias": {"serve": "m"}}
    async with serving(speaker, Speaker("other"), models=models) as running:
        async with greeted(running, "?model=alias&x=1") as client:
            await client.send('{"type":"session.update","model":"alias","session":{"model":"m"}}')
            passed = {"type": "session.update", "model": "m", "session": {"model": "m"}}
            assert await event(client) == passed
            await client.send('{"type":"session.update","model":"other"}')
            assert (await event(client))["error"]["code"] == "model_not_allowed"
        async with greeted(running, "?model=other&mod%65l=m"):
            pass
    assert [head.path for head in speaker.heads] == [PATH + "?model=m&x=1", PATH + "?model=m"]


@pytest.mark.parametrize(
    "field", ["kv_transfer_params", "ec_transfer_params", "vllm_xargs", "data_parallel_rank"]
)
async def test_what_only_the_gateway_says_to_an_engine_does_not_pass(field: str) -> None:
    speaker = Speaker()
    async with serving(speaker) as running, greeted(running) as client:
        for text in (
            json.dumps({"type": "session.update", field: {}}),
            json.dumps({"type": "session.update", "session": {field: {}}}),
            f'{{"type":"x","\\u{ord(field[0]):04x}{field[1:]}":1}}',
        ):
            await client.send(text)
            assert (await event(client))["error"]["param"] == field
    assert not speaker.messages


# Limits


@pytest.mark.parametrize("workers", [1, 2])
async def test_audio_is_charged_as_it_comes(tmp_path: Path, workers: int) -> None:
    async with serving(Speaker(), workers=workers, **limited(tmp_path, 10_000)) as running:
        async with greeted(running, additional_headers=MINE) as client:
            for _ in range(80):  # 2.56 MB
                await client.send(audio())
                await client.recv()
            # 12.5 tokens a second.
            assert (await used(running))[0] == pytest.approx(1000, abs=80)
        await eventually(running.settled)
        await asyncio.sleep(1)
        tokens, usage = await used(running)
        assert tokens == pytest.approx(1000, abs=80)
        assert usage["input_tokens"] == pytest.approx(1000, abs=80)
        assert usage["requests"] == 1


@pytest.mark.parametrize("workers", [1, 2])
async def test_when_a_limit_is_used_up_the_session_ends(tmp_path: Path, workers: int) -> None:
    speaker = Speaker()
    async with serving(speaker, workers=workers, **limited(tmp_path, 1500)) as running:
        minute = audio(SECOND * 60)
        async with greeted(running, additional_headers=MINE) as client:
            await client.send(minute)
            assert await client.recv() == minute
            await client.send(minute)
            refused = await event(client)
            assert (refused["type"], refused["error"]["code"]) == ("error", "rate_limit_exceeded")
            assert await closed(client) == (1008, "rate_limit_exceeded")
        assert speaker.messages == [minute], "what is too much is not sent on"
        await eventually(lambda: bool(speaker.closed))
        await eventually(running.settled)
        assert (await used(running))[0] <= 1500
        await asyncio.sleep(62)
        async with greeted(running, additional_headers=MINE) as client:
            await client.send(audio())
            assert await client.recv()


@pytest.mark.parametrize(
    ("messages", "tokens"),
    [
        ([audio()], 13),
        # Audio under another name, and text beside audio, is text.
        ([json.dumps({"type": "made.up", "audio": "A" * 40_000})], 10_000),
        ([json.dumps({"type": "input_audio_buffer.append", "a": "A" * 40_000})], 10_000),
        ([bytes(range(128, 256)) * 1000], 50),
        (['{"type":"input_audio_buffer.commit"}'] * 10, 90),
    ],
)
async def test_nothing_that_is_sent_costs_nothing(
    tmp_path: Path, messages: list[str | bytes], tokens: int
) -> None:
    async with serving(Speaker(), **limited(tmp_path, 100_000)) as running:
        async with greeted(running, additional_headers=MINE) as client:
            for message in messages:
                await client.send(message)
                await client.recv()
        await eventually(running.settled)
        await asyncio.sleep(1)
        assert (await used(running))[1]["input_tokens"] == pytest.approx(tokens, rel=0.05)


class Transcriber(Speaker):
    """Answers a commit as vLLM does; ``usage``: what it says of it."""

    def __init__(self, deltas: int, usage: dict[str, int] | None) -> None:
        super().__init__()
        self.answer = [json.dumps({"type": "transcription.delta", "delta": "a"})] * deltas
        self.answer.append(json.dumps({"type": "transcription.done", "text": "a", "usage": usage}))

    async def _session(self, connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            async for message in connection:
                for each in self.answer if "commit" in str(message) else ():
                    await connection.send(each)
        self.closed.append((connection.close_code, connection.close_reason))


@pytest.mark.parametrize(
    ("deltas", "usage", "output", "inputs"),
    [
        (50, None, 50, 22),
        (50, {"prompt_tokens": 300, "completion_tokens": 80}, 80, 300),
        # Less than what passed, and more than any answer has, is not believed.
        (50, {"prompt_tokens": 0, "completion_tokens": 0}, 50, 22),
        (50, {"prompt_tokens": 10**9, "completion_tokens": 10**9}, 50, 22),
    ],
)
async def test_what_an_instance_answers_is_charged(
    tmp_path: Path, deltas: int, usage: dict[str, int] | None, output: int, inputs: int
) -> None:
    speaker = Transcriber(deltas, usage)
    async with serving(speaker, **limited(tmp_path, 100_000)) as running:
        async with session(running, additional_headers=MINE) as client:
            await client.send(audio())
            await client.send('{"type":"input_audio_buffer.commit"}')
            for _ in range(deltas + 1):
                await client.recv()
        await eventually(running.settled)
        await asyncio.sleep(1)
        counted = (await used(running))[1]
        assert (counted["output_tokens"], counted["input_tokens"]) == (output, inputs)


async def test_an_answer_that_is_too_long_for_a_limit_ends_the_session(tmp_path: Path) -> None:
    speaker = Transcriber(5000, None)
    async with serving(speaker, **limited(tmp_path, 1000)) as running:
        async with session(running, additional_headers=MINE) as client:
            await client.send('{"type":"input_audio_buffer.commit"}')
            kinds = []
            with contextlib.suppress(ConnectionClosed):
                while True:
                    kinds.append((await event(client))["type"])
            assert kinds[-1] == "error"
            assert kinds.count("transcription.delta") < 1000
            assert client.close_code == 1008
        await eventually(lambda: bool(speaker.closed))


# Browsers


async def test_a_key_among_the_subprotocols_lets_a_browser_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    speaker = Speaker()
    speaker.chooses = False  # as vLLM
    key = Subprotocol("openai-insecure-api-key.ka")
    realtime = Subprotocol("realtime")
    beta = Subprotocol("openai-beta.realtime-v1")
    async with serving(speaker, clients=clients(tmp_path, a={})) as running:
        for offered in ([realtime, key, beta], [key, realtime]):
            async with greeted(running, subprotocols=offered) as client:
                assert client.subprotocol == "realtime"
        loud = Subprotocol("OpenAI-Insecure-API-Key.ka")
        async with greeted(running, subprotocols=[loud, realtime]):
            pass
        for wrong in ("openai-insecure-api-key.", "openai-insecure-api-key.kb", "realtime"):
            refused = await refusal_of(session(running, subprotocols=[Subprotocol(wrong)]))
            assert (refused[0], refused[1]["code"]) == (401, "invalid_api_key")
            assert "kb" not in str(refused)
        speaker.chooses = True
        async with greeted(running, subprotocols=[key, beta]) as client:
            assert client.subprotocol == beta
    assert len(speaker.heads) == 4
    for head in speaker.heads:
        assert "insecure" not in str(head.headers.get("sec-websocket-protocol", "")).lower()
        assert "ka" not in str(head.headers.get("authorization", ""))
    ours = [r.getMessage() for r in caplog.records if r.name.startswith(("hetero", "uvicorn"))]
    assert not [text for text in ours if "insecure" in text.lower()]


async def test_where_no_key_is_wanted_one_does_not_reach_an_instance_either() -> None:
    speaker = Speaker()
    key = "a-key-of-somebody"  # too long to be in a random field by chance
    offered = [Subprotocol("realtime"), Subprotocol(f"openai-insecure-api-key.{key}")]
    async with serving(speaker) as running, greeted(running, subprotocols=offered):
        pass
    assert key not in str(speaker.heads[0].headers)
    assert "authorization" not in speaker.heads[0].headers


async def test_an_instance_cannot_send_a_session_elsewhere() -> None:
    class Elsewhere(Speaker):
        def _answer(self, connection: ServerConnection, request: Request) -> Response | None:
            if not request.path.startswith(PATH):
                return super()._answer(connection, request)
            answer = connection.respond(302, "there")
            answer.headers["location"] = target
            return answer

    hidden = Speaker()
    target = (await hidden.start()).url.replace("http:", "ws:") + PATH
    async with serving(Elsewhere()) as running:
        status, error = await refusal_of(session(running))
        assert (status, error["code"]) == (502, "upstream_error")
    assert not hidden.heads
    await hidden.stop()


# Ends


class Deaf(Speaker):
    """Stops reading after the handshake."""

    async def _session(self, connection: ServerConnection) -> None:
        connection.transport.pause_reading()
        try:
            await connection.wait_closed()
        finally:
            self.closed.append((connection.close_code, connection.close_reason))


async def talk(client: ClientConnection) -> None:
    """Audio without end."""
    with contextlib.suppress(ConnectionClosed):
        while True:
            await client.send(audio(SECOND * 30))


@contextlib.asynccontextmanager
async def talking(running: RunningGateway) -> AsyncIterator[ClientConnection]:
    """A session in which audio flows."""
    async with session(running) as client:
        task = asyncio.create_task(talk(client))
        yield client
        task.cancel()


async def test_an_instance_that_stops_reading_is_released() -> None:
    loop = asyncio.get_running_loop()
    async with serving(Deaf(), timeouts={"write_s": 10, "idle_s": 300}) as running:
        began_s = loop.time()
        async with talking(running) as client:
            assert (await closed(client))[0] == 1001
            await eventually(running.settled)
            assert loop.time() - began_s < 60
            assert len(running.server.server_state.tasks) == 0


async def test_it_is_released_when_the_client_leaves_first() -> None:
    loop = asyncio.get_running_loop()
    async with serving(Deaf(), timeouts={"write_s": 10, "idle_s": 300}) as running:
        async with talking(running) as client:
            await asyncio.sleep(1)
            began_s = loop.time()
            client.transport.abort()
            await eventually(running.settled)
            assert loop.time() - began_s < 60


class Loud(Speaker):
    """Sends without end, and pings."""

    async def _session(self, connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                await connection.send("x" * 1_000_000)
        self.closed.append((connection.close_code, connection.close_reason))


async def test_a_client_that_stops_reading_is_released() -> None:
    speaker, loop = Loud(), asyncio.get_running_loop()
    async with serving(speaker, timeouts={"write_s": 10, "idle_s": 300}) as running:
        client = await session(running)
        client.transport.pause_reading()
        began_s = loop.time()
        await eventually(lambda: not running.settled())
        await eventually(running.settled)
        await eventually(lambda: len(speaker.closed) == 1)
        assert loop.time() - began_s < 60
        client.transport.abort()


@pytest.mark.parametrize("speaker", [Deaf, Loud])
@pytest.mark.parametrize("workers", [1, 2])
async def test_neither_side_holds_up_the_gateways_end(speaker: type[Speaker], workers: int) -> None:
    loop, one = asyncio.get_running_loop(), speaker()
    fake = await one.start()
    config = config_for([fake], timeouts={"write_s": 600, "idle_s": 600})
    async with running_gateway(config, workers=workers) as running:
        client = await session(running)
        client.transport.pause_reading()
        task = asyncio.create_task(talk(client))
        await eventually(lambda: not running.settled())
        await asyncio.sleep(2)
        began_s = loop.time()
    assert loop.time() - began_s < 20
    await eventually(lambda: len(one.closed) == 1)
    task.cancel()
    client.transport.abort()
    await one.stop()


async def test_pings_and_empty_fragments_fill_no_memory() -> None:
    speaker = Speaker()
    async with serving(speaker, timeouts={"write_s": 10, "idle_s": 60}) as running:
        client = await session(running)
        await client.recv()
        client.transport.pause_reading()
        (connection,) = running.server.server_state.connections
        # Masked with zeros: a ping of 125 bytes, and the beginning of a message that never ends.
        ping = b"\x89\xfd\0\0\0\0" + b"x" * 125
        part = b"\x00\x80\0\0\0\0"
        for _ in range(200):
            if client.transport.is_closing():
                break
            client.transport.write(ping * 1000)
            await asyncio.sleep(0)
            assert connection.transport.get_write_buffer_size() < 1 << 20
        client.transport.abort()
        await eventually(running.settled)
        client = await session(running)
        await client.recv()
        (connection,) = running.server.server_state.connections
        client.transport.write(b"\x01\x80\0\0\0\0" + part * 100_000)
        await asyncio.sleep(1)
        assert len(connection.frames) == 1
        client.transport.write(b"\x80\x80\0\0\0\0")
        assert await client.recv() == ""
        client.transport.abort()


async def test_what_is_not_utf8_ends_the_session_and_is_no_error_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    speaker = Speaker()
    async with serving(speaker) as running:
        client = await session(running)
        await client.recv()
        client.transport.write(b"\x81\x82\0\0\0\0\xff\xfe")
        assert (await closed(client))[0] == 1007
        await eventually(lambda: len(speaker.closed) == 1)
    assert not [record for record in caplog.records if record.exc_info]


async def test_the_connection_of_a_session_counts_as_a_clients() -> None:
    async with serving(Speaker(), server={"port": 0, "max_connections": 1}) as running:
        async with greeted(running):
            with pytest.raises(InvalidStatus) as caught:
                await session(running)
            assert caught.value.response.status_code == 503
        await eventually(lambda: len(running.server.watch) == 0)
        async with greeted(running):
            pass


OPENING = (
    b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n%b\r\n"
)
NOT_MASKED = b"\x81\x01x"


@pytest.mark.parametrize(
    "data",
    [
        OPENING % (b"x: " + b"y" * 9000 + b"\r\n"),
        OPENING.replace(b"13", b"12") % b"" + NOT_MASKED,
        OPENING.replace(b"AA==", b"A") % b"" + NOT_MASKED * 100,
        OPENING % b"" + NOT_MASKED,
    ],
)
async def test_an_opening_that_is_none_is_answered_and_closed(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Speaker()) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(data)
        answer = await reader.read()
        assert answer.split(b" ")[1] in (b"400", b"426"), answer
        writer.close()
        await eventually(lambda: len(running.server.watch) == 0)
    assert not [record for record in caplog.records if record.exc_info]


async def test_an_instance_that_wants_no_such_client_is_not_ejected_for_it() -> None:
    """Else one client's key, or its origin, would take an instance from all."""
    speaker = Speaker()
    async with serving(speaker) as running:
        for status in (400, 401, 403):
            speaker.refuses = status
            for _ in range(10):
                refused = await refusal_of(session(running))
                assert refused[0] == 502
                assert str(status) in refused[1]["message"]
        speaker.refuses = 0
        async with greeted(running):
            pass


async def test_a_key_among_subprotocols_goes_nowhere_by_http_either() -> None:
    async with rig() as (_, http, fakes):
        fields = {"sec-websocket-protocol": "realtime, openai-insecure-api-key.ka"}
        body = {"model": "m", "prompt": "x"}
        answer = await http.post("/v1/completions", json=body, headers=fields)
        assert answer.status_code == 200
    assert b"insecure" not in fakes[0].heads[-1]
