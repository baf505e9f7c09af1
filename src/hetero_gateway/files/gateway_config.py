"""The gateway's configuration: the whole of its schema, and its loader.

Its larger sections have modules of their own (``server_config``, ``scheduler_config``,
``instance_config``, ...). The file is read by ``yaml_file``, which expands ``${NAME}`` and reports
errors in one line; the environment is read there and in ``secrets`` alone. Precedence: flags over
environment over file.
docs/reference/configuration.md lists every field; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.client_keys import ClientsConfig, read_clients
from hetero_gateway.files.discovery_config import SourceConfig
from hetero_gateway.files.following_config import FollowingConfig, followed_profiles
from hetero_gateway.files.instance_config import InstanceConfig, ModelConfig, check_reachable
from hetero_gateway.files.length_model_file import read_length_model
from hetero_gateway.files.log_config import LogConfig, TracesConfig
from hetero_gateway.files.model_names import ModelName
from hetero_gateway.files.own_address import check_not_own
from hetero_gateway.files.prerequisites import missing_prerequisites
from hetero_gateway.files.problems import Key, Misfits, Problems
from hetero_gateway.files.scheduler_config import SchedulerConfig
from hetero_gateway.files.secrets import password, secret
from hetero_gateway.files.server_config import PoolConfig, ServerConfig, TimeoutsConfig
from hetero_gateway.files.yaml_file import StrictModel, parse_model, read_yaml


class RetryConfig(StrictModel):
    """What happens when an attempt fails before the first response byte."""

    max_attempts: int = Field(3, ge=1, le=16)
    """Attempts per request, each on another instance."""
    budget_ratio: float = Field(0.2, ge=0, le=1)
    """Retries allowed as a share of recent requests."""
    budget_min: int = Field(10, ge=0)
    """Retries always allowed in each window of 10 s."""


class EjectionConfig(StrictModel):
    """When an instance whose requests fail gets none for a while; docs/design/reliability.md."""

    enabled: bool = True
    """Whether failed requests count against instances."""
    consecutive_failures: int = Field(5, ge=1, le=10_000)
    """This many consecutive failures eject an instance."""
    failure_ratio: float = Field(0.5, gt=0, le=1)
    """Or this share of its requests failing within 10 s,"""
    min_outcomes: int = Field(10, ge=1, le=10_000)
    """once there were this many."""
    base_s: float = Field(2.0, gt=0, le=3600)
    """The first ejection's length; each in succession doubles it."""
    max_s: float = Field(60.0, gt=0, le=86400)
    """The longest ejection."""


class HealthConfig(StrictModel):
    """Active probes and scrapes of the instances."""

    probe_interval_s: float = Field(2.0, gt=0)
    """Between two GET /health."""
    probe_timeout_s: float = Field(2.0, gt=0)
    """Time-out of one probe."""
    unhealthy_after: int = Field(2, ge=1)
    """Consecutive failed probes that mark it down."""
    scrape_interval_s: float = Field(5.0, gt=0)
    """Between two reads of the engine's /metrics and /v1/models."""
    ejection: EjectionConfig = Field(default_factory=EjectionConfig)


class PickerConfig(StrictModel):
    """``hetero-gateway picker``: where Envoy asks for an instance; ``serve`` ignores it."""

    host: str = "127.0.0.1"
    """Address of ext_proc; loopback unless changed."""
    port: int = Field(9002, ge=0, le=65535)
    """Port of ext_proc; 0 takes a free one."""
    health_port: int | None = Field(None, ge=1, le=65535)
    """One more port that answers gRPC health checks only."""
    certificate_file: Path | None = None
    """Certificate chain (PEM) of ext_proc; none: without TLS."""
    key_file: Path | None = None
    """The certificate's private key (PEM)."""
    client_ca_file: Path | None = None
    """CA certificates (PEM): whoever asks must show one of theirs; none: anybody who reaches the
    port may ask."""
    resolve_interval_s: float = Field(5.0, gt=0, le=3600)
    """Between two look-ups of an instance's host name."""
    extend_timeouts: bool = True
    """Ask Envoy for more time (override_message_timeout) while a request waits."""
    drain_s: float = Field(3.0, ge=0, le=600)
    """From turning unready on SIGTERM to taking no more streams."""

    @model_validator(mode="after")
    def _check_pair(self) -> PickerConfig:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file: one needs the other")
        if self.client_ca_file is not None and self.certificate_file is None:
            raise ValueError("client_ca_file: needs certificate_file")
        return self


