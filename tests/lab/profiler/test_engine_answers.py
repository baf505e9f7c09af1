"""What an engine answers is read within bounds: it may be anything."""

import gzip
from contextlib import aclosing

import pytest

from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.profiler import engine
from hetero_gateway.lab.profiler.engine import EngineClient
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.raw import RawInstance, plain

BOMB = gzip.compress(bytes(1 << 24), 1)
BAD = {
    "too long": [b"HTTP/1.1 200 OK\r\ncontent-length: 200000000\r\n\r\n" + b"1" * 100000],
    "a bomb": [
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%b"
        % (len(BOMB), BOMB)
    ],
    "silent": [b""],
    "half a body": [b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabc"],
    "garbage": [b"SSH-2.0\r\n"],
}


@pytest.mark.parametrize("name", BAD)
async def test_what_has_no_end_or_no_form_is_no_answer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_MOST_BYTES", 50000)
    async with RawInstance() as instance:
        instance.answers["/metrics"] = instance.answers["/health"] = BAD[name]
        async with aclosing(EngineClient(parse_target(instance.url))) as client:
            with pytest.raises(HeteroGatewayError, match="/metrics: no answer: "):
                await client.get("/metrics")
            assert not await client.alive()


@pytest.mark.parametrize(
    ("body", "version"),
    [
        (b'{"version": "0.32"}', "0.32"),
        (b'{"version": 7}', "unknown"),
        (b"null", "unknown"),
        (b"[" * 100000, "unknown"),
        (b'{"version": "' + b"9" * 5000 + b'"}', "unknown"),
        (b'{"version": "a\\nb"}', "unknown"),
    ],
)
async def test_a_version_is_a_short_text(body: bytes, version: str) -> None:
    async with RawInstance() as instance:
        instance.answers["/version"] = [plain(body)]
        async with aclosing(EngineClient(parse_target(instance.url))) as client:
            assert await engine._version(client) == version
