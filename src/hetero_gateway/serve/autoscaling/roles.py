"""Which instances had better compute prompts and which answer, as the load of the moment has it.

``scheduler.split_requests: roles``. Now and then the last requests are simulated under candidates
of roles (``planner.roles``), in a process of its own; what does best is what the scheduler goes by
from then on, *nothing is split* as well. It is asked again after a minute, and, where the answer
stays the same, after twice as long each time. Whatever goes wrong leaves the last answer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
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
# Of fewer requests nothing is concluded; of more, the last ones are simulated.
_FEW, _MOST = 100, 1000


async def _ask_aside(question: RoleQuestion) -> Roles:
    return await aside(roles_for, question)


class RoleSearch:
    """Needs a running event loop.

    Args:
        settings: the configuration in effect.
        fleet: whose scheduler goes by it.
        history: the last requests.
        pump_soon: there may be room now.
        ask: answers a question; another process, unless a test has its own.
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
            question = self._question()
        except Exception:
            # The boundary of a background loop: the last answer stays.
            _log.exception("roles: the load cannot be seen")
            return
        if question is not None:
            self._asking = self._loop.create_task(self._go_by(question))

    def _question(self) -> RoleQuestion | None:
        """None: there is nothing to be asked yet."""
        scheduler = self._fleet.scheduler
        pairs = scheduler.legs.pairs
        if pairs is None:
            return None
        links = pairs.links()
        able = {instance for pair in links for instance in pair}
        models = set().union(*(scheduler.members.specs[i].models for i in able))
        requests = [each for each in self._history if each.model in models]
        if len(requests) < _FEW:
            return None
        model = requests[-1].model
        requests = sorted(each for each in requests if each.model == model)[-_MOST:]
        instances = []
        for name, instance in self._fleet.instances.items():
            spec = scheduler.members.specs[name]
            there = instance.up and instance.awake and not instance.draining
            if there and model in spec.models and spec.profile is not None:
                instances.append(SimulatedInstance(name, spec.profile, spec.profile, spec.weight))
        names = {each.instance_id for each in instances}
        links = {pair: link for pair, link in links.items() if names.issuperset(pair)}
        if not links or len(requests) < _FEW:
            return None
        slo = self._slo_of(model)
        return RoleQuestion(tuple(instances), _mix(requests), links, pairs.kv_bytes_per_token, slo)

    def _slo_of(self, model: str) -> Slo | None:
        config = self._settings.config.scheduler.slo
        if config is None:
            return None
        return slo_of(config.models.get(model, config))

    async def _go_by(self, question: RoleQuestion) -> None:
        legs = self._fleet.scheduler.legs
        try:
            roles = await self.ask(question)
        except Exception as error:
            # The boundary of a background task: the last answer stays.
            _log.warning("roles: %s; the last answer stays", str(error) or repr(error))
        else:
            if roles == legs.roles:
                self._interval_s = min(_LATEST_S, 2 * self._interval_s)
            else:
                self._interval_s = _SOONEST_S
                _log.info("roles: %s", told(roles))
                legs.set_roles(roles)
                self._pump_soon()
        finally:
            self._asking = None
            self._next_s = self._loop.time() + self._interval_s

    def describe(self) -> dict[InstanceId, str]:
        """The role of each instance that has one, by name."""
        return legs_of(self._fleet.scheduler.legs.roles)


def _mix(requests: list[FinishedRequest]) -> Workload:
    begun_s = requests[0].arrival_s
    columns: list[Any] = [
        np.array([each.arrival_s - begun_s for each in requests]),
        np.array([each.prompt_tokens for each in requests]),
        np.array([each.output_tokens for each in requests]),
    ]
    return Workload(*columns)
