"""/v1/chat/completions and /v1/completions: chunks and bodies with vLLM's fields in vLLM's order.

Chunks are built from byte templates: a token costs one concatenation and no JSON encoding.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hetero_gateway.engines.vllm import DONE
from hetero_gateway.lab.emulator.logprobs import chat_logprobs, completion_logprobs
from hetero_gateway.lab.emulator.reply import FINGERPRINT, Choice, Reply

_FINGERPRINT = b',"system_fingerprint":"%b"' % FINGERPRINT.encode()


def quoted(text: str | None) -> bytes:
    """A JSON string, or null."""
    return msgspec.json.encode(text)


class _OpenAIReply(Reply):
    """What both endpoints share: ids, usage, the closing chunks."""

    kind = b""  # the chunk's "object"
    unfinished_tail = b""  # closes the choice of a chunk that is not the last

    def _chunk(self, choices: bytes) -> bytes:
        """The chunk's start, up to and with its choices."""
        return b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[%b]' % (
            quoted(self.id),
            self.kind,
            self.created,
            quoted(self.model),
            choices,
        )

    def _usage(self, completion_tokens: int) -> bytes:
        prompt = self.prompt_tokens
        return b'"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d' % (
            prompt,
            prompt + completion_tokens,
            completion_tokens,
        )

    def _details(self) -> bytes:
        """What ends the usage of an answer that is not streamed."""
        details = b"null"
        if self.says_cached:
            details = (
                b'{"cached_tokens":%d,"created_cache_tokens":null,"multimodal_tokens":null}'
                % self.cached_tokens
            )
        return b',"prompt_tokens_details":%b,"completion_tokens_details":null}' % details

    def _continuous(self, completion_tokens: int) -> bytes:
        if not self.ask.continuous_usage:
            return b""
        return b",%b%b" % (self._usage(completion_tokens), b',"completion_tokens_details":null}')

    def logprobs(self, choice: Choice, first: int, end: int) -> dict[str, Any]:
        """Of a choice's tokens from the ``first`` on."""
        raise NotImplementedError

    def _probable(self, choices: bytes, choice: Choice, first: int, end: int) -> bytes:
        """A choice with its probabilities in their place, where they are asked for."""
        if self.ask.top_logprobs is None:
            return choices
        told = msgspec.json.encode(self.logprobs(choice, first, end))
        # The mark cannot stand in a text, whose quotes are escaped.
        return choices.replace(b'"logprobs":null', b'"logprobs":' + told, 1)

    def delta(self, choice: Choice) -> bytes:
        data = self._delta(choice)
        return self._probable(data, choice, choice.emitted - 1, choice.emitted)

    def _delta(self, choice: Choice) -> bytes:
        if not choice.head:
            choice.head, choice.tail = self._templates(choice)
        data = choice.head + choice.pieces[choice.emitted - 1] + choice.tail
        if self.ask.continuous_usage:
            return data + self._continuous(choice.emitted) + b"}\n\n"
        return data

    def _templates(self, choice: Choice) -> tuple[bytes, bytes]:
        """What stands before and after a token's text."""
        whole = self._chunk(b'{"index":%d,%b' % (choice.index, self.unfinished_tail))
        head, tail = whole.split(b"\0")
        return head, tail if self.ask.continuous_usage else tail + b"}\n\n"

    def closing(self) -> bytes:
        if not self.ask.include_usage:
            return DONE
        usage = self._usage(self.completion_tokens)
        if self.says_cached:
            usage += b',"prompt_tokens_details":{"cached_tokens":%d}' % self.cached_tokens
        return b"%b,%b}%b}\n\n%b" % (self._chunk(b""), usage, _FINGERPRINT, DONE)

    def _end(self, choice: Choice) -> bytes:
        """What ends a choice's last chunk: usage where asked, else the fingerprint once."""
        data = self._continuous(choice.emitted)
        # It stands on the stream's last chunk, which is the usage where there is one.
        if self.unfinished == 1 and not self.ask.include_usage:
            data += _FINGERPRINT
        return data + b"}\n\n"


