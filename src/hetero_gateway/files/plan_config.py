"""The file of ``plan``: its schema and its reader.

As strict as the gateway's file, with the same reader and the same one-line errors. Flags override
the file. docs/reference/plan-file.md lists every field, and a test compares the two.
``plan_request`` turns it into the planner's question.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.errors import ConfigError, named_place
from hetero_gateway.files.cluster_config import SentConfig, TransferConfig
from hetero_gateway.files.model_file import PlanModelConfig
from hetero_gateway.files.scheduler_config import PolicyName
from hetero_gateway.files.yaml_file import StrictModel, parse_model, read_yaml
from hetero_gateway.planner.accelerators import Accelerator
from hetero_gateway.planner.further_profiles import Network
from hetero_gateway.planner.goals import DEFAULT_SHARE, GoalName
from hetero_gateway.planner.memory import EngineOptions
from hetero_gateway.sim.engine import Scheduling

# Far more than one plan needs; a typing error in ``copies`` ends here.
MAX_MACHINES = 10_000
# Of one kind on offer: the search space of combinations grows with it.
MAX_OFFERED = 256
# Accelerators of one machine: a rack that is one NVLink domain has 72.
MAX_ACCELERATORS = 72


class AcceleratorConfig(StrictModel):
    """An accelerator that is not in the catalogue, or has other figures: its data sheet."""

    memory_bytes: float = Field(gt=0)
    """Nominal memory: 24e9 or 25769803776."""
    usable_memory_bytes: float | None = Field(None, gt=0)
    """Available to a process; default: 98.5 % of it."""
    memory_bytes_per_s: float = Field(gt=0)
    """Bandwidth of its memory."""
    flop_per_s: float = Field(gt=0)
    """Dense fp16 or bf16 products, without sparsity."""
    fp8_op_per_s: float = Field(0, ge=0)
    """The same in fp8; 0: it has none."""
    int8_op_per_s: float = Field(0, ge=0)
    """The same in int8; 0: it has none."""
    link_bytes_per_s: float = Field(0, ge=0)
    """One direction between two; 0: no tensor parallelism."""
    max_group: int = Field(8, ge=1, le=MAX_ACCELERATORS)
    """Most in one instance."""
    cuda_capability: float | None = Field(None, ge=5, le=20)
    """Of NVIDIA's, such as 8.6: decides on storages and bf16."""

    def to_core(self, name: str) -> Accelerator:
        usable = self.usable_memory_bytes
        if usable is not None and usable > self.memory_bytes:
            raise ConfigError(f"{name}: usable_memory_bytes is more than memory_bytes")
        return Accelerator(name, source="the plan's file", **self.model_dump())


class MachineConfig(StrictModel):
    """One machine, or several equal ones."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Name in the plan; several get -0, -1, ...."""
    accelerator: str = Field(min_length=1)
    """A name of the catalogue."""
    count: int = Field(ge=1, le=MAX_ACCELERATORS)
    """Accelerators in one machine."""
    copies: int = Field(1, ge=1, le=MAX_MACHINES)
    """How many machines like this one."""
    price_per_hour_usd: float | None = Field(None, ge=0)
    """Of one accelerator; overrides prices."""
    address: str | None = Field(
        None, pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?$|^\[[0-9A-Fa-f:.]+\]$"
    )
    """Host name or address where the gateway reaches it; default: the id."""

    @model_validator(mode="after")
    def _one_address(self) -> Self:
        if self.address is not None and self.copies > 1:
            raise ValueError("address is of one machine: leave out copies, or the address")
        return self


