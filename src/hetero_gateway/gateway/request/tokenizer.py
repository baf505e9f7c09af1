"""Exact token counts from a local tokenizer.json (extra ``tokenizers``).

Long prompts are counted in a thread: the library releases the interpreter lock while it works. A
chat prompt's template is not applied; what it adds is a few tokens per message.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.scheduler_config import TokensConfig
from hetero_gateway.gateway.request.byte_counts import count, count_byte

# What common chat templates add around one message and at the end of the prompt.
_TOKENS_PER_MESSAGE = 4
_TOKENS_PER_PROMPT = 3
# More prompts or parts than these are estimated: each costs its objects.
_MOST_TEXTS = 10_000
_MOST_VALUES = 200_000


class _Part(msgspec.Struct):
    text: str | None = None


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None


# Anything else is an error at its first byte: no arrays of arrays are built while the interpreter's
# lock is held.
_decode = msgspec.json.Decoder(str | list[str | _Message] | None).decode


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
        """Tokens of all texts in the field; None if it has no text."""
        if len(raw) > self._thread_above_bytes:
            return await asyncio.to_thread(self._count, raw)
        return self._count(raw)

    def _count(self, raw: bytes) -> int | None:
        if _too_many_values(raw):
            return None
        try:
            value = _decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if isinstance(value, str):
            return len(self._tokenizer.encode(value).ids)
        texts: list[str] = []
        chat = False
        for item in value or ():
            if isinstance(item, str):
                texts.append(item)
            else:
                chat = True
                texts += _texts(item)
        if not value or not texts or len(texts) > _MOST_TEXTS:
            return None
        tokens = sum(
            len(e.ids) for e in self._tokenizer.encode_batch(texts, add_special_tokens=not chat)
        )
        return tokens + (_TOKENS_PER_PROMPT + _TOKENS_PER_MESSAGE * len(value) if chat else 0)


def tokenizer_of(config: TokensConfig, base_dir: Path) -> Tokenizer | None:
    """The configured tokenizer; None: not configured. Raises ConfigError: it cannot be used.

    ``base_dir``: what its file is relative to.
    """
    if config.tokenizer_file is None:
        return None
    return Tokenizer(base_dir / config.tokenizer_file, config.thread_above_bytes)


def _too_many_values(raw: bytes) -> bool:
    """Whether decoding would make more objects than a prompt can have, by its marks."""
    if len(raw) < _MOST_VALUES:
        return False
    quotes = count_byte(raw, b'"'[0]) - count(raw, b'\\"')
    return quotes > 2 * _MOST_VALUES or count_byte(raw, b"{"[0]) > _MOST_VALUES


def _texts(message: _Message) -> list[str]:
    content = message.content
    if isinstance(content, str):
        return [content]
    return [part.text for part in content or () if part.text is not None]
