"""The instances of one model name: constants, capacities, contexts; and who fits a request.

The scheduler builds a pool on first use and discards it when the membership changes; a pool itself
never changes. Loads are not here: an instance has one load, whatever names it serves.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from hetero_gateway.core.costs.cost_model import request_time_s
from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.policies.estimates import KV_ROOM, holds, seats
from hetero_gateway.core.policies.estimates import request_time_s as member_request_time_s
from hetero_gateway.core.policies.member import Member
from hetero_gateway.core.request import Request
from hetero_gateway.core.types import (
    MOST_SEQUENCES,
    MOST_TOKENS,
    InstanceId,
    InstanceSpec,
    Reject,
    RejectReason,
)

UNLIMITED_TOKENS: Final = 2**40  # stands for an unknown KV capacity
# A typical machine: about an A800 with a model of 8 billion parameters (instance_profiles.csv). The
# speed factor learns the true speed; this only gives the proportions.
_GENERIC: Final = Constants(5e-5, 0, 0, 1e-2, 8e-8, 1e-4, 0, 1e-2)
_TRIED: Final = "tried already"
# With fewer seats, none is kept free for a reserve of less than one; and this many prompt tokens
# may precede the next request: a quarter of a step of vLLM's default budget.
_FEW_SEATS: Final = 16
_MOST_PROMPT_TOKENS: Final = 512
# This many of the fastest are always examined, if not all are.
_FASTEST: Final = 8


class Eligible:
    """The instances that may get a request: a judgement that holds as long as its pool.

    ``kept``: positions in the pool, ascending; None: all. ``excluded``: the others, and why.
    """

    __slots__ = ("excluded", "kept", "pool")

    def __init__(
        self,
        pool: Pool,
        kept: list[int] | None,
        excluded: tuple[tuple[InstanceSpec, str], ...],
    ) -> None:
        self.pool = pool
        self.kept = kept
        self.excluded = excluded

    def positions(self) -> Sequence[int]:
        """The instances that may get it, as positions in the pool."""
        return range(len(self.pool.ids)) if self.kept is None else self.kept

    def has(self, position: int) -> bool:
        """Whether the instance at a position of the pool may get it."""
        if self.kept is None:
            return True
        at = bisect_left(self.kept, position)
        return at < len(self.kept) and self.kept[at] == position

    def without(self, reserved: Collection[int], why: str) -> Eligible | None:
        """The same without these; None: none is left."""
        pool = self.pool
        kept = [i for i in self.positions() if i not in reserved]
        if not kept:
            return None
        left_out = tuple((pool.specs[i], why) for i in self.positions() if i in reserved)
        return Eligible(pool, kept, self.excluded + left_out)

    def roomy(self, request: Request, reserve: float) -> Eligible | None:
        """Those that would have room for others after it; None: none.

        Room for a similar request, or a ``reserve`` of seats and memory (0 to 1) if that is more,
        with only short prompts ahead. On an engine with few seats none is kept free for a reserve
        of less than one: it would cost more than it is worth.
        """
        pool, full = self.pool, set()
        sequences, tokens = request.sequences, request.kv_tokens
        for i in self.positions():
            state, member = pool.states[i], pool.members[i]
            if member.max_num_seqs < _FEW_SEATS and reserve * member.max_num_seqs < 1:
                continue
            free_seats = max(float(sequences), reserve * member.max_num_seqs)
            free_tokens = max(float(tokens), reserve * member.kv_limit_tokens)
            peers = state.peers
            waiting = state.waiting + peers.waiting
            prompts = state.waiting_prefill + peers.waiting_prefill
            there = waiting + state.streaming + peers.streaming
            held = state.context + peers.context + state.waiting_prompt + peers.waiting_prompt
            if there and (
                there + sequences + free_seats > member.max_num_seqs
                or (waiting and prompts + request.prompt_tokens > _MOST_PROMPT_TOKENS)
                or held - state.shared_tokens + tokens + free_tokens
                > KV_ROOM * member.kv_limit_tokens
            ):
                full.add(i)
        return self.without(full, "kept for other clients") if full else self


class Pool:
    """The available instances of one model."""

    def __init__(
        self,
        members: list[tuple[InstanceSpec, InstanceState]],
        absent: Iterable[tuple[InstanceSpec, str]],
        reference: tuple[float, float],
        stand_ins: Mapping[InstanceId, Constants] | None = None,
    ) -> None:
        """``stand_ins``: constants of instances without a profile; None: a mean, or counts."""
        self.specs = tuple(spec for spec, _ in members)
        self.ids = tuple(spec.instance_id for spec in self.specs)
        self.absent = tuple(absent)
        self.states = tuple(state for _, state in members)
        self.position = {instance_id: i for i, instance_id in enumerate(self.ids)}
        profiles = _effective_profiles(self.specs, stand_ins)
        # Many instances share a few profiles.
        capacities = {p: _capacity_per_s(p, reference) for p in dict.fromkeys(profiles)}
        kinds = {p: float(kind) for kind, p in enumerate(capacities)}
        assumed_tokens = _assumed_kv_capacities(self.specs)
        self.members = tuple(
            Member._make(
                (
                    *dataclasses.astuple(p.constants),
                    *(tokens, float(p.kv_capacity_tokens), float(p.max_num_seqs)),
                    *(float(spec.weight), seats(float(p.max_num_seqs)), capacities[p], kinds[p]),
                    *(p.first_token_s, float(p.plans_ahead)),
                    *(p.experts_awake_at, p.spared_s),
                )
            )
            for spec, p, tokens in zip(self.specs, profiles, assumed_tokens, strict=True)
        )
        # Requests up to this length fit every profile.
        self.smallest_capacity_tokens = min(
            (member.kv_limit_tokens for member in self.members), default=math.inf
        )
        # A request of more sequences fills every instance.
        self.most_sequences = max((member.max_num_seqs for member in self.members), default=0.0)
        by_capacity = sorted(range(len(profiles)), key=lambda i: -self.members[i].capacity)
        self.fastest = by_capacity[:_FASTEST]
        # The instance whose times measure work; it may be short of memory.
        self.yardstick: Member | None = None
        if by_capacity:
            fastest = self.members[by_capacity[0]]
            self.yardstick = fastest._replace(kv_limit_tokens=float(UNLIMITED_TOKENS))
        self._typical_lengths = (0.0, 0.0)
        self._typical_times_s = [1.0] * len(profiles)
        self.profiled = any(spec.profile is not None for spec in self.specs)
        self.stands_in = any(spec.profile is None for spec in self.specs)
        self._contexts_tokens = [float(s.max_model_len or math.inf) for s in self.specs]
        self.shortest_context_tokens = min(self._contexts_tokens, default=math.inf)
        longest = max(self._contexts_tokens, default=0)
        # The longest sequence that any instance here takes; None: unknown.
        self.context_tokens = None if longest in (0, math.inf) else int(longest)
        # The largest that a single instance can hold: one may have the context, one the memory.
        largest = [
            min(s.max_model_len or math.inf, p.kv_capacity_tokens)
            for s, p in zip(self.specs, profiles, strict=True)
        ]
        self.longest_request_tokens = max(largest, default=0)
        self._longest_of = dict(zip(self.ids, largest, strict=True))
        self._all = Eligible(self, None, self.absent)
        # The last request judged by its lengths alone, and the limits used.
        self._judged = self._all
        self._judged_by: tuple[list[bool], list[bool]] = ([], [])

    def request_times_s(self, prompt_tokens: float, output_tokens: float) -> list[float]:
        """T_r^s of one sequence on each instance, s, as if it fitted."""
        return [member_request_time_s(m, prompt_tokens, output_tokens) for m in self.members]

    def typical_request_time_s(
        self, prompt_tokens: float, output_tokens: float, *, keep: bool
    ) -> list[float]:
        """T of a typical request, as if it fitted; recomputed when lengths move by a twentieth.

        ``keep``: these lengths are the typical ones from now on.
        """
        typical_prompt, typical_output = self._typical_lengths
        if (
            abs(prompt_tokens - typical_prompt) <= typical_prompt / 20
            and abs(output_tokens - typical_output) <= typical_output / 20
        ):
            return self._typical_times_s
        times_s = [max(t, 1e-9) for t in self.request_times_s(prompt_tokens, output_tokens)]
        if keep:
            self._typical_lengths = (prompt_tokens, output_tokens)
            self._typical_times_s = times_s
        return times_s

    def work_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """T of a request on the fastest instance, as if that had unlimited memory."""
        if self.yardstick is None:
            return 0.0
        return work_s(self.yardstick, prompt_tokens, output_tokens)

    def eligible(self, request: Request, exclude: Collection[InstanceId] = ()) -> Eligible | Reject:
        """The instances that the request fits, was not tried on, and is not bound away from.

        Raises:
            ValueError: a number of the request is negative, not finite or absurd.
        """
        if not (
            0 <= request.prompt_tokens <= MOST_TOKENS
            and 0 <= request.predicted_output_tokens <= MOST_TOKENS
            and 1 <= request.sequences <= MOST_SEQUENCES
        ):
            raise ValueError(request.what_is_wrong())
        tokens = request.prompt_tokens + request.predicted_output_tokens
        if (
            request.prompt_tokens < self.shortest_context_tokens
            and tokens <= self.smallest_capacity_tokens
            and not exclude
            and request.only is None
        ):
            return self._all  # the common case
        return self._judge(request, exclude)

    def shorten(self, request: Request) -> Request | None:
        """A request that fits nowhere by its estimates, shortened to what the largest instance
        holds.

        None: its length is certain, or its certain part fits nowhere.
        """
        room = self.longest_request_tokens
        if request.only is not None:
            room = self._longest_of.get(request.only, 0)
        certain = request.certain_tokens
        if certain is None or not 0 < room < math.inf or certain > room:
            return None
        output = request.predicted_output_tokens
        prompt = max(1, min(request.prompt_tokens, int(room) - (output > 0)))
        return request.replace(
            prompt_tokens=prompt,
            predicted_output_tokens=min(output, max(0.0, float(int(room) - prompt))),
        )

    def _judge(self, request: Request, exclude: Collection[InstanceId]) -> Eligible | Reject:
        # The context must hold one output token, too, if any is generated.
        shortest_tokens = request.prompt_tokens + (request.predicted_output_tokens > 0)
        tokens = request.prompt_tokens + request.predicted_output_tokens
        long_enough = [context >= shortest_tokens for context in self._contexts_tokens]
        large_enough = [holds(member, tokens) for member in self.members]
        if exclude or request.only is not None:
            judged = self._among(long_enough, large_enough, request.only, exclude)
        elif (long_enough, large_enough) == self._judged_by:
            judged = self._judged  # lengths fall into a few classes
        else:
            judged = self._among(long_enough, large_enough, None, ())
            self._judged_by, self._judged = (long_enough, large_enough), judged
        if judged.kept is None or judged.kept:
            return judged
        if exclude and any(why == _TRIED for _, why in judged.excluded):
            return Reject(RejectReason.NO_AVAILABLE_INSTANCE, "every instance was tried")
        if request.only is not None and request.only not in self.ids:
            if all(spec.instance_id != request.only for spec, _ in self.absent):
                detail = "What the request continues was on an instance that is gone."
                return Reject(RejectReason.CONTINUES_NOTHING, detail)
            detail = f"what the request continues is on {request.only}, which is not available"
            return Reject(RejectReason.NO_AVAILABLE_INSTANCE, detail)
        return Reject(
            RejectReason.FITS_NO_INSTANCE,
            f"This model's maximum context length is {int(self.longest_request_tokens)} tokens. "
            f"However, your prompt has about {request.prompt_tokens} tokens, and no instance can "
            f"hold it and an output of about {round(request.predicted_output_tokens)}.",
        )

    def _among(
        self,
        long_enough: list[bool],
        large_enough: list[bool],
        only: InstanceId | None,
        exclude: Collection[InstanceId],
    ) -> Eligible:
        """The instances left, possibly none: by context, memory, name, and not tried before."""
        kept, excluded = [], []
        for i, spec in enumerate(self.specs):
            if spec.instance_id in exclude:
                why = _TRIED
            elif only is not None and spec.instance_id != only:
                why = f"what it continues is on {only}"
            elif not long_enough[i]:
                why = f"context of {spec.max_model_len} tokens is too short"
            elif not large_enough[i]:
                capacity = int(self.members[i].kv_capacity_tokens)
                why = f"KV capacity of {capacity} tokens is too small"
            else:
                kept.append(i)
                continue
            excluded.append((spec, why))
        if not excluded:
            return Eligible(self, None, self.absent)
        return Eligible(self, kept, self.absent + tuple(excluded))


def work_s(yardstick: Member, prompt_tokens: float, output_tokens: float) -> float:
    """``Pool.work_s``, by its ``yardstick``."""
    return member_request_time_s(yardstick, prompt_tokens, max(1.0, output_tokens))


def typical_constants(specs: Iterable[InstanceSpec]) -> Constants:
    """The median of the profiles of these; ``_GENERIC`` if none of them has one."""
    known = [s.profile.constants for s in specs if s.profile is not None]
    if not known:
        return _GENERIC
    names = [f.name for f in dataclasses.fields(Constants)]
    return Constants(*(statistics.median(getattr(c, n) for c in known) for n in names))


def stand_in(spec: InstanceSpec, typical: Constants) -> Constants:
    """The assumed constants of an unprofiled instance until it is observed, ``weight`` times as
    fast."""
    return typical.scaled(1 / spec.weight)


def _effective_profiles(
    specs: tuple[InstanceSpec, ...], stand_ins: Mapping[InstanceId, Constants] | None
) -> list[Profile]:
    """A profile for each instance, so that unprofiled ones take part from the first request.

    Without ``stand_ins`` they get the mean of their pool's, over their weight; if none is profiled,
    loads are counts by weight.
    """
    mean = None
    result = []
    for spec in specs:
        profile = spec.profile
        if profile is None:
            if stand_ins is None:
                mean = mean or _mean_constants(specs)
                c = mean.scaled(1 / spec.weight)
            else:
                c = stand_ins[spec.instance_id]
            capacity = spec.kv_capacity_tokens or UNLIMITED_TOKENS
            profile = Profile("unknown", "unknown", 1, c, capacity)
        result.append(profile)
    return result


def _mean_constants(specs: Iterable[InstanceSpec]) -> Constants:
    """The mean of the profiles of these; if none of them has one, a request counts as 1."""
    known = [spec.profile for spec in specs if spec.profile is not None]
    if not known:
        return Constants(0, 1, 0, 0, 0, 0, 0, 1e-9)
    names = [f.name for f in dataclasses.fields(Constants)]
    return Constants(*(sum(getattr(p.constants, n) for p in known) / len(known) for n in names))


def _assumed_kv_capacities(specs: tuple[InstanceSpec, ...]) -> list[float]:
    """The divisors of Eq. (8): an unknown capacity is the mean of the pool's, by weight.

    If its usage were 0 for want of a capacity, its w would stay constant while the others' grow
    with e^(θ·kvusage), and a backlog would go nearly all to it. Nothing is refused because of this.
    """
    told = [s.profile.kv_capacity_tokens if s.profile else s.kv_capacity_tokens for s in specs]
    known = [tokens for tokens in told if tokens is not None]
    mean = sum(known) / len(known) if known else UNLIMITED_TOKENS
    return [float(mean * s.weight if t is None else t) for s, t in zip(specs, told, strict=True)]


def _capacity_per_s(profile: Profile, reference: tuple[float, float]) -> float:
    """Reference requests per second; one at a time if the KV cache holds less than one."""
    reference_tokens = math.ceil(sum(reference))
    if profile.kv_capacity_tokens < reference_tokens:
        profile = dataclasses.replace(profile, kv_capacity_tokens=reference_tokens)
    return 1 / max(request_time_s(profile, *reference), 1e-9)
