"""Sessions of /v1/realtime whose client and instance send mutated handshakes and frames.

Both sides speak bytes over sockets. Each session ends within its bounds, nothing is logged as an
error, memory stays bounded, all loads end at 0, and a good session is served in between. What the
gateway sends to its instance is read strictly: its frames are well-formed, no event in them names
another model, and no key goes along.
"""

import asyncio
import base64
import contextlib
import json
import random
import struct
from collections.abc import AsyncIterator
from time import process_time  # the real one, in virtual time too
from typing import Any

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from tests.fakes.memory import resident_mb
from tests.fakes.raw import RawInstance, plain
from tests.fakes.running import config_for, eventually, running_gateway
from tests.fuzz.fuzzing import Findings, errors_found, note_unless_settled, repeat
from tests.fuzz.mutation import mutated_bytes, mutated_head, mutated_json

_AT_ONCE = 64
# Of a session (``_SECTIONS``), its closing and a busy machine.
_ENDS_WITHIN_S = 60.0
_LONGEST_TURN_S = 1.0
_MOST_GROWTH_MB = 300
_SECTIONS: dict[str, Any] = {
    "timeouts": {
        "connect_s": 20.0,
        "header_s": 1.0,
        "body_s": 1.0,
        "write_s": 1.0,
        "keep_alive_s": 1.0,
        "idle_s": 2.0,
        "total_s": 6.0,
    },
    "retry": {"max_attempts": 1},
    "health": {"probe_interval_s": 0.2, "probe_timeout_s": 60, "ejection": {"enabled": False}},
}
_AUDIO = base64.b64encode(bytes(3200)).decode()
_EVENTS: tuple[Any, ...] = (
    {"type": "session.update", "model": "m"},
    {"type": "session.update", "model": "other"},
    {"type": "session.update", "session": {"type": "transcription", "model": "other"}},
    {"type": "input_audio_buffer.append", "audio": _AUDIO},
    {"type": "input_audio_buffer.commit", "final": True},
    {"type": "session.update", "tools": [{"kv_transfer_params": {"remote_port": 1}}]},
)
_ANSWERS: tuple[Any, ...] = (
    {"type": "session.created", "id": "s"},
    {"type": "transcription.delta", "delta": "a"},
    {"type": "transcription.done", "text": "a", "usage": {"completion_tokens": 7}},
    {"type": "response.audio.delta", "delta": _AUDIO},
    {"type": "error", "error": "no", "code": "x"},
)
_KEY_PREFIX = "openai-insecure-api-key."
_OPENING = (
    "GET /v1/realtime?model=m&s={seed} HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\n"
    "connection: Upgrade\r\nsec-websocket-version: 13\r\n"
    "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    f"sec-websocket-protocol: realtime, {_KEY_PREFIX}SECRET\r\n\r\n"
)
_LENGTHS = (0, 1, 125, 126, 127, 65_535, 65_536, 1 << 24, (1 << 24) + 1, 1 << 31, 1 << 63)
_CODES = (0, 999, 1000, 1001, 1004, 1005, 1006, 1012, 1015, 2999, 4000, 5000, 65_535)


