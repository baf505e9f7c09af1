"""Batches of a running gateway: opened, validated, run, and closed.

While the storage cannot be used, because another gateway has the folder (as during a takeover) or
the database is away, this one answers 503 on these paths and waits.
"""

import asyncio
import contextlib
import errno
import functools
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from hetero_gateway.core.request import Request
from hetero_gateway.core.types import Reject, RejectReason
from hetero_gateway.engines.vllm import Work, work_of_path
from hetero_gateway.engines.vllm.paths import RESPONSES
from hetero_gateway.errors import Refusal
from hetero_gateway.files.batch_lines import BatchLine, LineProblem, in_background
from hetero_gateway.gateway.records.exposition import Family
from hetero_gateway.gateway.records.families import batch_families
from hetero_gateway.serve.batches.files import Document, Files, Incoming, Joining, no_space
from hetero_gateway.serve.batches.ledger import Batch, Estimate, Ledger, NotOurs
from hetero_gateway.serve.batches.runner import Runner, RunnerParts, reason, shown_reason
from hetero_gateway.serve.batches.storage import BatchRows, StorageUnavailable
from hetero_gateway.serve.batches.stores import BatchStore, WorkSharing
from hetero_gateway.serve.batches.validation import Validation

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_LOCK_S = 0.5
_TIDY_S = 3600.0
_AGAIN_S = 5.0
# Bytes of memory per line, besides its body.
_AROUND_BYTES = 1 << 16


