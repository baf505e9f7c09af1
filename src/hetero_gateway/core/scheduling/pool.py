"""What serves one model name, as arrays: constants, capacities, contexts; and who fits a request.

The scheduler builds a pool on first use and throws it away when the membership changes; all that it
shows stays as it is. Loads are not here: an instance has one load, whatever names it serves.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.costs.cost_model import FloatArray, ProfileTable, request_time_s
from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.instances.table import Slots
from hetero_gateway.core.policies.base import Member
from hetero_gateway.core.types import InstanceId, InstanceSpec, Reject, RejectReason, Request

UNLIMITED_TOKENS = 2**40  # the KV capacity of an instance whose capacity nobody knows
# Some machine: about an A800 with a model of 8 billion parameters (instance_profiles.csv). What is
# not known of a machine's speed is learnt by the speed factor; this only gives the proportions.
_GENERIC = Constants(5e-5, 0, 0, 1e-2, 8e-8, 1e-4, 0, 1e-2)


class Eligible(NamedTuple):
    """Who may get a request: a judgement that holds while its pool does.

    ``kept``: positions in the pool; None: all. ``excluded``: the others, and why.
    """

    pool: Pool
    kept: list[int] | None
    excluded: tuple[tuple[InstanceSpec, str], ...]

    def positions(self) -> Collection[int]:
        """Who may get it, as positions in the pool."""
        return range(len(self.pool.ids)) if self.kept is None else self.kept

    def without(self, reserved: Collection[int], why: str) -> Eligible | None:
        """The same but for these; None: nobody is left."""
        pool, _, excluded = self
        kept = [i for i in self.positions() if i not in reserved]
        if not kept:
            return None
        left_out = tuple((pool.specs[i], why) for i in self.positions() if i in reserved)
        return Eligible(pool, kept, excluded + left_out)


class Pool:
    """The available instances of one model, as arrays."""

    def __init__(
        self,
        members: list[tuple[InstanceSpec, InstanceState]],
        absent: Iterable[tuple[InstanceSpec, str]],
        reference: tuple[float, float],
        stand_ins: Mapping[InstanceId, Constants] | None = None,
    ) -> None:
        """``stand_ins``: constants of those without a profile; None: a mean, or counts."""
        self.specs = tuple(spec for spec, _ in members)
        self.ids = tuple(spec.instance_id for spec in self.specs)
        self.absent = tuple(absent)
        self.states = tuple(state for _, state in members)
        self.slots: NDArray[np.intp] = np.array([s.slot for s in self.states], dtype=np.intp)
        self.where = _where(self.slots)
        self.weight = np.array([spec.weight for spec in self.specs])
        profiles = _effective_profiles(self.specs, stand_ins)
        distinct = list(dict.fromkeys(profiles))
        self.table = ProfileTable(distinct)
        index = {profile: i for i, profile in enumerate(distinct)}
        # None when every instance has a profile of its own: then the table's order is the pool's.
        self.profile_of: NDArray[np.intp] | None = None
        if len(distinct) < len(profiles):
            self.profile_of = np.array([index[p] for p in profiles], dtype=np.intp)
        self.kv_capacity_tokens = _assumed_kv_capacities(self.specs)
        capacities = [_capacity_per_s(p, reference) for p in distinct]
        self.capacity = np.array([capacities[index[p]] for p in profiles])
        constants = np.array([dataclasses.astuple(p.constants) for p in profiles])
        self.constants = np.ascontiguousarray(constants.T)
        self.max_num_seqs = np.array([float(p.max_num_seqs) for p in profiles])
        # A request of more sequences fills every instance.
        self.most_sequences = float(self.max_num_seqs.max(initial=0))
        self.members = tuple(
            Member(
                *(
                    *dataclasses.astuple(p.constants),
                    float(capacity),
                    float(p.kv_capacity_tokens),
                    float(p.max_num_seqs),
                    spec.weight,
                )
            )
            for spec, p, capacity in zip(self.specs, profiles, self.kv_capacity_tokens, strict=True)
        )
        self._typical_lengths = (0.0, 0.0)
        self._typical_times_s = np.ones(len(profiles))
        self._typical_plain: list[float] = []
        self.profiled = any(spec.profile is not None for spec in self.specs)
        self.stands_in = any(spec.profile is None for spec in self.specs)
        self.max_model_len = np.array([float(s.max_model_len or math.inf) for s in self.specs])
        self.shortest_context_tokens = float(self.max_model_len.min(initial=math.inf))
        self.longest_context_tokens = float(self.max_model_len.max(initial=0))
        # The largest that a single instance can hold: one may have the context, one the memory.
        largest = [
            min(s.max_model_len or math.inf, p.kv_capacity_tokens)
            for s, p in zip(self.specs, profiles, strict=True)
        ]
        self.longest_request_tokens = max(largest, default=0)
        self._longest_of = dict(zip(self.ids, largest, strict=True))
        self._all = Eligible(self, None, self.absent)

    def request_times_s(
        self, prompt_tokens: float, output_tokens: float, *, as_if_it_fitted: bool = False
    ) -> FloatArray:
        """T_r^s of one sequence on each instance, seconds; see ``ProfileTable``."""
        times = self.table.request_times_s(
            prompt_tokens, output_tokens, as_if_it_fitted=as_if_it_fitted
        )
        return times if self.profile_of is None else times[self.profile_of]

    def typical_request_time_s(
        self, prompt_tokens: float, output_tokens: float, *, keep: bool
    ) -> FloatArray:
        """T of a typical request, as if it fitted; the same until the lengths move by a twentieth.

        ``keep``: it is the typical one from now on.
        """
        old_prompt, old_output = self._typical_lengths
        if (
            abs(prompt_tokens - old_prompt) <= old_prompt / 20
            and abs(output_tokens - old_output) <= old_output / 20
        ):
            return self._typical_times_s
        times = self.request_times_s(prompt_tokens, output_tokens, as_if_it_fitted=True)
        times = np.maximum(times, 1e-9)
        if keep:
            self._typical_lengths = (prompt_tokens, output_tokens)
            self._typical_times_s = times
            self._typical_plain = times.tolist()
        return times

    def typical_plain(self, prompt_tokens: float, output_tokens: float) -> list[float]:
        """The same as a list, kept."""
        self.typical_request_time_s(prompt_tokens, output_tokens, keep=True)
        return self._typical_plain

    def eligible(self, request: Request, exclude: Collection[InstanceId] = ()) -> Eligible | Reject:
        """Who may get the request: it fits, was not tried there, and is not bound elsewhere."""
        tokens = request.prompt_tokens + request.predicted_output_tokens
        if (
            request.prompt_tokens < self.shortest_context_tokens
            and tokens <= self.table.smallest_capacity_tokens
            and not exclude
            and request.only is None
        ):
            return self._all  # the common case
        return self._judge(request, exclude)

    def shorten(self, request: Request) -> Request | None:
        """A request that fits nowhere by its estimates, as long as the largest instance holds.

        None: it is as long as it says, or what is certain of it fits nowhere.
        """
        room = self.longest_request_tokens
        if request.only is not None:
            room = self._longest_of.get(request.only, 0)
        certain = request.certain_tokens
        if certain is None or not 0 < room < math.inf or certain > room:
            return None
        output = request.predicted_output_tokens
        prompt = max(1, min(request.prompt_tokens, int(room) - (output > 0)))
        return request._replace(
            prompt_tokens=prompt,
            predicted_output_tokens=min(output, max(0.0, float(int(room) - prompt))),
        )

    def _judge(self, request: Request, exclude: Collection[InstanceId]) -> Eligible | Reject:
        # The context must hold one output token, too, where any is generated.
        shortest_tokens = request.prompt_tokens + (request.predicted_output_tokens > 0)
        times = self.request_times_s(request.prompt_tokens, request.predicted_output_tokens)
        kept: list[int] = []
        excluded: list[tuple[InstanceSpec, str]] = []
        for i, spec in enumerate(self.specs):
            if spec.instance_id in exclude:
                excluded.append((spec, "tried already"))
            elif request.only is not None and spec.instance_id != request.only:
                excluded.append((spec, f"what it continues is on {request.only}"))
            elif shortest_tokens > self.max_model_len[i]:
                excluded.append((spec, f"context of {spec.max_model_len} tokens is too short"))
            elif not math.isfinite(times[i]):
                capacity = int(self.kv_capacity_tokens[i])
                excluded.append((spec, f"KV capacity of {capacity} tokens is too small"))
            else:
                kept.append(i)
        if kept:
            everybody = len(kept) == len(self.specs)
            return Eligible(self, None if everybody else kept, self.absent + tuple(excluded))
        if any(why == "tried already" for _, why in excluded):
            return Reject(RejectReason.NO_AVAILABLE_INSTANCE, "every instance was tried")
        if request.only is not None and request.only not in self.ids:
            detail = f"what the request continues is on {request.only}, which is not available"
            return Reject(RejectReason.NO_AVAILABLE_INSTANCE, detail)
        return Reject(
            RejectReason.FITS_NO_INSTANCE,
            f"This model's maximum context length is {int(self.longest_request_tokens)} tokens. "
            f"However, your prompt has about {request.prompt_tokens} tokens, and no instance can "
            f"hold it and an output of about {round(request.predicted_output_tokens)}.",
        )


def _where(slots: NDArray[np.intp]) -> Slots:
    if slots.size and (np.diff(slots) == 1).all():
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots


def stand_in(spec: InstanceSpec, others: Iterable[InstanceSpec]) -> Constants:
    """What an unprofiled instance is taken for until it was seen: the median of ``others``.

    Where none of them has a profile, ``_GENERIC``. ``weight`` times as fast.
    """
    known = [s.profile.constants for s in others if s.profile is not None]
    names = [f.name for f in dataclasses.fields(Constants)]
    middle = (
        Constants(*(statistics.median(getattr(c, n) for c in known) for n in names))
        if known
        else _GENERIC
    )
    return middle.scaled(1 / spec.weight)


def _effective_profiles(
    specs: tuple[InstanceSpec, ...], stand_ins: Mapping[InstanceId, Constants] | None
) -> list[Profile]:
    """A profile for everyone, so that an unprofiled instance takes part from the first request.

    Without ``stand_ins`` it gets the mean of its pool's, over its weight, and with none profiled,
    loads are counts by weight.
    """
    known = [spec.profile for spec in specs if spec.profile is not None]
    if known:
        names = [f.name for f in dataclasses.fields(Constants)]
        mean = Constants(*(sum(getattr(p.constants, n) for p in known) / len(known) for n in names))
    else:
        mean = Constants(0, 1, 0, 0, 0, 0, 0, 1e-9)
    result = []
    for spec in specs:
        profile = spec.profile
        if profile is None:
            c = mean.scaled(1 / spec.weight) if stand_ins is None else stand_ins[spec.instance_id]
            capacity = spec.kv_capacity_tokens or UNLIMITED_TOKENS
            profile = Profile("unknown", "unknown", 1, c, capacity)
        result.append(profile)
    return result


def _assumed_kv_capacities(specs: tuple[InstanceSpec, ...]) -> FloatArray:
    """What Eq. (8) divides by: where nobody knows it, the mean of the pool's, by weight.

    Were its usage 0 for want of a capacity, its w would stay where that of the others grows with
    e^(θ·kvusage), and a backlog would go nearly all to it. Nothing is refused because of this.
    """
    told = [s.profile.kv_capacity_tokens if s.profile else s.kv_capacity_tokens for s in specs]
    known = [tokens for tokens in told if tokens is not None]
    mean = sum(known) / len(known) if known else UNLIMITED_TOKENS
    return np.array(
        [mean * s.weight if t is None else t for s, t in zip(specs, told, strict=True)], dtype=float
    )


def _capacity_per_s(profile: Profile, reference: tuple[float, float]) -> float:
    """Reference requests per second; one at a time where the KV cache holds less than one."""
    reference_tokens = math.ceil(sum(reference))
    if profile.kv_capacity_tokens < reference_tokens:
        profile = dataclasses.replace(profile, kv_capacity_tokens=reference_tokens)
    return 1 / max(request_time_s(profile, *reference), 1e-9)
