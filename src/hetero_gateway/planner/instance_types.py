"""The engines that could be deployed: every accelerator kind at every size.

A type has its memory (``memory``) and its times: a profile measured on such hardware if the caller
has one, else a derived one, else a roofline of the data sheet. Types that cannot be deployed are
listed with the reason, the shortfall, and possible remedies.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from hetero_gateway.core.costs.cost_model import decode_step_time_s, prefill_time_s
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.nearest import folded
from hetero_gateway.planner import further_profiles
from hetero_gateway.planner.accelerators import Accelerator
from hetero_gateway.planner.further_profiles import (
    Network,
    expert_parallel_profile,
    pipelined_profile,
)
from hetero_gateway.planner.memory import EngineOptions, Method, StartUp, tokens_at
from hetero_gateway.planner.model_shape import ModelShape
from hetero_gateway.planner.parallelism import precision_refusal, refusal
from hetero_gateway.planner.plan import InstanceType, Key, Machine, MemoryEstimate, Unfit
from hetero_gateway.planner.roofline import SLOT_BYTES_PER_S, SLOTS_UNCERTAINTY, roofline_profile
from hetero_gateway.planner.sizes import Size, as_size
from hetero_gateway.planner.stages import holds_request, instance_memory
from hetero_gateway.sim.alone import Mix

Types = dict[Key, InstanceType]

# Relative, of a step's time. The built-in profiles are sums of measured operators or rescaled from
# others' measurements, whose source does not give the error of a whole engine: a round figure.
DERIVED_UNCERTAINTY = 0.15
# Of a measured profile that does not state its error.
MEASURED_UNCERTAINTY = 0.05
_ORDER = ("measured", "derived", "roofline")
# Most machines that one instance may span.
_MOST_MACHINES = 8
# Relative to the best plain size's throughput per accelerator: below it, a further size is not
# simulated. The closed form is off by up to a tenth against the simulator.
_NEAR = 0.9


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
    mix: Mix | None = None,
    network: Network | None = None,
) -> tuple[Types, list[Unfit]]:
    """Every instance that the machines could hold, by (accelerator, size).

    Args:
        measured: profiles to take times from, measured and derived ones; the first of the best
            kind counts. Those of other models or accelerators are ignored.
        needed_tokens: prompt and output of the longest request; with ``max_model_len`` if that
            is longer.
        mix: the requests; None: only tensor parallelism. With it, further sizes that may win.
        find: the accelerator that a machine names, or ConfigError.
        network: between machines; None: every instance stays on one.

    Returns:
        The types, keyed by the accelerator as the machines name it; and those that cannot be
        deployed, one entry per accelerator and tensor parallelism.

    Raises:
        ConfigError: an accelerator that ``find`` does not have.
    """
    needed = max(needed_tokens, options.max_model_len or 1)
    typical = needed if typical_tokens is None else typical_tokens
    types: Types = {}
    unfit: list[Unfit] = []
    for name in dict.fromkeys(machine.accelerator for machine in machines):
        device = find(name)
        own = [machine for machine in machines if machine.accelerator == name]
        most = min(max(machine.count for machine in own), device.max_group)
        kind = _Kind(name, device, most, model, measured, options, needed, typical, method, network)
        found = [kind.type(t) for t in range(1, most + 1)]
        unfit += [each for each in found if isinstance(each, Unfit)]
        fitting = [each for each in found if isinstance(each, InstanceType)]
        if mix is not None:
            fitting += _kept(fitting, map(kind.type, within(model, most)), mix, unfit)
            if network is not None:
                fitting += _kept(fitting, map(kind.type, _spans(model, own)), mix, unfit)
        types |= {(name, each.size): each for each in fitting}
    return types, unfit


def _kept(
    plain: Sequence[InstanceType],
    further: Iterable[InstanceType | Unfit],
    mix: Mix,
    unfit: list[Unfit],
) -> list[InstanceType]:
    """Those that go into the search; if nothing fits, the nearest misses are reported."""
    fitting, lacking = [], []
    for each in further:
        if isinstance(each, InstanceType):
            fitting.append(each)
        elif each.shortfall_bytes > 0:
            lacking.append(each)
    if not plain and not fitting and lacking:
        unfit.append(min(lacking, key=lambda each: each.shortfall_bytes))
    return promising(plain, fitting, mix)


def _spans(model: ModelShape, machines: Sequence[Machine]) -> list[Size]:
    """Sizes over several machines of one accelerator, equal ones together."""
    counts = Counter((m.count, m.price_per_hour_usd) for m in machines)
    sizes = (across(model, count, n) for (count, _), n in sorted(counts.items(), key=str))
    return list(dict.fromkeys(itertools.chain.from_iterable(sizes)))


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of accelerator, and the properties common to all of its sizes.

    Args:
        name: as the machines have it. largest: of one machine.
        needed, typical: tokens of the longest request, and of a usual one.
    """

    name: str
    device: Accelerator
    largest: int
    model: ModelShape
    measured: Sequence[Profile]
    options: EngineOptions
    needed: int
    typical: float
    method: Method
    network: Network | None

    def type(self, asked: int) -> InstanceType | Unfit:
        """One size, or why it is impossible."""
        size, device = as_size(asked), self.device
        reason = refusal(self.model, size) or precision_refusal(self.model, device)
        if reason is None and size > 1 and device.link_bytes_per_s <= 0:
            reason = f"no link between two {device.name} is known"
        if reason is not None:
            return Unfit(self.name, size, reason)
        profiles = self._matching(size.tensor)
        memory = self._memory(size, profiles)
        if not holds_request(memory, size, self.needed):
            return self._unfit(size, memory)
        room = memory.kv_capacity_tokens
        if memory.how != "measured":
            room = tokens_at(memory, self.model, size.tensor, self.options, self.typical)
        profile, uncertainty = self._times(size, profiles, room)
        return InstanceType(self.name, size, profile, memory, uncertainty)

    def _matching(self, t: int) -> list[Profile]:
        """Profiles of this engine, best source first."""
        names = {folded(self.name), folded(self.device.name)}
        found = [
            profile
            for profile in self.measured
            if profile.tensor_parallel == t
            and folded(profile.gpu) in names
            and folded(profile.model) == folded(self.model.name)
            and _same_storage(profile, self.model)
        ]
        return sorted(found, key=lambda profile: _ORDER.index(_how(profile)))

    def _unfit(self, size: Size, memory: MemoryEstimate) -> Unfit:
        reason = _too_small(memory, self.needed * size.data)
        if not size.plain:
            each = self.model.kv_token_bytes(size.tensor, self.options.kv_dtype) / size.pipeline
            missing = self.needed * each - memory.kv_bytes / size.pipeline / size.data
            return Unfit(self.name, size, reason, max(1.0, missing / size.tensor))
        start = StartUp(self.model, self.device, size.tensor, self.options)
        missing = start.shortfall_bytes(memory, self.needed)
        remedies = start.remedies(self.method, self.needed, self.largest)
        return Unfit(self.name, size, reason, missing, remedies)

    def _times(self, size: Size, profiles: Sequence[Profile], room: int) -> tuple[Profile, float]:
        """Its profile, and the uncertainty of its step times."""
        device, model = self.device, self.model
        sequences = self.options.sequences(device) * size.data
        if size.experts:
            profile = expert_parallel_profile(device, model, size, sequences, room)
            profile = dataclasses.replace(profile, plans_ahead=self.options.plans_ahead)
            return profile, max(device.uncertainty, further_profiles.EXPERTS_UNCERTAINTY)
        if profiles:
            profile = dataclasses.replace(
                profiles[0], kv_capacity_tokens=room, max_num_seqs=sequences
            )
            uncertainty = _uncertainty(profile, device)
        else:
            profile = roofline_profile(
                device, model, size.tensor, sequences, room, plans_ahead=self.options.plans_ahead
            )
            uncertainty = device.uncertainty
        slots = size.tensor > 2 and device.link_bytes_per_s < SLOT_BYTES_PER_S
        if slots and _how(profile) != "measured":
            uncertainty = max(uncertainty, SLOTS_UNCERTAINTY)
        if size.pipeline == 1:
            return profile, uncertainty
        profile = pipelined_profile(profile, model, device, size, self.network)
        return profile, math.hypot(uncertainty, further_profiles.UNCERTAINTY)

    def _memory(self, size: Size, profiles: Sequence[Profile]) -> MemoryEstimate:
        """Modelled; or as a live engine with the same settings reported it."""
        options, model = self.options, self.model
        memory = instance_memory(
            model, self.device, size, options, self.method, needed_tokens=self.needed
        )
        if not size.plain or not profiles or _how(profiles[0]) != "measured":
            return memory
        source, tokens = profiles[0].source, profiles[0].kv_capacity_tokens
        stated = source.get("gpu_memory_utilization")
        same = (
            stated is not None
            and abs(float(stated) - options.utilisation) < 1e-6
            and profiles[0].max_num_seqs == options.sequences(self.device)
            and source.get("kv_cache_dtype", "auto") == options.kv_dtype
        )
        if not same:
            return memory
        return dataclasses.replace(
            memory,
            kv_capacity_tokens=tokens,
            kv_bytes=tokens * model.kv_token_bytes(size.tensor, options.kv_dtype),
            uncertainty=0.0,
            tight=False,
            how="measured",
        )


