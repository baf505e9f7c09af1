"""Sends the lines of batches, and stores their answers.

One loop: it collects new answers and chooses the lines to send, and the database's thread stores
both in one transaction, which reads the bodies as well. Then the lines are sent
(``dataplane/lines``). While the transaction fails nothing is sent, and answers are kept here.
"""

import asyncio
import dataclasses
import heapq
import logging
import math
import sqlite3
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, Protocol, TypeVar

from hetero_gateway.core.batches.outlook import LineOut, Pace, drain_s, ends_in_s, work_of
from hetero_gateway.core.types import BATCH_CLASS, InstanceId
from hetero_gateway.errors import Refusal
from hetero_gateway.files.batch_lines import BatchLine
from hetero_gateway.files.batches_config import BatchesConfig
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.gateway.admission.clients import Admission, Client
from hetero_gateway.gateway.dataplane.application import DataPlane
from hetero_gateway.gateway.dataplane.lines import LineAttempts
from hetero_gateway.gateway.fleet.instances import Fleet
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.http.errors import error_body
from hetero_gateway.serve.batches.choosing import LineChoice, Pick, RunningBatch, Spending
from hetero_gateway.serve.batches.ledger import Answer, Batch, InputLost, Ledger, WaitingLine
from hetero_gateway.serve.batches.storage import StorageUnavailable

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Between two turns, so that answers are synced together; without news; and without batches, when
# other requests are still measured: the first batch needs to know them.
_PAUSE_S, _IDLE_S, _WATCH_S = 0.01, 0.25, 5.0
_LOOK_S = 1.0
# After a failed transaction.
_AGAIN_S = 2.0
_HELD = 256
# Statuses worth a retry; those of the second set only ``_MOST_TRIES`` times.
_BUSY = frozenset((429, 503))
_FAILED = frozenset((0, 500, 502, 504))
_MOST_TRIES = 3
_MOST_BACKOFF_S = 60.0
_LATELY = 64


class RunnerParts(Protocol):
    """The parts of a gateway that its batches need."""

    fleet: Fleet
    metrics: Metrics
    admission: Admission
    dataplane: DataPlane

    @property
    def config(self) -> GatewayConfig: ...


class InThread(Protocol):
    """Runs something in the database's thread."""

    def __call__(self, function: Callable[..., _T], /, *args: Any) -> Awaitable[_T]: ...


class _Out(NamedTuple):
    """A line that is out."""

    running: RunningBatch
    line: WaitingLine
    custom_id: str
    at: InstanceId


