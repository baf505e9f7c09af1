"""Finds which instances should prefill and which decode under the current load.

``scheduler.split_requests: roles``. Now and then the last requests are simulated under candidate
roles (``planner.roles``), in a process of its own; the scheduler then uses the best, which may be
*no splitting*. The question is repeated after a minute and, while the answer stays the same, after
twice as long each time. A failure keeps the last answer.

Models that share instances are treated together, as if all of these served each of them; others
separately, as one model's requests do not matter to another's instances.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import numpy as np

from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.core.types import InstanceId
from hetero_gateway.gateway.fleet.instances import Fleet, slo_of
from hetero_gateway.gateway.records.history import FinishedRequest, RequestHistory
from hetero_gateway.gateway.settings import Settings
from hetero_gateway.planner.roles import RoleQuestion, Roles, legs_of, roles_for, told
from hetero_gateway.serve.autoscaling.aside import aside
from hetero_gateway.sim.cluster import SimulatedInstance
from hetero_gateway.sim.workload import Workload

_log = logging.getLogger(__name__)

_LOOK_S = 5.0
_SOONEST_S, _LATEST_S = 60.0, 900.0
# Fewer requests are too few to judge; of more, the last ones are simulated.
_FEW, _MOST = 100, 1000
# Models in one log line.
_NAMED = 3


async def _ask_aside(question: RoleQuestion) -> Roles:
    return await aside(roles_for, question)


class RoleSearch:
    """Searches for roles. Needs a running event loop.

    Args:
        settings: the configuration in effect.
        fleet: its scheduler uses the roles.
        history: the last requests.
        pump_soon: called when there may be room for waiting requests.
        ask: answers a question; in another process, unless a test replaces it.
    """

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        history: RequestHistory,
        pump_soon: Callable[[], None],
        ask: Callable[[RoleQuestion], Awaitable[Roles]] = _ask_aside,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._history = history
        self._pump_soon = pump_soon
        self.ask = ask
        self._loop = asyncio.get_running_loop()
        self._asking: asyncio.Task[None] | None = None
        self._next_s = 0.0
        self._found: dict[frozenset[str], Roles] = {}
        self._interval_s = _SOONEST_S
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def close(self) -> None:
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(_LOOK_S, self._look)
        if self._asking is not None or self._loop.time() < self._next_s:
            return
        try:
            questions = self._questions()
        except Exception:
            # The boundary of a background loop: the last answer stays.
            _log.exception("roles: the load cannot be seen")
            return
        if questions:
            self._asking = self._loop.create_task(self._go_by(questions))

    def _questions(self) -> dict[frozenset[str], RoleQuestion]:
        """The questions, by group of models that share instances; groups with too little data are
        left out."""
        scheduler = self._fleet.scheduler
        pairs = scheduler.legs.pairs
        if pairs is None:
            return {}
        specs = scheduler.members.specs
        by_model: dict[str, list[FinishedRequest]] = {}
        for request in self._history:
            by_model.setdefault(request.model, []).append(request)
        found = {}
        for models in together(spec.models for spec in specs.values()):
            requests = sorted(r for m in models for r in by_model.get(m, ()))[-_MOST:]
            if len(requests) < _FEW:
                continue
            instances = []
            for name, instance in self._fleet.instances.items():
                spec = specs[name]
                there = instance.up and instance.awake and not instance.draining
                if there and not models.isdisjoint(spec.models) and spec.profile is not None:
                    one = SimulatedInstance(
                        name, spec.profile, spec.profile, spec.weight, kv_role=spec.kv_role
                    )
                    instances.append(one)
            names = {each.instance_id for each in instances}
            links = {pair: link for pair, link in pairs.links().items() if names.issuperset(pair)}
            if links:
                slo = self._slo_of(_most_asked(requests))
                found[models] = RoleQuestion(
                    tuple(instances), _mix(requests), links, pairs.kv_bytes_per_token, slo
                )
        return found

    def _slo_of(self, model: str) -> Slo | None:
        config = self._settings.config.scheduler.slo
        if config is None:
            return None
        return slo_of(config.models.get(model, config))

    async def _go_by(self, questions: Mapping[frozenset[str], RoleQuestion]) -> None:
        changed = failed = False
        try:
            for models, question in questions.items():
                try:
                    roles = await self.ask(question)
                except Exception as error:
                    # The boundary of a background task: the last answer stays.
                    why = str(error) or repr(error)
                    _log.warning("roles of %s: %s; the last answer stands", _named(models), why)
                    failed = True
                    continue
                if roles != self._found.get(models):
                    _log.info("roles of %s: %s", _named(models), told(roles))
                    changed = True
                    # Answers for models that shared other instances before are dropped.
                    kept = {m: r for m, r in self._found.items() if m.isdisjoint(models)}
                    self._found = kept | {models: roles}
                    self._take_up()
        finally:
            self._asking = None
            if changed:
                self._interval_s = _SOONEST_S
            elif not failed:
                self._interval_s = min(_LATEST_S, 2 * self._interval_s)
            self._next_s = self._loop.time() + self._interval_s

    def _take_up(self) -> None:
        """Apply all roles found; other models are not split."""
        split = {models: roles for models, roles in self._found.items() if roles is not None}
        every = {name: price for roles in split.values() for name, price in roles.items()}
        named = frozenset(model for models in split for model in models)
        self._fleet.scheduler.legs.set_roles(every if split else None, models=named)
        self._pump_soon()

    def describe(self) -> dict[InstanceId, str]:
        """The role of each instance that has one, by name."""
        return legs_of(self._fleet.scheduler.legs.roles)


def together(sets: Iterable[frozenset[str]]) -> list[frozenset[str]]:
    """Merge sets that have an element in common."""
    found: list[frozenset[str]] = []
    for each in sets:
        apart = [other for other in found if other.isdisjoint(each)]
        joined = each.union(*(other for other in found if not other.isdisjoint(each)))
        found = [*apart, joined] if joined else apart
    return found


def _most_asked(requests: list[FinishedRequest]) -> str:
    return Counter(request.model for request in requests).most_common(1)[0][0]


def _named(models: frozenset[str]) -> str:
    return ", ".join(sorted(models)[:_NAMED]) + (", …" if len(models) > _NAMED else "")


def _mix(requests: list[FinishedRequest]) -> Workload:
    begun_s = requests[0].arrival_s
    columns: list[Any] = [
        np.array([each.arrival_s - begun_s for each in requests]),
        np.array([each.prompt_tokens for each in requests]),
        np.array([each.output_tokens for each in requests]),
    ]
    return Workload(*columns)
