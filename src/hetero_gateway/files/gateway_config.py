"""The gateway's configuration: the whole of its schema, and its loader.

Its larger sections have modules of their own (``server_config``, ``scheduler_config``,
``instance_config``, ...). The file is read by ``yaml_file``, which expands ``${NAME}`` and reports
errors in one line; the environment is read there and in ``secrets`` alone. Precedence: flags over
environment over file. docs/reference/configuration.md lists every field; a test compares the two.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from hetero_gateway.files.batches_config import BatchesConfig
from hetero_gateway.files.client_keys import ClientsConfig, read_clients
from hetero_gateway.files.config_changes import fields_of
from hetero_gateway.files.discovery_config import SourceConfig
from hetero_gateway.files.following_config import FollowingConfig, followed_profiles
from hetero_gateway.files.instance_config import InstanceConfig, ModelConfig, check_reachable
from hetero_gateway.files.length_model_file import read_length_model
from hetero_gateway.files.log_config import LogConfig, MetricsConfig, TracesConfig
from hetero_gateway.files.model_names import ModelName
from hetero_gateway.files.own_address import check_not_own
from hetero_gateway.files.pairs_file import read_pairs
from hetero_gateway.files.prerequisites import report_missing
from hetero_gateway.files.problems import Key, Misfits, Problems
from hetero_gateway.files.scheduler_config import SchedulerConfig
from hetero_gateway.files.secrets import password, secret
from hetero_gateway.files.server_config import (
    PoolConfig,
    ServerConfig,
    TimeoutsConfig,
    check_certificate,
)
from hetero_gateway.files.yaml_file import StrictModel, parse_model, read_yaml

RANKS_ARE_OURS = (
    "a rank is either the client's, by server.allow_engine_headers, or, by instances' "
    "data_parallel_ranks, the gateway's"
)


class RetryConfig(StrictModel):
    """Retries after an attempt failed before the first response byte."""

    max_attempts: int = Field(3, ge=1, le=16)
    """Attempts per request, each on another instance; a refused connection does not count."""
    budget_ratio: float = Field(0.2, ge=0, le=1)
    """Retries allowed as a share of recent requests."""
    budget_min: int = Field(10, ge=0)
    """Retries always allowed in each window of 10 s."""


class EjectionConfig(StrictModel):
    """When an instance with failing requests gets none for a while; docs/design/reliability.md."""

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
    """Timeout of one probe."""
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
    """CA certificates (PEM): clients of the port must show one of theirs; none: anybody who reaches
        the port may ask."""
    resolve_interval_s: float = Field(5.0, gt=0, le=3600)
    """Between two look-ups of an instance's host name."""
    extend_timeouts: bool = True
    """Ask Envoy for more time (override_message_timeout) while a request waits."""
    prefill_header: Literal["x-prefiller-host-port"] | None = None
    """For split requests (`scheduler.split_requests`): the header that says who computes the
        prompt, for llm-d's sidecar next to each instance; none: the picker splits no request."""
    drain_s: float = Field(3.0, ge=0, le=600)
    """From turning unready on SIGTERM to taking no more streams."""

    _certified = model_validator(mode="after")(check_certificate)


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
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    traces: TracesConfig = Field(default_factory=TracesConfig)
    discovery: list[SourceConfig] = Field(default_factory=list)
    """Sources of instances besides this file."""
    clients: ClientsConfig = Field(default_factory=ClientsConfig)
    following: FollowingConfig = Field(default_factory=FollowingConfig)
    batches: BatchesConfig = Field(default_factory=BatchesConfig)
    models: dict[ModelName, ModelConfig] = Field(default_factory=dict, max_length=1024)
    """Aliases, splits, fallbacks, by name."""
    instances: list[InstanceConfig] = Field(default_factory=list)
    """The instances; more can be added over /admin/instances."""

    @property
    def places(self) -> list[InstanceConfig]:
        """The units that the scheduler places requests on: the instances, or each of their
        ranks."""
        return [place for instance in self.instances for place in instance.places()]

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        stands_for_others = {name for name, each in self.models.items() if each.serve or each.split}
        for name, each in self.models.items():
            here = [f.model for f in each.fallbacks if f.base_url is None]
            for other in (*filter(None, [each.serve]), *each.split, *here):
                if other in stands_for_others and not (other == name and other in each.split):
                    raise ValueError(f"models.{name}: {other!r} is itself an alias")
            if each.serve is None and not each.split and name in here:
                raise ValueError(f"models.{name}: it cannot be its own fallback")
            for fallback in each.fallbacks:
                if fallback.base_url is not None and not self.server.link_local_instances:
                    check_reachable(fallback.base_url)
        return self

    @model_validator(mode="after")
    def _check_priorities(self) -> Self:
        allowed = {*self.server.allow_engine_fields, *self.server.allow_engine_headers}
        if self.scheduler.engine_priorities and allowed & {"priority", "x-vllm-priority"}:
            why = (
                "a priority is either its class's or, by server.allow_engine_fields and "
                "allow_engine_headers, the client's"
            )
            raise Misfits([(("scheduler", "engine_priorities"), why)])
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        asked = any(place.data_parallel_rank is not None for place in self.places)
        if asked and self.server.lets_clients_choose_ranks:
            raise Misfits([(("server", "allow_engine_headers"), RANKS_ARE_OURS)])
        return self

    @model_validator(mode="after")
    def _check_batches(self) -> Self:
        if self.batches.on and self.scheduler.policy != "finish-time":
            why = "batches follow what finish-time knows; with another policy there are none"
            key = "database" if self.batches.directory is None else "directory"
            raise Misfits([(("batches", key), why)])
        return self

    @model_validator(mode="after")
    def _check_transfers(self) -> Self:
        transfers = [each.kv_transfer for each in self.instances]
        transfers += [each.kv_transfer for each in self.discovery]
        fields = {"kv_transfer_params", "vllm_xargs"}
        for name in fields.intersection(self.server.allow_engine_fields):
            if any(transfers):
                why = (
                    f"{name} is either the client's or, by instances' kv_transfer, the gateway's: "
                    "a client's may read other clients' caches and end an engine"
                )
                raise Misfits([(("server", "allow_engine_fields"), why)])
        return self

    @model_validator(mode="after")
    def _check_ids(self) -> Self:
        found: list[tuple[Key, str]] = []
        seen: set[str] = set()
        for i, instance in enumerate(self.instances):
            for place in instance.places():
                if place.id in seen:
                    found.append((("instances", i, "id"), f"{place.id!r} is used twice"))
                seen.add(place.id)
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
    """Read and check a gateway configuration, with everything it names: profiles, keys, packages.

    Raises:
        ConfigError: one line with the file and the key.
    """
    data = read_yaml(path, overrides)
    config = parse_model(GatewayConfig, data, str(path))
    problems, base_dir = Problems(str(path), data), path.parent
    report_missing(config, base_dir, problems)
    with problems.at(("following",)):
        followed_profiles(config.following, base_dir)
    with problems.at(("clients",)):
        read_clients(config.clients, base_dir)
    if (file := config.scheduler.predictor.file) is not None:
        with problems.at(("scheduler", "predictor", "file")):
            read_length_model(base_dir / file)
    if (file := config.scheduler.pairs_file) is not None:
        with problems.at(("scheduler", "pairs_file")):
            read_pairs(base_dir / file)
    for key, value in fields_of(config):
        if str(key[-1]).endswith("_key_env"):
            with problems.at(key, ": "):
                secret(value, "")
        elif key[-1] == "password_env":
            with problems.at(key, ": "):
                password(value, "")
        elif key[-1] == "base_url" and value is not None:
            with problems.at(key, "base_url: "):
                check_not_own(value, config.server)
    problems.raise_any()
    return config


def has_gateway_keys(data: Mapping[str, Any]) -> bool:
    """Whether a file has a section that only a gateway's has."""
    return bool(set(data) & set(GatewayConfig.model_fields) - {"instances"})
