"""The file of ``plan``: its schema, its loader, and the conversion to what the planner is asked.

As strict as the gateway's file, with the same reader and the same one-line errors. Flags win over
the file. docs/reference/plan-file.md lists every field, and a test compares the two.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.cluster_config import LengthConfig
from hetero_gateway.files.model_file import ModelConfig, model_directory, read_model
from hetero_gateway.files.profile_file import builtin_profiles, load_profile
from hetero_gateway.files.scheduler_config import PolicyName
from hetero_gateway.files.trace import CHAT_MIX, TraceRequest, read_trace
from hetero_gateway.files.yaml_file import StrictModel, parse_model, read_yaml
from hetero_gateway.planner.accelerators import Accelerator, accelerator, taken_for
from hetero_gateway.planner.further_sizes import MeanRequest
from hetero_gateway.planner.goals import DEFAULT_SHARE, GoalName, Goals
from hetero_gateway.planner.instance_types import Types, instance_types
from hetero_gateway.planner.memory import EngineOptions, Method
from hetero_gateway.planner.model_shape import ModelShape
from hetero_gateway.planner.pipelines import Network
from hetero_gateway.planner.plan import Machine, Unfit
from hetero_gateway.planner.question import Question
from hetero_gateway.sim.alone import Engines, Mix
from hetero_gateway.sim.engine import Scheduling
from hetero_gateway.sim.ordered_trace import OrderedTrace
from hetero_gateway.sim.prefixes import KnownText, Run
from hetero_gateway.sim.workload import Integers, Lengths, LogNormal, LogNormalLengths, TraceLengths

# Far more than one plan is for; a typing error in ``copies`` ends here.
MAX_MACHINES = 10_000
# Of one kind that is offered: the frontier of what they make together grows with it.
MAX_OFFERED = 256
# Accelerators of one machine: a rack that is one NVLink domain has 72.
MAX_ACCELERATORS = 72

# The default workload.
_CHAT_PROMPT = LogNormal(CHAT_MIX.input_median, CHAT_MIX.input_sigma, CHAT_MIX.input_max)
_CHAT_OUTPUT = LogNormal(CHAT_MIX.output_median, CHAT_MIX.output_sigma, CHAT_MIX.output_max)
# Where the file has no max_model_len, the longest request is rounded up to a multiple of this.
_CONTEXT_STEP = 1024
# That of the default workload.
DEFAULT_CONTEXT = CHAT_MIX.input_max + CHAT_MIX.output_max


class AcceleratorConfig(StrictModel):
    """An accelerator that the catalogue does not have, or has otherwise: its data sheet."""

    memory_bytes: float = Field(gt=0, description="What its name says: 24e9 or 25769803776.")
    usable_memory_bytes: float | None = Field(
        None, gt=0, description="What a process finds; default: 98.5 % of it."
    )
    memory_bytes_per_s: float = Field(gt=0, description="Bandwidth of its memory.")
    flop_per_s: float = Field(gt=0, description="Dense fp16 or bf16 products, without sparsity.")
    fp8_op_per_s: float = Field(0, ge=0, description="The same in fp8; 0: it has none.")
    int8_op_per_s: float = Field(0, ge=0, description="The same in int8; 0: it has none.")
    link_bytes_per_s: float = Field(
        0, ge=0, description="One direction between two; 0: no tensor parallelism."
    )
    max_group: int = Field(8, ge=1, le=MAX_ACCELERATORS, description="Most in one instance.")
    cuda_capability: float | None = Field(
        None, ge=5, le=20, description="Of NVIDIA's, such as 8.6: decides on storages and bf16."
    )

    def to_core(self, name: str) -> Accelerator:
        usable = self.usable_memory_bytes
        if usable is not None and usable > self.memory_bytes:
            raise ConfigError(f"{name}: usable_memory_bytes is more than memory_bytes")
        capability = self.cuda_capability
        return Accelerator(
            name,
            self.flop_per_s,
            self.memory_bytes,
            self.memory_bytes_per_s,
            self.link_bytes_per_s,
            usable_memory_bytes=usable,
            fp8_op_per_s=self.fp8_op_per_s,
            int8_op_per_s=self.int8_op_per_s,
            max_group=self.max_group,
            cuda_capability=capability,
            bf16=capability is None or capability >= 8.0,
            source="the plan's file",
        )


class MachineConfig(StrictModel):
    """One machine, or several equal ones."""

    id: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
        description="Name in the plan; several get -0, -1, ....",
    )
    accelerator: str = Field(min_length=1, description="A name of the catalogue.")
    count: int = Field(ge=1, le=MAX_ACCELERATORS, description="Accelerators in one machine.")
    copies: int = Field(1, ge=1, le=MAX_MACHINES, description="How many machines like this one.")
    price_per_hour_usd: float | None = Field(
        None, ge=0, description="Of one accelerator; wins over prices."
    )
    address: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?$|^\[[0-9A-Fa-f:.]+\]$",
        description="Host name or address where the gateway reaches it; default: the id.",
    )

    @model_validator(mode="after")
    def _one_address(self) -> MachineConfig:
        if self.address is not None and self.copies > 1:
            raise ValueError("address is of one machine: leave out copies, or the address")
        return self


class NetworkConfig(StrictModel):
    """Between the machines: with it, an instance may stretch over several equal ones."""

    bandwidth_bytes_per_s: float | None = Field(
        None, gt=0, description="Of one machine's connection, one direction. Or gbps."
    )
    gbps: float | None = Field(None, gt=0, description="The same in Gbit/s.")
    latency_s: float = Field(5e-5, ge=0, le=1, description="Of one message.")

    @model_validator(mode="after")
    def _one(self) -> NetworkConfig:
        if (self.bandwidth_bytes_per_s is None) == (self.gbps is None):
            raise ValueError("give either bandwidth_bytes_per_s or gbps")
        return self

    def to_core(self) -> Network:
        return Network(self.bandwidth_bytes_per_s or (self.gbps or 0) * 1e9 / 8, self.latency_s)


class OfferConfig(StrictModel):
    """A kind of machine that could be bought or rented, whole."""

    id: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
        description="Name in the plan; default: count and accelerator, such as 4xl4-24gb.",
    )
    accelerator: str = Field(min_length=1, description="A name of the catalogue.")
    count: int = Field(ge=1, le=MAX_ACCELERATORS, description="Accelerators in one machine.")
    price_per_hour_usd: float = Field(gt=0, description="Of the whole machine, as offers are.")
    at_most: int = Field(16, ge=1, le=MAX_OFFERED, description="How many can be had.")

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
    """The options that vLLM is started with."""

    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="vLLM's flag.")
    max_num_seqs: int | None = Field(
        None, ge=1, le=2**16, description="vLLM's flag; default: vLLM's for the accelerator."
    )
    max_num_batched_tokens: int | None = Field(
        None, ge=1, le=2**20, description="vLLM's flag; default: 2048; before 0.8 a whole prompt."
    )
    kv_cache_dtype: str = Field("auto", description="vLLM's flag.")
    enforce_eager: bool = Field(False, description="vLLM's flag: no CUDA graphs.")
    vllm_version: str | None = Field(None, description="Whose memory is modelled; newest known.")
    scheduling: Scheduling = Field(
        "chunked", description="chunked, as vLLM V1; or prefill-first, as V0."
    )


class PlanWorkloadConfig(StrictModel):
    """What is sent."""

    requests: Path | None = Field(
        None, description="A trace, relative to this file. In place of prompt and output."
    )
    prompt: LengthConfig | None = Field(None, description="Log-normal; default: a chat mix.")
    output: LengthConfig | None = Field(None, description="Log-normal; default: a chat mix.")
    rate_per_s: float | None = Field(None, gt=0, description="Requests per second to hold.")
    prefix_cache: bool = Field(
        True,
        description="Hits in prefix caches count, where a trace says what begins alike.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> PlanWorkloadConfig:
        if self.requests is not None and (self.prompt or self.output):
            raise ValueError("requests is a trace, which has lengths: leave out prompt and output")
        return self


class GoalsConfig(StrictModel):
    """What the plan is to be good at."""

    goal: GoalName = Field("throughput", description="throughput, goodput, cost or fewest.")
    ttft_p99_s: float | None = Field(None, gt=0, description="Limit of TTFT's 99th percentile.")
    tpot_p99_s: float | None = Field(None, gt=0, description="Limit of TPOT's 99th percentile.")


class PlanSloConfig(StrictModel):
    """Limits of each request, for all goals; goodput is the highest rate that keeps them."""

    ttft_s: float | None = Field(None, gt=0, description="Limit of a request's TTFT, s.")
    tpot_s: float | None = Field(None, gt=0, description="Limit of a request's TPOT, s/token.")
    share: float = Field(
        DEFAULT_SHARE, gt=0, le=1, description="Of the requests that are to be within both."
    )

    @model_validator(mode="after")
    def _some_limit(self) -> PlanSloConfig:
        if self.ttft_s is None and self.tpot_s is None:
            raise ValueError("give ttft_s (--slo-ttft), tpot_s (--slo-tpot), or both")
        return self

    def to_core(self) -> Slo:
        return Slo(*(math.inf if x is None else x for x in (self.ttft_s, self.tpot_s)))


class PlanConfig(StrictModel):
    """The whole file."""

    model: str | ModelConfig = Field(description="A built-in card's name, or a config.json.")
    checkpoints: list[str | ModelConfig] = Field(
        default_factory=list,
        max_length=8,
        description="The same model, stored otherwise: the plan takes what serves the goal best.",
    )
    max_model_len: int | None = Field(
        None, ge=2, le=2**24, description="Context; default: from the longest request."
    )
    machines: list[MachineConfig] = Field(
        default_factory=list, description="What there is: at least one, or else offers."
    )
    offers: list[OfferConfig] = Field(
        default_factory=list, description="What could be bought or rented, in place of machines."
    )
    accelerators: dict[str, AcceleratorConfig] = Field(
        default_factory=dict, description="Your own, by name; they come before the catalogue's."
    )
    network: NetworkConfig | None = Field(
        None, description="Between the machines; without it, an instance stays on one."
    )
    engine: EngineConfig = Field(default_factory=EngineConfig)
    workload: PlanWorkloadConfig = Field(default_factory=PlanWorkloadConfig)
    goals: GoalsConfig = Field(default_factory=GoalsConfig)
    slo: PlanSloConfig | None = Field(None, description="Limits of each request; none.")
    prices: dict[str, float] = Field(
        default_factory=dict, description="USD per accelerator-hour, by accelerator."
    )
    profiles: list[str] = Field(
        default_factory=list, description="Measured profiles: files, relative to this one."
    )
    policy: PolicyName = Field("finish-time", description="Of the gateway in front of it all.")
    memory: Literal["fitted", "paper"] = Field(
        "fitted", description="How KV memory is reckoned: fitted to vLLM's logs, or Eq. (1)."
    )
    estimator: Literal["unpadded", "paper"] = Field(
        "unpadded", description="Algorithm 1, which prunes: mended, or as printed."
    )
    seed: int = Field(0, ge=0, description="Of everything that is drawn.")

    @field_validator("machines")
    @classmethod
    def _some(cls, value: list[MachineConfig]) -> list[MachineConfig]:
        if not value:
            raise ValueError("there are none; name at least one machine")
        if (total := sum(m.copies for m in value)) > MAX_MACHINES:
            raise ValueError(f"{total} machines in all; at most {MAX_MACHINES}")
        return value

    @model_validator(mode="after")
    def _machines_or_offers(self) -> PlanConfig:
        if bool(self.machines) == bool(self.offers):
            raise ValueError(
                "give machines, what there is, or offers, what could be bought: not both"
            )
        return self

    @property
    def goal(self) -> GoalName:
        """What is there is used as well as it can be; what is bought is to cost little."""
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
        try:
            return {name: entry.to_core(name) for name, entry in self.accelerators.items()}
        except ConfigError as error:
            raise ConfigError(f"{source}: accelerators: {error}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class PlanRequest:
    """A checked file with its flags: what the planner is asked, and what a deployment needs.

    Args:
        model_name: what vLLM is started with as model, as the file names it.
        options: what vLLM is started with; ``max_model_len`` is set.
        trace: the trace's path, if there is one.
        model_directory: where the config.json is, if the file names one.
        stored_in_config: how the weights are stored is what the checkpoint's own files say.
        addresses: of machines by id, where the file has them.
        accelerators: the file's own, by name.
        served_name: what clients ask for; None: the model's name.
    """

    source: str
    model: ModelShape
    model_name: str
    options: EngineOptions
    memory: Method
    question: Question
    trace: Path | None
    model_directory: Path | None = None
    stored_in_config: bool = False
    addresses: Mapping[str, str] = dataclasses.field(default_factory=dict)
    accelerators: Mapping[str, Accelerator] = dataclasses.field(default_factory=dict)
    served_name: str | None = None

    @property
    def max_model_len(self) -> int:
        assert self.options.max_model_len is not None
        return self.options.max_model_len


def load_request(
    path: Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    requests: Path | None = None,
    profiles: Sequence[str] = (),
) -> PlanRequest:
    """``load_requests``, of the file's ``model`` alone."""
    return load_requests(path, overrides, requests=requests, profiles=profiles)[0]


