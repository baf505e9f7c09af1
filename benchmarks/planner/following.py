"""A day of traffic with instances that come and go: who follows it best, at what price?

    python benchmarks/planner/following.py [--days held-out|training] [--day D] [--who W] [--json]

Requests of a synthetic day (its course, noise, bursts; seeded) go through the gateway's scheduler
to simulated engines of unequal types. An instance that is started serves ``STARTUP_S`` later, and
is paid for from its start on; one that is stopped gets nothing new, ends what it has, and is paid
for until then. Compared:

    static     the cheapest instances that hold the day's highest rate, all day
    reactive   an autoscaler for each type, as Kubernetes has it: every 15 s, requests in flight per
               instance over a target, a tolerance of 10 %, down after 5 minutes of less. ``at X``:
               its target is X of what an instance has in flight at the rate that it holds
    following  ``planner.following``, as the gateway runs it: once a minute, and when requests wait
    oracle     the same instances' rates, and the true rate of the time to come

Printed for each day: USD, the share of requests within TTFT and TPOT limits, starts and stops, and
requests that did not end. ``FollowingRules``, ``_CATCH_UP_S`` and the like were chosen on
the training days; the held-out days have other seeds, other courses, and other lengths from noon
on. Exit code 1 when following cuts a request, when it has fewer than 99 % within the limits, when
it costs more than 80 % of static, or when a reactive one has as many within the limits for less.
"""

from __future__ import annotations

import argparse
import heapq
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.tables import Column, report
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.lengths.predictors import BucketMeanPredictor
from hetero_gateway.core.policies import make_policy
from hetero_gateway.core.request import Request
from hetero_gateway.core.scheduling.queue import Ticket
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.types import InstanceId, InstanceSpec, Outcome, Reject, Usage
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.planner.following import (
    Arrivals,
    Follower,
    FollowingRules,
    LoadSample,
    ScaledType,
)
from hetero_gateway.planner.goals import Goals
from hetero_gateway.planner.held_rates import HeldRates, RateQuestion, find_held_rates
from hetero_gateway.planner.plan import Key
from hetero_gateway.sim.cluster import SimulatedInstance, simulate
from hetero_gateway.sim.figures import request_times
from hetero_gateway.sim.jit import can_compile
from hetero_gateway.sim.workload import LogNormal, LogNormalLengths, Workload

# Profile, USD per hour (round figures to compare with, not offers), and how many there are.
TYPES = (
    ("A800-80GB-PCIe/Llama-3-8B/tp1", 2.4, 1),
    ("V100-32GB-NVLink2/Llama-3-8B/tp1", 0.9, 8),
    ("A10G-24GB/Llama-3-8B/tp1", 0.6, 8),
)
STARTUP_S = 180.0
GOALS = Goals(ttft_p99_s=3.0, tpot_p99_s=0.1)
DAY_S = 86_400.0
_MINUTE_S = 60.0
_LOOK_S = 15.0
# What the gateway remembers of lengths: the last so many requests.
_RECENT = 1000
_MODEL = "model"


@dataclass(frozen=True)
class Day:
    """A course of the rate over a day, and whether requests get longer at noon."""

    name: str
    course: str
    seed: int
    longer_from_noon: float = 1.0


DAYS = {
    "training": (Day("office", "office", 1),),
    "held-out": (
        Day("office'", "office", 11),
        Day("evening'", "evening", 12),
        Day("steps", "steps", 13),
        Day("longer at noon", "office", 14, 1.6),
    ),
}


def course(day: Day, peak_per_s: float) -> np.ndarray:
    """Requests/s of each minute: a course, slow noise, and six bursts."""
    hour = np.arange(0, 24, 1 / 60)
    rng = np.random.default_rng((day.seed, 1))

    def hump(at: float, width: float) -> np.ndarray:
        away = (hour - at + 12) % 24 - 12
        return np.exp(-((away / width) ** 2) / 2)

    if day.course == "office":
        shape = 0.12 + 0.85 * hump(10.5, 1.8) + 0.8 * hump(15.5, 2.0)
    elif day.course == "evening":
        shape = 0.15 + 0.4 * hump(12.0, 3.0) + 0.85 * hump(20.5, 2.2)
    else:  # jobs that begin and end on the hour
        shape = 0.15 + 0.5 * ((hour >= 8) & (hour < 17)) + 0.3 * ((hour >= 13) & (hour < 15))
    shape = shape / shape.max()
    noise, sd = np.zeros(hour.size), 0.08
    for i in range(1, hour.size):  # forgets itself within a quarter of an hour
        noise[i] = 0.94 * noise[i - 1] + sd * math.sqrt(1 - 0.94**2) * rng.standard_normal()
    shape = shape * np.exp(noise)
    for start in rng.integers(0, hour.size, 6):
        length = int(rng.integers(4, 16))
        shape[start : start + length] *= rng.uniform(1.2, 1.7)
    return peak_per_s * shape


