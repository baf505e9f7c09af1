"""Files of measured batches: CSV from elsewhere, and the JSON lines of a measurement.

A CSV file has the columns of ``COLUMNS``; an empty cell is a time that was not measured, and
further columns are ignored. A JSON line has the same keys, ``discarded`` (null, or why the sample
must not be fitted) and anything else that the measurement needs later. The last line may be torn,
as after a crash; any other broken line is an error.

Every error is a ``ConfigError`` that names the file, the line and the column.
"""

import csv
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_gateway.core.costs.fitting import Sample
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.whole_file import named

COLUMNS = ("batch_size", "prompt_tokens", "output_tokens", "prefill_s", "decode_s")
_TIMES = ("prefill_s", "decode_s")


def read_samples(path: Path) -> tuple[list[Sample], dict[str, int]]:
    """The samples of a file, JSON lines if it ends in ``.jsonl``, else CSV.

    Returns:
        The samples to fit, and how many were discarded for each reason.

    Raises:
        ConfigError: the file, or a line in it, cannot be read.
    """
    if path.suffix != ".jsonl":
        return read_csv(path), {}
    records = read_json_lines(path)
    return kept_samples(records), discarded_counts(records)


def read_csv(path: Path) -> list[Sample]:
    """The samples of a CSV file.

    Raises ConfigError: one line with the file, the line (the header is line 1) and the column.
    """
    with named(path, "read"), path.open(encoding="utf-8-sig", newline="") as lines:
        return _parse_csv(lines, str(path))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file that ``append`` wrote, without a torn last one.

    Raises ConfigError: the file cannot be read, or a line other than the last is broken.
    """
    with named(path, "read"):
        lines = path.read_bytes().split(b"\n")
    # A whole line ends with a line break, so the last of these is empty or torn.
    records = [
        _record(line, f"{path}: line {number}", torn_allowed=number == len(lines))
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    return [record for record in records if record is not None]


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add one record, and leave the file whole: a torn last line is cut off first.

    Raises ConfigError: the file cannot be written.
    """
    line = json.dumps(dict(record), allow_nan=False).encode() + b"\n"
    with named(path, "written"), path.open("ab+") as file:
        end = file.tell()
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                line = _mend(file.read(), file.truncate) + line
        file.write(line)


def record_of(sample: Sample, *, discarded: str | None = None, **more: Any) -> dict[str, Any]:
    """A record for ``append``: the sample, why it is discarded, and other data to keep."""
    return {**{c: getattr(sample, c) for c in COLUMNS}, "discarded": discarded, **more}


def kept_samples(records: Iterable[Mapping[str, Any]]) -> list[Sample]:
    """Those that are not discarded, of records that ``read_json_lines`` has checked."""
    return [Sample(*(r[c] for c in COLUMNS)) for r in records if r["discarded"] is None]


def discarded_counts(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many records were discarded, by reason, the most frequent first."""
    reasons = Counter(record["discarded"] for record in records if record["discarded"] is not None)
    return dict(reasons.most_common())


def write_csv(path: Path, samples: Sequence[Sample]) -> None:
    """The file that ``read_csv`` reads. Raises ConfigError: it cannot be written."""
    with named(path, "written"), path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for sample in samples:
            values = [getattr(sample, column) for column in COLUMNS]
            writer.writerow(["" if value is None else f"{value:.9g}" for value in values])


def _mend(content: bytes, truncate: Callable[[int], int]) -> bytes:
    """Cut off a torn last line; returns the line break that a whole one still lacks."""
    start = content.rfind(b"\n") + 1
    try:
        json.loads(content[start:])
    except ValueError:
        truncate(start)
        return b""
    return b"\n"


def _record(line: bytes, where: str, torn_allowed: bool) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        if torn_allowed:
            return None
        raise ConfigError(f"{where}: not a JSON document; remove the line") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: must be a JSON object, not {type(record).__name__}")
    record.setdefault("discarded", None)
    discarded = record["discarded"]
    if discarded is not None and not isinstance(discarded, str):
        raise ConfigError(f"{where}: discarded must be null or a reason")
    for column in COLUMNS:
        # A discarded sample may be one that broke off before its lengths were known.
        if discarded is None:
            record[column] = _checked(record.get(column), column, where)
    return record


def _parse_csv(lines: Iterable[str], source: str) -> list[Sample]:
    reader = csv.DictReader(lines, skipinitialspace=True)
    header = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = header
    if missing := [name for name in COLUMNS if name not in header]:
        raise ConfigError(
            f"{source}: line 1: the header has no column {missing[0]}; it needs {','.join(COLUMNS)}"
        )
    samples = []
    for row in reader:
        where = f"{source}: line {reader.line_num}"
        values = [_checked(_number(row[c], c, where), c, where) for c in COLUMNS]
        samples.append(Sample(*values))  # type: ignore[arg-type]
    if not samples:
        raise ConfigError(f"{source}: no samples in it")
    return samples


def _number(text: str | None, column: str, where: str) -> float | None:
    if text is None or not text.strip():
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{where}: {column} is {text!r}, not a number") from None


def _checked(value: Any, column: str, where: str) -> float | None:
    if value is None:
        if column in _TIMES:
            return None
        raise ConfigError(f"{where}: {column} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where}: {column} is {value!r}, not a number")
    if not math.isfinite(value):
        raise ConfigError(f"{where}: {column} is {value}: it must be finite")
    if column in _TIMES:
        # A clock that is too coarse shows 0; the fit ignores it.
        if value < 0:
            raise ConfigError(f"{where}: {column} is {value:g}: it must be 0 or more, in seconds")
    elif value < 1:
        raise ConfigError(f"{where}: {column} is {value:g}: it must be at least 1")
    return value
