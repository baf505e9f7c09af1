"""Two gateways on the same instances, while the earlier one ends its requests.

Each sends every ``_EVERY_S`` its load on the instances and its clients' use of limits, as far as
they have changed. So both decide by the sum, and limits hold over both. Once the earlier one is
gone, the later one counts its use as its own.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from hetero_gateway.core.instances.dispatch import PeerLoad
from hetero_gateway.core.limits.accounts import Account
from hetero_gateway.core.limits.window import SLOTS
from hetero_gateway.core.types import InstanceId
from hetero_gateway.gateway.admission.usage import NO_AMOUNTS, Amounts
from hetero_gateway.scaleout.workers.messages import Channel
from hetero_gateway.serve.handover import messages
from hetero_gateway.serve.handover.knowledge import Handed

_EVERY_S = 0.05
_USAGE_EVERY = 20  # of those
_NAME = "twin"


class Twin:
    """The messages of one of them to the other, and the effect of the other's.

    Args:
        gateway: this one. If it shares loads and limits with others by a store, the other one
            is among these, and only usage is sent here.
        channel: to the other one.
        before: to the one before this one, which also ends: its load is reported to the other
            here.
        earlier: this is the one that ends.
    """

    def __init__(
        self, gateway: Handed, channel: Channel, *, before: "Twin | None" = None, earlier: bool
    ) -> None:
        self._fleet, self._admission = gateway.fleet, gateway.admission
        self._shares = gateway.sharing is None
        self._channel = channel
        self._before = before
        self._earlier = earlier
        self.heard: dict[InstanceId, PeerLoad] = {}  # the other's loads
        # As sent, and as received.
        self._loads: dict[InstanceId, PeerLoad] = {}
        self._used: dict[str, tuple[int, int, int]] = {}
        self._usage: dict[tuple[int, str, str], Amounts] = {}
        self._theirs: dict[str, messages.AccountNow] = {}
        self._ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self.start)
        self.say(usage=self._ticks % _USAGE_EVERY == 0)
        self._ticks += 1

    def stop(self) -> None:
        """The other one is gone, or this one is about to be."""
        if self._timer is not None:
            self._timer.cancel()
        self.heard.clear()
        now_s = time.monotonic()
        for state in self._fleet.scheduler.members.table.states.values():
            state.set_peer(_NAME, None, now_s)
        for account in self._accounts():
            if (theirs := self._theirs.pop(account.name, None)) is not None:
                account.requests.others = account.tokens.others = account.others_in_flight = 0
                if not self._earlier:
                    account.requests.take_over(theirs.requests, theirs.second)
                    account.tokens.take_over(theirs.tokens, theirs.second)
        self._changed()

    def _accounts(self) -> Iterable[Account]:
        return self._admission.accounts() if self._shares else ()

    def _changed(self) -> None:
        if self._fleet.on_change is not None:
            self._fleet.on_change()

    # Sending

    def say(self, *, usage: bool) -> None:
        """``usage``: also clients' usage, which is long if there are many."""
        now_s = time.monotonic()
        if loads := self._changed_loads(now_s):
            self._channel.send(messages.Loads(loads))
        accounts = self._changed_accounts(int(now_s))
        rows = self._new_usage() if usage and self._earlier else []
        if accounts or rows:
            self._channel.send(messages.Accounts(accounts, rows))

    def _changed_loads(self, now_s: float) -> list[tuple[InstanceId, PeerLoad | None]]:
        changed: list[tuple[InstanceId, PeerLoad | None]] = []
        table = self._fleet.scheduler.members.table
        before = {} if self._before is None else self._before.heard
        for instance_id in self._fleet.instances if self._shares else ():
            state, more = table[instance_id], before.get(instance_id)
            if state.in_flight or more is not None:
                # The other one has its own observations of the speed by now.
                load = state.own_load(now_s)._replace(observed_s=0.0, modelled_s=0.0)
                if more is not None:
                    load = PeerLoad(*map(sum, zip(load, more, strict=True)))
                if self._loads.get(instance_id) != load:
                    self._loads[instance_id] = load
                    changed.append((instance_id, load))
            elif self._loads.pop(instance_id, None) is not None:
                changed.append((instance_id, None))
        return changed

    def _changed_accounts(self, second: int) -> list[messages.AccountNow]:
        changed = []
        for account in self._accounts():
            requests, tokens = account.requests, account.tokens
            requests.advance(second)
            tokens.advance(second)
            used = requests.used, tokens.used, account.in_flight
            if used != self._used.get(account.name, (0, 0, 0)):
                self._used[account.name] = used
                slots = list(requests.slots), list(tokens.slots)
                changed.append(messages.AccountNow(account.name, second, *slots, account.in_flight))
        return changed

    def _new_usage(self) -> list[tuple[int, str, str, Amounts]]:
        rows = []
        for key, now in self._admission.usage.counted().items():
            told = self._usage.get(key, NO_AMOUNTS)
            if now != told:
                self._usage[key] = now
                a, b, c, d = (after - before for after, before in zip(now, told, strict=True))
                rows.append((*key, (a, b, c, d)))
        return rows

    # Receiving

    def hear(self, told: Any) -> None:
        """Handle a message of the other one's ``say``; ignore others."""
        if isinstance(told, messages.Loads):
            now_s = time.monotonic()
            for instance_id, load in told.loads:
                if load is None:
                    self.heard.pop(instance_id, None)
                else:
                    self.heard[instance_id] = load
                if instance_id in self._fleet.instances:
                    self._fleet.scheduler.members.table[instance_id].set_peer(_NAME, load, now_s)
            self._changed()
        elif isinstance(told, messages.Accounts):
            self._admission.usage.add(told.usage)
            rows = [r for r in told.accounts if len(r.requests) == len(r.tokens) == SLOTS]
            self._theirs |= {row.name: row for row in rows}
            for account in self._accounts() if rows else ():
                if (row := self._theirs.get(account.name)) is not None:
                    account.requests.others = sum(row.requests)
                    account.tokens.others = sum(row.tokens)
                    account.others_in_flight = row.in_flight
