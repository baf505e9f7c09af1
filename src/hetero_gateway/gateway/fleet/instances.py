"""The gateway's instances: configuration, connections, health, engine facts.

The scheduler's view of an instance (``InstanceSpec``) is derived here and replaced whenever
something changes; nothing else writes it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import random
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.instances.ejections import Ejections
from hetero_gateway.core.instances.outcomes import EjectionRules, Outcomes
from hetero_gateway.core.instances.silence import Health
from hetero_gateway.core.policies import POLICY_NAMES, Policy, PolicyOptions, make_policy
from hetero_gateway.core.policies.slo import Slo, Slos
from hetero_gateway.core.prefixes.engine_blocks import EngineBlocks
from hetero_gateway.core.scheduling.disciplines import ClassRule, make_discipline
from hetero_gateway.core.scheduling.queue import QueueDiscipline
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.scheduling.shedding import WaitLimits
from hetero_gateway.core.types import InstanceId, InstanceSpec
from hetero_gateway.engines.vllm import EngineMetrics, ModelCard
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import RANKS_ARE_OURS, GatewayConfig
from hetero_gateway.files.instance_config import InstanceConfig, check_reachable, instance_profile
from hetero_gateway.files.policies import installed_policy
from hetero_gateway.files.scheduler_config import QueueConfig, SchedulerConfig, SloConfig, SloLimits
from hetero_gateway.files.secrets import secret
from hetero_gateway.gateway.records.families import InstanceGauges
from hetero_gateway.gateway.settings import Prepared, Settings
from hetero_gateway.http.hops import Hops
from hetero_gateway.http.tls import ClientContexts, ClientTls
from hetero_gateway.http.upstream import InstancePool

_log = logging.getLogger(__name__)

# What listed an instance: the configuration, /admin, or a source of discovery by its name. Only
# that one removes it.
FILE, ADMIN = "file", "admin"
# What can change in an instance's configuration while it serves.
ADJUSTABLE = ("model", "profile", "weight", "kv_transfer")


# A model that an engine lacks is not requested from it for this long, unless it lists it; and one
# that it lists and repeatedly lacks is looked for no sooner.
_MISSING_S = 60.0
_MISSED_AGAIN_S = 10.0

# Models of an instance, their cards, and its longest context.
_Served = tuple[frozenset[str], Mapping[str, ModelCard], int | None]


class Instance:
    """One vLLM server: its configuration, and its last known state."""

    def __init__(
        self,
        config: InstanceConfig,
        gateway: GatewayConfig,
        base_dir: Path,
        contexts: ClientContexts,
    ) -> None:
        self.config = config
        self.id = InstanceId(config.id)
        self.profile = instance_profile(config, base_dir)
        # Fitted to traffic, if ``scheduler.recalibrate`` allows it; the original stays.
        self.calibrated: Profile | None = None
        self.recalibrates = gateway.scheduler.recalibrate
        self.api_key = secret(config.api_key_env, f"instance {config.id}: api_key_env")
        self.ssl_context = _ssl_context(config, contexts)
        self.pool = InstancePool(
            config.base_url, gateway.pool, gateway.timeouts.connect_s, self.ssl_context
        )
        if config.rank_header is not None:
            self.pool.choose_rank(config.rank_header)
        self.weight = config.weight
        self.draining = False
        self.source = FILE
        self.source_key = ""  # its key in its source of discovery
        # Called when its engine has reported its models.
        self.on_models: Callable[[Instance], None] | None = None
        self.leaving = False  # removed once its requests have ended
        # Its engine sleeps or pauses, and gets no requests; ``wakeable``: it still has its weights.
        self.asleep = self.paused = self.wakeable = False
        self.rested_s = -math.inf  # when a call changed that: earlier answers are stale
        self.adapters: set[str] = set()  # loaded through the gateway
        self.up = False
        self.failed_probes = 0
        self.health = Health(None, math.inf)
        # It is silent: requests without a byte of an answer should go elsewhere.
        self.silent = False
        self.leave_at_s = math.inf  # monotonic: its requests then move, if they can
        self.mute = False  # silent, though no other instance may replace it
        self.unanswered = False  # its probes since it was up; nothing else failed
        self.down_reason = "not probed yet"
        # Present problems, of ``PROBLEMS``; each was logged once, when it began.
        self.problems: set[str] = set()
        self.scrape_problem = ""  # problem with its models or metrics at the last look
        self.models: frozenset[str] = config.models
        # When its engine reported that it lacks a model that it was believed to have, while no list
        # of its models names it.
        self.missed_s: dict[str, float] = {}
        self.listed: frozenset[str] = frozenset()  # by its own /v1/models
        self.lists_odd_names = False  # some that are ignored
        self.max_model_len: int | None = None
        self.cards: Mapping[str, ModelCard] = {}  # of those models, if its engine lists them
        # Read from the engine's /metrics; seconds old, shown, and never decides alone.
        self.engine_kv_usage: float | None = None
        self.engine_kv_capacity_tokens: int | None = None
        self.engine_block_tokens: int | None = None  # of its KV cache
        self.engine_prefix_caching: bool | None = None
        self.engine_started_s: float | None = None  # Unix time, by its own report
        # Reports on its prefix cache; None: none, or another process receives them.
        self.engine_blocks: EngineBlocks | None = None
        self.names_prompts = False  # prompts sent to it get names that it reports
        # Outcomes of its requests; from the fleet, when it is admitted.
        self.outcomes: Outcomes

    def adjust(self, config: InstanceConfig, profile: Profile | None) -> None:
        """Change model, profile or weight of the same server; to be published."""
        if profile != self.profile:
            self.profile, self.calibrated = profile, None
        if config.weight != self.config.weight:
            self.weight = config.weight
        if config.models != self.config.models:
            self.models = config.models  # none: until its next scrape
        self.config = config

    def missing(self, listed: frozenset[str]) -> set[str]:
        """The models that it lacks although they are configured, or it lists them.

        A configured model may be served without being listed: it is tried again after a while.
        """
        since_s = time.monotonic() - _MISSING_S
        return {m for m, at_s in self.missed_s.items() if m not in listed and at_s >= since_s}

    def miss(self, model: str) -> bool:
        """Its engine reported that it lacks a model. Returns whether that is news.

        Once published, no request for it is sent here until its models were read again. If they
        name it all the same, for a while.
        """
        now_s = time.monotonic()
        said_s = self.missed_s.get(model, -math.inf)
        if model not in self.models or now_s - said_s < _MISSED_AGAIN_S:
            return False
        self.missed_s = {
            m: at_s for m, at_s in self.missed_s.items() if now_s - at_s < _MISSING_S
        } | {model: now_s}
        self.models -= {model}
        return True

    def spec(self) -> InstanceSpec:
        """The instance as the scheduler sees it."""
        return InstanceSpec(
            instance_id=self.id,
            models=self.models,
            profile=self._effective_profile(),
            max_model_len=self.max_model_len,
            weight=self.weight,
            available=self.up and self.awake,
            draining=self.draining,
            kv_capacity_tokens=self.engine_kv_capacity_tokens,
            absent_reason="asleep" if self.asleep else "paused" if self.paused else "unhealthy",
        )

    @property
    def awake(self) -> bool:
        """Whether its engine would work on a request."""
        return not (self.asleep or self.paused)

    @property
    def shown_down_reason(self) -> str:
        """Why it is down, in a form fit for display."""
        # The reason is a library's text, which may quote the header it could not send.
        reason, key = self.down_reason, (self.api_key or "").strip()
        return reason.replace(key, "[key]") if key else reason

    @property
    def round_trip_s(self) -> float | None:
        """The round trip of its last probe, with HTTP; None: not known."""
        return self.health.last_s if math.isfinite(self.health.last_s) else None

    @property
    def profile_name(self) -> str:
        """The profile's name; or that there is none, or that it is learned."""
        if self.profile is not None:
            return self.profile.name
        return "unprofiled" if self.calibrated is None else "learned"

    def profile_age_s(self) -> float | None:
        """The age of its profile's date; None if that is missing or unreadable."""
        return None if self.profile is None else _age_s(self.profile.source.get("date"))

    def _effective_profile(self) -> Profile | None:
        # A live engine knows its KV pool better than a formula does.
        profile, tokens = self.calibrated or self.profile, self.engine_kv_capacity_tokens
        if profile is None or tokens is None or tokens == profile.kv_capacity_tokens:
            return profile
        return dataclasses.replace(profile, kv_capacity_tokens=tokens)


