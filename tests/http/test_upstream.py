"""The upstream client: pools, limits, expiry, TLS."""

import asyncio
import ssl
from pathlib import Path

import pytest
import trustme

from hetero_gateway.files.server_config import PoolConfig
from hetero_gateway.http.failures import InstanceError
from hetero_gateway.http.response import ResponseHead
from hetero_gateway.http.upstream import InstancePool
from tests.fakes.running import CHAT, eventually, rig
from tests.fakes.vllm import FakeInstance, fake_instances


class Collector:
    """A sink that keeps everything."""

    def __init__(self, decode: bool = False) -> None:
        self.decode = decode
        self.head: ResponseHead | None = None
        self.body = b""
        self.ended = asyncio.Event()
        self.error: InstanceError | None = None

    def on_head(self, head: ResponseHead, *, body_follows: bool) -> bool:
        self.head = head
        return self.decode

    def on_data(self, data: bytes) -> None:
        self.body += data

    def on_complete(self) -> None:
        self.ended.set()

    def on_error(self, error: InstanceError) -> None:
        self.error = error
        self.ended.set()


def request(body: bytes = b"{}") -> bytes:
    return b"POST /v1/x HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body


async def answer_to(pool: InstancePool, body: bytes = b"{}", *, decode: bool = False) -> Collector:
    sink = Collector(decode)
    connection = pool.take_idle() or await pool.connect()
    connection.send(request(body), sink)
    await asyncio.wait_for(sink.ended.wait(), 5)
    return sink


async def test_raw_and_decoded_bytes_agree() -> None:
    async with fake_instances(1) as [fake]:
        pool = InstancePool(fake.url, PoolConfig(), 1)
        plain = [(await answer_to(pool, decode=d)).body for d in (False, True)]
        assert plain[0] == plain[1]
        raw, decoded = [await answer_to(pool, b'{"stream": true}', decode=d) for d in (False, True)]
        assert raw.head is not None
        assert raw.head.chunked
        assert raw.body.endswith(b"0\r\n\r\n")
        assert decoded.body.endswith(b"data: [DONE]\n\n")
        assert b"\r\n" not in decoded.body
        assert len(fake.peers) == 1
        pool.close()


async def test_a_connection_that_was_paused_at_the_end_answers_the_next_request() -> None:
    async with fake_instances(1) as [fake]:
        pool = InstancePool(fake.url, PoolConfig(), 1)
        connection = await pool.connect()

        class Slow(Collector):
            def on_data(self, data: bytes) -> None:
                connection.pause_reading()

        sink = Slow()
        connection.send(request(), sink)
        await asyncio.wait_for(sink.ended.wait(), 5)
        assert pool.take_idle() is connection
        pool.release(connection)
        assert (await answer_to(pool)).body
        pool.close()


@pytest.mark.parametrize("arrives", ["bytes", "end"])
async def test_a_connection_on_which_something_arrived_is_not_taken(arrives: str) -> None:
    answer, writers = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readuntil(b"{}")
        writer.write(answer)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        pool = InstancePool(
            f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", PoolConfig(), 1
        )
        assert (await answer_to(pool)).body == b"{}"
        # It is here at once, and this event loop has had no turn to read it.
        if arrives == "bytes":
            writers[0].write(answer.replace(b"{}", b"!!"))
        else:
            writers[0].write_eof()
        assert pool.take_idle() is None
        assert (await answer_to(pool)).body == b"{}"
        assert len(writers) == 2
        pool.close()
        for writer in writers:
            writer.close()


async def test_idle_connections_expire_and_are_limited() -> None:
    async with fake_instances(1) as [fake]:
        pool = InstancePool(fake.url, PoolConfig(max_idle=2, idle_expiry_s=0.1), 1)
        sinks = [Collector() for _ in range(5)]
        for sink in sinks:
            (await pool.connect()).send(request(), sink)
        for sink in sinks:
            await sink.ended.wait()
        await eventually(lambda: pool.open_connections == 2)
        await asyncio.sleep(0.15)
        assert pool.take_idle() is None
        await eventually(lambda: pool.open_connections == 0)


async def test_at_the_limit_connecting_is_refused_at_once() -> None:
    async with fake_instances(1) as [fake]:
        pool = InstancePool(fake.url, PoolConfig(max_connections=2), 1)
        held = [await pool.connect() for _ in range(2)]
        with pytest.raises(InstanceError) as caught:
            await pool.connect()
        assert caught.value.reason == "pool"
        for connection in held:
            connection.abort()
        await eventually(lambda: pool.open_connections == 0)
        (await pool.connect()).abort()


async def test_a_connection_that_never_comes_up_times_out() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        gone.set()

    gone = asyncio.Event()
    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    context = ssl.create_default_context()
    port = server.sockets[0].getsockname()[1]
    pool = InstancePool(f"https://127.0.0.1:{port}", PoolConfig(), 0.1, context)
    with pytest.raises(InstanceError, match=r"0\.1 s") as caught:
        await pool.connect()  # TCP is there, the TLS handshake never answers
    assert caught.value.reason == "connect"
    await asyncio.wait_for(gone.wait(), 5)
    server.close()
    await server.wait_closed()


async def test_tls_instances_are_verified(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    fake = FakeInstance()
    await fake.start(ssl_context=context)
    url = f"https://127.0.0.1:{fake.port}"
    trusted = {"id": "trusted", "base_url": url, "ca_file": str(tmp_path / "ca.pem")}
    other = {"id": "other", "base_url": url}
    body = {"model": "m", "messages": [], "stream": True}
    async with rig([fake], instances=[trusted, other]) as (running, client, _):
        response = await client.post(CHAT, json=body)
        assert response.headers["x-hetero-gateway-instance"] == "trusted"
        assert response.text.endswith("data: [DONE]\n\n")
        instances = running.gateway.fleet.instances
        assert [i.up for i in instances.values()] == [True, False]
        assert "certificate" in instances["other"].down_reason.lower()  # type: ignore[index]


async def test_a_path_prefix_is_kept() -> None:
    async with fake_instances(1) as [fake]:
        instance = {"id": "i0", "base_url": f"{fake.url}/prefix/", "model": "m"}
        async with rig([fake], instances=[instance]) as (running, client, _):
            running.gateway.fleet.mark_up(running.gateway.fleet.instances["i0"])  # type: ignore[index]
            await client.post(CHAT, json={"model": "m"})
        assert fake.heads[0].startswith(b"POST /prefix/v1/chat/completions HTTP/1.1\r\n")
