"""/score and /rerank: one prefill for each pair of texts, and vLLM's answers.

A score is the share of three-letter sequences that two texts have in common: 1 for equal ones.
"""

from __future__ import annotations

import msgspec
from pydantic import AliasChoices, Field

from hetero_gateway.lab.emulator.bodies import Ask, Body, PoolingBody
from hetero_gateway.lab.emulator.errors import ApiError, validate
from hetero_gateway.lab.emulator.prefixes import text_tokens
from hetero_gateway.lab.emulator.reply import Reply
from hetero_gateway.lab.emulator.text import Json

Pair = tuple[str, str]


class _ScoreBody(PoolingBody):
    text_1: str | list[str] = Field(
        validation_alias=AliasChoices("text_1", "data_1", "queries", "query")
    )
    text_2: str | list[str] = Field(
        validation_alias=AliasChoices("text_2", "data_2", "documents", "items")
    )


class _Document(Body):
    text: str


class _RerankBody(PoolingBody):
    query: str
    documents: list[str | _Document]
    top_n: int = Field(0, ge=0)


def score_ask(body: Json) -> tuple[Ask, list[Pair]]:
    """What is asked, and the pairs: one text with each of the others, or each with each in turn.

    Raises ApiError.
    """
    request = validate(_ScoreBody, body)
    first, second = (
        [side] if isinstance(side, str) else side for side in (request.text_1, request.text_2)
    )
    if len(first) not in (1, len(second)):
        raise ApiError("Input lengths must be either 1:1, 1:N or N:N")
    if not first or not second:
        raise ApiError("At least one text_pair element must be given")
    pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
    return _ask(request, pairs), pairs


def rerank_ask(body: Json) -> tuple[Ask, list[Pair], int]:
    """What is asked, the query with each document, and how many results are wanted.

    Raises ApiError.
    """
    request = validate(_RerankBody, body)
    texts = [each if isinstance(each, str) else each.text for each in request.documents]
    if not texts:
        raise ApiError("At least one text_pair element must be given")
    pairs = [(request.query, text) for text in texts]
    return _ask(request, pairs), pairs, request.top_n or len(pairs)


def _ask(request: PoolingBody, pairs: list[Pair]) -> Ask:
    prompts = request.cut(tuple(text_tokens(f"{one} {other}") for one, other in pairs))
    return Ask(prompts=prompts, max_tokens=1, ignore_eos=True)


def likeness(pair: Pair) -> float:
    """0 to 1."""
    one, other = (_threes(text.casefold()) for text in pair)
    return len(one & other) / len(one | other)


def _threes(text: str) -> set[str]:
    padded = f" {text} "
    return {padded[i : i + 3] for i in range(len(padded) - 2)} or {padded}


class ScoreReply(Reply):
    """/score."""

    pairs: list[Pair]

    def body(self) -> bytes:
        data = [
            {"index": i, "object": "score", "score": likeness(pair)}
            for i, pair in enumerate(self.pairs)
        ]
        return self.listed(data)


class RerankReply(ScoreReply):
    """/rerank: the best first."""

    most: int

    def body(self) -> bytes:
        results = [
            {
                "index": i,
                "document": {"text": pair[1], "multi_modal": None},
                "relevance_score": likeness(pair),
            }
            for i, pair in enumerate(self.pairs)
        ]
        results.sort(key=lambda result: -result["relevance_score"])  # type: ignore[operator]
        tokens = self.prompt_tokens
        return msgspec.json.encode(
            {
                "id": self.id,
                "model": self.model,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
                "results": results[: self.most],
            }
        )
