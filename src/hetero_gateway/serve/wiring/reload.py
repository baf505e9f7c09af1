"""Reading the configuration again while serving: SIGHUP, a watched file, and /admin/reload.

One path for all three. The file is read whole, checked whole, and everything that may fail is
prepared, in a thread; only then the changes are made, on the event loop, yielding to the streams in
between. An unusable file changes nothing: log and metrics report it, and the configuration in
effect stays. One reload at a time; a request in the meantime gets the next one.

Nothing here touches an open request. Command-line settings override the file, as at the start.
"""

import asyncio
import contextlib
import functools
import gc
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.types import InstanceId
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import GatewayConfig, load_gateway_config
from hetero_gateway.files.instance_config import InstanceConfig
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.gateway.fleet.instances import FILE, Instance
from hetero_gateway.gateway.fleet.roster import Roster
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.gateway.settings import Settings, SettingsChange

# How a changed file is recognised: its time, size and inode.
_Mark: TypeAlias = tuple[int, int, int]
_Marks: TypeAlias = list[_Mark | None]

_log = logging.getLogger(__name__)


class Moves(NamedTuple):
    """What happens to the instances that the file names, and named."""

    removed: list[InstanceId]
    kept: list[tuple[InstanceConfig, Profile | None]]  # unchanged except for these
    replaced: list[Instance]
    added: list[Instance]


