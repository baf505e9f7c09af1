"""/v1/chat/completions and /v1/completions: chunks and bodies with vLLM's fields in vLLM's order.

Chunks are built from byte templates: a token costs one concatenation and no JSON encoding.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from hetero_gateway.engines.vllm import DONE
from hetero_gateway.lab.emulator.bodies import MOST_LOGPROBS, chat_ask, completion_ask
from hetero_gateway.lab.emulator.reply import FINGERPRINT, EmulatedReply, ReplyChoice, ReplyHead
from hetero_gateway.lab.emulator.text import Json, unescape, words

_FINGERPRINT = b',"system_fingerprint":"%b"' % FINGERPRINT.encode()
_TRANSFERS = b',"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
_HANDED_OVER = b'"kv_transfer_params":'
quoted = msgspec.json.encode  # a JSON string, or null


class _OpenAIReply(EmulatedReply):
    """The common parts of both endpoints: ids, usage, the closing chunks."""

    kind = b""  # a body's "object"
    chunk_kind = b""
    unfinished_end = b'"finish_reason":null'  # of a choice in a chunk that is not its last
    body_end = _TRANSFERS

    def part(self, choice: ReplyChoice, piece: bytes, end: bytes) -> bytes:
        """The choice of a chunk with this piece of text."""
        raise NotImplementedError

    def whole(self, choice: ReplyChoice, end: bytes) -> bytes:
        """The choice of a body."""
        raise NotImplementedError

    def logprobs(self, choice: ReplyChoice, first: int, end: int) -> dict[str, Any]:
        """Of a choice's tokens from the ``first`` on."""
        raise NotImplementedError

    def _start(self, kind: bytes, choices: bytes) -> bytes:
        """A document, up to and with its choices."""
        return b'{"id":%b,"object":"%b","created":%d,"model":%b,"choices":[%b]' % (
            quoted(self.id),
            kind,
            self.created,
            quoted(self.model),
            choices,
        )

    def chunk(self, choices: bytes) -> bytes:
        """An event's start, up to and with its choices."""
        return b"data: " + self._start(self.chunk_kind, choices)

    def _usage(self, completion_tokens: int) -> bytes:
        prompt = self.prompt_tokens
        return b'"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d' % (
            prompt,
            prompt + completion_tokens,
            completion_tokens,
        )

    def continuous(self, completion_tokens: int) -> bytes:
        """The usage in a chunk, if every chunk should have it."""
        if not self.ask.continuous_usage:
            return b""
        return b',%b,"completion_tokens_details":null}' % self._usage(completion_tokens)

    def _probable(self, choices: bytes, choice: ReplyChoice, first: int, end: int) -> bytes:
        """A choice with its probabilities inserted, if requested."""
        if self.ask.top_logprobs is None:
            return choices
        told = msgspec.json.encode(self.logprobs(choice, first, end))
        # The mark cannot occur in a text, whose quotes are escaped.
        return choices.replace(b'"logprobs":null', b'"logprobs":' + told, 1)

    def delta(self, choice: ReplyChoice) -> bytes:
        emitted = choice.emitted
        piece = choice.pieces[emitted - 1]
        if self.ask.tool is not None:
            data = self.chunk(self.part(choice, piece, self.unfinished_end))
        else:
            if not choice.head:
                template = self.chunk(self.part(choice, b"\0", self.unfinished_end))
                choice.head, choice.tail = template.split(b"\0")
                if not self.ask.continuous_usage:
                    choice.tail += b"}\n\n"
            data = choice.head + piece + choice.tail
        if self.ask.continuous_usage or self.ask.tool is not None:
            data += self.continuous(emitted) + b"}\n\n"
        return self._probable(data, choice, emitted - 1, emitted)

    def last_delta(self, choice: ReplyChoice) -> bytes:
        count = len(choice.pieces)
        part = self.part(choice, choice.pieces[-1], _end(choice))
        data = self.chunk(self._probable(part, choice, count - 1, count))
        data += self.continuous(choice.emitted)
        # It is in the stream's last chunk, which is the usage if there is one.
        if self.unfinished == 1 and not self.ask.include_usage:
            data += _FINGERPRINT
        return data + b"}\n\n"

    def closing(self) -> bytes:
        if not self.ask.include_usage:
            return DONE
        usage = self._usage(self.completion_tokens)
        if self.says_cached:
            usage += b',"prompt_tokens_details":{"cached_tokens":%d}' % self.cached_tokens
        return b"%b,%b}%b}\n\n%b" % (self.chunk(b""), usage, _FINGERPRINT, DONE)

    def body(self) -> bytes:
        choices = b",".join(
            self._probable(self.whole(c, _end(c)), c, 0, len(c.pieces)) for c in self.choices
        )
        details = b"null"
        if self.says_cached:
            details = (
                b'{"cached_tokens":%d,"created_cache_tokens":null,"multimodal_tokens":null}'
                % self.cached_tokens
            )
        return (
            b'%b,"service_tier":null%b,%b,"prompt_tokens_details":%b,'
            b'"completion_tokens_details":null}%b'
        ) % (
            self._start(self.kind, choices),
            _FINGERPRINT,
            self._usage(self.completion_tokens),
            details,
            self._body_end(),
        )

    def _body_end(self) -> bytes:
        if not self.handed_over:
            return self.body_end
        told = _HANDED_OVER + self.handed_over
        return self.body_end.replace(_HANDED_OVER + b"null", told)


def _end(choice: ReplyChoice) -> bytes:
    """Why a choice ends."""
    return b'"finish_reason":"%b","stop_reason":%b' % (
        choice.finish_reason.encode(),
        quoted(choice.stop_reason),
    )


