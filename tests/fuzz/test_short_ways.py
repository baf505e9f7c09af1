"""Seeded runs of what compares short ways with long ones; scripts/fuzz has a million of each."""

import random
from typing import Any

import pytest

from hetero_gateway.gateway.request import prompts
from hetero_gateway.http import chunks, upstream
from hetero_gateway.http.heads import Inbound
from hetero_gateway.http.protocol import EngineProtocol
from tests.fuzz.short_ways import SHORT_WAYS


def run(name: str, count: int, most_differences: int) -> tuple[int, int, list[str]]:
    """(accepted, refused, differences)."""
    way = SHORT_WAYS[name](random.Random(1))
    accepted = seen = 0
    differences: list[str] = []
    while seen < count and len(differences) < most_differences:
        drawn = way.draw()
        ok, difference = way.differs(drawn)
        seen += 1
        accepted += ok
        if difference:
            differences.append(f"{difference}: {drawn!r}")
    return accepted, seen - accepted, differences


@pytest.mark.parametrize("name", SHORT_WAYS)
def test_a_short_way_reads_what_its_long_way_reads(name: str) -> None:
    accepted, refused, differences = run(name, 1500, 5)
    assert not differences, "\n".join(each[:1000] for each in differences)
    assert accepted > 50
    assert refused > 50


def _signed_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_HEX_DIGITS", chunks._HEX_DIGITS + b"+")


def _known_key_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if each request had one.
    begin = Inbound.__init__

    def init(self: Inbound, *described: Any) -> None:
        begin(self, *described)
        self.authorization = dict(self.headers).get(b"authorization", b"")

    monkeypatch.setattr(Inbound, "__init__", init)


def _whole_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    take_body = EngineProtocol._take_body

    def take(self: EngineProtocol, data: bytes) -> None:
        if self._left == len(data) - 1:
            self._left = len(data)
        take_body(self, data)

    monkeypatch.setattr(EngineProtocol, "_take_body", take)


def _any_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    class Equal:
        def __eq__(self, other: object) -> bool:
            return True

    monkeypatch.setattr(upstream, "whole_chunk_length", lambda start: Equal())


def _without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    places_of = prompts.places_of
    monkeypatch.setattr(prompts, "places_of", lambda *array: places_of(*array)[1:])


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("chunks", _signed_sizes),
        ("credentials", _known_key_first),
        ("requests", _whole_too_soon),
        ("answers", _any_chunk),
        ("bodies", _without_the_first),
    ],
)
def test_a_short_way_that_reads_otherwise_is_noticed(name, spoil, monkeypatch):
    spoil(monkeypatch)
    assert run(name, 3000, 1)[2]
