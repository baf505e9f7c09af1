"""How many instances of each type the load needs now: ``Follower``.

docs/guide/scale.md explains the numbers. The caller passes the arrivals and the present instances,
once a minute and immediately when requests pile up; the answer is numbers by type and the reason.
``strain`` learns from missed goals: each minute in which the wanted instances are present but goals
are missed makes the need larger, and it fades again.

Values only: no clock is read and nothing is started or stopped here.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np

from hetero_gateway.core.costs.arrays import FloatArray
from hetero_gateway.planner.held_rates import HeldRates
from hetero_gateway.planner.plan import Key

# Rates: the span of "now", of the fitted line, and its steps.
_NOW_S = 120.0
_LINE_S = 900.0
_STEP_S = 60.0
# A line through fewer steps does not predict anything.
_LEAST_STEPS = 5
# The queue should be worked off within this time.
_CATCH_UP_S = 60.0
# Increase for a missed minute, decrease for each other; at most this much above the load's need.
_STRAIN, _RELIEF, _MOST_STRAIN = 1.15, 0.985, 2.0
# A started instance costs its start-up, and it should be wanted for a while: the cost of starting
# one, in hours of running one.
_START_HOURS = 0.2
# At most this share of a type is removed at a time, or one.
_SHARE_DOWN = 0.1
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class ScaledType:
    """A kind of instance whose number may change.

    Args:
        key: accelerator and tensor parallelism.
        least, most: bounds of the number.
        cost: of one for an hour, in any unit common to all types.
    """

    key: Key
    least: int
    most: int
    cost: float = 1.0


@dataclass(frozen=True, slots=True)
class FollowingRules:
    """How to follow.

    Args:
        startup_s: from starting an instance until it serves.
        hold_s: no instance is removed that was needed within this time.
        utilisation: the share of the instances' capacity that the load may take.
    """

    startup_s: float = 180.0
    hold_s: float = 600.0
    utilisation: float = 0.8


class Arrivals:
    """The cumulative number of requests over time, for the last quarter of an hour."""

    __slots__ = ("_points",)

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque()

    def note(self, now_s: float, arrived: float) -> None:
        """``arrived``: since any fixed time; never decreases."""
        points = self._points
        points.append((now_s, arrived))
        while len(points) > 2 and points[1][0] < now_s - _LINE_S:
            points.popleft()

    def points(self) -> tuple[tuple[float, float], ...]:
        """(when, cumulative number), oldest first."""
        return tuple(self._points)


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The state at one time.

    Args:
        now_s: on any clock that never goes back.
        arrived: of ``Arrivals``, up to now; at least one.
        queued: requests that wait for an instance.
        ready: serving instances by type.
        missed: whether the latency goals were missed in the last minute.
    """

    now_s: float
    arrived: Sequence[tuple[float, float]]
    queued: int
    ready: Mapping[Key, int]
    missed: bool = False


@dataclass(frozen=True, slots=True)
class Proposal:
    """How many instances of each type there should be.

    Args:
        desired: by type, within its bounds.
        reason: in one line.
        rate_per_s: the assumed rate, requests/s.
        held_per_s: requests/s that the desired instances hold.
        short: the need exceeds the capacity of all that may run.
    """

    desired: Mapping[Key, int]
    reason: str
    rate_per_s: float = 0.0
    held_per_s: float = 0.0
    short: bool = False


Cause = Literal["load", "trend", "queue"]


