"""Calls that concern an engine and not a request: LoRA adapters, sleep, pause, its caches.

An operator makes them (``control/engine``), and demand may wake an engine. The effect is immediate,
without waiting for the next scrape:

    call                        effect
    --------------------------  ------------------------------------------------------------------
    load, unload an adapter     its models are read again: requests for them are routed to it
    sleep, pause                it gets no request from just before the call; and
                                again if the call fails
    wake_up, resume             it gets requests again
    sleep, reset of the cache,  the index forgets its cached prompts
    other weights

Calls made to an engine directly show in its metrics, if it has them. For an address with several
ranks, a call concerns them all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from urllib.parse import parse_qs

import msgspec

from hetero_gateway.core.types import InstanceId
from hetero_gateway.engines.vllm import is_model_name, paths
from hetero_gateway.gateway.fleet.health import HealthMonitor
from hetero_gateway.gateway.fleet.instances import Fleet, Instance
from hetero_gateway.gateway.fleet.places import places_of
from hetero_gateway.gateway.fleet.probe import Probe, ProbeAnswer
from hetero_gateway.http.failures import InstanceError

# Weights that come back from a disk take minutes.
TIMEOUT_S = 300.0
_MOST_ANSWER_BYTES = 1 << 20
_MOST_QUERY_FIELDS = 64
# Pause after a failed wake-up.
_WAKE_PAUSE_S = 10.0
_LISTS_MODELS = (paths.LOAD_LORA_ADAPTER, paths.UNLOAD_LORA_ADAPTER)
_LOSES_ITS_CACHE = (
    paths.RESET_PREFIX_CACHE,
    paths.SLEEP,
    "/release_kv_cache_memory",
    "/update_weights",
    "/finish_weight_update",
)

_log = logging.getLogger(__name__)


class EngineCalls:
    """Makes calls to engines, and applies their effects.

    Args:
        fleet, health: of the gateway.
    """

    def __init__(self, fleet: Fleet, health: HealthMonitor) -> None:
        self._fleet = fleet
        self._health = health
        self._waking: dict[InstanceId, asyncio.Task[bool]] = {}
        self._failed_s: dict[InstanceId, float] = {}

    async def call(
        self,
        instance: Instance,
        path: str,
        query: bytes = b"",
        body: bytes = b"",
        content_type: bytes = b"",
    ) -> ProbeAnswer:
        """Make a call; returns the engine's complete answer. ``path``: one of ``ENGINE_CALLS``.

        Raises:
            InstanceError: it did not answer.
        """
        away = path in (paths.SLEEP, paths.PAUSE)
        before = instance.asleep, instance.paused, instance.wakeable
        places = places_of(self._fleet, instance)
        if away:
            for place in places:
                self._set_away(place, path, query)
        good = False
        probe = Probe(instance, TIMEOUT_S, self._fleet.hops)
        try:
            target = path.encode() + (b"?" + query if query else b"")
            method = paths.ENGINE_CALLS[path].encode()
            answer = await probe.ask(method, target, _MOST_ANSWER_BYTES, body, content_type)
            good = answer.good
            if good:
                for place in places:
                    await self._heed(place, path, body, answer, probe)
            return answer
        finally:
            probe.close()
            if away and not good:
                for place in places:
                    place.asleep, place.paused, place.wakeable = before
                    self._fleet.publish(place)

    def _set_away(self, instance: Instance, path: str, query: bytes) -> None:
        if path == paths.PAUSE:
            instance.paused = True
        else:
            fields = parse_qs(query.decode("latin-1"), max_num_fields=_MOST_QUERY_FIELDS)
            instance.asleep = True
            # At another level it has no weights to come back with.
            instance.wakeable = fields.get("level", ["1"])[-1] == "1"
        instance.rested_s = time.monotonic()
        self._fleet.publish(instance)

    async def _heed(
        self, instance: Instance, path: str, body: bytes, answer: ProbeAnswer, probe: Probe
    ) -> None:
        fleet = self._fleet
        if fleet.instances.get(instance.id) is not instance:
            return
        if path in _LISTS_MODELS:
            name = _told(body).lora_name
            if path == paths.LOAD_LORA_ADAPTER and is_model_name(name):
                instance.adapters.add(name)
            await self._health.read_models(instance, probe)
        elif path == paths.WAKE_UP:
            # If only a part of it was woken, it answers that it still sleeps.
            instance.asleep = _told(answer.body).status == "sleeping"
        elif path == paths.RESUME:
            instance.paused = False
        else:
            if path in _LOSES_ITS_CACHE:
                fleet.forget_cache(instance.id)
            return
        instance.rested_s = time.monotonic()
        fleet.publish(instance)

    # On demand

    def wake_for(self, model: str, only: InstanceId | None) -> asyncio.Task[bool] | None:
        """Begin to wake a sleeping instance of the model; None: there is none.

        The task returns whether it is awake; waiters must not cancel it.

        Args:
            only: the one acceptable instance; None: any.
        """
        now_s = time.monotonic()
        chosen = None
        for instance in self._fleet.instances.values():
            if model not in instance.models or only not in (None, instance.id):
                continue
            if not (instance.up and instance.asleep and instance.wakeable):
                continue
            if instance.draining or now_s < self._failed_s.get(instance.id, 0.0) + _WAKE_PAUSE_S:
                continue
            if (task := self._waking.get(instance.id)) is not None:
                return task
            chosen = chosen or instance
        if chosen is None:
            return None
        task = asyncio.get_running_loop().create_task(self._wake(chosen))
        self._waking[chosen.id] = task
        return task

    async def _wake(self, instance: Instance) -> bool:
        _log.info("instance %s is woken for a request", instance.id)
        why = ""
        try:
            answer = await self.call(instance, paths.WAKE_UP)
            if not answer.good:
                why = f"it answered {answer.status}"
            elif instance.asleep:
                why = "it says that it still sleeps"
        except InstanceError as error:
            why = str(error)
        finally:
            self._waking.pop(instance.id, None)
        if why:
            self._failed_s[instance.id] = time.monotonic()
            _log.warning("instance %s cannot be woken: %s", instance.id, why)
        else:
            self._failed_s.pop(instance.id, None)
        return not why

    def close(self) -> None:
        """Wake no more instances."""
        for task in list(self._waking.values()):
            task.cancel()


class _Told(msgspec.Struct):
    """The adapter's name in a call's body; in an answer, the engine's state."""

    lora_name: str = ""
    status: str = ""


def _told(body: bytes) -> _Told:
    try:
        return msgspec.json.decode(body, type=_Told)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _Told()
