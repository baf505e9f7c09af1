"""Chats with the text of a trace with prefixes (``files/prefix_trace``).

Each block of the trace becomes words that depend only on its id, ``bytes_per_token`` bytes a token,
so that prompts begin alike if their ids do. Text after the last known block is unique to the
request. A turn that continues the session's last one sends that one's messages, the actual answer,
and new text up to the trace's length: so it has to wait for the answer. Any other turn is a system
message, up to the first place where texts of the trace differ, and a user's.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hetero_gateway.files.prefix_trace import TracedText
from hetero_gateway.files.trace import LoadRequest
from hetero_gateway.lab.load.client import Reply, stream_documents

# Tokens of a message's template, about.
_MESSAGE_TOKENS = 4

Message = dict[str, str]


@dataclass(slots=True)
class _Turn:
    """One request, and the data that the next turn of its session needs."""

    request: LoadRequest
    text: TracedText
    continues: "_Turn | None"
    messages: list[Message] = field(default_factory=list)
    answer: str | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    is_continued: bool = False


class Conversations:
    """Makes the messages of one run's requests.

    Args:
        requests: all with a ``text``, in the order of sending.
        pool: filler words (``prompts.filler_pool``).
        bytes_per_token: length of the text for a token.
    """

    def __init__(self, requests: Sequence[LoadRequest], pool: str, bytes_per_token: float) -> None:
        self._pool = pool
        self._bytes_per_token = bytes_per_token
        self._turns: list[_Turn] = []
        self._part_ends = set[int]()
        latest: dict[int, _Turn] = {}
        for request in requests:
            text = request.text
            assert text is not None
            previous = latest.get(text.session)
            if previous is not None and not _goes_on(previous, text):
                previous = None
            turn = latest[text.session] = _Turn(request, text, previous)
            if previous is not None:
                previous.is_continued = True
            self._turns.append(turn)
            self._part_ends.update(first + count - 1 for first, count in text.runs)

    def wants_text(self, index: int) -> bool:
        """Whether a later turn continues this one's answer."""
        return self._turns[index].is_continued

    async def messages(self, index: int) -> list[Message]:
        """A turn's messages, once the previous turn is over."""
        turn = self._turns[index]
        previous = turn.continues
        if previous is None:
            turn.messages = self._opening(turn, index)
            return turn.messages
        await previous.over.wait()
        before = previous.request
        answer = previous.answer
        if answer is None:  # it failed: use the trace's words instead
            answer = self._words(f"answer {index} ", before.output_tokens)
        new = turn.request.input_tokens - before.input_tokens - before.output_tokens
        turn.messages = [
            *previous.messages,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": self._words(f"{index} ", new - _MESSAGE_TOKENS)},
        ]
        return turn.messages

    def finish(self, index: int, reply: Reply | None, *, stream: bool) -> None:
        """A turn is over, with its answer or without; to be called once for each."""
        turn = self._turns[index]
        if reply is not None and turn.is_continued:
            turn.answer = answer_text(reply, stream=stream)
        turn.over.set()
        turn.continues = None  # so that finished turns can be freed

    def _opening(self, turn: _Turn, index: int) -> list[Message]:
        request, text = turn.request, turn.text
        ids = _blocks_of(text)[: request.input_tokens // text.block_tokens]
        cut = next((i + 1 for i, block in enumerate(ids) if block in self._part_ends), 0)
        system, rest = ids[:cut], ids[cut:]
        own = request.input_tokens - len(ids) * text.block_tokens - 2 * _MESSAGE_TOKENS
        user = self._blocks(rest, text.block_tokens) + self._words(f"{index} ", own)
        messages = [{"role": "user", "content": user}]
        if system:
            content = self._blocks(system, text.block_tokens)
            messages.insert(0, {"role": "system", "content": content})
        return messages

    def _blocks(self, ids: Sequence[int], block_tokens: int) -> str:
        return "".join(self._words(f"b{block} ", block_tokens) for block in ids)

    def _words(self, start: str, tokens: int) -> str:
        """Text that begins with ``start`` and has the length of this many tokens, at least 1."""
        length = round(max(1, tokens) * self._bytes_per_token)
        at = random.Random(start).randrange(len(self._pool))
        text = start + self._pool[at : at + length]
        while len(text) < length:
            text += self._pool[: length - len(text)]
        return text[:length]


def _goes_on(previous: _Turn, text: TracedText) -> bool:
    """Whether a text begins with the whole of the session's last one."""
    blocks = _blocks_of(previous.text)
    return text.turn == previous.text.turn + 1 and _blocks_of(text)[: len(blocks)] == blocks


def _blocks_of(text: TracedText) -> list[int]:
    return [i for first, count in text.runs for i in range(first, first + count)]


def answer_text(reply: Reply, *, stream: bool) -> str | None:
    """The text of a chat's first choice; None if there is none."""
    if reply.failure is not None or reply.status != 200:
        return None
    body = b"".join(part for _, part in reply.parts) if reply.parts else reply.tail
    documents = stream_documents(body.splitlines()) if stream else [body]
    texts = []
    for document in documents:
        try:
            value: Any = msgspec.json.decode(document)
            for choice in value.get("choices", [])[:1]:
                message = choice.get("delta" if stream else "message") or {}
                texts.append(message.get("content") or "")
        except (msgspec.DecodeError, AttributeError):
            continue
    return "".join(texts) or None
