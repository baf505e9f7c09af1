"""The data files next to these modules: tables as CSV, documents as JSON."""

import csv
import json
from collections.abc import Iterator
from importlib import resources
from typing import Any


def _text(name: str) -> str:
    return resources.files("hetero_gateway.files").joinpath(name).read_text("utf-8")


def table(name: str) -> Iterator[dict[str, str]]:
    """The rows of a CSV file by column name; lines that begin with # are comments."""
    return csv.DictReader(line for line in _text(name).splitlines() if not line.startswith("#"))


def document(name: str) -> Any:
    """The content of a JSON file."""
    return json.loads(_text(name))
