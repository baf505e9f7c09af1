"""The ledger that several gateways share.

    gateways   those present: a lease, by the database's clock, which each renews; and its load
    lines      holder: the gateway to send a line, while it waits or is out
    batches    holder: the gateway that validates or ends it
    answers    of unfinished batches, in order of arrival; then they become a file

A gateway holds a few of the waiting lines, and sends no others. When a lease expires, the lines it
held are free again: those that were out are sent again, and marked so. The gateway may still be
alive, and answer: of two answers the first is kept, in the transaction that marks the line as done.

One gateway ends a batch, when no other one has lines of it out: unfinished lines become errors,
after which nothing of it changes any more, and its answers become its files. Should that gateway
crash, or be slow, another one writes the same files again.

Transactions of all gateways run one after the other (``BatchRows``), as those of a folder do.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from hetero_gateway.files.batch_lines import BatchLine, LineProblem
from hetero_gateway.files.batches_config import BatchesConfig
from hetero_gateway.serve.batches.files import new_id
from hetero_gateway.serve.batches.ledger import (
    DONE,
    OUT,
    WAITS,
    Answer,
    Batch,
    Ledger,
    NotOurs,
    WaitingLine,
    problem_line,
)
from hetero_gateway.serve.batches.storage import BatchRows, Blobs

_LEASE_S = 10.0
_MOST_HELD = 64
_AT_ONCE = 500
# Bytes of a file of answers, read at a time.
_ANSWERS_AT_ONCE = 32
_FORGOTTEN_S = 3600.0

SHARED_SCHEMA = """
CREATE TABLE gateways (
    name TEXT PRIMARY KEY, alive_until DOUBLE PRECISION NOT NULL, told TEXT NOT NULL
);
CREATE TABLE answers (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, batch INTEGER NOT NULL, number INTEGER,
    good INTEGER NOT NULL, text BLOB NOT NULL
);
CREATE INDEX answers_of ON answers (batch, good, seq);
CREATE UNIQUE INDEX answers_once ON answers (batch, number) WHERE number IS NOT NULL;
ALTER TABLE lines ADD COLUMN holder TEXT;
CREATE INDEX lines_held ON lines (holder) WHERE holder IS NOT NULL;
ALTER TABLE batches ADD COLUMN holder TEXT;
"""
_ALIVE = "(SELECT name FROM gateways WHERE alive_until > ?)"


class BatchProgress(NamedTuple):
    """What others have done for batches.

    ``new``: those that they started; ``there``: the numbers of all unfinished ones;
    ``done_elsewhere``: lines, since the last look.
    """

    new: list[Batch]
    there: set[int]
    done_elsewhere: int


class Presence:
    """A gateway's lease, and the reports between gateways; for a thread of its own.

    Args:
        rows: a connection of its own, so that nothing blocks it.
        name: of the gateway.
    """

    def __init__(self, rows: BatchRows, name: str) -> None:
        self._db = rows
        self._name = name

    def renew(self, told: object) -> dict[str, str]:
        """Renew the lease with a report; returns the reports of the other gateways present, by
        name.

                Raises OSError, sqlite3.Error.
        """
        # Separate statements: a lease must not wait for others' transactions.
        now_s = self._db.now_s()
        self._db.run(
            "INSERT INTO gateways VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE"
            " SET alive_until = excluded.alive_until, told = excluded.told",
            *(self._name, now_s + _LEASE_S, msgspec.json.encode(told).decode()),
        )
        self._db.run("DELETE FROM gateways WHERE alive_until <= ?", now_s - _FORGOTTEN_S)
        rows = self._db.rows(
            "SELECT name, told FROM gateways WHERE alive_until > ? AND name <> ?",
            *(now_s, self._name),
        )
        return {row["name"]: row["told"] for row in rows}

    def end(self) -> None:
        """Give up the lease: held lines are free. Raises OSError, sqlite3.Error."""
        self._db.run("DELETE FROM gateways WHERE name = ?", self._name)


class SharedLedger(Ledger):
    """See above.

    Args:
        name: of this gateway, which no other has.
    """

    shared = True

    def __init__(self, rows: BatchRows, blobs: Blobs, config: BatchesConfig, name: str) -> None:
        super().__init__(rows, blobs, config)
        self._name = name

    # Lines

    def next_lines(self, batch: Batch, model: str, most: int) -> list[WaitingLine]:
        with self._db.transaction():
            going = self._db.row(
                "SELECT 1 FROM batches WHERE seq = ? AND status = 'in_progress'", batch.seq
            )
            if going is None:
                return []
            rows = self._db.rows(
                'SELECT number, "offset", size, model, prompt_tokens, output_tokens, repeats'
                " FROM lines WHERE batch = ? AND state = ? AND model = ? AND holder IS NULL"
                " ORDER BY position LIMIT ?",
                *(batch.seq, WAITS, model, min(most, _MOST_HELD)),
            )
            self._db.run_many(
                "UPDATE lines SET holder = ? WHERE batch = ? AND number = ?",
                [(self._name, batch.seq, row["number"]) for row in rows],
            )
        return [WaitingLine(batch, *row) for row in rows]

    def let_go(self, lines: Iterable[WaitingLine]) -> None:
        """Lines that were not sent: they are free again."""
        with self._db.transaction():
            self._db.run_many(
                "UPDATE lines SET holder = NULL WHERE batch = ? AND number = ? AND holder = ?"
                f" AND state = {WAITS}",
                [(line.batch.seq, line.number, self._name) for line in lines],
            )

    def turn(
        self, answers: Sequence[Answer], sends: Sequence[WaitingLine]
    ) -> list[BatchLine | None]:
        bodies = [self.read(line.batch, line.offset, line.size) for line in sends]
        by_batch: dict[int, list[Answer]] = {}
        for answer in answers:
            by_batch.setdefault(answer.line.batch.seq, []).append(answer)
        counts: list[tuple[Batch, int, int]] = []
        with self._db.transaction():
            for seq, theirs in by_batch.items():
                left = self._not_done(seq, [each.line.number for each in theirs])
                # A line that another gateway has answered, or of an ended batch, is not written
                # twice.
                mine = [each for each in theirs if each.line.number in left]
                good = sum(each.status < 400 for each in mine)
                texts = [self._answer(each, left[each.line.number]) for each in mine]
                told = zip(mine, texts, strict=True)
                self._write(seq, [(each.line.number, each.status < 400, t) for each, t in told])
                self._db.run(
                    "UPDATE batches SET completed = completed + ?, failed = failed + ?,"
                    " input_tokens = input_tokens + ?, output_tokens = output_tokens + ?"
                    " WHERE seq = ?",
                    *(good, len(mine) - good),
                    sum(each.tokens[0] for each in mine),
                    sum(each.tokens[1] for each in mine),
                    seq,
                )
                counts.append((theirs[0].line.batch, good, len(mine) - good))
            out = self._say_out(sends)
        for batch, completed, failed in counts:
            batch.completed += completed
            batch.failed += failed
        return [
            body if (line.batch.seq, line.number) in out else None
            for line, body in zip(sends, bodies, strict=True)
        ]

    def _say_out(self, lines: Sequence[WaitingLine]) -> set[tuple[int, int]]:
        """Mark lines as out; returns those that succeeded: others belong to other gateways by
        now."""
        numbers: dict[int, list[int]] = {}
        for line in lines:
            numbers.setdefault(line.batch.seq, []).append(line.number)
        out = set()
        for seq, those in numbers.items():
            rows = self._db.rows(
                f"UPDATE lines SET state = {OUT} WHERE batch = ? AND holder = ? AND state < {DONE}"
                f" AND number IN ({_marks(those)}) RETURNING number",
                *(seq, self._name, *those),
            )
            out |= {(seq, row["number"]) for row in rows}
        return out

    def _not_done(self, seq: int, numbers: Sequence[int]) -> dict[int, int]:
        """Those lines that are not done, with their number of retries."""
        rows = self._db.rows(
            "SELECT number, repeats FROM lines WHERE batch = ?"
            f" AND state < {DONE} AND number IN ({_marks(numbers)})",
            *(seq, *numbers),
        )
        return {row["number"]: row["repeats"] for row in rows}

    def _write(self, seq: int, rows: Sequence[tuple[int | None, bool, bytes]]) -> None:
        """Store texts, and mark their lines as done. ``rows``: (number, whether good, text)."""
        self._db.run_many(
            "INSERT INTO answers (batch, number, good, text) VALUES (?, ?, ?, ?)",
            [(seq, number, int(good), text) for number, good, text in rows],
        )
        self._db.run_many(
            f"UPDATE lines SET state = {DONE}, holder = NULL WHERE batch = ? AND number = ?",
            [(seq, number) for number, _, _ in rows if number is not None],
        )
        self._db.run(
            "UPDATE batches SET output_bytes = output_bytes + ?, error_bytes = error_bytes + ?"
            " WHERE seq = ?",
            sum(len(text) for _, good, text in rows if good),
            sum(len(text) for _, good, text in rows if not good),
            seq,
        )

    # Division of work

    def claim(self, batch: Batch) -> bool:
        with self._db.transaction():
            return self._claim(batch.seq)

    def _claim(self, seq: int) -> bool:
        return bool(
            self._db.run(
                "UPDATE batches SET holder = ? WHERE seq = ? AND ended_at IS NULL"
                f" AND (holder IS NULL OR holder = ? OR holder NOT IN {_ALIVE})",
                *(self._name, seq, self._name, self._db.now_s()),
            ).rowcount
        )

    def _check_mine(self, batch: Batch) -> None:
        held = self._db.row(
            "SELECT 1 FROM batches WHERE seq = ? AND holder = ? AND ended_at IS NULL",
            *(batch.seq, self._name),
        )
        if held is None:
            raise NotOurs(batch.id)

    def unlooked(self) -> list[Batch]:
        """Batches that are not validated and that nobody validates."""
        rows = self._db.rows(
            "SELECT * FROM batches WHERE ended_at IS NULL AND total = 0"
            f" AND (holder IS NULL OR holder NOT IN {_ALIVE})",
            self._db.now_s(),
        )
        return [self._batch(row) for row in rows]

    def reclaim(self) -> int:
        """Free what absent gateways held; returns how many lines were out."""
        gone = self._db.rows(
            "SELECT DISTINCT holder FROM lines WHERE holder IS NOT NULL"
            f" AND holder NOT IN {_ALIVE}",
            self._db.now_s(),
        )
        if not gone:
            return 0
        with self._db.transaction():
            out = self._db.rows(
                "SELECT batch, number FROM lines WHERE holder IS NOT NULL"
                f" AND holder NOT IN {_ALIVE} AND state = {OUT}",
                self._db.now_s(),
            )
            self._db.run_many(
                f"UPDATE lines SET state = {WAITS}, repeats = repeats + 1, holder = NULL"
                " WHERE batch = ? AND number = ?",
                [(row["batch"], row["number"]) for row in out],
            )
            self._db.run(
                f"UPDATE lines SET holder = NULL WHERE holder IS NOT NULL"
                f" AND holder NOT IN {_ALIVE} AND state = {WAITS}",
                self._db.now_s(),
            )
            self._db.run_many(
                "UPDATE batches SET repeated = repeated + ? WHERE seq = ?",
                [(n, seq) for seq, n in Counter(row["batch"] for row in out).items()],
            )
        return len(out)

    def progress(self, known: Sequence[Batch], recount: bool) -> BatchProgress:
        """Update what is known of batches.

        Args:
            recount: also count each batch's remaining lines one by one.
        """
        rows = self._db.rows(
            "SELECT * FROM batches WHERE ended_at IS NULL AND total > 0 ORDER BY expires_at, seq"
        )
        mine = {each.seq: each for each in known}
        new, elsewhere = [], 0
        for row in rows:
            batch = mine.get(row["seq"])
            if batch is None:
                new.append(self._batch(row))
                continue
            batch.status, batch.repeated = row["status"], row["repeated"]
            batch.outcome = batch.outcome or row["outcome"]
            elsewhere += row["completed"] + row["failed"] - batch.done
            batch.completed, batch.failed = row["completed"], row["failed"]
            if recount:
                self._count_left(batch)
            waiting = self._db.rows(
                f"SELECT model, COUNT(*) FROM lines WHERE batch = ? AND state = {WAITS}"
                " AND (holder IS NULL OR holder = ?) GROUP BY model",
                *(batch.seq, self._name),
            )
            batch.waiting = Counter(dict(waiting))
        there = {row["seq"] for row in rows}
        for each in known:
            if each.seq not in there:
                self._close_input(each)
        return BatchProgress(new, there, elsewhere)

    # Validation

    def begin_lines(self, batch: Batch) -> None:
        super().begin_lines(batch)
        with self._db.transaction():
            self._check_mine(batch)
            self._db.run("DELETE FROM answers WHERE batch = ?", batch.seq)
            self._db.run("UPDATE batches SET error_bytes = 0 WHERE seq = ?", batch.seq)

    def begin(self, batch: Batch, total: int) -> bool:
        begun = super().begin(batch, total)
        with self._db.transaction():
            self._db.run(
                "UPDATE batches SET holder = NULL WHERE seq = ? AND holder = ?",
                *(batch.seq, self._name),
            )
        return begun

    def note_problems(self, batch: Batch, problems: Sequence[tuple[int, LineProblem]]) -> None:
        with self._db.transaction():
            self._check_mine(batch)
            texts = [problem_line(batch, number, problem) for number, problem in problems]
            self._write(batch.seq, [(None, False, text) for text in texts])

    def fail(self, batch: Batch, problems: Sequence[dict[str, Any]]) -> None:
        self._write_files(batch)
        super().fail(batch, problems)
        self._forget_answers(batch)

    # Ends

    def finish(self, batch: Batch, status: str) -> bool:
        status_now = self._begin_finishing(batch, status)
        if status_now is None:
            return False
        while rows := self._db.rows(
            f'SELECT number, "offset", size FROM lines WHERE batch = ? AND state < {DONE} LIMIT ?',
            *(batch.seq, _AT_ONCE),
        ):
            texts = {row["number"]: self._unsent(batch, tuple(row), status_now) for row in rows}
            with self._db.transaction():
                left = self._not_done(batch.seq, list(texts))
                self._write(batch.seq, [(number, False, texts[number]) for number in sorted(left)])
                self._db.run(
                    "UPDATE batches SET failed = failed + ? WHERE seq = ?", len(left), batch.seq
                )
            batch.failed += len(left)
        self._write_files(batch)
        with self._db.transaction():
            if self._claim(batch.seq):
                self._keep_files(batch)
                self._db.run("DELETE FROM lines WHERE batch = ?", batch.seq)
                self._db.run(
                    "UPDATE batches SET status = ?, ended_at = ?, output_bytes = ?, error_bytes = ?"
                    " WHERE seq = ?",
                    *(status_now, int(time.time()), batch.output_bytes, batch.error_bytes),
                    batch.seq,
                )
        self._forget_answers(batch)
        self._close_input(batch)
        return True

    def _begin_finishing(self, batch: Batch, status: str) -> str | None:
        """The final status, if this gateway ends it. The first stored status holds."""
        with self._db.transaction():
            theirs = self._db.row(
                f"SELECT 1 FROM lines WHERE batch = ? AND state = {OUT} AND holder <> ?"
                f" AND holder IN {_ALIVE}",
                *(batch.seq, self._name, self._db.now_s()),
            )
            left = self._db.row(
                f"SELECT 1 FROM lines WHERE batch = ? AND state < {DONE}", batch.seq
            )
            if theirs is not None or (left is not None and status == "completed"):
                return None
            if not self._claim(batch.seq):
                return None
            row = self._db.row("SELECT outcome FROM batches WHERE seq = ?", batch.seq)
            outcome: str = row["outcome"] or status
            self._db.run(
                "UPDATE batches SET status = 'finalizing', outcome = ?, finalizing_at = ?"
                " WHERE seq = ?",
                *(outcome, int(time.time()), batch.seq),
            )
        return outcome

    def _write_files(self, batch: Batch) -> None:
        """Write the answers' files; nothing of them changes any more. Stores their lengths."""
        sizes = []
        for file_id, good in ((batch.output_file_id, 1), (batch.error_file_id, 0)):
            size, after, sink = 0, -1, None
            while rows := self._db.rows(
                "SELECT seq, text FROM answers WHERE batch = ? AND good = ? AND seq > ?"
                " ORDER BY seq LIMIT ?",
                *(batch.seq, good, after, _ANSWERS_AT_ONCE),
            ):
                if sink is None:
                    sink = self._blobs.create(file_id)
                data = b"".join(bytes(row["text"]) for row in rows)
                sink.write(data)
                size, after = size + len(data), rows[-1]["seq"]
            if sink is not None:
                sink.finish()
            sizes.append(size)
        batch.output_bytes, batch.error_bytes = sizes

    def _forget_answers(self, batch: Batch) -> None:
        with self._db.transaction():
            self._db.run(
                "DELETE FROM answers WHERE batch IN"
                " (SELECT seq FROM batches WHERE seq = ? AND ended_at IS NOT NULL)",
                batch.seq,
            )


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def gateway_name() -> str:
    """A name for one run of a gateway, which no other has."""
    return new_id("gateway-")
