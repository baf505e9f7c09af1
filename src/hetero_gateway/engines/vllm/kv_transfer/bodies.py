"""The bodies of the two requests: the client's own, byte for byte, with fields added at the end.

Of equal names the last one counts, for every JSON reader that vLLM has had. So additions override
what the client said, and nothing has to be found in a body or cut out of it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from hetero_gateway.engines.vllm.added_fields import with_last_field
from hetero_gateway.engines.vllm.paths import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
)

SPLIT_PATHS = frozenset((CHAT_COMPLETIONS, COMPLETIONS, MESSAGES, RESPONSES))

_NOTHING = msgspec.Raw(b"")
_NOTHING_SAID = (b"", b"null", b"false", b"[]")


class _Fields(msgspec.Struct):
    """The fields that decide whether a request can be split, and those to undo in a prefill."""

    max_tokens: msgspec.Raw = _NOTHING
    max_completion_tokens: msgspec.Raw = _NOTHING
    max_output_tokens: msgspec.Raw = _NOTHING
    min_tokens: msgspec.Raw = _NOTHING
    ignore_eos: msgspec.Raw = _NOTHING
    stream: msgspec.Raw = _NOTHING
    stream_options: msgspec.Raw = _NOTHING
    n: msgspec.Raw = _NOTHING
    store: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    prompt_logprobs: msgspec.Raw = _NOTHING
    echo: msgspec.Raw = _NOTHING
    use_beam_search: msgspec.Raw = _NOTHING
    tool_choice: msgspec.Raw = _NOTHING
    background: msgspec.Raw = _NOTHING
    previous_response_id: msgspec.Raw = _NOTHING
    conversation: msgspec.Raw = _NOTHING


_decode: Callable[[bytes | bytearray], _Fields] = msgspec.json.Decoder(_Fields).decode
_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)

# The limit on each path, which a prefill has whether the client set one or not; and the fields that
# a prefill resets if they are set. A stored response belongs to the decode instance.
_LIMITS = {
    CHAT_COMPLETIONS: "max_completion_tokens",
    COMPLETIONS: "max_tokens",
    MESSAGES: "max_tokens",
    RESPONSES: "max_output_tokens",
}
_TAKEN_BACK = {
    "max_tokens": b"1",
    "max_completion_tokens": b"1",
    "max_output_tokens": b"1",
    "min_tokens": b"0",
    "ignore_eos": b"false",
    "stream": b"false",
    "stream_options": b"null",
}
# Fields with which a prefill and a decode cannot be combined, unless they are empty.
_AGAINST = {
    "use_beam_search": "beams begin with several first tokens",
    "echo": "its answer begins with the prompt",
    "background": "it is answered in the background",
    "previous_response_id": "it continues a response that one instance has",
    "conversation": "it continues a conversation that one instance has",
}


def reason_against(path: str, body: bytes | bytearray) -> str:
    """Why a request cannot be split, in a few words; "" if it can.

    Args:
        body: as the engine would get it.
    """
    if path not in SPLIT_PATHS:
        return "its path is not served in two parts"
    fields = _fields_of(body)
    if fields is None:
        return "its body is no plain JSON"
    for name, reason in _AGAINST.items():
        if _value(fields, name) not in _NOTHING_SAID:
            return reason
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if _value(fields, name) in (b"0", b"1"):
            return "there is nothing to decode"
    if _value(fields, "n") not in (*_NOTHING_SAID, b"1"):
        # The second would fetch blocks that were freed when the first one had them.
        return "it has several answers, and one hand-over"
    prompt = _value(fields, "prompt")
    if path == COMPLETIONS and _several(prompt):
        return "it has several prompts, and one hand-over"
    # A forced tool call is parsed even from a single token, which is not one.
    if _value(fields, "tool_choice") not in (*_NOTHING_SAID, b'"auto"', b'"none"'):
        return "a tool has to be called"
    return ""


def _fields_of(body: bytes | bytearray) -> _Fields | None:
    try:
        return _decode(body)
    except _ERRORS:
        return None


def _value(fields: _Fields, name: str) -> bytes:
    return bytes(getattr(fields, name))


def _several(prompt: bytes) -> bool:
    """Whether a prompt is a list of more than one text, or of more than one list of ids."""
    if not prompt.startswith(b"["):
        return False
    items = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    return len(items) > 1 and bytes(items[0])[:1] in (b'"', b"[")


def prefill_body(path: str, body: bytes | bytearray, parameters: bytes) -> bytes:
    """The request to the prefill instance: one token, not streamed.

    Args:
        body: one for which ``reason_against`` is "".
        parameters: from ``Connector.for_prefill``; b"": none.
    """
    fields = _fields_of(body) or _Fields()
    set_by_client = {name for name in _TAKEN_BACK if _value(fields, name)}
    added = [
        b'"%b":%b' % (name.encode(), value)
        for name, value in _TAKEN_BACK.items()
        if name in set_by_client or name == _LIMITS[path]
    ]
    if path == RESPONSES:
        added.append(b'"store":false')
    return with_last_field(body, _with_parameters(added, parameters))


def decode_body(body: bytes | bytearray, parameters: bytes) -> bytes:
    """The request to the decode instance.

    Args:
        parameters: from ``Connector.for_decode``; b"": none.
    """
    added = []
    fields = _fields_of(body)
    if fields is not None and _value(fields, "prompt_logprobs") not in _NOTHING_SAID:
        # Prompt probabilities it has none of, as it does not compute the prompt: they are inserted
        # later.
        added.append(b'"prompt_logprobs":null')
    text = _with_parameters(added, parameters)
    return with_last_field(body, text) if text else bytes(body)


def _with_parameters(added: list[bytes], parameters: bytes) -> bytes:
    if parameters:
        added = [*added, b'"kv_transfer_params":' + parameters]
    return b",".join(added)
