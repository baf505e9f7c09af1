"""Answers of an instance that are spoilt, through a real gateway.

Whatever an instance answers, its client gets exactly one answer that h11, which shares no code with
the gateway, can read (the instance's own, or one of the gateway's), or a connection that is cut,
and gets it in time; the next request on the same connection gets its own answer; requests to
another instance are served, nothing is logged as an error, and all loads end at 0. (What comes
behind an answer only once the next request is on its way is that one's answer, to anyone: so the
next one is the gateway's to answer.)
"""

import asyncio
import itertools
import random

import h11

from tests.fakes.raw import RawInstance, plain
from tests.fakes.running import config_for
from tests.fakes.servers import read_request
from tests.fuzz.fuzzing import Findings, _ask, _gateway, _good_one, repeat
from tests.fuzz.mutation import mutated_bytes, mutated_head, mutated_json
from tests.fuzz.short_ways import ANSWERS, chunked, cuts_of, pieces_of

# What parsers have stumbled over.
_SPLICES = (
    b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\x00", b" ", b"\t", b":", b";", b",", b"0", b"f" * 17,
    b"0\r\n\r\n", b"-1", b"+1", b"0x", b"content-length: 3\r\n", b"Content-Length:5\r\n",
    b"transfer-encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b" folded\r\n",
    b"connection: content-length\r\n", b"HTTP/1.1 200 OK\r\n", b"HTTP/2.0 200\r\n", b"\xff\xfe",
    b"set-cookie: evil=1\r\n", b"x" * 70000, b"a: b\r\n" * 130, b"HTTP/1.1 101 Up\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil", b"1\r\na\r\n" * 40, b";" + b"e" * 2000,
    b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n", b"connection: close, x-hop\r\nx-hop: 1\r\n",
)  # fmt: skip
_BODY = b'{"model":"spoilt","prompt":"spoil it","max_tokens":4,"stream":%b}'
_DOCUMENT = {
    "id": "cmpl-1",
    "object": "text_completion",
    "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_EVENTS = (
    b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n',
    b'data: {"error":{"message":"broken","code":500}}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1e999}}\n\n',
    b"data: [DONE]\n\n", b"event: error\n", b": a comment\n\n", b"data: " * 40, b"\n\n",
)  # fmt: skip
# An engine that says nothing more is given up after these; an answer ends well before the patience.
_TIMEOUTS = {"first_byte_s": 3.0, "idle_s": 1.0, "total_s": 5.0}
_PATIENCE_S = 30.0
_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def answers_of(rng: random.Random) -> bytes:
    """One answer."""
    kind = rng.random()
    if kind < 0.25:
        events = [rng.choice(_EVENTS) for _ in range(rng.randint(0, 6))]
        data = _STREAM + b"".join(b"%x\r\n%b\r\n" % (len(e), e) for e in events) + b"0\r\n\r\n"
    elif kind < 0.45:
        data = plain(mutated_json(rng, _DOCUMENT), rng.choice((b"200 OK", b"400 X", b"500 X")))
    elif kind < 0.6:
        data = _STREAM + chunked(rng)
    else:
        data = rng.choice(ANSWERS)
        data += rng.choice(ANSWERS) if rng.random() < 0.2 else b""
    if rng.random() < 0.5:
        data = mutated_head(rng, data)
    if rng.random() < 0.3:
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.choice(_SPLICES) + data[at:]
    return mutated_bytes(rng, data) if rng.random() < 0.4 else data


class _Spoilt(RawInstance):
    """Answers POSTs with what is drawn."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head, body = await read_request(reader)
        if head.startswith(b"GET "):
            return await self._plainly(head, body, writer)
        rng = self._rng
        data = answers_of(rng)
        for piece in pieces_of(data, cuts_of(rng, data) if rng.random() < 0.5 else []):
            writer.write(piece)
            await asyncio.sleep(0)
        await writer.drain()
        return rng.random() < 0.3  # or it closes


_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
_NEXT = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
_LIVES = b'\r\n\r\n{"status":"ok"}'


async def _judge(port: int, body: bytes, findings: Findings) -> None:
    """One request that meets a spoilt answer and one that does not, on one connection."""
    findings.sent += 1
    got = b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_HEAD % len(body) + body + _NEXT)
        async with asyncio.timeout(_PATIENCE_S):
            got = await reader.read()
    except TimeoutError:
        findings.add(f"no end of the answer in {_PATIENCE_S:g} s", body)
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    status, problem = _verdict(got)
    findings.statuses[status] += 1
    if problem:
        findings.add(problem, got)


def _verdict(got: bytes) -> tuple[int, str]:
    """(status, what is wrong or "") of all that a connection brought."""
    http, head = h11.Connection(h11.CLIENT), None
    _ask(http, "POST")
    http.receive_data(got)
    http.receive_data(b"")
    try:
        while not isinstance(event := http.next_event(), h11.EndOfMessage):
            head = event if isinstance(event, h11.Response) else head
            if not isinstance(event, h11.Response | h11.Data):
                return 0, f"not HTTP: {event}"
    except h11.RemoteProtocolError as error:
        # Cut: where the client notices, and with nothing behind it.
        cut = "incomplete" in str(error) or "closed" in str(error)
        status = head.status_code if head else 0
        return status, "" if cut and _LIVES not in got else f"not HTTP: {error}"
    assert head is not None
    rest = bytes(http.trailing_data[0])
    if [name for name, _ in head.headers].count(b"x-request-id") != 1:
        return head.status_code, "not one x-request-id"
    if not (rest.startswith(b"HTTP/1.1 200 OK\r\n") and rest.endswith(_LIVES)):
        return head.status_code, "the next request gets another answer"
    return head.status_code, "" if rest.count(b"HTTP/1.1") == 1 else "answers that nobody asked for"


async def fuzz_answers(seed: int, count: int) -> Findings:
    """``count`` requests, each answered by an instance with something else."""
    findings, rng, numbers = Findings(), random.Random(seed), itertools.count()
    async with _Spoilt(rng) as instance, RawInstance() as good:
        config = config_for(
            [],
            instances=[
                {"id": "spoilt", "base_url": instance.url, "model": "spoilt"},
                {"id": "good", "base_url": good.url, "model": "m"},
            ],
            timeouts=_TIMEOUTS,
            health={"probe_interval_s": 0.5, "unhealthy_after": 1000},
        )
        async with _gateway(config, findings) as running:

            async def one() -> None:
                stream = b"true" if next(numbers) % 2 else b"false"
                await _judge(running.port, _BODY % stream, findings)

            await repeat(one, lambda: _good_one(running.port, findings), count)
    return findings
