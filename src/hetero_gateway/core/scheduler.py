"""The scheduler: which instance gets a request, why, and the ledger that remembers it.

Section 4.1 of the paper: workload calculator and mapper. The gateway and the simulator drive this
one class. It holds no clock and does no I/O: what is chosen is returned with its reason.

A *pool* is what serves one model name. Pools are built on first use and thrown away when the
membership changes; the load of an instance is one, whatever names it serves.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.cost_model import FloatArray, ProfileTable, request_time_s
from hetero_gateway.core.ledger import Dispatch, Ledger
from hetero_gateway.core.policies import Candidates, Policy
from hetero_gateway.core.profile import Constants, Profile
from hetero_gateway.core.types import (
    Candidate,
    InstanceId,
    InstanceSpec,
    Outcome,
    Reject,
    RejectReason,
    Request,
)

UNLIMITED_TOKENS = 2**40  # the KV capacity of an instance whose capacity nobody knows


class Decision(NamedTuple):
    """Where a request goes. The reason is kept as the arrays it was made from; see ``explain``."""

    instance_id: InstanceId
    request: Request
    position: int
    charge: float
    candidates: Candidates
    charges: FloatArray
    excluded: tuple[tuple[InstanceSpec, str], ...]

    def explain(self) -> list[Candidate]:
        """Every candidate's T, KV usage, w and resulting load, and why the others were excluded."""
        c, charges, w = self.candidates, self.charges, self.candidates.workload()
        rows = [
            Candidate(
                instance_id=instance_id,
                request_time_s=float(c.request_time_s[i]),
                kv_usage=float(c.kv_usage[i]),
                workload=float(w[i]),
                load_s=float(c.load[i]),
                load_after_s=float(c.load[i] + charges[i]),
                in_flight=int(c.in_flight[i]),
                excluded=None,
            )
            for i, instance_id in enumerate(c.ids)
        ]
        return rows + [
            Candidate(spec.instance_id, None, None, None, None, None, None, why)
            for spec, why in self.excluded
        ]


class _Pool:
    """The available instances of one model, as arrays; immutable."""

    def __init__(
        self,
        members: list[tuple[InstanceSpec, int]],
        absent: Iterable[tuple[InstanceSpec, str]],
        reference: tuple[float, float],
    ) -> None:
        self.specs = tuple(spec for spec, _ in members)
        self.ids = tuple(spec.instance_id for spec in self.specs)
        self.absent = tuple(absent)
        self.slots: NDArray[np.intp] = np.array([slot for _, slot in members], dtype=np.intp)
        self.weight = np.array([spec.weight for spec in self.specs])
        profiles = _effective_profiles(self.specs)
        distinct = list(dict.fromkeys(profiles))
        self.table = ProfileTable(distinct)
        index = {profile: i for i, profile in enumerate(distinct)}
        # None when every instance has a profile of its own: then the table's order is the pool's.
        self.profile_of: NDArray[np.intp] | None = None
        if len(distinct) < len(profiles):
            self.profile_of = np.array([index[p] for p in profiles], dtype=np.intp)
        self.kv_capacity_tokens = _assumed_kv_capacities(self.specs)
        capacities = [_capacity_per_s(p, reference) for p in distinct]
        self.capacity = np.array([capacities[index[p]] for p in profiles])
        self.max_model_len = np.array([float(s.max_model_len or math.inf) for s in self.specs])
        self.shortest_context_tokens = float(self.max_model_len.min(initial=math.inf))
        self.longest_context_tokens = float(self.max_model_len.max(initial=0))
        # The largest that a single instance can hold: one may have the context, one the memory.
        largest = [
            min(s.max_model_len or math.inf, p.kv_capacity_tokens)
            for s, p in zip(self.specs, profiles, strict=True)
        ]
        self.longest_request_tokens = max(largest, default=0)


