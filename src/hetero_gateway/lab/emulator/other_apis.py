"""/v1/responses and /v1/messages: small, and correct in structure."""

from typing import Any

import msgspec

from hetero_gateway.lab.emulator.bodies import messages_ask, responses_ask
from hetero_gateway.lab.emulator.errors import refused
from hetero_gateway.lab.emulator.reply import DOCUMENTS, EmulatedReply, ReplyHead, Send, Spawn
from hetero_gateway.lab.emulator.text import Json, Messages, unescape

_MOST_RESPONSES = 4096


def _event(data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), msgspec.json.encode(data))


def _with_handed_over(document: dict[str, Any], handed_over: bytes) -> bytes:
    """A document with the ``kv_transfer_params`` that it has, if any."""
    if handed_over:
        document = document | {"kv_transfer_params": msgspec.Raw(handed_over)}
    return msgspec.json.encode(document)


class ResponsesReply(EmulatedReply):
    """/v1/responses: one message of text, in OpenAI's numbered events when streamed."""

    id_prefix = "resp_"
    _sequence_number = -1

    def __init__(self, store: "ResponseStore", body: Json, head: ReplyHead) -> None:
        ask, self.messages = responses_ask(body, head.model, store.before)
        super().__init__(ask, head)
        self._previous_id = body.get("previous_response_id")
        self._place = {
            "content_index": 0,
            "item_id": self.id.replace("resp_", "msg_", 1),
            "output_index": 0,
        }
        self._store = store if body.get("store") is not False else None

    def open(self, send: Send, spawn: Spawn) -> None:
        if self._store is not None:
            self._store.keep(self)
        super().open(send, spawn)

    def _numbered(self, kind: str, **fields: Any) -> bytes:
        self._sequence_number += 1
        kind = f"response.{kind}"
        return _event({**fields, "sequence_number": self._sequence_number, "type": kind})

    def _part(self, text: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        named = {"id": self._place["item_id"], "content": content, "status": status}
        return {**DOCUMENTS["output item"], **named}

    @property
    def text(self) -> str:
        """Its whole answer."""
        return unescape(self.choices[0].text)

    def response(self, *, complete: bool) -> dict[str, Any]:
        """The document, at the beginning or at the end."""
        document = {
            **DOCUMENTS["response"],
            "id": self.id,
            "created_at": self.created,
            "model": self.model,
            "max_output_tokens": self.ask.max_tokens,
            "previous_response_id": self._previous_id,
        }
        if not complete:
            return document
        (choice,) = self.choices
        document |= {"output": self._output(), "status": "completed"}
        if choice.finish_reason == "length":
            details = {"reason": "max_output_tokens"}
            document |= {"incomplete_details": details, "status": "incomplete"}
        document["usage"] = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": choice.emitted,
            "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
            "total_tokens": self.prompt_tokens + choice.emitted,
        }
        return document

    def _output(self) -> list[dict[str, Any]]:
        return [self._item("completed", [self._part(self.text)])]

    def fail_stream(self) -> None:
        """vLLM breaks it off, after the events that precede any text."""
        if self._sequence_number < 0:
            self.outlet.write(self._created())
        self.on_break()

    def _created(self) -> bytes:
        response = self.response(complete=False)
        return self._numbered("created", response=response) + self._numbered(
            "in_progress", response=response
        )

    def opening(self) -> bytes:
        item = self._item("in_progress", [])
        return (
            self._created()
            + self._numbered("output_item.added", item=item, output_index=0)
            + self._numbered("content_part.added", **self._place, part=self._part("", []))
        )

    def text_delta(self, piece: bytes) -> bytes:
        return self._numbered(
            "output_text.delta",
            content_index=0,
            delta=unescape(piece),
            item_id=self._place["item_id"],
            logprobs=[],
            output_index=0,
        )

    def closing(self) -> bytes:
        text, (item,) = self.text, self._output()
        return (
            self._numbered("output_text.done", **self._place, logprobs=[], text=text)
            + self._numbered("content_part.done", **self._place, part=self._part(text))
            + self._numbered("output_item.done", item=item, output_index=0)
            + self._numbered("completed", response=self.response(complete=True))
        )

    def body(self) -> bytes:
        return _with_handed_over(self.response(complete=True), self.handed_over)


class ResponseStore:
    """The stored responses of /v1/responses, by id, for continuing or retrieving them.

    As in vLLM with VLLM_ENABLE_RESPONSES_API_STORE=1, in the server's memory; unlike there, the
    oldest are dropped when there are many. ``keeps``: False: nothing is kept, as vLLM by default.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._kept: dict[str, ResponsesReply] = {}

    def keep(self, reply: ResponsesReply) -> None:
        """A response begins, with its sequences."""
        if self._keeps:
            self._kept[reply.id] = reply
            if len(self._kept) > _MOST_RESPONSES:
                del self._kept[next(iter(self._kept))]

    def before(self, previous_id: str) -> Messages:
        """The conversation before a response that continues this one, including its answer.

        Without instructions: each response has its own. Raises RefusedRequest: 404.
        """
        reply = self._found(previous_id)
        said = [message for message in reply.messages if message[0] != "system"]
        return [*said, ("assistant", reply.text)]

    def document(self, response_id: str) -> dict[str, Any]:
        """A response as it was answered. Raises RefusedRequest: 404."""
        return self._found(response_id).response(complete=True)

    def cancel(self, response_id: str) -> dict[str, Any]:
        """Raises RefusedRequest: none of them runs in the background."""
        self._found(response_id)
        raise refused("not_cancelled")

    def _found(self, response_id: str) -> ResponsesReply:
        reply = self._kept.get(response_id)
        if reply is None or reply.unfinished:
            raise refused("no_response", name=response_id)
        return reply


class MessagesReply(EmulatedReply):
    """/v1/messages: Anthropic's API, one block of text; a stream ends without ``[DONE]``."""

    id_prefix = "chatcmpl-"
    is_anthropic = True

    def __init__(self, body: Json, head: ReplyHead) -> None:
        super().__init__(messages_ask(body, head.model), head)

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
        named = {"id": self.id, "content": content, "model": self.model}
        return {**DOCUMENTS["message"], **named, **rest}

    def fail_stream(self) -> None:
        """vLLM fails on its own error here, and says so."""
        error = {"type": "internal_error", "message": "2 validation errors"}
        begun = b"" if self._opened else self._begun()
        told = _event({"type": "error", "error": error})
        self.outlet.write(begun + told, more=False)

    def _begun(self) -> bytes:
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
        message = self._message([], stop_reason=None, stop_sequence=None, usage=usage)
        return _event({"type": "message_start", "message": message})

    def opening(self) -> bytes:
        block = {"type": "text", "text": ""}
        opened = {"type": "content_block_start", "content_block": block, "index": 0}
        return self._begun() + _event(opened)

    def text_delta(self, piece: bytes) -> bytes:
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
        content = [{"type": "text", "text": unescape(self.choices[0].text)}]
        message = self._message(content, **self._stop, usage=self._usage)
        return _with_handed_over(message, self.handed_over)
