"""The other gateways' load, kept up to date beside the traffic.

One task exchanges messages with the store and passes the others' to the scheduler; another one
listens for their news. The first task reports a placement at once, and then not again for
``news_s``. No request ever waits for either: a store that is slow, away or full of nonsense makes
the view of the others old, then empty (``Mode``), and each gateway then decides by what it knows
itself. When the store is back, the first exchange brings everything: messages are whole states, not
differences.

The cost of an exchange grows with the instances, and that of news with the gateways; their pauses
grow with it, so that each never takes more than a twentieth of a core. News are cheaper: with
hundreds of instances they still arrive in milliseconds.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hetero_gateway.core.costs.profile import DEFAULT_MAX_NUM_SEQS
from hetero_gateway.core.histogram import Histogram
from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.limits.accounts import Account
from hetero_gateway.core.sharing.belief import EngineReport
from hetero_gateway.core.sharing.breaker import Breaker
from hetero_gateway.core.sharing.exchange import OTHERS, LoadExchange, Mode
from hetero_gateway.core.sharing.limits import SharedLimits
from hetero_gateway.core.sharing.message import MessageError, pack, unpack
from hetero_gateway.core.types import InstanceId
from hetero_gateway.engines.vllm import EngineMetrics
from hetero_gateway.files.scheduler_config import SchedulerConfig
from hetero_gateway.gateway.fleet.instances import Fleet, Instance
from hetero_gateway.scaleout.sharing.log import PlacementLog
from hetero_gateway.scaleout.sharing.node import StoreError
from hetero_gateway.scaleout.sharing.placements import SharedPlacements
from hetero_gateway.scaleout.sharing.store import RedisStore, Store

_log = logging.getLogger(__name__)

# Longest pause between two attempts to reach the store.
_MOST_PAUSE_S = 1.0
# Maximum share of a core for exchanges, and the same again for news.
_MOST_SHARE = 1 / 20
# Waiting news, and their bytes: more are dropped, as the next exchange has everything.
_MOST_NEWS, _MOST_NEWS_BYTES = 4096, 1 << 22
# This many instances, or this much work, at a time: in between, streams go on.
_SLICE, _SLICE_S = 256, 0.002
# How much of a received message is remembered: its header, with the sequence, and more.
_MARK_BYTES = 64
EXCHANGE_BOUNDS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)


def make_sharing(
    config: SchedulerConfig,
    fleet: Fleet,
    base_dir: Path,
    accounts: Callable[[], Iterable[Account]] = tuple,
    prefix_secret: bytes | None = None,
) -> "Sharing":
    """The sharing of ``scheduler.shared``. Raises ConfigError.

    Args:
        accounts: of clients that have limits.
        prefix_secret: start of the keys of prompts, as configured; None: to be agreed on.
    """
    # A new name per process: a restarted one has no open requests, and its predecessor's reports
    # must expire.
    name = secrets.token_hex(8)
    sharing = Sharing(config, fleet, RedisStore(config, base_dir, name), name, accounts)
    if fleet.scheduler.caches is not None and config.sharing.placements:
        log = PlacementLog(config, base_dir)
        sharing.placements = SharedPlacements(fleet, log, name, prefix_secret)
    return sharing


class Sharing:
    """One gateway's exchange with the others.

    Args:
        config: ``sharing`` has the times.
        fleet: its scheduler gets the others' load.
        store: passes on the messages.
        name: of this replica.
        accounts: of clients that have limits.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        fleet: Fleet,
        store: Store,
        name: str,
        accounts: Callable[[], Iterable[Account]] = tuple,
    ) -> None:
        settings = config.sharing
        self.name = name
        self.outcomes: Counter[str] = Counter()
        self.news: Counter[str] = Counter()
        self.exchange_s = Histogram(EXCHANGE_BOUNDS_S)
        self._settings = settings
        self._fleet = fleet
        self._store = store
        self._exchange = LoadExchange(
            fleet.scheduler,
            ttl_s=settings.ttl_s,
            interval_s=settings.interval_s,
            limits=SharedLimits(accounts),
        )
        self._breaker = Breaker(settings.interval_s, _MOST_PAUSE_S)
        self._problem = ""
        self._instances: tuple[Instance, ...] | None = None
        self._heard: dict[str, tuple[int, bytes]] = {}  # (bytes, the first of them) of the last one
        self._computed_s = 0.0  # in this turn
        self._pause_s = settings.news_s  # until the next one
        self._mode = Mode.LOCAL
        self._tasks: list[asyncio.Task[None]] = []
        self._placed: set[InstanceId] = set()  # where requests went since the last report
        self._news: list[tuple[str, bytes]] = []  # the others', not applied yet
        self._news_bytes = 0
        self._wake = asyncio.Event()
        self._due_s = 0.0  # the next exchange
        # None: prompts' keys stay here.
        self.placements: SharedPlacements | None = None
        # Called when others may have made room.
        self.on_change: Callable[[], None] = lambda: None

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Exchange once, so that the first request finds a view, and continue in the background."""
        await self._turn()
        if self.placements is not None:
            await self.placements.start(tasks)
        self._fleet.scheduler.on_dispatch = self._on_dispatch
        self._fleet.on_scrape = self._on_scrape
        self._tasks = [tasks.create_task(self._loop()), tasks.create_task(self._listen())]

    async def stop(self) -> None:
        """Say goodbye, unless the store is away."""
        self._fleet.scheduler.on_dispatch = self._fleet.on_scrape = None
        if self.placements is not None:
            await self.placements.stop()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            # A cancelled exchange drops its connection, which must not be the farewell's.
            await asyncio.wait(tasks, timeout=self._settings.timeout_s)
        await self._store.leave()

    # Triggers of the exchange

    def _on_dispatch(self, dispatch: Dispatch, _now_s: float) -> None:
        """On the path of each request: only take a note."""
        if self.placements is not None and dispatch.request.prefix is not None:
            self.placements.note(dispatch)
        if self._exchange.replicas:
            self._placed.add(dispatch.instance_id)
            self._wake.set()

    def _on_scrape(self, instance_id: InstanceId, told: EngineMetrics | None) -> None:
        """Bound the others' load by the engine's own figures."""
        if instance_id not in self._fleet.instances:
            return  # removed while it was asked
        report = None
        if told is not None and told.running is not None and told.waiting is not None:
            spec = self._fleet.scheduler.members.specs[instance_id]
            seats = DEFAULT_MAX_NUM_SEQS if spec.profile is None else spec.profile.max_num_seqs
            own = self._fleet.scheduler.members.table[instance_id].own_load(time.monotonic())
            report = EngineReport(
                requests=told.running + told.waiting,
                own=max(own.in_flight, own.waiting + own.streaming),
                full=told.waiting > 0 or told.running >= seats,
                kv_usage=told.kv_usage,
            )
        self._exchange.note_report(instance_id, report)

    def _on_news(self, name: str, data: bytes) -> None:
        # An unknown gateway has no lease: its figures count from its first message on.
        fits = self._news_bytes + len(data) <= _MOST_NEWS_BYTES
        if fits and len(self._news) < _MOST_NEWS and name in self._heard:
            self._news.append((name, data))
            self._news_bytes += len(data)
            self._wake.set()

    async def _listen(self) -> None:
        task, problem = asyncio.current_task(), ""
        while task is None or not task.cancelling():
            try:
                await self._store.listen(self._on_news)
            except StoreError as error:
                if str(error) not in (problem, self._problem):
                    _log.info("scheduler.shared: no news of other gateways: %s", error)
                problem = str(error)
            except Exception:
                # The background loop's boundary, as below.
                _log.exception("listening for news of other gateways failed")
            await asyncio.sleep(_MOST_PAUSE_S)

    async def _loop(self) -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        # A library may swallow a cancellation on its way from the socket; the gateway must end all
        # the same.
        while task is None or not task.cancelling():
            await asyncio.sleep(self._pause_s)
            wait_s = self._due_s - time.monotonic()
            timer = loop.call_later(max(0.0, wait_s), self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
            self._wake.clear()
            try:
                await self._turn()
            except Exception:
                # The background loop's boundary: a bug here must not end the exchange.
                _log.exception("exchanging loads with other gateways failed")

    async def _turn(self) -> None:
        """Exchange what is due, everything or news, and pass it on."""
        self._computed_s = 0.0
        now_s = time.monotonic()
        everything = now_s >= self._due_s
        if everything:
            self._due_s = now_s + self._settings.interval_s
        if everything and not self._breaker.pause_s(now_s):
            await self._talk(now_s)
        # Also after an exchange: the others read it later, in an exchange of their own.
        if self._placed and not self._breaker.pause_s(now_s):
            await self._tell(now_s)
        await self._hear_news()
        await self._bring_home()
        self._pause_s = self._settings.news_s
        if everything:
            self._due_s = max(self._due_s, time.monotonic() + self._computed_s / _MOST_SHARE)
        else:
            self._pause_s = max(self._pause_s, self._computed_s / _MOST_SHARE)

    # Sending and receiving

    async def _talk(self, now_s: float) -> None:
        exchange = self._exchange
        begun_s = time.process_time()
        instances = tuple(self._fleet.instances.values())
        if instances != self._instances:
            self._instances = instances
            exchange.set_instances([(i.id, i.config.base_url) for i in instances])
        message = exchange.say(now_s)
        value = None if message is None else pack(message)
        self._computed_s += time.process_time() - begun_s
        said_s = time.monotonic()
        try:
            values = await self._store.exchange(value)
        except StoreError as error:
            self._failed(error)
            return
        heard_s = time.monotonic()
        self.outcomes["ok"] += 1
        self.exchange_s.observe(heard_s - said_s)
        if self._breaker.succeeded():
            _log.warning("scheduler.shared: the store answers again")
        self._problem = ""
        if message is not None:
            exchange.said()
        exchange.exchanged_s = heard_s
        await self._hear(values, heard_s)

    async def _tell(self, now_s: float) -> None:
        begun_s = time.process_time()
        message = self._exchange.say_news(self._placed, now_s)
        self._placed.clear()
        if message is None:
            return
        news = pack(message)
        self._computed_s += time.process_time() - begun_s
        try:
            await self._store.tell(news)
        except StoreError as error:
            self._failed(error)
            return
        self.news["told"] += 1

    def _failed(self, error: StoreError) -> None:
        self.outcomes["failed"] += 1
        # The store may have lost the message, or be another one next time.
        self._exchange.unsaid()
        self._problem = str(error)
        if self._breaker.failed(time.monotonic()):
            _log.warning("scheduler.shared: %s; deciding with this gateway's own load only", error)

    async def _hear(self, values: Mapping[str, bytes], now_s: float) -> None:
        marks = {name: (len(data), data[:_MARK_BYTES]) for name, data in values.items()}
        for name in self._heard.keys() - values.keys():
            self._exchange.forget(name)
        heard, self._heard = self._heard, marks
        fresh = [(name, data) for name, data in values.items() if heard.get(name) != marks[name]]
        await self._hear_all(fresh, now_s)

    async def _hear_news(self) -> None:
        if not self._news:
            return
        # A gateway that left may still be heard for a moment.
        news = [each for each in self._news if each[0] in self._heard]
        self._news, self._news_bytes = [], 0
        if news:
            self.news["heard"] += len(news)
        await self._hear_all(news, time.monotonic())

    async def _hear_all(self, messages: Iterable[tuple[str, bytes]], now_s: float) -> None:
        slice_s = 0.0
        for name, data in messages:
            begun_s = time.process_time()
            self._hear_one(name, data, now_s)
            took_s = time.process_time() - begun_s
            self._computed_s += took_s
            slice_s += took_s
            if slice_s > _SLICE_S:
                slice_s = 0.0
                await asyncio.sleep(0)

    def _hear_one(self, name: str, data: bytes, now_s: float) -> None:
        try:
            self._exchange.hear(name, unpack(data), now_s)
        except MessageError as error:
            if not self.outcomes["rejected"]:
                _log.warning(
                    "scheduler.shared: the message of replica %s is ignored: %s; later ones "
                    "are only counted",
                    name,
                    error,
                )
            self.outcomes["rejected"] += 1

    async def _bring_home(self) -> None:
        """Pass changes to the scheduler; also without the store, since leases expire."""
        begun_s, now_s = time.process_time(), time.monotonic()
        scheduler, count = self._fleet.scheduler, 0
        for count, (instance_id, load) in enumerate(self._exchange.changes(now_s), 1):
            if instance_id in self._fleet.instances:
                scheduler.members.table[instance_id].set_peer(OTHERS, load, now_s)
            if count % _SLICE == 0:
                await asyncio.sleep(0)
        self._computed_s += time.process_time() - begun_s
        if count:
            self.on_change()
        mode = self._exchange.mode(now_s)
        if mode is not self._mode:
            _log.info("scheduler.shared: the view of other gateways is %s", mode.value)
            self._mode = mode

    # State

    @property
    def mode(self) -> Mode:
        return self._exchange.mode(time.monotonic())

    @property
    def replicas(self) -> int:
        """Other gateways heard of within the lease."""
        return self._exchange.replicas

    @property
    def unmatched(self) -> int:
        """Instances with others' load that this gateway does not have."""
        return self._exchange.unmatched

    def age_s(self) -> float | None:
        """Age of the oldest message that counts, s."""
        return self._exchange.age_s(time.monotonic())

    def describe(self) -> dict[str, Any]:
        return {
            "mode": self.mode.value,
            "replica": self.name,
            "other_replicas": self.replicas,
            "oldest_message_s": self.age_s(),
            "unmatched_instances": self.unmatched,
            "problem": self._problem or None,
            "news": dict(self.news),
            "interval_s": self._settings.interval_s,
            "ttl_s": self._settings.ttl_s,
            "placements": None if self.placements is None else self.placements.describe(),
            "others": {
                instance_id: {
                    "in_flight": round(load.in_flight),
                    "load": load.load_s,
                    "kv_tokens": round(load.kv_tokens),
                    "waiting": round(load.waiting),
                    "streaming": round(load.streaming),
                }
                for instance_id, load in self._exchange.totals()
            },
        }
