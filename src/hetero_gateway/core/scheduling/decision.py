"""Where a request goes, with what it was decided from; explained when somebody asks."""

from __future__ import annotations

from typing import Final

from hetero_gateway.core.costs.cost_model import workload
from hetero_gateway.core.policies.base import Choice, Policy, Prefix, number
from hetero_gateway.core.request import Request
from hetero_gateway.core.types import CachedPrefix, Candidate, InstanceId, InstanceSpec

# Shorter waits in the gateway are not worth a word.
_NO_WAIT_S: Final = 0.01
_MOST_NAMED: Final = 3


# What finish-time expects of a candidate.
_ESTIMATES = (
    "ttft_s", "latency_s", "delay_s", "memory_price_s", "late_price_s", "slo_price_s", "cost_s",
)  # fmt: skip


class Decision:
    """Where a request goes. The reason is kept as the figures it was made from; see ``explain``.

    ``prefill_tokens`` and ``kv_tokens``: what the instance is charged, as in ``View``.
    ``ids``: the candidates, in the order of the figures. ``excluded``: those that took no part.
    ``prefix``: what of the prompt each candidate is thought to have cached; None: nothing.
    """

    __slots__ = (
        "choice",
        "excluded",
        "ids",
        "instance_id",
        "kv_tokens",
        "policy",
        "prefill_tokens",
        "prefix",
        "request",
        "theta",
    )

    def __init__(
        self,
        instance_id: InstanceId,
        request: Request,
        choice: Choice,
        prefill_tokens: float,
        kv_tokens: int,
        ids: tuple[InstanceId, ...],
        theta: float,
        policy: Policy,
        excluded: tuple[tuple[InstanceSpec, str], ...],
        prefix: Prefix | None = None,
    ) -> None:
        self.instance_id = instance_id
        self.request = request
        self.choice = choice
        self.prefill_tokens = prefill_tokens
        self.kv_tokens = kv_tokens
        self.ids = ids
        self.theta = theta
        self.policy = policy
        self.excluded = excluded
        self.prefix = prefix

    @property
    def waits(self) -> bool:
        """It would get the request, but not now."""
        return self.choice.waits

    @property
    def loads_after(self) -> list[float]:
        """What each candidate's load would have been with the request, s."""
        column, theta = self.choice.figures.column, self.theta
        return [
            load_s + self.policy.charge(time_s, usage, theta)
            for load_s, time_s, usage in zip(
                column("load_s"), column("request_time_s"), column("kv_usage"), strict=True
            )
        ]

    def explain(self) -> list[Candidate]:
        """Every candidate's T, KV usage, w and resulting load, and why the others were excluded."""
        figures, after = self.choice.figures, self.loads_after
        times, usage = figures.column("request_time_s"), figures.column("kv_usage")
        load, in_flight = figures.column("load_s"), figures.column("in_flight")
        estimates = [(name, figures.column(name)) for name in _ESTIMATES if name in figures]
        room = figures.column("room") if "room" in figures else None
        prefix = self.prefix
        rows = [
            Candidate(
                instance_id=instance_id,
                request_time_s=times[i],
                kv_usage=usage[i],
                workload=workload(times[i], usage[i], self.theta),
                load_s=load[i],
                load_after_s=after[i],
                in_flight=int(in_flight[i]),
                excluded=None,
                room=None if room is None else bool(room[i]),
                estimates={name: column[i] for name, column in estimates},
                cached=None if prefix is None else self._cached(prefix, i),
            )
            for i, instance_id in enumerate(self.ids)
        ]
        return rows + [
            Candidate(spec.instance_id, None, None, None, None, None, None, why)
            for spec, why in self.excluded
        ]

    def _cached(self, prefix: Prefix, i: int) -> CachedPrefix:
        request = self.request
        cached = prefix.cached_tokens[i]
        prefill = request.sequences * (request.prompt_tokens - cached)
        return CachedPrefix(prefix.match_tokens[i], prefix.trust[i], cached, prefill)

    # In one plain sentence. Each policy looks at something else, so it says what it looked at.

    def reason(self, got: str = "got it", waited_s: float = 0.0) -> str:
        """Why the policy chose what it chose; ``got`` is its verb.

        ``waited_s``: how long the request was in the gateway's queue before.
        """
        after = f" after {number(waited_s)} s in the queue" if waited_s >= _NO_WAIT_S else ""
        return f"{self.instance_id} {got}{after}: {self._because()}."

    def waiting_reason(self, waiting: int) -> str:
        """Why it would wait in the gateway; ``waiting``: how many do now."""
        figures = self.choice.figures
        if self.waits and not any(figures.column("room")):
            why = "no instance has room now"
        elif self.waits:
            why = "no instance that has room would be done as soon as one that has none"
        else:
            why = f"{waiting} request{'s' * (waiting != 1)} came before it"
        return f"It would wait: {why}; {self.instance_id} is the best for it as things are."

    def _because(self) -> str:
        if len(self.ids) > 1:
            return self.policy.because(self)
        out = [f"{spec.instance_id}: {why}" for spec, why in self.excluded]
        more = f" and {len(out) - _MOST_NAMED} more" if len(out) > _MOST_NAMED else ""
        left_out = f" ({'; '.join(out[:_MOST_NAMED])}{more})" if out else ""
        return f"no other instance can take the request{left_out}"

    def __repr__(self) -> str:
        verb = "waits for" if self.waits else "goes to"
        return f"<Decision: {self.request.model} {verb} {self.instance_id} of {len(self.ids)}>"