def requests_of(day: Day, rate_per_s: np.ndarray) -> Workload:
    rng = np.random.default_rng((day.seed, 2))
    counts = rng.poisson(rate_per_s * _MINUTE_S)
    arrival_s = np.concatenate(
        [np.sort(rng.uniform(i, i + 1, n)) * _MINUTE_S for i, n in enumerate(counts)]
    )
    lengths = LogNormalLengths(LogNormal(1500, 0.7, 6000), LogNormal(600, 0.6, 2000))
    prompt, output = lengths.draw(arrival_s.size, rng)
    if day.longer_from_noon != 1:
        late = arrival_s > DAY_S / 2
        prompt[late] = np.rint(prompt[late] * day.longer_from_noon)
        output[late] = np.rint(output[late] * day.longer_from_noon)
    return Workload(arrival_s, prompt, output)


@dataclass
class Life:
    """One instance that there may be."""

    key: Key
    spec: InstanceSpec
    state: str = "off"  # "starting", "ready", "draining"
    since_s: float = 0.0


class Elastic(Scheduler):
    """The gateway's scheduler over instances that come and go, and the clock of whoever decides."""

    def __init__(
        self, policy: str, workload: Workload, reference: tuple[float, float], day: Day
    ) -> None:
        rng = np.random.default_rng((day.seed, 3))
        super().__init__(make_policy(policy), rng, reference=reference)
        self.workload = workload
        self.lives: dict[InstanceId, Life] = {}
        self.arrived = 0
        self.decide: Callable[[float], Mapping[Key, int] | None] = lambda now_s: None
        self.paid_s: Counter[Key] = Counter()
        self.actions = 0
        self.recent: deque[tuple[int, int]] = deque(maxlen=_RECENT)
        self.judged: deque[tuple[float, bool]] = deque()  # first tokens: when, whether late
        self._look_s = 0.0
        self._starting: list[tuple[float, InstanceId]] = []
        self._owners: dict[Dispatch, int] = {}
        self._first_s: dict[Dispatch, float] = {}

    def add(self, spec: InstanceSpec) -> None:
        super().add(spec)
        assert spec.profile is not None
        key = (spec.profile.gpu, spec.profile.tensor_parallel)
        self.lives[spec.instance_id] = Life(key, spec)
        self._set(self.lives[spec.instance_id], available=False)

    def _set(self, life: Life, *, available: bool, draining: bool = False) -> None:
        spec = life.spec
        life.spec = InstanceSpec(
            spec.instance_id, spec.models, spec.profile, available=available, draining=draining
        )
        self.replace(life.spec)

    def count(self, *states: str) -> Counter[Key]:
        return Counter(life.key for life in self.lives.values() if life.state in states)

    def want(self, desired: Mapping[Key, int], now_s: float, *, at_once: bool = False) -> None:
        """Start or stop instances until there are so many."""
        there = self.count("ready", "starting")
        for key, n in desired.items():
            for _ in range(n - there[key]):
                self._start(key, now_s, at_once)
            for _ in range(there[key] - n):
                self._stop(key, now_s)

    def _start(self, key: Key, now_s: float, at_once: bool) -> None:
        own = [life for life in self.lives.values() if life.key == key]
        # One that drains is there still; else one that is off. As a StatefulSet, the lowest first.
        life = next((o for o in own if o.state == "draining"), None)
        if life is not None:
            life.state = "ready"
            self._set(life, available=True)
        else:
            life = next(o for o in own if o.state == "off")
            life.state, life.since_s = "starting", now_s
            ready_s = now_s if at_once else now_s + STARTUP_S
            heapq.heappush(self._starting, (ready_s, life.spec.instance_id))
        self.actions += 1

    def _stop(self, key: Key, now_s: float) -> None:
        there = [
            o for o in self.lives.values() if o.key == key and o.state in ("ready", "starting")
        ]
        life = there[-1]
        self.actions += 1
        if life.state == "ready":
            life.state = "draining"
            self._set(life, available=True, draining=True)
            self._see_off(life, now_s)
        else:
            self._off(life, now_s)

    def _see_off(self, life: Life, now_s: float) -> None:
        if life.state == "draining" and not self.members.table[life.spec.instance_id].in_flight:
            self._off(life, now_s)

    def _off(self, life: Life, now_s: float) -> None:
        life.state = "off"
        self.paid_s[life.key] += now_s - life.since_s
        self._set(life, available=False)

    def end(self, now_s: float) -> None:
        for life in self.lives.values():
            if life.state != "off":
                self.paid_s[life.key] += now_s - life.since_s

    # -- events

    def submit(
        self, request: Request, now_s: float, *, owner: Any = None, first: bool = False
    ) -> Ticket | Reject:
        self._pass(now_s)
        self.arrived += 1
        return super().submit(request, now_s, owner=owner, first=first)

    def _pass(self, now_s: float) -> None:
        while self._starting and self._starting[0][0] <= now_s:
            _, name = heapq.heappop(self._starting)
            life = self.lives[name]
            if life.state == "starting":
                life.state = "ready"
                self._set(life, available=True)
        if now_s >= self._look_s:
            self._look_s = (now_s // _LOOK_S + 1) * _LOOK_S
            if (desired := self.decide(now_s)) is not None:
                self.want(desired, now_s)

    def pump(self, now_s: float) -> list[Ticket]:
        tickets = super().pump(now_s)
        for ticket in tickets:
            if ticket.dispatch is not None:
                self._owners[ticket.dispatch] = ticket.owner
        return tickets

    def first_token(self, dispatch: Dispatch, now_s: float) -> None:
        super().first_token(dispatch, now_s)
        waited_s = now_s - self.workload.arrival_s[self._owners[dispatch]]
        self._first_s[dispatch] = now_s
        assert GOALS.ttft_p99_s is not None
        self.judged.append((now_s, waited_s > GOALS.ttft_p99_s))

    def settle(
        self, dispatch: Dispatch, outcome: Outcome, now_s: float, usage: Usage | None = None
    ) -> bool:
        result = super().settle(dispatch, outcome, now_s, usage)
        owner = self._owners.pop(dispatch)
        output = int(self.workload.output_tokens[owner])
        began_s = self._first_s.pop(dispatch, now_s)
        assert GOALS.tpot_p99_s is not None
        if output > 1 and (now_s - began_s) / (output - 1) > GOALS.tpot_p99_s:
            self.judged.append((now_s, True))
        self.recent.append((int(self.workload.prompt_tokens[owner]), output))
        life = self.lives[dispatch.state.instance_id]
        self._see_off(life, now_s)
        return result

    def missed(self, now_s: float) -> bool:
        """More than one in a hundred of the last minute."""
        while self.judged and self.judged[0][0] < now_s - _MINUTE_S:
            self.judged.popleft()
        late = sum(late for _, late in self.judged)
        return late > max(1, 0.01 * len(self.judged))


# Who decides


def following(
    cluster: Elastic, types: tuple[ScaledType, ...], rates: HeldRates, rules: FollowingRules
) -> Callable[[float], Mapping[Key, int] | None]:
    follower = Follower(types, rules)
    arrivals, followed_s, waits = Arrivals(), -math.inf, False

    def decide(now_s: float) -> Mapping[Key, int] | None:
        nonlocal rates, followed_s, waits
        arrivals.note(now_s, cluster.arrived)
        waited, waits = waits, cluster.queued > 0
        if now_s - followed_s < _MINUTE_S and not (waits and waited):
            return None
        followed_s = now_s
        rates = _measured_again(cluster, rates)
        ready = cluster.count("ready")
        missed = cluster.missed(now_s)
        sample = LoadSample(now_s, arrivals.points(), cluster.queued, ready, missed)
        return follower.follow(sample, rates).desired

    return decide


def _measured_again(cluster: Elastic, rates: HeldRates) -> HeldRates:
    if len(cluster.recent) < _RECENT:
        return rates
    question = _question(list(cluster.recent), rates.profiles)
    return rates if rates.answers(question) else find_held_rates(question)


def reactive(
    cluster: Elastic, types: tuple[ScaledType, ...], usual: Mapping[Key, float], target: float
) -> Callable[[float], Mapping[Key, int] | None]:
    """The Kubernetes HPA's rule, for each type on its own."""
    wanted: dict[Key, deque[tuple[float, int]]] = {t.key: deque() for t in types}

    def decide(now_s: float) -> Mapping[Key, int] | None:
        ready, there = cluster.count("ready"), cluster.count("ready", "starting")
        in_flight: Counter[Key] = Counter()
        for name, life in cluster.lives.items():
            if life.state == "ready":
                in_flight[life.key] += cluster.snapshot(name).in_flight
        desired = {}
        for each in types:
            key, now = each.key, there[each.key]
            # Pods that are not ready yet count as idle when it goes up, as in the HPA.
            ratio = in_flight[key] / max(1, ready[key]) / (target * usual[key])
            if ratio > 1:
                ratio = max(1.0, in_flight[key] / max(1, now) / (target * usual[key]))
            n = now if abs(ratio - 1) <= 0.1 else math.ceil(now * ratio)
            n = min(max(n, each.least), each.most)
            past = wanted[key]
            past.append((now_s, n))
            while past[0][0] < now_s - 300:
                past.popleft()
            desired[key] = n if n > now else min(now, max(m for _, m in past))
        return desired

    return decide


def oracle(
    cluster: Elastic, types: tuple[ScaledType, ...], rates: HeldRates, rate_per_s: np.ndarray
) -> Callable[[float], Mapping[Key, int] | None]:
    follower = Follower(types)
    # What another kind takes the place of stays until that is ready.
    lately: deque[tuple[float, Mapping[Key, int]]] = deque()

    def decide(now_s: float) -> Mapping[Key, int] | None:
        nonlocal rates
        minute = int(now_s // _MINUTE_S)
        rates = _measured_again(cluster, rates)
        ahead = rate_per_s[minute : minute + 2 + math.ceil(STARTUP_S / _MINUTE_S)]
        desired = follower.cheapest(float(ahead.max()) / 0.9, rates, cluster.count("ready"))
        lately.append((now_s, desired))
        while lately[0][0] < now_s - STARTUP_S - _MINUTE_S:
            lately.popleft()
        return {key: max(each[key] for _, each in lately) for key in desired}

    return decide


# One run


def _question(requests: list[tuple[int, int]], profiles: Mapping[Key, Profile]) -> RateQuestion:
    return RateQuestion(profiles, requests, GOALS, dict.fromkeys(profiles, 2))


def run(
    day: Day,
    name: str,
    peak_per_s: float,
    profiles: Mapping[Key, Profile],
    prices: Mapping[Key, float],
) -> dict[str, Any]:
    begin_s = time.process_time()
    rate_per_s = course(day, peak_per_s)
    workload = requests_of(day, rate_per_s)
    first = list(
        zip(
            workload.prompt_tokens[:2000].tolist(),
            workload.output_tokens[:2000].tolist(),
            strict=True,
        )
    )
    rates = find_held_rates(_question(first, profiles))
    # An autoscaler that looks at an instance's requests cannot start the first one.
    least = dict.fromkeys(profiles, 1 if name.startswith("reactive") else 0)
    least[min(profiles, key=prices.__getitem__)] = 1
    most = {key: there for key, (*_, there) in zip(profiles, TYPES, strict=True)}
    types = tuple(ScaledType(key, least[key], most[key], prices[key]) for key in profiles)
    reference = tuple(map(float, np.mean(first, axis=0)))
    cluster = Elastic("finish-time", workload, (reference[0], reference[1]), day)
    instances = [
        SimulatedInstance(InstanceId(f"{key[0]}-{i}"), profile, profile)
        for key, profile in profiles.items()
        for i in range(most[key])
    ]
    longest = (
        rates
        if day.longer_from_noon == 1
        else find_held_rates(_question(_last(workload), profiles))
    )
    start = Follower(types).cheapest(float(rate_per_s[:5].max()) / 0.8, rates, {})
    if name == "static":
        start = Follower(types).cheapest(float(rate_per_s.max()) / 0.9, longest, {})
    elif name == "following":
        cluster.decide = following(cluster, types, rates, FollowingRules(startup_s=STARTUP_S))
    elif name == "oracle":
        cluster.decide = oracle(cluster, types, rates, rate_per_s)
    else:
        usual = _usual(rates, profiles, first)
        cluster.decide = reactive(cluster, types, usual, float(name.split()[-1]))
    began = False

    def watch_first(now_s: float) -> None:
        nonlocal began
        if not began:
            began = True
            cluster.want(start, 0.0, at_once=True)
            cluster.actions = 0

    decide = cluster.decide

    def first_then(now_s: float) -> Mapping[Key, int] | None:
        watch_first(now_s)
        cluster.decide = decide
        cluster._pass(now_s)
        return None

    cluster.decide = first_then
    records = simulate(
        instances, workload, cluster, BucketMeanPredictor(reference[1]), model=_MODEL,
        compiled=can_compile(),
    )  # fmt: skip
    cluster.end(DAY_S)
    ended = np.isfinite(records.finish_s)
    times = request_times(workload, records, ended)
    assert GOALS.ttft_p99_s is not None
    assert GOALS.tpot_p99_s is not None
    within = times.ttft_s <= GOALS.ttft_p99_s
    tpot = (records.finish_s - records.first_token_s)[ended] / np.maximum(
        1, workload.output_tokens[ended] - 1
    )
    within &= tpot <= GOALS.tpot_p99_s
    usd = sum(prices[key] * paid_s / 3600 for key, paid_s in cluster.paid_s.items())
    return {
        "day": day.name,
        "who": name,
        "requests": len(workload),
        "usd": usd,
        "hours": sum(cluster.paid_s.values()) / 3600,
        "within": float(within.sum()) / len(workload),
        "ttft_p99_s": float(np.percentile(times.ttft_s, 99)),
        "actions": cluster.actions,
        "cut": int((~ended).sum()),
        "cpu_s": time.process_time() - begin_s,
        "met": True,
    }


def _last(workload: Workload) -> list[tuple[int, int]]:
    rows = zip(
        workload.prompt_tokens[-2000:].tolist(),
        workload.output_tokens[-2000:].tolist(),
        strict=True,
    )
    return list(rows)


def _usual(
    rates: HeldRates, profiles: Mapping[Key, Profile], requests: list[tuple[int, int]]
) -> dict[Key, float]:
    """Requests in flight on one instance at the rate that it holds (Little's law)."""
    from hetero_gateway.planner.question import Trials
    from hetero_gateway.sim.alone import Engines, Mix
    from hetero_gateway.sim.workload import TraceLengths

    rows = np.array(requests)
    mix = Mix.of(TraceLengths(rows[:, 0], rows[:, 1]), 0)
    result = {}
    for key, profile in profiles.items():
        rate = max(rates.per_s[key], 1e-3)
        figures = Trials("finish-time", Engines()).hold_alone(profile, mix, rate)
        assert figures is not None
        result[key] = rate * figures.latency_mean_s
    return result


WHO = ("static", "reactive at 0.5", "reactive at 0.7", "reactive at 0.9", "following", "oracle")
COLUMNS = (
    Column("day", "day", 16),
    Column("who", "who", 17),
    Column("requests", "requests", 9, "d"),
    Column("USD", "usd", 8, ".1f"),
    Column("hours", "hours", 8, ".1f"),
    Column("within", "within", 9, ".2%"),
    Column("TTFT p99, s", "ttft_p99_s", 13, ".2f"),
    Column("actions", "actions", 9, "d"),
    Column("cut", "cut", 5, "d"),
    Column("CPU s", "cpu_s", 8, ".0f"),
)


def rows(
    days: tuple[Day, ...], who: tuple[str, ...], peak_per_s: float
) -> Iterator[dict[str, Any]]:
    profiles = {(p.gpu, p.tensor_parallel): p for p in (load_profile(name) for name, *_ in TYPES)}
    prices = dict(zip(profiles, (price for _, price, _ in TYPES), strict=True))
    for day in days:
        of_day: dict[str, dict[str, Any]] = {}
        for name in who:
            row = of_day[name] = run(day, name, peak_per_s, profiles, prices)
            if name == "following":
                row["met"] = row["cut"] == 0 and row["within"] >= 0.99
                if "static" in of_day:
                    row["met"] &= row["usd"] <= 0.8 * of_day["static"]["usd"]
                for other in of_day.values():
                    if other["who"].startswith("reactive") and other["within"] >= row["within"]:
                        row["met"] &= row["usd"] <= other["usd"]
            yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--days", choices=tuple(DAYS), default="held-out")
    parser.add_argument("--day", action="append", metavar="NAME", help="only these of the days")
    parser.add_argument("--who", action="append", choices=WHO, help="default: all")
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s at the peak, about")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    who = tuple(args.who or WHO)
    days = tuple(day for day in DAYS[args.days] if day.name in (args.day or [day.name]))
    return report(rows(days, who, args.rate), COLUMNS, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