class CompletionReply(_OpenAIReply):
    """/v1/completions."""

    kind = b"text_completion"
    unfinished_tail = (
        b'"text":"\0","logprobs":null,"finish_reason":null,"stop_reason":null,'
        b'"prompt_token_ids":null,"token_ids":null}'
    )

    def logprobs(self, choice: Choice, first: int, end: int) -> dict[str, Any]:
        before = sum(len(msgspec.json.decode(b'"%b"' % p)) for p in choice.pieces[:first])
        return completion_logprobs(choice.pieces[first:end], self.ask.top_logprobs or 0, before)

    def last_delta(self, choice: Choice) -> bytes:
        inner = (
            b'{"index":%d,"text":"%b","logprobs":null,"finish_reason":"%b","stop_reason":%b,'
            b'"prompt_token_ids":null,"token_ids":null}'
        ) % (
            choice.index,
            choice.pieces[-1],
            choice.finish_reason.encode(),
            quoted(choice.stop_reason),
        )
        inner = self._probable(inner, choice, len(choice.pieces) - 1, len(choice.pieces))
        return self._chunk(inner) + self._end(choice)

    def body(self) -> bytes:
        choices = b",".join(
            self._probable(self._choice(c), c, 0, len(c.pieces)) for c in self.choices
        )
        return b"%b%b,%b%b%b" % (
            self._chunk(choices).removeprefix(b"data: "),
            b',"service_tier":null' + _FINGERPRINT,
            self._usage(self.completion_tokens),
            self._details(),
            b',"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}',
        )

    def _choice(self, c: Choice) -> bytes:
        return (
            b'{"index":%d,"text":"%b","logprobs":null,"finish_reason":"%b","stop_reason":%b,'
            b'"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,'
            b'"routed_experts":null}'
        ) % (c.index, c.text, c.finish_reason.encode(), quoted(c.stop_reason))


class ChatReply(_OpenAIReply):
    """/v1/chat/completions: a role chunk per choice, then text or one tool call."""

    kind = b"chat.completion.chunk"
    unfinished_tail = (
        b'"delta":{"content":"\0"},"logprobs":null,"finish_reason":null,"token_ids":null}'
    )

    def opening(self) -> bytes:
        chunks = []
        for choice in self.choices:
            inner = (
                b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,'
                b'"finish_reason":null}'
            ) % choice.index
            chunks.append(
                b'%b%b,"prompt_token_ids":null,"prompt_text":null}\n\n'
                % (self._chunk(inner), self._continuous(0))
            )
        return b"".join(chunks)

    def logprobs(self, choice: Choice, first: int, end: int) -> dict[str, Any]:
        return chat_logprobs(choice.pieces[first:end], self.ask.top_logprobs or 0)

    def _delta(self, choice: Choice) -> bytes:
        if self.ask.tool is None:
            return super()._delta(choice)
        inner = (
            b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null,"token_ids":null}'
        ) % (choice.index, self._tool_delta(choice, choice.pieces[choice.emitted - 1]))
        return b"%b%b}\n\n" % (self._chunk(inner), self._continuous(choice.emitted))

    def last_delta(self, choice: Choice) -> bytes:
        inner = (
            b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":"%b","stop_reason":%b,'
            b'"token_ids":null}'
        ) % (
            choice.index,
            self._tool_delta(choice, choice.pieces[-1])
            if self.ask.tool is not None
            else b'{"content":"%b"}' % choice.pieces[-1],
            choice.finish_reason.encode(),
            quoted(choice.stop_reason),
        )
        inner = self._probable(inner, choice, len(choice.pieces) - 1, len(choice.pieces))
        return self._chunk(inner) + self._end(choice)

    def body(self) -> bytes:
        choices = b",".join(
            self._probable(self._choice(c), c, 0, len(c.pieces)) for c in self.choices
        )
        start = self._chunk(choices).removeprefix(b"data: ")
        return b"%b%b,%b%b%b" % (
            start.replace(b'"chat.completion.chunk"', b'"chat.completion"', 1),
            b',"service_tier":null' + _FINGERPRINT,
            self._usage(self.completion_tokens),
            self._details(),
            b',"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,'
            b'"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}',
        )

    def _choice(self, choice: Choice) -> bytes:
        return (
            b'{"index":%d,"message":{"role":"assistant",%b,"refusal":null,"annotations":null,'
            b'"audio":null,"function_call":null%b,"reasoning":null},"logprobs":null,'
            b'"finish_reason":"%b","stop_reason":%b,"token_ids":null,"routed_experts":null}'
        ) % (
            choice.index,
            b'"content":null' if self.ask.tool else b'"content":"%b"' % choice.text,
            b',"tool_calls":[%b]' % self._tool_call(choice) if self.ask.tool else b"",
            choice.finish_reason.encode(),
            quoted(choice.stop_reason),
        )

    def _call_id(self, choice: Choice) -> str:
        return f"chatcmpl-tool-{self.id.removeprefix('chatcmpl-')}-{choice.index}"

    def _tool_call(self, choice: Choice) -> bytes:
        return b'{"id":%b,"type":"function","function":{"name":%b,"arguments":"%b"}}' % (
            quoted(self._call_id(choice)),
            quoted(self.ask.tool),
            choice.text,
        )

    def _tool_delta(self, choice: Choice, piece: bytes) -> bytes:
        if choice.emitted > 1:
            return b'{"tool_calls":[{"index":0,"function":{"arguments":"%b"}}]}' % piece
        return (
            b'{"tool_calls":[{"id":%b,"type":"function","index":0,'
            b'"function":{"name":%b,"arguments":"%b"}}]}'
        ) % (quoted(self._call_id(choice)), quoted(self.ask.tool), piece)