def _same_storage(profile: Profile, model: ModelShape) -> bool:
    """Times depend on the storage; a profile that does not state it is of 16 bits."""
    stored = profile.source.get("quantization")
    if model.quantization is None:
        return stored in (None, "", "none") and model.dtype_bytes == 2
    return stored == model.quantization.method


def _how(profile: Profile) -> str:
    how = profile.source.get("how")
    return how if how in _ORDER else "derived"


def _too_small(memory: MemoryEstimate, needed: int) -> str:
    if memory.kv_bytes <= 0:
        return "the model leaves no memory for KV"
    if memory.kv_capacity_tokens < needed:
        return f"room for {memory.kv_capacity_tokens} KV tokens, one request needs {needed}"
    return (
        f"too tight: room for {memory.kv_capacity_tokens} KV tokens, give or take "
        f"{memory.uncertainty:.0%}, one request needs {needed}"
    )


def _uncertainty(profile: Profile, device: Accelerator) -> float:
    """Of a step's time: stated by the profile, or typical of its kind of source."""
    how = _how(profile)
    if how == "roofline":
        return device.uncertainty
    if how == "derived":
        # Its error is that of the fit to the derived times, not theirs.
        return DERIVED_UNCERTAINTY
    stated = profile.source.get("error")
    errors = list(stated.values()) if isinstance(stated, Mapping) else [stated]
    return max((float(e) for e in errors if isinstance(e, int | float)), default=0.0) or (
        MEASURED_UNCERTAINTY
    )


