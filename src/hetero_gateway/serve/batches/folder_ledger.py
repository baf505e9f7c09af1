"""The ledger of the one gateway that has a folder: answers go into files from the start.

An answer is in a file of the batch, and synced, before the row says that its line is done. So after
a gateway was killed, answers in the files beyond the length in the batch's row count as done
(``recover``), and unanswered lines are sent again.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from hetero_gateway.files.batch_lines import BatchLine, LineProblem
from hetero_gateway.files.batches_config import BatchesConfig
from hetero_gateway.serve.batches.folder import Folder
from hetero_gateway.serve.batches.ledger import (
    DONE,
    OUT,
    WAITS,
    Answer,
    Batch,
    Ledger,
    WaitingLine,
    problem_line,
)
from hetero_gateway.serve.batches.storage import BatchRows

_AT_ONCE = 500


class FolderLedger(Ledger):
    """A ledger with a folder; see above."""

    def __init__(self, rows: BatchRows, folder: Folder, config: BatchesConfig) -> None:
        super().__init__(rows, folder, config)
        self._folder = folder

    def next_lines(self, batch: Batch, model: str, most: int) -> list[WaitingLine]:
        return [
            WaitingLine(batch, *row)
            for row in self._db.run(
                'SELECT number, "offset", size, model, prompt_tokens, output_tokens, repeats'
                " FROM lines WHERE batch = ? AND state = ? AND model = ? ORDER BY position LIMIT ?",
                *(batch.seq, WAITS, model, most),
            )
        ]

    def turn(
        self, answers: Sequence[Answer], sends: Sequence[WaitingLine]
    ) -> list[BatchLine | None]:
        bodies: list[BatchLine | None] = [
            self.read(line.batch, line.offset, line.size) for line in sends
        ]
        by_batch: dict[int, list[Answer]] = {}
        for answer in answers:
            by_batch.setdefault(answer.line.batch.seq, []).append(answer)
        told = [(each[0].line.batch, self._append(each)) for each in by_batch.values()]
        with self._db.transaction():
            for batch, (output_bytes, error_bytes) in told:
                mine = by_batch[batch.seq]
                good = sum(each.status < 400 for each in mine)
                self._done(batch, [each.line.number for each in mine])
                self._db.run(
                    "UPDATE batches SET output_bytes = ?, error_bytes = ?,"
                    " completed = completed + ?, failed = failed + ?,"
                    " input_tokens = input_tokens + ?, output_tokens = output_tokens + ?"
                    " WHERE seq = ?",
                    *(output_bytes, error_bytes, good, len(mine) - good),
                    sum(each.tokens[0] for each in mine),
                    sum(each.tokens[1] for each in mine),
                    batch.seq,
                )
            self._db.run_many(
                f"UPDATE lines SET state = {OUT} WHERE batch = ? AND number = ?",
                [(line.batch.seq, line.number) for line in sends],
            )
        for batch, (output_bytes, error_bytes) in told:
            mine = by_batch[batch.seq]
            good = sum(each.status < 400 for each in mine)
            batch.output_bytes, batch.error_bytes = output_bytes, error_bytes
            batch.completed += good
            batch.failed += len(mine) - good
        return bodies

    def _done(self, batch: Batch, numbers: Iterable[int]) -> None:
        self._db.run_many(
            f"UPDATE lines SET state = {DONE} WHERE batch = ? AND number = ?",
            [(batch.seq, number) for number in numbers],
        )

    def _append(self, answers: Sequence[Answer]) -> tuple[int, int]:
        """Write and sync answers of a batch; returns the new lengths of its files."""
        batch, good, bad = answers[0].line.batch, list[bytes](), list[bytes]()
        for each in answers:
            (good if each.status < 400 else bad).append(self._answer(each, each.line.repeats))
        return (
            self._append_to(batch.output_file_id, batch.output_bytes, good),
            self._append_to(batch.error_file_id, batch.error_bytes, bad),
        )

    def _append_to(self, file_id: str, at_bytes: int, lines: Sequence[bytes]) -> int:
        if not lines:
            return at_bytes
        data = b"".join(lines)
        file = os.open(self._folder.path(file_id), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Cut off what an unfinished write left.
            os.ftruncate(file, at_bytes)
            view, end = memoryview(data), at_bytes
            try:
                while view:
                    written = os.pwrite(file, view, end)
                    view, end = view[written:], end + written
                os.fdatasync(file)
            except OSError:
                os.ftruncate(file, at_bytes)
                raise
        finally:
            os.close(file)
        if at_bytes == 0:
            self._folder.sync_names()
        return end

    def note_problems(self, batch: Batch, problems: Sequence[tuple[int, LineProblem]]) -> None:
        lines = [problem_line(batch, number, problem) for number, problem in problems]
        batch.error_bytes = self._append_to(batch.error_file_id, batch.error_bytes, lines)

    def recover(self, batch: Batch) -> None:
        """After a start: find answers that are not in the rows yet, and lines to send again."""
        found: list[tuple[int, bool]] = []
        ends = []
        for file_id, at_bytes, good in (
            (batch.output_file_id, batch.output_bytes, True),
            (batch.error_file_id, batch.error_bytes, False),
        ):
            beyond = list(_answers_beyond(self._folder.path(file_id), at_bytes))
            found += [(number, good) for _, number in beyond]
            ends.append(beyond[-1][0] if beyond else at_bytes)
        with self._db.transaction():
            new = [
                (number, good)
                for number, good in found
                if self._db.row(
                    "SELECT 1 FROM lines WHERE batch = ? AND number = ? AND state < ?",
                    *(batch.seq, number, DONE),
                )
            ]
            self._done(batch, [number for number, _ in new])
            completed = sum(good for _, good in new)
            repeated = self._db.run(
                f"UPDATE lines SET state = {WAITS}, repeats = repeats + 1"
                f" WHERE batch = ? AND state = {OUT}",
                batch.seq,
            ).rowcount
            self._db.run(
                "UPDATE batches SET output_bytes = ?, error_bytes = ?, completed = completed + ?,"
                " failed = failed + ?, repeated = repeated + ? WHERE seq = ?",
                *(*ends, completed, len(new) - completed, repeated, batch.seq),
            )
        batch.output_bytes, batch.error_bytes = ends
        batch.completed += completed
        batch.failed += len(new) - completed
        batch.repeated += repeated
        self._count_left(batch)

    def finish(self, batch: Batch, status: str) -> bool:
        with self._db.transaction():
            self._db.run(
                "UPDATE batches SET status = 'finalizing', outcome = ?, finalizing_at = ?"
                " WHERE seq = ?",
                *(status, int(time.time()), batch.seq),
            )
        while rows := self._db.rows(
            'SELECT number, "offset", size FROM lines WHERE batch = ? AND state < ? LIMIT ?',
            *(batch.seq, DONE, _AT_ONCE),
        ):
            texts = [self._unsent(batch, row, status) for row in rows]
            error_bytes = self._append_to(batch.error_file_id, batch.error_bytes, texts)
            with self._db.transaction():
                self._done(batch, [row["number"] for row in rows])
                self._db.run(
                    "UPDATE batches SET error_bytes = ?, failed = failed + ? WHERE seq = ?",
                    *(error_bytes, len(rows), batch.seq),
                )
            batch.error_bytes = error_bytes
            batch.failed += len(rows)
        with self._db.transaction():
            self._keep_files(batch)
            self._db.run("DELETE FROM lines WHERE batch = ?", batch.seq)
            self._db.run(
                "UPDATE batches SET status = ?, ended_at = ? WHERE seq = ?",
                *(status, int(time.time()), batch.seq),
            )
        self._close_input(batch)
        return True


class _Answered(msgspec.Struct):
    id: str


def _answers_beyond(path: Path, at_bytes: int) -> Iterator[tuple[int, int]]:
    """(end, number of its line) of each whole answer in a file from an offset on.

    Anything after the last whole one is cut off.
    """
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return
    with file:
        file.seek(at_bytes)
        end = at_bytes
        while (text := file.readline()).endswith(b"\n"):
            try:
                number = int(msgspec.json.decode(text, type=_Answered).id.rpartition("_")[2])
            except (msgspec.DecodeError, ValueError):
                break
            end += len(text)
            yield end, number
        file.truncate(end)
