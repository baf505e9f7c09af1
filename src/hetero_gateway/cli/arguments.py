"""What several commands share of their arguments, for argparse.

Each type raises what argparse reports in one line.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from datetime import UTC, datetime


def rate(text: str) -> float:
    value = float(text)  # argparse reports a ValueError
    if math.isnan(value) or value <= 0:
        raise argparse.ArgumentTypeError("must be above 0, or inf")
    return value


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError("must be from 0 to 1")
    return value


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """The option of a command that serves; see ``start_logging``."""
    parser.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="the least severe lines to log (default: %(default)s)",
    )


def start_logging(level: str, *, as_json: bool = False) -> None:
    """Log to standard error, from ``level`` on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if as_json else TextLines())
    handler.addFilter(_rename)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)


def _rename(record: logging.LogRecord) -> bool:
    """uvicorn logs what it does under a name that reads as if it had failed."""
    if record.name == "uvicorn.error":
        record.name = "uvicorn"
    return True


class TextLines(logging.Formatter):
    """Each record as a line for people, with the access log's form of times."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self.converter = time.gmtime


class JsonLines(logging.Formatter):
    """Each record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        document = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "kind": "log",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False)
