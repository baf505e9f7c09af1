"""What every policy shares: its Protocol, what it sees, what it answers, and how ties are broken.

A policy is asked with a ``View``: the eligible instances of one request, as arrays. It answers with
a ``Choice``, which carries the figures that it was made from; the sentence that explains them is
the policy's, too. It writes to nothing that it was given. A policy may have a second form for small
pools, where plain floats are faster than numpy: ``choose_small``, with the same result.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.costs.cost_model import FloatArray, workload, workloads
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.policies.member import Member
from hetero_gateway.core.policies.slo import Slos
from hetero_gateway.core.types import InstanceId, Request

Objective = Literal["latency", "makespan"]
# The predictors of output lengths that a policy may want by default.
DefaultPredictor = Literal["bucket-mean", "normal"]
# Compiles a function, as numba.njit does.
Jit = Callable[[Any], Any]


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


# In arrays, or plain: for a few candidates numpy costs more than it saves.
Numbers = TypeVar("Numbers", FloatArray, list[float])
# One number per candidate; or a single one, where it is the same for all.
Amount = float | Sequence[float] | FloatArray


class Prefix(NamedTuple, Generic[Numbers]):
    """What the candidates are thought to have cached of a prompt: one entry each, of one sequence.

    ``match_tokens``: as far as the prompt went there before. ``trust``: how much of that is
    really found, as observed, 0 to 1. ``cached_tokens``: their product, at most all but one.
    """

    match_tokens: Numbers
    trust: Numbers
    cached_tokens: Numbers


class Demand(NamedTuple):
    """What a request would take of each candidate.

    ``prefill_tokens``: prompt tokens to compute, of all its sequences. ``kv_tokens``: tokens that
    it will hold in the KV cache at its end, cached ones among them. ``prefix``: what of the prompt
    need not be computed; None: nothing is known to be cached anywhere.
    """

    prefill_tokens: Amount
    kv_tokens: Amount
    prefix: Prefix[Any] | None = None


class Backlog(NamedTuple, Generic[Numbers]):
    """What a policy that queues knows of those that wait in the gateway, and of what arrives.

    Args:
        queued: requests that wait, this one included.
        idle_s: since the last arrival; ``mean_gap_s``: between the arrivals before.
        mean_request_times_s: computes T of the mean queued request on each candidate, s; None:
            nobody waits.
        typical_request_time_s: T of a request of the lengths that arrive on average, by candidate.
        residual: expected further output by stage (tokens).
        profiled: some candidate has constants of its own, or was observed.
        stands_in: some candidate's constants are not its own, so its times come from its observed
            speed.
        waited_s: since the request arrived.
    """

    queued: int
    idle_s: float
    mean_gap_s: float
    mean_request_times_s: Callable[[], FloatArray] | None
    typical_request_time_s: Numbers
    residual: Numbers
    profiled: bool
    stands_in: bool
    waited_s: float = 0.0


class Outlook(NamedTuple):
    """How far the instances' requests are; arrays of one entry per candidate in the last axis.

    ``constants`` are p1..p9 as rows, those of the KV cache as in ``Member``, ``rows`` those of
    ``instances/table.py``, ``stages`` the streaming sequences by stage.
    """

    constants: FloatArray
    kv_capacity_tokens: FloatArray
    kv_limit_tokens: FloatArray
    max_num_seqs: FloatArray
    rows: FloatArray
    stages: FloatArray
    backlog: Backlog[FloatArray]


class View:
    """The eligible instances of one request, one array entry each. Nobody may write to it.

    ``slots``: the instance's place in ``Table``. ``request_time_s``: T_r^s. ``load``: outstanding
    charges, s. ``kv_usage``: Eq. (8). ``in_flight``: outstanding requests. ``capacity``: fitted
    requests/s. ``weight``: as configured. ``outlook``: for policies that ``queues``.
    """

    __slots__ = (
        "_workload",
        "capacity",
        "demand",
        "ids",
        "in_flight",
        "kv_usage",
        "load",
        "outlook",
        "request",
        "request_time_s",
        "slots",
        "theta",
        "weight",
    )

    def __init__(
        self,
        request: Request,
        ids: tuple[InstanceId, ...],
        slots: NDArray[np.intp],
        demand: Demand,
        request_time_s: FloatArray,
        load: FloatArray,
        kv_usage: FloatArray,
        in_flight: FloatArray,
        capacity: FloatArray,
        weight: FloatArray,
        theta: float,
        outlook: Outlook | None = None,
    ) -> None:
        self.request = request
        self.ids = ids
        self.slots = slots
        self.demand = demand
        self.request_time_s = request_time_s
        self.load = load
        self.kv_usage = kv_usage
        self.in_flight = in_flight
        self.capacity = capacity
        self.weight = weight
        self.theta = theta
        self.outlook = outlook
        self._workload: FloatArray | None = None

    def workload(self) -> FloatArray:
        """w_r^s of Eq. (7), computed on first use."""
        if self._workload is None:
            self._workload = workloads(self.request_time_s, self.kv_usage, self.theta)
        return self._workload

    def workload_at(self, position: int) -> float:
        """w_r^s of one candidate; most policies need no other."""
        if self._workload is not None:
            return float(self._workload[position])
        return workload(
            float(self.request_time_s[position]), float(self.kv_usage[position]), self.theta
        )


class SmallView(NamedTuple):
    """The same as a ``View``, of a small pool: states and plain numbers, by candidate."""

    request: Request
    ids: tuple[InstanceId, ...]
    states: Sequence[InstanceState]
    members: Sequence[Member]
    demand: Demand
    theta: float
    now_s: float
    backlog: Backlog[list[float]]


class Figures(NamedTuple):
    """What a choice was made from, kept small: named columns of one number per candidate.

    ``data``: candidate by candidate in one flat array, or an array for each column. ``by_speed``:
    some candidate's times come from its observed speed alone.
    """

    names: tuple[str, ...]
    data: array[float] | tuple[NDArray[Any], ...]
    by_speed: bool = False

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def column(self, name: str) -> FloatArray:
        """One number per candidate. KeyError: there is no such column."""
        if name not in self.names:
            raise KeyError(name)
        position = self.names.index(name)
        if isinstance(self.data, tuple):
            return np.asarray(self.data[position], dtype=float)
        return np.array(self.data[position :: len(self.names)])

    def at(self, name: str, candidate: int) -> float:
        """One number of a column. ValueError: there is no such column."""
        position = self.names.index(name)
        if isinstance(self.data, tuple):
            return float(self.data[position][candidate])
        return self.data[candidate * len(self.names) + position]


class Choice(NamedTuple):
    """A policy's answer.

    Args:
        position: of the chosen candidate.
        charge: what its load grows by, s.
        figures: what it was chosen from. There are always ``COLUMNS``.
        waits: it would be the best, but cannot be sent a request now (only where ``queues``).
        ttft_s: predicted time to the first token, s; None: not estimated.
        latency_s: predicted time to the last one, s; None: not estimated.
    """

    position: int
    charge: float
    figures: Figures
    waits: bool = False
    ttft_s: float | None = None
    latency_s: float | None = None


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
    def prefix(self) -> Prefix[Any] | None:
        """What each candidate is thought to have cached; None: nothing."""

    @property
    def loads_after(self) -> FloatArray:
        """What each candidate's load would have been with the request, s."""


