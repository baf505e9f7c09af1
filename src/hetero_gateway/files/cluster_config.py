"""The cluster file of ``simulate``: its schema, its loader, and the conversion to values.

As strict as the gateway's file, with the same reader and the same one-line errors. It has the
instances, the scheduler's beliefs about them, faults, and the workload;
docs/reference/simulation-file.md lists every field, and a test compares the two.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.instances.pairs import KV_BYTES_PER_TOKEN, Link
from hetero_gateway.core.types import InstanceId, KvRole
from hetero_gateway.errors import ConfigError, named_place
from hetero_gateway.files.gateway_config import has_gateway_keys
from hetero_gateway.files.instance_config import InstanceConfig
from hetero_gateway.files.model_cards import model_card
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.files.trace import CHAT_MIX
from hetero_gateway.files.yaml_file import StrictModel, parse_model, read_yaml
from hetero_gateway.planner.splitting import Transfers
from hetero_gateway.sim.cluster import SimulatedInstance
from hetero_gateway.sim.engine import DEFAULT_BLOCK_TOKENS
from hetero_gateway.sim.workload import Fault, FaultKind, LogNormal, LogNormalLengths

# Far more than one machine simulates in an hour; a typing error in ``count`` ends here.
MAX_INSTANCES = 10_000


class ClusterInstanceConfig(StrictModel):
    """One or more equal instances."""

    profile: str = Field(min_length=1)
    """Built-in profile name, or a profile file."""
    count: int = Field(1, ge=1, le=MAX_INSTANCES)
    """How many of them."""
    id: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Name in tables; several get -0, -1, ...; default: from the profile."""
    weight: float = Field(1.0, ge=1e-3, le=1e3)
    """For weighted-round-robin."""
    prefix_caching: bool = True
    """Whether its engine has a prefix cache; only with a trace that has texts."""
    max_num_seqs: int | None = Field(None, ge=1, le=2**16)
    """Most sequences in one step; default: the profile's."""
    believed_scale: float = Field(1.0, gt=0, le=1e3)
    """Factor of the scheduler's constants over the true ones: 2 means that it believes the instance
        to be half as fast as it is."""
    profiled: bool = True
    """Whether the scheduler has any constants for it."""
    role: KvRole = "both"
    """If requests are split: `prefill`, it does not answer prompts that others have computed;
        `decode`, it computes no prompts for others."""


class TransferConfig(StrictModel):
    """How fast two instances hand over the KV cache of a prompt."""

    gbit_per_s: float = Field(gt=0, le=1e5)
    """Of each instance's link, in each direction."""
    start_s: float = Field(0.002, ge=0, le=60)
    """Of a transfer, before its bytes."""
    kv_bytes_per_token: float | None = Field(None, ge=1, le=1e9)
    """Of the handed-over cache; default: the model's."""

    def to_core(self, kv_bytes_per_token: float) -> Transfers:
        """``kv_bytes_per_token``: the model's."""
        link = Link(self.start_s, self.gbit_per_s * 1e9 / 8)
        return Transfers(link, self.kv_bytes_per_token or kv_bytes_per_token)


