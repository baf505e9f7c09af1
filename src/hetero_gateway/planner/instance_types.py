"""The engines that could be deployed: every accelerator kind at every size.

A type has its memory (``memory``) and its times: a profile measured on such hardware where the
caller has one, else a derived one, else a roofline of the data sheet. What cannot be deployed is
listed with the reason, what is missing, and what would help. Files of profiles are the caller's
business.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.nearest import folded
from hetero_gateway.planner import expert_parallel, pipelines
from hetero_gateway.planner.accelerators import Accelerator
from hetero_gateway.planner.expert_parallel import expert_parallel_profile
from hetero_gateway.planner.further_sizes import MeanRequest, across, promising, within
from hetero_gateway.planner.memory import (
    EngineOptions,
    Method,
    remedies,
    shortfall_bytes,
    tokens_at,
)
from hetero_gateway.planner.model_shape import ModelShape
from hetero_gateway.planner.parallelism import precision_refusal, refusal
from hetero_gateway.planner.pipelines import Network, pipelined_profile
from hetero_gateway.planner.plan import InstanceType, Machine, MemoryEstimate, Unfit
from hetero_gateway.planner.roofline import SLOT_BYTES_PER_S, SLOTS_UNCERTAINTY, roofline_profile
from hetero_gateway.planner.sizes import Size, as_size
from hetero_gateway.planner.stages import holds_request, instance_memory

Types = dict[tuple[str, int], InstanceType]

# Relative, of a step's time. The built-in profiles are sums of measured operators or rescaled from
# others' measurements; how far off a whole engine is, their source does not say: a round figure.
DERIVED_UNCERTAINTY = 0.15
# Of a measured profile that does not state its error.
MEASURED_UNCERTAINTY = 0.05
_ORDER = ("measured", "derived", "roofline")


def instance_types(
    model: ModelShape,
    machines: Sequence[Machine],
    measured: Sequence[Profile],
    options: EngineOptions,
    *,
    needed_tokens: int,
    typical_tokens: float | None = None,
    method: Method = "fitted",
    find: Callable[[str], Accelerator],
    mean: MeanRequest | None = None,
    network: Network | None = None,
) -> tuple[Types, list[Unfit]]:
    """Every instance that the machines could hold, by (accelerator, size).

    Args:
        measured: profiles to take times from, measured and derived ones; the first of the best
            kind counts. Those of other models or accelerators are passed over.
        needed_tokens: prompt and output of the longest request; with ``max_model_len`` where that
            is longer.
        mean: of the requests; None: tensor parallelism alone. With it, the sizes of
            ``further_sizes`` that may win.
        find: the accelerator that a machine names, or ConfigError.
        network: between machines; None: every instance stays on one.

    Returns:
        The types, keyed by the accelerator as the machines name it; and what is not deployable,
        one entry per accelerator and tensor parallelism.

    Raises:
        ConfigError: an accelerator that ``find`` does not have.
    """
    needed = max(needed_tokens, options.max_model_len or 1)
    largest: dict[str, int] = {}
    for machine in machines:
        largest[machine.accelerator] = max(largest.get(machine.accelerator, 0), machine.count)
    ask = _Asked(
        model, measured, options, needed, method,
        needed if typical_tokens is None else typical_tokens, network,
    )  # fmt: skip
    types: Types = {}
    unfit: list[Unfit] = []
    for name, count in largest.items():
        device = find(name)
        most = min(count, device.max_group)
        found = [_type(ask, name, device, t, most) for t in range(1, most + 1)]
        unfit += [each for each in found if isinstance(each, Unfit)]
        fitting = [each for each in found if isinstance(each, InstanceType)]
        if mean is not None:
            further = [_type(ask, name, device, size, most) for size in within(model, most)]
            fitting += _kept(fitting, further, mean, unfit)
            if network is not None:
                sizes = _spans(model, machines, name)
                wider = [_type(ask, name, device, size, most) for size in sizes]
                fitting += _kept(fitting, wider, mean, unfit)
        types |= {(name, each.size): each for each in fitting}
    return types, unfit


def _kept(
    plain: Sequence[InstanceType],
    further: Sequence[InstanceType | Unfit],
    mean: MeanRequest,
    unfit: list[Unfit],
) -> list[InstanceType]:
    """Those that go into the search; where nothing fits, what comes nearest is told."""
    fitting = [each for each in further if isinstance(each, InstanceType)]
    lacking = [each for each in further if isinstance(each, Unfit) and each.shortfall_bytes > 0]
    if not plain and not fitting and lacking:
        unfit.append(min(lacking, key=lambda each: each.shortfall_bytes))
    return promising(plain, fitting, mean)


def _spans(model: ModelShape, machines: Sequence[Machine], name: str) -> list[Size]:
    """Sizes over several of the machines that have this accelerator, equal ones together."""
    counts = Counter((m.count, m.price_per_hour_usd) for m in machines if m.accelerator == name)
    return list(
        dict.fromkeys(
            size for (count, _), n in sorted(counts.items(), key=str)
            for size in across(model, count, n)
        )
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """What is the same for all types of one question."""

    model: ModelShape
    measured: Sequence[Profile]
    options: EngineOptions
    needed: int
    method: Method
    typical: float
    network: Network | None


def _matching(
    profiles: Sequence[Profile], name: str, device: Accelerator, model: ModelShape, t: int
) -> list[Profile]:
    """Those of this engine, best known first."""
    names = {folded(name), folded(device.name)}
    found = [
        profile
        for profile in profiles
        if profile.tensor_parallel == t
        and folded(profile.gpu) in names
        and folded(profile.model) == folded(model.name)
        and _same_storage(profile, model)
    ]
    return sorted(found, key=lambda profile: _ORDER.index(_how(profile)))


def _same_storage(profile: Profile, model: ModelShape) -> bool:
    """Times of one storage are not those of another; a profile that says nothing is of 16 bits."""
    stored = profile.source.get("quantization")
    if model.quantization is None:
        return stored in (None, "", "none") and model.dtype_bytes == 2
    return stored == model.quantization.method


def _how(profile: Profile) -> str:
    how = profile.source.get("how")
    return how if how in _ORDER else "derived"


def _type(
    ask: _Asked, name: str, device: Accelerator, size: int, largest: int
) -> InstanceType | Unfit:
    """One size, or why it cannot be; ``largest`` is what its machine has."""
    size = as_size(size)
    model, options, needed = ask.model, ask.options, ask.needed
    reason = refusal(model, size) or precision_refusal(model, device)
    if reason is None and size > 1 and device.link_bytes_per_s <= 0:
        reason = f"no link between two {device.name} is known"
    if reason is not None:
        return Unfit(name, size, reason)
    profiles = _matching(ask.measured, name, device, model, size.tensor)
    memory = _memory(model, device, size, profiles, options, needed, ask.method)
    if not holds_request(memory, size, needed):
        return _unfit(ask, name, device, size, memory, largest)
    sequences = options.sequences(device) * size.data
    room = memory.kv_capacity_tokens
    if memory.how != "measured":
        room = tokens_at(memory, model, size.tensor, options, ask.typical)
    profile, uncertainty = _times(ask, device, size, profiles, sequences, room)
    return InstanceType(name, size, profile, memory, uncertainty)


def _unfit(
    ask: _Asked, name: str, device: Accelerator, size: Size, memory: MemoryEstimate, largest: int
) -> Unfit:
    needed = ask.needed
    reason = _too_small(memory, needed * size.data)
    if not size.plain:
        each = ask.model.kv_token_bytes(size.tensor, ask.options.kv_dtype) / size.pipeline
        missing = needed * each - memory.kv_bytes / size.pipeline / size.data
        return Unfit(name, size, reason, max(1.0, missing / size.tensor))
    t = size.tensor
    return Unfit(
        name,
        size,
        reason,
        shortfall_bytes(memory, ask.model, device, t, ask.options, needed),
        remedies(
            ask.model, device, t, ask.options,
            needed_tokens=needed, largest=largest, method=ask.method,
        ),
    )  # fmt: skip


def _times(
    ask: _Asked,
    device: Accelerator,
    size: Size,
    profiles: Sequence[Profile],
    sequences: int,
    room: int,
) -> tuple[Profile, float]:
    """Its profile, and how uncertain its step times are."""
    if size.experts:
        profile = expert_parallel_profile(device, ask.model, size, sequences, room)
        return profile, max(device.uncertainty, expert_parallel.UNCERTAINTY)
    if profiles:
        profile = dataclasses.replace(profiles[0], kv_capacity_tokens=room, max_num_seqs=sequences)
        uncertainty = _uncertainty(profile, device)
    else:
        guess = roofline_profile(device, ask.model, size.tensor, sequences, room)
        assert guess is not None  # there is room for a token
        profile, uncertainty = guess, device.uncertainty
    if (
        size.tensor > 2
        and device.link_bytes_per_s < SLOT_BYTES_PER_S
        and _how(profile) != "measured"
    ):
        uncertainty = max(uncertainty, SLOTS_UNCERTAINTY)
    if size.pipeline == 1:
        return profile, uncertainty
    profile = pipelined_profile(profile, ask.model, device, size, ask.network)
    return profile, math.hypot(uncertainty, pipelines.UNCERTAINTY)


def _too_small(memory: MemoryEstimate, needed: int) -> str:
    if memory.kv_bytes <= 0:
        return "the model leaves no memory for KV"
    if memory.kv_capacity_tokens < needed:
        return f"room for {memory.kv_capacity_tokens} KV tokens, one request needs {needed}"
    return (
        f"too tight: room for {memory.kv_capacity_tokens} KV tokens, give or take "
        f"{memory.uncertainty:.0%}, one request needs {needed}"
    )


def _memory(
    model: ModelShape,
    device: Accelerator,
    size: Size,
    profiles: Sequence[Profile],
    options: EngineOptions,
    needed: int,
    method: Method,
) -> MemoryEstimate:
    """Modelled; or as a live engine reported it, if it was told the same."""
    memory = instance_memory(model, device, size, options, method, needed_tokens=needed)
    if not size.plain or not profiles or _how(profiles[0]) != "measured":
        return memory
    profile = profiles[0]
    if not _same_settings(profile.source, options, profile.max_num_seqs, device):
        return memory
    tokens = profile.kv_capacity_tokens
    return dataclasses.replace(
        memory,
        kv_capacity_tokens=tokens,
        kv_bytes=tokens * model.kv_token_bytes(size.tensor, options.kv_dtype),
        uncertainty=0.0,
        tight=False,
        how="measured",
    )


def _same_settings(
    source: Any, options: EngineOptions, max_num_seqs: int, device: Accelerator
) -> bool:
    """Whether a profile's own KV capacity holds here: only if it says what it was measured with."""
    stated = source.get("gpu_memory_utilization")
    return (
        stated is not None
        and abs(float(stated) - options.utilisation) < 1e-6
        and max_num_seqs == options.sequences(device)
        and source.get("kv_cache_dtype", "auto") == options.kv_dtype
    )


def _uncertainty(profile: Profile, device: Accelerator) -> float:
    """Of a step's time: what the profile states, or what its kind of source is worth."""
    how = _how(profile)
    if how == "roofline":
        return device.uncertainty
    if how == "derived":
        # Its error is that of the fit to the derived times, not of those.
        return DERIVED_UNCERTAINTY
    stated = profile.source.get("error")
    errors = list(stated.values()) if isinstance(stated, Mapping) else [stated]
    return max((float(e) for e in errors if isinstance(e, int | float)), default=0.0) or (
        MEASURED_UNCERTAINTY
    )
