"""What all policies share: the Protocol, its inputs, its answer, and the resulting decision.

A policy is asked with a ``View``: the candidates of one request, the instances that may get it. It
answers with a ``Choice``, which carries the figures it was made from; together they become a
``Decision``, which is explained on demand, in the policy's own words. A policy never writes to its
inputs.

Everything is in plain numbers: for a few candidates that costs half as much as arrays, it can be
compiled as it stands, and every rule has one form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from hetero_gateway.core.costs.cost_model import workload
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.policies.member import Member
from hetero_gateway.core.policies.slo import Slos
from hetero_gateway.core.prefixes.caches import Prefix
from hetero_gateway.core.request import Request
from hetero_gateway.core.types import CachedPrefix, Candidate, Draws, InstanceId, InstanceSpec

Objective = Literal["latency", "makespan"]
# The output-length predictors that a policy may use by default.
DefaultPredictor = Literal["bucket-mean", "normal"]

# Shorter waits in the gateway are not worth mentioning.
_NO_WAIT_S: Final = 0.01
_MOST_NAMED: Final = 3


# finish-time's estimates for a candidate.
_ESTIMATES = (
    "ttft_s", "latency_s", "delay_s", "memory_price_s", "late_price_s", "slo_price_s", "cost_s",
    "prefill_cost_s", "decode_cost_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """The configurable options of policies.

    Args:
        randomised: round-robin policies draw an instance instead of taking turns.
        single_instance: where ``single-instance`` sends everything; None: the first candidate.
        objective: what ``finish-time`` minimises; see there.
        prefill_depth: maximum requests without a first token that ``finish-time`` leaves on one
            instance.
        first_token_weight: for ``finish-time``, the weight of a second until the first token
            against a second of latency, if a cached prefix is known; 0 or more.
        slos: limits that ``finish-time`` keeps requests within, where possible; None: none.
    """

    randomised: bool = False
    single_instance: InstanceId | None = None
    objective: Objective = "latency"
    prefill_depth: int = 8
    first_token_weight: float = 2.0
    slos: Slos | None = None


# Objects made for every request are classes with slots, not NamedTuples: compiled, their numbers
# are machine numbers, and access costs no lookup by name.


class Backlog:
    """What a policy that queues knows of the requests waiting in the gateway, and of arrivals.

    Args:
        queued: waiting requests, including this one.
        idle_s: since the last arrival; ``mean_gap_s``: between the arrivals before.
        mean_lengths: prompt and output tokens of the mean queued request; None: none is waiting.
        typical_request_time_s: T of a request of mean arrival lengths, by candidate.
        residual: expected remaining output by stage (tokens).
        profiled: some candidate has its own constants, or was observed.
        stands_in: some candidate's constants are not its own, so its times come from its observed
            speed.
        waited_s: since the request arrived.
    """

    __slots__ = (
        "idle_s",
        "mean_gap_s",
        "mean_lengths",
        "profiled",
        "queued",
        "residual",
        "stands_in",
        "typical_request_time_s",
        "waited_s",
    )

    def __init__(
        self,
        queued: int,
        idle_s: float,
        mean_gap_s: float,
        mean_lengths: tuple[float, float] | None,
        typical_request_time_s: list[float],
        residual: list[float],
        profiled: bool,
        stands_in: bool,
        waited_s: float = 0.0,
    ) -> None:
        self.queued = queued
        self.idle_s = idle_s
        self.mean_gap_s = mean_gap_s
        self.mean_lengths = mean_lengths
        self.typical_request_time_s = typical_request_time_s
        self.residual = residual
        self.profiled = profiled
        self.stands_in = stands_in
        self.waited_s = waited_s


class View:
    """A request and its candidates, one entry each. Read-only.

    Args:
        prefill_tokens: prompt tokens to compute, of all its sequences, by candidate.
        kv_tokens: tokens it will hold in the KV cache at its end, including cached ones.
        prefix: the part of the prompt that need not be computed; None: nothing is known to be
            cached anywhere.
        backlog: for policies that set ``queues``; None for all others.
    """

    __slots__ = (
        "backlog",
        "ids",
        "kv_tokens",
        "members",
        "now_s",
        "prefill_tokens",
        "prefix",
        "request",
        "states",
        "theta",
    )

    def __init__(
        self,
        request: Request,
        ids: tuple[InstanceId, ...],
        states: Sequence[InstanceState],
        members: Sequence[Member],
        prefill_tokens: list[float],
        kv_tokens: int,
        prefix: Prefix | None,
        theta: float,
        now_s: float,
        backlog: Backlog | None,
    ) -> None:
        self.request = request
        self.ids = ids
        self.states = states
        self.members = members
        self.prefill_tokens = prefill_tokens
        self.kv_tokens = kv_tokens
        self.prefix = prefix
        self.theta = theta
        self.now_s = now_s
        self.backlog = backlog


class Figures:
    """The inputs of a choice: named columns of one number per candidate.

    ``data``: candidate by candidate. ``by_speed``: some candidate's times come from its observed
    speed alone.
    """

    __slots__ = ("_data", "by_speed", "names")

    def __init__(self, names: tuple[str, ...], data: list[float], by_speed: bool = False) -> None:
        self.names = names
        self._data = data
        self.by_speed = by_speed

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def column(self, name: str) -> list[float]:
        """One number per candidate. ValueError: no such column."""
        return self._data[self.names.index(name) :: len(self.names)]

    def at(self, name: str, candidate: int) -> float:
        """One number of a column. ValueError: no such column."""
        return self._data[candidate * len(self.names) + self.names.index(name)]


class Choice:
    """A policy's answer.

    Args:
        position: of the chosen candidate.
        charge: what its load grows by, s.
        names, data, by_speed: of the ``figures`` it was chosen by. They always include ``COLUMNS``.
        waits: it would be the best, but cannot be sent a request now (only if ``queues``).
        ttft_s: predicted time to the first token, s; None: not estimated.
        latency_s: predicted time to the last token, s; None: not estimated.

    If another candidate computes the prompt (``policies/legs.py``): its ``prefill_position``,
    otherwise -1; what its load grows by, ``prefill_charge``, and how long that takes,
    ``prefill_s``. Then ``charge`` is for the answer alone, which follows a transfer of
    ``transfer_s``.
    """

    __slots__ = (
        "by_speed",
        "charge",
        "data",
        "latency_s",
        "names",
        "position",
        "prefill_charge",
        "prefill_position",
        "prefill_s",
        "transfer_s",
        "ttft_s",
        "waits",
    )

    def __init__(
        self,
        position: int,
        charge: float,
        names: tuple[str, ...],
        data: list[float],
        waits: bool = False,
        ttft_s: float | None = None,
        latency_s: float | None = None,
        by_speed: bool = False,
    ) -> None:
        self.position = position
        self.charge = charge
        self.names = names
        self.data = data
        self.waits = waits
        self.ttft_s = ttft_s
        self.latency_s = latency_s
        self.by_speed = by_speed
        self.prefill_position = -1
        self.prefill_charge = self.prefill_s = self.transfer_s = 0.0

    @property
    def figures(self) -> Figures:
        return Figures(self.names, self.data, self.by_speed)


# Columns that every choice reports for each candidate.
COLUMNS = ("request_time_s", "kv_usage", "load_s", "in_flight")


class Decision:
    """Where a request goes, with the figures it was chosen by; see ``explain``.

    ``prefill_tokens`` and ``kv_tokens``: what the instance is charged, as in ``View``.
    ``ids``: the candidates, in the order of the figures. ``excluded``: those that took no part.
    ``prefix``: the part of the prompt each candidate should have cached; None: nothing.
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
        view: View,
        choice: Choice,
        policy: Policy,
        excluded: tuple[tuple[InstanceSpec, str], ...],
    ) -> None:
        position = choice.position
        self.instance_id = view.ids[position]
        self.request = view.request
        self.choice = choice
        self.prefill_tokens = view.prefill_tokens[position]
        self.kv_tokens = view.kv_tokens
        self.ids = view.ids
        self.theta = view.theta
        self.policy = policy
        self.excluded = excluded
        self.prefix = view.prefix

    @property
    def prefill_id(self) -> InstanceId | None:
        """The instance that computes the prompt; None: the one that answers."""
        position = self.choice.prefill_position
        return None if position < 0 else self.ids[position]

    @property
    def waits(self) -> bool:
        """Whether it would get the request, but not now."""
        return self.choice.waits

    @property
    def loads_after(self) -> list[float]:
        """Each candidate's load with the request, s."""
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

    # In one plain sentence. Each policy looks at something else, so it describes its own reason.

    def reason(self, got: str = "got it", waited_s: float = 0.0) -> str:
        """Why the policy made its choice; ``got`` is the sentence's verb.

        ``waited_s``: how long the request was in the gateway's queue before.
        """
        after = f" after {number(waited_s)} s in the queue" if waited_s >= _NO_WAIT_S else ""
        return f"{self.instance_id} {got}{after}: {self._because()}."

    def waiting_reason(self, waiting: int) -> str:
        """Why it would wait in the gateway; ``waiting``: how many requests do now."""
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