class FaultConfig(StrictModel):
    """A fault of one instance."""

    instance: int | str
    """Its id, or its index from 0."""
    kind: Literal["slow", "dead"]
    start_s: float = Field(0.0, ge=0)
    """From when."""
    end_s: float | None = Field(None, gt=0)
    """Until when; default: forever."""
    factor: float = Field(1.0, gt=0, le=1e6)
    """Of kind slow: its steps take this many times longer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.end_s is not None and self.end_s <= self.start_s:
            raise ValueError(f"end_s ({self.end_s:g}) must be after start_s ({self.start_s:g})")
        if (self.factor != 1) != (self.kind == "slow"):
            raise ValueError("factor belongs to kind slow, which needs one other than 1")
        return self


class LengthConfig(StrictModel):
    """A log-normal length."""

    median: float = Field(ge=1)
    """Tokens."""
    sigma: float = Field(ge=0, le=5)
    """Standard deviation of the natural logarithm."""
    max: int = Field(ge=1, le=2**24)
    """Longer draws are cut to this; tokens."""

    def to_core(self) -> LogNormal:
        return LogNormal(self.median, self.sigma, self.max)


class SentConfig(StrictModel):
    """The requests to send."""

    requests: Path | None = None
    """A trace; relative to this file. Instead of prompt and output."""
    prompt: LengthConfig | None = None
    """Default: a chat mix."""
    output: LengthConfig | None = None
    """Default: a chat mix."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.requests is not None and (self.prompt or self.output):
            raise ValueError("requests is a trace, which has lengths: leave out prompt and output")
        return self

    @property
    def lengths(self) -> LogNormalLengths:
        """Without a trace."""
        return LogNormalLengths(
            self.prompt.to_core() if self.prompt else CHAT_MIX.prompt,
            self.output.to_core() if self.output else CHAT_MIX.output,
        )


class WorkloadConfig(SentConfig):
    """The workload, unless flags say otherwise."""

    arrival_cv: float = Field(1.0, ge=0, le=20)
    """Coefficient of variation of the gaps; 1 is Poisson."""


class ClusterConfig(StrictModel):
    """The whole file."""

    instances: list[ClusterInstanceConfig] = Field(min_length=1)
    faults: list[FaultConfig] = Field(default_factory=list)
    workload: WorkloadConfig = Field(default_factory=WorkloadConfig)
    transfer: TransferConfig | None = None
    """With it, instances can hand prompts over to each other."""

    @field_validator("instances")
    @classmethod
    def _not_too_many(cls, value: list[ClusterInstanceConfig]) -> list[ClusterInstanceConfig]:
        if (total := sum(i.count for i in value)) > MAX_INSTANCES:
            raise ValueError(f"{total} instances in all; at most {MAX_INSTANCES}")
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class Cluster:
    """A checked cluster file for the simulator; ``trace`` is a path that can be opened."""

    instances: tuple[SimulatedInstance, ...]
    faults: tuple[Fault, ...]
    workload: WorkloadConfig
    trace: Path | None
    transfers: Transfers | None = None


def load_cluster(path: Path) -> Cluster:
    """Read and check a cluster file, including its profiles; or a gateway's, whose instances have
    profiles.

    Raises:
        ConfigError: one line with the file and the key.
    """
    data: Mapping[str, Any] = read_yaml(path)
    if _is_gateways(data):
        data = _gateways_cluster(data, str(path))
    config = parse_model(ClusterConfig, data, str(path))
    profiles = [
        _profile(entry, f"{path}: instances.{i}", path.parent)
        for i, entry in enumerate(config.instances)
    ]
    instances = _instances(config.instances, profiles, str(path))
    ids = [str(i.instance_id) for i in instances]
    faults = tuple(
        Fault(
            _position(fault.instance, ids, f"{path}: faults.{i}.instance"),
            FaultKind(fault.kind),
            fault.start_s,
            math.inf if fault.end_s is None else fault.end_s,
            fault.factor,
        )
        for i, fault in enumerate(config.faults)
    )
    trace = config.workload.requests
    return Cluster(
        instances,
        faults,
        config.workload,
        None if trace is None else path.parent / trace,
        None if config.transfer is None else config.transfer.to_core(_kv_bytes(profiles[0])),
    )


def _is_gateways(data: Mapping[str, Any]) -> bool:
    rows = data.get("instances")
    named = isinstance(rows, list) and any(isinstance(r, dict) and "base_url" in r for r in rows)
    return has_gateway_keys(data) or named


