"""Where in a body the prompts of a request are, path by path: what an engine computes for it.

Fields are those of vLLM 0.32's request classes. Where a body has several that could be a prompt,
they are added up, so that none that the engine leaves out can stand for the one that it reads.
"""

from __future__ import annotations

import enum

from hetero_gateway.engines.vllm.paths import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    EMBEDDINGS,
    GENERATE,
    INVOCATIONS,
    MESSAGES,
    RESPONSES,
    TRANSCRIPTIONS,
    TRANSLATIONS,
)


class Prompts(enum.Enum):
    """How the prompts of a request are made of the fields of its body."""

    TEXT = "`prompt`, or a conversation and what a template puts in front of it"
    CHATS = "a conversation in each item of `messages`"
    ANY = "what a chat, a completion or a pooling model takes, by the fields that are there"
    TOKENS = "`token_ids`"
    INPUTS = "one for each text, image or conversation in `input` and its like"
    PAIRS = "one for each pair of a query and a document, the query computed with each"
    ITEMS = "the query with each of `items`, as texts or token ids"
    QUESTIONS = "the state, once for each question"
    SPEECH = "a form with a recording"


PROMPTS_BY_PATH = {
    CHAT_COMPLETIONS: Prompts.TEXT,
    COMPLETIONS: Prompts.TEXT,
    RESPONSES: Prompts.TEXT,
    MESSAGES: Prompts.TEXT,
    CHAT_COMPLETIONS + "/batch": Prompts.CHATS,
    GENERATE: Prompts.TOKENS,
    "/generative_scoring": Prompts.ITEMS,
    INVOCATIONS: Prompts.ANY,
    "/cohere/v2/chat": Prompts.TEXT,
    "/v1/systemone": Prompts.QUESTIONS,
    EMBEDDINGS: Prompts.INPUTS,
    "/v2/embed": Prompts.INPUTS,
    "/pooling": Prompts.INPUTS,
    "/classify": Prompts.INPUTS,
    "/score": Prompts.PAIRS,
    "/v1/score": Prompts.PAIRS,
    "/rerank": Prompts.PAIRS,
    "/v1/rerank": Prompts.PAIRS,
    "/v2/rerank": Prompts.PAIRS,
    TRANSCRIPTIONS: Prompts.SPEECH,
    TRANSLATIONS: Prompts.SPEECH,
    "/v1/audio/speech": Prompts.INPUTS,
    "/v1/images/generations": Prompts.TEXT,
    "/v1/moderations": Prompts.INPUTS,
}

# Where ``truncate_prompt_tokens`` cuts each prompt; the others do not know it, or may refuse it.
CUTS_PROMPTS = frozenset(
    (
        *(EMBEDDINGS, "/pooling", "/classify"),
        *(path for path, prompts in PROMPTS_BY_PATH.items() if prompts is Prompts.PAIRS),
    )
)
# The two sides of a pair, by the names that vLLM's score, rerank and their older forms have.
QUERIES = ("query", "queries", "text_1", "data_1")
DOCUMENTS = ("documents", "items", "text_2", "data_2")
# What is read beside the fields that most paths have. ``documents`` is one of those.
FIELDS_OF = {
    Prompts.TEXT: ("previous_input_messages",),
    Prompts.ANY: (
        *(name for name in (*QUERIES, *DOCUMENTS) if name != "documents"),
        *("inputs", "texts", "images", "data"),
    ),
    Prompts.TOKENS: ("token_ids",),
    Prompts.INPUTS: ("inputs", "texts", "images", "data"),
    Prompts.PAIRS: tuple(name for name in (*QUERIES, *DOCUMENTS) if name != "documents"),
    Prompts.ITEMS: ("query", "items"),
    Prompts.QUESTIONS: ("state", "questions", "images", "audio", "videos"),
}


def prompts_at(path: str) -> Prompts:
    """Of a path that makes an engine do no step, it does not matter."""
    return PROMPTS_BY_PATH.get(path, Prompts.TEXT)
