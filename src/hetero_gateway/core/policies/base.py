"""What every policy shares: its Protocol, what it sees, what it answers, and how ties are broken.

A policy is asked with a ``View``: the candidates of one request, which are the instances that may
get it. It answers with a ``Choice``, which carries the figures that it was made from; the sentence
that explains them is the policy's, too. It writes to nothing that it was given.

All is in plain numbers: of a few candidates, that is half of what arrays cost; it can be compiled
as it stands; and every rule has one form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mypy_extensions import mypyc_attr

from hetero_gateway.core.costs.cost_model import workload
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.policies.estimates import request_time_s
from hetero_gateway.core.policies.member import Member
from hetero_gateway.core.policies.slo import Slos
from hetero_gateway.core.request import Request
from hetero_gateway.core.types import Draws, InstanceId

Objective = Literal["latency", "makespan"]
# The predictors of output lengths that a policy may want by default.
DefaultPredictor = Literal["bucket-mean", "normal"]


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What a configuration may set.

    Args:
        randomised: round-robin policies draw an instance instead of taking turns.
        single_instance: where ``single-instance`` sends everything; None: the first candidate.
        objective: what ``finish-time`` is to keep low; see there.
        prefill_depth: most requests without a first token that ``finish-time`` leaves on one
            instance.
        first_token_weight: how much a second until the first token counts for ``finish-time``
            beside a second of latency, where a cached prefix is known; 0 or more.
        slos: limits that ``finish-time`` keeps requests within, where it can; None: it has none.
    """

    randomised: bool = False
    single_instance: InstanceId | None = None
    objective: Objective = "latency"
    prefill_depth: int = 8
    first_token_weight: float = 1.0
    slos: Slos | None = None


# What is made for every request are classes with slots, not NamedTuples: compiled, their numbers
# are a processor's own, and to look at one costs no search for a name.


class Prefix:
    """What the candidates are thought to have cached of a prompt: one entry each, of one sequence.

    ``match_tokens``: as far as the prompt went there before. ``trust``: how much of that is
    really found, as observed, 0 to 1. ``cached_tokens``: their product, at most all but one.
    """

    __slots__ = ("cached_tokens", "match_tokens", "trust")

    def __init__(
        self,
        match_tokens: Sequence[float],
        trust: Sequence[float],
        cached_tokens: Sequence[float],
    ) -> None:
        self.match_tokens = match_tokens
        self.trust = trust
        self.cached_tokens = cached_tokens


class Backlog:
    """What a policy that queues knows of those that wait in the gateway, and of what arrives.

    Args:
        queued: requests that wait, this one included.
        idle_s: since the last arrival; ``mean_gap_s``: between the arrivals before.
        mean_lengths: prompt and output tokens of the mean queued request; None: nobody waits.
        typical_request_time_s: T of a request of the lengths that arrive on average, by candidate.
        residual: expected further output by stage (tokens).
        profiled: some candidate has constants of its own, or was observed.
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
    """A request and its candidates, an entry each. Nobody may write to it.

    Args:
        prefill_tokens: prompt tokens to compute, of all its sequences, by candidate.
        kv_tokens: that it will hold in the KV cache at its end, cached ones among them.
        prefix: what of the prompt need not be computed; None: nothing is cached anywhere, as far
            as is known.
        backlog: for policies that ``queues``; None for all others.
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