class Fleet:
    """All instances, and the scheduler over them.

    Args:
        config, base_dir: of the gateway.
        hops: of all of its processes; None: it has only this one.
    """

    def __init__(self, config: GatewayConfig, base_dir: Path, hops: Hops | None = None) -> None:
        self.hops = hops or Hops(None)
        self._config = config
        self._base_dir = base_dir
        self.contexts = ClientContexts(base_dir)
        scheduling = config.scheduler
        rng = random.Random(scheduling.seed)
        policy = _policy_of(scheduling)
        self.queues = policy.queues
        # Called after every change that may make room: set by the queue's driver.
        self.on_change: Callable[[], None] | None = None
        # Called when an instance comes, goes, or may be sent more or less than before.
        self.on_membership: Callable[[], None] | None = None
        # Called with an instance whose /health is good, and when it was asked, monotonic.
        self.on_good_health: Callable[[Instance, float], None] | None = None
        # Called after each look at the streams: rows of observation end there.
        self.on_look: Callable[[], None] | None = None
        # Called after each scrape, with the engine's reported load; None: none.
        self.on_scrape: Callable[[InstanceId, EngineMetrics | None], None] | None = None
        # Called after any change of an instance, before all others: which pairs can hand over.
        self.on_pairs: Callable[[], None] | None = None
        # Called after any change of an instance, for other processes.
        self.on_publish: Callable[[], None] | None = None
        # The models of live instances, by instance and all together.
        self._told_models: list[_Served] = []
        self._models: Mapping[str, ModelCard] = {}
        # Counts changes relevant to ``SetupWatch``.
        self.setups = 0
        self.ejections = Ejections(
            EjectionRules(**config.health.ejection.model_dump()), self._pools_of
        )
        self.discipline = _discipline_of(scheduling.queue)
        self.scheduler = Scheduler(
            policy,
            rng,
            scheduling.theta,
            (scheduling.reference_prompt_tokens, scheduling.reference_output_tokens),
            scheduling.queue.max_requests,
            observes=True,
            discipline=self.discipline,
            prefix_cache=scheduling.prefix_cache,
        )
        self.scheduler.set_limits(
            scheduling.theta, scheduling.queue.max_requests, _waits_of(scheduling)
        )
        self.instances: dict[InstanceId, Instance] = {}
        for place in config.places:
            self.admit(self.build(place))

    def build(self, config: InstanceConfig, gateway: GatewayConfig | None = None) -> Instance:
        """Build an instance that is not yet part of the fleet. ConfigError: it cannot be used.

        ``gateway``: the future configuration; None: the present one.
        """
        gateway = gateway or self._config
        if not gateway.server.link_local_instances:
            try:
                check_reachable(config.base_url)
            except ValueError as error:
                raise ConfigError(f"instance {config.id}: {error}") from error
        if config.data_parallel_rank is not None and gateway.server.lets_clients_choose_ranks:
            raise ConfigError(f"instance {config.id}: {RANKS_ARE_OURS}")
        instance = Instance(config, gateway, self._base_dir, self.contexts)
        instance.pool.allows_link_local = gateway.server.link_local_instances
        return instance

    def settings(self, settings: Settings) -> None:
        """Register the settings of this part that can change."""
        settings.add(_POLICY_FIELDS, self._prepare_policy)
        settings.add(DISCIPLINE_FIELDS, self._prepare_discipline)
        settings.add((), self._prepare_files, always=True)
        settings.files.append(lambda _: self.contexts.files())
        settings.add(
            ("scheduler.theta", "scheduler.queue.max_requests", "scheduler.queue.most_wait_s",
             "scheduler.queue.classes", "scheduler.queue.shed_by_slo", "scheduler.slo",
             "scheduler.recalibrate",
             "scheduler.wake_on_demand", "health.ejection", "pool", "timeouts.connect_s"),
            self._prepare,
        )  # fmt: skip

    def _prepare_files(self, _: GatewayConfig) -> Prepared | None:
        if not self.contexts.files():
            return None
        self.contexts.check()
        return Prepared(self.contexts.renew)

    def _prepare_discipline(self, fresh: GatewayConfig) -> Prepared:
        discipline = _discipline_of(fresh.scheduler.queue)

        def apply() -> None:
            self.discipline = discipline
            self.scheduler.set_discipline(discipline)
            self._changed()

        return Prepared(apply)

    def _prepare_policy(self, fresh: GatewayConfig) -> Prepared:
        policy = _policy_of(fresh.scheduler)

        def apply() -> None:
            self.queues = policy.queues
            self.scheduler.set_policy(policy)
            self._changed()

        return Prepared(apply)

    def _prepare(self, fresh: GatewayConfig) -> Prepared:
        rules = EjectionRules(**fresh.health.ejection.model_dump())
        scheduling = fresh.scheduler

        def apply() -> None:
            recalibrates = scheduling.recalibrate != self._config.scheduler.recalibrate
            self._config = fresh
            self.ejections.set_rules(rules)
            most_queued = scheduling.queue.max_requests
            self.scheduler.set_limits(scheduling.theta, most_queued, _waits_of(scheduling))
            for instance in self.instances.values():
                instance.pool.set_limits(fresh.pool, fresh.timeouts.connect_s)
                if recalibrates:
                    self.set_recalibrated(instance, scheduling.recalibrate)

        return Prepared(apply)

    def can_adjust(self, instance: Instance, config: InstanceConfig) -> bool:
        """Whether an instance can continue serving with this configuration: it is the same
        server."""
        adjusted = {name: getattr(config, name) for name in ADJUSTABLE}
        return instance.config.model_copy(update=adjusted) == config

    def adjust(self, instance: Instance, config: InstanceConfig) -> None:
        """See ``Instance.adjust``. Raises ConfigError: it has no such profile."""
        profile = instance.profile
        if config.profile != instance.config.profile:
            profile = instance_profile(config, self._base_dir)
        instance.adjust(config, profile)
        self.setups += 1

    def admit(self, instance: Instance) -> None:
        """Add an instance; its first good probe opens it. ConfigError: the id is taken."""
        if instance.id in self.instances:
            raise ConfigError(f"instance {instance.id!r} exists already")
        self.instances[instance.id] = instance
        self.setups += 1
        instance.outcomes = self.ejections.join(instance.id)
        self.scheduler.add(instance.spec())
        # Unknown until its engine reports it.
        self.scheduler.observe_cache(instance.id, None, None, 0.0)
        self._changed()

    def remove(self, instance_id: InstanceId) -> int:
        """Remove an instance; returns its number of requests. They run to their end.

        Raises KeyError if there is none.
        """
        instance = self.instances.pop(instance_id)
        self.setups += 1
        instance.pool.close()
        self.ejections.leave(instance_id)
        orphans = self.scheduler.remove(instance_id)
        self._changed()
        return len(orphans)

    def list_models(self, instance: Instance, models: Mapping[str, ModelCard]) -> None:
        """Apply an instance's list of models; to be published."""
        if (listed := frozenset(models)) != instance.listed:
            instance.listed = listed
            self.setups += 1
        configured = instance.config.models
        instance.adapters &= listed
        served = configured | instance.adapters if configured else listed
        served -= instance.missing(listed)
        cards = {name: card for name, card in models.items() if name in served}
        # Unchanged lists stay the same object, which ``models`` compares at once.
        if (served, cards) != (instance.models, instance.cards):
            instance.models, instance.cards = served, cards
        lengths = [card.max_model_len or 0 for card in instance.cards.values()]
        if any(lengths):
            instance.max_model_len = max(lengths)
        if instance.on_models is not None:
            instance.on_models(instance)

    def publish(self, instance: Instance) -> None:
        """Inform the scheduler of changes."""
        if self.instances.get(instance.id) is instance:
            self.scheduler.replace(instance.spec())
            self._changed()

    def _pools_of(self, instance_id: InstanceId) -> Iterable[list[InstanceId]]:
        """For each model of an instance, the instances that take its requests: for the panic
        rule."""
        live = [i for i in self._live() if i.awake]
        for model in self.instances[instance_id].models:
            yield [other.id for other in live if model in other.models]

    def _changed(self) -> None:
        if self.on_pairs is not None:
            self.on_pairs()
        if self.on_membership is not None:
            self.on_membership()
        if self.on_change is not None:
            self.on_change()
        if self.on_publish is not None:
            self.on_publish()

    def set_recalibrated(self, instance: Instance, wanted: bool) -> None:
        """Let an instance's constants follow the traffic, or restore the original for good."""
        instance.recalibrates = wanted
        if not wanted and instance.calibrated is not None:
            instance.calibrated = None
            _log.info("instance %s: its original profile is restored", instance.id)
            self.publish(instance)

    def mark_up(self, instance: Instance) -> None:
        instance.failed_probes = 0
        instance.unanswered = instance.mute = False
        if not instance.up:
            instance.up = True
            instance.down_reason = ""
            _log.info("instance %s is up", instance.id)
            self.publish(instance)

    def mark_down(self, instance: Instance, reason: str, *, unanswered: bool = False) -> None:
        """``unanswered``: only its probes were not answered."""
        instance.unanswered = unanswered and (instance.up or instance.unanswered)
        if instance.up and not (unanswered and self._is_needed(instance)):
            instance.up = False
            _log.warning("instance %s is down: %s", instance.id, reason)
            self.publish(instance)
        instance.down_reason = reason
        instance.engine_kv_usage = None
        for other in list(self.instances.values()):
            if other.unanswered and not other.up and self._is_needed(other):
                other.up = True
                _log.warning(
                    "instance %s still gets requests, as no other instance is up", other.id
                )
                self.publish(other)

    def _is_needed(self, instance: Instance) -> bool:
        """Whether no instance with answered probes serves a model of it, while requests on it are
        not known to hang.
        """
        well = [i.models for i in self._live() if i is not instance and not i.unanswered]
        return not instance.mute and any(
            not any(model in models for models in well) for model in instance.models
        )

    def set_silent(self, instance: Instance, *, silent: bool) -> None:
        """Whether requests without a byte of an answer should leave it; other processes are
        informed."""
        instance.silent = silent
        if self.on_publish is not None:
            self.on_publish()

    def tell_drift(self, instance_id: InstanceId) -> None:
        """Log, once, that an instance's profile has begun or ceased to drift."""
        drift = self.scheduler.members.drifts.get(instance_id)
        if drift is None:
            return
        told = drift.verdict()
        ratios = ", ".join(
            f"{phase} takes {ratio:.2f} times as long as it says"
            for phase, ratio in (("decode", told.decode), ("prefill", told.prefill))
            if ratio is not None
        )
        if drift.drifted:
            _log.warning(
                "instance %s: its profile has drifted: %s (spread %.0f %%); fit a new one from "
                "the traffic: hetero-gateway profile --from-gateway URL --instance %s -o FILE",
                instance_id,
                ratios,
                100 * (told.spread or 0.0),
                instance_id,
            )
        else:
            _log.info("instance %s: its profile fits again: %s", instance_id, ratios)

    def models(self) -> Mapping[str, ModelCard]:
        """Names that live instances serve, each with a card and the longest known context."""
        told = [(i.models, i.cards, i.max_model_len) for i in self._live()]
        if told != self._told_models:
            self._told_models, self._models = told, _merged(told)
        return self._models

    def serves(self, model: str, instance_id: str) -> bool:
        """Whether an instance serves a model, or any if it is "".

        Names of services elsewhere are unknown here.
        """
        if not instance_id:
            return self.scheduler.members.knows(model)
        instance = self.instances.get(InstanceId(instance_id))
        return instance is None or model in instance.models

    def ready(self) -> bool:
        """Whether any instance can take requests."""
        wakes = self._config.scheduler.wake_on_demand
        return any(i.awake or (wakes and i.wakeable) for i in self._live())

    def _live(self) -> Iterable[Instance]:
        return (i for i in self.instances.values() if i.up and not i.draining)

    def forget_cache(self, instance_id: InstanceId) -> None:
        """Empty an instance's prefix cache. KeyError: there is no such instance."""
        if self.scheduler.caches is not None:
            self.scheduler.caches.forget(instance_id)

    def gauges(self) -> Iterator[InstanceGauges]:
        """Every instance as metrics show it; some may come and go meanwhile."""
        caches, legs = self.scheduler.caches, self.scheduler.legs
        refused = Counter(prefill for prefill, _ in legs.refused(time.monotonic()))
        for instance in tuple(self.instances.values()):
            if self.instances.get(instance.id) is instance:
                yield InstanceGauges(
                    snapshot=self.scheduler.members.snapshot(instance.id),
                    up=instance.up,
                    models=instance.models,
                    problems=frozenset(instance.problems),
                    kv_usage_engine=instance.engine_kv_usage,
                    profile_age_s=instance.profile_age_s(),
                    ejected=instance.outcomes.ejected,
                    prefix_trust=None if caches is None else caches.eta(instance.id),
                    prefix_bytes=None if caches is None else caches.index.bytes_on(instance.id)[0],
                    prefix_source=None if caches is None else caches.source(instance.id),
                    refused_pairs=None if legs.pairs is None else refused[instance.id],
                )

    async def close_idle_connections(self) -> None:
        """Repeatedly close connections that were idle too long, or lead to old addresses of a
        name."""
        while True:
            await asyncio.sleep(self._config.pool.idle_expiry_s)
            pools = [instance.pool for instance in self.instances.values()]
            for pool in pools:
                pool.close_expired()
            for pool in pools:
                if pool.addresses.is_name:
                    await pool.addresses.look_up()  # one after the other: they may be hundreds
                    pool.leave_old_addresses()

    def close(self) -> None:
        for instance in self.instances.values():
            instance.pool.close()


