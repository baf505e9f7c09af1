"""Request bodies of each endpoint, converted into one ``Ask``: the work for the engine.

Field names and refusals are vLLM's; unknown fields are ignored, as vLLM does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, Field

from hetero_gateway.lab.emulator.errors import refused, validate
from hetero_gateway.lab.emulator.text import (
    BYTES_PER_TOKEN,
    Json,
    Messages,
    SchemaError,
    chat_tokens,
    id_tokens,
    sample_json,
    text_tokens,
)

MOST_LOGPROBS = 20  # vLLM's --max-logprobs
MAX_N = 16384  # vllm.envs.VLLM_MAX_N_SEQUENCES
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, which vLLM keeps for /v1/completions only


@dataclass(frozen=True, slots=True)
class Ask:
    """A request's work for the engine, whatever its endpoint.

    ``prompts`` are their tokens (``text``). ``max_tokens`` None means to the end of the context
    window. ``forced_text`` is the required output (a tool's arguments, a JSON document); ``tool``
    is the called function's name. Requests with different ``cache_salt`` share no cached prefix.
    ``top_logprobs`` is how many likely tokens to name at each place; None: no probabilities.
    """

    prompts: tuple[bytes, ...]
    prompts_are_ids: bool = False
    n: int = 1
    max_tokens: int | None = None
    max_tokens_name: str = "max_tokens"
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    forced_text: str | None = None
    tool: str | None = None
    tool_finish: str = "stop"
    cache_salt: str | None = None
    session: str | None = None
    top_logprobs: int | None = None

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """Tokens of each prompt."""
        return tuple(len(prompt) // BYTES_PER_TOKEN for prompt in self.prompts)


class EngineBody(BaseModel):
    """Fields of every body; unknown fields are ignored."""

    model: str | None = None
    cache_salt: str | None = None


class _StreamOptions(BaseModel):
    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class _Sampling(EngineBody):
    session_id: str | None = None
    n: int | None = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    response_format: dict[str, Any] | None = None

    def check(self, max_tokens: int | None, max_tokens_name: str = "max_tokens") -> None:
        """Refuse what vLLM's SamplingParams refuse."""
        n = self.n or 0
        if self.n is not None and n < 1:
            raise refused("n_too_small", n=n)
        if n > MAX_N:
            raise refused("n_too_large", n=n, most=MAX_N)
        heat = self.temperature
        if heat is not None and not 0 <= heat <= 2:
            rule = "non-negative" if heat < 0 else "in [0, 2]"
            raise refused("temperature", rule=rule, value=heat)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise refused("top_p", value=self.top_p)
        if max_tokens is not None and max_tokens < 1:
            raise refused("too_small", name=max_tokens_name, value=max_tokens)
        if self.min_tokens < 0:
            raise refused("min_tokens_negative", value=self.min_tokens)
        if max_tokens is not None and self.min_tokens > max_tokens:
            raise refused("min_tokens_beyond", value=self.min_tokens, most=max_tokens)
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options")

    def common(self) -> dict[str, Any]:
        """The fields of ``Ask`` that both OpenAI endpoints share."""
        options = self.stream_options
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return {
            "cache_salt": self.cache_salt,
            "session": self.session_id,
            "n": self.n or 1,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "stop": tuple(text for text in stop if text),
            "stream": bool(self.stream),
            "include_usage": bool(options and options.include_usage),
            "continuous_usage": bool(options and options.continuous_usage_stats),
        }


class _ChatBody(_Sampling):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    continue_final_message: bool | None = False


class _CompletionBody(_Sampling):
    prompt: str | list[int] | list[str] | list[list[int]] | None = None
    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS
    logprobs: int | None = None


class _ResponsesBody(EngineBody):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    previous_input_messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = False
    ignore_eos: bool = False


class _CountBody(EngineBody):
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class _MessagesBody(_CountBody):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    ignore_eos: bool = False


class TokenizeBody(EngineBody):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(EngineBody):
    tokens: list[int]


class LoadAdapterBody(EngineBody):
    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False


class SlowdownBody(EngineBody):
    factor: float = Field(gt=0, le=1e6, allow_inf_nan=False)


def chat_ask(body: Json, model: str) -> Ask:
    """/v1/chat/completions. Raises RefusedRequest."""
    chat = validate(_ChatBody, body)
    name, limit = "max_tokens", chat.max_tokens
    if chat.max_completion_tokens is not None:
        name, limit = "max_completion_tokens", chat.max_completion_tokens
    chat.check(limit, name)
    if not chat.messages:
        raise refused("no_messages")
    if chat.top_logprobs is not None and not chat.logprobs:
        raise refused("top_logprobs")
    tool = _called_tool(chat)
    return Ask(
        top_logprobs=_top_logprobs((chat.top_logprobs or 0) if chat.logprobs else None),
        prompts=(
            chat_tokens(
                role_texts(chat.messages, model),
                chat.tools,
                continues=bool(chat.continue_final_message),
            ),
        ),
        max_tokens=limit,
        max_tokens_name=name,
        forced_text=_forced_text(chat, tool),
        tool=tool,
        # A named function is the client's choice, not the model's: OpenAI and vLLM say "stop".
        tool_finish="stop" if isinstance(chat.tool_choice, dict) else "tool_calls",
        **chat.common(),
    )


def completion_ask(body: Json) -> Ask:
    """/v1/completions. Raises RefusedRequest."""
    completion = validate(_CompletionBody, body)
    completion.check(completion.max_tokens)
    prompts, are_ids = prompts_of(completion.prompt)
    return Ask(
        top_logprobs=_top_logprobs(completion.logprobs),
        prompts=prompts,
        prompts_are_ids=are_ids,
        max_tokens=completion.max_tokens,
        forced_text=_forced_json(completion.response_format),
        **completion.common(),
    )


def responses_ask(
    body: Json, model: str, before: Callable[[str], Messages]
) -> tuple[Ask, Messages]:
    """/v1/responses, text in and text out: the request, and all messages that it answers.

    ``before``: the messages of the continued response. Raises RefusedRequest.
    """
    request = validate(_ResponsesBody, body)
    if isinstance(request.input, str):
        messages = [("user", request.input)]
    else:
        messages = role_texts(request.input, model)
    if request.previous_response_id is not None:
        messages = before(request.previous_response_id) + messages
    if request.previous_input_messages:
        messages = role_texts(request.previous_input_messages, model) + messages
    if request.instructions:
        messages.insert(0, ("system", request.instructions))
    limit = request.max_output_tokens
    if limit is not None and limit < 1:
        raise refused("too_small", name="max_output_tokens", value=limit)
    ask = Ask(
        prompts=(chat_tokens(messages, request.tools),),
        cache_salt=request.cache_salt,
        max_tokens=limit,
        max_tokens_name="max_output_tokens",
        ignore_eos=request.ignore_eos,
        stream=bool(request.stream),
    )
    return ask, messages


def messages_ask(body: Json, model: str) -> Ask:
    """/v1/messages (Anthropic's API), text only. Raises RefusedRequest."""
    request = validate(_MessagesBody, body)
    if request.max_tokens < 1:
        raise refused("too_small", name="max_tokens", value=request.max_tokens)
    return Ask(
        prompts=(_messages_prompt(request, model),),
        cache_salt=request.cache_salt,
        max_tokens=request.max_tokens,
        ignore_eos=request.ignore_eos,
        stop=tuple(text for text in request.stop_sequences or () if text),
        stream=bool(request.stream),
    )


def count_messages_tokens(body: Json, model: str) -> int:
    """/v1/messages/count_tokens: tokens of the prompt. Raises RefusedRequest."""
    return len(_messages_prompt(validate(_CountBody, body), model)) // BYTES_PER_TOKEN


def _messages_prompt(request: _CountBody, model: str) -> bytes:
    messages = role_texts(request.messages, model)
    if request.system:
        messages.insert(0, ("system", _content_text(request.system, model)))
    return chat_tokens(messages, request.tools)


def _top_logprobs(wanted: int | None) -> int | None:
    """How many are named. Raises RefusedRequest: more than vLLM allows."""
    if wanted is not None and wanted > MOST_LOGPROBS:
        raise refused("too_many_logprobs", value=wanted, most=MOST_LOGPROBS)
    return wanted


def role_texts(messages: list[dict[str, Any]], model: str) -> Messages:
    """The role and the text of each message.

    Raises RefusedRequest: a part that is not text: the emulated model reads nothing else.
    """
    return [
        (str(message.get("role")), _content_text(message.get("content"), model))
        for message in messages
    ]


def _content_text(content: Json, model: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return "" if content is None else msgspec.json.encode(content).decode()
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind in ("image_url", "image", "input_image", "input_audio", "audio_url", "video_url"):
            raise refused("not_multimodal", model=model)
        texts.append(str(part.get("text", "")) if isinstance(part, dict) else str(part))
    return "".join(texts)


def prompts_of(prompt: Json) -> tuple[tuple[bytes, ...], bool]:
    """Every prompt's tokens, and whether they were given as ids."""
    if isinstance(prompt, str):
        prompt = [prompt]
    elif prompt and isinstance(prompt[0], int):
        prompt = [prompt]
    if not prompt or not all(prompt):
        raise refused("no_prompt")
    if isinstance(prompt[0], str):
        return tuple(text_tokens(text) for text in prompt), False
    if (lowest := min(min(ids) for ids in prompt)) < 0:
        raise refused("out_of_vocabulary", token=lowest)
    return tuple(id_tokens(ids) for ids in prompt), True


def _called_tool(chat: _ChatBody) -> str | None:
    """The function that the answer calls.

    With ``auto`` a real model is free; this one calls the first tool, and answers in words once
    the conversation's last message is a tool's result.
    """
    choice = chat.tool_choice
    if not chat.tools:
        if choice not in (None, "none"):
            raise refused("no_tools")
        return None
    names = [str((tool.get("function") or {}).get("name", "")) for tool in chat.tools]
    if isinstance(choice, dict):
        name = str((choice.get("function") or {}).get("name", ""))
        if name not in names:
            raise refused("unknown_tool")
        return name
    if choice == "none":
        return None
    if choice != "required" and chat.messages[-1].get("role") == "tool":
        return None
    return names[0]


def _forced_text(chat: _ChatBody, tool: str | None) -> str | None:
    if tool is None:
        return _forced_json(chat.response_format)
    for declared in chat.tools or ():
        function = declared.get("function") or {}
        if function.get("name") == tool:
            return _sample_text(function.get("parameters") or {"type": "object"})
    return "{}"


def _forced_json(response_format: Json) -> str | None:
    kind = (response_format or {}).get("type", "text")
    if kind == "json_object":
        return '{"text": "text"}'
    if kind == "json_schema":
        return _sample_text((response_format.get("json_schema") or {}).get("schema") or {})
    if kind in ("text", "structural_tag"):
        return None
    raise refused("response_format", kind=kind)


def _sample_text(schema: Json) -> str:
    try:
        return msgspec.json.encode(sample_json(schema)).decode()
    except SchemaError as error:
        raise refused("grammar", error=error) from None
