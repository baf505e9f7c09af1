"""Clients whose every answer can be distinguished from every other, and a verdict on each.

A request carries a tag as its ``x-request-id``. The emulated instance puts the tag into the ``id``
of the answer (of each event, too), and its text is a function of the body, so that a client knows
what it must get, byte for byte. Anything else is a violation: another's tag or text, bytes behind
the end, a broken stream that ends with [DONE], no outcome at all, an answer that the gateway may
not give.
"""

import asyncio
import enum
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import httptools

from hetero_gateway.lab.emulator.text import words
from tests.chaos.faults import EVIL, linger
from tests.chaos.instances import MODEL

# Above the gateway's own time-out for a whole exchange: who waits longer was forgotten.
PATIENCE_S = 60.0
DONE = b"data: [DONE]"


class Outcome(enum.StrEnum):
    """What came of a request. Each has exactly one."""

    COMPLETED = "completed"  # whole, and its own
    REFUSED = "refused"  # an error answer, whole, in OpenAI's shape
    BROKEN = "broken"  # an answer that began and was broken off, visibly
    EMPTY = "empty"  # what an instance answered: 200 without a body
    LEFT = "left"  # the client went away
    KILLED = "killed"  # it was in a worker that was killed
    UNSENT = "unsent"  # a kept connection was closed as it was sent: sent again, as clients do