class Policy(Protocol):
    """What chooses."""

    # The name in a configuration.
    name: str
    # Requests wait in the gateway for it, and it wants ``View.outlook``.
    queues: bool
    # The predictor of output lengths that it is used with where none is configured.
    default_predictor: DefaultPredictor
    # It has ``choose_small``.
    has_small_form: bool

    def choose(self, view: View, rng: np.random.Generator) -> Choice | None:
        """The chosen candidate; there is at least one. None: none of them now (if ``queues``)."""
        ...

    def choose_small(self, view: SmallView, rng: np.random.Generator) -> Choice | None:
        """The same for a small pool; called only where ``has_small_form``."""
        ...

    def would_choose(self, view: View, rng: np.random.Generator) -> Choice:
        """The same for an explanation: where it is None, what is best and has to be waited for."""
        ...

    def turn(self) -> Any:
        """What its next choices depend on beside what it is given, for ``take_back``."""
        ...

    def take_back(self, turn: Any) -> None:
        """Have its next choices be those that they were to be when ``turn`` was asked."""
        ...

    def charges(self, request_time_s: FloatArray, kv_usage: FloatArray, theta: float) -> FloatArray:
        """What each candidate's load would grow by if it were chosen, s."""
        ...

    def because(self, decision: Decided) -> str:
        """Why it chose what it chose, as the end of a sentence."""
        ...

    def compile(self, jit: Jit) -> None:
        """Have ``jit`` compile what it computes with, if that pays; the results are the same."""
        ...