# Sizes beyond tensor parallelism: all are computed in closed form, and few go into the search.


def within(model: ModelShape, most: int) -> Iterator[Size]:
    """Sizes that cut so many accelerators of one machine into equal parts, as vLLM accepts them."""
    for t in range(1, most + 1):
        more = [n for n in range(2, most // t + 1) if most % (n * t) == 0]
        sizes = [Size(t, pipeline) for pipeline in more]
        if model.moe_layers:
            if refusal(model, t) is not None:
                sizes.append(Size(t, experts=True))
            sizes += [Size(t, data=data, experts=True) for data in more]
        yield from (size for size in sizes if refusal(model, size) is None)


def across(model: ModelShape, count: int, machines: int) -> Iterator[Size]:
    """Sizes that use all of so many accelerators on each of several machines, fewest first."""
    for together in range(2, min(machines, _MOST_MACHINES) + 1):
        for t in range(count, 0, -1):
            if count % t:
                continue
            size = Size(t, together * count // t, machines=together)
            if refusal(model, size) is None:
                yield size


def promising(
    plain: Sequence[InstanceType], further: Sequence[InstanceType], mix: Mix
) -> list[InstanceType]:
    """Of ``further``, the most efficient per accelerator, and the smallest that comes near.

    Near the ``plain`` ones' efficiency, plus the additional uncertainty: an unmeasured size
    should not win by a little. If no plain one fits, the smallest serves at all.
    """
    known = [(worth(f, mix), f.time_uncertainty) for f in plain]

    def least(uncertainty: float) -> float:
        shares = (value * max(_NEAR, 1 + uncertainty - own) for value, own in known)
        return max(shares, default=0.0)

    per_accelerator = [(worth(f, mix), f) for f in further]
    near = [(value, f) for value, f in per_accelerator if value >= least(f.time_uncertainty)]
    if not near:
        return []
    best = max(near, key=lambda pair: pair[0])[1]
    smallest = min(near, key=lambda pair: (as_size(pair[1].size).accelerators, -pair[0]))[1]
    return [best] if best is smallest else [best, smallest]


def worth(found: InstanceType, mix: Mix) -> float:
    """Tokens/s of one accelerator with a full batch of mean requests, in closed form."""
    profile, batch = found.profile, mix.batch(found.profile)
    step_s = decode_step_time_s(profile.constants, batch, mix.held_tokens)
    prefill_s = prefill_time_s(profile.constants, 1, mix.mean_prompt) - profile.constants.p4
    stay_s = mix.mean_output * step_s + batch * max(0.0, prefill_s)
    return batch * mix.mean_tokens / stay_s / as_size(found.size).accelerators