def load_requests(
    path: Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    requests: Path | None = None,
    profiles: Sequence[str] = (),
) -> list[PlanRequest]:
    """Read and check a plan's file, with all that it names: its model, then its checkpoints.

    Args:
        overrides: from the command line, by dotted key; None values are ignored.
        requests: a trace, in place of the file's.
        profiles: names or files of measured profiles, which come before the file's.

    Raises:
        ConfigError: one line with the file and the key.
    """
    config = load_plan_config(path, overrides)
    base_dir = path.parent
    trace = requests
    if trace is None and config.workload.requests is not None:
        trace = base_dir / config.workload.requests
    measured = [
        *_profiles(profiles, "--profile", Path()),
        *_profiles(config.profiles, f"{path}: profiles", base_dir),
    ]
    rows = None if trace is None else read_trace(trace)
    found = [
        plan_request(
            config.model_copy(update={"model": model}), str(path), base_dir,
            rows=rows, trace=trace, measured=measured,
        )
        for model in (config.model, *config.checkpoints)
    ]  # fmt: skip
    name = found[0].model_name
    return [found[0], *(dataclasses.replace(each, served_name=name) for each in found[1:])]


def load_plan_config(path: Path, overrides: Mapping[str, Any] | None = None) -> PlanConfig:
    """The file's keys with those of the command line over them. Raises ConfigError."""
    data = read_yaml(path)
    for dotted, value in (overrides or {}).items():
        if value is None:
            continue
        *parents, last = dotted.split(".")
        place: Any = data
        for name in parents:
            place = place.setdefault(name, {}) if isinstance(place, dict) else None
        if isinstance(place, dict):  # else the schema says what is wrong with it
            place[last] = value
    return parse_model(PlanConfig, data, str(path))


