"""Whether to split requests over the instances of a plan. Pure.

The best of the plan is simulated at the plan's rate, unsplit and with the roles that a gateway
would find. Instances can hand over to each other if vLLM's handshake allows it: the same attention
backend and, for every model, the same tensor parallelism.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping

import numpy as np

from hetero_gateway.core.instances.pairs import Pairs
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.core.types import InstanceId
from hetero_gateway.planner.accelerators import Accelerator
from hetero_gateway.planner.goals import Goals
from hetero_gateway.planner.plan import Key, Plan, SplitVerdict
from hetero_gateway.planner.question import Question, reduced
from hetero_gateway.planner.reasons import instances
from hetero_gateway.planner.roles import Roles, find_roles, legs_of, run_under
from hetero_gateway.planner.sizes import as_size
from hetero_gateway.planner.splitting import SPLITTING_POLICY
from hetero_gateway.sim.alone import Mix
from hetero_gateway.sim.held import held_loads
from hetero_gateway.sim.result import RunResult
from hetero_gateway.sim.workload import Workload, gamma_arrivals

# Requests that roles are found from, and of each reported run.
_LAST, _REQUESTS = 1000, 1500
# Tried loads with the roles, in shares of the plan's rate, up to so many times it.
_STEP, _MOST = 0.05, 2.0
_ARRIVALS = 6


def backend_of(accelerator: Accelerator) -> str:
    """A name for the attention backends that vLLM uses on it; equal ones can hand over.

    Compute capability 8 and 9 have FlashAttention, newer and older ones have others; for other
    makes, the same accelerator.
    """
    capability = accelerator.cuda_capability
    if capability is None:
        return re.sub(r"[^a-z0-9]+", "-", accelerator.name.lower()).strip("-")[:40] or "one"
    return "sm7" if capability < 8 else "sm8" if capability < 10 else "sm10"


def with_verdict(plan: Plan, question: Question) -> Plan:
    """The plan with the gain of splitting for its best; unchanged if not requested."""
    if question.transfer is None:
        return plan
    return dataclasses.replace(plan, splitting=_Trial(plan, question).verdict())


class _Trial:
    def __init__(self, plan: Plan, question: Question) -> None:
        asked = question.transfer
        assert asked is not None
        self._question, self._transfers = question, asked.transfers
        self._goals: Goals = question.goals
        self._slo = question.goals.slo or Slo()
        self._rate_per_s = plan.rate_per_s
        counts = instances(plan.best, {m.id: m for m in plan.machines})
        self._counts: Mapping[Key, int] = dict(sorted(counts.items()))
        groups = {
            key: f"{asked.backends[key[0]]}-tp{as_size(key[1]).tensor}"
            for key in self._counts
            if as_size(key[1]).plain
        }
        sizes = Counter[str]()
        for key, group in groups.items():
            sizes[group] += self._counts[key]
        self._groups = {key: group for key, group in groups.items() if sizes[group] > 1}
        profiles = {plan.types[key].profile: key for key in self._counts}
        system = reduced(
            {profile: self._counts[key] for profile, key in profiles.items()},
            {profile: plan.alone[key] for profile, key in profiles.items()},
            question.requests,
        )
        self._share = system.share
        self._instances = system.simulated()
        self._keys = {each.instance_id: profiles[each.profile] for each in self._instances}
        self._mix = Mix.of(question.lengths, question.seed)
        most = max(each.profile.max_num_seqs for each in self._instances)
        self._step_tokens = max(question.engines.max_batched_tokens, most)

    def verdict(self) -> SplitVerdict:
        if self._question.policy != SPLITTING_POLICY:
            return self._says(f"the policy {self._question.policy} splits nothing")
        if not len(self._pairs()):
            return self._says(
                "no two instances can hand over to each other: each has another attention "
                "backend or tensor parallelism"
            )
        rate_per_s = self._rate_per_s
        roles = find_roles(
            self._instances,
            self._workload(rate_per_s, _LAST, self._question.seed + 1),
            self._pairs,
            self._slo,
            heeds_slo=self._goals.slo is not None,
            max_batched_tokens=self._step_tokens,
        )
        if roles is None:
            return self._says("it brings nothing to these requests at this rate")
        whole, split = self._run(None, rate_per_s), self._run(roles, rate_per_s)
        legs = Counter((self._keys[id], leg) for id, leg in legs_of(roles).items())
        return self._says(
            "",
            unsplit=(whole.latency_s.mean, whole.slo_share),
            split=(split.latency_s.mean, split.slo_share),
            holds_per_s=self._held(roles),
            prefills={key: self._whole_count(key, legs) for key in self._groups} if legs else {},
        )

    def _says(
        self,
        why_not: str,
        *,
        unsplit: tuple[float, float] = (math.nan, math.nan),
        split: tuple[float, float] = (math.nan, math.nan),
        holds_per_s: float | None = None,
        prefills: Mapping[Key, int] | None = None,
    ) -> SplitVerdict:
        return SplitVerdict(
            self._transfers, self._groups, why_not, unsplit, split, holds_per_s, prefills or {}
        )

    def _whole_count(self, key: Key, legs: Mapping[tuple[Key, str], int]) -> int:
        """Of all instances of a type: those that get prompts, in proportion to the simulated
        ones."""
        prefills, answers = legs.get((key, "prefill"), 0), legs.get((key, "decode"), 0)
        return round(self._counts[key] * prefills / max(1, prefills + answers))

    def _pairs(self) -> Pairs:
        groups: dict[InstanceId, str | None] = {
            one.instance_id: self._groups.get(self._keys[one.instance_id])
            for one in self._instances
        }
        every = self._transfers.pairs(self._instances)
        return Pairs(
            every.kv_bytes_per_token,
            {
                (one, other): link
                for (one, other), link in every.links().items()
                if groups[one] is not None and groups[one] == groups[other]
            },
        )

    def _workload(self, rate_per_s: float, count: int, seed: int) -> Workload:
        mix = Mix.of(self._question.lengths, seed)
        prompt, output = mix.requests(0, count)
        rng = np.random.default_rng((seed, _ARRIVALS))
        return Workload(gamma_arrivals(count, rate_per_s * self._share, 1.0, rng), prompt, output)

    def _run(self, roles: Roles, rate_per_s: float) -> RunResult:
        return run_under(
            roles,
            self._instances,
            self._workload(rate_per_s, _REQUESTS, self._question.seed),
            self._pairs,
            self._slo,
            (self._mix.mean_prompt, self._mix.mean_output),
            heeds_slo=self._goals.slo is not None,
            max_batched_tokens=self._step_tokens,
            seed=self._question.seed,
        )

    def _held(self, roles: Roles) -> float | None:
        """The highest rate within the limits of each request, with these roles; None: no limits."""
        if self._goals.slo is None:
            return None

        def share_at(load: float) -> float:
            return self._run(roles, load * self._rate_per_s).slo_share

        (load,) = held_loads(share_at, (self._goals.share,), most=_MOST, step=_STEP, likely=1.2)
        return load * self._rate_per_s
