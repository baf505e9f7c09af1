"""The instances of a scheduler: what they serve, their state, and pools by model.

``Scheduler`` owns one. An instance joins, changes and leaves here; what happens to its requests is
``InstanceState``'s. Reading changes nothing: stand-in constants are given by ``stand_in_for``, on
an instance's first dispatch, not when someone looks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Final

from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.instances.drift import Drift
from hetero_gateway.core.instances.observation import StepRow, seconds
from hetero_gateway.core.instances.slowness import Slowness, engine_time_s
from hetero_gateway.core.instances.snapshot import InstanceSnapshot, snapshot_of
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.instances.table import Table
from hetero_gateway.core.nearest import nearest_names
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.pool import Eligible, Pool, stand_in, typical_constants
from hetero_gateway.core.types import InstanceId, InstanceSpec, Reject, RejectReason

# Models that an error lists.
_MOST_NAMED: Final = 5
# Pools of single instances that are kept.
_MOST_ALONE: Final = 1024


class Members:
    """The instances of a scheduler.

    Args:
        reference: (prompt, output) tokens of the request that fitted capacities are computed for.
        stand_ins: instances without a profile get constants that stand in for their own.
        observes: keep observations, and how far profiles are off.
    """

    def __init__(self, reference: tuple[float, float], *, stand_ins: bool, observes: bool) -> None:
        self.specs: dict[InstanceId, InstanceSpec] = {}
        self.table = Table(keeps=observes)
        # How far the profiles of profiled instances are off, over minutes and over seconds.
        self.drifts: dict[InstanceId, Drift] = {}
        self.slowness: dict[InstanceId, Slowness] = {}
        self.pools: dict[str, Pool] = {}  # of served names, once asked for
        # Pools of single instances, available or not.
        self._alone: dict[tuple[InstanceId, str], Eligible] = {}
        self._reference = reference
        self._gives_stand_ins = stand_ins
        self._observes = observes

    def __repr__(self) -> str:
        return f"<Members {', '.join(self.specs)}>"

    def join(self, spec: InstanceSpec) -> None:
        """Add an instance. Raises ValueError if the id is taken."""
        if spec.instance_id in self.specs:
            raise ValueError(f"instance {spec.instance_id!r} exists already")
        self.specs[spec.instance_id] = spec
        state = self.table.join(spec.instance_id)
        state.first_token_s = _first_token_s(spec)
        self._begin(state, spec)
        self._forget_pools()

    def change(self, spec: InstanceSpec) -> None:
        """Change its models, profile or availability; its load stays. KeyError: unknown."""
        before = self.specs[spec.instance_id]
        if before != spec:
            self.specs[spec.instance_id] = spec
            state = self.table[spec.instance_id]
            state.first_token_s = _first_token_s(spec)
            if constants_of(before) != constants_of(spec):
                self._begin(state, spec)
            self._forget_pools()

    def leave(self, instance_id: InstanceId, now_s: float) -> list[Dispatch]:
        """Remove it; everything on it is settled and returned. KeyError: unknown."""
        del self.specs[instance_id]
        self.drifts.pop(instance_id, None)
        self.slowness.pop(instance_id, None)
        self._forget_pools()
        return self.table.leave(instance_id, now_s)

    def _begin(self, state: InstanceState, spec: InstanceSpec) -> None:
        """Start over with new constants."""
        self.drifts.pop(spec.instance_id, None)
        self.slowness.pop(spec.instance_id, None)
        if spec.profile is not None:
            state.set_constants(spec.profile.constants)
            if self._observes:
                stated = dict(spec.profile.source.get("error") or {})
                self.drifts[spec.instance_id] = Drift(float(stated.get("decode") or 0.0))
                self.slowness[spec.instance_id] = Slowness()
        else:
            state.set_constants(None, stands_in=self._gives_stand_ins)
            if state.stands_in:
                state.set_speed(self.table.stand_in_speed())

    def set_stand_ins(self, stand_ins: bool) -> None:
        """Set whether instances without a profile have constants that stand in for their own."""
        if stand_ins == self._gives_stand_ins:
            return
        self._gives_stand_ins = stand_ins
        for spec in self.specs.values():
            if spec.profile is None:
                self._begin(self.table[spec.instance_id], spec)
        self._forget_pools()

    def snapshot(self, instance_id: InstanceId) -> InstanceSnapshot:
        """A snapshot of an instance for display. KeyError: unknown."""
        return snapshot_of(
            self.specs[instance_id],
            self.table[instance_id],
            self.drifts.get(instance_id),
            self.slowness.get(instance_id),
            queues=self._gives_stand_ins,
        )

    # Observations

    def observe_steps(
        self, instance_id: InstanceId, steps: float, duration_s: float, now_s: float
    ) -> bool:
        """Note that the instance made this many decode steps in the last ``duration_s`` of
        streaming.

        Returns whether its profile has begun or ceased to drift (``drift``). KeyError: unknown.
        """
        state = self.table[instance_id]
        if state.tracked != state.in_flight:
            # The progress of some requests there is not seen: the row would make it look slow.
            duration_s = 0.0
        row = state.observe_steps(steps, duration_s, now_s)
        if state.stands_in and row is not None:
            self.table.spread_stand_in_speed()
        drift = self.drifts.get(instance_id)
        constants = constants_of(self.specs[instance_id])
        seen = state.observations
        first_tokens, steps_known, observed_s = seen.take_fresh(), seen.take_fresh_steps(), 0.0
        if drift is None or constants is None:
            return False
        self._look_at(state, row, constants, now_s)
        beside_s = state.first_token_s
        for first in first_tokens:
            if first.ttft_s > beside_s:  # the rest are its steps, and what HTTP adds
                modelled = seconds(first.terms, constants)
                drift.observe(engine_time_s(first.ttft_s - beside_s, sum(modelled)), *modelled)
        for known in steps_known:
            drift.observe(known.duration_s, *seconds(known.terms, constants))
            observed_s += known.duration_s
        return observed_s > 0 and drift.judge(observed_s, now_s)

    def _look_at(
        self, state: InstanceState, row: StepRow | None, constants: Constants, now_s: float
    ) -> None:
        """Find out whether an instance is slow, from its last row and answers."""
        slowness = self.slowness[state.instance_id]
        observed_s, modelled_s = state.take_checked()
        if row is not None and (row_s := state.row_modelled_s) is not None:
            decode_s = seconds(row._replace(hit_tokens=0.0).terms, constants)[1]
            prefill_s, waiting_s = max(0.0, row_s - decode_s), state.waiting_modelled_s()
            observed_s += row.duration_s
            modelled_s += slowness.excused(row.duration_s, prefill_s, decode_s, waiting_s)
        slowness.look(observed_s, modelled_s, now_s)

    # Eligibility

    def eligible(self, request: Request, exclude: Collection[InstanceId]) -> Eligible | Reject:
        """The instances that may get a request, or why none can."""
        pool = self.pools.get(request.model) or self.pool(request.model)
        if not pool.ids:
            return self._nobody(request.model, pool)
        return pool.eligible(request, exclude)

    def judge(
        self, request: Request, exclude: Collection[InstanceId]
    ) -> tuple[Request, Eligible] | Reject:
        """The request as it is to be placed and the instances that may get it, or why none can.

        An estimate alone never refuses a request: if no instance would hold it by its estimates,
        the largest one gets it, and its engine decides. From then on it counts as being as long as
        that instance can hold.
        """
        eligible = self.eligible(request, exclude)
        if not isinstance(eligible, Reject):
            return request, eligible
        shorter = self.pool(request.model).shorten(request)
        if shorter is None or shorter == request:
            return eligible
        again = self.eligible(shorter, exclude)
        return eligible if isinstance(again, Reject) else (shorter, again)

    def pool(self, model: str) -> Pool:
        """The available instances that serve the model; possibly none."""
        pool = self.pools.get(model)
        if pool is None:
            pool = self._make_pool(model)
            # Names come from clients: only a name that an instance serves is worth keeping.
            if pool.ids or pool.absent:
                self.pools[model] = pool
        return pool

    def alone(self, instance_id: InstanceId, model: str) -> Eligible:
        """One instance as the only candidate, available or not. KeyError: unknown."""
        known = self._alone.get((instance_id, model))
        if known is None:
            spec = dataclasses.replace(
                self.specs[instance_id], models=frozenset((model,)), available=True, draining=False
            )
            known = Eligible(self._pool_of([spec], []), None, ())
            if len(self._alone) >= _MOST_ALONE:
                self._alone.clear()
            self._alone[instance_id, model] = known
        return known

    def _forget_pools(self, but: dict[str, Pool] | None = None) -> None:
        self.pools = but or {}
        self._alone.clear()

    def _make_pool(self, model: str) -> Pool:
        members: list[InstanceSpec] = []
        absent = []
        for spec in self.specs.values():
            if model not in spec.models:
                continue
            if spec.draining:
                absent.append((spec, "draining"))
            elif not spec.available:
                absent.append((spec, spec.absent_reason))
            else:
                members.append(spec)
        return self._pool_of(members, absent)

    def _pool_of(self, members: list[InstanceSpec], absent: list[tuple[InstanceSpec, str]]) -> Pool:
        there = [(spec, self.table[spec.instance_id]) for spec in members]
        stand_ins = None
        if self._gives_stand_ins:
            unknown = [(spec, state) for spec, state in there if spec.profile is None]
            if unknown:
                typical = typical_constants((*members, *(s for s, _ in absent)))
                stand_ins = {
                    spec.instance_id: state.constants or stand_in(spec, typical)
                    for spec, state in unknown
                }
        return Pool(there, absent, self._reference, stand_ins)

    def _nobody(self, model: str, pool: Pool) -> Reject:
        # An instance that has not answered yet may serve any name.
        if pool.absent or any(not spec.models for spec in self.specs.values()):
            why = ", ".join(f"{spec.instance_id} {why}" for spec, why in pool.absent[:5])
            detail = f"no instance of the model {model[:200]!r} can take requests now"
            return Reject(RejectReason.NO_AVAILABLE_INSTANCE, detail + (f": {why}" if why else ""))
        served = {name for spec in self.specs.values() for name in spec.models}
        near = ", ".join(f"`{name}`" for name in nearest_names(model[:256], served, _MOST_NAMED))
        if len(served) > _MOST_NAMED:
            near += f", and {len(served) - _MOST_NAMED} more"
        detail = f"The model `{model[:200]}` does not exist" + (
            f"; served: {near}." if near else "."
        )
        return Reject(RejectReason.UNKNOWN_MODEL, detail)

    def knows(self, model: str) -> bool:
        """Whether any instance, available or not, serves the model."""
        return any(model in spec.models for spec in self.specs.values())

    # Stand-ins

    def stand_in_for(self, state: InstanceState, model: str) -> None:
        """Fix its stand-in constants, as its pool assumes them, for every pool."""
        pool = self.pool(model)
        if state.instance_id not in pool.position:  # taken over from another process
            pool = self.alone(state.instance_id, model).pool
        member = pool.members[pool.position[state.instance_id]]
        speed = state.speed
        state.set_constants(Constants(*member[:9]), stands_in=True)
        state.set_speed(speed)
        self._forget_pools({model: pool} if pool is self.pools.get(model) else None)

    def stand_in(self, instance_id: InstanceId) -> Constants:
        """The stand-in constants of an instance without a profile. KeyError: unknown."""
        state = self.table[instance_id]
        if state.stands_in and state.constants is not None:
            return state.constants
        return stand_in(self.specs[instance_id], typical_constants(()))


def constants_of(spec: InstanceSpec) -> Constants | None:
    """The constants of its profile; None: it has none."""
    return None if spec.profile is None else spec.profile.constants


def _first_token_s(spec: InstanceSpec) -> float:
    """Of its profile: what its server takes beside the engine."""
    return 0.0 if spec.profile is None else spec.profile.first_token_s
