"""What the instances are thought to have in their prefix caches, and how far that can be believed.

The index says what was sent where (``core/prefixes/index.py``), the trust of each instance how much
of that its engine really finds (``core/prefixes/trust.py``). Here they follow the scheduler's
events; its slots are the index's.

    event                       what changes
    dispatch                    the text is there
    first token never came      what the dispatch added is taken back: it was not all computed
    completed                   the text was used last
    an answer, or a counter     the trust of its instance
    removed, lost, restarted    its part is empty, its trust begins anew
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetero_gateway.core.costs.cost_model import FloatArray
from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.instances.table import Slots
from hetero_gateway.core.policies.base import Demand, Prefix
from hetero_gateway.core.prefixes.index import PrefixIndex
from hetero_gateway.core.prefixes.trust import Trust
from hetero_gateway.core.types import (
    COMPLETED,
    InstanceId,
    InstanceSpec,
    Outcome,
    PrefixKeys,
    Request,
)

# Of an instance that does not say what its KV cache holds: some machine's.
_ASSUMED_KV_TOKENS = 400_000
# Bytes of text per token until requests say it, and of how many of them the mean is.
_BYTES_PER_TOKEN = 4.0
_MEAN_OVER_REQUESTS = 256
# The index is made to fit anew when the ratio has moved by so much.
_MOVED = 1.1


class PrefixCaches:
    """The index and the trust of every instance."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self._trusts: dict[InstanceId, Trust] = {}
        self._kv_tokens: dict[InstanceId, float] = {}
        self._etas: FloatArray = np.ones(8)  # by slot
        # Of what was placed lately, and what the capacities are reckoned with.
        self._text_bytes = self._prompt_tokens = 0.0
        self._bytes_per_token = _BYTES_PER_TOKEN

    def __repr__(self) -> str:
        return f"<PrefixCaches of {len(self._trusts)} instances: {self.index!r}>"

    # Membership

    def join(self, spec: InstanceSpec, slot: int) -> None:
        """An instance with an empty cache."""
        tokens = self._kv_tokens[spec.instance_id] = _kv_tokens(spec)
        self.index.join(spec.instance_id, tokens * self._bytes_per_token, slot)
        self._trusts[spec.instance_id] = Trust()
        if slot >= self._etas.size:
            self._etas = np.concatenate((self._etas, np.ones(slot + 1)))
        self._etas[slot] = 1.0

    def change(self, before: InstanceSpec, spec: InstanceSpec) -> None:
        """Its cache may have another size; of one that is lost nobody knows what comes back."""
        tokens = _kv_tokens(spec)
        if tokens != self._kv_tokens[spec.instance_id]:
            self._kv_tokens[spec.instance_id] = tokens
            self.index.resize(spec.instance_id, tokens * self._bytes_per_token)
        if before.available and not spec.available:
            self.forget(spec.instance_id)

    def leave(self, instance_id: InstanceId) -> None:
        """It is gone. KeyError: unknown."""
        self.index.leave(instance_id)
        del self._trusts[instance_id], self._kv_tokens[instance_id]

    def forget(self, instance_id: InstanceId) -> None:
        """Its cache is empty: restarted, asleep, reset, or lost from sight. KeyError: unknown."""
        self.index.forget(instance_id)
        self._trusts[instance_id].reset()
        self._note_trust(instance_id)

    # What is there

    def behind(
        self, demand: Demand, request: Request, keys: PrefixKeys, states: Sequence[InstanceState]
    ) -> Demand:
        """What is left of a demand behind what each instance should have cached of the text, as
        far as trusted; the same where nobody has any of it.

        The last token is always computed: the first one of the answer is made of it.
        """
        levels = self.index.levels(keys)
        if not levels:
            return demand
        etas, size = self._etas, keys.text_bytes
        n, prompt, some = request.sequences, float(request.prompt_tokens), False
        most = max(0.0, prompt - 1)
        match: list[float] = []
        trust: list[float] = []
        cached: list[float] = []
        prefill: list[float] = []
        for state in states:
            bit, matched, eta = 1 << state.slot, 0.0, float(etas[state.slot])
            for mask, depth in levels:
                if mask & bit:
                    matched, some = depth / size * prompt, True
                    break
            if matched > most:
                matched = most
            tokens = eta * matched
            match.append(matched)
            trust.append(eta)
            cached.append(tokens)
            prefill.append(n * (prompt - tokens))
        return Demand(prefill, demand.kv_tokens, Prefix(match, trust, cached)) if some else demand

    def behind_wide(
        self, demand: Demand, request: Request, keys: PrefixKeys, slots: Slots
    ) -> Demand:
        """The same by slot, in arrays."""
        matched = self.index.by_slot(keys, self._etas.size)[slots]
        if not matched.any():
            return demand
        prompt, trust = float(request.prompt_tokens), self._etas[slots]
        match = np.minimum(matched / keys.text_bytes * prompt, max(0.0, prompt - 1))
        cached = trust * match
        prefill = request.sequences * (prompt - cached)
        return Demand(prefill, demand.kv_tokens, Prefix(match, trust, cached))

    def eta(self, instance_id: InstanceId) -> float:
        """How much of what an instance should have cached it really has, 0 to 1. KeyError."""
        return self._trusts[instance_id].eta

    # A request's events

    def placed(self, dispatch: Dispatch, keys: PrefixKeys) -> None:
        """It was sent to its instance, and with it the text of these keys.

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
        """It is over."""
        known, dispatch.known_keys = dispatch.known_keys, None
        state = dispatch.state
        instance_id = state.instance_id
        if known is None or instance_id not in self._trusts:
            return
        shared_bytes = self.index.end(instance_id, keys)
        state.shared_tokens = shared_bytes / self._bytes_per_token
        if outcome is COMPLETED:
            self.index.insert(instance_id, keys)  # used once more
        elif not dispatch.streaming:
            self.index.withdraw(instance_id, keys, known)

    # What is observed

    def observe(self, dispatch: Dispatch, cached_tokens: float) -> None:
        """It is known of a completed request how many of its prompt's tokens were cached."""
        trust = self._trusts.get(dispatch.instance_id)
        if trust is None or dispatch.request.prefix is None:
            return
        trust.observe(dispatch.match_tokens, cached_tokens)
        self._note_trust(dispatch.instance_id)

    def switch(self, instance_id: InstanceId, *, on: bool) -> None:
        """An engine says whether it has a prefix cache. KeyError: unknown."""
        self._trusts[instance_id].switch(on=on)
        self._note_trust(instance_id)

    def _note_trust(self, instance_id: InstanceId) -> None:
        self._etas[self.index.slot(instance_id)] = self._trusts[instance_id].eta


def _kv_tokens(spec: InstanceSpec) -> float:
    told = spec.profile.kv_capacity_tokens if spec.profile else spec.kv_capacity_tokens
    return float(told or _ASSUMED_KV_TOKENS)
