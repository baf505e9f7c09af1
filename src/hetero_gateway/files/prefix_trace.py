"""Traces that say which prompts begin alike: gzipped JSON lines, read and checked.

Line 1 is a header, each other line one request, in the order of arrival:

    {"block_tokens": 64, "output_blocks": true}
    {"t": 0.913, "in": 412, "out": 59, "s": 0, "k": 1, "b": [[0, 7]]}

    block_tokens   tokens of a block, 1 or more
    output_blocks  whether the ids go on through the answer; absent: no
    t              arrival, s
    in, out        prompt and output tokens, 1 or more
    s, k           session, and turn in it from 1; absent: a session of its own
    b              ids of the request's blocks in order, each an id or a run [first, count]

Block i covers the tokens from i·block_tokens on. Equal ids mean equal text up to the block's end.
Only full blocks count; a last one that is not full is ignored, and so are further fields.
"""

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.whole_file import named

# More tokens than any context has, and more requests than any run: a wrong file, not a long one.
_MOST_TOKENS = 1 << 24
_MOST_ID = 1 << 40
_MOST_LINE_BYTES = 1 << 22


class TracedText(NamedTuple):
    """The known part of one request's text.

    ``session``, ``turn``: its session, and its turn in it, from 1. ``runs``: (first id, count)
    of its full blocks, of ``block_tokens`` each.
    """

    session: int
    turn: int
    runs: tuple[tuple[int, int], ...]
    block_tokens: int


class TracedRequest(NamedTuple):
    """One line: ``arrival_s``, prompt and output tokens, and its text."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    text: TracedText


def is_prefix_trace(path: Path) -> bool:
    """Whether a file is one, by its name: JSON lines, gzipped or not."""
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def read_prefix_trace(path: Path, limit: int | None = None) -> list[TracedRequest]:
    """Read a trace, at most its first ``limit`` requests.

    Raises:
        ConfigError: one line with the file and, if a line is wrong, its number.
    """
    try:
        with named(path, "read"), path.open("rb") as plain:
            zipped = plain.read(2) == b"\x1f\x8b"
            plain.seek(0)
            lines = gzip.open(plain) if zipped else plain
            return list(_requests(iter(lambda: lines.readline(_MOST_LINE_BYTES), b""), path, limit))
    except (EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _requests(lines: Iterator[bytes], path: Path, limit: int | None) -> Iterator[TracedRequest]:
    header = _object(next(lines, b""), f"{path}: line 1 (the header)")
    block_tokens = _whole(header, "block_tokens", 1, _MOST_TOKENS, f"{path}: line 1 (the header)")
    output_blocks = header.get("output_blocks", False)
    if not isinstance(output_blocks, bool):
        raise ConfigError(f"{path}: line 1 (the header): output_blocks must be true or false")
    latest_s, count = 0.0, 0
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        if limit is not None and count >= limit:
            break
        where = f"{path}: line {number}"
        row = _object(line, where)
        arrival_s = _arrival(row, where)
        if arrival_s < latest_s:
            raise ConfigError(f"{where}: t is {arrival_s:g}, before the line above's {latest_s:g}")
        latest_s = arrival_s
        prompt, output = (_whole(row, name, 1, _MOST_TOKENS, where) for name in ("in", "out"))
        full = (prompt + output if output_blocks else prompt) // block_tokens
        # A session of its own gets a unique number.
        session = _whole(row, "s", 0, _MOST_ID, where) if "s" in row else -number
        turn = _whole(row, "k", 1, _MOST_TOKENS, where) if "k" in row else 1
        runs = _runs(row.get("b", []), full, where)
        text = TracedText(session, turn, runs, block_tokens)
        yield TracedRequest(arrival_s, prompt, output, text)
        count += 1
    if not count:
        raise ConfigError(f"{path}: no requests in it")


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be a JSON object")
    return value


def _whole(row: dict[str, Any], name: str, least: int, most: int, where: str) -> int:
    value = row.get(name)
    if type(value) is not int or not least <= value <= most:
        shown = "missing" if name not in row else f"{value!r:.40}"
        raise ConfigError(f"{where}: {name} is {shown}: it must be a whole number from {least} on")
    return value


def _arrival(row: dict[str, Any], where: str) -> float:
    value = row.get("t")
    number = float(value) if type(value) in (int, float) else math.nan  # type: ignore[arg-type]
    if not 0 <= number < math.inf:
        shown = "missing" if "t" not in row else f"{value!r:.40}"
        raise ConfigError(f"{where}: t is {shown}: it must be a number of seconds, 0 or more")
    return number


def _runs(value: Any, full: int, where: str) -> tuple[tuple[int, int], ...]:
    """The first ``full`` blocks, in runs."""
    if not isinstance(value, list):
        raise ConfigError(f"{where}: b must be a list of ids and of runs [first, count]")
    runs: list[tuple[int, int]] = []
    for part in value:
        pair = [part, 1] if type(part) is int else part
        if not (
            isinstance(pair, list)
            and len(pair) == 2
            and all(type(number) is int for number in pair)
            and 0 <= pair[0] <= _MOST_ID
            and 1 <= pair[1] <= _MOST_TOKENS
        ):
            raise ConfigError(
                f"{where}: b has {part!r:.40}: neither an id nor a run [first, count]"
            )
        count = min(pair[1], full)
        if count:
            runs.append((pair[0], count))
        full -= count
    return tuple(runs)
