"""Changes of the configuration while serving: all of them, or none.

A part of the gateway registers the settings that it uses, and applies a change in two steps:

    prepare   everything that may fail (a file, a key, a name), in a thread; changes nothing
    apply     what cannot fail, on the event loop, and quickly

A configuration is applied once every part has prepared it. Settings that no part has registered
need a restart: the running configuration keeps their old values, so that each later check reports
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from hetero_gateway.files.config_changes import covers, differences, with_fields_of
from hetero_gateway.files.gateway_config import GatewayConfig


class Prepared(NamedTuple):
    """A prepared change of a part.

    Args:
        apply: applies it.
        changed: changes that are not fields of the configuration: of files that a field names.
    """

    apply: Callable[[], None]
    changed: Sequence[str] = ()


# Called in a thread, with the future configuration. None: nothing to do. Raises ConfigError: it
# cannot be applied.
Prepare: TypeAlias = Callable[[GatewayConfig], Prepared | None]


class SettingsChange(NamedTuple):
    """A configuration that can be applied.

    Args:
        config: as it will be in effect.
        settings: names of what changes.
        needs_restart: names of what differs but does not change.
    """

    config: GatewayConfig
    settings: list[str]
    needs_restart: list[str]
    steps: list[Callable[[], None]]


class Settings:
    """The configuration in effect, and the parts that apply another one."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        # Each names files, relative to the configuration's, whose change is a reason to reload.
        self.files: list[Callable[[GatewayConfig], Iterable[Path]]] = []
        self._fields: set[str] = set()
        self._parts: list[tuple[tuple[str, ...], bool, Prepare]] = []

    def add(self, fields: Sequence[str], prepare: Prepare, *, always: bool = False) -> None:
        """Register a part for these fields, or sections of fields (dotted names).

        ``always``: ask it even if none of them differs: files that it reads may.
        """
        self._fields.update(fields)
        self._parts.append((tuple(fields), always, prepare))

    def prepare(self, fresh: GatewayConfig) -> SettingsChange:
        """Prepare another configuration. May take a while, and changes nothing.

        Raises:
            ConfigError: a part cannot apply it.
        """
        names = [name for name in differences(self.config, fresh) if name != "instances"]
        settings = [name for name in names if covers(self._fields, name)]
        config = with_fields_of(self.config, fresh, [*settings, "instances"])
        steps = []
        for fields, always, prepare in self._parts:
            if not always and not any(covers(fields, name) for name in settings):
                continue
            if (prepared := prepare(config)) is not None:
                steps.append(prepared.apply)
                settings += prepared.changed
        return SettingsChange(
            config, settings, [name for name in names if name not in settings], steps
        )

    def apply(self, change: SettingsChange) -> None:
        """Apply it."""
        self.config = change.config
        for step in change.steps:
            step()
