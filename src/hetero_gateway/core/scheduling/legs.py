"""Requests that two instances share: which may be split, at what price, and the prefill leg.

    scheduler.legs.set_roles(roles, pairs)          # then pump
    ticket.prefill, ticket.dispatch                 # of a split request: both legs
    scheduler.legs.prefilled(ticket.prefill, now_s) # its prompt is computed: hand it over
    scheduler.legs.asked(ticket.prefill, ticket.dispatch, now_s)
    scheduler.first_token(ticket.dispatch, now_s)   # the KV was fetched, and
    scheduler.settle(ticket.prefill, …)             # is released there

Each leg is settled like any dispatch, once, in any order.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.instances.pairs import Pairs
from hetero_gateway.core.policies import Policy
from hetero_gateway.core.policies.base import Decision
from hetero_gateway.core.policies.finish_time import FinishTime
from hetero_gateway.core.policies.legs import FinishTimeOfLegs, RolePrice
from hetero_gateway.core.prefixes.caches import PrefixCaches
from hetero_gateway.core.scheduling.decider import Decider
from hetero_gateway.core.scheduling.members import Members
from hetero_gateway.core.scheduling.restraints import Restraints
from hetero_gateway.core.types import PREFILL, InstanceId


class Legs:
    """The legs of one scheduler, whose parts it is given.

    ``pairs``: which instances can hand prompts over to which; None: none. ``roles``: prices of legs
    by instance; None: no request is split. ``models``: whose requests may be split; None: all.
    """

    __slots__ = (
        "_caches", "_decider", "_members", "_policy", "_restraints", "models", "pairs", "roles",
    )  # fmt: skip

    def __init__(
        self,
        decider: Decider,
        members: Members,
        restraints: Restraints,
        caches: PrefixCaches | None,
    ) -> None:
        self._decider = decider
        self._members = members
        self._restraints = restraints
        self._caches = caches
        self._policy = decider.policy
        self.pairs: Pairs | None = None
        self.roles: Mapping[InstanceId, RolePrice] | None = None
        self.models: frozenset[str] | None = None

    def decide_by(self, policy: Policy) -> None:
        """Use this policy from now on, and split requests if it can."""
        self._policy = policy
        if self.pairs is not None and self.roles is not None and isinstance(policy, FinishTime):
            policy = FinishTimeOfLegs(policy, self.pairs, self.roles, self.models)
        self._decider.set_policy(policy)

    def set_roles(
        self,
        roles: Mapping[InstanceId, RolePrice] | None,
        pairs: Pairs | None = None,
        models: frozenset[str] | None = None,
    ) -> None:
        """Set the prices of legs by instance; None: no request is split. Pump afterwards.

        Only ``finish-time`` uses them.

        Args:
            pairs: which instances can hand prompts over, and how fast; None: as before.
            models: whose requests may be split; None: all.
        """
        self.roles, self.models = roles, models
        if pairs is not None:
            self.pairs = pairs if len(pairs) else None
        self.decide_by(self._policy)

    def refused(self, now_s: float) -> dict[tuple[InstanceId, InstanceId], float]:
        """Pairs that could not hand over, and are not used for this many seconds more."""
        return {} if self.pairs is None else self.pairs.refused(now_s)

    def dispatch(self, decision: Decision, now_s: float) -> Dispatch:
        """Put a prefill leg on its instance; what is left of the decision is the answer's.

        ValueError: it cannot be charged.
        """
        choice, instance_id, pairs = decision.choice, decision.prefill_id, self.pairs
        assert instance_id is not None
        assert pairs is not None
        state = self._members.table.states[instance_id]
        # Its answer has one token, which nobody sees.
        request = decision.request.replace(predicted_output_tokens=0.0, streams=False)
        prefix, lacks, cached = decision.prefix, float(request.prompt_tokens), 0.0
        if prefix is not None:
            cached = prefix.cached_tokens[choice.prefill_position]
            lacks -= prefix.cached_tokens[choice.position]
        tokens = request.sequences * (request.prompt_tokens - cached)
        prefill = state.dispatch(request, choice.prefill_charge, now_s, None, tokens)
        prefill.leg, prefill.before, prefill.expected_s = PREFILL, None, choice.prefill_s
        decision.prefill_tokens = 0.0
        pairs.sent(instance_id, decision.instance_id, request.sequences * lacks, now_s)
        if self._restraints.by_id:
            self._restraints.sent(prefill, now_s)
        if request.prefix is not None and self._caches is not None:
            if prefix is not None:
                prefill.match_tokens = prefix.match_tokens[choice.prefill_position]
            self._caches.placed(prefill, request.prefix)
        return prefill

    def prefilled(self, dispatch: Dispatch, now_s: float) -> None:
        """Note that a prefill leg's prompt is computed and its KV waits to be fetched. Only the
        first call counts; what it holds is taken off when it settles.
        """
        if dispatch.state.prefilled(dispatch, now_s):
            self._decider.freed.append(dispatch.instance_id)

    def asked(self, prefill: Dispatch, decode: Dispatch, now_s: float) -> None:
        """Note that the decode instance was asked: it owes the first token from now on."""
        decode.sent_s = now_s
        decode.expected_s = max(0.0, decode.expected_s - prefill.expected_s)
