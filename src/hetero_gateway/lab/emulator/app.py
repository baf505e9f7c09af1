"""The emulated server as a plain ASGI application: vLLM's paths, refusals and life cycle.

A request's own task reads the body, gives a ``Reply`` to the engine loop and then only waits for
the client to disconnect: every byte of the answer is written by the loop.
"""

import asyncio
import contextlib
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from functools import partial
from random import Random
from typing import Any

import msgspec

from hetero_gateway.engines.vllm import paths
from hetero_gateway.engines.vllm.kv_transfer import SPLIT_PATHS
from hetero_gateway.lab.emulator import bodies
from hetero_gateway.lab.emulator.bodies import Ask
from hetero_gateway.lab.emulator.errors import (
    RefusedRequest,
    bad_body,
    describe,
    refused,
    validate,
)
from hetero_gateway.lab.emulator.kv_events import KVEventPublisher
from hetero_gateway.lab.emulator.kv_transfer import KVTransfer
from hetero_gateway.lab.emulator.loop import EngineLoop
from hetero_gateway.lab.emulator.openai import ChatReply, CompletionReply
from hetero_gateway.lab.emulator.other_apis import MessagesReply, ResponsesReply, ResponseStore
from hetero_gateway.lab.emulator.pooling import EmbeddingsReply, RerankReply, ScoreReply
from hetero_gateway.lab.emulator.reply import (
    DOCUMENTS,
    JSON,
    EmulatedReply,
    ReplyHead,
    Send,
    make_answer,
)
from hetero_gateway.lab.emulator.settings import EmulatorSettings
from hetero_gateway.lab.emulator.text import (
    BYTES_PER_TOKEN,
    Json,
    answer_tokens,
    block_keys,
    chat_tokens,
    common_block_keys,
    token_text,
    tokenize,
)