class GatewayConfig(StrictModel):
    """The whole file."""

    server: ServerConfig = Field(default_factory=ServerConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    timeouts: TimeoutsConfig = Field(default_factory=TimeoutsConfig)
    retry: RetryConfig = Field(default_factory=RetryConfig)
    pool: PoolConfig = Field(default_factory=PoolConfig)
    health: HealthConfig = Field(default_factory=HealthConfig)
    picker: PickerConfig = Field(default_factory=PickerConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    traces: TracesConfig = Field(default_factory=TracesConfig)
    discovery: list[SourceConfig] = Field(default_factory=list)
    """Sources of instances besides this file."""
    clients: ClientsConfig = Field(default_factory=ClientsConfig)
    following: FollowingConfig = Field(default_factory=FollowingConfig)
    models: dict[ModelName, ModelConfig] = Field(default_factory=dict, max_length=1024)
    """Aliases, splits, fallbacks, by name."""
    instances: list[InstanceConfig] = Field(default_factory=list)
    """The instances; more can be added over /admin/instances."""

    @model_validator(mode="after")
    def _check_models(self) -> GatewayConfig:
        stands_for_others = {name for name, each in self.models.items() if each.serve or each.split}
        for name, each in self.models.items():
            here = [f.model for f in each.fallbacks if f.base_url is None]
            for other in (*filter(None, [each.serve]), *each.split, *here):
                if other in stands_for_others and not (other == name and other in each.split):
                    raise ValueError(f"models.{name}: {other!r} stands for another one itself")
            if each.serve is None and not each.split and name in here:
                raise ValueError(f"models.{name}: it cannot be its own fallback")
            for fallback in each.fallbacks:
                if fallback.base_url is not None and not self.server.link_local_instances:
                    check_reachable(fallback.base_url)
        return self

    @model_validator(mode="after")
    def _check_priorities(self) -> GatewayConfig:
        allowed = {*self.server.allow_engine_fields, *self.server.allow_engine_headers}
        if self.scheduler.engine_priorities and allowed & {"priority", "x-vllm-priority"}:
            raise Misfits(
                [
                    (
                        ("scheduler", "engine_priorities"),
                        "a priority is either its class's or, by server.allow_engine_fields and "
                        "allow_engine_headers, the client's",
                    )
                ]
            )
        return self

    @model_validator(mode="after")
    def _check_ids(self) -> GatewayConfig:
        found: list[tuple[Key, str]] = []
        seen: set[str] = set()
        for i, instance in enumerate(self.instances):
            if instance.id in seen:
                found.append((("instances", i, "id"), f"{instance.id!r} is used twice"))
            seen.add(instance.id)
            if not self.server.link_local_instances:
                try:
                    check_reachable(instance.base_url)
                except ValueError as error:
                    text = str(error).removeprefix("base_url: ")
                    found.append((("instances", i, "base_url"), text))
        names: set[str] = {"file", "admin"}
        for i, source in enumerate(self.discovery):
            if source.name in names:
                found.append((("discovery", i, "name"), f"{source.name!r} is used twice, or taken"))
            names.add(source.name)
        single = self.scheduler.single_instance
        if single is not None and single not in seen:
            found.append((("scheduler", "single_instance"), f"no instance has the id {single!r}"))
        if found:
            raise Misfits(found)
        return self


def load_gateway_config(path: Path, overrides: Mapping[str, Any] | None = None) -> GatewayConfig:
    """Read and check a gateway configuration, with all that it names: profiles, keys, packages.

    Args:
        path: the YAML file.
        overrides: dotted keys from the command line, e.g. ``{"server.port": 9000}``; None values
            are ignored.

    Raises:
        ConfigError: one line with the file and the key.
    """
    data = read_yaml(path)
    for dotted, value in (overrides or {}).items():
        if value is not None:
            _set_dotted(data, dotted, value)
    config = parse_model(GatewayConfig, data, str(path))
    problems = Problems(str(path), data)
    for key, text in missing_prerequisites(config, path.parent):
        problems.add(key, text)
    try:
        followed_profiles(config.following, path.parent)
    except ConfigError as error:
        problems.add(("following",), str(error))
    try:
        read_clients(config.clients, path.parent)
    except ConfigError as error:
        problems.add(("clients",), str(error))
    if (file := config.scheduler.predictor.file) is not None:
        try:
            read_length_model(path.parent / file)
        except ConfigError as error:
            problems.add(("scheduler", "predictor", "file"), str(error))
    for key, variable, read in _named_secrets(config):
        try:
            read(variable, "")
        except ConfigError as error:
            problems.add(key, str(error).removeprefix(": "))
    for key, base_url in _base_urls(config):
        try:
            check_not_own(base_url, config.server)
        except ValueError as error:
            problems.add(key, str(error).removeprefix("base_url: "))
    problems.raise_any()
    return config


def _base_urls(config: GatewayConfig) -> Iterator[tuple[Key, str]]:
    """Where requests are sent."""
    for i, instance in enumerate(config.instances):
        yield ("instances", i, "base_url"), instance.base_url
    for name, each in config.models.items():
        for i, fallback in enumerate(each.fallbacks):
            if fallback.base_url is not None:
                yield ("models", name, "fallbacks", i, "base_url"), fallback.base_url


def _named_secrets(
    config: GatewayConfig,
) -> Iterator[tuple[Key, str | None, Callable[[str | None, str], str | None]]]:
    """The variables of the environment that a configuration names: (key, name, how it is read)."""
    server, scheduler = config.server, config.scheduler
    yield ("server", "api_key_env"), server.api_key_env, secret
    yield ("server", "admin_key_env"), server.admin_key_env, secret
    yield ("clients", "hash_key_env"), config.clients.hash_key_env, secret
    yield ("scheduler", "prefix_key_env"), scheduler.prefix_key_env, secret
    yield ("scheduler", "sharing", "password_env"), scheduler.sharing.password_env, password
    for name, each in config.models.items():
        for i, fallback in enumerate(each.fallbacks):
            yield ("models", name, "fallbacks", i, "api_key_env"), fallback.api_key_env, secret
    for i, instance in enumerate(config.instances):
        yield ("instances", i, "api_key_env"), instance.api_key_env, secret
    for i, source in enumerate(config.discovery):
        yield ("discovery", i, "api_key_env"), source.api_key_env, secret


def has_gateway_keys(data: Mapping[str, Any]) -> bool:
    """Whether a file has a section that only a gateway's has."""
    return bool(set(data) & set(GatewayConfig.model_fields) - {"instances"})


def _set_dotted(data: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for name in parents:
        child = data.setdefault(name, {})
        if not isinstance(child, dict):
            return  # the schema will say what is wrong with it
        data = child
    data[last] = value
