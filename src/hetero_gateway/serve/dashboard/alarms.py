"""Current problems in an operator's words: what, how much, since when, and what to do about it.

``core/instances/drift.py`` and ``slowness.py`` judge, with their thresholds, whether a profile has
drifted or an instance is slow; the other thresholds are here. Small absolute errors raise no alarm.
"""

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hetero_gateway.core.instances.slowness import MOST
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.gateway.admission.clients import Admission
from hetero_gateway.gateway.dataplane.application import DataPlane
from hetero_gateway.gateway.dataplane.placement import Placement
from hetero_gateway.gateway.fleet.instances import Fleet, Instance
from hetero_gateway.gateway.fleet.sources.discovery import Discovery
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.serve.dashboard.trend import MINUTE_STEPS, Trend

if TYPE_CHECKING:
    from hetero_gateway.scaleout.sharing.peers import Sharing

# Share of requests within the last minute.
_MOST_FAILED = 0.05
_LEAST_FAILED = 3
# Share of attempts on one instance: most of them are retried elsewhere.
_MOST_FAILED_ON = 0.2
_FULL = 0.95
_NAMED = 3


class ShownBatches(Protocol):
    """Data on batches that alarms need."""

    def describe(self) -> list[dict[str, Any]]: ...
    def alarms(self) -> Iterable[tuple[str, str]]:
        """(severity, text)."""


class Shown(Protocol):
    """Data on a gateway that alarms need."""

    admission: Admission
    dataplane: DataPlane
    fleet: Fleet
    metrics: Metrics
    discovery: Discovery
    placement: Placement
    sharing: "Sharing | None"
    draining: bool

    @property
    def batches(self) -> ShownBatches | None:
        """None: there are none."""

    @property
    def config(self) -> GatewayConfig: ...


class _Found(NamedTuple):
    """A problem.

    Args:
        kind: of problem; its start is remembered for each name of a kind.
        names: the instances that it is about, or "".
        since_s: monotonic, if known; None: since it was first found.
    """

    severity: str
    kind: str
    names: list[str]
    text: str
    advice: str
    since_s: float | None = None