DISCIPLINE_FIELDS = tuple(
    f"scheduler.queue.{name}" for name in ("discipline", "patience_s", "classes", "reserve")
)
_POLICY_FIELDS = tuple(
    f"scheduler.{name}"
    for name in (
        "policy", "policy_options", "randomised", "single_instance", "objective", "prefill_depth",
        "first_token_weight", "slo",
    )
)  # fmt: skip


def _discipline_of(config: QueueConfig) -> QueueDiscipline:
    classes = {
        name: ClassRule(rule.share, math.inf if rule.max_wait_s is None else rule.max_wait_s)
        for name, rule in config.classes.items()
    }
    return make_discipline(config.discipline, config.patience_s, classes, config.reserve)


def _waits_of(scheduling: SchedulerConfig) -> WaitLimits:
    config, slo = scheduling.queue, scheduling.slo
    most_s = math.inf if config.most_wait_s is None else config.most_wait_s
    classes = {
        name: rule.most_wait_s
        for name, rule in config.classes.items()
        if rule.most_wait_s is not None
    }
    return WaitLimits(most_s, classes, _slos_of(slo) if slo and config.shed_by_slo else None)


def _policy_of(scheduling: SchedulerConfig) -> Policy:
    single = scheduling.single_instance
    options = PolicyOptions(
        randomised=scheduling.randomised,
        single_instance=None if single is None else InstanceId(single),
        objective=scheduling.objective,
        prefill_depth=scheduling.prefill_depth,
        first_token_weight=scheduling.first_token_weight,
        slos=None if scheduling.slo is None else _slos_of(scheduling.slo),
    )
    if scheduling.policy in POLICY_NAMES:
        return make_policy(scheduling.policy, options)
    return installed_policy(scheduling.policy, scheduling.policy_options)


