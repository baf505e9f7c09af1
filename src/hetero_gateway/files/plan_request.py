"""The planner's question: from a checked file with its flags, and everything it names."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.errors import ConfigError, named_place
from hetero_gateway.files.accelerator_catalogue import accelerator, taken_for
from hetero_gateway.files.model_file import PlanModelConfig, model_directory, read_model
from hetero_gateway.files.plan_config import (
    MachineConfig,
    PlanConfig,
    engine_options,
    load_plan_config,
)
from hetero_gateway.files.profile_file import builtin_profiles, load_profile
from hetero_gateway.files.trace import CHAT_MIX, TraceRequest, known_texts, read_trace, token_counts
from hetero_gateway.planner.accelerators import Accelerator
from hetero_gateway.planner.goals import DEFAULT_SHARE, Goals, lacking
from hetero_gateway.planner.instance_types import instance_types
from hetero_gateway.planner.memory import EngineOptions, Method
from hetero_gateway.planner.model_shape import ModelShape
from hetero_gateway.planner.plan import Machine
from hetero_gateway.planner.question import PlannedTransfers, Question
from hetero_gateway.planner.split_plan import backend_of
from hetero_gateway.sim.alone import Engines, Mix
from hetero_gateway.sim.ordered_trace import OrderedTrace
from hetero_gateway.sim.workload import Lengths, LogNormalLengths, TraceLengths

# If the file has no max_model_len, the longest request is rounded up to a multiple of this.
_CONTEXT_STEP = 1024
# Limit of the default workload.
DEFAULT_CONTEXT = CHAT_MIX.prompt.maximum + CHAT_MIX.output.maximum


@dataclasses.dataclass(frozen=True, slots=True)
class PlanRequest:
    """A checked file with its flags: the planner's question, and what a deployment needs.

    Args:
        model_name: vLLM's model argument, as the file names it.
        options: vLLM's start options; ``max_model_len`` is set.
        trace: the trace's path, if there is one.
        model_directory: where the config.json is, if the file names one.
        stored_in_config: the checkpoint's own files state how the weights are stored.
        addresses: of machines by id, if the file has them.
        accelerators: the file's own, by name.
        served_name: the name that clients use; None: the model's name.
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


def load_requests(
    path: Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    requests: Path | None = None,
    profiles: Sequence[str] = (),
) -> list[PlanRequest]:
    """Read and check a plan's file, with everything it names: its model, then its checkpoints.

    Args:
        overrides: from the command line, by dotted key; None values are ignored.
        requests: a trace, instead of the file's.
        profiles: names or files of measured profiles, which take precedence over the file's.

    Raises:
        ConfigError: one line with the file and the key.
    """
    config = load_plan_config(path, overrides)
    base_dir = path.parent
    trace = requests
    if trace is None and config.workload.requests is not None:
        trace = base_dir / config.workload.requests
    with named_place("--profile"):
        measured = [load_profile(name) for name in profiles]
    with named_place(f"{path}: profiles"):
        measured += [load_profile(name, base_dir) for name in config.profiles]
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


def plan_request(
    config: PlanConfig,
    source: str,
    base_dir: Path,
    *,
    rows: Sequence[TraceRequest] | None = None,
    trace: Path | None = None,
    measured: Sequence[Profile] = (),
) -> PlanRequest:
    """The planner's question, from a checked file.

    Args:
        source: the file, for messages.
        base_dir: the model's path is relative to this.
        rows: of the trace, which ``trace`` names; None: the file's length distributions.
        measured: profiles that take precedence over the built-in ones.

    Raises:
        ConfigError: one line with the file and the key.
    """
    model, model_name = read_model(config.model, source, base_dir)
    own = config.own_accelerators(source)
    machines = _machines(config, source, own)
    goals = _goals(config, machines, source)
    notes = _notes(config, model, own)
    lengths, longest = (
        _mix_lengths(config, source, notes)
        if rows is None
        else _trace_lengths(rows, trace, config.max_model_len)
    )
    context = _context_tokens(config, model, longest, source)
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
    mix = Mix.of(lengths, config.seed)
    types, unfit = instance_types(
        model,
        machines,
        [*measured, *builtin_profiles().values()],
        options,
        needed_tokens=longest,
        typical_tokens=None if model.keeps_all else mix.mean_tokens,
        method=config.memory,
        find=lambda name: accelerator(name, own),
        mix=mix,
        network=None if config.network is None else config.network.to_core(),
    )
    assert options.max_num_batched_tokens is not None
    question = Question(
        machines=machines,
        types=types,
        lengths=lengths,
        goals=goals,
        policy=config.policy,
        estimator=config.estimator,
        engines=Engines(config.engine.scheduling, options.max_num_batched_tokens),
        unfit=tuple(unfit),
        seed=config.seed,
        notes=tuple(notes),
        transfer=_transfer(config, model, machines, own),
    )
    return PlanRequest(
        source, model, model_name, options, config.memory, question, trace,
        model_directory(config.model, base_dir),
        isinstance(config.model, PlanModelConfig) and config.model.config is not None
        and config.model.quantization is None,
        {m.id: m.address for m in config.machines if m.address is not None},
        own,
    )  # fmt: skip


