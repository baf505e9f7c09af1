"""Exact token counts from a local tokenizer.json, for those who want them (extra ``tokenizers``).

Long prompts are counted in a thread: the library releases the interpreter lock while it works.
A chat prompt's template is not applied; what it adds is a few tokens per message.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from hetero_gateway.errors import ConfigError

# What common chat templates add around one message and at the end of the prompt.
_TOKENS_PER_MESSAGE = 4
_TOKENS_PER_PROMPT = 3


class Tokenizer:
    """Counts the tokens of the raw JSON of a ``messages`` or ``prompt`` field.

    Raises:
        ConfigError: the package or the file is missing or broken.
    """

    def __init__(self, path: Path, thread_above_bytes: int) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ConfigError(
                "scheduler.tokens.tokenizer_file: the package `tokenizers` is not installed; "
                "install hetero-gateway[tokenizers]"
            ) from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"scheduler.tokens.tokenizer_file: {path}: {error}") from error
        self._thread_above_bytes = thread_above_bytes

    async def count(self, raw: bytes) -> int | None:
        """Tokens of all texts in the field; None when there is no text in it."""
        if len(raw) > self._thread_above_bytes:
            return await asyncio.to_thread(self._count, raw)
        return self._count(raw)

    def _count(self, raw: bytes) -> int | None:
        try:
            value = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            return None
        if isinstance(value, str):
            return len(self._tokenizer.encode(value).ids)
        if not isinstance(value, list):
            return None
        texts = [text for item in value for text in _texts(item)]
        if not texts:
            return None
        chat = any(isinstance(item, dict) for item in value)
        tokens = sum(
            len(e.ids) for e in self._tokenizer.encode_batch(texts, add_special_tokens=not chat)
        )
        return tokens + (_TOKENS_PER_PROMPT + _TOKENS_PER_MESSAGE * len(value) if chat else 0)


def _texts(item: Any) -> list[str]:
    if isinstance(item, str):
        return [item]
    content = item.get("content") if isinstance(item, dict) else None
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return [
            p["text"] for p in content if isinstance(p, dict) and isinstance(p.get("text"), str)
        ]
    return []