class PlacesAtOnce:
    """A policy that sends every request on as it comes. It says which ``position`` it takes.

    One that remembers what it chose has a ``turn``, too.
    """

    name: str
    queues = False
    default_predictor: DefaultPredictor = "bucket-mean"
    has_small_form = False

    def position(self, view: View, rng: np.random.Generator) -> int:
        """The chosen candidate's."""
        raise NotImplementedError

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        position = self.position(view, rng)
        return Choice(position, self.charge(view, position), self.figures(view))

    def choose_small(self, view: SmallView, rng: np.random.Generator) -> Choice | None:
        raise NotImplementedError  # it has none

    def would_choose(self, view: View, rng: np.random.Generator) -> Choice:
        return self.choose(view, rng)

    def turn(self) -> Any:
        return None  # most depend on nothing else

    def take_back(self, turn: Any) -> None:
        pass

    def figures(self, view: View) -> Figures:
        data = (view.request_time_s, view.kv_usage, view.load, view.in_flight)
        return Figures(COLUMNS, data)

    def charge(self, view: View, position: int) -> float:
        """What the chosen candidate's load grows by: the common w_r^s, so that a load means the
        same under each policy."""
        return view.workload_at(position)

    def charges(self, request_time_s: FloatArray, kv_usage: FloatArray, theta: float) -> FloatArray:
        return workloads(request_time_s, kv_usage, theta)

    def because(self, decision: Decided) -> str:
        after = float(decision.loads_after[decision.choice.position])
        return f"policy {self.name} chose it; its load would be {number(after)}"

    def compile(self, jit: Jit) -> None:
        pass


class LowestScore(PlacesAtOnce):
    """A policy that gives each candidate a number: the lowest has it; equals are drawn from."""

    def scores(self, view: View) -> FloatArray:
        """One number for each candidate, none of them NaN."""
        raise NotImplementedError

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        scores = self.scores(view)
        position = argmin_with_random_ties(scores, rng)
        data = (view.request_time_s, view.kv_usage, view.load, view.in_flight, scores)
        figures = Figures((*COLUMNS, "score"), data)
        return Choice(position, self.charge(view, position), figures)

    def because(self, decision: Decided) -> str:
        ours = f"by {self.name} its score was {{}}, the lowest"
        return lowest(decision, decision.choice.figures.column("score"), ours, "{} had {}")


def argmin_with_random_ties(scores: FloatArray, rng: np.random.Generator) -> int:
    """The position of the lowest score; among equals a seeded draw (erratum 2).

    Never the list's order: with equal instances the lowest index would get every request of an
    idle moment, and reversing the configuration would change the throughput.
    """
    position = int(scores.argmin())
    ties = (scores == scores[position]).nonzero()[0]
    if ties.size > 1:
        position = int(ties[int(rng.random() * ties.size)])
    return position


# Sentences


def number(value: float, digits: int = 3) -> str:
    """A figure to read: so many digits that count, never an exponent."""
    exponent = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(12, max(0, digits - 1 - exponent))}f}"


def lowest(
    decision: Decided,
    scores: FloatArray,
    ours: str,
    theirs: str,
    *,
    tie: str = "of equals one is drawn at random",
    whole: bool = False,
) -> str:
    """The sentence of a rule that takes the lowest of ``scores``, beside the nearest other one."""
    chosen = decision.choice.position
    mine = float(scores[chosen])
    others = scores.copy()
    others[chosen] = math.inf
    nearest = int(others.argmin())
    other = float(others[nearest])
    digits = 3
    # Two figures that look the same would explain nothing.
    while digits < 12 and mine != other and number(mine, digits) == number(other, digits):
        digits += 1
    shown = [str(int(v)) if whole else number(v, digits) for v in (mine, other)]
    if mine == other:
        level = int((scores == mine).sum()) - 1
        return f"{ours.format(shown[0])}, as {level} other{'s' * (level > 1)}; {tie}"
    name = decision.ids[nearest]
    who = name if scores.size == 2 else f"the next, {name},"
    return f"{ours.format(shown[0])}; {theirs.format(who, shown[1])}"