class Candidates:
    """What a policy that places at once chooses by: a list entry for each candidate.

    ``request_time_s``: T_r^s. ``load``: outstanding charges, s. ``kv_usage``: Eq. (8).
    ``in_flight``: outstanding requests. ``capacity``: fitted requests/s. ``weight``: as configured.
    What other gateways have sent there is in all of it.
    """

    __slots__ = ("ids", "in_flight", "kv_usage", "load", "request", "request_time_s", "view")

    def __init__(self, view: View) -> None:
        self.view = view
        self.request = request = view.request
        self.ids = view.ids
        n, prompt, output = (
            request.sequences,
            request.prompt_tokens,
            request.predicted_output_tokens,
        )
        self.request_time_s: list[float] = []
        times_s: dict[float, float] = {}  # by kind
        self.load: list[float] = []
        self.kv_usage: list[float] = []
        self.in_flight: list[float] = []
        for state, member in zip(view.states, view.members, strict=True):
            peers = state.peers
            time_s = times_s.get(member.kind)
            if time_s is None:
                time_s = times_s[member.kind] = n * request_time_s(member, prompt, output)
            self.request_time_s.append(time_s)
            self.load.append(state.load_s + peers.load_s)
            self.kv_usage.append((state.kv_tokens + peers.kv_tokens) / member.kv_capacity_tokens)
            self.in_flight.append(state.in_flight + peers.in_flight)

    @property
    def capacity(self) -> list[float]:
        return [member.capacity for member in self.view.members]

    @property
    def weight(self) -> list[float]:
        return [member.weight for member in self.view.members]


class Figures:
    """What a choice was made from: named columns of one number per candidate.

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
        """One number per candidate. ValueError: there is no such column."""
        return self._data[self.names.index(name) :: len(self.names)]

    def at(self, name: str, candidate: int) -> float:
        """One number of a column. ValueError: there is no such column."""
        return self._data[candidate * len(self.names) + self.names.index(name)]


class Choice:
    """A policy's answer.

    Args:
        position: of the chosen candidate.
        charge: what its load grows by, s.
        names, data, by_speed: of its ``figures``, what it was chosen from. There are always
            ``COLUMNS``.
        waits: it would be the best, but cannot be sent a request now (only where ``queues``).
        ttft_s: predicted time to the first token, s; None: not estimated.
        latency_s: predicted time to the last one, s; None: not estimated.
    """

    __slots__ = (
        "by_speed",
        "charge",
        "data",
        "latency_s",
        "names",
        "position",
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

    @property
    def figures(self) -> Figures:
        return Figures(self.names, self.data, self.by_speed)


# What every choice reports of each candidate.
COLUMNS = ("request_time_s", "kv_usage", "load_s", "in_flight")


class Decided(Protocol):
    """What a policy looks at to say why: a ``Decision``."""

    @property
    def request(self) -> Request: ...

    @property
    def choice(self) -> Choice:
        """Of the candidates ``ids``."""

    @property
    def ids(self) -> tuple[InstanceId, ...]: ...

    @property
    def prefix(self) -> Prefix | None:
        """What each candidate is thought to have cached; None: nothing."""

    @property
    def loads_after(self) -> list[float]:
        """What each candidate's load would have been with the request, s."""


class Policy(Protocol):
    """What chooses."""

    # The name in a configuration.
    name: str
    # Requests wait in the gateway for it, and it wants ``View.backlog``.
    queues: bool
    # Of very many candidates, it can do with a sample (``scheduling/decider.py``).
    samples: bool
    # The predictor of output lengths that it is used with where none is configured.
    default_predictor: DefaultPredictor

    def choose(self, view: View, rng: Draws) -> Choice | None:
        """The chosen candidate; there is at least one. None: none of them now (if ``queues``)."""
        ...

    def would_choose(self, view: View, rng: Draws) -> Choice:
        """The same for an explanation: where it is None, what is best and has to be waited for."""
        ...

    def turn(self) -> Any:
        """What its next choices depend on beside what it is given, for ``take_back``."""
        ...

    def take_back(self, turn: Any) -> None:
        """Have its next choices be those that they were to be when ``turn`` was asked."""
        ...

    def charge(self, request_time_s: float, kv_usage: float, theta: float) -> float:
        """What a candidate's load would grow by if it were chosen, s."""
        ...

    def because(self, decision: Decided) -> str:
        """Why it chose what it chose, as the end of a sentence."""
        ...


