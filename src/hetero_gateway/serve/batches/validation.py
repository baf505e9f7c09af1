"""Validates every line of a batch before any of it runs: for a thread of its own."""

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from hetero_gateway.files.batch_lines import BatchLine, LineProblem, read_line
from hetero_gateway.serve.batches.ledger import Batch, Estimate, Ledger, NewLine

# Seconds of work between two pauses that let the event loop run: lines are long or short.
_SLICE_S, _PAUSE_S = 0.001, 0.001
_ROWS_AT_ONCE = 500
# Problems shown in the batch itself; its file of errors has all of them.
_SHOWN = 100
_BOM = b"\xef\xbb\xbf"

# Estimates a line, or says why nothing can serve it. It may wait.
Judge = Callable[[BatchLine], Estimate | LineProblem]


class Validation:
    """Validation of one batch.

    Args:
        ledger: of this thread.
        judge: estimates a well-formed line.
        most_line_bytes: maximum length of a line.
        most_lines: how many lines it may have, and most_key_lines all of its key's batches.
        stopped: whether to leave off, as the gateway ends.
    """

    def __init__(
        self,
        ledger: Ledger,
        batch: Batch,
        judge: Judge,
        most_line_bytes: int,
        most_lines: int,
        most_key_lines: int,
        stopped: Callable[[], bool],
    ) -> None:
        self._ledger = ledger
        self._batch = batch
        self._judge = judge
        self._most_line_bytes = most_line_bytes
        self._most_lines = most_lines
        self._most_key_lines = most_key_lines
        self._stopped = stopped
        self._problems: list[tuple[int, LineProblem]] = []
        self._shown: list[dict[str, Any]] = []
        self._bad = 0

    def run(self, file: BinaryIO) -> bool | None:
        """Whether it is to be run now; None: the gateway ends, and validation restarts another
        time.

                Raises:
                    OSError, sqlite3.Error: the result cannot be stored now.
        """
        ledger, batch = self._ledger, self._batch
        ledger.begin_lines(batch)
        rows: list[NewLine] = []
        total, slice_began_s = 0, time.monotonic()
        for number, offset, text in self._lines(file):
            if time.monotonic() - slice_began_s >= _SLICE_S:
                time.sleep(_PAUSE_S)
                slice_began_s = time.monotonic()
                if self._stopped():
                    return None
            total += 1
            if total > self._most_lines:
                message = f"A batch may have {self._most_lines} lines."
                self._note(number, LineProblem("too_many_lines", message))
                break
            found = self._look_at(offset, number, text)
            if isinstance(found, LineProblem):
                self._note(number, found)
                continue
            rows.append(found)
            if len(rows) >= _ROWS_AT_ONCE:
                ledger.add_lines(batch, rows)
                rows = []
        ledger.add_lines(batch, rows)
        if not total:
            self._note(0, LineProblem("empty_file", "The file has no lines."))
        for number, first in ledger.twins(batch):
            message = f"Line {first} has the same custom_id."
            self._note(number, LineProblem("duplicate_custom_id", message, "custom_id"))
        if not self._bad and ledger.lines_of(batch.owner) + total > self._most_key_lines:
            message = f"The key's batches would have more than {self._most_key_lines} lines to do."
            self._note(0, LineProblem("too_many_lines", message))
        if self._bad:
            self._keep_problems()
            ledger.fail(batch, self._shown)
            return False
        return ledger.begin(batch, total)

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, int, bytes | None]]:
        """(number from 1, offset, the line without its end); None: it is too long."""
        number, offset = 0, 0
        while text := file.readline(self._most_line_bytes + 1):
            number += 1
            size, line = len(text), text
            told: bytes | None = line
            if size > self._most_line_bytes and not text.endswith(b"\n"):
                told = None
                while text and not text.endswith(b"\n"):
                    text = file.readline(self._most_line_bytes)
                    size += len(text)
            if told is not None:
                told = told.rstrip(b"\r\n")
                skipped = len(_BOM) if offset == 0 and told.startswith(_BOM) else 0
                if told[skipped:].strip():
                    yield number, offset + skipped, told[skipped:]
            else:
                yield number, offset, None
            offset += size

    def _look_at(self, offset: int, number: int, text: bytes | None) -> NewLine | LineProblem:
        if text is None:
            message = f"The line is longer than {self._most_line_bytes} bytes."
            return LineProblem("line_too_long", message)
        line = read_line(text, self._batch.endpoint)
        if isinstance(line, LineProblem):
            return line
        estimate = self._judge(line)
        if isinstance(estimate, LineProblem):
            return estimate
        custom = hashlib.blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=16)
        return NewLine(number, offset, len(text), estimate, custom.digest())

    def _note(self, number: int, problem: LineProblem) -> None:
        self._bad += 1
        if len(self._shown) < _SHOWN:
            told = {"code": problem.code, "message": problem.message, "param": problem.param}
            self._shown.append({**told, "line": number or None})
        self._problems.append((number, problem))
        if len(self._problems) >= _ROWS_AT_ONCE:
            self._keep_problems()

    def _keep_problems(self) -> None:
        self._ledger.note_problems(self._batch, self._problems)
        self._problems = []
