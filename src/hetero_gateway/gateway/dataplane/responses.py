"""Which instance made which response, and what one that continues it begins with.

vLLM keeps responses (VLLM_ENABLE_RESPONSES_API_STORE=1) in the memory of the server that made
them. So what names one, a ``previous_response_id`` or a path, goes to that instance or to none. And
its prompt is longer than its body: it begins with the prompt and the answer of the one before,
which the instance most likely still has in its cache.

    event                            here
    -------------------------------  ----------------------------------------------------------
    an answer's first bytes          its response is noted, with its prompt
    it is complete                   what its usage says replaces the estimate; the answer's text
                                     becomes a key of its own, since nobody has read it
    another one continues it         is used, and so goes last when there is no room

Bounded in number, in keys and in age. A response is known by a hash of its id, which begins with a
secret and, where clients are isolated, with whose it is. Whoever schedules has the table; it is
lost with its process, and not shared between gateways. An unknown id is the engine's to judge.
"""

from __future__ import annotations

from collections import OrderedDict

from hetero_gateway.core.prefixes.keys import PrefixKeys, joined, key_of_one, namespace
from hetero_gateway.core.types import InstanceId

_MOST_RESPONSES = 100_000
# Of all of them together: some 60 MB.
_MOST_KEYS = 1_000_000
_KEPT_FOR_S = 86_400.0
# Until it is known how much text a token is.
_BYTES_PER_TOKEN = 4.0


class Response:
    """One response: where it is, how it and all in front of it begin.

    Attributes:
        tokens: of its prompt and, once it is complete, of its answer.
        model: that made it.
        keys: of the same; None: nobody asked for any.
        head: what another one must have, too, to begin with it.
    """

    __slots__ = ("head", "instance_id", "keys", "model", "name", "noted_s", "tokens")

    def __init__(
        self,
        name: bytes,
        instance_id: InstanceId,
        tokens: int,
        keys: PrefixKeys | None,
        head: int,
        model: str = "",
    ) -> None:
        self.name = name
        self.instance_id = instance_id
        self.tokens = tokens
        self.keys = keys
        self.head = head
        self.model = model
        self.noted_s = 0.0

    def __repr__(self) -> str:
        return f"<Response on {self.instance_id}, {self.tokens} tokens>"

    def prompt_after(self, added: PrefixKeys | None, head: int) -> PrefixKeys | None:
        """The keys of a prompt that continues it with what was ``added``."""
        if self.keys is None or added is None:
            return None
        before = self.keys
        if head != self.head:  # other instructions or tools in front: nothing begins alike
            before = PrefixKeys((), (), before.text_bytes)
        return joined(before, added)

    def complete(self, prompt_tokens: int, output_tokens: int) -> None:
        """Its usage is known: of the whole prompt, and of the answer."""
        self.tokens = prompt_tokens + output_tokens
        if self.keys is not None and output_tokens:
            size = self.keys.text_bytes
            per_token = size / prompt_tokens if size and prompt_tokens else _BYTES_PER_TOKEN
            answer = key_of_one(namespace(self.head, self.name), round(per_token * output_tokens))
            self.keys = joined(self.keys, answer)


class Responses:
    """The table. Nothing here reads a clock."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[bytes, Response] = OrderedDict()
        self._keys = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        return f"<Responses: {len(self)}, {self._keys} keys>"

    def note(self, response: Response, now_s: float) -> None:
        """An instance has begun to answer with it. ``now_s``: monotonic."""
        self._drop(response.name)
        response.noted_s = now_s
        self._by_name[response.name] = response
        self._keys += _keys_of(response)
        self._make_room(now_s)

    def complete(self, response: Response, prompt_tokens: int, output_tokens: int) -> None:
        """See ``Response.complete``."""
        before = _keys_of(response)
        response.complete(prompt_tokens, output_tokens)
        if self._by_name.get(response.name) is response:
            self._keys += _keys_of(response) - before

    def find(self, name: bytes, now_s: float) -> Response | None:
        """The one of this name, if it is known; it was used just now."""
        response = self._by_name.get(name)
        if response is None or now_s - response.noted_s > _KEPT_FOR_S:
            return None
        self._by_name.move_to_end(name)
        return response

    def _make_room(self, now_s: float) -> None:
        responses = self._by_name
        while responses and (
            len(responses) > _MOST_RESPONSES
            or self._keys > _MOST_KEYS
            or now_s - next(iter(responses.values())).noted_s > _KEPT_FOR_S
        ):
            self._drop(next(iter(responses)))

    def _drop(self, name: bytes) -> None:
        response = self._by_name.pop(name, None)
        if response is not None:
            self._keys -= _keys_of(response)


def _keys_of(response: Response) -> int:
    return 0 if response.keys is None else len(response.keys.hashes)
