"""Tracks which instance made which response, and how a continuation of it begins.

vLLM keeps responses (VLLM_ENABLE_RESPONSES_API_STORE=1) in the memory of the server that made them.
So a request that names one, by ``previous_response_id`` or a path, goes to that instance or to
none. And its prompt is longer than its body: it begins with the prompt and the answer of the
previous one, which the instance most likely still has in its cache.

    event                            here
    -------------------------------  ----------------------------------------------------------
    an answer's first bytes          its response is noted, with its prompt
    it is complete                   its usage replaces the estimate; the answer's text becomes a
                                     key of its own, since it was not read
    another one continues it         it was used, and so is dropped last

Bounded in number, in keys and in age; an owner with more than its share gives way. A response is
known by a hash of its id, which begins with a secret and with its owner: if clients have names or
are isolated, another client's response does not exist for them. The scheduling process has the
table, and each worker what it passed on, which it reports to a new scheduler process; it is lost
with the gateway, and not shared between gateways. An unknown id is refused if responses have
owners, and otherwise left to the engine.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import islice

from hetero_gateway.core.request import joined, key_of_one, namespace
from hetero_gateway.core.types import InstanceId, PrefixKeys

_MOST_RESPONSES = 100_000
# Of all of them together: some 60 MB.
_MOST_KEYS = 1_000_000
_KEPT_FOR_S = 86_400.0
# Until the amount of text per token is known.
_BYTES_PER_TOKEN = 4.0


@dataclass(slots=True, eq=False, repr=False)
class Response:
    """One response: its instance, and how it and everything before it begins.

    Attributes:
        tokens: of its prompt and, once it is complete, of its answer.
        model: that made it.
        keys: of the same; None: not wanted.
        head: must be equal for a continuation to begin with it.
        owner: the name of its client; "" for all without one.
    """

    name: bytes
    instance_id: InstanceId
    tokens: int
    keys: PrefixKeys | None
    head: int
    model: str = ""
    owner: str = ""
    noted_s: float = 0.0

    def __repr__(self) -> str:
        return f"<Response on {self.instance_id}, {self.tokens} tokens>"

    def prompt_after(self, added: PrefixKeys | None, head: int) -> PrefixKeys | None:
        """The keys of a prompt that continues it with what was ``added``."""
        if self.keys is None or added is None:
            return None
        before = self.keys
        if head != self.head:  # other instructions or tools first: no common beginning
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
        self._by_name: dict[bytes, Response] = {}
        # Each owner's, most recently used last.
        self._by_owner: dict[str, OrderedDict[bytes, Response]] = {}
        self._keys_by_owner: Counter[str] = Counter()
        self._keys = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        return f"<Responses: {len(self)}, {self._keys} keys>"

    def latest(self, count: int) -> list[Response]:
        """At most this many, in the order in which they were made."""
        return [*islice(reversed(self._by_name.values()), count)][::-1]

    def owners(self) -> dict[str, int]:
        """The number of responses of each owner."""
        return {owner: len(mine) for owner, mine in self._by_owner.items()}

    def note(self, response: Response, now_s: float) -> None:
        """An instance has begun to answer with it. ``now_s``: monotonic."""
        self._drop(response.name)
        response.noted_s = now_s
        self._by_name[response.name] = response
        mine = self._by_owner.setdefault(response.owner, OrderedDict())
        mine[response.name] = response
        self._count(response.owner, _keys_of(response))
        self._make_room(response, now_s)

    def complete(self, response: Response, prompt_tokens: int, output_tokens: int) -> None:
        """See ``Response.complete``."""
        before = _keys_of(response)
        response.complete(prompt_tokens, output_tokens)
        if self._by_name.get(response.name) is response:
            self._count(response.owner, _keys_of(response) - before)

    def find(self, name: bytes, now_s: float) -> Response | None:
        """The response of this name, if known; it counts as just used."""
        response = self._by_name.get(name)
        if response is None or now_s - response.noted_s > _KEPT_FOR_S:
            return None
        self._by_owner[response.owner].move_to_end(name)
        return response

    def _make_room(self, latest: Response, now_s: float) -> None:
        mine = self._by_owner[latest.owner]
        while now_s - (first := next(iter(mine.values()))).noted_s > _KEPT_FOR_S:
            self._drop(first.name)  # never the latest
        # By the latest one's owner, who most often has too many.
        own, owners = latest.owner, self._by_owner
        while len(self._by_name) > _MOST_RESPONSES:
            above = len(owners.get(own, ())) * len(owners) >= len(self._by_name)
            self._drop_of(own if above else max(owners, key=lambda owner: len(owners[owner])))
        keys = self._keys_by_owner
        while self._keys > _MOST_KEYS:
            above = keys[own] * len(owners) >= self._keys
            self._drop_of(own if above else max(keys, key=keys.__getitem__))

    def _drop_of(self, owner: str) -> None:
        """The least recently used response of an owner."""
        self._drop(next(iter(self._by_owner[owner])))

    def _drop(self, name: bytes) -> None:
        response = self._by_name.pop(name, None)
        if response is None:
            return
        owner = response.owner
        self._count(owner, -_keys_of(response))
        mine = self._by_owner[owner]
        del mine[name]
        if not mine:
            del self._by_owner[owner], self._keys_by_owner[owner]

    def _count(self, owner: str, keys: int) -> None:
        self._keys += keys
        self._keys_by_owner[owner] += keys


def _keys_of(response: Response) -> int:
    return 0 if response.keys is None else len(response.keys.hashes)
