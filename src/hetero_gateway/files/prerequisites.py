"""What a configuration needs besides itself: the files that it names, and optional packages.

``load_gateway_config`` checks both, so that ``validate``, ``serve`` and a reload report the same.
Whether a file holds what it should is checked by whoever uses it. The section ``picker`` is left
out, as ``serve`` ignores it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.discovery_config import SourceConfig
from hetero_gateway.files.instance_config import InstanceConfig, ModelConfig
from hetero_gateway.files.log_config import TracesConfig
from hetero_gateway.files.problems import Key
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.files.scheduler_config import SchedulerConfig
from hetero_gateway.files.server_config import ServerConfig


class Sections(Protocol):
    """The sections of a configuration that name a file or need a package."""

    @property
    def server(self) -> ServerConfig: ...
    @property
    def scheduler(self) -> SchedulerConfig: ...
    @property
    def traces(self) -> TracesConfig: ...
    @property
    def discovery(self) -> Sequence[SourceConfig]: ...
    @property
    def models(self) -> Mapping[str, ModelConfig]: ...
    @property
    def instances(self) -> Sequence[InstanceConfig]: ...


def missing_prerequisites(config: Sections, base_dir: Path) -> Iterator[tuple[Key, str]]:
    """What is not there: the key that asks for it, and one line.

    Args:
        config: the whole file.
        base_dir: its folder, to which the files that it names are relative.
    """
    for key, module, extra in _packages(config):
        if not _is_installed(module):
            yield key, f"needs the extra: pip install 'hetero-gateway[{extra}]'"
    for key, file in _files(config):
        if file is None:
            continue
        try:
            (base_dir / file).open("rb").close()
        except OSError as error:
            yield key, f"{file}: cannot be read: {error.strerror}"
    for key, profile in _profiles(config):
        try:
            load_profile(profile, base_dir)
        except ConfigError as error:
            yield key, str(error)


def _packages(config: Sections) -> Iterator[tuple[Key, str, str]]:
    """What is imported because of the configuration: (key, module, our extra that has it)."""
    scheduler = config.scheduler
    if config.traces.endpoint is not None:
        yield ("traces", "endpoint"), "opentelemetry.exporter.otlp.proto.http", "otel"
    if scheduler.tokens.tokenizer_file is not None:
        yield ("scheduler", "tokens", "tokenizer_file"), "tokenizers", "tokenizers"
    for i, source in enumerate(config.discovery):
        if source.kind == "dns":
            yield ("discovery", i, "kind"), "dns", "dns"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor is what it is in
        return False


def _files(config: Sections) -> Iterator[tuple[Key, Path | None]]:
    """The files that must be there when the gateway starts, but for profiles, keys and models."""
    server, scheduler = config.server, config.scheduler
    for name in ("certificate_file", "key_file", "client_ca_file"):
        yield ("server", name), getattr(server, name)
    yield ("scheduler", "tokens", "tokenizer_file"), scheduler.tokens.tokenizer_file
    yield ("scheduler", "sharing", "ca_file"), scheduler.sharing.ca_file
    for section in ("instances", "discovery"):
        for i, each in enumerate(getattr(config, section)):
            for name in ("ca_file", "certificate_file", "key_file"):
                yield (section, i, name), getattr(each, name)
    for model, routes in config.models.items():
        for i, fallback in enumerate(routes.fallbacks):
            yield ("models", model, "fallbacks", i, "ca_file"), fallback.ca_file


def _profiles(config: Sections) -> Iterator[tuple[Key, str]]:
    """The profiles that are named, of instances and of sources."""
    for i, instance in enumerate(config.instances):
        if instance.profile is not None:
            yield ("instances", i, "profile"), instance.profile
    for i, source in enumerate(config.discovery):
        if source.profile is not None:
            yield ("discovery", i, "profile"), source.profile
        for j, rule in enumerate(source.profiles):
            yield ("discovery", i, "profiles", j, "profile"), rule.profile