class NetworkConfig(StrictModel):
    """Between the machines: with it, an instance may span several equal ones."""

    bandwidth_bytes_per_s: float | None = Field(None, gt=0)
    """Of one machine's connection, one direction. Or gbps."""
    gbps: float | None = Field(None, gt=0)
    """The same in Gbit/s."""
    latency_s: float = Field(5e-5, ge=0, le=1)
    """Of one message."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.bandwidth_bytes_per_s is None) == (self.gbps is None):
            raise ValueError("give either bandwidth_bytes_per_s or gbps")
        return self

    def to_core(self) -> Network:
        return Network(self.bandwidth_bytes_per_s or (self.gbps or 0) * 1e9 / 8, self.latency_s)


class OfferConfig(StrictModel):
    """A kind of machine that could be bought or rented, whole."""

    id: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Name in the plan; default: count and accelerator, such as 4xl4-24gb."""
    accelerator: str = Field(min_length=1)
    """A name of the catalogue."""
    count: int = Field(ge=1, le=MAX_ACCELERATORS)
    """Accelerators in one machine."""
    price_per_hour_usd: float = Field(gt=0)
    """Of the whole machine, as usual for offers."""
    at_most: int = Field(16, ge=1, le=MAX_OFFERED)
    """How many are available."""

    def to_machines(self) -> MachineConfig:
        name = re.sub(r"[^A-Za-z0-9.-]+", "-", self.accelerator).strip("-.").lower()
        return MachineConfig(
            id=self.id or f"{self.count}x{name}"[:60],
            accelerator=self.accelerator,
            count=self.count,
            copies=self.at_most,
            price_per_hour_usd=self.price_per_hour_usd / self.count,
        )


class EngineConfig(StrictModel):
    """vLLM's start options."""

    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """vLLM's flag."""
    max_num_seqs: int | None = Field(None, ge=1, le=2**16)
    """vLLM's flag; default: vLLM's for the accelerator."""
    max_num_batched_tokens: int | None = Field(None, ge=1, le=2**20)
    """vLLM's flag; default: 2048; before 0.8 a whole prompt."""
    kv_cache_dtype: str = "auto"
    """vLLM's flag."""
    enforce_eager: bool = False
    """vLLM's flag: no CUDA graphs."""
    vllm_version: str | None = None
    """The version whose memory use is modelled; default: the newest known."""
    scheduling: Scheduling = "chunked"
    """chunked, as vLLM V1; or prefill-first, as V0."""


class PlanWorkloadConfig(SentConfig):
    """The workload."""

    rate_per_s: float | None = Field(None, gt=0)
    """Requests per second to hold."""
    prefix_cache: bool = True
    """Whether hits in prefix caches count, if a trace says which prompts begin alike."""


class GoalsConfig(StrictModel):
    """The goals of the plan."""

    goal: GoalName = "throughput"
    """throughput, goodput, cost or fewest."""
    ttft_p99_s: float | None = Field(None, gt=0)
    """Limit of TTFT's 99th percentile."""
    tpot_p99_s: float | None = Field(None, gt=0)
    """Limit of TPOT's 99th percentile."""


class PlanSloConfig(StrictModel):
    """Limits of each request, for all goals; goodput is the highest rate that keeps them."""

    ttft_s: float | None = Field(None, gt=0)
    """Limit of a request's TTFT, s."""
    tpot_s: float | None = Field(None, gt=0)
    """Limit of a request's TPOT, s/token."""
    share: float = Field(DEFAULT_SHARE, gt=0, le=1)
    """The share of requests that must be within both."""

    @model_validator(mode="after")
    def _some_limit(self) -> Self:
        if self.ttft_s is None and self.tpot_s is None:
            raise ValueError("give ttft_s (--slo-ttft), tpot_s (--slo-tpot), or both")
        return self

    def to_core(self) -> Slo:
        return Slo(*(math.inf if x is None else x for x in (self.ttft_s, self.tpot_s)))