class Runner:
    """See above. Needs a running event loop.

    Args:
        of: the gateway's parts.
        ledger: used in the database's thread, where ``call`` runs things.
        config: of batches.
    """

    def __init__(
        self, of: RunnerParts, ledger: Ledger, call: InThread, config: BatchesConfig
    ) -> None:
        self._of = of
        self._ledger = ledger
        self._call = call
        self.running: list[RunningBatch] = []
        self._cancelled: set[str] = set()
        self._out: dict[LineAttempts, _Out] = {}
        self._answers: list[Answer] = []
        # (when, tie-break, line): lines to retry; and how often lines have failed.
        self._again: list[tuple[float, int, WaitingLine]] = []
        self._tries: dict[tuple[int, int], int] = {}
        self._number = 0
        self._wake = asyncio.Event()
        self._pace = Pace()
        self._lately: deque[float] = deque(maxlen=_LATELY)  # how long lines took, s
        self._looked_s = -math.inf
        self._ends_s: dict[int, float] = {}  # by batch, monotonic
        self.paused = ""
        self.stops = False  # no more lines are sent
        self.answered = {"completed": 0, "failed": 0, "retried": 0}
        self.choice = LineChoice(of.fleet, of.metrics, config.slowdown, self.target)

    def target(self, name: str) -> str:
        """The model that a name stands for; of several, one of them."""
        route = self._of.dataplane.intake.routes.by_name.get(name)
        return route.targets[0][1] if route is not None and route.targets else name

    # Calls from outside

    def add(self, batch: Batch) -> None:
        """Run it from now on."""
        if any(each.batch.seq == batch.seq for each in self.running):
            return
        if not self._out:
            self._pace.begin(time.monotonic())
        self.running.append(RunningBatch(batch))
        self.running.sort(key=lambda each: (each.batch.expires_at, each.batch.seq))
        self._wake.set()

    def cancel(self, batch_id: str) -> bool:
        """Send no more of its lines. False: it does not run (yet)."""
        self._cancelled.add(batch_id)
        self._wake.set()
        return any(each.batch.id == batch_id for each in self.running)

    def stop(self) -> None:
        """Send nothing more; lines that are out are abandoned, and sent again at the next start."""
        self.stops = True
        for attempts in list(self._out):
            attempts.on_end = None
            attempts.client_gone()
        self._out.clear()

    async def keep_answers(self) -> None:
        """Store the collected answers. Raises OSError, sqlite3.Error."""
        answers, self._answers = self._answers, []
        await self._call(self._ledger.turn, answers, [])

    def drain(self) -> None:
        """Send nothing more; lines that are out may still be answered."""
        self.stops = True
        self._wake.set()

    @property
    def idle(self) -> bool:
        """No line is out, and no answer is to be stored."""
        return not self._out and not self._answers

    # The loop

    async def run(self) -> None:
        while True:
            has_work = bool(self.running or self._answers)
            try:
                async with asyncio.timeout(_IDLE_S if has_work else _WATCH_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                await self._turn()
            except (OSError, sqlite3.Error) as error:
                await self._pause(error)
            except InputLost as error:
                _log.error("%s cannot continue: %s", error.batch.id, error)
                error.batch.outcome = "failed"
            except Exception:
                _log.exception("batches: a turn failed")
                await asyncio.sleep(_AGAIN_S)
            await asyncio.sleep(_PAUSE_S)

    async def _pause(self, error: OSError | sqlite3.Error) -> None:
        why = reason(error)
        if not self.paused:
            _log.error("batches are paused; nothing is lost: %s", why)
        self.paused = shown_reason(error)
        self._wake.set()
        await asyncio.sleep(_AGAIN_S)

    async def _turn(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self.choice.look(now_s)
            self._foresee(now_s)
        # With no answers to store, marking lines as out shows whether writing works again.
        picks = [] if self.stops or (self.paused and self._answers) else await self._pick(now_s)
        answers, self._answers = self._answers, []
        if answers or picks:
            try:
                bodies = await self._call(self._ledger.turn, answers, [p.line for p in picks])
            except Exception:
                # Shielded: if this is cancelled, a running transaction still completes.
                self._answers[:0] = answers
                self._take_back(picks)
                raise
            if self.paused:
                _log.warning("batches continue")
                self.paused = ""
            self._send(picks, bodies)
        for each in list(self.running):
            await self._end_if_over(each)

    async def _pick(self, now_s: float) -> list[Pick]:
        """The lines to send now; they are out once that is stored."""
        live = [each for each in self.running if self._outcome(each.batch) is None]
        for each in live:
            for model, waiting in list(each.batch.waiting.items()):
                if waiting > 0 and not each.held[model] and each.rests_s.get(model, 0.0) <= now_s:
                    lines = await self._call(self._ledger.next_lines, each.batch, model, _HELD)
                    each.held[model].extend(lines)
                    each.moved_s[model] = now_s
                    if not lines:
                        each.batch.waiting[model] = 0  # other gateways have them
        due: list[WaitingLine] = []
        while self._again and self._again[0][0] <= now_s:
            due.append(heapq.heappop(self._again)[2])
        depth = self._of.config.scheduler.prefill_depth
        picks = self.choice.pick(live, due, depth, Spending(self.client_of).may, now_s)
        chosen = {_key(pick.line) for pick in picks}
        for line in due:
            if _key(line) not in chosen:
                self._go_again(line, now_s + _IDLE_S)
        return picks

    def client_of(self, owner: str) -> Client | None:
        """The client of a batch's lines; None: its key is gone, or expired."""
        admission = self._of.admission
        client = admission.named(owner)
        if owner and not admission.knows(owner):
            return None
        if client.expires_s is not None and client.expires_s <= time.time():
            return None
        return dataclasses.replace(client, request_class=BATCH_CLASS, classes=frozenset())

    def _take_back(self, picks: Iterable[Pick]) -> None:
        """Lines that were not sent."""
        for pick in reversed(list(picks)):
            running = self._running(pick.line.batch)
            if _key(pick.line) in self._tries:
                self._go_again(pick.line, time.monotonic())
            elif running is not None:
                running.held[pick.line.model].appendleft(pick.line)

    def _go_again(self, line: WaitingLine, at_s: float) -> None:
        self._number += 1
        heapq.heappush(self._again, (at_s, self._number, line))

    def _running(self, batch: Batch) -> RunningBatch | None:
        return next((each for each in self.running if each.batch is batch), None)

    # Lines

    def _send(self, picks: Sequence[Pick], bodies: Sequence[BatchLine | None]) -> None:
        for (line, at), body in zip(picks, bodies, strict=True):
            running, client = self._running(line.batch), self.client_of(line.batch.owner)
            if _key(line) not in self._tries:
                self._tries[_key(line)] = 0
                line.batch.waiting[line.model] -= 1
            if body is None:
                del self._tries[_key(line)]  # another gateway has the line
                continue
            if running is None or client is None or self.stops:
                continue  # out only in the database: it ends with its batch, or is retried
            running.moved_s[line.model] = time.monotonic()
            known, choice = self._of.fleet.instances, self.choice
            attempts = LineAttempts.of(
                self._of.dataplane.rooms, body.url, client, at, known, choice.placed, self._ended
            )
            self._out[attempts] = _Out(running, line, body.custom_id, at)
            running.out[at] += 1
            choice.out[at] += 1
            choice.bytes_out += line.size
            try:
                attempts.begin(bytes(body.body))
            except Exception:
                _log.exception("a line of %s cannot be sent", line.batch.id)
                attempts.client_gone()

    def _ended(self, attempts: LineAttempts) -> None:
        """A line has ended: its answer is stored, or it is retried."""
        out = self._out.pop(attempts, None)
        if out is None:
            return
        self._wake.set()
        running, line, custom_id, at = out
        choice, answer = self.choice, attempts.answer
        assert answer is not None
        choice.out[at] -= 1
        running.out[at] -= 1
        choice.bytes_out -= line.size
        if attempts.usage is not None:
            choice.note(at, *attempts.usage)
        status = answer.status if answer.whole else 0
        tries = self._tries[_key(line)] = self._tries[_key(line)] + 1
        if status in _BUSY or (status in _FAILED and tries < _MOST_TRIES):
            if self._outcome(line.batch) is None:
                wait_s = min(_MOST_BACKOFF_S, answer.retry_after_s or 2.0 ** min(tries, 6) / 4)
                self.answered["retried"] += 1
                self._go_again(line, time.monotonic() + wait_s)
            return
        if not 0 < status < 400 and self._outcome(line.batch) is not None:
            return  # it gets the batch's own error
        del self._tries[_key(line)]
        good, tokens = 0 < status < 400, attempts.usage or (0, 0)
        self.answered["completed" if good else "failed"] += 1
        self._learn(running, line, attempts.usage if good else None)
        body = answer.body if status else _broke_off()
        told = Answer(line, custom_id, status or 502, attempts.request_id, body, tokens)
        self._answers.append(told)

    def _learn(
        self, running: RunningBatch, line: WaitingLine, real: tuple[int, int] | None
    ) -> None:
        told = line.prompt_tokens, line.output_tokens
        if (left := running.batch.left.get(line.kind)) is not None:
            left.add(-told[0], -told[1], -1)
        if real is not None:
            running.seen.note(line.kind, told, real)
            work_s = self._work_s(line.model, *real)
            self._pace.note(work_s)
            self._lately.append(work_s)

    def _work_s(self, model: str, prompt_tokens: float, output_tokens: float) -> float:
        return self.choice.work_s(model, prompt_tokens, output_tokens, time.monotonic())

    # Ends

    def _outcome(self, batch: Batch) -> str | None:
        """The final status of a batch that ends with lines left; None: it continues."""
        if batch.outcome is not None:
            return batch.outcome
        if batch.id in self._cancelled or batch.status == "cancelling":
            return "cancelled"
        if time.time() >= batch.expires_at:
            return "expired"
        # Of several gateways, another one may know the key.
        known = self._ledger.shared or self.client_of(batch.owner) is not None
        return None if known else "failed"

    async def _end_if_over(self, running: RunningBatch) -> None:
        batch = running.batch
        outcome = "completed" if batch.done >= batch.total else self._outcome(batch)
        if outcome is None or self.stops or time.monotonic() < running.again_s:
            return
        if running.lines_out:
            if outcome == "expired":
                for attempts in [a for a, out in self._out.items() if out.running is running]:
                    attempts.client_gone()
            return
        if any(answer.line.batch is batch for answer in self._answers):
            self._wake.set()
            return
        if not await self._call(self._ledger.finish, batch, outcome):
            running.again_s = time.monotonic() + _LOOK_S
            return
        self._forget(running)
        _log.info(
            "%s is %s: %d lines, %d of them failed", batch.id, outcome, batch.total, batch.failed
        )

    def _forget(self, running: RunningBatch) -> None:
        batch = running.batch
        self.running.remove(running)
        self._cancelled.discard(batch.id)
        self._ends_s.pop(batch.seq, None)
        self._again = [each for each in self._again if each[2].batch is not batch]
        heapq.heapify(self._again)
        self._tries = {key: n for key, n in self._tries.items() if key[0] != batch.seq}

    # Other gateways

    def take_up(
        self, new: Iterable[Batch], known: Iterable[Batch], there: AbstractSet[int]
    ) -> None:
        """Run batches that others began, and drop those that others ended.

        Args:
            known: the batches asked about. there: the numbers of unfinished ones.
        """
        gone = {each.seq for each in known} - there
        for running in [each for each in self.running if each.batch.seq in gone]:
            running.batch.outcome = running.batch.outcome or "completed"
            for attempts in [a for a, out in self._out.items() if out.running is running]:
                attempts.client_gone()
            self._forget(running)
        if not self.stops:
            for batch in new:
                self.add(batch)

    def note_elsewhere(self, lines: int) -> None:
        """Other gateways finished so many: assume the recent duration of lines here."""
        if lines and self._lately:
            self._pace.note(lines * sum(self._lately) / len(self._lately))

    def stuck(self, for_s: float, rest_s: float) -> list[WaitingLine]:
        """Lines that found no place here for this long: released, for others to send.

        Args:
            rest_s: no others are fetched in their place for this long.
        """
        now_s, lines = time.monotonic(), list[WaitingLine]()
        for each in self.running:
            for model, held in each.held.items():
                if held and now_s - each.moved_s.get(model, now_s) >= for_s:
                    lines += held
                    held.clear()
                    each.rests_s[model] = now_s + rest_s
        return lines

    # Predictions

    def _foresee(self, now_s: float) -> None:
        out: dict[int, list[LineOut]] = {each.batch.seq: [] for each in self.running}
        for attempts, (running, line, _, at) in self._out.items():
            placed = attempts.placed_at
            made = 0.0 if placed is None else self.choice.made_tokens(placed, now_s)
            told = line.prompt_tokens, line.output_tokens
            out[running.batch.seq].append(LineOut(line.kind, at, told, made))
        works_s, begun_s, elsewhere = [], 0.0, self.choice.lines_elsewhere
        for each in self.running:
            lines = out[each.batch.seq]
            each.seen.look(lines)
            waits_s, theirs_s = work_of(each.batch.left, lines, each.seen, self._work_s)
            if elsewhere:
                # Lines out at other gateways count like those here; the earliest ones first.
                waiting = sum(sums.lines for sums in each.batch.left.values()) - len(lines)
                theirs = max(0, min(elsewhere, waiting))
                elsewhere -= theirs
                waits_s *= 1 - theirs / max(1, waiting)
                theirs_s *= 1 + theirs / max(1, len(lines))
            works_s.append(waits_s)
            begun_s += theirs_s
        pace = self._pace.look(now_s, begun_s)
        drains_s = []
        for number, each in enumerate(self.running):
            lines = out[each.batch.seq] or [line for those in out.values() for line in those]
            # If other batches follow, their lines take the places.
            step_s = self._full_step_s if any(works_s[number + 1 :]) else self.choice.step_s
            drains_s.append(drain_s(lines, each.seen, step_s))
        for each, in_s in zip(self.running, ends_in_s(works_s, drains_s, pace), strict=True):
            self._ends_s[each.batch.seq] = now_s + in_s

    def _full_step_s(self, at: InstanceId, _: float) -> float:
        return self.choice.step_s(at, self.choice.out[at])

    def predicted_end_unix_s(self, batch: Batch) -> float | None:
        """When it will be done; None: not known yet."""
        end_s = self._ends_s.get(batch.seq, math.inf)
        return time.time() + end_s - time.monotonic() if end_s < math.inf else None

    def is_late(self, batch: Batch) -> bool:
        """Whether it will miss its window."""
        end_s = self.predicted_end_unix_s(batch)
        return end_s is not None and end_s > batch.expires_at


def reason(error: OSError | sqlite3.Error) -> str:
    """Why a write failed."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def shown_reason(error: OSError | sqlite3.Error) -> str:
    """The same for clients, without the storage's location."""
    if isinstance(error, StorageUnavailable):
        return "The storage cannot be reached"
    return reason(error)


def _key(line: WaitingLine) -> tuple[int, int]:
    return line.batch.seq, line.number


def _broke_off() -> bytes:
    message = f"The answer broke off, {_MOST_TRIES} times."
    return error_body(Refusal(502, "upstream_error", message, kind="server_error"))
