"""Brings the fleet in line with its sources, one change at a time.

Each instance remembers which source listed it, and only that one removes it. An instance that its
source no longer lists is drained, then removed; if it is listed again before, at the same address,
it stays. A changed address is treated as a new instance; the old one is drained. A source that
cannot be read, or reports nonsense, changes nothing, and is asked again after growing pauses.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.discovery_config import SourceConfig
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.instance_config import InstanceConfig
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.gateway.fleet.instances import Instance
from hetero_gateway.gateway.fleet.roster import Roster
from hetero_gateway.gateway.fleet.sources.base import Found, Source, SourceError
from hetero_gateway.gateway.fleet.sources.pace import LONGEST_PAUSE_S, Backoff
from hetero_gateway.gateway.settings import Prepared, Settings

_log = logging.getLogger(__name__)

_LONGEST_ID = 63
# Settings that a source applies to all of its instances.
_OF_INSTANCES = (
    *("model", "weight", "api_key_env", "ca_file", "certificate_file", "key_file"),
    *("kv_transfer", "data_parallel_start_rank"),
)
# The number of possibly changed instances that are examined in a turn of the event loop.
_LOOKED_AT = 128


class SourceFollower:
    """One source, the instances it has listed, and the code that brings the fleet in line with it.

    Args:
        roster: of the fleet.
        config: of the source.
        base_dir: what files are relative to.

    Raises:
        ConfigError: it cannot be followed, or one of its profiles cannot be loaded.
    """

    def __init__(self, roster: Roster, config: SourceConfig, base_dir: Path) -> None:
        self.config = config
        self.problem = ""
        self._roster = roster
        self._source = _source_of(config, base_dir)
        self._profiles = [load_profile(rule.profile, base_dir) for rule in config.profiles]
        if config.profile is not None:
            load_profile(config.profile, base_dir)
        self._wanted: list[Found] | None = None
        self._changed = asyncio.Event()
        self.named: dict[str, Instance] = {}

    async def run(self) -> None:
        """Follow it until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._apply_all())

    def tell(self, found: list[Found]) -> None:
        """Take the complete list."""
        self.problem = ""
        self._wanted = [place for each in found for place in self._places_of(each)]
        self._changed.set()

    def _places_of(self, each: Found) -> Iterator[Found]:
        """The instance itself, or each of its ranks."""
        ranks = (each.config or self.config).data_parallel_ranks
        if ranks == 1:
            yield each
            return
        for rank in range(ranks):
            yield each._replace(key=f"{each.key}.dp{rank}", rank=rank)

    async def _follow(self) -> None:
        loop, backoff = asyncio.get_running_loop(), Backoff()
        while True:
            began_s, retry_after_s = loop.time(), 0.0
            try:
                await self._source.follow(self.tell)
            except SourceError as error:
                self.problem, retry_after_s = str(error), error.retry_after_s
                _log.warning("source %s: %s; the instances it listed stay", self.config.name, error)
            except Exception as error:
                # The boundary of a background loop.
                self.problem = repr(error)
                _log.exception("source %s failed", self.config.name)
            if loop.time() - began_s > LONGEST_PAUSE_S:
                backoff.reset()
            await backoff.pause(retry_after_s)

    async def _apply_all(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            found, self._wanted = self._wanted, None
            if found is not None:
                try:
                    await self._apply(found)
                except Exception:
                    _log.exception("source %s: its instances cannot be added", self.config.name)

    async def _apply(self, found: list[Found]) -> None:
        roster = self._roster
        wanted = {each.key: each for each in found}
        for number, (key, instance) in enumerate(list(self.named.items())):
            if number % _LOOKED_AT == _LOOKED_AT - 1:
                await asyncio.sleep(0)
            each = wanted.get(key)
            if roster.fleet.instances.get(instance.id) is not instance:
                del self.named[key]  # it was removed over /admin
            elif each is None or self._config_of(each, instance.id) != instance.config:
                self._leave(key)
                await asyncio.sleep(0)
        fresh = [each for each in found if each.key not in self.named]
        kept = self._recall(fresh)
        fresh = [each for each in fresh if each.key not in kept]
        if not fresh:
            return
        names = self._free_ids(fresh)
        built = await asyncio.to_thread(self._build, list(zip(fresh, names, strict=True)))
        for each, instance in built:
            if instance.id not in roster.fleet.instances:
                roster.admit(instance)
                self.named[each.key] = instance
                await asyncio.sleep(0)
        _log.info("source %s: %d instances, %d new", self.config.name, len(self.named), len(built))

    def _leave(self, key: str) -> None:
        instance = self.named.pop(key)
        self._roster.retire(instance.id)

    def leave_all(self) -> None:
        """Stop following the source."""
        for key in list(self.named):
            if self._roster.fleet.instances.get(self.named[key].id) is self.named[key]:
                self._leave(key)

    def _recall(self, fresh: list[Found]) -> set[str]:
        """Keep retiring instances that are listed again at the same address."""
        leaving = {
            (instance.config.base_url, instance.config.data_parallel_rank): instance
            for instance in self._roster.fleet.instances.values()
            if instance.leaving and instance.source == self.config.name
        }
        kept = set()
        for each in fresh:
            instance = leaving.get((each.base_url, each.rank))
            if instance is not None and instance.config == self._config_of(each, instance.id):
                self._roster.recall(instance)
                instance.source_key = each.key
                self.named[each.key] = instance
                kept.add(each.key)
        return kept

    def _free_ids(self, fresh: list[Found]) -> list[str]:
        """Unused ids, including those of retiring instances."""
        taken = set(map(str, self._roster.fleet.instances))
        names = []
        for each in fresh:
            base = re.sub(r"[^A-Za-z0-9._-]+", "-", each.key).lstrip("._-") or "instance"
            if self.config.kind == "dns":
                base = f"{self.config.name}-{base}"
            mark = "" if each.rank is None else f".dp{each.rank}"
            base = base.removesuffix(mark)[: _LONGEST_ID - 5 - len(mark)] + mark
            name, number = base, 2
            while name in taken:
                name, number = f"{base}.{number}", number + 1
            taken.add(name)
            names.append(name)
        return names

    def _config_of(self, each: Found, name: str) -> InstanceConfig:
        if each.config is not None:
            place = each.config if each.rank is None else each.config.places()[each.rank]
            return place.model_copy(update={"id": name})
        config = self.config
        rule = self._rule(each, frozenset())
        profile = config.profile if rule is None else config.profiles[rule].profile
        fields = {field: getattr(config, field) for field in _OF_INSTANCES}
        if each.rank is not None:
            fields["data_parallel_rank"] = each.rank
        return InstanceConfig(id=name, base_url=each.base_url, profile=profile, **fields)

    def _rule(self, each: Found, models: frozenset[str]) -> int | None:
        """The first matching rule, by its position."""
        for number, rule in enumerate(self.config.profiles):
            if rule.labels.items() <= each.labels.items() and (
                rule.model is None or rule.model in models
            ):
                return number
        return None

    def _build(self, wanted: list[tuple[Found, str]]) -> list[tuple[Found, Instance]]:
        """Build instances, in a thread."""
        built = []
        for each, name in wanted:
            try:
                instance = self._roster.fleet.build(self._config_of(each, name))
            except (ConfigError, ValueError) as error:
                _log.error("source %s: %s cannot be used: %s", self.config.name, each.key, error)
                continue
            instance.source, instance.source_key = self.config.name, each.key
            if any(rule.model is not None for rule in self.config.profiles):
                instance.on_models = self._profiler(each)
            built.append((each, instance))
        return built

    def _profiler(self, each: Found) -> Callable[[Instance], None]:
        """Gives an instance the profile that fits its engine's reported models."""

        def choose(instance: Instance) -> None:
            rule = self._rule(each, instance.models)
            profile: Profile | None = None if rule is None else self._profiles[rule]
            if profile is not None and profile != instance.profile:
                instance.profile, instance.calibrated = profile, None
                _log.info("instance %s: profile %s", instance.id, profile.name)

        return choose


class Discovery:
    """All sources of a gateway. ``start`` needs a running event loop."""

    def __init__(self, roster: Roster, settings: Settings, base_dir: Path) -> None:
        self._roster = roster
        self._settings = settings
        self._base_dir = base_dir
        self._tasks: asyncio.TaskGroup | None = None
        self._running: dict[str, tuple[SourceFollower, asyncio.Task[None]]] = {}
        self._first = self._followers(settings.config.discovery)

    def followers(self) -> list[SourceFollower]:
        return [follower for follower, _ in self._running.values()]

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Follow all configured sources, and changes of the configuration."""
        self._tasks = tasks
        self._settings.add(("discovery",), self._prepare)
        for follower in self._first:
            follower.named = self._named_by(follower.config.name)
            self._begin(follower)

    def stop(self) -> None:
        for _, task in self._running.values():
            task.cancel()

    def _followers(self, sources: list[SourceConfig]) -> list[SourceFollower]:
        return [SourceFollower(self._roster, config, self._base_dir) for config in sources]

    def _named_by(self, name: str) -> dict[str, Instance]:
        """The instances a source has listed before, in this process or the previous one."""
        instances = self._roster.fleet.instances.values()
        return {i.source_key: i for i in instances if i.source == name and not i.leaving}

    def _begin(self, follower: SourceFollower) -> None:
        assert self._tasks is not None
        self._running[follower.config.name] = follower, self._tasks.create_task(follower.run())

    def _prepare(self, fresh: GatewayConfig) -> Prepared:
        known = {name: follower.config for name, (follower, _) in self._running.items()}
        begun = self._followers([s for s in fresh.discovery if known.get(s.name) != s])
        names = {source.name for source in fresh.discovery}

        def apply() -> None:
            new = {follower.config.name: follower for follower in begun}
            for name, (follower, task) in list(self._running.items()):
                if name in names and name not in new:
                    continue
                task.cancel()
                del self._running[name]
                if name not in new:
                    follower.leave_all()
            for name, follower in new.items():
                # Its earlier instances stay until it reports otherwise.
                follower.named = self._named_by(name)
                self._begin(follower)

        return Prepared(apply)


def _source_of(config: SourceConfig, base_dir: Path) -> Source:
    """Raises ConfigError."""
    # Each with its own imports, as Kubernetes' httpx: 1.5 MB.
    if config.kind == "file":
        from hetero_gateway.gateway.fleet.sources.file import FileSource

        return FileSource(config, base_dir)
    if config.kind == "dns":
        from hetero_gateway.gateway.fleet.sources.dns import DnsSource

        return DnsSource(config)
    from hetero_gateway.gateway.fleet.sources.kubernetes import KubernetesSource

    return KubernetesSource(config)
