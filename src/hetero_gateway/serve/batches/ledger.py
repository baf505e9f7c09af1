"""Batches and their lines: which wait, which were sent, which are answered.

    validating → in_progress → finalizing → completed
        ↓             ↓ ↓                      failed, expired, cancelled
      failed      cancelling, expired → finalizing

A line waits, is out, or is done. The row says that it is out before it is sent. Where answers are
kept until their batch ends, and how to recover from a crash, is up to the subclasses:
``folder_ledger`` of one gateway, ``shared_ledger`` of several.

Everything here runs in the database's thread.
"""

import json
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import msgspec

from hetero_gateway.core.batches.outlook import Kind, Sums, kind_of
from hetero_gateway.errors import Refusal
from hetero_gateway.files.batch_lines import BatchLine, LineProblem, answer_line, error_line
from hetero_gateway.files.batches_config import BatchesConfig
from hetero_gateway.serve.batches.files import Document, new_id, not_found, page
from hetero_gateway.serve.batches.storage import BatchRows, Blobs, StorageUnavailable

WAITS, OUT, DONE = 0, 1, 2
_MOST_OPEN = 32
_READ_AT_ONCE = 1000
_OVER = ("completed", "failed", "expired", "cancelled")
REASONS = {
    "expired": ("batch_expired", "The request was not done before the completion window was over."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before the request was done."),
    "failed": ("batch_failed", "The batch ended before the request was done."),
}


@dataclass(slots=True, eq=False)
class Batch:
    """An unfinished batch, from its row.

    ``left``: its lines that are not done, by model and length; ``out``: how many are out.
    """

    seq: int
    id: str
    owner: str
    status: str
    endpoint: str | None
    expires_at: int
    input_file_id: str
    output_file_id: str
    error_file_id: str
    output_bytes: int
    error_bytes: int
    total: int
    completed: int
    failed: int
    repeated: int
    outcome: str | None = None  # while finalizing: its final status
    left: dict[Kind, Sums] = field(default_factory=dict)
    waiting: Counter[str] = field(default_factory=Counter)  # lines by model

    @property
    def done(self) -> int:
        return self.completed + self.failed


class InputLost(Exception):
    """The batch's input file was removed or replaced from outside."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(f"{batch.input_file_id} is no longer what it was")
        self.batch = batch


class NotOurs(Exception):
    """Another gateway has taken this over."""


class WaitingLine(NamedTuple):
    """A line to be sent. ``prompt_tokens``, ``output_tokens``: estimates for the whole line."""

    batch: Batch
    number: int
    offset: int
    size: int
    model: str
    prompt_tokens: int
    output_tokens: int
    repeats: int

    @property
    def kind(self) -> Kind:
        return kind_of(self.model, self.prompt_tokens, self.output_tokens)


class Answer(NamedTuple):
    """A line's result. ``tokens``: (prompt, output) that it took."""

    line: WaitingLine
    custom_id: str
    status: int
    request_id: str
    body: bytes
    tokens: tuple[int, int]


class Estimate(NamedTuple):
    """A valid line. ``prefix``: key of its prompt's beginning; None: it has none."""

    model: str
    prompt_tokens: int
    output_tokens: int
    prefix: int | None


class NewLine(NamedTuple):
    """A line to be stored. ``custom``: a digest of its custom_id."""

    number: int
    offset: int
    size: int
    estimate: Estimate
    custom: bytes


class Ledger(ABC):
    """See above.

    Args:
        rows: of batches and their lines. blobs: files.
        config: quotas.

    ``shared``: other gateways do part of the work.
    """

    shared = False

    def __init__(self, rows: BatchRows, blobs: Blobs, config: BatchesConfig) -> None:
        self._db = rows
        self._blobs = blobs
        self._config = config
        self._inputs: dict[str, BinaryIO] = {}

    def close(self) -> None:
        for file in self._inputs.values():
            file.close()
        self._inputs.clear()

    # As clients see them

    def create(
        self,
        owner: str,
        file_id: str,
        endpoint: str | None,
        window: tuple[str, float],
        metadata: Mapping[str, str],
    ) -> tuple[Document, Batch]:
        """The document for its key, and the batch. Raises Refusal: 404, 429."""
        batch_id, now_s = new_id("batch_"), time.time()
        with self._db.transaction():
            if not self._db.row("SELECT 1 FROM files WHERE id = ? AND owner = ?", file_id, owner):
                raise not_found("file", file_id)
            running = self._db.number(
                "SELECT COUNT(*) FROM batches WHERE owner = ? AND ended_at IS NULL", owner
            )
            if running >= self._config.max_key_batches:
                message = f"The key has {running} batches that are not over."
                raise Refusal(429, "quota_exceeded", message, kind="rate_limit_error")
            self._db.run(
                "INSERT INTO batches (id, owner, status, input_file_id, endpoint,"
                ' "window", metadata, created_at, expires_at, output_file_id, error_file_id)'
                " VALUES (?, ?, 'validating', ?, ?, ?, ?, ?, ?, ?, ?)",
                *(batch_id, owner, file_id, endpoint, window[0], json.dumps(dict(metadata))),
                *(int(now_s), int(now_s + window[1]), new_id("file-"), new_id("file-")),
            )
        row = self._row(owner, batch_id)
        return _document(row), self._batch(row)

    def _row(self, owner: str, batch_id: str) -> Any:
        row = self._db.row("SELECT * FROM batches WHERE id = ? AND owner = ?", batch_id, owner)
        if row is None:
            raise not_found("batch", batch_id)
        return row

    def document(self, owner: str, batch_id: str) -> Document:
        """Raises Refusal: 404."""
        return _document(self._row(owner, batch_id))

    def listed(self, owner: str, after: str | None, limit: int) -> Document:
        """A page of them, newest first. Raises Refusal: 404."""
        before = 2**62 if after is None else self._row(owner, after)["seq"]
        rows = self._db.rows(
            "SELECT * FROM batches WHERE owner = ? AND seq < ? ORDER BY seq DESC LIMIT ?",
            *(owner, before, limit + 1),
        )
        return page([_document(row) for row in rows[:limit]], more=len(rows) > limit)

    def cancel(self, owner: str, batch_id: str) -> Document:
        """Raises Refusal: 404, or 409 if it has ended."""
        with self._db.transaction():
            row = self._row(owner, batch_id)
            if row["ended_at"] is not None or row["status"] == "finalizing":
                message = f"The batch is {row['status']} already."
                raise Refusal(409, "batch_over", message, param="batch_id")
            if row["status"] != "cancelling":
                self._db.run(
                    "UPDATE batches SET status = 'cancelling', cancelling_at = ? WHERE seq = ?",
                    *(int(time.time()), row["seq"]),
                )
        return self.document(owner, batch_id)

    # Running batches

    def unfinished(self) -> list[Batch]:
        """All unfinished batches, earliest deadline first."""
        rows = self._db.rows(
            "SELECT * FROM batches WHERE ended_at IS NULL ORDER BY expires_at, seq"
        )
        return [self._batch(row) for row in rows]

    def unfinished_named(self, batch_id: str) -> list[Batch]:
        """One unfinished batch; none if it has ended."""
        rows = self._db.rows("SELECT * FROM batches WHERE id = ? AND ended_at IS NULL", batch_id)
        return [self._batch(row) for row in rows]

    def _batch(self, row: Any) -> Batch:
        batch = Batch(
            *(row["seq"], row["id"], row["owner"], row["status"], row["endpoint"]),
            *(row["expires_at"], row["input_file_id"], row["output_file_id"]),
            *(row["error_file_id"], row["output_bytes"], row["error_bytes"], row["total"]),
            *(row["completed"], row["failed"], row["repeated"], row["outcome"]),
        )
        if batch.total:
            self._count_left(batch)
        return batch

    def _count_left(self, batch: Batch) -> None:
        left: dict[Kind, Sums] = {}
        waiting: Counter[str] = Counter()
        for model, prompt, output, state in self._not_done_lines(batch.seq):
            kind = kind_of(model, prompt, output)
            left.setdefault(kind, Sums()).add(prompt, output)
            if state == WAITS:
                waiting[model] += 1
        # In one assignment: the event loop reads them.
        batch.left, batch.waiting = left, waiting

    def _not_done_lines(self, seq: int) -> Iterator[Any]:
        """(model, prompt tokens, output tokens, state) of each, a few at a time."""
        after = 0
        while rows := self._db.rows(
            "SELECT model, prompt_tokens, output_tokens, state, number FROM lines"
            f" WHERE batch = ? AND state < {DONE} AND number > ? ORDER BY number LIMIT ?",
            *(seq, after, _READ_AT_ONCE),
        ):
            yield from (row[:4] for row in rows)
            after = rows[-1]["number"]

    def read(self, batch: Batch, offset: int, size: int) -> BatchLine:
        """The text of a valid line. Raises InputLost."""
        file = self._inputs.get(batch.input_file_id)
        try:
            if file is None:
                if len(self._inputs) >= _MOST_OPEN:
                    self.close()
                file = self._inputs[batch.input_file_id] = self._blobs.open(batch.input_file_id)
            return msgspec.json.decode(os.pread(file.fileno(), size, offset), type=BatchLine)
        except StorageUnavailable:
            raise
        except (msgspec.DecodeError, OSError) as error:
            raise InputLost(batch) from error

    @abstractmethod
    def next_lines(self, batch: Batch, model: str, most: int) -> list[WaitingLine]:
        """The next waiting lines of a model."""

    @abstractmethod
    def turn(
        self, answers: Sequence[Answer], sends: Sequence[WaitingLine]
    ) -> list[BatchLine | None]:
        """Store answers, and mark lines as out.

        Returns:
            The texts of these lines; None: another gateway has the line by now.

        Raises:
            InputLost: a line's text is gone.
            OSError, sqlite3.Error: nothing was done, and it may be retried.
        """

    @abstractmethod
    def finish(self, batch: Batch, status: str) -> bool:
        """End a batch: lines that are not done get an error, and its files appear for its key.

        It may be called again after a crash. False: another gateway still has lines of it
        out, or is ending it.
        """

    @abstractmethod
    def note_problems(self, batch: Batch, problems: Sequence[tuple[int, LineProblem]]) -> None:
        """Store problems with lines; the file of errors has all of them."""

    def recover(self, batch: Batch) -> None:
        """After a start: find answered lines, and send unanswered ones again."""
        return  # gateways that share a ledger never start alone

    def claim(self, batch: Batch) -> bool:
        """Whether this gateway is to validate the batch."""
        return True

    def _check_mine(self, batch: Batch) -> None:
        """In a transaction. Raises NotOurs: another gateway validates it by now."""
        return  # a single gateway has no competitor

    # Validation

    def begin_lines(self, batch: Batch) -> None:
        """Remove lines of an unfinished attempt."""
        with self._db.transaction():
            self._check_mine(batch)
            self._db.run("DELETE FROM lines WHERE batch = ?", batch.seq)
        batch.error_bytes = 0

    def add_lines(self, batch: Batch, rows: Sequence[NewLine]) -> None:
        with self._db.transaction():
            self._check_mine(batch)
            self._db.run_many(
                'INSERT INTO lines (batch, number, "offset", size, model, prompt_tokens,'
                " output_tokens, prefix, custom) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(batch.seq, r.number, r.offset, r.size, *r.estimate, r.custom) for r in rows],
            )

    def twins(self, batch: Batch) -> Iterator[tuple[int, int]]:
        """(number, number of the first) of lines with a repeated custom_id."""
        for first, custom in self._db.rows(
            "SELECT MIN(number), custom FROM lines WHERE batch = ? GROUP BY custom"
            " HAVING COUNT(*) > 1 ORDER BY 1 LIMIT 100000",
            batch.seq,
        ):
            for (number,) in self._db.rows(
                "SELECT number FROM lines WHERE batch = ? AND custom = ? AND number > ?",
                *(batch.seq, custom, first),
            ):
                yield number, first

    def lines_of(self, owner: str) -> int:
        """The number of lines in a key's unfinished batches."""
        return self._db.number(
            "SELECT SUM(total - completed - failed) FROM batches WHERE owner = ?"
            " AND ended_at IS NULL",
            owner,
        )

    def begin(self, batch: Batch, total: int) -> bool:
        """All lines are valid: put them in order. False: it was cancelled meanwhile."""
        work = "prompt_tokens + 4 * output_tokens"
        group = "COALESCE(prefix, -number)"
        self._db.run("DROP TABLE IF EXISTS places")
        self._db.run(
            "CREATE TEMP TABLE places AS SELECT number, ROW_NUMBER() OVER"
            f" (ORDER BY mean, own, {work}, number) AS place FROM (SELECT *, {group} AS own,"
            f" AVG({work}) OVER (PARTITION BY {group}) AS mean FROM lines WHERE batch = ?) AS t",
            batch.seq,
        )
        self._db.run("CREATE UNIQUE INDEX place_of ON places (number)")
        with self._db.transaction():
            self._check_mine(batch)
            self._db.run(
                "UPDATE lines SET position ="
                " (SELECT place FROM places p WHERE p.number = lines.number) WHERE batch = ?",
                batch.seq,
            )
            begun = self._db.run(
                "UPDATE batches SET status = 'in_progress', total = ?, in_progress_at = ?"
                " WHERE seq = ? AND status = 'validating'",
                *(total, int(time.time()), batch.seq),
            ).rowcount
            if not begun:
                self._db.run("UPDATE batches SET total = ? WHERE seq = ?", total, batch.seq)
        self._db.run("DROP TABLE places")
        return bool(begun)

    def fail(self, batch: Batch, problems: Sequence[Document]) -> None:
        """It fails before it starts: its lines, or the batch itself, are invalid."""
        with self._db.transaction():
            self._check_mine(batch)
            self._db.run("DELETE FROM lines WHERE batch = ?", batch.seq)
            self._keep_files(batch)
            self._db.run(
                "UPDATE batches SET status = 'failed', ended_at = ?, problems = ?, error_bytes = ?"
                " WHERE seq = ?",
                *(int(time.time()), json.dumps(list(problems)), batch.error_bytes, batch.seq),
            )

    def _close_input(self, batch: Batch) -> None:
        file = self._inputs.pop(batch.input_file_id, None)
        if file is not None:
            file.close()

    def _answer(self, answer: Answer, repeats: int) -> bytes:
        line = answer.line
        return answer_line(
            *(line_id(line.batch, line.number), answer.custom_id, answer.status),
            *(answer.request_id, answer.body),
            repeated=repeats > 0,
        )

    def _unsent(self, batch: Batch, row: Any, status: str) -> bytes:
        """The error of a line that is not done when its batch ends.

        Args:
            row: its number, offset and size.
        """
        number, offset, size = row
        custom_id = self._custom_id(batch, offset, size)
        return error_line(line_id(batch, number), custom_id, *REASONS[status])

    def _custom_id(self, batch: Batch, offset: int, size: int) -> str | None:
        try:
            return self.read(batch, offset, size).custom_id
        except InputLost:
            return None

    def _keep_files(self, batch: Batch) -> None:
        expires_at = int(time.time() + self._config.keep_s)
        for file_id, size, kind in (
            (batch.output_file_id, batch.output_bytes, "output"),
            (batch.error_file_id, batch.error_bytes, "error"),
        ):
            if size:
                self._db.run(
                    "INSERT INTO files (id, owner, filename, purpose, bytes, created_at,"
                    " expires_at) VALUES (?, ?, ?, 'batch_output', ?, ?, ?)"
                    " ON CONFLICT DO NOTHING",
                    *(file_id, batch.owner, f"{batch.id}_{kind}.jsonl", size),
                    *(int(time.time()), expires_at),
                )


def problem_line(batch: Batch, number: int, problem: LineProblem) -> bytes:
    """A line of the file of errors, for an invalid line."""
    return error_line(
        *(line_id(batch, number), None, problem.code, problem.message),
        line=number,
        param=problem.param,
    )


def line_id(batch: Batch, number: int) -> str:
    """The id of a line in its answer, besides the client's custom_id."""
    return f"batch_req_{batch.id.removeprefix('batch_')}_{number}"


def _document(row: Any) -> Document:
    over, status = row["ended_at"], row["status"]
    there = over is not None
    problems = json.loads(row["problems"])
    return {
        "id": row["id"],
        "object": "batch",
        "endpoint": row["endpoint"] or "",
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": row["input_file_id"],
        "completion_window": row["window"],
        "status": status,
        "output_file_id": row["output_file_id"] if there and row["output_bytes"] else None,
        "error_file_id": row["error_file_id"] if there and row["error_bytes"] else None,
        "created_at": row["created_at"],
        "in_progress_at": row["in_progress_at"],
        "expires_at": row["expires_at"],
        "finalizing_at": row["finalizing_at"],
        **{f"{name}_at": over if status == name else None for name in _OVER},
        "cancelling_at": row["cancelling_at"],
        "request_counts": {
            "total": row["total"],
            "completed": row["completed"],
            "failed": row["failed"],
        },
        "usage": {
            "input_tokens": row["input_tokens"],
            "output_tokens": row["output_tokens"],
            "total_tokens": row["input_tokens"] + row["output_tokens"],
        },
        "metadata": json.loads(row["metadata"]),
        "repeated_lines": row["repeated"],
    }
