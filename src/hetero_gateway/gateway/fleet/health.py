"""Probes and scrapes: which instances are alive, what they serve, how full their engine reports to
be.

Each instance has one loop, and no loop waits for another. It asks /health often, and /v1/models and
/metrics less often; a connection that fails while serving makes the next probe come at once.
Reports of an engine are seconds old, so they are shown beside the gateway's own accounting and
never decide alone.

Answers of an instance are bounded (``fleet.probe``) and may be anything: one that cannot be
understood is down, with the reason. Only two things are needed: that /health succeeds, and that the
models are named by the configuration or /v1/models. A probe that fails for a reason of the
gateway's own (``Failure.LOCAL``) does not count.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from hetero_gateway.core.instances.silence import Health
from hetero_gateway.core.types import InstanceId
from hetero_gateway.engines.vllm import (
    EngineMetrics,
    MetricSample,
    metrics_of,
    of_place,
    paths,
    read_listing,
    samples_in,
)
from hetero_gateway.engines.vllm.answers import MOST_MODELS
from hetero_gateway.files.gateway_config import GatewayConfig, HealthConfig
from hetero_gateway.gateway.fleet.instances import Fleet, Instance
from hetero_gateway.gateway.fleet.lag import LoopLag
from hetero_gateway.gateway.fleet.places import places_of
from hetero_gateway.gateway.fleet.probe import LateProbe, Probe
from hetero_gateway.gateway.settings import Prepared, Settings
from hetero_gateway.http.failures import Failure, InstanceError
from hetero_gateway.http.hops import LOOP_DETECTED

_log = logging.getLogger(__name__)

# A card has half a kilobyte, and a rank's metrics are 70 KB.
_MOST_MODELS_BYTES = 1 << 20
_MOST_METRICS_BYTES = 1 << 23
_MOST_STATE_BYTES = 1 << 12
# Metrics are read in parts of this size, with a turn of the event loop after each.
_PART_BYTES = 1 << 16
# A scrape this late is no longer put off: there are no streams to look at.
_LONGEST_WAIT_S = 1.5
# At the start, slow instances are waited for no longer than this.
_LONGEST_START_S = 1.0
# Skip this many scrapes of an idle instance; its models, which hardly ever change, are read with
# one scrape in this many. It is probed half as often: a problem hurts nobody before its next
# request, whose failure has it probed at once.
_IDLE_SCRAPES, _SCRAPES_PER_MODELS, _IDLE_PROBES = 4, 6, 2
# However many of its requests fail, a suspected instance is probed no sooner than this after the
# last probe.
_SOONEST_S = 0.5
# First probes are spread out by the golden ratio: many at once would delay streams.
_APART = 0.6180339887
_BUSY = -1.0
_TELL_LATE_EVERY_S = 10.0
_MOST_TOLD = 5


class _Reading:
    """The metrics of an address with several ranks, read by one of them for all."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.asked_s = -math.inf
        self.samples: list[MetricSample] | None = None
        self.problem = ""


@dataclass(slots=True, eq=False)
class _Probed:
    """The state of a probed instance.

    ``first``: set once it was probed; ``idle_at``: its number of requests so far if it was idle at
    its last scrape, else ``_BUSY``; ``rests``: idle at the one before, too, without a request in
    between. ``reading``: of the metrics of a shared address, and when the last used one was made;
    None: the address is its own.
    """

    task: asyncio.Task[None]
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    first: asyncio.Event = field(default_factory=asyncio.Event)
    scraped_s: float = field(default_factory=time.monotonic)
    scrapes: int = 0
    scrape_now: bool = False
    suspected: bool = False
    idle_at: float | None = _BUSY
    rests: bool = False
    reading: _Reading | None = None
    read_s: float = -math.inf


