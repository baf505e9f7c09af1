"""The instances as a worker has them: as the scheduler process says."""

from __future__ import annotations

import logging

from hetero_gateway.core.types import InstanceId
from hetero_gateway.engines.vllm import ModelCard
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.instance_config import InstanceConfig
from hetero_gateway.gateway.fleet.instances import Fleet
from hetero_gateway.scaleout.workers import messages

_log = logging.getLogger(__name__)


class FleetMirror:
    """Keeps ``fleet`` as the scheduler process has its own."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        # By configuration, as they were said last.
        self._known: dict[bytes, tuple[InstanceId, messages.InstanceNow]] = {}
        self.listed = messages.Listed(False, {})

    def ready(self) -> bool:
        """Whether any instance can take requests."""
        return self.listed.ready

    def models(self) -> dict[str, ModelCard]:
        """Names that live instances serve, each with a card."""
        return self.listed.models

    def take(self, said: messages.Instances) -> None:
        """These are all there are."""
        fleet = self._fleet
        # Of hundreds, a few have changed: the others are not even read.
        before, self._known = self._known, {}
        for member in said.instances:
            instance_id, known = before.get(member.config, (None, None))
            if instance_id is None or known != member or instance_id not in fleet.instances:
                config = InstanceConfig.model_validate_json(member.config)
                instance_id = InstanceId(config.id)
                self._take(config, member)
            self._known[member.config] = instance_id, member
        wanted = {instance_id for instance_id, _ in self._known.values()}
        for instance_id in [i for i in fleet.instances if i not in wanted]:
            fleet.remove(instance_id)

    def _take(self, config: InstanceConfig, member: messages.InstanceNow) -> None:
        fleet = self._fleet
        config = config.model_copy(update={"weight": member.weight})
        instance = fleet.instances.get(InstanceId(config.id))
        try:
            if instance is not None and fleet.can_adjust(instance, config):
                fleet.adjust(instance, config)
            else:
                built = fleet.build(config)
                if instance is not None:
                    fleet.remove(instance.id)
                fleet.admit(built)
                instance = built
        except ConfigError as error:
            _log.error("instance %s cannot be used in this process: %s", config.id, error)
            return
        instance.models = frozenset(member.models)
        instance.max_model_len = member.max_model_len
        instance.engine_kv_capacity_tokens = member.kv_capacity_tokens
        instance.weight = member.weight
        instance.up = member.available
        instance.draining = member.draining
        fleet.publish(instance)