def plan_request(
    config: PlanConfig,
    source: str,
    base_dir: Path,
    *,
    rows: Sequence[TraceRequest] | None = None,
    trace: Path | None = None,
    measured: Sequence[Profile] = (),
) -> PlanRequest:
    """What the planner is asked, from a checked file.

    Args:
        source: the file, for messages.
        base_dir: what the model's path is relative to.
        rows: of the trace, which ``trace`` names; None: the file's length distributions.
        measured: profiles that come before the built-in ones.

    Raises:
        ConfigError: one line with the file and the key.
    """
    model, model_name = read_model(config.model, source, base_dir)
    own = config.own_accelerators(source)
    machines = _machines(config, source, own)
    notes = [
        f"{model.name}: {doubt.what} is not modelled: its KV memory is uncertain by "
        f"{doubt.kv_error:.0%} more"
        for doubt in model.unmodelled
    ]
    names = [m.accelerator for m in config.machines] + [o.accelerator for o in config.offers]
    asked = dict.fromkeys(name for name in names if name not in own)
    notes += [said for name in asked if (said := taken_for(name)) is not None]
    lengths, longest = (
        _mix_lengths(config, source, notes)
        if rows is None
        else _trace_lengths(rows, trace, config.max_model_len)
    )
    context = _context(config, model, longest, source)
    if config.max_model_len is None:
        notes.append(f"max_model_len {context} is taken from the longest request ({longest})")
    options = engine_options(config.engine, context, source)
    if rows is not None and all(row.text is not None for row in rows):
        if (why := _without_caches(config, model, options)) is None:
            lengths = _ordered_trace(rows)
        else:
            notes.append(
                "the trace says which prompts begin alike, and the plan computes each in full: "
                f"{why} (simulate shows what prefix caches would save)"
            )
    mean = _mean_request(lengths, config.seed)
    types, unfit = instance_types(
        model,
        machines,
        [*measured, *builtin_profiles().values()],
        options,
        needed_tokens=longest,
        typical_tokens=None if model.keeps_all else mean.prompt + mean.output,
        method=config.memory,
        own=own,
        mean=mean,
        network=None if config.network is None else config.network.to_core(),
    )
    question = _question(config, machines, types, unfit, lengths, notes, options)
    return PlanRequest(
        source, model, model_name, options, config.memory, question, trace,
        model_directory(config.model, base_dir),
        isinstance(config.model, ModelConfig) and config.model.config is not None
        and config.model.quantization is None,
        {m.id: m.address for m in config.machines if m.address is not None},
        own,
    )  # fmt: skip