def _gateways_cluster(data: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The cluster in a gateway's file. Raises ConfigError: an instance has no profile."""
    rows = data.get("instances") or []
    if not rows:
        raise ConfigError(f"{source}: instances: there are none that could be simulated")
    without = [str(row.get("id")) for row in rows if not row.get("profile")]
    if without:
        raise ConfigError(
            f"{source}: instances: a simulation needs the profile of each; {', '.join(without)} "
            "has none: `hetero-gateway profile list` shows those that are built in"
        )
    # Each rank of a server is a place of its own.
    kept = {"id": "id", "profile": "profile", "weight": "weight", "data_parallel_ranks": "count"}
    return {"instances": [{kept[k]: row[k] for k in kept if k in row} for row in rows]}


def is_cluster(data: Mapping[str, Any]) -> bool:
    """Whether a file's content is meant for ``simulate`` rather than for ``serve``.

    A key that only one of the two has decides; otherwise instances with profiles and no address
    are a cluster's.
    """
    if has_gateway_keys(data):
        return False
    if set(data) & set(ClusterConfig.model_fields) - {"instances"}:
        return True
    rows = data.get("instances")
    if not isinstance(rows, list):
        return False
    keys = {key for row in rows if isinstance(row, dict) for key in row}
    only_of_gateways = set(InstanceConfig.model_fields) - set(ClusterInstanceConfig.model_fields)
    return "profile" in keys and not keys & only_of_gateways


def _profile(entry: ClusterInstanceConfig, where: str, base_dir: Path) -> Profile:
    with named_place(f"{where}.profile"):
        profile = load_profile(entry.profile, base_dir)
    if profile.kv_capacity_tokens < DEFAULT_BLOCK_TOKENS:
        raise ConfigError(
            f"{where}.profile: a KV capacity of {profile.kv_capacity_tokens} tokens is less than "
            f"one block of {DEFAULT_BLOCK_TOKENS}"
        )
    if entry.max_num_seqs is None:
        return profile
    return dataclasses.replace(profile, max_num_seqs=entry.max_num_seqs)


def _instances(
    entries: list[ClusterInstanceConfig], profiles: list[Profile], source: str
) -> tuple[SimulatedInstance, ...]:
    """Every single instance, in the file's order."""
    names = [e.id or _generated_id(p) for e, p in zip(entries, profiles, strict=True)]
    sizes = Counter[str]()
    for entry, name in zip(entries, names, strict=True):
        sizes[name] += entry.count
    numbered = Counter[str]()
    seen: set[str] = set()
    result = []
    for i, (entry, name, profile) in enumerate(zip(entries, names, profiles, strict=True)):
        believed = dataclasses.replace(
            profile, constants=profile.constants.scaled(entry.believed_scale)
        )
        for _ in range(entry.count):
            instance_id = f"{name}-{numbered[name]}" if sizes[name] > 1 else name
            numbered[name] += 1
            if instance_id in seen:
                raise ConfigError(f"{source}: instances.{i}.id: {instance_id!r} is used twice")
            seen.add(instance_id)
            result.append(
                SimulatedInstance(
                    InstanceId(instance_id),
                    profile,
                    believed if entry.profiled else None,
                    entry.weight,
                    entry.prefix_caching,
                    entry.role,
                )
            )
    return tuple(result)


def _kv_bytes(profile: Profile) -> float:
    """Of a token of its model; of another model's if that is not known."""
    try:
        return model_card(profile.model).kv_token_bytes()
    except ConfigError:
        return KV_BYTES_PER_TOKEN


def _generated_id(profile: Profile) -> str:
    """From the accelerator's name, which a profile file may spell in any way."""
    gpu = re.sub(r"[^A-Za-z0-9._-]+", "-", profile.gpu).strip("-._")[:48]
    return f"{gpu or 'instance'}-tp{profile.tensor_parallel}"


def _position(instance: int | str, ids: list[str], where: str) -> int:
    if isinstance(instance, str):
        if instance in ids:
            return ids.index(instance)
        raise ConfigError(f"{where}: no instance has the id {instance!r}; there are {_few(ids)}")
    if 0 <= instance < len(ids):
        return instance
    raise ConfigError(f"{where}: {instance} is no position; they go from 0 to {len(ids) - 1}")


def _few(ids: list[str]) -> str:
    return ", ".join(ids[:5]) + (", …" if len(ids) > 5 else "")