class Scheduler:
    """Chooses, dispatches and settles. One per gateway or simulated cluster.

    Args:
        policy: what chooses among the eligible instances.
        theta: θ of Eq. (7), above 0.
        rng: seeded generator for ties and random policies.
        reference: (prompt, output) tokens of the request that fitted capacities are computed for.
    """

    def __init__(
        self,
        policy: Policy,
        rng: np.random.Generator,
        theta: float = 2.0,
        reference: tuple[float, float] = (512.0, 256.0),
    ) -> None:
        self.ledger = Ledger()
        self._policy = policy
        self._rng = rng
        self._theta = theta
        self._reference = reference
        self._specs: dict[InstanceId, InstanceSpec] = {}
        self._slots: dict[InstanceId, int] = {}
        self._pools: dict[str, _Pool] = {}

    # Membership

    def add(self, spec: InstanceSpec) -> None:
        """Add an instance. Raises ValueError when the id is taken."""
        if spec.instance_id in self._specs:
            raise ValueError(f"instance {spec.instance_id!r} exists already")
        self._specs[spec.instance_id] = spec
        self._slots[spec.instance_id] = self.ledger.add_slot()
        self._pools.clear()

    def replace(self, spec: InstanceSpec) -> None:
        """Change an instance's models, profile or availability; its load stays.

        Raises KeyError when there is none.
        """
        if self._specs[spec.instance_id] != spec:
            self._specs[spec.instance_id] = spec
            self._pools.clear()

    def remove(self, instance_id: InstanceId) -> list[Dispatch]:
        """Forget an instance; everything on it is settled and returned. KeyError: unknown."""
        del self._specs[instance_id]
        self._pools.clear()
        return self.ledger.remove_slot(self._slots.pop(instance_id))

    def specs(self) -> list[InstanceSpec]:
        return list(self._specs.values())

    def spec(self, instance_id: InstanceId) -> InstanceSpec:
        return self._specs[instance_id]

    def slot(self, instance_id: InstanceId) -> int:
        return self._slots[instance_id]

    def knows(self, model: str) -> bool:
        """Whether any instance, available or not, serves the model."""
        pool = self._pool(model)
        return bool(pool.ids or pool.absent)

    def context_tokens(self, model: str) -> int | None:
        """The longest sequence that any available instance of the model takes; None: unknown."""
        longest = self._pool(model).longest_context_tokens
        return None if longest in (0, math.inf) else int(longest)

    # Decisions

    def choose(self, request: Request, exclude: Collection[InstanceId] = ()) -> Decision | Reject:
        """Choose an instance for a request; changes nothing but the policy's own turn.

        Args:
            exclude: instances that were tried already.
        """
        pool = self._pool(request.model)
        if not pool.ids:
            return self._no_instance(request.model, pool)
        times = pool.table.request_times_s(request.prompt_tokens, request.predicted_output_tokens)
        if pool.profile_of is not None:
            times = times[pool.profile_of]
        if request.sequences != 1:
            times = times * request.sequences
        ledger, slots = self.ledger, pool.slots
        candidates = Candidates(
            pool.ids,
            slots,
            times,
            ledger.load[slots],
            ledger.kv_tokens[slots] / pool.kv_capacity_tokens,
            ledger.in_flight[slots],
            pool.capacity,
            pool.weight,
            self._theta,
        )
        excluded = pool.absent
        if (
            exclude
            or request.prompt_tokens >= pool.shortest_context_tokens
            or request.prompt_tokens + request.predicted_output_tokens
            > pool.table.smallest_capacity_tokens
        ):
            selection = _eligible(pool, candidates, request, exclude)
            if isinstance(selection, Reject):
                return selection
            candidates, newly_excluded = selection
            excluded += newly_excluded
        position = self._policy.choose(request, candidates, self._rng)
        charges = self._policy.charges(candidates)
        return Decision(
            candidates.ids[position],
            request,
            position,
            float(charges[position]),
            candidates,
            charges,
            excluded,
        )

    def explain(self, request: Request) -> Decision | Reject:
        """What ``choose`` would say now, without taking the policy's turn or a random draw."""
        policy, rng = self._policy, self._rng
        self._policy, self._rng = copy.deepcopy(policy), copy.deepcopy(rng)
        try:
            return self.choose(request)
        finally:
            self._policy, self._rng = policy, rng

    def dispatch(self, decision: Decision) -> Dispatch:
        """Put the decision's charge on its instance."""
        slot = int(decision.candidates.slots[decision.position])
        return self.ledger.dispatch(decision.request, decision.instance_id, slot, decision.charge)

    def settle(self, dispatch: Dispatch, outcome: Outcome) -> bool:
        """Take a dispatch off, once. See ``Ledger.settle``."""
        return self.ledger.settle(dispatch, outcome)

    def _pool(self, model: str) -> _Pool:
        pool = self._pools.get(model)
        if pool is None:
            members: list[tuple[InstanceSpec, int]] = []
            absent = []
            for spec in self._specs.values():
                if model not in spec.models:
                    continue
                if spec.draining:
                    absent.append((spec, "draining"))
                elif not spec.available:
                    absent.append((spec, "unhealthy"))
                else:
                    members.append((spec, self._slots[spec.instance_id]))
            pool = _Pool(members, absent, self._reference)
            # Names come from clients: only a name that an instance serves is worth keeping.
            if members or absent:
                self._pools[model] = pool
        return pool

    def _no_instance(self, model: str, pool: _Pool) -> Reject:
        # An instance that has not answered yet may serve any name.
        if pool.absent or any(not spec.models for spec in self._specs.values()):
            why = ", ".join(f"{spec.instance_id} {why}" for spec, why in pool.absent[:5])
            detail = f"no instance of the model {model!r} can take requests now"
            return Reject(RejectReason.NO_AVAILABLE_INSTANCE, detail + (f": {why}" if why else ""))
        return Reject(RejectReason.UNKNOWN_MODEL, f"The model `{model}` does not exist.")


