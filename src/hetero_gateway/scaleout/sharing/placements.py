"""Exchanges placements with other gateways, beside the traffic.

One task appends this gateway's placements to the shared log, and reads the others' new ones; at
first it reads the older entries backwards, until the instances' caches are full of them. No request
waits for any of this. While the log is away, each gateway continues with what it knows, and reads
the rest when it is back.

Its work takes at most a twentieth of a core; beyond that its turns become less frequent.
"""

import asyncio
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.sharing.breaker import Breaker
from hetero_gateway.core.sharing.placements import PlacementExchange, mark_of
from hetero_gateway.core.types import InstanceId
from hetero_gateway.gateway.fleet.instances import Fleet, Instance
from hetero_gateway.scaleout.sharing.log import AGE_S, NO_NUMBER, Number, Read
from hetero_gateway.scaleout.sharing.node import StoreError

_log = logging.getLogger(__name__)

# The next turn of the same conversation comes later than that.
INTERVAL_S = 0.25
_MOST_PAUSE_S = 1.0
# How long the log counts after it was last read.
_RECENT_S = 3.0
_MOST_SHARE = 1 / 20
_SLICE_S = 0.002
_SECRET_BYTES = 32
# Older entries read at a time: some milliseconds; in between, streams go on.
_RECALLED = 8
KEY_COUNTS, ENTRY_COUNTS = ("said", "heard", "left_out"), ("rejected", "foreign")


class Log(Protocol):
    """The interface of the log; see ``PlacementLog``."""

    async def agree(self, secret: bytes) -> bytes: ...
    async def append(self, entries: list[bytes]) -> Number | None: ...
    async def after(self, last: Number) -> Read: ...
    async def before(self, last: Number | None) -> Read: ...
    def close(self) -> None: ...


class SharedPlacements:
    """One gateway's side.

    Args:
        fleet: its scheduler knows of prefix caches.
        log: the shared one.
        replica: this gateway's name, 16 hexadecimal digits.
        secret: start of the keys of prompts here; None: to be agreed on with the others.
    """

    def __init__(self, fleet: Fleet, log: Log, replica: str, secret: bytes | None) -> None:
        caches = fleet.scheduler.caches
        assert caches is not None
        caches.is_shared = lambda: self.live
        self._fleet = fleet
        self._log = log
        self._named = secret is not None
        self.secret = secret or os.urandom(_SECRET_BYTES)
        self._placements = PlacementExchange(caches, int(replica, 16), self._started_s)
        if self._named:
            self._placements.mark = mark_of(self.secret)
        self._instances: tuple[Instance, ...] = ()
        self._last: Number | None = None  # read; None: nothing yet
        self._recalls = False  # older entries are still to be read
        self._earliest: Number | None = None  # of the older entries read; None: nothing yet
        self._breaker = Breaker(INTERVAL_S, _MOST_PAUSE_S)
        self._read_s = -math.inf  # when the log was last read
        self._task: asyncio.Task[None] | None = None
        self.problem = ""
        self.said_bytes = 0
        # Called when the others' secret has replaced this one's.
        self.on_secret: Callable[[bytes], None] = lambda _: None
        # On the path of each request that has keys.
        self.note: Callable[[Dispatch], None] = self._placements.note

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Agree and read once, so that the first request finds something; and continue."""
        await self._turn()
        self._task = tasks.create_task(self._loop())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._log.close()

    def _started_s(self, instance_id: InstanceId) -> float | None:
        instance = self._fleet.instances.get(instance_id)
        return None if instance is None else instance.engine_started_s

    async def _loop(self) -> None:
        task = asyncio.current_task()
        pause_s = 0.0
        while task is None or not task.cancelling():
            await asyncio.sleep(pause_s)
            try:
                computed_s = await self._turn()
                pause_s = max(INTERVAL_S, computed_s / _MOST_SHARE)
            except Exception:
                # The background loop's boundary: a bug here must not end the exchange.
                _log.exception("sharing placements with other gateways failed")
                pause_s = _MOST_PAUSE_S

    async def _turn(self) -> float:
        """Returns the computing time, s, without that of older entries, which are read once."""
        now_s = time.monotonic()
        if self._breaker.pause_s(now_s):
            return 0.0
        begun_s = time.process_time()
        instances = tuple(self._fleet.instances.values())
        if instances != self._instances:
            self._instances = instances
            self._placements.set_instances([(i.id, i.config.base_url) for i in instances])
            self._recalls, self._earliest = True, None  # newcomers may have older entries
        self._placements.check()
        entries = self._placements.say(now_s)
        computed_s = time.process_time() - begun_s
        try:
            if not self._named:
                self._agree_on(await self._log.agree(self.secret))
            first = await self._log.append(entries)
            self.said_bytes += sum(map(len, entries))
            if self._last is not None and first is not None and first <= self._last:
                self._last = NO_NUMBER  # its clock was set back
            if self._last is None:
                self._last = (await self._log.before(None)).first
            computed_s += await self._read()
            if self._recalls:
                await self._recall()
        except StoreError as error:
            # Sent entries may be lost.
            self._placements.unsaid()
            self.problem = str(error)
            if self._breaker.failed(time.monotonic()):
                _log.info("scheduler.shared: placements are not shared: %s", error)
            return computed_s
        self._breaker.succeeded()
        self.problem = ""
        self._read_s = time.monotonic()
        return computed_s

    def _agree_on(self, secret: bytes) -> None:
        self._placements.mark = mark_of(secret)
        if secret == self.secret:
            return
        self.secret = secret
        # Entries read so far used other keys.
        self._recalls, self._earliest = True, None
        self.on_secret(secret)

    async def _read(self) -> float:
        """Read new entries; returns the computing time, s."""
        computed_s, more = 0.0, True
        while more and self._last is not None:
            read = await self._log.after(self._last)
            self._last, more = read.last, read.more
            slice_s = 0.0
            for entry in read.entries:
                begun_s = time.process_time()
                self._placements.hear(entry, time.monotonic())
                took_s = time.process_time() - begun_s
                computed_s += took_s
                slice_s += took_s
                if slice_s > _SLICE_S:
                    slice_s = 0.0
                    await asyncio.sleep(0)
        return computed_s

    async def _recall(self) -> None:
        """Read older entries, until the caches are full of them."""
        while self._recalls:
            read = await self._log.before(self._earliest)
            self._earliest = read.last
            oldest_ms = 0 if self._last is None else self._last[0] - 1000 * AGE_S
            room = True
            for start in range(0, len(read.entries), _RECALLED):
                room = self._placements.recall(read.entries[start : start + _RECALLED])
                await asyncio.sleep(0)
            self._recalls = room and read.more and read.last[0] > oldest_ms

    # State

    @property
    def live(self) -> bool:
        """Whether the others' placements are known here."""
        return time.monotonic() - self._read_s < _RECENT_S

    @property
    def counts(self) -> Counter[str]:
        """See ``PlacementExchange.counts``."""
        return self._placements.counts

    def describe(self) -> dict[str, Any]:
        return {
            "live": self.live,
            "problem": self.problem or None,
            "said_bytes": self.said_bytes,
            "keys": {name: self.counts[name] for name in KEY_COUNTS},
            "entries": {name: self.counts[name] for name in ENTRY_COUNTS},
        }
