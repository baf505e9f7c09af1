"""The prompt beginnings that an engine really has, from the blocks it reports.

An engine knows tokens and block hashes, a gateway texts and their keys (``caches``). They meet in a
request: the gateway gives it a name, the engine reports that name with the blocks it caches for it,
and so the gateway learns which block each key ends in. From then on a removed block takes its keys
with it: for bound keys, the index matches the engine to a block.

    stored       blocks were added, each behind another one; chains of them stand for texts
    ended        the request with a name has ended: its keys are bound to the blocks of its chain,
                 which may have begun with other requests, or bypassing the gateway
    removed      a block was evicted, and the keys that end in it; of equal blocks, with the last.
                 Keys of unfinished requests that end there are not bound later
    cleared      all blocks were removed
    doubted      something else found that all may be gone: the blocks must be reported again

Where a key ends in tokens follows from its bytes: the prompt's token count is known at the end, and
tokens are spread over the text evenly between the places that are bound already.

What a request found cached causes no event. Its beginning was bound when it was computed; keys that
are bound to nothing (beginnings computed before anyone listened, or sent by other gateways) stay
in the index as placements, and are evicted like those, the least recently used first.

A publisher may lie, but only about its own instance: nothing here is shared between instances. At
most ``most_blocks`` are kept; the oldest go first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from hetero_gateway.core.prefixes.caches import PrefixIndex
from hetero_gateway.core.types import InstanceId, PrefixKeys

T = TypeVar("T")

# Requests whose blocks, or whose end, are still to come.
_MOST_SESSIONS = 4096
# Blocks of one chain that are examined: 262 144 tokens of 16 each.
_MOST_DEPTH = 1 << 14
_ASSUMED_BLOCK_TOKENS = 128
# After this many computed prompts without a report, the engine no longer reports.
_SILENT_AFTER = 8
# After this many prompts whose names did not come with their blocks, the engine does not know
# names.
_NAMELESS_AFTER = 64


class _Block:
    """``parent``: the hash before it; None: it begins a text. ``depth``: the number of blocks
    before it; below 0: unknown. ``more``: additional copies of it: an engine that computes the same
    again keeps both. ``keys``: those that end in it.
    """

    __slots__ = ("depth", "keys", "more", "parent", "tokens")

    def __init__(self, parent: int | None, depth: int, tokens: int) -> None:
        self.parent = parent
        self.depth = depth
        self.tokens = tokens
        self.more = 0
        self.keys: list[int] | None = None


class EngineBlocks:
    """One instance's blocks.

    Args:
        index: has its keys.
        instance_id: its id in the index.
        most_blocks: how many are kept at most.

    Attributes:
        is_doubted: see ``doubted``; cleared by the caller that has everything reported again.
    """

    def __init__(self, index: PrefixIndex, instance_id: InstanceId, most_blocks: int) -> None:
        self.is_doubted = False
        self._index = index
        self._instance_id = instance_id
        self._most_blocks = most_blocks
        self._blocks: dict[int, _Block] = {}
        # Block, and tokens before the end, of each bound key.
        self._bound: dict[int, tuple[int, int]] = {}
        # The last stored block of each request that is still present (None: none is), and whether
        # any behind it has gone; and the requests whose last block it is.
        self._latest: dict[str, tuple[int | None, bool]] = {}
        self._last_of: dict[int, str] = {}
        self._ended: dict[str, tuple[PrefixKeys, int]] = {}  # before their blocks were reported
        self._unanswered = self._unnamed = 0
        self._block_tokens = _ASSUMED_BLOCK_TOKENS

    def __len__(self) -> int:
        return len(self._blocks)

    def __repr__(self) -> str:
        return f"<EngineBlocks of {self._instance_id}: {len(self)}, {len(self._bound)} keys bound>"

    @property
    def bound_keys(self) -> int:
        """Keys that the engine is known to have, to a block."""
        return len(self._bound)

    @property
    def silent(self) -> bool:
        """Whether reports have stopped although there must be something to report."""
        return self._unanswered >= _SILENT_AFTER or self.nameless

    @property
    def nameless(self) -> bool:
        """Whether it reports blocks without the names of their prompts."""
        return self._unnamed >= _NAMELESS_AFTER

    def hashes(self) -> Iterator[int]:
        """The hashes of all blocks assumed to be present."""
        return iter(self._blocks)

    def stored(
        self, hashes: Sequence[int], parent: int | None, block_tokens: int, session: str = ""
    ) -> None:
        """Add blocks, one behind the other."""
        blocks = self._blocks
        self._unanswered = 0
        before = None if parent is None else blocks.get(parent)
        depth = 0 if parent is None else -1
        if before is not None and before.depth >= 0:
            depth = before.depth + 1
        for each in hashes:
            known = blocks.pop(each, None)
            if known is None:
                known = _Block(parent, depth, block_tokens)
            else:
                known.more += 1
            blocks[each] = known
            parent, depth = each, known.depth + 1 if known.depth >= 0 else -1
        while len(blocks) > self._most_blocks:
            self._remove(next(iter(blocks)))
        if session and hashes:
            _keep(self._latest, session, (hashes[-1], False))
            self._last_of[hashes[-1]] = session
            self._unnamed = 0
            ended = self._ended.get(session)
            if ended is not None:
                self._bind(*ended, hashes[-1])

    def removed(self, hashes: Sequence[int]) -> None:
        """Remove blocks; unknown ones are ignored."""
        blocks = self._blocks
        for each in hashes:
            known = blocks.get(each)
            if known is not None and known.more:
                known.more -= 1
            else:
                self._remove(each)

    def _remove(self, each: int) -> None:
        block = self._blocks.pop(each, None)
        if block is None:
            return
        session = self._last_of.pop(each, None)
        if session is not None and self._latest.get(session, (None,))[0] == each:
            before = block.parent
            is_known = before is None or before in self._blocks
            self._latest[session] = before, is_known
            if before is not None and is_known:
                self._last_of[before] = session
        if block.keys is not None:
            for key in block.keys:
                if self._bound.get(key, (None,))[0] == each:
                    del self._bound[key]
                    self._index.drop(self._instance_id, key)

    def cleared(self) -> None:
        """Remove all blocks; the index has nothing of it any more."""
        self._blocks = {}
        self._bound = {}
        self._latest = {}
        self._last_of = {}
        self._ended = {}
        self._index.forget(self._instance_id)

    def doubted(self) -> None:
        """It was lost from sight, or restarted: its past reports are unreliable."""
        self.cleared()
        self.is_doubted = True

    def ended(
        self,
        session: str,
        keys: PrefixKeys,
        prompt_tokens: int,
        computed_tokens: float | None = None,
    ) -> None:
        """Note a complete request, whose prompt had these keys and this many tokens.

        Args:
            computed_tokens: the uncached part of them; None: unknown.
        """
        latest = self._latest.pop(session, None)
        if latest is not None:
            self._bind(keys, prompt_tokens, *latest)
            return
        _keep(self._ended, session, (keys, prompt_tokens))
        if computed_tokens is not None and computed_tokens >= 2 * self._block_tokens:
            self._unanswered += 1
            self._unnamed += 1

    def _bind(
        self, keys: PrefixKeys, prompt_tokens: int, latest: int | None, is_cut: bool = False
    ) -> None:
        """``is_cut``: what was behind the latest block is gone; None: everything is."""
        chain = [] if latest is None else self._chain(latest)
        if chain is None or not keys.text_bytes:
            return
        if chain:
            self._block_tokens = self._blocks[chain[-1]].tokens
        block_tokens, bound, held = self._block_tokens, self._bound, []
        # Where the last bound key ends: from there on bytes and tokens are spread evenly.
        from_bytes = from_tokens = 0
        begin = 0
        for key, end in zip(keys.hashes, keys.ends, strict=True):
            size_bytes, begin = end - begin, end
            known = bound.get(key)
            if known is not None and known[0] in self._blocks:
                from_bytes, from_tokens = end, known[1]
                continue
            share = (end - from_bytes) / max(1, keys.text_bytes - from_bytes)
            tokens = from_tokens + int(share * max(0, prompt_tokens - from_tokens))
            at = max(0, tokens // block_tokens - 1)
            if at >= len(chain):
                if not is_cut:
                    break
                self._index.drop(self._instance_id, key)
                continue
            block = self._blocks[chain[at]]
            if block.keys is None:
                block.keys = []
            block.keys.append(key)
            bound[key] = (chain[at], tokens)
            held.append((key, size_bytes))
        self._index.confirm(self._instance_id, held)

    def _chain(self, latest: int) -> list[int] | None:
        """The hashes of a text's blocks, its beginning first; None: not known."""
        chain: list[int] = []
        at: int | None = latest
        while at is not None:
            block = self._blocks.get(at)
            # Reported chains may be circular: depths are not.
            if block is None or not 0 <= block.depth < _MOST_DEPTH:
                return None
            if chain and block.depth != self._blocks[chain[-1]].depth - 1:
                return None
            chain.append(at)
            at = block.parent
        chain.reverse()
        return chain


def _keep(kept: dict[str, T], name: str, value: T) -> None:
    """Keep only the latest of them."""
    kept.pop(name, None)
    kept[name] = value
    if len(kept) > _MOST_SESSIONS:
        del kept[next(iter(kept))]
