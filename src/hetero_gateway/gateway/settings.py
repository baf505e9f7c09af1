"""What of a configuration can change while serving, and how: all of it, or nothing.

A part of the gateway that uses settings says which, and how it takes them up, in two steps:

    prepare   everything that may fail (a file, a key, a name), in a thread; changes nothing
    apply     what cannot fail, on the event loop, and soon done

A configuration is taken up once every part has prepared it. What no part takes up needs a restart:
the running configuration keeps it as it was, so that each later look says so again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from hetero_gateway.files.config_changes import covers, differences, with_fields_of
from hetero_gateway.files.gateway_config import GatewayConfig


class Prepared(NamedTuple):
    """What a part is ready to do.

    Args:
        apply: does it.
        changed: what changes that is no field of the configuration: files that a field names.
    """

    apply: Callable[[], None]
    changed: Sequence[str] = ()


# Called in a thread, with the configuration as it is to be. None: there is nothing to do. Raises
# ConfigError: it cannot be taken up.
Prepare: TypeAlias = Callable[[GatewayConfig], Prepared | None]


class SettingsChange(NamedTuple):
    """A configuration that can be taken up.

    Args:
        config: as it will be in effect.
        settings: names of what changes.
        needs_restart: names of what differs and does not.
    """

    config: GatewayConfig
    settings: list[str]
    needs_restart: list[str]
    steps: list[Callable[[], None]]


class Settings:
    """The configuration in effect, and the parts that take up another one."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        # Each names files, relative to the configuration's, whose change is a reason to reload.
        self.files: list[Callable[[GatewayConfig], Iterable[Path]]] = []
        self._fields: set[str] = set()
        self._parts: list[tuple[tuple[str, ...], bool, Prepare]] = []

    def add(self, fields: Sequence[str], prepare: Prepare, *, always: bool = False) -> None:
        """A part that takes up these fields, or sections of fields (dotted names).

        ``always``: ask it also when none of them differs: files that it reads may.
        """
        self._fields.update(fields)
        self._parts.append((tuple(fields), always, prepare))

    def prepare(self, fresh: GatewayConfig) -> SettingsChange:
        """Make ready for another configuration. May take a while, and touches nothing that runs.

        Raises:
            ConfigError: a part cannot take it up.
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
        """Take it up."""
        self.config = change.config
        for step in change.steps:
            step()
