"""The engines that could be deployed: every accelerator kind at every tensor parallelism.

A type has its memory (``memory``) and its times: a profile measured on such hardware where the
caller has one, else a derived one, else a roofline of the data sheet. What cannot be deployed is
listed with the reason, what is missing, and what would help. Files of profiles are the caller's
business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.nearest import folded
from hetero_gateway.planner.accelerators import Accelerator, accelerator
from hetero_gateway.planner.memory import (
    EngineOptions,
    Method,
    estimate_memory,
    is_feasible,
    remedies,
    shortfall_bytes,
    tokens_at,
)
from hetero_gateway.planner.model_shape import ModelShape
from hetero_gateway.planner.parallelism import precision_refusal, refusal
from hetero_gateway.planner.plan import InstanceType, Machine, MemoryEstimate, Unfit
from hetero_gateway.planner.roofline import (
    SLOT_BYTES_PER_S,
    SLOTS_UNCERTAINTY,
    roofline_profile,
)

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
    own: Mapping[str, Accelerator] | None = None,
) -> tuple[Types, list[Unfit]]:
    """Every instance that the machines could hold, by (accelerator, tensor_parallel).

    Args:
        measured: profiles to take times from, measured and derived ones; the first of the best
            kind counts. Those of other models or accelerators are passed over.
        needed_tokens: prompt and output of the longest request; with ``max_model_len`` where that
            is longer.

    Returns:
        The types, keyed by the accelerator as the machines name it; and what is not deployable,
        one entry per accelerator and tensor parallelism.

    Raises:
        ConfigError: an accelerator that is not in the catalogue.
    """
    needed = max(needed_tokens, options.max_model_len or 1)
    largest: dict[str, int] = {}
    for machine in machines:
        largest[machine.accelerator] = max(largest.get(machine.accelerator, 0), machine.count)
    types: Types = {}
    unfit: list[Unfit] = []
    for name, count in largest.items():
        device = accelerator(name, own)
        for t in range(1, min(count, device.max_group) + 1):
            profiles = _matching(measured, name, device, model, t)
            found = _type(
                model, device, t, profiles, options, needed, count, method,
                needed if typical_tokens is None else typical_tokens,
            )  # fmt: skip
            if isinstance(found, Unfit):
                unfit.append(dataclasses.replace(found, accelerator=name))
            else:
                types[name, t] = dataclasses.replace(found, accelerator=name)
    return types, unfit


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
    model: ModelShape,
    device: Accelerator,
    t: int,
    profiles: Sequence[Profile],
    options: EngineOptions,
    needed: int,
    largest: int,
    method: Method,
    typical: float,
) -> InstanceType | Unfit:
    reason = refusal(model, t) or precision_refusal(model, device)
    if reason is None and t > 1 and device.link_bytes_per_s <= 0:
        reason = f"no link between two {device.name} is known"
    if reason is not None:
        return Unfit(device.name, t, reason)
    memory = _memory(model, device, t, profiles, options, needed, method)
    if not is_feasible(memory, needed):
        return Unfit(
            device.name,
            t,
            _too_small(memory, needed),
            shortfall_bytes(memory, model, device, t, options, needed),
            remedies(
                model, device, t, options,
                needed_tokens=needed, largest=min(largest, device.max_group), method=method,
            ),
        )  # fmt: skip
    sequences = options.sequences(device)
    room = memory.kv_capacity_tokens
    if memory.how != "measured":
        room = tokens_at(memory, model, t, options, typical)
    if profiles:
        profile = dataclasses.replace(profiles[0], kv_capacity_tokens=room, max_num_seqs=sequences)
        uncertainty = _uncertainty(profile, device)
    else:
        guess = roofline_profile(device, model, t, sequences, room)
        assert guess is not None  # is_feasible: there is room for a token
        profile, uncertainty = guess, device.uncertainty
    if t > 2 and device.link_bytes_per_s < SLOT_BYTES_PER_S and _how(profile) != "measured":
        uncertainty = max(uncertainty, SLOTS_UNCERTAINTY)
    return InstanceType(device.name, t, profile, memory, uncertainty)


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
    t: int,
    profiles: Sequence[Profile],
    options: EngineOptions,
    needed: int,
    method: Method,
) -> MemoryEstimate:
    """Modelled; or as a live engine reported it, if it was told the same."""
    memory = estimate_memory(model, device, t, options, method, needed_tokens=needed)
    if not profiles or _how(profiles[0]) != "measured":
        return memory
    profile = profiles[0]
    if not _same_settings(profile.source, options, profile.max_num_seqs, device):
        return memory
    tokens = profile.kv_capacity_tokens
    return dataclasses.replace(
        memory,
        kv_capacity_tokens=tokens,
        kv_bytes=tokens * model.kv_token_bytes(t, options.kv_dtype),
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
