"""Loops that send what is drawn from a corpus to a real gateway, and what must hold all the time.

Each answer is 2xx or 4xx (or 501, 505, for what HTTP has no better word), the next good request
succeeds, instances get only plain HTTP, nothing is logged as an error, and all loads end at 0.
"""

import asyncio
import contextlib
import json
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import h11

from hetero_gateway.engines.vllm import work_of_path
from hetero_gateway.files.gateway_config import GatewayConfig
from tests.fakes.running import RunningGateway, config_for, eventually, running_gateway
from tests.fuzz.mutation import mutated_bytes, mutated_head, mutated_json
from tests.fuzz.sink import Sink, sink

CORPUS = Path(__file__).parent / "corpus"
AT_ONCE = 16
# Who gets no answer to what is not a whole request yet leaves after this.
_PATIENCE_S = 0.3
_GOOD = b'{"model":"m","prompt":"hello","max_tokens":4}'
_ALLOWED = {*range(200, 500), 501, 505}


@dataclass
class Findings:
    """What came of a run: statuses, and what must not be (with the input that led to it)."""

    statuses: Counter[int] = field(default_factory=Counter)
    violations: list[tuple[str, bytes]] = field(default_factory=list)
    sent: int = 0

    def add(self, text: str, data: bytes) -> None:
        self.violations.append((text, data))


