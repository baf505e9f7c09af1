"""Prompt tokens counted by rule, and words for the answers. There is no model and no tokenizer.

The rule: a token is 4 bytes of UTF-8, the last one shorter. A chat adds 4 tokens per message and 3
for the answer's header (the usual cost of a chat template), and the JSON text of its tools. Prompts
given as token ids are counted exactly. /tokenize and /detokenize follow the same rule: an id is its
4 bytes read as a big-endian number after a leading 1, so that texts survive the round trip.

The prefix cache distinguishes prompts by the same tokens as bytes, the last of a text filled up
with a byte that UTF-8 does not have. A chat's template is 3 tokens before each message and 1 after
it, and 3 that begin the answer; so the next turn, which sends the answer back, begins with exactly
the cached tokens. A block's key is a hash of its tokens and of the key before it.
"""

import hashlib
from collections.abc import Hashable, Iterable, Mapping
from random import Random
from typing import Any

import msgspec

from hetero_gateway.lab.emulator.settings import BLOCK_TOKENS

BYTES_PER_TOKEN = 4
TEMPLATE_HEADER_TOKENS = 3

# Of 3 letters, so that with its space a word is a token by the rule: an answer that returns in the
# next turn's prompt has the same tokens again.
_WORDS = (
    "the and for are not one all can was has but may two new way too old any boy set put end big "
    "why ask men try off day get him his how man now see who did its let say she use out her our "
    "far few run own yet sea sun car dog air eat red hot low top led cut job law act age ago add"
).split()
_TABLE_SIZE = 4096
# Fixed, so that a text depends only on the request's own seed.
_TABLE = [f" {word}".encode() for word in Random(0).choices(_WORDS, k=_TABLE_SIZE)]

_FILL = b"\xff"
# Template tokens: of a message's beginning, with its role, and of its end.
_BEGIN, _END = b"\xfe", b"\xfd\xff\xff\xff"
_BLOCK_BYTES = BLOCK_TOKENS * BYTES_PER_TOKEN
# Keys are positive and not 0 (``sim.engine.Sequence``).
_KEY_MASK = (1 << 62) - 1

Json = Any  # a decoded JSON value
Messages = list[tuple[str, str]]  # the role and the text of each


def words(offset: int, count: int) -> list[bytes]:
    """``count`` tokens of text, each a space and a word (ASCII: safe within a JSON string)."""
    offset %= _TABLE_SIZE
    turns = (offset + count - 1) // _TABLE_SIZE + 1
    table = _TABLE if turns == 1 else _TABLE * turns
    return table[offset : offset + count]


def escape(text: str) -> bytes:
    """``text`` as escaped between the quotes of a JSON string."""
    return msgspec.json.encode(text)[1:-1]


def unescape(piece: bytes) -> str:
    """The text between the quotes of a JSON string, unescaped."""
    text: str = msgspec.json.decode(b'"%b"' % piece)
    return text


def tokenize(text: str) -> list[int]:
    """A text's ids, one for each token by the rule above."""
    data = text.encode("utf-8", "replace")
    return [
        int.from_bytes(b"\x01" + data[i : i + BYTES_PER_TOKEN], "big")
        for i in range(0, len(data), BYTES_PER_TOKEN)
    ]


def token_text(token: int) -> bytes:
    """The bytes of one id of ``tokenize``; for any other id a word."""
    if not 1 << 8 <= token < 1 << 33:
        return _TABLE[token % _TABLE_SIZE]
    data = token.to_bytes(5, "big").lstrip(b"\0")
    return data[1:] if data[0] == 1 else _TABLE[token % _TABLE_SIZE]


def text_tokens(text: str) -> bytes:
    """A text's tokens; none for an empty one."""
    data = text.encode("utf-8", "replace")
    return data + _FILL * (-len(data) % BYTES_PER_TOKEN)


def id_tokens(ids: Iterable[int]) -> bytes:
    """The tokens of a prompt of ids: equal to the text's if they are from ``text.tokenize``."""
    parts = []
    for token in ids:
        of_text = 1 << 8 <= token < 1 << 33
        data = token_text(token) if of_text else b"\xfc" + (token & 0xFFFFFF).to_bytes(3, "big")
        parts.append(data[:BYTES_PER_TOKEN].ljust(BYTES_PER_TOKEN, _FILL))
    return b"".join(parts)


def chat_tokens(messages: Messages, tools: Json = None, *, continues: bool = False) -> bytes:
    """The tokens of a chat with its template; ``continues``: its last message goes on."""
    parts = [text_tokens(msgspec.json.encode(tools).decode())] if tools else []
    for role, text in messages:
        parts += (_header(role), text_tokens(text), _END)
    if continues:
        parts.pop()  # the end of the last one
    else:
        parts.append(_header("assistant"))
    return b"".join(parts)


def _header(role: str) -> bytes:
    size = TEMPLATE_HEADER_TOKENS * BYTES_PER_TOKEN
    return (_BEGIN + role.encode("utf-8", "replace"))[:size].ljust(size, _FILL)


def answer_tokens(pieces: Iterable[bytes]) -> bytes:
    """The tokens of an answer whose pieces are escaped as in a JSON string."""
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
        namespace: distinguishes equal tokens (LoRA, salt).
    """
    key = hash(namespace)
    keys = []
    for at in range(0, len(tokens) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        key = hash((key, tokens[at : at + _BLOCK_BYTES]))
        keys.append((key & _KEY_MASK) | 1)
    return keys


def common_block_keys(tokens: bytes, namespace: Hashable) -> list[int]:
    """As ``block_keys``, but the same in every process: several times the work."""
    key = repr(namespace).encode()
    keys = []
    for at in range(0, len(tokens) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        key = hashlib.blake2b(tokens[at : at + _BLOCK_BYTES], digest_size=8, key=key[:64]).digest()
        keys.append((int.from_bytes(key, "big") & _KEY_MASK) | 1)
    return keys


class SchemaError(ValueError):
    """A JSON schema that cannot be turned into a grammar."""


def sample_json(schema: Json, root: Json = None, depth: int = 0) -> Json:
    """A small value that matches a JSON schema's types, required keys and enumerations.

    Raises SchemaError: an unknown type.
    """
    root = schema if root is None else root
    if not isinstance(schema, Mapping) or depth > 16:
        return {}
    if isinstance(reference := schema.get("$ref"), str):
        return sample_json(_resolve(reference, root), root, depth + 1)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return sample_json(schema[key][0], root, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else None)
    if isinstance(kind, list):
        kind = kind[0] if kind else None
    if kind == "object":
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        return {
            key: sample_json(properties.get(key, {}), root, depth + 1)
            for key in properties
            if key in required
        }
    if kind == "array":
        item = sample_json(schema.get("items", {}), root, depth + 1)
        return [item] * int(schema.get("minItems") or 1)
    if kind in ("integer", "number"):
        return schema.get("minimum", 1)
    simple: dict[Any, Json] = {"string": "text", "boolean": True, "null": None, None: {}}
    if kind not in simple:
        raise SchemaError(f"Invalid type: {kind}")
    return simple[kind]


def _resolve(reference: str, root: Json) -> Json:
    node = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        if not isinstance(node, Mapping):
            return {}
        node = node.get(part, {}) if part else node
    return node