@dataclass(slots=True)
class Follower:
    """See above. Its state is plain values: it may be sent to another process and back."""

    types: tuple[ScaledType, ...]
    rules: FollowingRules = field(default_factory=FollowingRules)
    strain: float = 1.0
    _needs: deque[tuple[float, float]] = field(default_factory=deque)
    desired: dict[Key, int] = field(default_factory=dict)
    _reduced_s: float = -math.inf
    _strained_s: float = -math.inf

    def follow(self, sample: LoadSample, rates: HeldRates) -> Proposal:
        """What should be running from now on."""
        if not self.desired:
            # The past is unknown: assume that the present instances are needed for a while.
            self.desired = {
                t.key: min(max(sample.ready.get(t.key, 0), t.least), t.most) for t in self.types
            }
            self._reduced_s = sample.now_s + self.rules.hold_s - _STEP_S
        rate_per_s, cause = self._rate(sample)
        self._heed_misses(sample)
        need = rate_per_s * self.strain / self.rules.utilisation
        held_back = self._held(sample.now_s, need)
        cheapest = self.cheapest(held_back, rates, self.desired)
        desired = self._stepped(cheapest, held_back, sample, rates)
        self.desired = desired
        held = rates.of(desired)
        short = held + _ROUNDING < need
        reason = self._load_text(cause, rate_per_s, sample.queued)
        if held_back > need * 1.01:
            most = held_back * self.rules.utilisation
            reason += f"; up to {most:.3g} within {self.rules.hold_s:g} s"
        reason += f"; these hold {held:.3g}"
        if not rates.keeps_goals:
            reason += "; no type keeps the latency goals at any rate"
        elif short:
            reason += "; more is not allowed to run"
        return Proposal(dict(desired), reason, rate_per_s, held, short)

    # -- the need

    def _rate(self, sample: LoadSample) -> tuple[float, Cause]:
        """Requests/s to be ready for, and the reason."""
        series = np.array(sample.arrived)
        rate = _rate_now(series, sample.now_s)
        cause: Cause = "load"
        ahead = self._line(series, sample.now_s)
        if ahead > rate:
            rate, cause = ahead, "trend"
        if sample.queued:
            rate += sample.queued / _CATCH_UP_S
            cause = "queue"
        return rate, cause

    def _line(self, series: FloatArray, now_s: float) -> float:
        """The fitted line extrapolated to when an instance started now would be ready."""
        steps = int((now_s - series[0, 0]) // _STEP_S)
        if steps < _LEAST_STEPS:
            return 0.0
        edges = now_s - _STEP_S * np.arange(steps, -1, -1)
        rates = np.diff(np.interp(edges, *series.T)) / _STEP_S
        middles = (edges[1:] + edges[:-1]) / 2 - now_s
        slope, level = np.polyfit(middles, rates, 1)
        return float(level + max(0.0, slope) * (self.rules.startup_s + _STEP_S))

    def _heed_misses(self, sample: LoadSample) -> None:
        if sample.now_s - self._strained_s < _STEP_S:
            return
        self._strained_s = sample.now_s
        there = all(sample.ready.get(key, 0) >= n for key, n in self.desired.items())
        if sample.missed and there:
            self.strain = min(_MOST_STRAIN, self.strain * _STRAIN)
        elif not sample.missed:
            self.strain = max(1.0, self.strain * _RELIEF)

    def _held(self, now_s: float, need: float) -> float:
        """The highest need within ``hold_s``, this one included."""
        while self._needs and self._needs[0][0] <= now_s - self.rules.hold_s:
            self._needs.popleft()
        while self._needs and self._needs[-1][1] <= need:
            self._needs.pop()
        self._needs.append((now_s, need))
        return self._needs[0][1]

    # -- the instances for it

    def go_on_from(self, other: Self) -> None:
        """Take over another one's state, as after a change of bounds or rules."""
        keys = {t.key for t in self.types}
        if keys == {t.key for t in other.types}:
            self.desired, self.strain = dict(other.desired), other.strain
            self._needs = deque(other._needs)

    def cheapest(self, need: float, rates: HeldRates, now: Mapping[Key, int]) -> dict[Key, int]:
        """The cheapest set that holds a need; all that may run if none does.

        Args:
            now: instances by type that need not be started.
        """
        # Imported here: it takes long, and few users of a follower call this.
        from scipy.optimize import Bounds, LinearConstraint, milp

        types = [t for t in self.types if rates.per_s.get(t.key, 0.0) > 0]
        result = {t.key: t.least for t in self.types}
        if not types:
            return result | {key: n for key, n in now.items() if key in result}
        if sum(t.most * rates.per_s[t.key] for t in types) < need:
            return result | {t.key: t.most for t in types}
        size = len(types)
        # n of each type, then how many of them are new.
        cost = np.array([t.cost for t in types] + [_START_HOURS * t.cost for t in types])
        hold = np.array([rates.per_s[t.key] for t in types] + [0.0] * size)
        new = np.hstack((np.eye(size), -np.eye(size)))
        there = np.array([now.get(t.key, 0) for t in types], dtype=float)
        low = np.array([t.least for t in types] + [0] * size, dtype=float)
        high = np.array([t.most for t in types] + [t.most for t in types], dtype=float)
        found = milp(
            cost,
            integrality=np.ones(2 * size, dtype=np.int64),
            bounds=Bounds(low, high),
            constraints=[
                LinearConstraint(hold[np.newaxis, :], need - _ROUNDING, math.inf),
                LinearConstraint(new, -math.inf, there),
            ],
        )
        if found.x is None:  # the solver has given up
            return result | {t.key: t.most for t in types}
        return result | {t.key: round(found.x[i]) for i, t in enumerate(types)}

    def _stepped(
        self, cheapest: Mapping[Key, int], need: float, sample: LoadSample, rates: HeldRates
    ) -> dict[Key, int]:
        """From the previous numbers towards the cheapest: up at once, down little by little."""
        bounds = {t.key: t for t in self.types}
        now = {k: min(max(n, bounds[k].least), bounds[k].most) for k, n in self.desired.items()}
        desired = {key: max(n, cheapest[key]) for key, n in now.items()}
        if sample.now_s - self._reduced_s < _STEP_S:
            return desired
        # The dearest first, relative to their capacity.
        order = sorted(
            (t for t in self.types if desired[t.key] > cheapest[t.key]),
            key=lambda t: rates.per_s.get(t.key, 0.0) / t.cost if t.cost else math.inf,
        )
        for each in order:
            key = each.key
            many = max(1, math.floor(_SHARE_DOWN * desired[key]))
            fewer = dict(desired)
            fewer[key] = max(cheapest[key], desired[key] - many)
            there = {k: min(n, sample.ready.get(k, 0)) for k, n in fewer.items()}
            if rates.of(there) + _ROUNDING >= min(need, rates.of(fewer)):
                desired = fewer
                self._reduced_s = sample.now_s
        return desired

    def _load_text(self, cause: Cause, rate_per_s: float, queued: int) -> str:
        text = f"{rate_per_s:.3g} requests/s"
        if cause == "trend":
            text += f" expected in {round(self.rules.startup_s + _STEP_S)} s"
        elif cause == "queue":
            text += f", to work off {queued} that wait too"
        if self.strain > 1.01:
            text += f", × {self.strain:.2f} as goals were missed"
        return text


def _rate_now(series: FloatArray, now_s: float) -> float:
    """Requests/s of the last two minutes, or since the first observation."""
    from_s = max(now_s - _NOW_S, series[0, 0])
    if now_s <= from_s:
        return 0.0
    before, now = np.interp((from_s, now_s), *series.T)
    return float((now - before) / (now_s - from_s))


def type_label(key: Key) -> str:
    """``A800-80GB-PCIe/tp2``."""
    return f"{key[0]}/tp{key[1]}"


def described(counts: Mapping[Key, int]) -> str:
    """``2×A800-80GB-PCIe/tp1 + 3×T4-16GB/tp2``; types with none are left out."""
    parts: Sequence[str] = [f"{n}×{type_label(key)}" for key, n in counts.items() if n]
    return " + ".join(parts) or "none"


Standing = Literal["ready", "draining", "asleep"]


@dataclass(frozen=True, slots=True)
class Seat:
    """A present instance, as far as a change needs it.

    Args:
        sleeps: its engine can be put to sleep.
    """

    id: str
    key: Key
    standing: Standing = "ready"
    in_flight: int = 0
    sleeps: bool = False


@dataclass(frozen=True, slots=True)
class FleetChange:
    """A change of one instance; ``add`` has no present instance."""

    action: Literal["resume", "wake", "add", "sleep", "drain"]
    key: Key
    instance: str | None = None

    def __str__(self) -> str:
        what = f"a {type_label(self.key)}" if self.instance is None else self.instance
        return f"{self.action} {what}"


def changes(desired: Mapping[Key, int], seats: Sequence[Seat]) -> list[FleetChange]:
    """From present to desired instances: the soonest ready are added first, the idlest go first."""
    found: list[FleetChange] = []
    for key, wanted in desired.items():
        own = [seat for seat in seats if seat.key == key]
        ready = [seat for seat in own if seat.standing == "ready"]
        lacking = wanted - len(ready)
        for seat in sorted(own, key=lambda seat: seat.standing != "draining"):
            if lacking > 0 and seat.standing != "ready":
                resumes = seat.standing == "draining"
                found.append(FleetChange("resume" if resumes else "wake", key, seat.id))
                lacking -= 1
        found += [FleetChange("add", key)] * max(0, lacking)
        for seat in sorted(ready, key=lambda seat: seat.in_flight)[: max(0, -lacking)]:
            found.append(FleetChange("sleep" if seat.sleeps else "drain", key, seat.id))
    return found