class Errors(logging.Handler):
    """Keeps what is logged as an error, or with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.seen.append(self.format(record)[:2000])


@contextlib.contextmanager
def errors_found(findings: Findings, but: str | None = None) -> Iterator[None]:
    """What is logged as an error within the block is a violation, unless it says ``but``."""
    errors = Errors()
    logging.getLogger().addHandler(errors)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(errors)
    for text in [each for each in errors.seen if but is None or but not in each][:5]:
        findings.add("in the log: " + text, b"")


async def note_unless_settled(running: RunningGateway, findings: Findings) -> None:
    """Wait for all loads to end at 0."""
    try:
        await eventually(running.settled, within_s=30)
    except TimeoutError:
        loads = f"{running.loads()}, {running.progress()}"
        findings.add(f"not settled: {loads}, metrics {await running.metrics()}", b"")


@contextlib.asynccontextmanager
async def _gateway(config: GatewayConfig, findings: Findings) -> AsyncIterator[RunningGateway]:
    """A gateway of which nothing is left at the end, and that logs no error."""
    with errors_found(findings):
        async with running_gateway(config) as running:
            await eventually(lambda: "m" in running.gateway.fleet.models())
            yield running
            await note_unless_settled(running, findings)


@contextlib.asynccontextmanager
async def _target(findings: Findings) -> AsyncIterator[tuple[RunningGateway, Sink]]:
    """A gateway over one strict instance; what must hold at the end is looked at."""
    async with sink() as instance:
        config = config_for([instance], profiles=(None,))  # type: ignore[list-item]
        async with _gateway(config, findings) as running:
            yield running, instance
        for complaint in instance.complaints[:5]:
            findings.add("the instance got: " + complaint, b"")
        for target in instance.targets:
            path = target.partition(b"?")[0].decode("latin-1")
            if work_of_path(path) is None:
                findings.add(f"the instance got {target!r}", b"")


def bodies_of(seed: int) -> Callable[[], tuple[str, bytes]]:
    """Draws (path, body), for ever."""
    rng = random.Random(seed)
    corpus = []
    for file in sorted((CORPUS / "bodies").iterdir()):
        # completions-long.json goes to /v1/completions, chat_completions.json to /v1/chat/…
        path = "/v1/" + file.stem.partition("-")[0].replace("_", "/")
        corpus.append((path, file.read_bytes()))

    def draw() -> tuple[str, bytes]:
        path, body = rng.choice(corpus)
        kind = rng.random()
        if kind < 0.05:
            return path, body
        if kind < 0.75:
            try:
                return path, mutated_json(rng, json.loads(body))
            except ValueError:
                pass
        if kind > 0.95:  # half of one, half of another
            other = rng.choice(corpus)[1]
            return path, body[: rng.randrange(len(body))] + other[rng.randrange(len(other)) :]
        return path, mutated_bytes(rng, body)

    return draw


async def fuzz_bodies(seed: int, count: int) -> Findings:
    """``count`` bodies over HTTP, ``AT_ONCE`` at a time."""
    findings, draw = Findings(), bodies_of(seed)
    async with _target(findings) as (running, _):

        async def one() -> None:
            path, body = draw()
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            await _exchange(running.port, head.encode() + body, findings, patience_s=30.0)

        await repeat(one, lambda: _good_one(running.port, findings), count)
    return findings


async def fuzz_heads(seed: int, count: int) -> Findings:
    """``count`` requests whose heads are spoilt, over connections of their own."""
    findings, rng = Findings(), random.Random(seed)
    corpus = [file.read_bytes() for file in sorted((CORPUS / "heads").iterdir())]
    async with _target(findings) as (running, _):

        async def one() -> None:
            data = mutated_head(rng, rng.choice(corpus))
            await _exchange(running.port, data, findings, patience_s=_PATIENCE_S)

        await repeat(one, lambda: _good_one(running.port, findings), count)
    return findings


async def repeat(
    one: Callable[[], Awaitable[None]],
    good: Callable[[], Awaitable[None]],
    count: int,
    at_once: int = AT_ONCE,
) -> None:
    """So many, so many at once; after each 25th, and at the end, a good one."""
    left = count

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            is_turn = left % 25 == 0
            await one()
            if is_turn:
                await good()

    await asyncio.gather(*(worker() for _ in range(at_once)))
    await good()


async def _good_one(port: int, findings: Findings) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    statuses = await _exchange(port, head % len(_GOOD) + _GOOD, Findings(), patience_s=60.0)
    if statuses != [200]:
        findings.add(f"a good request gets {statuses}", b"")


async def _exchange(port: int, data: bytes, findings: Findings, *, patience_s: float) -> list[int]:
    """Send, read until an answer is whole or nobody answers; the final statuses."""
    findings.sent += 1
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    http = h11.Connection(h11.CLIENT)
    method = "HEAD" if data.startswith(b"HEAD ") else "POST"
    _ask(http, method)
    statuses: list[int] = []
    try:
        writer.write(data)
        async with asyncio.timeout(patience_s):
            while not (http.our_state is h11.MUST_CLOSE or http.their_state is h11.CLOSED):
                received = await reader.read(65536)
                http.receive_data(received)
                if _read(http, method, statuses) or not received:
                    break
    except (TimeoutError, ConnectionError):
        pass
    except h11.RemoteProtocolError as error:
        # A connection that is closed without a word is one way to refuse what is not HTTP.
        if "incomplete message" not in str(error) and "without sending" not in str(error):
            findings.add(f"not HTTP: {error}", data)
    finally:
        writer.transport.abort()
    for status in statuses:
        findings.statuses[status] += 1
        if status not in _ALLOWED:
            findings.add(f"answered {status}", data)
    if not statuses:
        findings.statuses[0] += 1
    return statuses


def _ask(http: h11.Connection, method: str) -> None:
    http.send(
        h11.Request(method=method, target="/", headers=[("host", "x"), ("content-length", "0")])
    )
    http.send(h11.EndOfMessage())


def _read(http: h11.Connection, method: str, statuses: list[int]) -> bool:
    """Whether an answer has come to its end, with nothing begun behind it."""
    ended = False
    while True:
        event = http.next_event()
        if isinstance(event, h11.Response):
            statuses.append(event.status_code)
            ended = False
        elif isinstance(event, h11.EndOfMessage):
            ended = True
            if http.our_state is h11.DONE and http.their_state is h11.DONE:
                http.start_next_cycle()
                _ask(http, method)
            else:
                return True
        elif isinstance(event, h11.ConnectionClosed):
            return True
        elif event is h11.NEED_DATA or event is h11.PAUSED:
            return ended