@mypyc_attr(allow_interpreted_subclasses=True)
class PlacesAtOnce:
    """A policy that sends every request on as it comes. It says which ``position`` it takes.

    One that remembers what it chose has a ``turn``, too.
    """

    name: str
    queues = False
    samples = False
    default_predictor: DefaultPredictor = "bucket-mean"

    def position(self, candidates: Candidates, rng: Draws) -> int:
        """The chosen candidate's."""
        raise NotImplementedError

    def choose(self, view: View, rng: Draws) -> Choice:
        candidates = Candidates(view)
        return self._choice(candidates, self.position(candidates, rng), self.told(candidates))

    def _choice(
        self, candidates: Candidates, position: int, told: dict[str, Sequence[float]]
    ) -> Choice:
        c = candidates
        columns = (c.request_time_s, c.kv_usage, c.load, c.in_flight, *told.values())
        charge = self.charge(c.request_time_s[position], c.kv_usage[position], c.view.theta)
        data = [number for row in zip(*columns, strict=True) for number in row]
        return Choice(position, charge, (*COLUMNS, *told) if told else COLUMNS, data)

    def would_choose(self, view: View, rng: Draws) -> Choice:
        return self.choose(view, rng)

    def turn(self) -> Any:
        return None  # most depend on nothing else

    def take_back(self, turn: Any) -> None:
        pass

    def told(self, candidates: Candidates) -> dict[str, Sequence[float]]:
        """What else the choice was made from than ``COLUMNS``, by name."""
        return {}

    def charge(self, request_time_s: float, kv_usage: float, theta: float) -> float:
        """The common w_r^s, so that a load means the same under each policy."""
        return workload(request_time_s, kv_usage, theta)

    def because(self, decision: Decided) -> str:
        after = decision.loads_after[decision.choice.position]
        return f"policy {self.name} chose it; its load would be {number(after)}"


@mypyc_attr(allow_interpreted_subclasses=True)
class LowestScore(PlacesAtOnce):
    """A policy that gives each candidate a number: the lowest has it; equals are drawn from."""

    def scores(self, candidates: Candidates) -> Sequence[float]:
        """One number for each candidate, none of them NaN."""
        raise NotImplementedError

    def choose(self, view: View, rng: Draws) -> Choice:
        candidates = Candidates(view)
        scores = self.scores(candidates)
        position = lowest_with_random_ties(scores, rng)
        return self._choice(candidates, position, {"score": scores})

    def because(self, decision: Decided) -> str:
        ours = f"by {self.name} its score was {{}}, the lowest"
        return lowest(decision, decision.choice.figures.column("score"), ours, "{} had {}")


def lowest_with_random_ties(scores: Sequence[float], rng: Draws) -> int:
    """The position of the lowest score; among equals a seeded draw (erratum 2).

    Never the list's order: with equal instances the lowest index would get every request of an
    idle moment, and reversing the configuration would change the throughput.
    """
    best = min(scores)
    ties = [i for i, score in enumerate(scores) if score == best]
    return ties[0] if len(ties) == 1 else ties[int(rng.random() * len(ties))]


# Sentences


def number(value: float, digits: int = 3) -> str:
    """A figure to read: so many digits that count, never an exponent."""
    exponent = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(12, max(0, digits - 1 - exponent))}f}"


def lowest(
    decision: Decided,
    scores: Sequence[float],
    ours: str,
    theirs: str,
    *,
    tie: str = "of equals one is drawn at random",
    whole: bool = False,
) -> str:
    """The sentence of a rule that takes the lowest of ``scores``, beside the nearest other one."""
    chosen = decision.choice.position
    mine = scores[chosen]
    nearest = min((i for i in range(len(scores)) if i != chosen), key=scores.__getitem__)
    other = scores[nearest]
    digits = 3
    # Two figures that look the same would explain nothing.
    while digits < 12 and mine != other and number(mine, digits) == number(other, digits):
        digits += 1
    shown = [str(int(v)) if whole else number(v, digits) for v in (mine, other)]
    if mine == other:
        level = sum(score == mine for score in scores) - 1
        return f"{ours.format(shown[0])}, as {level} other{'s' * (level > 1)}; {tie}"
    name = decision.ids[nearest]
    who = name if len(scores) == 2 else f"the next, {name},"
    return f"{ours.format(shown[0])}; {theirs.format(who, shown[1])}"