def _mean_request(lengths: Lengths, seed: int) -> MeanRequest:
    mix = Mix.of(lengths, seed)
    return MeanRequest(mix.mean_prompt, mix.mean_output, mix.held_tokens)


def _question(
    config: PlanConfig,
    machines: tuple[Machine, ...],
    types: Types,
    unfit: Sequence[Unfit],
    lengths: Lengths,
    notes: Sequence[str],
    options: EngineOptions,
) -> Question:
    assert options.max_num_batched_tokens is not None
    return Question(
        machines=machines,
        types=types,
        lengths=lengths,
        goals=_goals(config),
        policy=config.policy,
        estimator=config.estimator,
        engines=Engines(config.engine.scheduling, options.max_num_batched_tokens),
        unfit=tuple(unfit),
        seed=config.seed,
        notes=tuple(notes),
    )


def _goals(config: PlanConfig) -> Goals:
    wanted, slo = config.goals, config.slo
    return Goals(
        config.goal,
        config.workload.rate_per_s,
        wanted.ttft_p99_s,
        wanted.tpot_p99_s,
        None if slo is None else slo.to_core(),
        DEFAULT_SHARE if slo is None else slo.share,
    )


def _check_goals(config: PlanConfig, source: str) -> None:
    goals = _goals(config)
    if goals.name == "goodput" and not goals.has_limits:
        raise ConfigError(
            f"{source}: slo: the goal goodput needs limits: ttft_s (--slo-ttft), tpot_s "
            "(--slo-tpot), or both"
        )
    if config.offers and (goals.name not in ("cost", "fewest") or goals.rate_per_s is None):
        raise ConfigError(
            f"{source}: offers: machines are bought for a rate (--rate, workload.rate_per_s), and "
            "the goal is cost or fewest"
        )
    if goals.rate_per_s is None and not goals.at_goodput:
        if goals.name == "fewest" or goals.has_limits:
            raise ConfigError(
                f"{source}: workload.rate_per_s: the goal {goals.name}"
                f"{f' within {goals.limits}' if goals.has_limits else ''} needs a rate to hold "
                "(--rate); the highest rate that keeps limits is the goal goodput"
            )


