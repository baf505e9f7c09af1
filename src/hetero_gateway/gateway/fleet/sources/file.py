"""A watched file: YAML with a list ``instances``, entries as in the configuration."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from pydantic import Field

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.discovery_config import SourceConfig
from hetero_gateway.files.instance_config import InstanceConfig
from hetero_gateway.files.yaml_file import StrictModel, parse_model, read_yaml
from hetero_gateway.gateway.fleet.sources.base import Found, SourceError, Tell


class _InstancesFile(StrictModel):
    instances: list[InstanceConfig] = Field(default_factory=list)


class FileSource:
    """Checks every ``interval_s`` whether the file has changed, and then reads it.

    Args:
        config: of the source.
        base_dir: what the file is relative to.
    """

    def __init__(self, config: SourceConfig, base_dir: Path) -> None:
        assert config.file is not None
        self._path = base_dir / config.file
        self._interval_s = config.interval_s

    async def follow(self, tell: Tell) -> None:
        read: tuple[int, int, int] | None = None
        while True:
            mark = await asyncio.to_thread(self._mark)
            if mark != read:
                tell(await asyncio.to_thread(self._read))
                read = mark
            await asyncio.sleep(self._interval_s)

    def _mark(self) -> tuple[int, int, int]:
        try:
            seen = os.stat(self._path)
        except OSError as error:
            raise SourceError(f"{self._path}: {error.strerror}") from error
        return seen.st_mtime_ns, seen.st_size, seen.st_ino

    def _read(self) -> list[Found]:
        try:
            entries = parse_model(_InstancesFile, read_yaml(self._path), str(self._path)).instances
        except ConfigError as error:
            raise SourceError(str(error)) from error
        if len({entry.id for entry in entries}) < len(entries):
            raise SourceError(f"{self._path}: an id is used twice")
        return [Found(entry.id, entry.base_url, {}, entry) for entry in entries]