class PlanConfig(StrictModel):
    """The whole file."""

    model: str | PlanModelConfig
    """A built-in card's name, or a config.json."""
    checkpoints: list[str | PlanModelConfig] = Field(default_factory=list, max_length=8)
    """Other storages of the same model: the plan takes the best for the goal."""
    max_model_len: int | None = Field(None, ge=2, le=2**24)
    """Context; default: from the longest request."""
    machines: list[MachineConfig] = Field(default_factory=list)
    """The available machines: at least one, or else offers."""
    offers: list[OfferConfig] = Field(default_factory=list)
    """Machines that could be bought or rented, instead of machines."""
    accelerators: dict[str, AcceleratorConfig] = Field(default_factory=dict)
    """Your own, by name; they take precedence over the catalogue's."""
    network: NetworkConfig | None = None
    """Between the machines; without it, an instance stays on one."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    workload: PlanWorkloadConfig = Field(default_factory=PlanWorkloadConfig)
    goals: GoalsConfig = Field(default_factory=GoalsConfig)
    slo: PlanSloConfig | None = None
    """Limits of each request; none."""
    transfer: TransferConfig | None = None
    """With it, the plan reports the gain of splitting requests over two instances."""
    prices: dict[str, float] = Field(default_factory=dict)
    """USD per accelerator-hour, by accelerator."""
    profiles: list[str] = Field(default_factory=list)
    """Measured profiles: files, relative to this one."""
    policy: PolicyName = "finish-time"
    """Policy of the gateway in front."""
    memory: Literal["fitted", "paper"] = "fitted"
    """How KV memory is estimated: fitted to vLLM's logs, or Eq. (1)."""
    estimator: Literal["unpadded", "paper"] = "unpadded"
    """Algorithm 1, which prunes: corrected, or as printed."""
    seed: int = Field(0, ge=0)
    """Of everything random."""

    @field_validator("machines")
    @classmethod
    def _some(cls, value: list[MachineConfig]) -> list[MachineConfig]:
        if not value:
            raise ValueError("there are none; name at least one machine")
        if (total := sum(m.copies for m in value)) > MAX_MACHINES:
            raise ValueError(f"{total} machines in all; at most {MAX_MACHINES}")
        return value

    @model_validator(mode="after")
    def _machines_or_offers(self) -> Self:
        if bool(self.machines) == bool(self.offers):
            raise ValueError(
                "give machines, what there is, or offers, what could be bought: not both"
            )
        return self

    @property
    def goal(self) -> GoalName:
        """Existing machines should be used as well as possible; bought ones should cost little."""
        if self.offers and "goal" not in self.goals.model_fields_set:
            return "cost"
        return self.goals.goal

    @field_validator("prices")
    @classmethod
    def _no_negative_price(cls, value: dict[str, float]) -> dict[str, float]:
        for name, price in value.items():
            if price < 0:
                raise ValueError(f"{name}: a price must be 0 or more")
        return value

    def own_accelerators(self, source: str) -> dict[str, Accelerator]:
        """By name. Raises ConfigError."""
        with named_place(f"{source}: accelerators"):
            return {name: entry.to_core(name) for name, entry in self.accelerators.items()}


def load_plan_config(path: Path, overrides: Mapping[str, Any] | None = None) -> PlanConfig:
    """The file's keys, overridden by those of the command line. Raises ConfigError."""
    return parse_model(PlanConfig, read_yaml(path, overrides), str(path))


def engine_options(engine: EngineConfig, context: int | None, source: str) -> EngineOptions:
    """vLLM's start options. Raises ConfigError."""
    version = {} if engine.vllm_version is None else {"vllm_version": engine.vllm_version}
    with named_place(f"{source}: engine"):
        told = EngineOptions(
            utilisation=engine.gpu_memory_utilization,
            max_model_len=context,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            kv_dtype=engine.kv_cache_dtype,
            enforce_eager=engine.enforce_eager,
            **version,
        )
        if told.max_num_batched_tokens is not None:
            return told
        # One value for the memory, the simulation and the command, whatever vLLM's default is.
        return dataclasses.replace(told, max_num_batched_tokens=told.step_tokens)