def _transfer(
    config: PlanConfig,
    model: ModelShape,
    machines: Sequence[Machine],
    own: Mapping[str, Accelerator],
) -> PlannedTransfers | None:
    if config.transfer is None:
        return None
    names = {machine.accelerator for machine in machines}
    return PlannedTransfers(
        config.transfer.to_core(model.kv_token_bytes(kv_dtype=config.engine.kv_cache_dtype)),
        {name: backend_of(accelerator(name, own)) for name in names},
    )


def _notes(config: PlanConfig, model: ModelShape, own: Mapping[str, Accelerator]) -> list[str]:
    """Notes on the model and the requested accelerators."""
    notes = [
        f"{model.name}: {doubt.what} is not modelled: its KV memory is uncertain by "
        f"{doubt.kv_error:.0%} more"
        for doubt in model.unmodelled
    ]
    names = [m.accelerator for m in config.machines] + [o.accelerator for o in config.offers]
    asked = dict.fromkeys(name for name in names if name not in own)
    notes += [said for name in asked if (said := taken_for(name)) is not None]
    return notes


def _goals(config: PlanConfig, machines: Sequence[Machine], source: str) -> Goals:
    wanted, slo = config.goals, config.slo
    goals = Goals(
        config.goal,
        config.workload.rate_per_s,
        wanted.ttft_p99_s,
        wanted.tpot_p99_s,
        None if slo is None else slo.to_core(),
        DEFAULT_SHARE if slo is None else slo.share,
    )
    problem = lacking(goals, machines)
    bought = goals.name in ("cost", "fewest") and goals.rate_per_s is not None
    if config.offers and not bought and (problem is None or problem[0] == "workload.rate_per_s"):
        why = "machines are bought for a rate (--rate, workload.rate_per_s), and the goal is cost"
        problem = "offers", f"{why} or fewest"
    if problem is not None:
        raise ConfigError(f"{source}: {problem[0]}: {problem[1]}")
    return goals


def _machines(
    config: PlanConfig, source: str, own: Mapping[str, Accelerator]
) -> tuple[Machine, ...]:
    prices: dict[str, float] = {}
    for name, of_it in config.prices.items():
        with named_place(f"{source}: prices"):
            prices[accelerator(name, own).name] = of_it
    result: list[Machine] = []
    seen: set[str] = set()
    key = "offers" if config.offers else "machines"
    offered = [offer.to_machines() for offer in config.offers]
    entries: list[MachineConfig] = [*config.machines, *offered]
    for i, entry in enumerate(entries):
        with named_place(f"{source}: {key}.{i}.accelerator"):
            name = accelerator(entry.accelerator, own).name
        price = prices.get(name) if entry.price_per_hour_usd is None else entry.price_per_hour_usd
        for k in range(entry.copies):
            machine_id = entry.id if entry.copies == 1 else f"{entry.id}-{k}"
            if machine_id in seen:
                raise ConfigError(f"{source}: {key}.{i}.id: {machine_id!r} is used twice")
            seen.add(machine_id)
            result.append(Machine(machine_id, name, entry.count, price))
    return tuple(result)


# The requests' lengths, and the context they need


def _trace_lengths(
    rows: Sequence[TraceRequest], trace: Path | None, context: int | None
) -> tuple[Lengths, int]:
    """The trace's lengths, and the tokens of its longest request."""
    prompt, output = token_counts(rows)
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
    """The requests of a trace that says which prompts begin alike."""
    texts = [row.text for row in rows if row.text is not None]
    return OrderedTrace(
        np.array([row.arrival_s or 0.0 for row in rows], float),
        *token_counts(rows),
        np.array([text.session for text in texts], np.int64),
        known_texts(rows),
        texts[0].block_tokens,
    )


def _mix_lengths(config: PlanConfig, source: str, notes: list[str]) -> tuple[Lengths, int]:
    """The file's distributions, or the default ones cut to the context; and their longest
    request."""
    context, asked = config.max_model_len, config.workload
    prompt, output = asked.lengths.prompt, asked.lengths.output
    if context is not None and prompt.maximum + output.maximum > context:
        # The default workload may be cut: the output to a quarter, the prompt to the rest.
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


def _context_tokens(config: PlanConfig, model: ModelShape, longest: int, source: str) -> int:
    """max_model_len, at most the model's own maximum."""
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