@dataclass(eq=False)
class Reloader:
    """Reloads a gateway's configuration.

    Args:
        _roster: of the instances.
        _settings: the configuration in effect, and the parts that apply another one.
        _metrics: counts reloads.
        _take_up: applies another configuration, except its instances.
        _path: the file; None: there is none, and ``reload`` raises ConfigError.
        flags: dotted names of fields that the command line has set, and their values.
    """

    _roster: Roster
    _settings: Settings
    _metrics: Metrics
    _take_up: Callable[[SettingsChange], None]
    _path: Path | None
    flags: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.flags = {name: value for name, value in self.flags.items() if value is not None}
        self._base_dir = Path() if self._path is None else self._path.parent
        self._lock = asyncio.Lock()
        self._tasks: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._waiting = False  # a reload was requested and has not started

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Watch the file, if configured, until ``stop``."""
        self._tasks = tasks
        # The interval is read again at each look at the file.
        self._settings.add(("server.watch_files_s",), lambda _: None)
        if self._path is not None:
            self._keep(tasks.create_task(self._watch()))

    def stop(self) -> None:
        self._tasks = None
        for task in self._running:
            task.cancel()

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def soon(self, cause: str) -> None:
        """Reload as soon as possible; many calls at once are one."""
        if self._tasks is not None and not self._waiting:
            self._waiting = True
            self._keep(self._tasks.create_task(self._reload_and_tell(cause)))

    async def _reload_and_tell(self, cause: str) -> None:
        try:
            async with self._lock:
                self._waiting = False
                await self._reload(cause)
        except ConfigError:
            pass  # it was logged
        except Exception:
            _log.exception("%s: the configuration cannot be reloaded", cause)

    async def reload(self, cause: str) -> dict[str, Any]:
        """Read the file again and apply it; returns the changes.

        Raises:
            ConfigError: it is unusable, and nothing was changed.
        """
        async with self._lock:
            return await self._reload(cause)

    async def _reload(self, cause: str) -> dict[str, Any]:
        metrics = self._metrics
        if self._path is None:
            raise ConfigError("the gateway was not started from a file")
        try:
            with _without_collector():
                fresh = await asyncio.to_thread(load_gateway_config, self._path, self.flags)
                present = dict(self._roster.fleet.instances)
                change, moves = await asyncio.to_thread(self._prepare, fresh, present)
        except ConfigError as error:
            metrics.reloads["refused"] += 1
            metrics.reloaded = (False, *metrics.reloaded[1:])
            _log.error("%s: the configuration is rejected, and the old one stays: %s", cause, error)
            raise
        self._take_up(change)
        await self._move(moves)
        told: dict[str, list[str]] = {
            "added": [instance.id for instance in moves.added],
            "removed": list(moves.removed),
            "changed": [c.id for c, _ in moves.kept] + [i.id for i in moves.replaced],
            "settings": change.settings,
            "needs_restart": change.needs_restart,
            "flags": sorted(self.flags),
        }
        differs = any(told[name] for name in ("added", "removed", "changed", "settings"))
        metrics.reloads["applied" if differs else "unchanged"] += 1
        metrics.reloaded = (True, time.time(), len(change.needs_restart))
        shown = [f"{name}: {', '.join(v)}" for name, v in told.items() if v and name != "flags"]
        _log.info("%s: the configuration was reloaded: %s", cause, "; ".join(shown) or "no change")
        return told

    # In a thread

    def _prepare(
        self, fresh: GatewayConfig, present: dict[InstanceId, Instance]
    ) -> tuple[SettingsChange, Moves]:
        """Raises ConfigError."""
        change, fleet = self._settings.prepare(fresh), self._roster.fleet
        wanted = {InstanceId(i.id): i for i in fresh.places}
        moves = Moves([], [], [], [])
        for instance_id, instance in present.items():
            if instance_id not in wanted and instance.source == FILE and not instance.leaving:
                moves.removed.append(instance_id)
        read = functools.cache(functools.partial(load_profile, base_dir=self._base_dir))
        for instance_id, config in wanted.items():
            known = present.get(instance_id)
            if known is None:
                moves.added.append(fleet.build(config, change.config))
                continue
            if known.source != FILE and not known.leaving and known.config != config:
                raise ConfigError(
                    f"{self._path}: instances: the id {config.id!r} is that of another instance, "
                    f"which came by {known.source}"
                )
            if not fleet.can_adjust(known, config):
                moves.replaced.append(fleet.build(config, change.config))
                continue
            profile = None if config.profile is None else read(config.profile)
            stands = known.source == FILE and not known.leaving
            if known.config != config or profile != known.profile or not stands:
                moves.kept.append((config, profile))
        return change, moves

    # On the event loop

    async def _move(self, moves: Moves) -> None:
        """Nothing in the file can make this fail. One instance at a time, yielding to the
        others."""
        roster = self._roster
        fleet = roster.fleet
        for config, profile in moves.kept:
            if (instance := fleet.instances.get(InstanceId(config.id))) is not None:
                instance.source = FILE
                instance.adjust(config, profile)
                if instance.leaving:
                    roster.recall(instance)
                fleet.publish(instance)
            await asyncio.sleep(0)
        for instance in (*moves.replaced, *moves.added):
            if instance.id in fleet.instances:
                roster.remove(instance.id)
            roster.admit(instance)
            await asyncio.sleep(0)
        if moves.removed and moves.added:
            # There must be no time at which the old ones are gone and the new ones not known.
            await roster.health.probed([instance.id for instance in moves.added])
        for instance_id in moves.removed:
            if instance_id in fleet.instances:
                roster.retire(instance_id)
            await asyncio.sleep(0)

    # Watching

    async def _watch(self) -> None:
        """Reload when a file has changed, but not since the last look: writing has ended."""
        taken_up: _Marks | None = None
        seen: _Marks | None = None
        while True:
            every_s = self._settings.config.server.watch_files_s
            await asyncio.sleep(every_s or _IDLE_LOOK_S)
            if every_s is None:
                taken_up = seen = None
                continue
            marks = await asyncio.to_thread(self._marks)
            if taken_up is None:  # not looked at yet
                taken_up = marks
            if marks != taken_up and marks == seen:
                taken_up = marks
                await self._reload_and_tell("a file has changed")
            seen = marks

    def _marks(self) -> _Marks:
        return [_mark(path) for path in self._files()]

    def _files(self) -> Iterable[Path]:
        assert self._path is not None
        base = self._base_dir
        names = {
            i.profile
            for i in self._settings.config.instances
            if i.profile is not None and i.profile.endswith((".yaml", ".yml"))
        }
        yield self._path
        yield from (base / name for name in sorted(names))
        for files in self._settings.files:
            yield from (base / path for path in files(self._settings.config))


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Without garbage collection: reading ten thousand keys makes a million objects, none of
    them garbage, and each pass over them would delay every stream for 200 ms.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


# Interval for noticing that a file is to be watched, while none is.
_IDLE_LOOK_S = 2.0


def _mark(path: Path) -> _Mark | None:
    """How a changed file is recognised; links are followed. None: it cannot be read."""
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_size, seen.st_ino
