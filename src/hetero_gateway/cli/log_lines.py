"""The log of a command that serves: lines of text or of JSON on standard error."""

import json
import logging
import time
from datetime import UTC, datetime


def start_logging(level: str, *, as_json: bool = False) -> None:
    """Log to standard error, from ``level`` on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if as_json else TextLines())
    handler.addFilter(_rename)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)


def _rename(record: logging.LogRecord) -> bool:
    """Rename uvicorn's logger: its name, uvicorn.error, looks like a failure."""
    if record.name == "uvicorn.error":
        record.name = "uvicorn"
    return True


class TextLines(logging.Formatter):
    """Each record as a readable line, with the access log's time format."""

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
