"""Log probabilities in vLLM's two shapes: figures that depend on the token alone.

There is no model behind them: a token's own probability is drawn from its text, and those that it
was chosen among are other words, each less probable than the one before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from hetero_gateway.lab.emulator.text import unescape, words

MOST_LOGPROBS = 20  # vLLM's --max-logprobs
_LEAST = -4.0
_APART = 0.25


def chat_logprobs(pieces: Sequence[bytes], top: int) -> dict[str, Any]:
    """Of a chat's choice or chunk.

    Args:
        pieces: tokens, as they stand within a JSON string.
        top: how many tokens to name at each place.
    """
    content = []
    for token, logprob, others in map(_sampled, pieces):
        named = [(token, logprob), *others][:top]
        content.append({**_entry(token, logprob), "top_logprobs": [_entry(*n) for n in named]})
    return {"content": content}


def completion_logprobs(pieces: Sequence[bytes], top: int, offset: int) -> dict[str, Any]:
    """Of a completion's choice or chunk, whose text begins at the ``offset``-th character."""
    offsets, logprobs, tokens, tops = [], [], [], []
    for token, logprob, others in map(_sampled, pieces):
        offsets.append(offset)
        logprobs.append(logprob)
        tokens.append(token)
        # The sampled one is named in any case.
        tops.append(dict([(token, logprob), *others][: max(top, 1)]))
        offset += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": logprobs,
        "tokens": tokens,
        "top_logprobs": tops,
    }


def _sampled(piece: bytes) -> tuple[str, float, list[tuple[str, float]]]:
    """A token, its log probability, and what else it might have been, the likeliest first."""
    token = unescape(piece)
    drawn = int.from_bytes(hashlib.blake2b(piece, digest_size=4).digest(), "big")
    logprob = _LEAST * drawn / 2**32 / 4
    others = dict.fromkeys(word.decode() for word in words(drawn, 2 * MOST_LOGPROBS + 64))
    others.pop(token, None)
    named = list(others)[: MOST_LOGPROBS - 1]
    return token, logprob, [(o, _LEAST - _APART * i) for i, o in enumerate(named)]


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
