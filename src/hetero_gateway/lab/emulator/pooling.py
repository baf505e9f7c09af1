"""/v1/embeddings, /score and /rerank: a prefill for each text, or each pair of texts.

An embedding depends only on its input. A score is the share of three-letter sequences that two
texts have in common: 1 for equal ones.
"""

import base64
import hashlib
import struct
from typing import Any, Literal

import msgspec
from pydantic import AliasChoices, Field

from hetero_gateway.lab.emulator.bodies import Ask, EngineBody, prompts_of
from hetero_gateway.lab.emulator.errors import refused, validate
from hetero_gateway.lab.emulator.reply import EmulatedReply, ReplyHead
from hetero_gateway.lab.emulator.text import BYTES_PER_TOKEN, Json, text_tokens

EMBEDDING_DIMENSIONS = 8
_FORMAT = f"<{EMBEDDING_DIMENSIONS}"


class _PoolingBody(EngineBody):
    """``truncate_prompt_tokens``: each prompt is cut to this many; -1: to the context."""

    truncate_prompt_tokens: int | None = Field(None, ge=-1)

    def ask(self, prompts: tuple[bytes, ...], *, are_ids: bool = False) -> Ask:
        """One prefill per prompt."""
        most = self.truncate_prompt_tokens
        if most is not None and most >= 0:
            prompts = tuple(prompt[: most * BYTES_PER_TOKEN] for prompt in prompts)
        return Ask(prompts=prompts, prompts_are_ids=are_ids, max_tokens=1, ignore_eos=True)


class _EmbeddingBody(_PoolingBody):
    input: str | list[int] | list[str] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"


class _ScoreBody(_PoolingBody):
    text_1: str | list[str] = Field(
        validation_alias=AliasChoices("text_1", "data_1", "queries", "query")
    )
    text_2: str | list[str] = Field(
        validation_alias=AliasChoices("text_2", "data_2", "documents", "items")
    )


class _Document(EngineBody):
    text: str


class _RerankBody(_PoolingBody):
    query: str
    documents: list[str | _Document]
    top_n: int = Field(0, ge=0)


class _PoolingReply(EmulatedReply):
    """vLLM's list of results of prompts alone."""

    def listed(self, kind: str, values: list[Any]) -> bytes:
        """The body with these values, each an object of its kind."""
        tokens = self.prompt_tokens
        return msgspec.json.encode(
            {
                "id": self.id,
                "object": "list",
                "created": self.created,
                "model": self.model,
                "data": [
                    {"index": i, "object": kind, kind: value} for i, value in enumerate(values)
                ],
                "usage": {
                    "prompt_tokens": tokens,
                    "total_tokens": tokens,
                    "completion_tokens": 0,
                    "prompt_tokens_details": None,
                },
            }
        )


class EmbeddingsReply(_PoolingReply):
    """/v1/embeddings: a unit-free vector; base64 is of little-endian float32."""

    id_prefix = "embd-"

    def __init__(self, body: Json, head: ReplyHead) -> None:
        request = validate(_EmbeddingBody, body)
        prompts, are_ids = prompts_of(request.input)
        super().__init__(request.ask(prompts, are_ids=are_ids), head)
        self._as_base64 = request.encoding_format == "base64"
        inputs = body["input"]
        self._inputs = [inputs] if isinstance(inputs, str) or isinstance(inputs[0], int) else inputs

    def body(self) -> bytes:
        return self.listed("embedding", [self._embedding(item) for item in self._inputs])

    def _embedding(self, item: Any) -> list[float] | str:
        size = struct.calcsize(_FORMAT + "I")
        digest = hashlib.blake2b(msgspec.json.encode(item), digest_size=size).digest()
        values = [n / 2**31 - 1 for n in struct.unpack(_FORMAT + "I", digest)]
        if not self._as_base64:
            return values
        return base64.b64encode(struct.pack(_FORMAT + "f", *values)).decode()


class ScoreReply(_PoolingReply):
    """/score: one text with each of the others, or each with each in turn."""

    id_prefix = "score-"

    def __init__(self, body: Json, head: ReplyHead) -> None:
        request = validate(_ScoreBody, body)
        first, second = (
            [side] if isinstance(side, str) else side for side in (request.text_1, request.text_2)
        )
        if len(first) not in (1, len(second)):
            raise refused("pair_lengths")
        if len(first) == 1:
            first = first * len(second)
        self._pairs = list(zip(first, second, strict=True))
        super().__init__(request.ask(_joined(self._pairs)), head)

    def body(self) -> bytes:
        return self.listed("score", [likeness(*pair) for pair in self._pairs])


class RerankReply(EmulatedReply):
    """/rerank: the best first."""

    id_prefix = "rerank-"

    def __init__(self, body: Json, head: ReplyHead) -> None:
        request = validate(_RerankBody, body)
        texts = [item if isinstance(item, str) else item.text for item in request.documents]
        self._pairs = [(request.query, text) for text in texts]
        super().__init__(request.ask(_joined(self._pairs)), head)
        self._most = request.top_n or len(texts)

    def body(self) -> bytes:
        scores = [likeness(*pair) for pair in self._pairs]
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: self._most]
        tokens = self.prompt_tokens
        return msgspec.json.encode(
            {
                "id": self.id,
                "model": self.model,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
                "results": [
                    {
                        "index": i,
                        "document": {"text": self._pairs[i][1], "multi_modal": None},
                        "relevance_score": scores[i],
                    }
                    for i in order
                ],
            }
        )


def _joined(pairs: list[tuple[str, str]]) -> tuple[bytes, ...]:
    """The prompt of each pair. Raises RefusedRequest: there is none."""
    if not pairs:
        raise refused("no_pairs")
    return tuple(text_tokens(" ".join(pair)) for pair in pairs)


def likeness(text: str, other: str) -> float:
    """0 to 1."""
    first, second = _threes(text.casefold()), _threes(other.casefold())
    return len(first & second) / len(first | second)


def _threes(text: str) -> set[str]:
    padded = f" {text} "
    return {padded[i : i + 3] for i in range(len(padded) - 2)} or {padded}