def _eligible(
    pool: _Pool, c: Candidates, request: Request, exclude: Collection[InstanceId]
) -> tuple[Candidates, tuple[tuple[InstanceSpec, str], ...]] | Reject:
    """The candidates that the request fits and that were not tried, and why the others are out."""
    # The context must hold one output token, too, where any is generated.
    shortest_tokens = request.prompt_tokens + (request.predicted_output_tokens > 0)
    kept: list[int] = []
    excluded: list[tuple[InstanceSpec, str]] = []
    for i, spec in enumerate(pool.specs):
        if spec.instance_id in exclude:
            excluded.append((spec, "tried already"))
        elif shortest_tokens > pool.max_model_len[i]:
            excluded.append((spec, f"context of {spec.max_model_len} tokens is too short"))
        elif not math.isfinite(c.request_time_s[i]):
            capacity = int(pool.kv_capacity_tokens[i])
            excluded.append((spec, f"KV capacity of {capacity} tokens is too small"))
        else:
            kept.append(i)
    if not kept:
        if any(why == "tried already" for _, why in excluded):
            return Reject(RejectReason.NO_AVAILABLE_INSTANCE, "every instance was tried")
        return Reject(
            RejectReason.FITS_NO_INSTANCE,
            f"This model's maximum context length is {int(pool.longest_request_tokens)} tokens. "
            f"However, your prompt has about {request.prompt_tokens} tokens, and no instance can "
            f"hold it and an output of about {round(request.predicted_output_tokens)}.",
        )
    index = np.array(kept, dtype=np.intp)
    narrowed = Candidates(
        tuple(c.ids[i] for i in kept),
        c.slots[index],
        c.request_time_s[index],
        c.load[index],
        c.kv_usage[index],
        c.in_flight[index],
        c.capacity[index],
        c.weight[index],
        c.theta,
    )
    return narrowed, tuple(excluded)


def _effective_profiles(specs: tuple[InstanceSpec, ...]) -> list[Profile]:
    """A profile for everyone: an unprofiled instance gets the mean of its pool's, over its weight.

    So it takes part from the first request, and with none profiled, loads are counts by weight.
    """
    known = [spec.profile for spec in specs if spec.profile is not None]
    if known:
        names = [f.name for f in dataclasses.fields(Constants)]
        mean = Constants(*(sum(getattr(p.constants, n) for p in known) / len(known) for n in names))
    else:
        mean = Constants(0, 1, 0, 0, 0, 0, 0, 1e-9)
    result = []
    for spec in specs:
        result.append(
            spec.profile
            or Profile("unknown", "unknown", 1, mean.scaled(1 / spec.weight), UNLIMITED_TOKENS)
        )
    return result


def _assumed_kv_capacities(specs: tuple[InstanceSpec, ...]) -> FloatArray:
    """What Eq. (8) divides by: an unprofiled instance has the mean of its pool's, by weight.

    Were its usage 0 for want of a capacity, its w would stay where that of the others grows with
    e^(θ·kvusage), and a backlog would go nearly all to it. Nothing is refused because of this.
    """
    known = [spec.profile.kv_capacity_tokens for spec in specs if spec.profile is not None]
    mean = sum(known) / len(known) if known else UNLIMITED_TOKENS
    return np.array(
        [s.profile.kv_capacity_tokens if s.profile else mean * s.weight for s in specs], dtype=float
    )


def _capacity_per_s(profile: Profile, reference: tuple[float, float]) -> float:
    """Reference requests per second; one at a time where the KV cache holds less than one."""
    reference_tokens = math.ceil(sum(reference))
    if profile.kv_capacity_tokens < reference_tokens:
        profile = dataclasses.replace(profile, kv_capacity_tokens=reference_tokens)
    return 1 / max(request_time_s(profile, *reference), 1e-9)
