"""How many instances the load needs, for an external autoscaler: the section ``following``.

Every five seconds it checks what has arrived and what waits, which the counters already tell:
requests cost nothing extra. Every ``interval_s``, or sooner if requests wait at two checks in a
row, ``planner.following`` computes the answer in a process of its own (``following_process``). The
answer is in the metric ``hetero_gateway_desired_instances`` and at ``/admin/following``; nothing is
started or stopped here. A failure keeps the last answer, and is counted.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.files.following_config import FollowedType, followed_profiles
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.gateway.fleet.instances import Fleet, Instance
from hetero_gateway.gateway.records.exposition import Family
from hetero_gateway.gateway.records.families import following_families
from hetero_gateway.gateway.records.history import RequestHistory
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.gateway.settings import Settings
from hetero_gateway.planner.following import (
    Arrivals,
    Follower,
    FollowingRules,
    LoadSample,
    Proposal,
    ScaledType,
    described,
)
from hetero_gateway.planner.goals import Goals
from hetero_gateway.planner.held_rates import HeldRates, RateQuestion, key_of
from hetero_gateway.planner.plan import Key
from hetero_gateway.serve.autoscaling.following_process import FollowingAnswer, Task, work_aside
from hetero_gateway.serve.dashboard.trend import Trend

_log = logging.getLogger(__name__)

_LOOK_S = 5.0
# Waiting requests trigger a new answer at most this often.
_SOONEST_S = 15.0
# How many of the last requests have their lengths simulated.
_REQUESTS, _LOOKED_AT = 1000, 5000
# With fewer, the lengths that the scheduler is configured for are used.
_FEW = 20
_MINUTE_STEPS = 12
# Of a proposal, at /admin/following.
_SHOWN = ("reason", "rate_per_s", "held_per_s", "short")


class FollowedModel:
    """The state of one followed model: its types, its arrivals, and the last answer."""

    def __init__(
        self, name: str, types: Sequence[tuple[FollowedType, Profile]], follower: Follower
    ) -> None:
        self.name = name
        self.types = {key_of(profile): (each, profile) for each, profile in types}
        self.follower = follower
        self.rates: HeldRates | None = None
        self.proposal: Proposal | None = None
        self.problem = ""
        self.asked_s = 0.0
        self.waits = False
        self.asking: asyncio.Task[None] | None = None
        self.arrivals = Arrivals()
        self._arrived = 0
        self._counted: dict[tuple[str, str], int] = {}
        self._finished = 0

    def instances(self, every: Iterable[Instance]) -> list[tuple[Key, Instance]]:
        """The instances that belong to one of its types."""
        return [
            (key, instance)
            for instance in every
            if instance.profile is not None
            and (key := key_of(instance.profile)) in self.types
            and (self.name in instance.models or not instance.models)
        ]

    def note(
        self, now_s: float, counts: Iterable[tuple[tuple[str, str], int]], under_way: int
    ) -> None:
        """Record arrivals, by the requests that ended and those still open.

        Args:
            counts: requests that ended, by model and instance.
        """
        counted = {}
        for key, number in counts:
            before = self._counted.get(key, 0)
            self._finished += number - before if number >= before else number
            counted[key] = number
        self._counted = counted
        # A removed instance takes its open requests with it.
        self._arrived = max(self._arrived, self._finished + under_way)
        self.arrivals.note(now_s, self._arrived)

    def go_on_from(self, other: "FollowedModel") -> None:
        """Continue from the state of the same model under the previous configuration."""
        self.follower.go_on_from(other.follower)
        self.proposal, self.asked_s = other.proposal, other.asked_s
        self.arrivals, self._arrived = other.arrivals, other._arrived
        self._counted, self._finished = other._counted, other._finished


@dataclass(eq=False)
class Following:
    """Follows the load; see above. Needs a running event loop.

    Args:
        _settings: the configuration in effect.
        _fleet, _metrics, _trend, _history: sources of the load.
        work: answers a task; in another process, unless a test replaces it.
    """

    _settings: Settings
    _fleet: Fleet
    _metrics: Metrics
    _trend: Trend
    _history: RequestHistory
    work: Callable[[Task], Awaitable[FollowingAnswer]] = work_aside

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._failures = 0
        self._models: dict[str, FollowedModel] = {}
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Stop checking; answers being computed are abandoned."""
        if self._timer is not None:
            self._timer.cancel()
        for model in self._models.values():
            if model.asking is not None:
                model.asking.cancel()
        self._models = {}

    def take_up(self, made: dict[str, FollowedModel]) -> None:
        """Continue with the previously desired numbers, within the new bounds."""
        before = self._models
        self.close()
        for name, model in made.items():
            if (old := before.get(name)) is not None:
                model.go_on_from(old)
            else:
                # The first answer once instances were probed and requests have arrived.
                model.asked_s = self._loop.time()
        self._models = made
        if made:
            self._timer = self._loop.call_later(_LOOK_S, self._look)

    # -- looking

    def _look(self) -> None:
        self._timer = self._loop.call_later(_LOOK_S, self._look)
        try:
            self._metrics.catch_up()
            for model in self._models.values():
                self._look_at(model)
        except Exception:
            # The boundary of a background loop: the last answer stays.
            self._failures += 1
            _log.exception("following: the load cannot be seen")

    def _look_at(self, model: FollowedModel) -> None:
        now_s, scheduler = self._loop.time(), self._fleet.scheduler
        own = model.instances(self._fleet.instances.values())
        names = {model.name}.union(*(instance.models for _, instance in own))
        queued = sum(len(scheduler.queues.get(name, ())) for name in names)
        in_flight = sum(scheduler.members.table[instance.id].in_flight for _, instance in own)
        series = self._metrics.every_series.items()
        counts = [(key, sum(s.outcomes.values())) for key, s in series if key[0] in names]
        model.note(now_s, counts, queued + in_flight)
        waited, model.waits = model.waits, queued > 0
        since_s = now_s - model.asked_s
        due = since_s >= self._settings.config.following.interval_s
        due |= waited and model.waits and since_s >= _SOONEST_S
        if not due or model.asking is not None:
            return
        model.asked_s = now_s
        ready = _servers(
            (key, i)
            for key, i in own
            if i.up and i.awake and not i.draining and not i.outcomes.ejected
        )
        sample = LoadSample(now_s, model.arrivals.points(), queued, ready, self._missed(names))
        task = Task(model.follower, sample, self._question(model, own, names), model.rates)
        model.asking = self._loop.create_task(self._ask(model, task))

    def _missed(self, names: Iterable[str]) -> bool:
        """Whether the latency goals were missed within the last minute."""
        wanted = self._settings.config.following
        for name in names:
            if name not in self._trend.models():
                continue
            figures = self._trend.figures(_MINUTE_STEPS, name)
            for limit_s, seen in (
                (wanted.ttft_p99_s, figures["ttft_s"]),
                (wanted.tpot_p99_s, figures["tpot_s"]),
            ):
                if limit_s is not None and seen is not None and seen[1] > limit_s:
                    return True
        return False

    def _question(
        self, model: FollowedModel, own: Sequence[tuple[Key, Instance]], names: Iterable[str]
    ) -> RateQuestion:
        config = self._settings.config
        # The current ones: constants follow the traffic, and engines report their memory.
        profiles = {key: profile for key, (_, profile) in model.types.items()}
        for key, instance in sorted(own, key=lambda each: each[1].id, reverse=True):
            profiles[key] = (
                self._fleet.scheduler.members.specs[instance.id].profile or profiles[key]
            )
        requests = self._history.last_lengths(set(names), _REQUESTS, _LOOKED_AT)
        if len(requests) < _FEW:
            scheduler = config.scheduler
            prompt = max(1, round(scheduler.reference_prompt_tokens))
            requests = [(prompt, max(1, round(scheduler.reference_output_tokens)))]
        wanted = config.following
        goals = Goals(ttft_p99_s=wanted.ttft_p99_s, tpot_p99_s=wanted.tpot_p99_s)
        counts = dict(model.follower.desired) or dict.fromkeys(profiles, 1)
        ranks = {key: each.data_parallel_ranks for key, (each, _) in model.types.items()}
        policy = config.scheduler.policy
        return RateQuestion(profiles, requests, goals, counts, policy, ranks=ranks)

    async def _ask(self, model: FollowedModel, task: Task) -> None:
        try:
            answer = await self.work(task)
        except Exception as error:
            # The boundary of a background task: the last answer stays.
            self._failures += 1
            model.problem = str(error) or repr(error)
            _log.warning("following %s: %s; the last answer stands", model.name, model.problem)
        else:
            before = model.proposal
            model.follower, model.rates, model.proposal = answer
            model.problem = ""
            if before is None or before.desired != answer.proposal.desired:
                desired, why = described(answer.proposal.desired), answer.proposal.reason
                _log.info("following %s: %s; %s", model.name, desired, why)
        finally:
            model.asking = None

    # -- showing

    def families(self) -> Iterable[Family]:
        rows: list[tuple[tuple[str, str, str], int, int | None]] = []
        for model in self._models.values():
            there = self._ready(model)
            desired = {} if model.proposal is None else model.proposal.desired
            for key in model.types:
                labels = (model.name, key[0], str(key[1]))
                rows.append((labels, there[key], desired.get(key)))
        return following_families(rows, self._failures)

    def _ready(self, model: FollowedModel) -> Counter[Key]:
        every = self._fleet.instances.values()
        own = model.instances(every)
        return _servers((key, i) for key, i in own if i.up and i.awake and not i.draining)

    def describe(self) -> list[dict[str, Any]]:
        rows = []
        for model in self._models.values():
            there, proposal = self._ready(model), model.proposal
            desired = {} if proposal is None else proposal.desired
            rows.append(
                {
                    "model": model.name,
                    **{name: getattr(proposal, name, None) for name in _SHOWN},
                    "problem": model.problem or None,
                    "types": [
                        {
                            "accelerator": key[0],
                            "tensor_parallel": key[1],
                            "min": each.min,
                            "max": each.max,
                            "ready": there[key],
                            "desired": desired.get(key),
                            "held_per_s": None if model.rates is None else model.rates.per_s[key],
                        }
                        for key, (each, _) in model.types.items()
                    ],
                }
            )
        return rows


def _servers(places: Iterable[tuple[Key, Instance]]) -> Counter[Key]:
    """The number of instances: the places of one address count as one."""
    return Counter(key for key, _ in {(key, place.config.server) for key, place in places})


def followed(config: GatewayConfig, base_dir: Path) -> dict[str, FollowedModel]:
    """The models to follow. Raises ConfigError: a profile cannot be loaded."""
    following = config.following
    rules = FollowingRules(following.startup_s, following.hold_s, following.utilisation)
    by_model: dict[str, list[tuple[FollowedType, Profile]]] = {}
    for each, profile in zip(following.types, followed_profiles(following, base_dir), strict=True):
        by_model.setdefault(each.model, []).append((each, profile))
    return {
        name: FollowedModel(name, types, Follower(tuple(_scaled(*t) for t in types), rules))
        for name, types in by_model.items()
    }


def _scaled(each: FollowedType, profile: Profile) -> ScaledType:
    cost = each.price_per_hour_usd
    if cost is None:
        cost = profile.tensor_parallel * each.data_parallel_ranks
    return ScaledType(key_of(profile), each.min, each.max, cost)