def _machines(
    config: PlanConfig, source: str, own: Mapping[str, Accelerator]
) -> tuple[Machine, ...]:
    prices: dict[str, float] = {}
    for name, of_it in config.prices.items():
        try:
            prices[accelerator(name, own).name] = of_it
        except ConfigError as error:
            raise ConfigError(f"{source}: prices: {error}") from error
    result: list[Machine] = []
    seen: set[str] = set()
    key = "offers" if config.offers else "machines"
    offered = [offer.to_machines() for offer in config.offers]
    entries: list[MachineConfig] = [*config.machines, *offered]
    for i, entry in enumerate(entries):
        try:
            name = accelerator(entry.accelerator, own).name
        except ConfigError as error:
            raise ConfigError(f"{source}: {key}.{i}.accelerator: {error}") from error
        price = prices.get(name) if entry.price_per_hour_usd is None else entry.price_per_hour_usd
        for k in range(entry.copies):
            machine_id = entry.id if entry.copies == 1 else f"{entry.id}-{k}"
            if machine_id in seen:
                raise ConfigError(f"{source}: {key}.{i}.id: {machine_id!r} is used twice")
            seen.add(machine_id)
            result.append(Machine(machine_id, name, entry.count, price))
    if config.goal == "cost":
        lacking = sorted({m.accelerator for m in result if m.price_per_hour_usd is None})
        if lacking:
            raise ConfigError(
                f"{source}: prices: the goal cost needs USD per accelerator-hour of "
                f"{', '.join(lacking)}"
            )
    _check_goals(config, source)
    return tuple(result)


