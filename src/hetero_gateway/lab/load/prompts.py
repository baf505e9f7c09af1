"""Request bodies of a given length.

A text prompt is ``input_tokens × bytes_per_token`` bytes of common short English words, which most
tokenizers turn into about that many tokens (4.0 bytes per token is also the gateway's prior). It is
exact only against an engine that counts bytes; the actual count comes back in ``usage``. Token-id
prompts, on /v1/completions only, are exact everywhere. A chat template adds a few tokens to a chat
prompt. Prompts differ from their first bytes on, so that no prefix cache helps.
"""

import enum
import random
from dataclasses import dataclass
from typing import Any

import msgspec

from hetero_gateway.engines.vllm import paths

_WORDS = (
    "the and for you are but not all can had her was one our out day get has him his how man new "
    "now old see two way who did its let put say she too use time year work life hand part place "
    "week case point home water room area money story fact month book night word side kind head "
    "far long big high small large next early young public same able"
).split()
_POOL_BYTES = 1 << 16
# Ids that every vocabulary has, clear of the special tokens at either end.
_FIRST_TOKEN_ID = 300
_TOKEN_IDS = 1000


class PromptKind(enum.Enum):
    CHAT = "chat"
    COMPLETION = "completion"
    TOKEN_IDS = "token-ids"

    @property
    def path(self) -> str:
        return paths.CHAT_COMPLETIONS if self is PromptKind.CHAT else paths.COMPLETIONS


@dataclass(frozen=True, slots=True)
class BodyMaker:
    """Makes the JSON bodies of one run.

    Args:
        model: the model name to ask for.
        kind: chat text, completion text, or completion token ids.
        stream: ask for a stream, with the closing usage chunk.
        bytes_per_token: length of filler text per wanted token.
        pool: the filler text; ``filler_pool`` makes it.
        max_tokens: None: each request's is its output length, so that any engine gives exactly
            that, and any reader of the request knows it. A number: all have this one, and the
            output length is requested as ``min_tokens``, which gateways do not read. An
            emulated instance whose own lengths are 1 token then gives exactly that.
        cache_salt: vLLM shares no cached prefix between requests with different ones; None:
            none is sent. For runs that send the same prompts again.
    """

    model: str
    kind: PromptKind
    stream: bool
    bytes_per_token: float
    pool: str
    max_tokens: int | None = None
    cache_salt: str | None = None

    def body(
        self,
        index: int,
        input_tokens: int,
        output_tokens: int,
        messages: list[dict[str, str]] | None = None,
    ) -> bytes:
        """The body of request number ``index``; ``ignore_eos`` makes the output length exact.

        ``messages``: of a chat, instead of filler text.
        """
        document: dict[str, Any] = {"model": self.model}
        if self.max_tokens is None:
            document |= {"max_tokens": output_tokens, "ignore_eos": True}
        else:
            document |= {"max_tokens": self.max_tokens, "min_tokens": output_tokens}
        if self.stream:
            document["stream"] = True
            document["stream_options"] = {"include_usage": True}
        if self.cache_salt is not None:
            document["cache_salt"] = self.cache_salt
        if self.kind is PromptKind.TOKEN_IDS:
            # The first two identify the request.
            number = [index % _TOKEN_IDS, index // _TOKEN_IDS % _TOKEN_IDS]
            ids = number + [(index * 31 + k) % _TOKEN_IDS for k in range(2, input_tokens)]
            document["prompt"] = [_FIRST_TOKEN_ID + k for k in ids[:input_tokens]]
        elif self.kind is PromptKind.COMPLETION:
            document["prompt"] = self._text(index, input_tokens)
        elif messages is not None:
            document["messages"] = messages
        else:
            document["messages"] = [{"role": "user", "content": self._text(index, input_tokens)}]
        return msgspec.json.encode(document)

    def _text(self, index: int, input_tokens: int) -> str:
        length = max(1, round(input_tokens * self.bytes_per_token))
        # A step coprime to the pool's length: neighbours start far apart.
        start = (index * 7919) % len(self.pool)
        text = f"{index} "[:length]
        while len(text) < length:
            text += self.pool[start : start + length - len(text)]
            start = 0
        return text


def filler_pool(seed: int = 0) -> str:
    """64 KiB of words, the same for the same seed; plain ASCII, so one character is one byte."""
    rng = random.Random(seed)
    return " ".join(rng.choices(_WORDS, k=_POOL_BYTES // 3))[:_POOL_BYTES]