class Policy(Protocol):
    """Chooses an instance."""

    # Its name in a configuration.
    name: str
    # Requests wait in the gateway for it, and it needs ``View.backlog``.
    queues: bool
    # A sample of very many candidates suffices for it (``scheduling/decider.py``).
    samples: bool
    # Its predictor of output lengths, if none is configured.
    default_predictor: DefaultPredictor

    def choose(self, view: View, rng: Draws) -> Choice | None:
        """The chosen candidate; there is at least one. None: none of them now (if ``queues``)."""
        ...

    def would_choose(self, view: View, rng: Draws) -> Choice:
        """The same for an explanation: instead of None, the best candidate, which has to be waited
        for."""
        ...

    def turn(self) -> Any:
        """The state its next choices depend on, for ``take_back``."""
        ...

    def take_back(self, turn: Any) -> None:
        """Restore the state that ``turn`` returned."""
        ...

    def charge(self, request_time_s: float, kv_usage: float, theta: float) -> float:
        """What a candidate's load would grow by if it were chosen, s."""
        ...

    def because(self, decision: Decision) -> str:
        """The reason of its choice, as the end of a sentence."""
        ...


# Numbers in a sentence.


def number(value: float, digits: int = 3) -> str:
    """A readable number: this many significant digits, never an exponent."""
    exponent = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(12, max(0, digits - 1 - exponent))}f}"
