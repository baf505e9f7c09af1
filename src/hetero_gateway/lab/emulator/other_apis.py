"""/v1/responses, /v1/messages and /v1/embeddings: small, and right in shape."""

from __future__ import annotations

import base64
import hashlib
import struct
from typing import Any

import msgspec

from hetero_gateway.lab.emulator.bodies import Ask
from hetero_gateway.lab.emulator.reply import Choice, Reply

EMBEDDING_DIMENSIONS = 8


def _event(data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), msgspec.json.encode(data))


def _plain(escaped: bytes) -> str:
    text: str = msgspec.json.decode(b'"%b"' % escaped)
    return text


class ResponsesReply(Reply):
    """/v1/responses: one message of text, in OpenAI's numbered events when streamed."""

    _sequence_number = -1
    previous_id: str | None = None

    def _numbered(self, kind: str, **fields: Any) -> bytes:
        self._sequence_number += 1
        return _event({**fields, "sequence_number": self._sequence_number, "type": kind})

    @property
    def _item_id(self) -> str:
        return self.id.replace("resp_", "msg_", 1)

    def _part(self, text: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    @property
    def text(self) -> str:
        """Its whole answer."""
        return _plain(self.choices[0].text)

    def response(self, *, complete: bool) -> dict[str, Any]:
        """The document, as it is at the beginning or at the end."""
        (choice,) = self.choices
        cut = complete and choice.finish_reason == "length"
        usage = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": choice.emitted,
            "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
            "total_tokens": self.prompt_tokens + choice.emitted,
        }
        part = self._part(self.text)
        return {
            "id": self.id,
            "created_at": self.created,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": None,
            "metadata": None,
            "model": self.model,
            "object": "response",
            "output": [self._item("completed", [part])] if complete else [],
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0,
            "background": False,
            "max_output_tokens": self.ask.max_tokens,
            "max_tool_calls": None,
            "previous_response_id": self.previous_id,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": ("incomplete" if cut else "completed") if complete else "in_progress",
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": usage if complete else None,
            "user": None,
        }

    def opening(self) -> bytes:
        response = self.response(complete=False)
        return (
            self._numbered("response.created", response=response)
            + self._numbered("response.in_progress", response=response)
            + self._numbered(
                "response.output_item.added", item=self._item("in_progress", []), output_index=0
            )
            + self._numbered(
                "response.content_part.added",
                content_index=0,
                item_id=self._item_id,
                output_index=0,
                part=self._part("", []),
            )
        )

    def delta(self, choice: Choice) -> bytes:
        return self._text_delta(choice.pieces[choice.emitted - 1])

    def last_delta(self, choice: Choice) -> bytes:
        return self._text_delta(choice.pieces[-1])

    def _text_delta(self, piece: bytes) -> bytes:
        return self._numbered(
            "response.output_text.delta",
            content_index=0,
            delta=_plain(piece),
            item_id=self._item_id,
            logprobs=[],
            output_index=0,
        )

    def closing(self) -> bytes:
        text = _plain(self.choices[0].text)
        place = {"content_index": 0, "item_id": self._item_id, "output_index": 0}
        return (
            self._numbered("response.output_text.done", **place, logprobs=[], text=text)
            + self._numbered("response.content_part.done", **place, part=self._part(text))
            + self._numbered(
                "response.output_item.done",
                item=self._item("completed", [self._part(text)]),
                output_index=0,
            )
            + self._numbered("response.completed", response=self.response(complete=True))
        )

    def body(self) -> bytes:
        return msgspec.json.encode(self.response(complete=True))


class MessagesReply(Reply):
    """/v1/messages: Anthropic's API, one block of text; a stream ends without ``[DONE]``."""

    @property
    def _stop(self) -> dict[str, Any]:
        (choice,) = self.choices
        if choice.stop_reason is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        reason = "max_tokens" if choice.finish_reason == "length" else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    @property
    def _usage(self) -> dict[str, int]:
        return {"input_tokens": self.prompt_tokens, "output_tokens": self.completion_tokens}

    def _message(self, content: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.model,
            **rest,
        }

    def opening(self) -> bytes:
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
        message = self._message([], stop_reason=None, stop_sequence=None, usage=usage)
        block = {"type": "text", "text": ""}
        return _event({"type": "message_start", "message": message}) + _event(
            {"type": "content_block_start", "content_block": block, "index": 0}
        )

    def delta(self, choice: Choice) -> bytes:
        return self._text_delta(choice.pieces[choice.emitted - 1])

    def last_delta(self, choice: Choice) -> bytes:
        return self._text_delta(choice.pieces[-1])

    def _text_delta(self, piece: bytes) -> bytes:
        return (
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"%b"},'
            b'"index":0}\n\n'
        ) % piece

    def closing(self) -> bytes:
        return (
            _event({"type": "content_block_stop", "index": 0})
            + _event({"type": "message_delta", "delta": self._stop, "usage": self._usage})
            + _event({"type": "message_stop"})
        )

    def body(self) -> bytes:
        content = [{"type": "text", "text": _plain(self.choices[0].text)}]
        return msgspec.json.encode(self._message(content, **self._stop, usage=self._usage))


class EmbeddingsReply(Reply):
    """/v1/embeddings: a unit-free vector that depends on the input alone.

    Args:
        inputs: what to embed, in the client's order.
        as_base64: little-endian float32 in base64, as the ``openai`` package asks for.
    """

    def __init__(
        self,
        ask: Ask,
        request_id: str,
        model: str,
        created: int,
        arrived_s: float,
        inputs: list[Any],
        as_base64: bool,
    ) -> None:
        super().__init__(ask, request_id, model, created, arrived_s)
        self.inputs = inputs
        self.as_base64 = as_base64

    def body(self) -> bytes:
        data = [
            {"index": i, "object": "embedding", "embedding": self._embedding(item)}
            for i, item in enumerate(self.inputs)
        ]
        return self.listed(data)

    def _embedding(self, item: Any) -> list[float] | str:
        digest = hashlib.blake2b(
            msgspec.json.encode(item), digest_size=4 * EMBEDDING_DIMENSIONS
        ).digest()
        values = [n / 2**31 - 1 for n in struct.unpack(f"<{EMBEDDING_DIMENSIONS}I", digest)]
        if not self.as_base64:
            return values
        return base64.b64encode(struct.pack(f"<{EMBEDDING_DIMENSIONS}f", *values)).decode()
