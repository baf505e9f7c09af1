"""Mutated answers of an instance, from a seeded corpus, through the real server.

Whatever an instance sends, its request's client gets exactly one well-formed response, or a
connection that is cut; the next request on the same connection gets its own answer; loads end at 0.
The judge is h11, which shares no code with the gateway.
"""

import asyncio
import itertools
import random

import h11
import pytest

from tests.fakes.raw import GOOD, RawInstance
from tests.fakes.running import RunningGateway, eventually, rig

SEEDS = 24
ROUNDS = 12  # of mutations per seed, on one gateway


def chunks(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def answer(status: bytes, *fields: bytes, body: bytes = b"") -> bytes:
    return b"\r\n".join((b"HTTP/1.1 " + status, *fields, b"", body))


_SSE = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
_CHUNKED = b"transfer-encoding: chunked"
_STREAM = b"content-type: text/event-stream"
_DONE = b"data: [DONE]\n\n"
CORPUS = (
    GOOD,
    answer(b"200 OK", b"content-length: 0"),
    answer(b"204 No Content"),
    answer(b"304 Not Modified", b"etag: 1"),
    answer(b"200 OK", _STREAM, _CHUNKED, body=chunks(_SSE, _SSE, _DONE) + b"0\r\n\r\n"),
    answer(b"200 OK", _CHUNKED, body=chunks(b"x" * 300, b"y") + b"0\r\nx-t: 1\r\n\r\n"),
    answer(b"200 OK", _CHUNKED, body=b"3;a=b\r\nabc\r\n0\r\n\r\n"),
    answer(b"200 OK", b"connection: close", body=b"until the end"),
    answer(b"200 OK", b"connection: close, x-hop", b"x-hop: 1", b"content-length: 2", body=b"ok"),
    answer(b"503 Busy", b"retry-after: 1", b"content-length: 2", body=b"{}"),
    answer(b"100 Continue") + GOOD,
    answer(b"103 Early Hints", b"link: </a>") + GOOD,
    b"HTTP/1.0 200 OK\r\n\r\nold",
    b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 3\r\n\r\nold",
)  # fmt: skip
# What parsers have stumbled over.
SPLICES = (
    b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\x00", b" ", b"\t", b":", b";", b",", b"0", b"f" * 17,
    b"0\r\n\r\n", b"-1", b"+1", b"0x", b"content-length: 3\r\n", b"Content-Length:5\r\n",
    b"transfer-encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b" folded\r\n",
    b"connection: content-length\r\n", b"HTTP/1.1 200 OK\r\n", b"HTTP/2.0 200\r\n", b"\xff\xfe",
    b"set-cookie: evil=1\r\n", b"x" * 70000, b"a: b\r\n" * 130, b"HTTP/1.1 101 Up\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil", b"1\r\na\r\n" * 40, b";" + b"e" * 2000,
)  # fmt: skip


def mutated(rng: random.Random) -> bytes:
    """One of the corpus after one to three changes; now and then none."""
    text = bytearray(rng.choice(CORPUS))
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        at, other = rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)
        match rng.randrange(7):
            case 0:
                text[at:at] = rng.choice(SPLICES)
            case 1:
                del text[at : at + rng.choice([1, 1, 2, 20])]
            case 2 if text:
                text[at % len(text)] = rng.choice(b"\r\n\t\x00 :;,0159afzAZ\x7f\x80\xff")
            case 3:  # twice
                text[at:at] = text[min(at, other) : max(at, other)]
            case 4:  # cut short
                del text[max(1, at) :]
            case 5:  # two answers in one
                text += rng.choice((rng.choice(CORPUS), rng.choice(SPLICES)))
            case _:
                text[:0] = rng.choice(SPLICES)
    return bytes(text)


def pieces_of(text: bytes, rng: random.Random) -> list[bytes | None]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.choice([0, 0, 1, 3, 8])))
    bounds = [0, *cuts, len(text)]
    pieces: list[bytes | None] = [text[a:b] for a, b in itertools.pairwise(bounds)]
    return [*pieces, None] if rng.random() < 0.3 else pieces


BODY = b'{"model": "m", "prompt": "x"}'
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY)
MARKED = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def judge(running: RunningGateway, what: str) -> None:
    """One request that meets a mutated answer and one that does not, on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    try:
        writer.write(REQUEST + BODY + MARKED)
        async with asyncio.timeout(30):
            got = await reader.read()
    finally:
        writer.close()
    client, seen = h11.Connection(h11.CLIENT), []
    client.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(got)
    client.receive_data(b"")
    broken = ""
    while not broken:
        try:
            event = client.next_event()
        except h11.RemoteProtocolError as error:
            broken = str(error)
            break
        if isinstance(event, h11.EndOfMessage):
            break
        assert isinstance(event, h11.Response | h11.Data), (what, event)
        seen.append(event)
    if broken:
        # Cut: where the client notices, and with nothing behind it.
        assert "incomplete" in broken or "closed" in broken, (what, broken, got)
        assert b'{"status":"ok"}' not in got, what
        return
    (response,) = [event for event in seen if isinstance(event, h11.Response)]
    names = [name for name, _ in response.headers]
    assert names.count(b"x-request-id") == 1, what
    rest = bytes(client.trailing_data[0])
    assert rest.startswith(b"HTTP/1.1 200 OK\r\n"), (what, got)
    assert rest.endswith(b'\r\n\r\n{"status":"ok"}'), (what, got)
    assert rest.count(b"HTTP/1.1") == 1, (what, got)


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_no_answer_harms_more_than_its_own_request(seed: int) -> None:
    rng = random.Random(seed)
    instance = RawInstance()
    instance.pause_s = 0.001
    sections = {"retry": {"max_attempts": 1}, "timeouts": {"first_byte_s": 0.5, "idle_s": 0.5}}
    async with rig([instance], **sections) as (running, *_):
        for _ in range(ROUNDS):
            text = mutated(rng)
            instance.posts = pieces_of(text, rng)
            await judge(running, f"seed {seed}: {text[:300]!r}")
            await eventually(running.settled)
        # Bytes behind an answer may come so late that they are taken for the next one.
        assert instance.requests > ROUNDS // 2
