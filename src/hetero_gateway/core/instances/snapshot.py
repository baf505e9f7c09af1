"""The displayed state of one instance at one moment, for /admin, metrics and dashboard."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_gateway.core.instances.drift import Drift, Verdict
from hetero_gateway.core.instances.slowness import Slowness
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.types import InstanceId, InstanceSpec


@dataclass(frozen=True, slots=True)
class InstanceSnapshot:
    """An instance as the scheduler sees it, without the load of other gateways.

    Args:
        in_flight: requests outstanding.
        load_s: their workloads, summed, s.
        kv_tokens: tokens that they will hold in the KV cache.
        kv_capacity_tokens: its profile's; None: it has none.
        speed_factor: observed over modelled step time; None: nothing is modelled.
        waiting, streaming: sequences without a first token, and past it, if followed.
        waiting_prompt_tokens, context_tokens: the prompts of the former; tokens cached by the
            latter.
        follows: every request's progress is followed, not only that of streams.
        drift: how far its profile is from what is observed; all None: not known.
        drifted, drifted_since_s: whether it is too far, and since when, on the scheduler's clock.
        slowness: observed over modelled time of its last seconds; None: not known.
        slow_since_s: since when it has been slow by that; None: it is not.
        profiled: it has a profile that is checked.
        learnt_max_num_seqs: sequences that its engine was found to run at once; None: not known,
            or its profile says it.
        hit_share: recent prefix-cache hits as a share of all prompts, 0 to 1; None: not known.
        predicted_cached_tokens, cached_tokens: of completed prompts, as predicted when they were
            sent, and actual, as far as known.
    """

    instance_id: InstanceId
    in_flight: int
    load_s: float
    kv_tokens: int
    kv_capacity_tokens: int | None
    speed_factor: float | None
    waiting: int
    streaming: int
    waiting_prompt_tokens: int
    context_tokens: float
    follows: bool
    drift: Verdict
    drifted: bool
    drifted_since_s: float | None
    slowness: float | None
    slow_since_s: float | None
    profiled: bool
    learnt_max_num_seqs: int | None
    hit_share: float | None = None
    predicted_cached_tokens: float = 0.0
    cached_tokens: float = 0.0

    @property
    def waiting_first_token(self) -> int | None:
        """Sequences sent that have no first token yet; None: not every request is followed."""
        return self.waiting if self.follows else None

    @property
    def kv_usage(self) -> float | None:
        """Eq. (8); None: the capacity is not known."""
        if self.kv_capacity_tokens is None:
            return None
        return self.kv_tokens / self.kv_capacity_tokens


def snapshot_of(
    spec: InstanceSpec,
    state: InstanceState,
    drift: Drift | None,
    slowness: Slowness | None,
    *,
    queues: bool,
) -> InstanceSnapshot:
    """Take a snapshot. ``queues``: the policy follows every request's progress."""
    profile = spec.profile
    return InstanceSnapshot(
        instance_id=spec.instance_id,
        in_flight=state.in_flight,
        load_s=state.load_s,
        kv_tokens=state.kv_tokens,
        kv_capacity_tokens=None if profile is None else profile.kv_capacity_tokens,
        speed_factor=state.speed if queues or profile is not None else None,
        waiting=state.waiting,
        streaming=state.streaming,
        waiting_prompt_tokens=state.waiting_prompt,
        context_tokens=state.context,
        follows=queues,
        drift=Verdict(None, None, None) if drift is None else drift.verdict(),
        drifted=drift is not None and drift.drifted,
        drifted_since_s=None if drift is None else drift.since_s,
        slowness=None if slowness is None else slowness.factor,
        slow_since_s=None if slowness is None else slowness.since_s,
        profiled=drift is not None,
        learnt_max_num_seqs=state.concurrency.learnt,
        hit_share=state.prefix.share,
        predicted_cached_tokens=state.prefix.predicted_tokens,
        cached_tokens=state.prefix.actual_tokens,
    )