def _trace_lengths(
    rows: Sequence[TraceRequest], trace: Path | None, context: int | None
) -> tuple[Lengths, int]:
    """The trace's lengths, and the tokens of its longest request."""
    prompt: Integers = np.array([row.input_tokens for row in rows], np.int64)
    output: Integers = np.array([row.output_tokens for row in rows], np.int64)
    total = prompt + output
    longest = int(np.argmax(total))
    if context is not None and total[longest] > context:
        raise ConfigError(
            f"{trace}: request {longest + 1} needs {total[longest]} tokens ({prompt[longest]} "
            f"prompt, {output[longest]} output), more than max_model_len {context}; "
            f"{int((total > context).sum())} of {total.size} requests are too long"
        )
    return TraceLengths(prompt, output), int(total[longest])


def _without_caches(config: PlanConfig, model: ModelShape, options: EngineOptions) -> str | None:
    """Why hits in prefix caches do not count; None: they do."""
    if not config.workload.prefix_cache:
        return "prefix_cache is off"
    if config.engine.scheduling == "prefill-first" or not options.caches_prefixes:
        return "vLLM before 0.8 has no prefix cache unless it is told to"
    if model.state_bytes:
        return f"how much of {model.name}'s state is cached is not modelled"
    return None


def _ordered_trace(rows: Sequence[TraceRequest]) -> OrderedTrace:
    texts = [row.text for row in rows if row.text is not None]
    return OrderedTrace(
        np.array([row.arrival_s or 0.0 for row in rows], float),
        np.array([row.input_tokens for row in rows], np.int64),
        np.array([row.output_tokens for row in rows], np.int64),
        np.array([text.session for text in texts], np.int64),
        tuple(KnownText(tuple(Run(*run) for run in text.runs)) for text in texts),
        texts[0].block_tokens,
    )


def _mix_lengths(config: PlanConfig, source: str, notes: list[str]) -> tuple[Lengths, int]:
    """The file's distributions, or ours cut to the context; and the longest request of them."""
    context, asked = config.max_model_len, config.workload
    prompt = asked.prompt.to_core() if asked.prompt else _CHAT_PROMPT
    output = asked.output.to_core() if asked.output else _CHAT_OUTPUT
    if context is not None and prompt.maximum + output.maximum > context:
        # What is ours may be cut: the output to a quarter, the prompt to what is left.
        if not asked.output:
            room = context - prompt.maximum if asked.prompt else context // 4
            output = dataclasses.replace(output, maximum=min(output.maximum, max(1, room)))
        if not asked.prompt:
            prompt = dataclasses.replace(prompt, maximum=max(1, context - output.maximum))
        notes.append(f"the chat mix is cut to what fits max_model_len {context}")
    longest = prompt.maximum + output.maximum
    if context is not None and longest > context:
        raise ConfigError(
            f"{source}: workload: the longest request has {prompt.maximum} prompt and "
            f"{output.maximum} output tokens, more than max_model_len {context}"
        )
    return LogNormalLengths(prompt, output), longest


def _context(config: PlanConfig, model: ModelShape, longest: int, source: str) -> int:
    """max_model_len, at most what the model is made for."""
    most = model.max_position
    if config.max_model_len is not None:
        if most and config.max_model_len > most:
            raise ConfigError(
                f"{source}: max_model_len: {config.max_model_len} is more than the {most} that "
                f"{model.name} is made for"
            )
        return config.max_model_len
    if most and longest > most:
        raise ConfigError(
            f"{source}: workload: the longest request needs {longest} tokens, {model.name} is "
            f"made for {most}"
        )
    rounded = -(-longest // _CONTEXT_STEP) * _CONTEXT_STEP
    return min(rounded, most) if most else rounded


def engine_options(engine: EngineConfig, context: int | None, source: str) -> EngineOptions:
    """The options that vLLM is started with. Raises ConfigError."""
    version = {} if engine.vllm_version is None else {"vllm_version": engine.vllm_version}
    try:
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
        # One figure for the memory, the simulation and the command, whatever vLLM's default is.
        return dataclasses.replace(told, max_num_batched_tokens=told.step_tokens)
    except ConfigError as error:
        raise ConfigError(f"{source}: engine: {error}") from error


def _profiles(names: Sequence[str], where: str, base_dir: Path) -> list[Profile]:
    found = []
    for name in names:
        try:
            found.append(load_profile(name, base_dir))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    return found
