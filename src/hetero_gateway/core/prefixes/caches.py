"""The assumed contents of the instances' prefix caches, and how far to trust them.

``keys`` names a text's beginnings, ``PrefixIndex`` records what was sent where, ``trust`` how much
of that an engine really finds, and ``engine_blocks`` what an engine reports itself.
``PrefixCaches`` updates them from the scheduler's events:

    event                       what changes
    dispatch                    the text is added
    first token never came      what the dispatch added is taken back: it was not all computed
    completed                   the text was used last
    an answer, or a counter     the trust of its instance
    removed, lost, restarted    its part is emptied, its trust starts over

**The index.** An engine keeps the KV blocks it has computed until it needs the space, evicting the
least recently used first, and of one text the end before the beginning. The index does the same:
for each instance it keeps as many bytes of text as its KV cache has tokens for. It is an estimate;
the instance's trust learns how good it is (``trust``). It contains no text, only keys.

    key → mask       one bit per instance that has it
    instance → keys  in the order of last use; both in small dicts (``key_tables``)

    lookup           gallops: along a text's keys the masks only shrink, since beginnings outlive
                     ends, so between two keys with equal masks there is nothing to look at
    insert, touch    the end first, so that an instance's keys begin with what is evicted first.
                     Keys used together are in one dict, where each next one is looked for
    eviction         in batches
    begin, end       how many of the present requests have a key. A block that several refer to is
                     in the cache once, so tokens counted twice are not held twice

A million keys take 100 to 130 MB (``memory_bytes``), in a small index more. Everything is bounded
by the instances' capacities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.prefixes.key_tables import LAST_BITS, UNIT_BYTES, KeyTables
from hetero_gateway.core.prefixes.sources import CacheSource, EngineWord
from hetero_gateway.core.prefixes.trust import Trust
from hetero_gateway.core.types import COMPLETED, InstanceId, InstanceSpec, Outcome, PrefixKeys

# Keys that are only looked up: as ints, each look would make a new object where this is compiled.
_Hashes = tuple[Any, ...]


class PrefixIndex(KeyTables):
    """The estimate for all instances."""

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self)} keys of {len(self._members)} instances>"

    # Sending

    def insert(self, instance_id: InstanceId, keys: PrefixKeys) -> int:
        """Note that a text was sent there; returns how many of its first keys were there. KeyError:
        unknown.

        The same text again, when it is finished, is a ``touch``.
        """
        member = self._members[instance_id]
        masks, bit, newest = self._masks, member.bit, member.newest
        hashes: _Hashes = keys.hashes
        ends, known, used, at = keys.ends, 0, member.used, newest
        if self._forgotten:
            self._forget_more(bit)
        begins = (0, *ends)  # of the pieces, in front of the last end
        for i in range(len(hashes) - 1, -1, -1):
            key = hashes[i]
            size = at.pop(key, 0) if known else 0
            if size:
                known += 1
            else:
                part = masks[key & LAST_BITS]
                mask = part.get(key, 0)
                if mask & bit:
                    known += 1
                    size = at.pop(key, 0)
                    if not size:
                        at = member.find(key)
                        size = at.pop(key)
                else:
                    size = (ends[i] - begins[i]) // UNIT_BYTES or 1
                    used += size
                    # The bit itself is one object for all keys that only this instance has.
                    part[key] = mask | bit if mask else bit
            newest[key] = size
        member.used = used
        if len(newest) > member.most_new:
            member.begin_part()
        if used > member.capacity:
            self._evict(member)
        return known

    def touch(self, instance_id: InstanceId, keys: PrefixKeys) -> None:
        """Note that a text was used there again, or is certainly there now. KeyError: unknown."""
        member = self._members[instance_id]
        at = newest = member.newest
        hashes: _Hashes = keys.hashes
        for key in reversed(hashes):
            size = at.pop(key, 0)
            if not size:
                at = member.find(key)
                size = at.pop(key, 0)
                if not size:  # evicted since
                    self.insert(instance_id, keys)
                    return
            newest[key] = size

    def use(self, instance_id: InstanceId, keys: PrefixKeys) -> None:
        """Note that the present part of a text was used again. KeyError: unknown."""
        member = self._members[instance_id]
        at = newest = member.newest
        hashes: _Hashes = keys.hashes
        for key in reversed(hashes):
            if key not in at:
                at = member.find(key)
            size = at.pop(key, 0)
            if size:
                newest[key] = size

    def withdraw(self, instance_id: InstanceId, keys: PrefixKeys, known: int) -> None:
        """It was not computed there after all: take off what ``insert`` added.

        Args:
            known: what ``insert`` returned.

        An instance that is gone meanwhile is no error.
        """
        member = self._members.get(instance_id)
        if member is None:
            return
        at = member.newest
        for key in keys.hashes[known:]:
            at = self._take(member, key, at)

    # Present requests

    def begin(self, instance_id: InstanceId, keys: PrefixKeys) -> int:
        """Note that a text's request is there from now on, until ``end``. KeyError: unknown.

        Returns the bytes that the texts of present requests have in common with others there: the
        engine holds them once, and each request counts them.
        """
        member = self._members[instance_id]
        running = member.running
        hashes: _Hashes = keys.hashes
        shared = None
        for key in hashes:
            count = running.get(key, 0)
            running[key] = count + 1
            if count:
                shared = key
        if shared is not None:
            member.shared_bytes += keys.ends[hashes.index(shared)]
        return member.shared_bytes

    def end(self, instance_id: InstanceId, keys: PrefixKeys) -> int:
        """Note that it has ended; returns as ``begin``. KeyError: unknown, or it had not begun."""
        member = self._members[instance_id]
        running = member.running
        hashes: _Hashes = keys.hashes
        shared = None
        for key in hashes:
            count = running.pop(key)
            if count > 1:
                running[key] = count - 1
                shared = key
        if shared is not None:
            member.shared_bytes -= keys.ends[hashes.index(shared)]
        return member.shared_bytes

    # Lookup

    def levels(self, keys: PrefixKeys) -> list[tuple[int, int]]:
        """(mask, matched bytes) for each depth at which some instances' match ends, deepest last.

        A mask has the bit ``1 << slot`` of each instance; every instance that has any of the text
        is in exactly one.
        """
        hashes: _Hashes = keys.hashes
        masks = self._masks
        if not hashes:
            return []
        key = hashes[0]
        low, here = 0, masks[key & LAST_BITS].get(key, 0) & ~self._hidden
        result: list[tuple[int, int]] = []
        last = len(hashes) - 1
        while here:
            # The deepest key at which all of these are still present.
            step, high, beyond = 1, last + 1, 0
            while low + step <= last:
                key = hashes[low + step]
                mask = masks[key & LAST_BITS].get(key, 0) & here
                if mask != here:
                    high, beyond = low + step, mask
                    break
                low += step
                step *= 2
            else:
                high, beyond = self._probe(hashes, low, last, here)
            while high - low > 1:
                middle = (low + high) // 2
                key = hashes[middle]
                mask = masks[key & LAST_BITS].get(key, 0) & here
                if mask == here:
                    low = middle
                else:
                    high, beyond = middle, mask
            result.append((here ^ beyond, keys.ends[low]))
            low, here = high, beyond
        return result

    def _probe(self, hashes: _Hashes, low: int, last: int, here: int) -> tuple[int, int]:
        """Where galloping overshot the end: (the first key that not all have, the instances that
        do)."""
        if low == last:
            return last + 1, 0
        key = hashes[last]
        mask = self._masks[key & LAST_BITS].get(key, 0) & here
        return (last + 1, 0) if mask == here else (last, mask)


# Of an instance whose KV capacity is unknown: a typical machine's.
_ASSUMED_KV_TOKENS: Final = 400_000
# Bytes of text per token until requests show it, and the number of them that the mean covers.
_BYTES_PER_TOKEN: Final = 4.0
_MEAN_OVER_REQUESTS: Final = 256
# Of an instance that reports its evictions: this much more than its KV cache should hold.
_ROOM_OF_EXACT: Final = 2.0
# The index is resized when the ratio has moved by this much.
_MOVED: Final = 1.1


class Prefix:
    """What the candidates should have cached of a prompt: one entry each, for one sequence.

    ``match_tokens``: how much of the prompt was sent there before. ``trust``: the observed share of
    that that is really found, 0 to 1. ``cached_tokens``: their product, at most all but one.
    """

    __slots__ = ("cached_tokens", "match_tokens", "trust")

    def __init__(
        self,
        match_tokens: Sequence[float],
        trust: Sequence[float],
        cached_tokens: Sequence[float],
    ) -> None:
        self.match_tokens = match_tokens
        self.trust = trust
        self.cached_tokens = cached_tokens


class PrefixCaches:
    """The index and the trust of every instance.

    Attributes:
        index: the assumed contents of each cache.
        is_shared: whether placements of other gateways are known now, too; None: never.
    """

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.is_shared: Callable[[], bool] | None = None
        self._blocks: dict[InstanceId, EngineWord] = {}  # of those that report
        self._trusts: dict[InstanceId, Trust] = {}
        self._kv_tokens: dict[InstanceId, float] = {}
        self._etas: dict[int, float] = {}  # by slot
        # Of recent placements, and the ratio that the capacities are computed with.
        self._text_bytes = self._prompt_tokens = 0.0
        self._bytes_per_token = _BYTES_PER_TOKEN

    def __repr__(self) -> str:
        return f"<PrefixCaches of {len(self._trusts)} instances: {self.index!r}>"

    # Membership

    def join(self, spec: InstanceSpec, slot: int) -> None:
        """Add an instance with an empty cache."""
        tokens = self._kv_tokens[spec.instance_id] = _kv_tokens(spec)
        self.index.join(spec.instance_id, tokens * self._bytes_per_token, slot)
        self._trusts[spec.instance_id] = Trust()
        self._etas[slot] = 1.0

    def change(self, before: InstanceSpec, spec: InstanceSpec) -> None:
        """Its cache may have another size; if it was lost, its contents on return are unknown."""
        tokens = _kv_tokens(spec)
        if spec.instance_id in self._blocks:
            tokens *= _ROOM_OF_EXACT
        if tokens != self._kv_tokens[spec.instance_id]:
            self._set_tokens(spec.instance_id, tokens)
        if before.available and not spec.available:
            self.forget(spec.instance_id)

    def leave(self, instance_id: InstanceId) -> None:
        """Remove an instance. KeyError: unknown."""
        self._blocks.pop(instance_id, None)
        self.index.leave(instance_id)
        del self._trusts[instance_id], self._kv_tokens[instance_id]

    def forget(self, instance_id: InstanceId) -> None:
        """Empty its cache: restarted, asleep, reset, or lost from sight. KeyError: unknown."""
        self.index.forget(instance_id)
        blocks = self._blocks.get(instance_id)
        if blocks is not None:
            blocks.doubted()
        self._trusts[instance_id].reset()
        self._note_trust(instance_id)

    # Reports of engines

    def listen(self, instance_id: InstanceId, blocks: EngineWord) -> None:
        """Follow an engine's reports of its blocks from now on. KeyError: unknown."""
        if instance_id not in self._blocks:
            # An instance that reports its evictions needs no guesses.
            self._set_tokens(instance_id, _ROOM_OF_EXACT * self._kv_tokens[instance_id])
        self._blocks[instance_id] = blocks

    def listen_no_more(self, instance_id: InstanceId) -> None:
        """Its reports have ended: what is known stays, as if it had been sent there."""
        if self._blocks.pop(instance_id, None) is not None:
            self._set_tokens(instance_id, self._kv_tokens[instance_id] / _ROOM_OF_EXACT)

    def _set_tokens(self, instance_id: InstanceId, tokens: float) -> None:
        self._kv_tokens[instance_id] = tokens
        self.index.resize(instance_id, tokens * self._bytes_per_token)

    def source(self, instance_id: InstanceId) -> CacheSource:
        """The source of knowledge about an instance's cache."""
        blocks = self._blocks.get(instance_id)
        if blocks is not None and not blocks.silent:
            return CacheSource.EXACT
        shared = self.is_shared is not None and self.is_shared()
        return CacheSource.SHARED if shared else CacheSource.OWN

    # Lookup

    def cached(
        self, prompt_tokens: int, keys: PrefixKeys, states: Sequence[InstanceState]
    ) -> Prefix | None:
        """What each instance should have cached of the text, weighted by trust; None: no instance
        has any of it.

        The last token is always computed: the first one of the answer is made from it.
        """
        levels = self.index.levels(keys)
        if not levels:
            return None
        etas, size = self._etas, keys.text_bytes
        prompt, some = float(prompt_tokens), False
        most = prompt - 1 if prompt > 1 else 0.0
        match: list[float] = []
        trust: list[float] = []
        cached: list[float] = []
        for state in states:
            bit, matched, eta = 1 << state.slot, 0.0, etas[state.slot]
            for mask, depth in levels:
                if mask & bit:
                    matched, some = depth / size * prompt, True
                    break
            if matched > most:
                matched = most
            match.append(matched)
            trust.append(eta)
            cached.append(eta * matched)
        return Prefix(match, trust, cached) if some else None

    def eta(self, instance_id: InstanceId) -> float:
        """The share really present of what an instance should have cached, 0 to 1. KeyError:
        unknown."""
        return self._trusts[instance_id].eta

    # Another process's knowledge

    def trust(self, instance_id: InstanceId) -> tuple[float, float]:
        """See ``Trust.sums``. KeyError: unknown."""
        return self._trusts[instance_id].sums()

    def lately(self) -> tuple[float, float, float]:
        """Bytes of text and tokens of recent placements; bytes per token in use."""
        return self._text_bytes, self._prompt_tokens, self._bytes_per_token

    def take_over_lately(self, text_bytes: float, tokens: float, bytes_per_token: float) -> None:
        """Continue from another process's ``lately``."""
        self._text_bytes, self._prompt_tokens = text_bytes, tokens
        self._bytes_per_token = bytes_per_token
        for instance_id, capacity in self._kv_tokens.items():
            self.index.resize(instance_id, capacity * bytes_per_token)

    def take_over(
        self,
        instance_id: InstanceId,
        held: Sequence[tuple[int, int]],
        trust: tuple[float, float],
    ) -> None:
        """Take over another process's knowledge of one instance. KeyError: unknown."""
        self.index.hold(instance_id, held)
        self._trusts[instance_id].take_over(*trust)
        self._note_trust(instance_id)

    # A request's events

    def placed(self, dispatch: Dispatch, keys: PrefixKeys) -> None:
        """Note that a request, and the text of these keys, was sent to its instance.

        Here and in ``settled``, its state notes the change with its own part of the event.
        """
        state = dispatch.state
        instance_id = state.instance_id
        dispatch.known_keys = self.index.insert(instance_id, keys)
        shared_bytes = self.index.begin(instance_id, keys)
        state.shared_tokens = shared_bytes / self._bytes_per_token
        keep = 1 - 1 / _MEAN_OVER_REQUESTS
        self._text_bytes = keep * self._text_bytes + keys.text_bytes
        self._prompt_tokens = keep * self._prompt_tokens + dispatch.prompt_tokens
        if self._prompt_tokens > 0 and self._text_bytes > 0:
            moved = self._text_bytes / self._prompt_tokens / self._bytes_per_token
            if not 1 / _MOVED < moved < _MOVED:
                self._bytes_per_token *= moved
                for instance_id, tokens in self._kv_tokens.items():
                    self.index.resize(instance_id, tokens * self._bytes_per_token)

    def settled(self, dispatch: Dispatch, keys: PrefixKeys, outcome: Outcome) -> None:
        """Note that it has ended."""
        known, dispatch.known_keys = dispatch.known_keys, None
        state = dispatch.state
        instance_id = state.instance_id
        if known is None or instance_id not in self._trusts:
            return
        shared_bytes = self.index.end(instance_id, keys)
        state.shared_tokens = shared_bytes / self._bytes_per_token
        if outcome is COMPLETED:
            if instance_id in self._blocks and self.source(instance_id) is CacheSource.EXACT:
                self.index.use(instance_id, keys)  # the engine itself reports what is there
            else:
                self.index.touch(instance_id, keys)
        elif not dispatch.streaming:
            self.index.withdraw(instance_id, keys, known)

    # Observations

    def observe(self, dispatch: Dispatch, cached_tokens: float) -> None:
        """Note how many of a completed request's prompt tokens were cached."""
        trust = self._trusts.get(dispatch.instance_id)
        if trust is None or dispatch.request.prefix is None:
            return
        trust.observe(dispatch.match_tokens, cached_tokens)
        self._note_trust(dispatch.instance_id)

    def switch(self, instance_id: InstanceId, *, on: bool) -> None:
        """Note whether an engine has a prefix cache at all. KeyError: unknown."""
        self._trusts[instance_id].switch(on=on)
        self._note_trust(instance_id)

    def _note_trust(self, instance_id: InstanceId) -> None:
        self._etas[self.index.slot(instance_id)] = self._trusts[instance_id].eta


def _kv_tokens(spec: InstanceSpec) -> float:
    told = spec.profile.kv_capacity_tokens if spec.profile else spec.kv_capacity_tokens
    return float(told or _ASSUMED_KV_TOKENS)
