"""Policies that place every request on arrival: what they see, and how ties are broken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mypy_extensions import mypyc_attr

from hetero_gateway.core.costs.cost_model import workload
from hetero_gateway.core.policies.base import (
    COLUMNS,
    Choice,
    Decision,
    DefaultPredictor,
    View,
    number,
)
from hetero_gateway.core.policies.estimates import request_time_s
from hetero_gateway.core.types import Draws


class Candidates:
    """The inputs of a policy that places on arrival: a list entry for each candidate.

    ``request_time_s``: T_r^s. ``load``: outstanding charges, s. ``kv_usage``: Eq. (8).
    ``in_flight``: outstanding requests. ``capacity``: fitted requests/s. ``weight``: as configured.
    All include what other gateways have sent there.
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


@mypyc_attr(allow_interpreted_subclasses=True)
class PlacesAtOnce:
    """A policy that places every request on arrival, by returning a ``position``.

    One that remembers its choices also has a ``turn``.
    """

    name: str
    queues = False
    samples = False
    default_predictor: DefaultPredictor = "bucket-mean"

    def position(self, candidates: Candidates, rng: Draws) -> int:
        """The chosen candidate's position."""
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
        return None  # most have no other state

    def take_back(self, turn: Any) -> None:
        pass

    def told(self, candidates: Candidates) -> dict[str, Sequence[float]]:
        """Further columns that the choice was made from, beside ``COLUMNS``, by name."""
        return {}

    def charge(self, request_time_s: float, kv_usage: float, theta: float) -> float:
        """The common w_r^s, so that a load means the same under each policy."""
        return workload(request_time_s, kv_usage, theta)

    def because(self, decision: Decision) -> str:
        after = decision.loads_after[decision.choice.position]
        return f"policy {self.name} chose it; its load would be {number(after)}"


@mypyc_attr(allow_interpreted_subclasses=True)
class LowestScore(PlacesAtOnce):
    """A policy that scores each candidate: the lowest score wins, ties are drawn."""

    def scores(self, candidates: Candidates) -> Sequence[float]:
        """One number for each candidate, never NaN."""
        raise NotImplementedError

    def choose(self, view: View, rng: Draws) -> Choice:
        candidates = Candidates(view)
        scores = self.scores(candidates)
        position = lowest_with_random_ties(scores, rng)
        return self._choice(candidates, position, {"score": scores})

    def because(self, decision: Decision) -> str:
        ours = f"by {self.name} its score was {{}}, the lowest"
        return lowest(decision, decision.choice.figures.column("score"), ours, "{} had {}")


def lowest_with_random_ties(scores: Sequence[float], rng: Draws) -> int:
    """The position of the lowest score; a seeded draw among ties (erratum 2).

    Never the list's order: with equal instances, the lowest index would get every request of an
    idle moment, and reversing the configuration would change the throughput.
    """
    best = min(scores)
    ties = [i for i, score in enumerate(scores) if score == best]
    return ties[0] if len(ties) == 1 else ties[int(rng.random() * len(ties))]


def lowest(
    decision: Decision,
    scores: Sequence[float],
    ours: str,
    theirs: str,
    *,
    tie: str = "of equals one is drawn at random",
    whole: bool = False,
) -> str:
    """The sentence of a rule that takes the lowest of ``scores``, with the runner-up."""
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