def _slos_of(config: SloConfig) -> Slos:
    return Slos(
        slo_of(config),
        {name: slo_of(limits) for name, limits in config.models.items()},
        {name: slo_of(limits) for name, limits in config.classes.items()},
    )


def slo_of(limits: SloLimits) -> Slo:
    """Limits as configured; none: infinite."""
    given = {"ttft_s": limits.ttft_s, "tpot_s": limits.tpot_s}
    return Slo(**{name: limit for name, limit in given.items() if limit is not None})


def _age_s(day: Any) -> float | None:
    try:
        made = datetime.fromisoformat(str(day))
    except ValueError:
        return None
    if made.tzinfo is None:
        made = made.replace(tzinfo=UTC)
    return max(0.0, (datetime.now(UTC) - made).total_seconds())


def _ssl_context(config: InstanceConfig, contexts: ClientContexts) -> ssl.SSLContext | None:
    if not config.base_url.startswith("https:"):
        return None
    wanted = ClientTls(config.ca_file, config.certificate_file, config.key_file)
    try:
        return contexts.context(wanted)
    except ConfigError as error:
        raise ConfigError(f"instance {config.id}: {error}") from error


def _merged(told: list[_Served]) -> dict[str, ModelCard]:
    result: dict[str, ModelCard] = {}
    before: _Served | None = None
    for each in told:
        if each == before:
            continue  # as nearly all: replicas of one deployment
        before = each
        models, cards, context = each
        for model in sorted(models):
            card = cards.get(model) or ModelCard()  # the configuration has named it
            if card.max_model_len is None:  # an adapter has its base's
                card = card._replace(max_model_len=context)
            known = result.get(model)
            if known is not None:
                longest = max(known.max_model_len or 0, card.max_model_len or 0) or None
                best = known if known.root is not None else card
                card = best._replace(max_model_len=longest)
            result[model] = card
    return result
