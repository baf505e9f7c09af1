"""The dashboard's data, kept up to date for all viewers: server-sent events of the changes.

A viewer gets the whole picture once, and then the changes; each change is written once for all
viewers. Figures are rounded to three significant digits, so that steady ones cause no events.
While nobody looks, only the trend's steps are made, and alarms note their start.

    event       content
    all         everything; ``columns`` names the figures of an instance's row
    rows        rows of instances that changed, by their index in ``all``
    capacities  requests/s of usual lengths that each instance can serve, if any changed
    head        alarms, queue, totals, if any of them changed
    use         clients, their waiting times, retries: of the last minute's requests, at each step
    trend       figures now and over 15 minutes, of all models and of each; the newest point, and
                that of the last six hours, if there is a new one
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from hetero_gateway.core.costs.cost_model import request_time_s
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.fleet.instances import Instance
from hetero_gateway.serve.dashboard.alarms import Alarms, Shown, state_of
from hetero_gateway.serve.dashboard.trend import (
    LONG_STEPS,
    MINUTE_STEPS,
    NOW_STEPS,
    STEP_S,
    STEPS,
    Trend,
    short,
)
from hetero_gateway.serve.dashboard.use import describe_use

_log = logging.getLogger(__name__)

# Further viewers get 503.
MOST_VIEWERS = 64
_EVERY_S = 1.0
# From this many instances on, rows are sent half as often.
_MANY = 50
_QUIET_S = 15.0
_AT_ONCE = 32
# A request with unknown properties, to compute an instance's capacity.
_USUAL = (800.0, 200.0)
_IN_SECONDS = ("finish-time", "min-max", "paper", "least-work")

COLUMNS = (
    "state", "in_flight", "waiting_first_token", "load", "kv", "engine_kv", "requests_per_s",
    "output_tokens_per_s", "errors", "speed", "slow",
)  # fmt: skip


class Board:
    """See above. Needs a running event loop.

    Args:
        gateway: the gateway that it shows.
    """

    def __init__(self, gateway: Shown) -> None:
        self.trend = Trend(gateway.metrics)
        self.alarms = Alarms(gateway, self.trend)
        self.viewers = 0
        self._gateway = gateway
        self._loop = asyncio.get_running_loop()
        self._version = 0
        self._news = b""
        self._next = asyncio.Event()  # set with the next version
        self._capacities: list[float | None] = []
        self._plain: list[dict[str, Any]] = []  # properties of each instance that seldom change
        self._rows: list[list[Any]] = []
        self._head: dict[str, Any] = {}
        self._use: dict[str, Any] = {}
        self._used = -1  # the trend's step at which that was made
        self._trended = 0
        self._looking: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(STEP_S, self._step)

    def close(self) -> None:
        self._timer.cancel()
        if self._looking is not None:
            self._looking.cancel()
        self._tell(b"")

    def let_go(self) -> None:
        """The gateway is ending: disconnect the viewers. May be called from a signal handler."""
        self._loop.call_soon_threadsafe(self._tell, b"")

    def _tell(self, news: bytes) -> None:
        self._news = news
        self._version += 1
        told, self._next = self._next, asyncio.Event()
        told.set()

    def _step(self) -> None:
        self._timer = self._loop.call_later(STEP_S, self._step)
        fleet = self._gateway.fleet
        if self.trend.steps % MINUTE_STEPS == 0:  # models that are gone are noticed
            self._gateway.metrics.forget_unserved(fleet.serves, time.monotonic())
        self.trend.step(fleet.scheduler.queued)
        if not self.viewers:
            self.alarms.now()  # so that their start is known later

    # Viewers

    def check_room(self) -> None:
        """Raises Refusal: 503, there are too many viewers already."""
        if self.viewers >= MOST_VIEWERS:
            message = f"{MOST_VIEWERS} are looking already."
            raise Refusal(503, "too_many_viewers", message, kind="server_error", retry_after_s=5)

    async def events(self) -> AsyncIterator[bytes]:
        """Events for one viewer, until the gateway ends."""
        self.viewers += 1
        try:
            if self._looking is None:
                await self._look()
                self._looking = self._loop.create_task(self._keep_looking())
            seen = self._version
            yield self._everything()
            while not self._gateway.draining:
                try:
                    async with asyncio.timeout(_QUIET_S):
                        await self._next.wait()
                except TimeoutError:
                    yield b": nothing new\n\n"  # and a closed connection is noticed
                    continue
                # A viewer too slow for a change gets everything.
                late = self._version != seen + 1
                seen = self._version
                yield self._everything() if late else self._news
        finally:
            self.viewers -= 1
            if not self.viewers and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    async def _keep_looking(self) -> None:
        while True:
            many = len(self._gateway.fleet.instances) > _MANY
            await asyncio.sleep(_EVERY_S * (2 if many else 1))
            try:
                if news := await self._look():
                    self._tell(news)
            except Exception:
                # The boundary of a background loop: one figure that cannot be shown must not end
                # it.
                _log.exception("what the dashboard shows cannot be made")

    async def _look(self) -> bytes:
        """Find the changes; returns them as events."""
        gateway, events = self._gateway, []
        plain, rows, capacities = [], [], []
        usual = self._usual()
        for number, instance in enumerate(list(gateway.fleet.instances.values())):
            if number % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)
            if gateway.fleet.instances.get(instance.id) is instance:
                plain.append(self._plain_of(instance))
                capacities.append(self._capacity_of(instance, usual))
                rows.append(self._row_of(instance))
        head = self._head_of()
        use = self._use
        if self.trend.steps != self._used:  # it may be slow, and hardly changes in a second
            self._used, use = self.trend.steps, await self._use_of()
        before, self._use = self._use, use
        if [each["id"] for each in plain] != [each["id"] for each in self._plain]:
            self._plain, self._rows, self._head = plain, rows, head
            self._capacities = capacities
            return self._everything()
        told = {i: new for i, (new, old) in enumerate(zip(plain, self._plain, strict=True))
                if new != old}  # fmt: skip
        changed = [[i, *new] for i, (new, old) in enumerate(zip(rows, self._rows, strict=True))
                   if new != old]  # fmt: skip
        if told or changed:
            events.append(_event("rows", {"rows": changed, "instances": told}))
        if capacities != self._capacities:
            self._capacities = capacities
            events.append(_event("capacities", capacities))
        if head != self._head:
            events.append(_event("head", head))
        if use != before:
            events.append(_event("use", self._use))
        if self.trend.steps != self._trended:
            self._trended = self.trend.steps
            news = {"point": self.trend.points(1)}
            if self.trend.steps % LONG_STEPS == 0:
                news["long_point"] = self.trend.long_points()[-1:]
            events.append(_event("trend", self._trend() | news))
        self._plain, self._rows, self._head = plain, rows, head
        return b"".join(events)

    def _everything(self) -> bytes:
        gateway = self._gateway
        policy = gateway.config.scheduler.policy
        document = {
            "policy": policy,
            "load_unit": "s" if policy in _IN_SECONDS else "",
            "columns": COLUMNS,
            "instances": self._plain,
            "rows": self._rows,
            "capacities": self._capacities,
            "head": self._head,
            "use": self._use,
            "step_s": STEP_S,
            "long_step_s": STEP_S * LONG_STEPS,
            "points": self.trend.points(),
            "long_points": self.trend.long_points(),
            "trend": self._trend(),
        }
        return _event("all", document)

    def _trend(self) -> dict[str, Any]:
        trend = self.trend
        return {
            "now": trend.figures(NOW_STEPS),
            "all": trend.figures(STEPS),
            "models": {
                model: {"now": trend.figures(NOW_STEPS, model), "all": trend.figures(STEPS, model)}
                for model in trend.models()
            },
        }

    def _head_of(self) -> dict[str, Any]:
        gateway = self._gateway
        fleet = gateway.fleet
        queue = gateway.placement.describe()
        return {
            "draining": gateway.draining,
            "waiting": None if queue is None else queue["waiting"],
            "oldest_wait_s": None if queue is None else short(queue["oldest_wait_s"], 2),
            "in_flight": sum(fleet.scheduler.members.table[i].in_flight for i in fleet.instances),
            "sharing": None if gateway.sharing is None else gateway.sharing.describe(),
            "batches": None if gateway.batches is None else gateway.batches.describe(),
            "alarms": self.alarms.now(),
        }

    async def _use_of(self) -> dict[str, Any]:
        dataplane, fleet = self._gateway.dataplane, self._gateway.fleet
        return await describe_use(
            dataplane.request_log, fleet, self._gateway.admission.usage.denied
        )

    def _usual(self) -> tuple[float, float]:
        """Mean lengths of the last minutes' requests: prompt and output tokens."""
        last = self.trend.figures(STEPS)
        requests = last["requests_per_s"] - last["failed"] / (STEPS * STEP_S)
        if requests <= 0 or not last["output_tokens_per_s"]:
            return _USUAL
        return (
            _rounded(last["input_tokens_per_s"] / requests),
            _rounded(last["output_tokens_per_s"] / requests),
        )

    def _capacity_of(self, instance: Instance, usual: tuple[float, float]) -> float | None:
        """Requests/s of usual lengths by its profile, Eq. (6); None: it has none."""
        profile = self._gateway.fleet.scheduler.members.specs[instance.id].profile
        return None if profile is None else short(1.0 / request_time_s(profile, *usual), 2)

    def _plain_of(self, instance: Instance) -> dict[str, Any]:
        gateway = self._gateway
        spec = gateway.fleet.scheduler.members.specs[instance.id]
        profile = spec.profile
        seen = gateway.fleet.scheduler.members.snapshot(instance.id)
        return {
            "id": instance.id,
            "models": sorted(instance.models),
            "profile": instance.profile_name,
            "accelerator": None if profile is None else profile.gpu,
            "weight": instance.weight,
            "source": instance.source,
            "part_of": _part_of(instance),
            "why": _why(instance),
            "drifted": seen.drifted,
            "recalibrated": instance.calibrated is not None,
            "kv_capacity_tokens": seen.kv_capacity_tokens,
        }

    def _row_of(self, instance: Instance) -> list[Any]:
        seen = self._gateway.fleet.scheduler.members.snapshot(instance.id)
        requests, tokens, failed = self.trend.of_instance(instance.id)
        engine = instance.engine_kv_usage
        return [
            state_of(instance),
            seen.in_flight,
            seen.waiting_first_token,
            short(seen.load_s),
            None if seen.kv_usage is None else short(seen.kv_usage, 2),
            None if engine is None else short(engine, 2),
            short(requests, 2),
            short(tokens, 2),
            short(failed, 2),
            None if seen.speed_factor is None else short(seen.speed_factor, 2),
            None if seen.slow_since_s is None else short(seen.slowness or 0.0, 2),
        ]


def _rounded(tokens: float) -> float:
    """A length rounded to steps of a quarter, so that capacities do not change all the time."""
    return float(1.25 ** round(math.log(max(1.0, tokens), 1.25)))


def _part_of(instance: Instance) -> str:
    rank = instance.config.rank_header
    return "" if rank is None else f"rank {rank} of {instance.config.server}"


def _why(instance: Instance) -> str:
    """Why it gets no requests, or fewer than it could; "" if it gets its share."""
    reasons = []
    if not instance.up:
        reasons.append(instance.shown_down_reason or "unknown reason")
    if instance.draining:
        reasons.append("finishes what it has, and gets nothing new")
    if instance.up and not instance.awake:
        reasons.append(
            "gets nothing until it wakes" if instance.asleep else "gets nothing until it resumes"
        )
    outcomes = instance.outcomes
    if outcomes.ejected:
        reasons.append(f"ejected: its requests failed ({outcomes.reason})")
    elif outcomes.breaker.value in ("recovering", "busy"):
        reasons.append(f"{outcomes.breaker.value}: it gets fewer requests than it could hold")
    return "; ".join(reasons)


def _event(name: str, document: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(document))