class Batches:
    """See above. ``start`` needs a running event loop.

    Args:
        of: the gateway.
        store: where batches are kept.
    """

    def __init__(self, of: RunnerParts, store: BatchStore) -> None:
        self._of = of
        self._store = store
        self.config = of.config.batches
        # One thread has the database; the other one validates lines, however long that takes.
        self._thread = ThreadPoolExecutor(1, "batches")
        self._reading = ThreadPoolExecutor(1, "batch-lines")
        self._ends = False
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._to_validate: asyncio.Queue[Batch] = asyncio.Queue()
        self._queued: set[int] = set()  # of these
        self._rows: BatchRows | None = None
        self._sharing: WorkSharing | None = None
        self.files: Files
        self.ledger: Ledger
        self.runner: Runner | None = None
        self._validation_waits = ""  # why validation waits

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Raises ConfigError."""
        self._loop = asyncio.get_running_loop()
        # Remote storage may be slow: other requests must not wait for it.
        if self._store.is_here and await self._take():
            await self._open(tasks)
        else:
            self._tasks.append(tasks.create_task(self._wait_for_store(tasks)))

    async def _take(self) -> bool:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._store.take)

    async def _wait_for_store(self, tasks: asyncio.TaskGroup) -> None:
        told = ""
        while True:
            try:
                if await self._take():
                    await self._open(tasks)
                    return
                why = self._store.waits_for
            except StorageUnavailable as error:
                why = reason(error)
            except Exception:
                _log.exception("batches cannot be opened")
                self._store.release()
                return
            if why != told:
                _log.warning("batches are waiting: %s", why)
            told = why
            await asyncio.sleep(_LOCK_S)

    async def _open(self, tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        unfinished = await loop.run_in_executor(self._thread, self._read)
        runner = Runner(self._of, self.ledger, self.call, self.config)
        sharing = self._store.share(self.ledger, self.call, runner, self._look_at)
        if sharing is not None:
            try:
                await sharing.renew()
            except BaseException:
                await loop.run_in_executor(None, sharing.close)
                raise
            self._sharing = sharing
            self._tasks.append(tasks.create_task(sharing.run()))
        self.runner = runner
        for batch in unfinished:
            if batch.total:
                self.runner.add(batch)
            else:
                self._look_at(batch)
        for work in (self.runner.run(), self._validate_all(), self._tidy()):
            self._tasks.append(tasks.create_task(work))

    def _look_at(self, batch: Batch) -> None:
        """Queue its lines for validation."""
        if batch.seq not in self._queued:
            self._queued.add(batch.seq)
            self._to_validate.put_nowait(batch)

    def _read(self) -> list[Batch]:
        """In the database's thread."""
        if self._rows is not None:
            self._rows.close()  # of an earlier attempt
        self._rows = rows = self._store.rows()
        self.files = Files(rows, self._store.blobs, self.config)
        self.ledger = self._store.ledger(rows)
        stray = self.files.sweep()
        batches = self.ledger.unfinished()
        for batch in batches:
            if not batch.total:
                continue  # validated again, even if it is cancelled
            self.ledger.recover(batch)
            if batch.repeated:
                _log.warning("%s: %d lines are sent again", batch.id, batch.repeated)
        if batches or stray:
            _log.info("batches: %d to continue, %d stray files", len(batches), stray)
        return batches

    def drain(self) -> None:
        """The gateway is ending, or another one takes over: nothing more is sent, and once all
        lines that are out are answered, the folder is released. May be called from a signal
        handler.
        """
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_leaving)

    def _begin_leaving(self) -> None:
        if self.runner is not None and self._leaving is None:
            self.runner.drain()
            self._leaving = asyncio.get_running_loop().create_task(self._leave(self.runner))

    async def _leave(self, runner: Runner) -> None:
        while not runner.idle:  # noqa: ASYNC110 - briefly, once
            await asyncio.sleep(_LOCK_S)
        await self.stop()

    async def stop(self) -> None:
        """Store the answers, and release the folder."""
        if self._stopping is None:
            self._ends = True
            self._stopping = asyncio.get_running_loop().create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        if self.runner is not None:
            self.runner.stop()
        if self._leaving is not None and self._leaving is not asyncio.current_task():
            self._leaving.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.runner is not None:
            try:
                await self.runner.keep_answers()
            except (OSError, sqlite3.Error) as error:
                _log.error("batches: the last answers are lost and requested again: %s", error)
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def _close(self) -> None:
        self._reading.shutdown()
        if self._sharing is not None:
            self._sharing.close()
        if self._rows is not None:
            self._thread.submit(self.ledger.close).result()
            self._thread.submit(self._rows.close).result()
        self._thread.shutdown()
        self._store.release()

    # The database's thread

    async def call(self, function: Callable[..., _T], /, *args: Any) -> _T:
        """Run something there. Raises what it raises."""
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._thread, functools.partial(function, *args))
        # A started call completes even if its caller is cancelled.
        return await asyncio.shield(running)

    async def ask(self, function: Callable[..., _T], /, *args: Any) -> _T:
        """The same for a client. Raises Refusal: its own, or 507."""
        try:
            return await self.call(function, *args)
        except (OSError, sqlite3.Error) as error:
            raise _refused(error) from error

    async def bring(self, incoming: Incoming | Joining) -> None:
        """Keep a received file, while the database's thread goes on. Raises Refusal."""
        bring = incoming.finish if isinstance(incoming, Incoming) else incoming.run
        running = asyncio.get_running_loop().run_in_executor(None, bring)
        try:
            await asyncio.shield(running)
        except OSError as error:
            raise _refused(error) from error

    async def join(self, owner: str, upload_id: str, part_ids: Sequence[str]) -> Document:
        """Join an upload's parts into a file. Raises Refusal: 400, 404, 507."""
        joining = await self.ask(self.files.begin_joining, owner, upload_id, part_ids)
        try:
            await self.bring(joining)
            return await self.ask(self.files.end_joining, owner, upload_id, joining)
        except BaseException:
            await self.call(joining.whole.drop)
            raise

    def check_open(self) -> None:
        """Raises Refusal: 503, the storage cannot be used yet."""
        if self.runner is None or self._ends:
            message = "The files and batches cannot be used yet; ask again."
            raise Refusal(503, "batches_not_ready", message, kind="server_error", retry_after_s=2)

    # Batches

    async def create(self, owner: str, *args: Any) -> Document:
        """As ``Ledger.create``, and queue it for validation. Raises Refusal."""
        loop = asyncio.get_running_loop()

        def made() -> Document:
            document, batch = self.ledger.create(owner, *args)
            # Even if the caller no longer waits for the answer.
            loop.call_soon_threadsafe(self._look_at, batch)
            return document

        return await self.ask(made)

    async def cancel(self, owner: str, batch_id: str) -> Document:
        """Raises Refusal: 404, 409."""
        document = await self.ask(self.ledger.cancel, owner, batch_id)
        assert self.runner is not None
        self.runner.cancel(batch_id)
        return self.with_outlook(document)

    def with_outlook(self, document: Document) -> Document:
        """The document of a batch, with predictions if it runs."""
        running = {} if self.runner is None else {e.batch.id: e for e in self.runner.running}
        each = running.get(document["id"])
        told: Document = {"predicted_end_at": None, "late": False, "paused": None}
        if document["status"] == "validating":
            told["paused"] = self._validation_waits or None
        if each is not None and self.runner is not None:
            told["predicted_end_at"] = _whole(self.runner.predicted_end_unix_s(each.batch))
            told["late"] = self.runner.is_late(each.batch)
            told["paused"] = self.runner.paused or None
        return document | told

    # Validation

    async def _validate_all(self) -> None:
        while True:
            batch = await self._to_validate.get()
            while True:
                try:
                    begun = await self._validate(batch)
                except NotOurs:
                    break
                except (OSError, sqlite3.Error) as error:
                    self._validation_waits = shown_reason(error)
                    _log.error("%s cannot be validated now: %s", batch.id, error)
                    await asyncio.sleep(_AGAIN_S)
                    continue
                except Exception:
                    _log.exception("%s cannot be validated", batch.id)
                    problem = {"code": "internal_error", "message": "The gateway failed."}
                    with contextlib.suppress(NotOurs):
                        await self.call(self.ledger.fail, batch, [problem])
                    break
                self._validation_waits = ""
                if begun is not None:
                    for each in await self.call(self.ledger.unfinished_named, batch.id):
                        assert self.runner is not None
                        self.runner.add(each)
                break
            self._queued.discard(batch.seq)

    async def _validate(self, batch: Batch) -> bool | None:
        loop = asyncio.get_running_loop()
        known: dict[str, LineProblem | None] = {}

        async def judge_model(model: str) -> LineProblem | None:
            return self._judge_model(batch.owner, model)

        def judge(line: BatchLine) -> Estimate | LineProblem:
            try:
                estimate = self._estimate(line)
            except Refusal as refusal:
                return LineProblem(refusal.code, refusal.message, refusal.param)
            if isinstance(estimate, LineProblem):
                return estimate
            model = estimate.model
            if model not in known:
                asked = asyncio.run_coroutine_threadsafe(judge_model(model), loop)
                known[model] = asked.result()
            return known[model] or estimate

        def look() -> bool | None:
            rows = self._store.rows()
            ledger = self._store.ledger(rows)
            try:
                if not ledger.claim(batch):
                    raise NotOurs(batch.id)
                validation = Validation(
                    ledger,
                    batch,
                    judge,
                    self._of.config.server.max_body_bytes + _AROUND_BYTES,
                    self.config.max_lines,
                    self.config.max_key_lines,
                    lambda: self._ends,
                )
                with self._store.blobs.open(batch.input_file_id) as file:
                    return validation.run(file)
            finally:
                rows.close()

        return await loop.run_in_executor(self._reading, look)

    def _judge_model(self, owner: str, model: str) -> LineProblem | None:
        """Why the key's lines may not use a model; None: they may."""
        assert self.runner is not None
        client = self.runner.client_of(owner)
        if client is None:
            return LineProblem("invalid_api_key", "The key is gone, or has expired.")
        try:
            client.check_model(model)
        except Refusal as refusal:
            return LineProblem(refusal.code, refusal.message, "model")
        members = self._of.fleet.scheduler.members
        judged = members.judge(Request(self.runner.target(model), 1, 0.0), ())
        if isinstance(judged, Reject) and judged.reason is RejectReason.UNKNOWN_MODEL:
            return LineProblem("model_not_found", judged.detail, "model")
        return None

    def _estimate(self, line: BatchLine) -> Estimate | LineProblem:
        """Raises Refusal."""
        body = bytes(line.body)
        most_bytes = self._of.config.server.max_body_bytes
        if len(body) > most_bytes:
            message = f"The body is larger than {most_bytes} bytes."
            return LineProblem("request_too_large", message, "body")
        parsed, tokens = self._of.dataplane.intake.look_at(line.url, body)
        if parsed.stream:
            return LineProblem("stream_not_supported", "No line may stream.", "stream")
        if line.url == RESPONSES and in_background(body):
            message = "No line may run in the background: its answer would never be here."
            return LineProblem("background_not_supported", message, "background")
        assert parsed.model
        output, limit = 0, parsed.max_output_tokens
        if work_of_path(line.url) is Work.GENERATE:
            if limit is None:
                limit = round(self._of.config.scheduler.predictor.mean_tokens)
            output = parsed.sequences * limit
        keys = parsed.prefix
        prefix = keys.hashes[0] if keys is not None and keys.hashes else None
        return Estimate(parsed.model, max(1, tokens), output, prefix)

    # Periodic work

    async def _tidy(self) -> None:
        while True:
            try:
                await self.call(self.files.forget_old, time.time())
            except (OSError, sqlite3.Error) as error:
                _log.error("batches: old files cannot be removed: %s", error)
            await asyncio.sleep(_TIDY_S)

    # For display

    def describe(self) -> list[Document]:
        """The running batches, as the dashboard shows them."""
        runner = self.runner
        if runner is None:
            return []
        return [
            {
                "id": each.batch.id,
                "client": each.batch.owner,
                "lines": each.batch.total,
                "done": each.batch.done,
                "failed": each.batch.failed,
                "repeated": each.batch.repeated,
                "out": {name: n for name, n in sorted(each.out.items()) if n},
                "predicted_end": _whole(runner.predicted_end_unix_s(each.batch)),
                "expires": each.batch.expires_at,
                "late": runner.is_late(each.batch),
            }
            for each in runner.running
        ]

    def alarms(self) -> Iterator[tuple[str, str]]:
        """(severity, text)."""
        runner = self.runner
        if runner is None:
            yield "warning", f"Batches wait: {self._store.waits_for}."
            return
        if paused := runner.paused or self._validation_waits:
            yield "bad", f"Batches are paused, nothing can be written: {paused}."
        if late := [each.batch.id for each in runner.running if runner.is_late(each.batch)]:
            more = f" and {len(late) - 1} more" if len(late) > 1 else ""
            yield "warning", f"{late[0]}{more} will not be done in time."

    def families(self) -> Iterator[Family]:
        runner = self.runner
        lines: Counter[str] = Counter()
        out: Counter[str] = Counter()
        late = 0
        for each in () if runner is None else runner.running:
            lines["waiting"] += each.batch.total - each.batch.done - each.lines_out
            lines["out"] += each.lines_out
            out.update(each.out)
            late += runner is not None and runner.is_late(each.batch)
        answered = {} if runner is None else runner.answered
        running = 0 if runner is None else len(runner.running)
        paused = runner is None or bool(runner.paused or self._validation_waits)
        yield from batch_families(running, late, paused, lines, out, answered)


def _refused(error: OSError | sqlite3.Error) -> Exception:
    """The error for a client."""
    if is_full(error):
        return no_space()
    if isinstance(error, StorageUnavailable):
        message = "The storage of files and batches cannot be reached; ask again."
        more: dict[str, Any] = {"kind": "server_error", "retry_after_s": 5}
        return Refusal(503, "storage_unavailable", message, **more)
    return error


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds)


def is_full(error: OSError | sqlite3.Error) -> bool:
    """Whether the error means that the disk is full."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