@dataclass(slots=True)
class Request:
    """One request, and what came back."""

    tag: str
    stream: bool
    chat: bool
    tokens: int
    body: bytes
    sent_s: float = 0.0
    ended_s: float = 0.0
    reused: bool = False
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    content: bytearray = field(default_factory=bytearray)
    raw_bytes: int = 0
    whole: bool = False
    behind: bytes = b""  # bytes after the end
    failure: str | None = None

    @property
    def target(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def expected_id(self) -> str:
        return ("chatcmpl-" if self.chat else "cmpl-") + self.tag

    @property
    def expected_text(self) -> str:
        """What every emulated instance of seed 0 answers to this body."""
        rng = random.Random(hashlib.blake2b(self.body, digest_size=8, key=b"0").digest())
        rng.random()
        return b"".join(words(rng.getrandbits(32), self.tokens)).decode()

    def head(self) -> bytes:
        return (
            f"POST {self.target} HTTP/1.1\r\nhost: chaos\r\ncontent-type: application/json\r\n"
            f"x-request-id: {self.tag}\r\ncontent-length: {len(self.body)}\r\n\r\n"
        ).encode()


def draw_request(rng: random.Random, tag: str) -> Request:
    stream, chat = rng.random() < 0.6, rng.random() < 0.7
    tokens = rng.choice((1, 4, 8, 16, 32))
    text = f"{tag} " + "x" * rng.choice((10, 200, 2000, 20000))
    document: dict[str, Any] = {
        "model": MODEL, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True,
        "stream": stream,
    }  # fmt: skip
    if stream:
        document["stream_options"] = {"include_usage": True}
    if chat:
        document["messages"] = [{"role": "user", "content": text}]
    else:
        document["prompt"] = text
    return Request(tag, stream, chat, tokens, json.dumps(document).encode())


class Connection(asyncio.Protocol):
    """A client's connection; one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.open = True
        self.port = 0
        self.local_port = 0
        self.killed_s: float | None = None  # when the worker that had it was killed
        self.requests = 0
        self._request: Request | None = None
        self._done: asyncio.Future[None] | None = None
        self._stray: Callable[[bytes], None] = lambda data: None

    def watch(self, stray: Callable[[bytes], None]) -> None:
        """``stray`` gets bytes that come when none are due."""
        self._stray = stray

    def expect(self, request: Request) -> asyncio.Future[None]:
        """What comes from now on is this request's, until the future ends."""
        self._request = request
        request.reused = self.requests > 0
        self.requests += 1
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        return self._done

    def leave(self, *, reset: bool) -> None:
        assert self.transport is not None
        self.open = False
        if self.transport.is_closing():
            return  # the gateway, or the end of its worker, was a moment sooner
        if reset:
            linger(self.transport)
            self.transport.abort()
        else:
            self.transport.close()

    # asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.local_port = transport.get_extra_info("sockname")[1]

    def data_received(self, data: bytes) -> None:
        request = self._request
        if request is None or request.whole:
            if request is not None:
                request.behind += data
            self._stray(data)
            return
        request.raw_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            request.failure = f"not HTTP: {error}: {data[:60]!r}"
            self.leave(reset=True)
            self._finish()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._finish()

    # httptools'

    def on_message_begin(self) -> None:
        request = self._request
        if request is not None and request.whole:
            request.failure = "two answers"

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._request is not None
        self._request.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        assert self._request is not None
        self._request.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        assert self._request is not None
        self._request.content += body

    def on_message_complete(self) -> None:
        request = self._request
        assert request is not None
        request.whole = True
        self.open = self.open and self._parser.should_keep_alive()
        self._finish()

    def _finish(self) -> None:
        done, self._done = self._done, None
        if done is not None and not done.done():
            done.set_result(None)


def judge(request: Request, was_empty: Callable[[Request], bool]) -> tuple[Outcome, str | None]:
    """(outcome, violation or None) of a request whose client stayed to the end.

    Args:
        was_empty: whether the answer's instance was answering 200 with an empty body then.
    """
    if request.failure is not None:
        return Outcome.BROKEN, request.failure
    if request.behind:
        return Outcome.BROKEN, f"bytes behind the end: {request.behind[:80]!r}"
    if EVIL in request.content:
        return Outcome.BROKEN, "bytes from behind an instance's answer"
    if not request.status:
        if request.raw_bytes:
            return Outcome.BROKEN, "a part of a head, then the end"
        if request.reused:
            return Outcome.UNSENT, None
        return Outcome.BROKEN, "closed without an answer"
    if request.headers.get(b"x-request-id") != request.tag.encode():
        return Outcome.BROKEN, f"x-request-id is {request.headers.get(b'x-request-id')!r}"
    if request.status != 200:
        return Outcome.REFUSED, _refusal_violation(request)
    if request.whole and not request.content:
        return Outcome.EMPTY, None if was_empty(request) else "an empty answer of nobody's"
    return (_judge_stream if request.stream else _judge_plain)(request)


def _refusal_violation(request: Request) -> str | None:
    if not request.whole:
        return f"{request.status}, broken off"
    # What an instance answered passes; what the gateway answers by itself is one of these.
    allowed = {429, 502, 503, 504}
    if b"x-hetero-gateway-instance" in request.headers:
        allowed |= {500}
    if request.status not in allowed:
        return f"{request.status}: {bytes(request.content[:200])!r}"
    try:
        document = json.loads(request.content)
    except ValueError:
        return f"{request.status} whose body is not JSON: {bytes(request.content[:80])!r}"
    if not isinstance(document.get("error"), dict):
        return f"{request.status} whose body is not OpenAI's"
    return None


def _judge_plain(request: Request) -> tuple[Outcome, str | None]:
    if not request.whole:
        # As much as came must be its own.
        whole = b'{"id":"%b"' % request.expected_id.encode()
        begun = bytes(request.content[: len(whole)])
        return Outcome.BROKEN, None if whole.startswith(begun) else f"mixed: {begun!r}"
    try:
        document = json.loads(request.content)
        choice = document["choices"][0]
        text = choice["message"]["content"] if request.chat else choice["text"]
    except (ValueError, KeyError, TypeError) as error:
        return Outcome.BROKEN, f"200 that is no answer: {error}: {bytes(request.content[:80])!r}"
    if document["id"] != request.expected_id:
        return Outcome.BROKEN, f"mixed: id {document['id']!r}"
    if text != request.expected_text:
        return Outcome.BROKEN, f"mixed: text {text[:60]!r}"
    return Outcome.COMPLETED, None


def _judge_stream(request: Request) -> tuple[Outcome, str | None]:
    content = bytes(request.content)
    text, usage, error, own = "", None, False, None
    *events, tail = content.split(b"\n\n")
    for event in events:
        if event == DONE:
            continue
        if event.startswith(b": continued by "):
            own = len(text) if own is None else own  # what follows are another instance's words
            continue
        try:
            document = json.loads(event.removeprefix(b"data: "))
        except ValueError:
            # An error event of the gateway's is an event of its own, whatever came in front of it.
            return Outcome.BROKEN, f"an event that is none: {event[:80]!r}"
        if "error" in document:
            error = True
            continue
        if document["id"] != request.expected_id:
            return Outcome.BROKEN, f"mixed: id {document['id']!r}"
        for choice in document["choices"]:
            text += (choice["delta"].get("content") or "") if request.chat else choice["text"]
        usage = document.get("usage") or usage
    done = DONE in content
    if not request.expected_text.startswith(text[:own]):
        return Outcome.BROKEN, f"mixed: text {text[-60:]!r}"
    if request.whole and done and not error:
        whole = (
            len(text.split()) == request.tokens
            if own is not None
            else (text == request.expected_text)
        )
        if not whole or tail or not content.endswith(DONE + b"\n\n"):
            return Outcome.BROKEN, f"[DONE] behind a part of the text: {content[-80:]!r}"
        if usage is None or usage["completion_tokens"] != request.tokens:
            return Outcome.BROKEN, f"usage {usage!r} for {request.tokens} tokens"
        return Outcome.COMPLETED, None
    if done:
        return Outcome.BROKEN, f"a broken stream ends with [DONE]: {content[-120:]!r}"
    if request.whole and not error:
        return Outcome.BROKEN, f"a broken stream ends as if it were whole: {content[-120:]!r}"
    return Outcome.BROKEN, None
