"""A prompt's tokens as bytes, and the keys of its KV blocks: what the prefix cache distinguishes.

Tokens are those of ``text.py``: 4 bytes of UTF-8, the last of a text filled up with a byte that
UTF-8 does not have. A chat's template is 3 tokens in front of each message and 1 behind it, and 3
that begin the answer; so the next turn, which sends the answer back, begins with the very tokens
that are cached. A block's key is a hash of its tokens and of the key in front of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import msgspec

from hetero_gateway.lab.emulator.settings import BLOCK_TOKENS
from hetero_gateway.lab.emulator.text import (
    BYTES_PER_TOKEN,
    TEMPLATE_HEADER_TOKENS,
    Json,
    Messages,
    token_text,
    unescape,
)

_FILL = b"\xff"
# Template tokens: of a message's beginning, with its role, and of its end.
_BEGIN, _END = b"\xfe", b"\xfd\xff\xff\xff"
_BLOCK_BYTES = BLOCK_TOKENS * BYTES_PER_TOKEN
# Keys are positive and not 0 (``sim.engine.Sequence``).
_KEY_MASK = (1 << 62) - 1


def text_tokens(text: str) -> bytes:
    """A text's tokens; none for an empty one."""
    data = text.encode("utf-8", "replace")
    return data + _FILL * (-len(data) % BYTES_PER_TOKEN)


def id_tokens(ids: Iterable[int]) -> bytes:
    """The tokens of a prompt of ids: as the same text's where they are ``text.tokenize``'s."""
    parts = []
    for token in ids:
        of_text = 1 << 8 <= token < 1 << 33
        data = token_text(token) if of_text else b"\xfc" + (token & 0xFFFFFF).to_bytes(3, "big")
        parts.append(data[:BYTES_PER_TOKEN].ljust(BYTES_PER_TOKEN, _FILL))
    return b"".join(parts)


def chat_tokens(messages: Messages, tools: Json = None) -> bytes:
    """The tokens of a chat, as its template puts them."""
    parts = [text_tokens(msgspec.json.encode(tools).decode())] if tools else []
    for role, text in messages:
        parts += (_header(role), text_tokens(text), _END)
    parts.append(_header("assistant"))
    return b"".join(parts)


def _header(role: str) -> bytes:
    size = TEMPLATE_HEADER_TOKENS * BYTES_PER_TOKEN
    return (_BEGIN + role.encode("utf-8", "replace"))[:size].ljust(size, _FILL)


def answer_tokens(pieces: Iterable[bytes]) -> bytes:
    """The tokens of an answer whose pieces stand as within a JSON string."""
    parts = []
    for piece in pieces:
        if len(piece) != BYTES_PER_TOKEN or b"\\" in piece:
            data = unescape(piece).encode("utf-8", "replace")
            piece = data[:BYTES_PER_TOKEN].ljust(BYTES_PER_TOKEN, _FILL)
        parts.append(piece)
    return b"".join(parts)


def block_keys(tokens: bytes, namespace: Hashable) -> list[int]:
    """The keys of the full blocks of these tokens.

    Args:
        namespace: what makes equal tokens different (LoRA, salt).
    """
    key = hash(namespace)
    keys = []
    for at in range(0, len(tokens) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        key = hash((key, tokens[at : at + _BLOCK_BYTES]))
        keys.append((key & _KEY_MASK) | 1)
    return keys
