"""The file of ``profile --pairs``, which ``scheduler.pairs_file`` names: measured transfers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, model_validator

from hetero_gateway.files.setup_warnings import same_address
from hetero_gateway.files.whole_file import write_document
from hetero_gateway.files.yaml_file import StrictModel, parse_model, read_yaml

# All pairs of 100 instances.
_MOST_PAIRS = 10_000


class PairRow(StrictModel):
    """One instance computes a prompt, and another one answers it."""

    prefill: str = Field(min_length=1, max_length=2048)
    """Who computes it: an instance's base_url, or its id."""
    decode: str = Field(min_length=1, max_length=2048)
    """Who answers."""
    start_s: float | None = Field(None, ge=0, le=60)
    """Of a transfer, before its tokens."""
    tokens_per_s: float | None = Field(None, gt=0, le=1e12)
    """Tokens whose KV is moved per second."""
    gbit_per_s: float | None = Field(None, gt=0, le=1e6)
    """The same by the bytes that the engine counted; for people."""
    refused: str | None = None
    """Why they cannot hand over; they are not a pair."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        measured = (self.start_s is not None, self.tokens_per_s is not None)
        if measured != ((False, False) if self.refused else (True, True)):
            raise ValueError("give start_s and tokens_per_s, or else refused")
        return self


class PairsFile(StrictModel):
    """The whole file."""

    connector: str = ""
    date: Any = None
    pairs: list[PairRow] = Field(max_length=_MOST_PAIRS)


class MeasuredPairs:
    """A file's data on pairs, by their addresses or ids."""

    def __init__(self, rows: Sequence[PairRow] = ()) -> None:
        self.rows = tuple(rows)
        self._by_names = {(_name(row.prefill), _name(row.decode)): row for row in rows}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeasuredPairs) and self.rows == other.rows

    __hash__ = None  # type: ignore[assignment]

    def of(self, prefill: tuple[str, str], decode: tuple[str, str]) -> PairRow | None:
        """Each is (id, base_url); None: they were not measured."""
        for one in (prefill[0], same_address(prefill[1])):
            for other in (decode[0], same_address(decode[1])):
                if (row := self._by_names.get((one, other))) is not None:
                    return row
        return None


def _name(text: str) -> str:
    return same_address(text) if text.startswith(("http://", "https://")) else text


def read_pairs(path: Path) -> MeasuredPairs:
    """Raises ConfigError: one line with the file and the key."""
    return MeasuredPairs(parse_model(PairsFile, read_yaml(path), str(path)).pairs)


def write_pairs(path: Path, document: Mapping[str, Any]) -> None:
    """Raises ConfigError: it cannot be written."""
    text: str = yaml.safe_dump(dict(document), sort_keys=False, width=100)
    write_document(path, "# For scheduler.pairs_file.\n" + text)
