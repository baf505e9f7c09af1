"""What is wrong now, in an operator's words, the worst first. The dashboard's header shows it."""

from __future__ import annotations

from typing import Any, Protocol

from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.gateway.fleet.instances import Fleet, Instance
from hetero_gateway.gateway.fleet.sources.discovery import Discovery
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.serve.dashboard.trend import Trend

BAD, WARNING = "bad", "warning"
# Of requests within the last minute.
_MOST_FAILED = 0.05
_LEAST_FAILED = 3
_FULL = 0.95
_NAMED = 3
_MINUTE_STEPS = 12


class Watched(Protocol):
    """What may be wrong of a gateway."""

    fleet: Fleet
    metrics: Metrics
    discovery: Discovery
    draining: bool

    @property
    def config(self) -> GatewayConfig: ...


def state_of(instance: Instance) -> str:
    """Whether it takes requests, in a word."""
    if not instance.up:
        return "down"
    if instance.outcomes.ejected:
        return "ejected"
    if instance.draining:
        return "draining"
    if not instance.awake:
        return "asleep" if instance.asleep else "paused"
    return "up"


def alarms(gateway: Watched, trend: Trend) -> list[dict[str, Any]]:
    """Each is {"severity": "bad" or "warning", "text"}."""
    found: list[tuple[str, str]] = []
    instances = list(gateway.fleet.instances.values())
    states = {instance.id: state_of(instance) for instance in instances}
    up = [name for name, state in states.items() if state == "up"]
    if gateway.draining:
        found.append((BAD, "This gateway is ending: it takes no new connections soon."))
    if not instances:
        found.append((BAD, "There is no instance."))
    elif not up:
        found.append((BAD, "No instance takes requests: clients get 503."))
    for state, words in (("down", "down"), ("ejected", "ejected, as requests failed there")):
        names = [name for name, its in states.items() if its == state]
        if names:
            found.append((BAD, f"{_listed(names)} {'is' if len(names) == 1 else 'are'} {words}."))
    minute = trend.figures(_MINUTE_STEPS)
    if minute["failed"] >= _LEAST_FAILED and (minute["errors"] or 0) > _MOST_FAILED:
        share = minute["errors"]
        found.append((BAD, f"{share:.0%} of the last minute's requests failed."))
    if trend.queue_grows():
        waiting = gateway.fleet.scheduler.queued
        found.append((BAD, f"The queue grows: {waiting} requests wait."))
    if not gateway.metrics.reloaded[0]:
        found.append((BAD, "The configuration file was refused; the one before is in effect."))
    workers, wanted = gateway.metrics.workers, gateway.config.server.workers
    if workers is not None and workers() < wanted:
        found.append((BAD, f"{workers()} of {wanted} workers are connected."))
    found += _warnings(gateway, instances)
    return [{"severity": severity, "text": text} for severity, text in found]


def _warnings(gateway: Watched, instances: list[Instance]) -> list[tuple[str, str]]:
    found = []
    scheduler = gateway.fleet.scheduler
    full = [i.id for i in instances if i.up and (i.engine_kv_usage or 0) > _FULL]
    if full:
        found.append((WARNING, f"The KV cache of {_listed(full)} is full: the engine preempts."))
    drifted = [i.id for i in instances if scheduler.snapshot(i.id).drifted]
    if drifted:
        found.append((WARNING, f"The profile of {_listed(drifted)} has drifted from what is seen."))
    failing = [each.config.name for each in gateway.discovery.followers() if each.problem]
    if failing:
        found.append((WARNING, f"The source {_listed(failing)} cannot be asked."))
    return found


def _listed(names: list[Any]) -> str:
    if len(names) > _NAMED + 1:
        return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} others"
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else str(names[0])
