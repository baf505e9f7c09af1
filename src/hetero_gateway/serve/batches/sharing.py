"""Batches that several gateways share: who is present, who holds which lines, and progress.

A thread of its own renews the lease, so that nothing slow delays it. The renewal carries each
gateway's load on each engine, besides lines: how many lines an engine may have depends on the load
of all gateways there.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from hetero_gateway.serve.batches.choosing import Told
from hetero_gateway.serve.batches.ledger import Batch
from hetero_gateway.serve.batches.runner import InThread, Runner, reason
from hetero_gateway.serve.batches.shared_ledger import Presence, SharedLedger
from hetero_gateway.serve.batches.storage import BatchRows

_log = logging.getLogger(__name__)

# Between two renewals, and two looks at others' progress.
_TURN_S = 2.0
# How many remaining lines are recounted per second, as others do some: for the predicted end.
_COUNTED_PER_S = 5000
# Lines that wait this long for a place are released to others, and none fetched for the second.
_STUCK_S, _REST_S = 5.0, 2.5


class SharedWork:
    """This gateway's part. Needs a running event loop.

    Args:
        rows: a connection of its own. name: of this gateway.
        ledger, call: of the database's thread.
        look_at: queues a batch for validation.
    """

    def __init__(
        self,
        rows: BatchRows,
        name: str,
        ledger: SharedLedger,
        call: InThread,
        runner: Runner,
        look_at: Callable[[Batch], None],
    ) -> None:
        self._presence = Presence(rows, name)
        self._rows = rows
        self._thread = ThreadPoolExecutor(1, "batches-lease")
        self._ledger = ledger
        self._call = call
        self._runner = runner
        self._look_at = look_at
        self._counted_s = time.monotonic()
        self._others: dict[str, Told] = {}

    async def run(self) -> None:
        # Separate: a look may have to wait for the database's thread, and a lease may not.
        await asyncio.gather(self._every_turn(self.renew), self._every_turn(self._look))

    async def _every_turn(self, do: Callable[[], Awaitable[None]]) -> None:
        failed = False
        while True:
            try:
                await do()
                failed = False
            except (OSError, sqlite3.Error) as error:
                if not failed:
                    _log.error("batches: other gateways cannot be heard: %s", reason(error))
                failed = True
            except Exception:
                _log.exception("batches: a look at other gateways failed")
            await asyncio.sleep(_TURN_S)

    async def renew(self) -> None:
        """Renew the lease. Raises OSError, sqlite3.Error."""
        loop, choice = asyncio.get_running_loop(), self._runner.choice
        told = await loop.run_in_executor(self._thread, self._presence.renew, choice.told())
        self._others = _read(told)
        choice.hear(self._others)

    async def _look(self) -> None:
        if out := await self._call(self._ledger.reclaim):
            _log.warning("a gateway is gone: its %d open lines are sent again", out)
        now_s = time.monotonic()
        known = [each.batch for each in self._runner.running]
        lines = sum(each.total - each.done for each in known)
        recount = now_s - self._counted_s >= lines / _COUNTED_PER_S
        if recount:
            self._counted_s = now_s
        progress = await self._call(self._ledger.progress, known, recount)
        self._runner.take_up(progress.new, known, progress.there)
        self._runner.note_elsewhere(progress.done_elsewhere)
        if self._others and (stuck := self._runner.stuck(_STUCK_S, _REST_S)):
            await self._call(self._ledger.let_go, stuck)
        for batch in await self._call(self._ledger.unlooked):
            self._look_at(batch)

    def close(self) -> None:
        """Free what is held. For a thread other than the loop's."""
        try:
            self._thread.submit(self._presence.end).result()
        except (OSError, sqlite3.Error) as error:
            _log.warning("batches: other gateways must wait for a lease to end: %s", reason(error))
        self._thread.submit(self._rows.close).result()
        self._thread.shutdown()


def _read(told: dict[str, str]) -> dict[str, Told]:
    """Parse others' reports; malformed ones count as empty."""
    read = {}
    for name, text in told.items():
        try:
            read[name] = msgspec.json.decode(text, type=Told)
        except (msgspec.DecodeError, ValueError):
            _log.warning("batches: a message from %s is malformed", name)
    return read
