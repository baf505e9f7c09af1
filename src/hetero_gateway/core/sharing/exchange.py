"""What a gateway tells the others, what it keeps of their messages, and for how long. Pure.

Gateways that share instances exchange their own rows and add up the others'. There is no common
total, so nothing can drift: whatever was lost, the next message of a replica has its whole state
again. How messages travel is not known here.

    message = exchange.say(now_s)              # own rows, when they changed or a third of the lease
    message = exchange.say_news(ids, now_s)    # only these, between two of those
    exchange.hear(replica, message, now_s)     # either, from each of the others
    exchange.forget(replica)                   # it has left
    for change in exchange.changes(now_s): ... # to Scheduler.set_peer

**News**: two gateways collide over what was placed in the last moments, so the destination of a
request is told at once, and everything now and then. News consist of whole rows too: those that are
lost, or arrive before an older complete message, cost a moment's view and nothing else.

**The lease**: a replica whose message has not changed for ``ttl_s`` is considered gone, and its
load with it. Every replica sends something new every third of that, so one or two lost messages do
no harm. This holds even if the store itself forgets (Redis's PX) or does not answer.

**Belief**: the sum of the others' rows is bounded before it counts (``belief.py``).

The mode says what the view is worth:

    mode     the others' rows are
    shared   as of the last exchange, which is recent
    stale    kept from an exchange a while ago; the store does not answer
    local    unknown: nothing was heard within the lease
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_gateway.core.instances.dispatch import PeerLoad
from hetero_gateway.core.policies.estimates import MOST_PATIENCE_S
from hetero_gateway.core.scheduling.scheduler import Scheduler
from hetero_gateway.core.sharing.belief import Belief, EngineReport
from hetero_gateway.core.sharing.limits import SharedLimits
from hetero_gateway.core.sharing.message import (
    FIELDS,
    Keys,
    Message,
    MessageError,
    Rows,
    instance_key,
)
from hetero_gateway.core.types import InstanceId, InstanceSpec

OTHERS = "others"  # all of them, summed, are one peer to the scheduler
SAYS_PER_LEASE = 3
# An exchange is recent for this many intervals, and for at least this long: single time-outs and
# pauses are not worth mentioning.
_RECENT_INTERVALS, _RECENT_S = 4, 0.25
# Rows of all the others together, news included: 25 gateways of 4000 instances.
_MOST_ROWS = 100_000
# An engine's observed speed counts for the others while it is fresh: the scheduler itself forgets
# over this many seconds.
_SPEED_FRESH_S = 5.0

_LOAD_S = PeerLoad._fields.index("load_s")
_IN_FLIGHT = PeerLoad._fields.index("in_flight")
_OBSERVED_S = PeerLoad._fields.index("observed_s")
_MODELLED_S = PeerLoad._fields.index("modelled_s")
_PROMPTS = PeerLoad._fields.index("prompts")


class Mode(enum.Enum):
    """What the view of the others is worth; see the module."""

    SHARED = "shared"
    STALE = "stale"
    LOCAL = "local"


class Change(NamedTuple):
    """The present load of all others together on an instance; None: nothing."""

    instance_id: InstanceId
    load: PeerLoad | None


class _Replica:
    """The last message of one of the others, and when it was new."""

    __slots__ = ("heard_s", "keys", "news", "positions", "rows", "told", "whole")

    def __init__(self) -> None:
        self.whole = Message(0, np.empty(0, dtype=np.uint64), np.empty((0, FIELDS)))
        # Rows newer than that, by instance, and the sum of both.
        self.news: dict[int, tuple[int, Rows]] = {}
        self.keys, self.told = self.whole.keys, self.whole.rows
        self.heard_s = 0.0
        # Those of them whose instances exist here.
        self.positions: NDArray[np.intp] = np.empty(0, dtype=np.intp)
        self.rows: Rows = self.told

    def take(self, message: Message) -> bool:
        """Take a message; returns whether it is newer than the last one."""
        news, sequence = self.news, message.sequence
        if sequence <= self.whole.sequence:
            return False
        if message.whole:
            self.whole = message
            self.news = {key: each for key, each in news.items() if each[0] > sequence}
        else:
            fresh = [
                (key, row)
                for key, row in zip(message.keys.tolist(), message.rows, strict=True)
                if key not in news or news[key][0] < sequence
            ]
            if not fresh:
                return False
            news.update((key, (sequence, row)) for key, row in fresh)
        self._add_up()
        return True

    def _add_up(self) -> None:
        """Add up in the order of the complete message, which seldom changes; new rows come last."""
        keys, rows = self.whole.keys, self.whole.rows
        if self.news:
            more = np.fromiter(self.news, np.uint64, len(self.news))
            newer = np.array([row for _, row in self.news.values()])
            if keys.size:
                order = np.argsort(keys)
                at = order[np.minimum(np.searchsorted(keys, more, sorter=order), keys.size - 1)]
                there = keys[at] == more
                rows = rows.copy()
                rows[at[there]] = newer[there]
                more, newer = more[~there], newer[~there]
            keys, rows = np.concatenate((keys, more)), np.concatenate((rows, newer))
        self.keys, self.told = keys, rows


class LoadExchange:
    """One gateway's side of the exchange.

    Args:
        scheduler: whose rows are told.
        ttl_s: the lease, above 0.
        interval_s: shortest time between two exchanges.
        limits: clients' usage; None: no client has limits.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        ttl_s: float,
        interval_s: float,
        limits: SharedLimits | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._ttl_s = ttl_s
        self._recent_s = max(_RECENT_S, _RECENT_INTERVALS * interval_s)
        self._ids: tuple[InstanceId, ...] = ()
        self._keys: Keys = np.empty(0, dtype=np.uint64)
        self._order: NDArray[np.intp] = np.empty(0, dtype=np.intp)
        self._positions: dict[InstanceId, int] = {}
        self._said: Rows | None = None
        self._said_s = -np.inf
        self._pending: tuple[Rows, float] = (np.empty((0, FIELDS)), -np.inf)
        self._sequence = 0
        self._speeds: Rows = np.empty((0, 2))
        self._speeds_s: Rows = np.empty(0)
        self._replicas: dict[str, _Replica] = {}
        # Prompts that the others began, counted from each one's own counter: replicas that come or
        # go do not make it jump.
        self._begun: Rows = np.empty((0, FIELDS - _PROMPTS))
        self._applied: Rows = np.empty((0, FIELDS))
        self._specs: list[InstanceSpec] = []
        self._belief = Belief(())
        self._queued_since_s = np.inf
        self.exchanged_s = -np.inf  # when the store last answered

    def __repr__(self) -> str:
        return f"<LoadExchange {len(self._ids)} instances, {len(self._replicas)} other replicas>"

    def set_instances(self, instances: Sequence[tuple[InstanceId, str]]) -> None:
        """Set the present (id, base_url)s, after each change. Starts all rows over."""
        self._ids = tuple(instance_id for instance_id, _ in instances)
        self._positions = {instance_id: i for i, instance_id in enumerate(self._ids)}
        keys = [instance_key(instance_id, base_url) for instance_id, base_url in instances]
        self._keys = np.array(keys, dtype=np.uint64)
        self._order = np.argsort(self._keys)
        self._said = None
        self._speeds = np.zeros((len(self._ids), 2))
        self._speeds_s = np.full(len(self._ids), -np.inf)
        # Anything not known to have been applied is applied again, absence included.
        self._applied = np.full((len(self._ids), FIELDS), np.nan)
        self._begun = np.zeros((len(self._ids), FIELDS - _PROMPTS))
        self._specs = [self._scheduler.members.specs[instance_id] for instance_id in self._ids]
        self._belief = Belief(self._specs)
        for replica in self._replicas.values():
            self._match(replica)

    def note_report(self, instance_id: InstanceId, report: EngineReport | None) -> None:
        """Note an engine's scrape; None: it reports no load. Unknown instances are ignored."""
        position = self._positions.get(instance_id)
        if position is not None:
            self._belief.report(position, report)

    # Sending

    def say(self, now_s: float) -> Message | None:
        """The message that is due now; None: nothing has changed, and the lease is young.

        It counts as sent only once ``said`` is called.
        """
        for position, instance_id in enumerate(self._ids):
            spec = self._scheduler.members.specs[instance_id]
            if spec is not self._specs[position]:
                self._specs[position] = spec
                self._belief.change(position, spec)
        rows = self._own_rows(np.arange(len(self._ids)), now_s)
        self._belief.note_own(float(rows[:, _LOAD_S].sum()), float(rows[:, _IN_FLIGHT].sum()))
        young = now_s - self._said_s < self._ttl_s / SAYS_PER_LEASE
        changed = self._limits is not None and self._limits.changed(now_s)
        if not changed and young and self._said is not None and np.array_equal(rows, self._said):
            return None
        self._sequence += 1
        self._pending = (rows, now_s)
        told = rows.any(axis=1)
        return self._with_limits(Message(self._sequence, self._keys[told], rows[told]), now_s)

    def say_news(self, ids: Collection[InstanceId], now_s: float) -> Message | None:
        """The present rows of these instances; None: none of them is known.

        The next complete message is due then, even if nothing changes: receivers of the news need
        it.
        """
        positions = np.array(
            [self._positions[i] for i in ids if i in self._positions], dtype=np.intp
        )
        if not positions.size:
            return None
        self._said = None
        self._sequence += 1
        rows = self._own_rows(positions, now_s)
        message = Message(self._sequence, self._keys[positions], rows, whole=False)
        return self._with_limits(message, now_s)

    def _with_limits(self, message: Message, now_s: float) -> Message:
        if self._limits is None:
            return message
        keys, accounts = self._limits.say(now_s, whole=message.whole)
        return message._replace(account_keys=keys, accounts=accounts)

    def said(self) -> None:
        """Note that the last message has arrived."""
        self._said, self._said_s = self._pending

    def unsaid(self) -> None:
        """Note that the last message may be lost: the next one is due at once."""
        self._said = None

    def _own_rows(self, positions: NDArray[np.intp], now_s: float) -> Rows:
        table, ids = self._scheduler.members.table, self._ids
        own = [table[ids[i]].own_load(now_s) for i in positions.tolist()]
        rows = np.array(own, dtype=float)
        rows = rows.reshape(positions.size, FIELDS)
        speeds = rows[:, _OBSERVED_S : _MODELLED_S + 1]
        seen = (speeds != self._speeds[positions]).any(axis=1)
        self._speeds_s[positions[seen]] = now_s
        self._speeds[positions] = speeds
        speeds[now_s - self._speeds_s[positions] > _SPEED_FRESH_S] = 0.0
        # Where nothing is left and nothing was seen recently, old counts are of no interest.
        rows[~rows[:, :_PROMPTS].any(axis=1)] = 0.0
        # Sums of floats may leave a residue below 0.
        np.maximum(rows, 0.0, out=rows)
        return rows

    # Receiving

    def hear(self, replica: str, message: Message, now_s: float) -> None:
        """Take a replica's message; one that is not newer than the last has no effect.

        Raises MessageError: all together report more instances than there can be.
        """
        known = self._replicas.get(replica)
        if known is None:
            known = _Replica()
        kept = sum(each.keys.size for name, each in self._replicas.items() if name != replica)
        kept += 0 if message.whole else known.keys.size
        if kept + message.keys.size > _MOST_ROWS:
            raise MessageError(f"{message.keys.size} instances are too many")
        self._replicas[replica] = known
        if self._limits is not None:
            self._limits.hear(replica, message, now_s)
        keys, positions, rows = known.keys, known.positions, known.rows
        if not known.take(message):
            return
        known.heard_s = now_s
        if positions.size == known.keys.size and np.array_equal(keys, known.keys):
            # The common case: the same instances as before, and all of them exist here.
            known.rows = known.told
            begun = known.rows[:, _PROMPTS:] - rows[:, _PROMPTS:]
            self._begun[positions] += np.maximum(begun, 0.0)
            return
        self._match(known)
        both, before, now = np.intersect1d(
            positions, known.positions, assume_unique=True, return_indices=True
        )
        begun = known.rows[now, _PROMPTS:] - rows[before, _PROMPTS:]
        self._begun[both] += np.maximum(begun, 0.0)

    def forget(self, replica: str) -> None:
        """Note that a replica is gone; unknown ones are ignored."""
        self._replicas.pop(replica, None)
        if self._limits is not None:
            self._limits.forget(replica)

    def _match(self, replica: _Replica) -> None:
        """Match its rows to the instances here; rows of unknown instances are not counted."""
        keys, rows = replica.keys, replica.told
        if not self._ids or not keys.size:
            replica.positions, replica.rows = np.empty(0, dtype=np.intp), rows[:0]
            return
        ordered = self._keys[self._order]
        at = np.minimum(np.searchsorted(ordered, keys), ordered.size - 1)
        known = ordered[at] == keys
        replica.positions, replica.rows = self._order[at[known]], rows[known]

    def changes(self, now_s: float) -> Iterator[Change]:
        """The changed load of each instance, for ``Scheduler.set_peer``; to be run to its end.

        This also drops replicas whose lease has run out.
        """
        expired = [
            name
            for name, replica in self._replicas.items()
            if now_s - replica.heard_s >= self._ttl_s
        ]
        for name in expired:
            self.forget(name)
        if self._limits is not None:
            self._limits.apply(now_s)
        total = np.zeros((len(self._ids), FIELDS))
        for replica in self._replicas.values():
            total[replica.positions] += replica.rows
        total[:, _PROMPTS:] = self._begun
        total = self._belief.believed(total, self._doubted(now_s))
        changed = np.flatnonzero((total != self._applied).any(axis=1))
        self._applied = total
        rows = total[changed]
        some: list[bool] = (rows[:, :_PROMPTS].max(axis=1, initial=0.0) > 0).tolist()
        for i, position in enumerate(changed.tolist()):
            load = PeerLoad(*rows[i].tolist()) if some[i] else None
            yield Change(self._ids[position], load)

    def _doubted(self, now_s: float) -> NDArray[np.bool_] | None:
        """Where the others' rows may be what keeps this gateway's queue from moving."""
        if not self._scheduler.queued:
            self._queued_since_s = np.inf
            return None
        self._queued_since_s = min(self._queued_since_s, now_s)
        if now_s - self._queued_since_s < MOST_PATIENCE_S:
            return None
        table = self._scheduler.members.table
        return np.array([not table[instance_id].in_flight for instance_id in self._ids], dtype=bool)

    # State

    def totals(self) -> list[tuple[InstanceId, PeerLoad]]:
        """The load of all others together, for each instance that has any."""
        some = np.flatnonzero((self._applied[:, :_PROMPTS] > 0).any(axis=1))
        return [(self._ids[i], PeerLoad(*self._applied[i].tolist())) for i in some]

    def mode(self, now_s: float) -> Mode:
        """What the view of the others is worth now."""
        silent_s = now_s - self.exchanged_s
        if silent_s <= self._recent_s:
            return Mode.SHARED
        return Mode.STALE if silent_s < self._ttl_s else Mode.LOCAL

    @property
    def replicas(self) -> int:
        """The number of others heard within the lease."""
        return len(self._replicas)

    @property
    def unmatched(self) -> int:
        """The number of others' rows for instances that are not here."""
        return sum(r.keys.size - r.positions.size for r in self._replicas.values())

    def age_s(self, now_s: float) -> float | None:
        """The age of the oldest message that counts, s; None: there is none."""
        heard_s = [replica.heard_s for replica in self._replicas.values()]
        return now_s - min(heard_s) if heard_s else None