class HealthMonitor:
    """Runs one probe loop per instance, inside the given task group."""

    def __init__(self, fleet: Fleet, config: HealthConfig, tasks: asyncio.TaskGroup) -> None:
        self._fleet = fleet
        self._config = config
        self._tasks = tasks
        self._probed: dict[InstanceId, _Probed] = {}
        self._readings: WeakValueDictionary[str, _Reading] = WeakValueDictionary()
        self._watched = 0
        # Discarded probes: the gateway was short of CPU time, and did not look at answers.
        self.late = 0
        self._late_told_s = -math.inf
        self._lag = LoopLag()
        fleet.on_look = self._after_look

    def settings(self, settings: Settings) -> None:
        """Register the settings of this part that can change."""
        settings.add(("health",), self._prepare)

    def _prepare(self, fresh: GatewayConfig) -> Prepared:
        def apply() -> None:
            self._config = fresh.health
            for probed in self._probed.values():
                probed.wake.set()

        return Prepared(apply)

    async def start(self) -> None:
        """Begin to probe every instance; returns once each was probed, or had the time for it."""
        for instance in self._fleet.instances.values():
            self.watch(instance)
        await self.probed(self._fleet.instances)
        down = [i for i in self._fleet.instances.values() if not i.up]
        for instance in down[:_MOST_TOLD]:
            _log.warning("instance %s is not reachable: %s", instance.id, instance.down_reason)
        if len(down) > _MOST_TOLD:
            _log.warning("and %d more", len(down) - _MOST_TOLD)

    async def probed(self, instances: Iterable[InstanceId]) -> None:
        """Returns once each of these was probed, or had the time for it."""
        first = [
            asyncio.ensure_future(self._probed[instance_id].first.wait())
            for instance_id in instances
            if instance_id in self._probed
        ]
        if first:
            timeout_s = min(self._config.probe_timeout_s, _LONGEST_START_S)
            _, late = await asyncio.wait(first, timeout=timeout_s)
            for waiter in late:
                waiter.cancel()

    def watch(self, instance: Instance) -> None:
        """Begin to probe an instance."""
        self._watched += 1
        task = self._tasks.create_task(self._loop(instance, self._watched * _APART % 1))
        probed = self._probed[instance.id] = _Probed(task)
        if instance.config.data_parallel_rank is not None:
            url = instance.config.base_url
            # Kept alive by its ranks alone.
            probed.reading = reading = self._readings.get(url) or _Reading()
            self._readings[url] = reading

    def unwatch(self, instance_id: InstanceId) -> None:
        if (probed := self._probed.pop(instance_id, None)) is not None:
            probed.task.cancel()

    def _after_look(self) -> None:
        """Rows of observation end now: due counters are best read here, so that they cover whole
        rows.
        """
        now_s, instances = time.monotonic(), self._fleet.instances
        before_s = now_s - self._config.scrape_interval_s
        for instance_id, probed in self._probed.items():
            if probed.scraped_s > before_s:
                continue  # the usual case, for each instance every second
            due = now_s - probed.scraped_s >= self._scrape_interval_s(instance_id)
            if due and instance_id in instances and instances[instance_id].up:
                probed.scrape_now = True
                probed.wake.set()

    def _is_due(self, instance_id: InstanceId) -> bool:
        """Whether to scrape now; a due scrape waits a little for the end of its row."""
        probed = self._probed[instance_id]
        if probed.scrape_now:
            return True
        interval_s = self._scrape_interval_s(instance_id)
        waited_s = time.monotonic() - probed.scraped_s - interval_s
        return waited_s >= min(_LONGEST_WAIT_S, interval_s)

    def _scrape_interval_s(self, instance_id: InstanceId) -> float:
        interval_s = self._config.scrape_interval_s
        return interval_s * _IDLE_SCRAPES if self._rests(instance_id) else interval_s

    def _rests(self, instance_id: InstanceId) -> bool:
        """Whether it was idle at its last scrapes, and was sent nothing since."""
        return (
            self._probed[instance_id].rests
            and instance_id in self._fleet.instances
            and not self._fleet.scheduler.members.table[instance_id].in_flight
        )

    def _probe_interval_s(self, instance: Instance) -> float:
        interval_s = self._config.probe_interval_s
        if instance.outcomes.trials:
            return min(_SOONEST_S, interval_s)  # it may read for them
        if instance.up and not instance.failed_probes and self._rests(instance.id):
            return interval_s * _IDLE_PROBES
        return interval_s

    def stop(self) -> None:
        for instance_id in list(self._probed):
            self.unwatch(instance_id)

    def suspect(self, instance: Instance, reason: str, *, down: bool) -> None:
        """A request failed: mark the instance down if that is certain, and probe it now."""
        for place in places_of(self._fleet, instance):
            if down:
                self._fleet.mark_down(place, reason)
            self.ask(place)

    def miss(self, instance: Instance, model: str) -> None:
        """Its engine answered that it does not have a model: read its models now."""
        if not instance.miss(model):
            return
        self._fleet.publish(instance)
        _log.warning("instance %s no longer has %r: its models are read again", instance.id, model)
        if (probed := self._probed.get(instance.id)) is not None:
            probed.scrapes, probed.scrape_now = 0, True
            self.ask(instance)

    def ask(self, instance: Instance) -> None:
        """Probe it now, or half a second after the last probe."""
        if (probed := self._probed.get(instance.id)) is not None:
            probed.suspected = True
            probed.wake.set()

    async def _loop(self, instance: Instance, apart: float) -> None:
        loop = asyncio.get_running_loop()
        probed = self._probed[instance.id]
        wake = probed.wake
        probe = Probe(instance, self._config.probe_timeout_s, self._fleet.hops, self._lag)
        wait_s = self._config.probe_interval_s * (0.5 + apart)  # the first time
        try:
            while True:
                wake.clear()
                probed.suspected = False
                began_s = loop.time()
                probe.timeout_s = self._config.probe_timeout_s
                try:
                    await self._look(instance, probe)
                    if instance.up and self._is_due(instance.id):
                        probed.scrape_now = False
                        probed.scraped_s = time.monotonic()
                        await self._scrape(instance, probe)
                except InstanceError as error:
                    self._note_local(instance, error)
                except Exception:
                    # The background loop's boundary: a bug here must not end health checking.
                    _log.exception("probing instance %s failed", instance.id)
                probed.first.set()
                timer = loop.call_later(wait_s, wake.set)
                try:
                    await wake.wait()
                finally:
                    timer.cancel()
                wait_s = self._probe_interval_s(instance)
                if probed.suspected:
                    soonest_s = began_s + min(_SOONEST_S, self._config.probe_interval_s)
                    await asyncio.sleep(max(0.0, soonest_s - loop.time()))
        finally:
            probe.close()

    async def _look(self, instance: Instance, probe: Probe) -> None:
        """Ask /health; an instance that was down opens only once its models are known."""
        asked_s = time.monotonic()
        if instance.health.asked_s is None:
            instance.health = instance.health._replace(asked_s=asked_s)
        unanswered = False
        try:
            answer = await probe.get(paths.HEALTH)
            instance.health = Health(None, time.monotonic() - asked_s)
            problem = "" if answer.good else f"{paths.HEALTH} answered {answer.status}"
            if answer.status == LOOP_DETECTED:
                problem += ": it is this gateway itself, or leads back to it"
            if not problem and not instance.up:
                # Before it opens: it may have restarted with other models.
                await self._scrape(instance, probe)
                problem = "" if instance.models else instance.scrape_problem or "it lists no model"
        except InstanceError as error:
            if error.failure is Failure.LOCAL:
                self._note_local(instance, error)
                instance.health = instance.health._replace(asked_s=None)
                return
            problem = f"{paths.HEALTH}: {error}"
            unanswered = error.failure is Failure.TOTAL_TIMEOUT
            if not unanswered:
                instance.health = Health(None, math.inf)
            elif instance.outcomes.heard_s >= asked_s:
                instance.health = Health(None, math.inf)
                return  # it serves meanwhile: requests decide
        if not problem:
            self._fleet.mark_up(instance)
            if self._fleet.on_good_health is not None:
                self._fleet.on_good_health(instance, asked_s)
            return
        instance.failed_probes += 1
        instance.down_reason = problem
        if instance.failed_probes >= self._config.unhealthy_after:
            self._fleet.mark_down(instance, problem, unanswered=unanswered)

    def _note_local(self, instance: Instance, error: InstanceError) -> None:
        """Note a probe that says nothing about the instance. Late probes are logged now and then,
        as all instances are late at the same time.
        """
        if not isinstance(error, LateProbe):
            _log.warning("instance %s could not be probed: %s", instance.id, error)
            return
        self.late += 1
        now_s = time.monotonic()
        if now_s - self._late_told_s >= _TELL_LATE_EVERY_S:
            self._late_told_s = now_s
            _log.warning("probes are late and do not count: %s", error)

    async def _scrape(self, instance: Instance, probe: Probe) -> None:
        """Read models and engine facts; an engine without metrics is served all the same.

        Raises InstanceError: LOCAL.
        """
        probed, problems = self._probed[instance.id], []
        if not instance.up or instance.scrape_problem or probed.scrapes % _SCRAPES_PER_MODELS == 0:
            problems.append(await self._scrape_models(instance, probe))
            _note_problem(instance, "models_unreadable", problems[0])
        probed.scrapes += 1
        problems.append(await self._scrape_metrics(instance, probe))
        _note_problem(instance, "metrics_unreadable", problems[-1])
        instance.scrape_problem = "; ".join(filter(None, problems))
        if instance.up and not instance.models:
            self._fleet.mark_down(instance, instance.scrape_problem)
        self._fleet.publish(instance)

    async def _scrape_models(self, instance: Instance, probe: Probe) -> str:
        """Returns what is wrong with them."""
        body, problem = await _body(probe, paths.MODELS, _MOST_MODELS_BYTES)
        listing = None if body is None else read_listing(body)
        if listing is None:
            return problem or f"{paths.MODELS}: not a list of models"
        models, left_out = listing
        if left_out and not instance.lists_odd_names:
            _log.warning(
                "instance %s: %d of the models it lists are ignored: names must be "
                "printable, have 1 to 256 characters, and number at most %d",
                *(instance.id, left_out, MOST_MODELS),
            )
        instance.lists_odd_names = left_out > 0
        self._fleet.list_models(instance, models)
        return "" if models else f"{paths.MODELS}: lists no model"

    async def read_models(self, instance: Instance, probe: Probe) -> None:
        """Ask an instance now which models it serves."""
        try:
            problem = await self._scrape_models(instance, probe)
        except InstanceError as error:
            problem = str(error)
        if problem:
            _log.warning("instance %s: its models cannot be read: %s", instance.id, problem)

    async def _scrape_metrics(self, instance: Instance, probe: Probe) -> str:
        probed, rank = self._probed[instance.id], instance.config.data_parallel_rank
        reading = probed.reading or _Reading()
        async with reading.lock:
            interval_s, now_s = self._config.scrape_interval_s, time.monotonic()
            # What another rank has read, and this one has not used yet, is not read again.
            fresh = probed.read_s < reading.asked_s > now_s - interval_s and instance.up
            if not fresh:
                body, reading.problem = await _body(probe, paths.METRICS, _MOST_METRICS_BYTES)
                reading.samples = None if body is None else await _read_samples(body)
                reading.asked_s = now_s
            asked_s, samples, problem = reading.asked_s, reading.samples, reading.problem
        probed.read_s = asked_s
        if samples is not None and rank is not None:
            samples = of_place(samples, rank)
        told = None if samples is None else metrics_of(samples)
        self._tell_cache(instance, told)
        await self._tell_rest(instance, told, probe, asked_s)
        if self._fleet.on_scrape is not None:
            self._fleet.on_scrape(instance.id, told)
        if told is not None:
            instance.engine_kv_usage = told.kv_usage
            self._note_rest(self._probed[instance.id], told)
            self._tell_queue(instance, told)
            if told.cache.capacity_tokens is not None:
                instance.engine_kv_capacity_tokens = told.cache.capacity_tokens
            instance.engine_block_tokens = told.cache.block_tokens
        return problem

    def _tell_cache(self, instance: Instance, told: EngineMetrics | None) -> None:
        """Note the hits of its prefix cache; an engine that does not report is assumed neither to
        have none, nor to be unchanged.
        """
        if self._fleet.instances.get(instance.id) is not instance:
            return
        caching, counters = instance.engine_prefix_caching, None
        if told is not None:
            caching = instance.engine_prefix_caching = told.cache.prefix_caching
            queries, hits = told.prefix_cache_queries, told.prefix_cache_hits
            if queries is not None and hits is not None:
                counters = queries, hits
            self._tell_renewal(instance, told)
        self._fleet.scheduler.observe_cache(instance.id, caching, counters, time.monotonic())

    async def _tell_rest(
        self, instance: Instance, told: EngineMetrics | None, probe: Probe, asked_s: float
    ) -> None:
        """Note whether it sleeps or pauses, from its metrics; or from its own answer, if a call
        caused it and the metrics do not show it. Raises InstanceError: LOCAL.
        """
        asleep, paused = instance.asleep, instance.paused
        if told is not None and told.asleep is not None:
            asleep = told.asleep
            if asleep and not instance.asleep:
                instance.wakeable = bool(told.wakeable)
        elif asleep:
            asleep = await _still(probe, paths.IS_SLEEPING, b"is_sleeping")
        if paused:
            paused = await _still(probe, paths.IS_PAUSED, b"is_paused")
        if asked_s > instance.rested_s and (asleep, paused) != (instance.asleep, instance.paused):
            instance.asleep, instance.paused = asleep, paused
            _log.info(
                "instance %s %s", instance.id,
                "is awake" if instance.awake else "sleeps" if asleep else "is paused",
            )  # fmt: skip

    def _note_rest(self, probed: _Probed, told: EngineMetrics) -> None:
        """Note whether it rests: idle, without a request since it was idle."""
        idle = told.running == 0 and told.waiting == 0
        idle_at = told.prompt_tokens if idle else _BUSY
        probed.rests = idle_at not in (None, _BUSY) and probed.idle_at == idle_at
        probed.idle_at = idle_at

    def _tell_renewal(self, instance: Instance, told: EngineMetrics) -> None:
        """Note that it has restarted although no probe failed, or sleeps: its cached prompts are
        gone. Falling counters show it too, but a new engine's may be ahead of the old one's.
        """
        before, started_s = instance.engine_started_s, told.started_s
        instance.engine_started_s = started_s
        if told.asleep or (before is not None and started_s is not None and started_s != before):
            self._fleet.forget_cache(instance.id)

    def _tell_queue(self, instance: Instance, told: EngineMetrics) -> None:
        running, waiting = told.running, told.waiting
        if running is None or waiting is None:
            return
        if self._fleet.instances.get(instance.id) is instance:
            scheduler = self._fleet.scheduler
            scheduler.members.table[instance.id].observe_queue(
                int(running), int(waiting), time.monotonic()
            )