class Instance(RawInstance):
    """Speaks as the seed in a session's target has it; ``complaints``: of what it was sent.

    Args:
        model: that it serves; "good": a well-behaved one.
    """

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = model
        self.complaints: list[str] = []
        card = {"id": model, "object": "model", "max_model_len": 4096}
        listed = json.dumps({"object": "list", "data": [card]}).encode()
        self.answers["/v1/models"] = [plain(listed)]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split(b" ", 2)[1]
        if not path.startswith(b"/v1/realtime"):
            return await self._plainly(head, b"", writer)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDS_WITHIN_S):
                await self._session(head, path, reader, writer)
        return False

    async def _session(
        self,
        head: bytes,
        path: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if _KEY_PREFIX.encode() in head.lower():
            self.complaints.append(f"a key in its head: {head!r}")
        protocol = ServerProtocol(max_size=1 << 25)
        protocol.receive_data(head)
        request = next(iter(protocol.events_received()), None)
        if not isinstance(request, Request):
            self.complaints.append(f"no opening: {head!r}")
            return
        protocol.send_response(protocol.accept(request))
        opening = b"".join(protocol.data_to_send())
        good = self.model == "good"
        digits = bytes(each for each in path.partition(b"s=")[2] if each in b"0123456789")
        rng = random.Random(int(digits[:12] or b"0"))
        if not good and rng.random() < 0.1:
            opening = mutated_bytes(rng, opening)
        writer.write(opening)
        reads = good or rng.random() < 0.7
        task = asyncio.create_task(self._read(protocol, reader)) if reads else None
        try:
            if good:
                writer.write(_frame(Opcode.TEXT, json.dumps(_ANSWERS[0]).encode(), masked=False))
            else:
                for data in _frames(rng, _ANSWERS, masked=False):
                    writer.write(data)
                    await writer.drain()
                    await asyncio.sleep(rng.choice((0, 0, 0.01)))
            if not good and rng.random() < 0.3:
                return
            if task is not None:
                await task
            else:
                await asyncio.sleep(1)
        finally:
            if task is not None:
                task.cancel()

    async def _read(self, protocol: ServerProtocol, reader: asyncio.StreamReader) -> None:
        """Until the gateway closes."""
        parts: list[bytes] = []
        while data := await reader.read(65_536):
            protocol.receive_data(data)
            for event in protocol.events_received():
                if isinstance(event, Frame) and event.opcode in (0, 1, 2):
                    parts.append(bytes(event.data))
                    if event.fin:
                        self._look_at(b"".join(parts))
                        parts.clear()
            if protocol.parser_exc is not None:
                self.complaints.append(f"no frame: {protocol.parser_exc!r}")
                return

    def _look_at(self, message: bytes) -> None:
        try:
            left = [json.loads(message)]
        except (ValueError, RecursionError):
            return
        while left:
            value = left.pop()
            left += value if isinstance(value, list) else ()
            if isinstance(value, dict):
                left += value.values()
                model = value.get("model")
                other = not isinstance(model, dict | None) and model != self.model
                if other or value.get("kv_transfer_params") is not None:  # null says nothing
                    self.complaints.append(f"an event that may not pass: {message[:300]!r}")


def _frame(
    opcode: int,
    payload: bytes,
    *,
    masked: bool,
    fin: bool = True,
    reserved: int = 0,
    length: int | None = None,
) -> bytes:
    """A frame (RFC 6455, 5.2), masked with zeros; ``length``: as it says, if not its own."""
    first = (fin << 7) | (reserved << 4) | opcode
    size = len(payload) if length is None else length
    mask, key = (0x80, bytes(4)) if masked else (0, b"")
    if size < 126:
        head = struct.pack("!BB", first, mask | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", first, mask | 126, size)
    else:
        head = struct.pack("!BBQ", first, mask | 127, size)
    return head + key + payload


def _frames(rng: random.Random, events: tuple[Any, ...], *, masked: bool) -> list[bytes]:
    """What one side sends, in pieces."""
    drawn = [_drawn(rng, events, masked=masked) for _ in range(rng.randint(0, 12))]
    if rng.random() < 0.3:
        data = mutated_bytes(rng, b"".join(drawn))
        cut = rng.randrange(len(data) + 1)
        return [data[:cut], data[cut:]]
    return drawn


def _drawn(rng: random.Random, events: tuple[Any, ...], *, masked: bool) -> bytes:
    payload = json.dumps(rng.choice(events)).encode()
    kind = rng.randrange(12)
    if kind < 4:
        return _frame(Opcode.TEXT, payload, masked=masked)
    if kind < 6:
        payload = mutated_json(rng, json.loads(payload))
        return _frame(rng.choice((1, 1, 2)), payload, masked=masked)
    if kind == 6:  # in fragments, with a ping among them
        size = rng.choice((1, 7, 100))
        parts = [payload[i : i + size] for i in range(0, min(len(payload), 100 * size), size)]
        frames = [
            _frame(1 if i == 0 else 0, part, masked=masked, fin=i == len(parts) - 1)
            for i, part in enumerate(parts)
        ]
        frames.insert(rng.randrange(len(frames) + 1), _frame(9, b"p" * 125, masked=masked))
        return b"".join(frames)
    if kind == 7:  # a length that is not so
        return _frame(rng.choice((1, 2, 8, 9)), payload, masked=masked, length=rng.choice(_LENGTHS))
    if kind == 8:
        code = struct.pack("!H", rng.choice(_CODES))
        reason = rng.choice((b"", b"why", b"\xff\xfe", b"r" * 123, b"r" * 200))
        return _frame(8, rng.choice((b"", b"\x03", code + reason)), masked=masked)
    if kind == 9:  # fields that may not be so
        return _frame(
            rng.randrange(16),
            rng.choice((b"", payload, b"\xff\xfe\xfd", b"x" * 126)),
            masked=masked if rng.random() < 0.7 else not masked,
            fin=rng.random() < 0.7,
            reserved=rng.choice((0, 0, 1, 4, 7)),
        )
    if kind == 10:  # many
        one = rng.choice((_frame(9, b"p" * 125, masked=masked), _frame(0, b"", masked=masked)))
        return _frame(1, b"", masked=masked, fin=False) * rng.randrange(2) + one * 2000
    return _frame(2, bytes(rng.choice((1, 1000, 2_000_000))), masked=masked)


class _Client:
    """Draws sessions and has them. ``good``: has one that must be served."""

    def __init__(self, port: int, rng: random.Random, findings: Findings) -> None:
        self._port = port
        self._rng = rng
        self._findings = findings

    async def session(self) -> None:
        rng = random.Random(self._rng.getrandbits(40))
        opening = _OPENING.format(seed=rng.randrange(10**9)).encode()
        if rng.random() < 0.15:
            opening = mutated_head(rng, opening)
        script = _frames(rng, _EVENTS, masked=True)
        self._findings.sent += 1
        received = bytearray()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            async with asyncio.timeout(_ENDS_WITHIN_S):
                writer.write(opening)
                if rng.random() < 0.9:
                    received += await reader.readuntil(b"\r\n\r\n")
                await self._speak(rng, script, writer)
                if rng.random() < 0.1:
                    await asyncio.sleep(3)  # reads nothing for longer than it may
                elif rng.random() < 0.1:
                    return
                while data := await reader.read(1 << 16):
                    received += data[: 64 - len(received)]
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except TimeoutError:
            self._findings.add("a session does not end", opening + b"".join(script))
        finally:
            writer.transport.abort()
            status = received[9:12]
            self._findings.statuses[int(status) if status.isdigit() else 0] += 1

    async def _speak(
        self, rng: random.Random, script: list[bytes], writer: asyncio.StreamWriter
    ) -> None:
        for data in script:
            writer.write(data)
            with contextlib.suppress(TimeoutError):
                # Where the instance reads nothing, neither does the gateway.
                async with asyncio.timeout(0.2):
                    await writer.drain()
            await asyncio.sleep(rng.choice((0, 0, 0.01)))

    async def good(self) -> None:
        url = f"ws://127.0.0.1:{self._port}/v1/realtime?model=good"
        try:
            async with (
                asyncio.timeout(_ENDS_WITHIN_S),
                connect(url, proxy=None, open_timeout=None) as client,
            ):
                await client.send(json.dumps({"type": "session.update", "model": "good"}))
                if json.loads(await client.recv()) != _ANSWERS[0]:
                    self._findings.add("a good session gets another's answer", b"")
        except (OSError, TimeoutError, WebSocketException) as error:
            self._findings.add(f"a good session: {error!r}", b"")


async def fuzz_websocket(seed: int, count: int) -> Findings:
    """``count`` sessions, ``_AT_ONCE`` at a time."""
    findings, rng = Findings(), random.Random(seed)
    # Of those that break a handshake some are down for a moment.
    instances = [*(Instance("m") for _ in range(6)), Instance("good")]
    for instance in instances:
        await instance.start()
    with errors_found(findings):
        config = config_for(instances, profiles=(None,), **_SECTIONS)  # type: ignore[arg-type]
        async with running_gateway(config) as running:
            await eventually(lambda: set(running.gateway.fleet.models()) == {"m", "good"})
            client = _Client(running.port, rng, findings)
            async with _watched(findings):
                await repeat(client.session, client.good, count, _AT_ONCE)
            await note_unless_settled(running, findings)
    for instance in instances:
        await instance.close()
        for complaint in instance.complaints[:5]:
            findings.add("the instance got: " + complaint, b"")
    return findings


@contextlib.asynccontextmanager
async def _watched(findings: Findings) -> AsyncIterator[None]:
    """What must not be: memory beyond what all sessions of the moment may hold, and a turn of the
    event loop, which clients and instances share, that takes long.
    """
    before_mb = most_mb = resident_mb()
    longest_s = 0.0

    async def look() -> None:
        nonlocal most_mb, longest_s
        while True:
            most_mb = max(most_mb, resident_mb())
            # Of the processor, as others may have the machine.
            began_s = process_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, process_time() - began_s)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()
    if most_mb - before_mb > _MOST_GROWTH_MB:
        findings.add(f"memory grew by {most_mb - before_mb:.0f} MB", b"")
    if longest_s > _LONGEST_TURN_S:
        findings.add(f"a turn of the event loop took {longest_s:.1f} s", b"")
