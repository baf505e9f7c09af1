"""One HTTP answer in progress: its sequences in the engine, and the bytes that go out.

The step loop calls ``on_token`` for every token of a streamed reply and ``on_finished`` for every
sequence that ends; ``openai``, ``other_apis`` and ``pooling`` have a subclass for each endpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import coroutine
from typing import Any, NamedTuple

import msgspec

from hetero_gateway.engines.vllm import ABORT, DONE
from hetero_gateway.lab.emulator.bodies import Ask
from hetero_gateway.lab.emulator.settings import BLOCK_TOKENS, OutputLengths
from hetero_gateway.lab.emulator.text import BYTES_PER_TOKEN, escape, words
from hetero_gateway.sim.engine import Sequence

FINGERPRINT = "vllm-0.32.0-emulated"
SSE = b"text/event-stream; charset=utf-8"
JSON = b"application/json"
# Documents of vLLM's, with all of their keys in order, and the values that never change.
DOCUMENTS = msgspec.json.decode(Path(__file__).with_name("documents.json").read_bytes())

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Spawn = Callable[[Coroutine[Any, Any, None]], object]


@dataclass(frozen=True, slots=True)
class Script:
    """``pieces`` has one entry per token: text as escaped in a JSON string."""

    pieces: list[bytes]
    finish_reason: str
    stop_reason: str | None = None


class ReplyChoice(Sequence):
    """One sequence of a reply."""

    __slots__ = (
        *("emitted", "finish_reason", "first_token_s", "head", "index"),
        *("pieces", "reply", "stop_reason", "tail"),
    )

    def __init__(
        self, reply: EmulatedReply, index: int, prompt_tokens: int, answer: Script, keys: list[int]
    ) -> None:
        super().__init__(prompt_tokens, len(answer.pieces), keys)
        self.reply = reply
        self.index = index
        self.pieces = answer.pieces
        self.finish_reason = answer.finish_reason
        self.stop_reason = answer.stop_reason
        self.emitted = 0
        self.first_token_s = 0.0  # wall clock
        self.head = b""  # of every chunk except the last, made once
        self.tail = b""

    @property
    def prompt_keys(self) -> list[int]:
        """Of the prompt's full blocks."""
        return self._keys[: self.prompt_tokens // BLOCK_TOKENS]

    @property
    def text(self) -> bytes:
        """The whole text, as escaped in a JSON string."""
        return b"".join(self.pieces)


class Outlet:
    """Writes a response from outside the request's own task, without a task switch per chunk.

    An ASGI ``send`` completes at once unless the client reads too slowly; then later data is
    queued here, as in a real vLLM, whose engine does not wait for its readers either.
    """

    def __init__(self, send: Send, spawn: Spawn) -> None:
        self._send = send
        self._spawn = spawn
        self._queue: deque[MutableMapping[str, Any]] | None = None

    def start(self, status: int, content_type: bytes, length: int | None = None) -> None:
        headers = [(b"content-type", content_type)]
        if length is not None:
            headers.insert(0, (b"content-length", b"%d" % length))
        self._put({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, body: bytes, more: bool = True) -> None:
        self._put({"type": "http.response.body", "body": body, "more_body": more})

    def _put(self, message: MutableMapping[str, Any]) -> None:
        if self._queue is not None:
            self._queue.append(message)
            return
        sending = self._send(message).__await__()
        try:
            waiting_for = next(sending)
        except StopIteration:
            return
        self._queue = deque()
        self._spawn(self._drain(sending, waiting_for))

    async def _drain(self, sending: Generator[Any, Any, None], waiting_for: Any) -> None:
        await _resume(sending, waiting_for)
        while self._queue:
            await self._send(self._queue.popleft())
        self._queue = None


@coroutine
def _resume(sending: Generator[Any, Any, None], waiting_for: Any) -> Generator[Any, Any, None]:
    """Continue with an awaitable that was already advanced to its first suspension."""
    yield waiting_for
    yield from sending


class ReplyHead(NamedTuple):
    """Properties of the request that the answer contains.

    Args:
        suffix: of the answer's id.
        model: the name to answer under.
        created: Unix time, s.
        arrived_s: wall clock of the arrival.
    """

    suffix: str
    model: str
    created: int
    arrived_s: float


class EmulatedReply:
    """The common parts of every endpoint's reply."""

    id_prefix = ""
    is_anthropic = False
    outlet: Outlet
    # With transfers of KV caches: callbacks at a choice's end, when the client leaves, and to break
    # the connection; the answer's kv_transfer_params; and the prompt tokens that the prefill
    # instance had cached.
    on_end: Callable[[ReplyChoice], None] | None = None
    on_leave: Callable[[], None] | None = None
    on_break: Callable[[], object] = staticmethod(lambda: None)
    handed_over = b""
    remote_cached_tokens: int | None = None

    def __init__(self, ask: Ask, head: ReplyHead) -> None:
        self.ask = ask
        self.id = self.id_prefix + head.suffix
        self.model = head.model
        self.created = head.created
        self.arrived_s = head.arrived_s
        self.streamed = ask.stream
        self.choices: list[ReplyChoice] = []
        self.unfinished = 0
        self.says_cached = False  # whether its usage says how many prompt tokens were cached
        self._opened = False

    def add(self, prompt_tokens: int, answer: Script, keys: list[int]) -> None:
        """One more sequence; ``keys`` of its blocks, none without a prefix cache."""
        self.choices.append(ReplyChoice(self, len(self.choices), prompt_tokens, answer, keys))
        self.unfinished += 1

    @property
    def prompt_tokens(self) -> int:
        return sum(self.ask.prompt_tokens)

    @property
    def cached_tokens(self) -> int:
        """Cached prompt tokens, over every prompt, as its first sequence found them."""
        if self.remote_cached_tokens is not None:
            return self.remote_cached_tokens
        return sum(choice.cached_tokens for choice in self.choices[:: self.ask.n])

    @property
    def completion_tokens(self) -> int:
        """Tokens emitted so far, over every choice."""
        return sum(choice.emitted for choice in self.choices)

    def open(self, send: Send, spawn: Spawn) -> None:
        """Take the response over; a stream's headers go out now, before any token."""
        self.outlet = Outlet(send, spawn)
        if self.streamed:
            self.outlet.start(200, SSE)

    def _opening(self) -> bytes:
        opened, self._opened = self._opened, True
        return b"" if opened else self.opening()

    # -- called by the step loop

    def on_token(self, choice: ReplyChoice) -> None:
        """A streamed choice has one more token (``choice.emitted`` counts it)."""
        opening = self._opening()
        if choice.emitted < choice.output_tokens:
            self.outlet.write(opening + self.delta(choice))
            return
        data = opening + self.last_delta(choice)
        self.unfinished -= 1
        if self.unfinished:
            self.outlet.write(data)
        else:
            self.outlet.write(data + self.closing(), more=False)

    def on_finished(self) -> None:
        """A choice of a reply that is not streamed is complete."""
        self.unfinished -= 1
        if not self.unfinished:
            body = self.body()
            self.outlet.start(200, JSON, len(body))
            self.outlet.write(body, more=False)

    def abort(self) -> None:
        """End every unfinished choice here, like a stopped vLLM: finish_reason "abort" and a
        ``[DONE]`` that proves nothing."""
        unfinished = [c for c in self.choices if c.emitted < c.output_tokens]
        data = self._opening()
        for choice in unfinished:
            choice.pieces = [*choice.pieces[: choice.emitted], b""]
            choice.finish_reason = ABORT
            if self.streamed:
                data += self.last_delta(choice)
            self.unfinished -= 1
        if self.streamed:
            self.outlet.write(data + self.closing(), more=False)
        else:
            self.unfinished = 1
            self.on_finished()

    def fail(self) -> None:
        """End in an error of the engine, which a stream reports under status 200."""
        self.unfinished = 0
        if self.streamed:
            self.fail_stream()
            return
        document = DOCUMENTS["failure"]
        if self.is_anthropic:
            error = document["error"]
            told = {"type": error["type"], "message": error["message"]}
            document = {"type": "error", "error": told}
        body = msgspec.json.encode(document)
        self.outlet.start(500, JSON, len(body))
        self.outlet.write(body, more=False)

    def fail_stream(self) -> None:
        """Report it as chats and completions do: after what precedes the first token."""
        body = msgspec.json.encode(DOCUMENTS["failure"])
        self.outlet.write(self._opening() + b"data: %b\n\n%b" % (body, DONE), more=False)

    def left(self) -> None:
        """Nobody waits for it any more, or it has ended."""
        if self.unfinished and self.on_leave is not None:
            self.on_leave()

    def garble(self) -> None:
        """Answer something else, like an engine with another prompt's KV cache."""
        for choice in self.choices:
            other = words(hash(choice.text) & 0xFFFF | 1, len(choice.pieces))
            choice.pieces = other if other != choice.pieces else other[::-1]

    # -- formats

    def opening(self) -> bytes:
        """What precedes the first token of a stream."""
        return b""

    def delta(self, choice: ReplyChoice) -> bytes:
        """The chunk of a token that is not the choice's last."""
        return self.text_delta(choice.pieces[choice.emitted - 1])

    def last_delta(self, choice: ReplyChoice) -> bytes:
        """The chunk of the choice's last token."""
        return self.text_delta(choice.pieces[-1])

    def text_delta(self, piece: bytes) -> bytes:
        """The chunk of any token, if they are all alike."""
        raise NotImplementedError

    def closing(self) -> bytes:
        """What follows the last choice's last token."""
        raise NotImplementedError

    def body(self) -> bytes:
        """The whole answer when it is not streamed."""
        raise NotImplementedError


# The text of a sequence is decided before it runs. Only forced lengths are real properties of a
# request; the rest replaces a model:
# - ``ignore_eos`` runs to max_tokens, or by default to the end of the context window;
# - otherwise the length is drawn, at least min_tokens, and cut to max_tokens ("length");
# - a ``stop`` string ends it where it appears after min_tokens, ignore_eos or not, and is cut off;
# - a forced text (JSON) comes in tokens of 4 characters, whatever length was asked for.


def make_answer(ask: Ask, limit_tokens: int, lengths: OutputLengths, rng: Random) -> Script:
    """The answer of one sequence that may have at most ``limit_tokens`` tokens."""
    if ask.forced_text is not None:
        text = ask.forced_text
        pieces = [
            escape(text[i : i + BYTES_PER_TOKEN]) for i in range(0, len(text), BYTES_PER_TOKEN)
        ]
        whole = len(pieces) <= limit_tokens
        finish = ask.tool_finish if ask.tool else "stop"
        return Script(pieces[:limit_tokens], finish if whole else "length")
    # Always drawn, so that ignore_eos changes the length and not the words.
    drawn = max(lengths.draw(max(rng.random(), 1e-12)), ask.min_tokens)
    ends_itself = not ask.ignore_eos and drawn <= limit_tokens
    pieces = words(rng.getrandbits(32), drawn if ends_itself else limit_tokens)
    if ask.stop and (stopped := _stopped(ask, pieces)):
        return stopped
    return Script(pieces, "stop" if ends_itself else "length")


def _stopped(ask: Ask, pieces: list[bytes]) -> Script | None:
    """The answer cut where a stop string first appears; None if none does.

    Like vLLM, text before min_tokens is not searched.
    """
    text = b"".join(pieces).decode()
    start = sum(map(len, pieces[: ask.min_tokens]))
    found = [(text.find(stop, start), stop) for stop in ask.stop]
    found = [(at, stop) for at, stop in found if at >= 0]
    if not found:
        return None
    at, stop = min(found, key=lambda hit: hit[0] + len(hit[1]))
    kept: list[bytes] = []
    position = 0
    for piece in pieces:
        kept.append(piece[: max(0, at - position)])
        position += len(piece)
        if position >= at + len(stop):
            break
    return Script(kept, "stop", stop)
