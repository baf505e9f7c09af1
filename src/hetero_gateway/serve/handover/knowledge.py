"""A gateway's state as messages, and back."""

import hashlib
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from hetero_gateway.core.lengths.predictors import BucketMeanPredictor, BytesPerToken
from hetero_gateway.core.request import seed_of
from hetero_gateway.core.types import InstanceId
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.instance_config import InstanceConfig
from hetero_gateway.gateway.admission.clients import Admission
from hetero_gateway.gateway.dataplane.application import DataPlane
from hetero_gateway.gateway.dataplane.responses import Response
from hetero_gateway.gateway.fleet.ejection import OutcomeWatch
from hetero_gateway.gateway.fleet.instances import FILE, Fleet, Instance
from hetero_gateway.gateway.fleet.roster import Roster
from hetero_gateway.serve.handover import messages

_MOST_RESPONSES = 10_000


class Handed(Protocol):
    """The parts of a gateway that are handed over."""

    fleet: Fleet
    admission: Admission
    outcomes: OutcomeWatch
    dataplane: DataPlane
    bytes_per_token: BytesPerToken
    prefix_secret: bytes | None
    roster: Roster
    draining: bool

    @property
    def sharing(self) -> Any: ...

    def drain(self) -> None: ...


def told_of(gateway: Handed) -> Iterator[Any]:
    """The whole state except loads and accounts, one message at a time."""
    gateway.dataplane.recorder.catch_up()
    fleet, intake = gateway.fleet, gateway.dataplane.intake
    yield instances_of(fleet)
    caches, predictor = fleet.scheduler.caches, intake.predictor
    latest = intake.responses.latest(_MOST_RESPONSES)
    yield messages.KnownLengths(
        _name_of(gateway.prefix_secret),
        fleet.scheduler.residual.finished(),
        gateway.bytes_per_token.reports(),
        predictor.means() if isinstance(predictor, BucketMeanPredictor) else [],
        [(r.name, r.instance_id, r.tokens, r.model, r.owner) for r in latest],
        None if caches is None else caches.lately(),
    )
    if caches is not None:
        for instance_id in tuple(fleet.instances):
            held = caches.index.held(instance_id)
            keys, sizes = array("Q", [key for key, _ in held]), array("Q", [s for _, s in held])
            trust = caches.trust(instance_id)
            yield messages.KnownPrefixes(instance_id, keys.tobytes(), sizes.tobytes(), trust)
    yield messages.AllKnown()


def instances_of(fleet: Fleet) -> messages.KnownInstances:
    """All instances except those being removed."""
    table = fleet.scheduler.members.table
    return messages.KnownInstances(
        [
            messages.HandedInstance(
                i.config.model_dump_json().encode(), i.source, i.source_key,
                i.up, i.down_reason, i.draining, i.leave_at_s, i.weight,
                i.asleep, i.paused, i.wakeable,
                sorted(i.models), dict(i.cards), sorted(i.adapters), i.max_model_len,
                i.engine_kv_capacity_tokens, i.engine_prefix_caching, i.engine_started_s,
                i.outcomes.standing(), table[i.id].learnt(),
            )
            for i in fleet.instances.values()
            if not i.leaving
        ]
    )  # fmt: skip


def take_up(gateway: Handed, told: Any, admit: Callable[[Instance], object]) -> None:
    """Apply a message of ``told_of``; ``admit``: adds a missing instance."""
    if isinstance(told, messages.KnownInstances):
        for row in told.instances:
            instance = _instance_of(gateway.fleet, row, admit)
            if instance is not None:
                _take_up_instance(gateway, instance, row)
    elif isinstance(told, messages.KnownLengths):
        _take_up_lengths(gateway, told)
    elif isinstance(told, messages.KnownPrefixes):
        caches = gateway.fleet.scheduler.caches
        if caches is not None and told.instance in caches.index:
            held = list(zip(array("Q", told.keys), array("Q", told.sizes), strict=True))
            caches.take_over(told.instance, held, told.trust)


def _take_up_lengths(gateway: Handed, told: messages.KnownLengths) -> None:
    scheduler, intake = gateway.fleet.scheduler, gateway.dataplane.intake
    scheduler.residual.observe_many(told.finished)
    gateway.bytes_per_token.observe_many(told.reports)
    same = told.prefixes == _name_of(gateway.prefix_secret)  # else the keys of prompts differ
    if isinstance(intake.predictor, BucketMeanPredictor):
        intake.predictor.take_over(each for each in told.means if same or each[0] != "beginning")
    now_s = time.monotonic()
    for name, instance_id, tokens, model, owner in told.responses:
        response = Response(name, instance_id, tokens, None, 0, model, owner)
        intake.responses.note(response, now_s)
    if scheduler.caches is not None and told.lately is not None:
        scheduler.caches.take_over_lately(*told.lately)


def _instance_of(
    fleet: Fleet, row: messages.HandedInstance, admit: Callable[[Instance], object]
) -> Instance | None:
    """None: the configuration lacks it, or means another server."""
    config = InstanceConfig.model_validate_json(row.config)
    known = fleet.instances.get(InstanceId(config.id))
    if known is None and row.source != FILE:
        try:
            known = fleet.build(config)
            known.source, known.source_key = row.source, row.source_key
            admit(known)
        except ConfigError:
            return None  # for example, its certificate is gone
    if known is None or known.config.base_url != config.base_url:
        return None
    if row.weight != config.weight:
        known.weight = row.weight  # changed by an operator, not in the file
    return known


def _take_up_instance(gateway: Handed, instance: Instance, row: messages.HandedInstance) -> None:
    fleet = gateway.fleet
    instance.draining, instance.leave_at_s = row.draining, row.leave_at_s
    instance.asleep, instance.paused, instance.wakeable = row.asleep, row.paused, row.wakeable
    instance.adapters = set(row.adapters)
    instance.engine_kv_capacity_tokens = row.kv_capacity_tokens
    instance.engine_prefix_caching = row.prefix_caching
    instance.engine_started_s = row.started_s
    if row.cards:
        fleet.list_models(instance, row.cards)
    elif not instance.config.models:
        instance.models = frozenset(row.models)
    instance.max_model_len = row.max_model_len
    if row.up and instance.models:
        fleet.mark_up(instance)
    instance.down_reason = row.down_reason
    fleet.publish(instance)
    fleet.scheduler.members.table[instance.id].take_over(row.learnt)
    gateway.outcomes.resume(instance, row.outcomes, time.monotonic())


def _name_of(prefix_secret: bytes | None) -> str:
    seed = 0 if prefix_secret is None else seed_of(prefix_secret)
    return hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=8).hexdigest()