def _note_problem(instance: Instance, name: str, problem: str) -> None:
    """Log when a problem begins, or is resolved; "": none."""
    if problem and name not in instance.problems:
        instance.problems.add(name)
        _log.warning(
            "instance %s: %s; what the gateway knows of it is out of date", instance.id, problem
        )
    elif not problem and name in instance.problems:
        instance.problems.discard(name)
        what = paths.METRICS if name == "metrics_unreadable" else paths.MODELS
        _log.info("instance %s: %s can be read again", instance.id, what)


async def _body(probe: Probe, path: str, most_bytes: int) -> tuple[bytes | None, str]:
    """(body, problem). Raises InstanceError: LOCAL."""
    try:
        answer = await probe.get(path, most_bytes)
    except InstanceError as error:
        if error.failure is Failure.LOCAL:
            raise
        return None, f"{path}: {error}"
    if not answer.good:
        return None, f"{path} answered {answer.status}"
    if answer.problem:
        return None, f"{path}: {answer.problem}"
    return answer.body, ""


async def _still(probe: Probe, path: str, name: bytes) -> bool:
    """Whether an engine reports this state; without an answer it is unchanged, and an engine that
    does not know the question has restarted. Raises InstanceError: LOCAL.
    """
    try:
        answer = await probe.get(path, _MOST_STATE_BYTES)
    except InstanceError as error:
        if error.failure is Failure.LOCAL:
            raise
        return True
    if answer.status == 404:
        return False
    return not answer.good or b'"%b":true' % name in answer.body.replace(b" ", b"")


async def _read_samples(body: bytes) -> list[MetricSample]:
    """Read metrics without blocking the event loop: part by part, each of whole lines."""
    # Every byte is a character of latin-1, and the parts we read are ASCII.
    text = body.decode("latin-1")
    samples: list[MetricSample] = []
    start, size = 0, len(text)
    while start < size:
        end = start + _PART_BYTES
        if end < size:
            end = text.rfind("\n", start, end) + 1
            if end == 0:  # a line that is none of ours
                end = text.find("\n", start + _PART_BYTES) + 1 or size
        samples += samples_in(text[start:end])
        start = end
        await asyncio.sleep(0)
    return samples