class CompletionReply(_OpenAIReply):
    """/v1/completions."""

    id_prefix = "cmpl-"
    kind = chunk_kind = b"text_completion"
    unfinished_end = b'"finish_reason":null,"stop_reason":null'

    def __init__(self, body: Json, head: ReplyHead) -> None:
        super().__init__(completion_ask(body), head)

    def logprobs(self, choice: ReplyChoice, first: int, end: int) -> dict[str, Any]:
        before = sum(len(unescape(piece)) for piece in choice.pieces[:first])
        return completion_logprobs(choice.pieces[first:end], self.ask.top_logprobs or 0, before)

    def part(self, choice: ReplyChoice, piece: bytes, end: bytes) -> bytes:
        return (
            b'{"index":%d,"text":"%b","logprobs":null,%b,"prompt_token_ids":null,"token_ids":null}'
        ) % (choice.index, piece, end)

    def whole(self, choice: ReplyChoice, end: bytes) -> bytes:
        return (
            b'{"index":%d,"text":"%b","logprobs":null,%b,"token_ids":null,"prompt_logprobs":null,'
            b'"prompt_token_ids":null,"routed_experts":null}'
        ) % (choice.index, choice.text, end)


class ChatReply(_OpenAIReply):
    """/v1/chat/completions: a role chunk per choice, then text or one tool call."""

    id_prefix = "chatcmpl-"
    kind = b"chat.completion"
    chunk_kind = b"chat.completion.chunk"
    body_end = b',"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null' + _TRANSFERS

    def __init__(self, body: Json, head: ReplyHead) -> None:
        super().__init__(chat_ask(body, head.model), head)

    def opening(self) -> bytes:
        chunks = []
        for choice in self.choices:
            role = (
                b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,'
                b'"finish_reason":null}'
            ) % choice.index
            chunks.append(
                b'%b%b,"prompt_token_ids":null,"prompt_text":null}\n\n'
                % (self.chunk(role), self.continuous(0))
            )
        return b"".join(chunks)

    def logprobs(self, choice: ReplyChoice, first: int, end: int) -> dict[str, Any]:
        return chat_logprobs(choice.pieces[first:end], self.ask.top_logprobs or 0)

    def part(self, choice: ReplyChoice, piece: bytes, end: bytes) -> bytes:
        if self.ask.tool is None:
            delta = b'{"content":"%b"}' % piece
        elif choice.emitted > 1:
            delta = b'{"tool_calls":[{"index":0,"function":{"arguments":"%b"}}]}' % piece
        else:
            delta = b'{"tool_calls":[%b]}' % self._tool_call(choice, piece, b'"index":0,')
        return b'{"index":%d,"delta":%b,"logprobs":null,%b,"token_ids":null}' % (
            choice.index,
            delta,
            end,
        )

    def whole(self, choice: ReplyChoice, end: bytes) -> bytes:
        content, calls = b'"%b"' % choice.text, b""
        if self.ask.tool:
            content, calls = b"null", b',"tool_calls":[%b]' % self._tool_call(choice, choice.text)
        return (
            b'{"index":%d,"message":{"role":"assistant","content":%b,"refusal":null,'
            b'"annotations":null,"audio":null,"function_call":null%b,"reasoning":null},'
            b'"logprobs":null,%b,"token_ids":null,"routed_experts":null}'
        ) % (choice.index, content, calls, end)

    def _tool_call(self, choice: ReplyChoice, text: bytes, place: bytes = b"") -> bytes:
        call_id = f"chatcmpl-tool-{self.id.removeprefix(self.id_prefix)}-{choice.index}"
        return b'{"id":%b,"type":"function",%b"function":{"name":%b,"arguments":"%b"}}' % (
            quoted(call_id),
            place,
            quoted(self.ask.tool),
            text,
        )


# Log probabilities. There is no model behind them: a token's own is drawn from its text, and the
# alternatives are other words, each less probable than the one before.

_LEAST = -4.0
_APART = 0.25


def chat_logprobs(pieces: Sequence[bytes], top: int) -> dict[str, Any]:
    """Of a chat's choice or chunk.

    Args:
        pieces: tokens, as escaped in a JSON string.
        top: how many tokens to name at each place.
    """
    content = []
    for token, logprob, others in map(_sampled, pieces):
        named = [(token, logprob), *others][:top]
        content.append({**_entry(token, logprob), "top_logprobs": [_entry(*n) for n in named]})
    return {"content": content}


def completion_logprobs(pieces: Sequence[bytes], top: int, offset: int) -> dict[str, Any]:
    """Of a completion's choice or chunk, whose text begins at the ``offset``-th character."""
    offsets, logprobs, tokens, tops = [], [], [], []
    for token, logprob, others in map(_sampled, pieces):
        offsets.append(offset)
        logprobs.append(logprob)
        tokens.append(token)
        # The sampled one is always named.
        tops.append(dict([(token, logprob), *others][: max(top, 1)]))
        offset += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": logprobs,
        "tokens": tokens,
        "top_logprobs": tops,
    }


def _sampled(piece: bytes) -> tuple[str, float, list[tuple[str, float]]]:
    """A token, its log probability, and the alternatives, the likeliest first."""
    token = unescape(piece)
    drawn = int.from_bytes(hashlib.blake2b(piece, digest_size=4).digest(), "big")
    logprob = _LEAST * drawn / 2**32 / 4
    others = dict.fromkeys(word.decode() for word in words(drawn, 2 * MOST_LOGPROBS + 64))
    others.pop(token, None)
    named = list(others)[: MOST_LOGPROBS - 1]
    return token, logprob, [(o, _LEAST - _APART * i) for i, o in enumerate(named)]


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