class Alarms:
    """Finds problems, and remembers since when; to be asked every few seconds."""

    def __init__(self, gateway: Shown, trend: Trend) -> None:
        self._gateway = gateway
        self._trend = trend
        self._since_s: dict[tuple[str, str], float] = {}  # monotonic
        # Taken once: an old problem must not look new when the system clock is set.
        self._unix_less_monotonic_s = time.time() - time.monotonic()

    def now(self) -> list[dict[str, Any]]:
        """The worst first: {"severity": "bad" or "warning", "text", "advice", "since"}.

        ``since``: Unix time; ``advice``: what to do.
        """
        now_s = time.monotonic()
        known, self._since_s = self._since_s, {}
        alarms = []
        for found in self._find():
            for name in found.names:
                key = found.kind, name
                self._since_s[key] = known.get(key, now_s)
            since_s = found.since_s
            if since_s is None:
                since_s = min(self._since_s[found.kind, name] for name in found.names)
            alarms.append(
                {
                    "severity": found.severity,
                    "text": found.text,
                    "advice": found.advice,
                    "since": round(since_s + self._unix_less_monotonic_s),
                }
            )
        return sorted(alarms, key=lambda alarm: alarm["severity"])  # "bad" before "warning"

    def _find(self) -> Iterator[_Found]:
        yield from self._of_the_gateway()
        yield from self._of_instances()
        yield from self._of_requests()
        yield from self._of_profiles()
        for number, (severity, text) in enumerate(
            () if self._gateway.batches is None else self._gateway.batches.alarms()
        ):
            yield _Found(severity, "batches", [str(number)], text, "")

    def _of_the_gateway(self) -> Iterator[_Found]:
        gateway = self._gateway
        if gateway.draining:
            text = "This gateway is shutting down and will soon accept no new connections."
            yield _Found("bad", "ending", [""], text, "Send clients to another gateway.")
        if not gateway.metrics.reloaded[0]:
            text = "The configuration file was refused; the previous one stays in effect."
            advice = "hetero-gateway validate -c FILE says what is wrong with it."
            yield _Found("bad", "reload", [""], text, advice)
        workers, wanted = gateway.metrics.workers, gateway.config.server.workers
        if workers is not None and workers() < wanted:
            text = f"{workers()} of {wanted} workers are connected."
            yield _Found(
                "bad", "workers", [""], text, "The gateway starts them again; see its log."
            )
        failing = [each.config.name for each in gateway.discovery.followers() if each.problem]
        if failing:
            text = f"The source {_listed(failing)} cannot be read."
            yield _Found(
                "warning",
                "sources",
                failing,
                text,
                "The instances it listed stay; see /admin/instances.",
            )

    def _of_instances(self) -> Iterator[_Found]:
        instances = list(self._gateway.fleet.instances.values())
        by_state: dict[str, list[Instance]] = {}
        for instance in instances:
            by_state.setdefault(state_of(instance), []).append(instance)
        if not instances:
            advice = "List some under `instances` in the configuration, or POST /admin/instances."
            yield _Found("bad", "none", [""], "There is no instance.", advice)
        elif "up" not in by_state:
            text = "No instance takes requests: clients get 503."
            yield _Found("bad", "none up", [""], text, "The rows below say why.")
        if down := by_state.get("down"):
            text = f"{_these(down)} down{_reason(down, down[0].shown_down_reason)}."
            advice = "Check its server and its log; the gateway keeps probing it."
            yield _Found("bad", "down", [i.id for i in down], text, advice)
        if ejected := by_state.get("ejected"):
            why = _reason(ejected, ejected[0].outcomes.reason)
            text = f"{_these(ejected)} ejected, as requests failed there{why}."
            advice = "Check its log; the gateway retries it with one request at a time."
            yield _Found("bad", "ejected", [i.id for i in ejected], text, advice)
        for failing in by_state.get("up", ()):
            failed, attempts = self._trend.failed_on(failing.id)
            if failed >= _LEAST_FAILED and failed > _MOST_FAILED_ON * attempts:
                text = f"{failing.id} fails: {failed} of its last minute's {attempts} attempts."
                advice = "Check its log; requests that failed before a first byte were retried."
                yield _Found("warning", "fails", [failing.id], text, advice)
        if full := [i.id for i in instances if i.up and (i.engine_kv_usage or 0) > _FULL]:
            text = f"The KV cache of {_listed(full)} is full: the engine preempts."
            advice = "Lower its max_num_seqs or its weight, or add an instance."
            yield _Found("warning", "kv", list(full), text, advice)
        refused = self._gateway.fleet.scheduler.legs.refused(time.monotonic())
        for prefill, decode in refused:
            text = f"{decode} cannot fetch the prompts that {prefill} computes."
            advice = "Put engines that differ in different kv_transfer groups."
            yield _Found("warning", "pairs", [f"{prefill} {decode}"], text, advice)

    def _of_requests(self) -> Iterator[_Found]:
        trend = self._trend
        minute = trend.figures(MINUTE_STEPS)
        failed, share = minute["failed"], minute["errors"] or 0.0
        if failed >= _LEAST_FAILED and share > _MOST_FAILED:
            text = f"{share:.0%} of the last minute's requests failed ({failed})"
            shares = {each: trend.of_instance(each)[2] for each in self._gateway.fleet.instances}
            worst = max(shares, key=lambda each: shares[each], default=None)
            if worst is not None and shares[worst] > 0:
                text += f", most on {worst} ({shares[worst]:.0%} of its own)"
            advice = "The last decisions show why; drain an instance that fails."
            yield _Found("bad", "failing", [""], f"{text}.", advice)
        if trend.queue_grows():
            text = f"The queue grows: {self._gateway.fleet.scheduler.queued} requests wait."
            advice = "Add instances, or limit clients; scheduler.queue bounds the wait."
            yield _Found("bad", "queue", [""], text, advice)

    def _of_profiles(self) -> Iterator[_Found]:
        members, instances = self._gateway.fleet.scheduler.members, self._gateway.fleet.instances
        slow = [
            (each.factor or MOST, instance_id, each.since_s)
            for instance_id, each in members.slowness.items()
            if each.since_s is not None and instance_id in instances and instances[instance_id].up
        ]
        for factor, instance_id, since_s in sorted(slow, reverse=True)[:_NAMED]:
            times = f"{factor:.1f}" if factor < MOST else f"more than {MOST:.0f}"
            text = f"{instance_id} is slow: it takes {times} times as long as its profile says."
            advice = (
                "Check its machine for other work or a throttled accelerator; drain it meanwhile."
            )
            yield _Found("warning", "slow", [instance_id], text, advice, since_s)
        if len(slow) > _NAMED:
            others = [instance_id for _, instance_id, _ in sorted(slow, reverse=True)[_NAMED:]]
            text = f"{len(others)} more are slow: {_listed(others)}."
            yield _Found("warning", "slow", list(others), text, "")
        hurt = {instance_id for _, instance_id, _ in slow}
        drifted = [each for each, drift in members.drifts.items() if drift.drifted]
        for instance_id in [each for each in drifted if each not in hurt][:_NAMED]:
            drift = members.drifts[instance_id]
            verdict = drift.verdict()
            phases = [
                f"{phase} takes {ratio:.2f} times as long as it says"
                for phase, ratio in (("decode", verdict.decode), ("prefill", verdict.prefill))
                if ratio is not None
            ]
            how = ", ".join(phases) or f"its seconds scatter by {verdict.spread or 0.0:.0%}"
            text = f"The profile of {instance_id} has drifted: {how}."
            advice = (
                "Fit a new one from the traffic: hetero-gateway profile --from-gateway URL "
                f"--instance {instance_id} -o FILE"
            )
            yield _Found("warning", "drift", [instance_id], text, advice, drift.since_s)


def state_of(instance: Instance) -> str:
    """Whether it takes requests, in one word."""
    if not instance.up:
        return "down"
    if instance.outcomes.ejected:
        return "ejected"
    if instance.draining:
        return "draining"
    if not instance.awake:
        return "asleep" if instance.asleep else "paused"
    return "up"


def _these(instances: list[Instance]) -> str:
    return f"{_listed([i.id for i in instances])} {'is' if len(instances) == 1 else 'are'}"


def _reason(instances: list[Instance], reason: str) -> str:
    """The reason, for a single instance."""
    return f": {reason.rstrip('.')}" if len(instances) == 1 and reason else ""


def _listed(names: list[Any]) -> str:
    if len(names) > _NAMED + 1:
        return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} others"
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else str(names[0])