VERSION = "0.32.0+emulated"  # the vLLM whose behaviour is emulated
# A response by its id, and the function that cancels it.
_RESPONSE = re.compile(rf"{paths.RESPONSES}/([^/]+)(/cancel)?")
_PROMETHEUS = b"text/plain; version=1.0.0; charset=utf-8"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class EmulatedVLLM:
    """One emulated instance; serve it with any ASGI server that has a lifespan."""

    def __init__(self, settings: EmulatorSettings) -> None:
        self.settings = settings
        self.loop = EngineLoop(settings)
        self._store = ResponseStore(keeps=settings.store_responses)
        self.transfer: KVTransfer | None = None
        self._block_keys = block_keys
        if settings.kv_transfer is not None:
            self.transfer = KVTransfer(settings, settings.kv_transfer, self.loop, VERSION, self.die)
            self._block_keys = common_block_keys
        self.events: KVEventPublisher | None = None
        if settings.kv_events is not None and settings.kv_events.enable_kv_cache_events:
            self.events = KVEventPublisher(settings.kv_events, self.loop.engine, settings.rank)
            self.loop.on_steps.append(self.events.after_step)
        self.is_dead = False
        self.on_death: Callable[[], None] = lambda: None
        self._random = Random(settings.seed)
        self._started = int(time.time())
        self._tasks: asyncio.TaskGroup | None = None
        # Adapters by name: the path that each was loaded from.
        self._adapters = {name: name for name in settings.lora_modules}
        self._pages: dict[str, Callable[[], Json]] = {
            paths.HEALTH: self._health,
            paths.PING: self._health,
            paths.VERSION: lambda: {"version": VERSION},
            paths.KV_EVENT_SOURCES: lambda: {} if self.events is None else self.events.sources(),
            paths.LOAD: lambda: {"server_load": 0},  # as without its tracking flag
            paths.METRICS: self.loop.metrics.render,
            paths.MODELS: self._models,
        }
        self._replies: dict[str, Callable[[Json, ReplyHead], EmulatedReply]] = {
            paths.CHAT_COMPLETIONS: ChatReply,
            paths.COMPLETIONS: CompletionReply,
            paths.RESPONSES: partial(ResponsesReply, self._store),
            paths.MESSAGES: MessagesReply,
            paths.EMBEDDINGS: EmbeddingsReply,
            paths.INVOCATIONS: lambda body, head: (
                ChatReply(body, head) if "messages" in body else CompletionReply(body, head)
            ),
            **dict.fromkeys(("/score", "/v1/score"), ScoreReply),
            **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RerankReply),
        }
        self._forms: dict[str, Callable[[Json], Json]] = {
            paths.TOKENIZE: self._tokenize,
            paths.DETOKENIZE: self._detokenize,
            paths.COUNT_TOKENS: self._count_tokens,
            "/emulator/slowdown": self._slow_down,
            # As with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.
            paths.LOAD_LORA_ADAPTER: self._load_adapter,
            paths.UNLOAD_LORA_ADAPTER: self._unload_adapter,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self._running():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            stepping = tasks.create_task(self.loop.run())
            if self.transfer is not None:
                await self.transfer.open(tasks.create_task)
            if self.events is not None:
                await self.events.open()
            try:
                yield
            finally:
                if self.events is not None:
                    self.events.close()
            stepping.cancel()
            if self.transfer is not None:
                self.transfer.close()

    def abort_all(self) -> None:
        """End every open response now."""
        self.loop.abort_all()

    # -- one request

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        try:
            self._check(scope)
            if (named := _RESPONSE.fullmatch(path)) is not None:
                look = self._store.cancel if named[2] else self._store.document
                await _respond(send, look(named[1]))
            elif path in self._pages:
                await _respond(send, self._pages[path]())
            elif path == paths.RESET_PREFIX_CACHE:
                await _respond(send, {"success": self.reset_prefix_cache()})
            elif path in self._forms:
                form = self._forms[path](_decode(await _read(receive), scope))
                await _respond(send, form)
            else:
                await self._generate(scope, receive, send)
        except RefusedRequest as refusal:
            await _respond(send, refusal.document_at(path), refusal.status, refusal.headers)
        except ConnectionError:
            return  # the client left while its body was read

    def _check(self, scope: Scope) -> None:
        """Key, path, method: in vLLM's order."""
        path, method = scope["path"], scope["method"]
        key = self.settings.api_key
        if key is not None and path.startswith("/v1/"):
            if header_of(scope, b"authorization") != f"Bearer {key}".encode():
                raise RefusedRequest(401, {"error": "Unauthorized"})
        if path == paths.PING and method in ("GET", "POST"):
            return
        # A real vLLM lets its prefix cache be reset in its development mode only.
        posted = (*self._replies, *self._forms, paths.RESET_PREFIX_CACHE)
        named = _RESPONSE.fullmatch(path)
        if path in posted or (named is not None and named[2]):
            allowed = "POST"
        elif path in self._pages or named is not None:
            allowed = "GET"
        else:
            raise RefusedRequest(404, {"detail": "Not Found"})
        if method != allowed:
            raise RefusedRequest(405, {"detail": "Method Not Allowed"}, allowed)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_s = time.perf_counter()
        raw = await _read(receive)
        body = _decode(raw, scope)
        given = header_of(scope, b"x-request-id")
        suffix = given.decode("latin-1") if given else f"{self._random.getrandbits(64):016x}"
        head = ReplyHead(suffix, self._model(body), int(time.time()), arrived_s)
        parameters = None
        if self.transfer is not None and scope["path"] in SPLIT_PATHS:
            parameters = body.get("kv_transfer_params")
        try:
            reply = self._accepted(scope["path"], body, head, raw)
        except RefusedRequest:
            if parameters is not None and self.transfer is not None:
                self.transfer.refuse(parameters)
            raise
        assert self._tasks is not None, "the server must run the lifespan"
        reply.open(send, self._tasks.create_task)
        if parameters is not None and self.transfer is not None:
            task = asyncio.current_task()
            assert task is not None
            reply.on_break = task.cancel
            self.transfer.submit(reply, parameters)
        else:
            self.loop.submit(reply)
        try:
            # ASGI: a disconnect message comes when the client is gone, or the response is complete.
            while (await receive())["type"] != "http.disconnect":
                pass
        except asyncio.CancelledError:
            # ``on_break``: the connection is closed within the response, as by an exception.
            if reply.unfinished:
                raise
        finally:
            self.loop.cancel(reply)

    def _accepted(self, path: str, body: Json, head: ReplyHead, raw: bytes) -> EmulatedReply:
        """The reply. Raises RefusedRequest."""
        if self.is_dead:
            raise refused("dead")
        reply = self._replies[path](body, head)
        self._fill(reply, _content(raw, body))
        limit = self.settings.max_num_queued_reqs
        if limit is not None and self.loop.engine.num_waiting >= limit:
            self.loop.metrics.rejections += 1
            raise refused("busy")
        return reply

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; returns whether nothing was in use."""
        success = self.loop.engine.reset_prefix_cache()
        if success and self.events is not None:
            self.events.cleared()
        return success

    def die(self) -> None:
        """End with all open requests, as a real engine does on an unexpected error."""
        self.is_dead = True
        self.loop.fail_all()
        self.on_death()

    def _fill(self, reply: EmulatedReply, raw: bytes) -> None:
        """Give a reply its sequences: n for each prompt. Raises RefusedRequest: one is too long."""
        ask, settings = reply.ask, self.settings
        limits = [self._limit(ask, prompt_tokens) for prompt_tokens in ask.prompt_tokens]
        digest = hashlib.blake2b(raw, digest_size=8, key=b"%d" % settings.seed)
        rng = Random(digest.digest())
        adapter = reply.model if reply.model in self._adapters else None
        reply.says_cached = settings.prompt_tokens_details
        for prompt, limit in zip(ask.prompts, limits, strict=True):
            for _ in range(ask.n):
                answer = make_answer(ask, limit, settings.lengths, rng)
                keys = []
                if settings.prefix_caching:
                    tokens = prompt + answer_tokens(answer.pieces)
                    keys = self._block_keys(tokens, (adapter, ask.cache_salt))
                    if self.events is not None:
                        self.events.asked(keys, ask.session)
                reply.add(len(prompt) // BYTES_PER_TOKEN, answer, keys)

    def _limit(self, ask: Ask, prompt_tokens: int) -> int:
        """Most output tokens within max_tokens and the window. Raises RefusedRequest."""
        context = self.settings.context_tokens
        name, most = ask.max_tokens_name, ask.max_tokens
        if most is not None and most > context:
            raise refused("beyond_context", name=name, value=most, context=context)
        if prompt_tokens > context:
            # vLLM stops tokenizing a text at the limit, so it does not state its length.
            counted = prompt_tokens if ask.prompts_are_ids else context + 1
            least = "" if ask.prompts_are_ids else "at least "
            raise refused("too_long", context=context, least=least, counted=counted)
        if prompt_tokens == context:
            raise refused("too_small", name="max_tokens", value=0)
        return min(most or context, context - prompt_tokens)

    # -- the others

    def _model(self, body: Json) -> str:
        """The model that the request asks for; by default the first. Raises RefusedRequest."""
        names = self._names()
        asked = body.get("model")
        if not asked or not isinstance(asked, str):
            return names[0]
        if asked not in names:
            raise refused("no_model", name=asked, names=", ".join(names))
        return asked

    def _health(self) -> Json:
        if self.is_dead:
            raise RefusedRequest(503, {})
        return None

    def _names(self) -> tuple[str, ...]:
        """Every served name; the base model's first."""
        return (*self.settings.base_names, *self._adapters)

    def _load_adapter(self, body: Json) -> str:
        adapter = validate(bodies.LoadAdapterBody, body)
        name, path = adapter.lora_name, adapter.lora_path
        if not name or not path:
            raise refused("adapter_incomplete")
        if name in self._names() and not adapter.load_inplace:
            raise refused("adapter_loaded", name=name)
        self._adapters[name] = path
        return f"Success: LoRA adapter '{name}' added successfully."

    def _unload_adapter(self, body: Json) -> str:
        name = validate(bodies.LoadAdapterBody, body).lora_name
        if not name:
            raise refused("adapter_unnamed")
        if self._adapters.pop(name, None) is None:
            raise refused("no_adapter", name=name)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _count_tokens(self, body: Json) -> Json:
        tokens = bodies.count_messages_tokens(body, self._model(body))
        return {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}

    def _models(self) -> Json:
        names = self._names()
        permission = {**DOCUMENTS["permission"], "created": self._started}
        data = [
            {
                **DOCUMENTS["model"],
                "id": name,
                "created": self._started,
                "root": self._adapters.get(name, self.settings.profile.model),
                "parent": names[0] if name in self._adapters else None,
                "max_model_len": self.settings.context_tokens,
                "permission": [permission],
            }
            for name in names
        ]
        return {"object": "list", "data": data}

    def _tokenize(self, body: Json) -> Json:
        model = self._model(body)
        request = validate(bodies.TokenizeBody, body)
        if request.messages is None:
            tokens = tokenize(request.prompt or "")
        else:
            messages = bodies.role_texts(request.messages, model)
            tokens = tokenize("".join(text for _, text in messages))
            # The template's tokens are only counted; any id represents them.
            tokens += [0] * (len(chat_tokens(messages)) // BYTES_PER_TOKEN - len(tokens))
        texts_of = [token_text(t).decode("utf-8", "replace") for t in tokens]
        return {
            "count": len(tokens),
            "max_model_len": self.settings.context_tokens,
            "tokens": tokens,
            "token_strs": texts_of if request.return_token_strs else None,
        }

    def _detokenize(self, body: Json) -> Json:
        self._model(body)
        tokens = validate(bodies.DetokenizeBody, body).tokens
        return {"prompt": b"".join(map(token_text, tokens)).decode("utf-8", "replace")}

    def _slow_down(self, body: Json) -> Json:
        """Ours, not vLLM's: the next steps take ``factor`` times the profile's time."""
        factor = validate(bodies.SlowdownBody, body).factor
        self.loop.engine.slowdown = factor
        return {"factor": factor}


def _content(raw: bytes, body: Json) -> bytes:
    """The body without the last fields that a gateway adds, which change no answer."""
    for name in ("session_id", "kv_transfer_params"):
        if name in body:
            before, mark, _ = raw.rpartition(b',"%b":' % name.encode())
            raw = before + b"}" if mark else raw
    return raw


async def _read(receive: Receive) -> bytes:
    """The whole body. Raises ConnectionError if the client leaves before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client left")
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _decode(raw: bytes, scope: Scope) -> Json:
    """The body as JSON, refused as FastAPI and vLLM refuse it."""
    media_type = (header_of(scope, b"content-type") or b"").split(b";")[0].strip().lower()
    if media_type != b"application/json":
        raise refused("media_type")
    if not raw:
        raise bad_body("missing", "Field required", "None")
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = _decode_slowly(raw)
    if not isinstance(body, dict):
        wanted = "Input should be a valid dictionary or object to extract fields from"
        raise bad_body("model_attributes_type", wanted, describe(body))
    return body


def _decode_slowly(raw: bytes) -> Json:
    """Cases beyond msgspec: NaN is accepted, and errors have their position."""
    try:
        return json.loads(raw.decode())
    except UnicodeDecodeError:
        raise RefusedRequest(400, {"detail": "There was an error parsing the body"}) from None
    except json.JSONDecodeError as error:
        where, what = f"body.{error.pos}", {"error": error.msg}
        raise bad_body(
            "json_invalid", "JSON decode error", "<dict of 0 items>", where, ctx=what
        ) from None


def header_of(scope: Scope, name: bytes) -> bytes | None:
    """A request's header, by its name in lower case; None: absent."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


async def _respond(
    send: Send, answer: Json, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """A document as JSON, metrics' bytes as they are, words without a type, None: an empty body."""
    content_type = JSON
    if answer is None or isinstance(answer, str):
        body, content_type = (answer or "").encode(), b""
    elif isinstance(answer, bytes):
        body, content_type = answer, _PROMETHEUS
    else:
        body = msgspec.json.encode(answer)
    fields = [*headers, (b"content-length", b"%d" % len(body))]
    if content_type:
        fields.append((b"content-type", content_type))
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})
