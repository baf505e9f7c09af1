"""The series of named clients: their usage, refusals and open requests.

Labels are names, never keys, and bounded: the first ``most`` clients of the configuration have
their own, all others share ``other``; models are those that a request has reached, as long as
instances serve them, and a while longer.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

from hetero_gateway.gateway.admission.clients import Admission
from hetero_gateway.gateway.admission.usage import NO_AMOUNTS, OTHER, Amounts, added
from hetero_gateway.gateway.records.exposition import Family
from hetero_gateway.gateway.records.families import families_of, family
from hetero_gateway.gateway.turns import batches

# Entries of a part, of four series each, and entries to add up: some milliseconds.
_AT_ONCE, _ADDED_AT_ONCE = 100, 4000
_T = TypeVar("_T")
_AMOUNTS = (
    "client_requests", "client_input_tokens", "client_input_tokens_cached", "client_output_tokens"
)  # fmt: skip


def client_families(
    admission: Admission, most: int, models: Callable[[], Collection[str]]
) -> Iterator[list[Family]]:
    """In parts that are quickly made, some of them empty: the event loop may have turns in between.

    Nothing if no client has a name; nothing of clients that are gone, nor of models that are gone
    (``models``: those that have series). ``most``: clients with labels of their own.
    """
    labelled = {client.name for client in itertools.islice(admission, most)}
    names, shown = {client.name for client in admission}, models()
    if not admission.has_names:
        return

    def label(name: str) -> str:
        return name if name in labelled else OTHER

    sums: dict[tuple[str, str], Amounts] = {}
    for entries in _batches(admission.usage.entries(), _ADDED_AT_ONCE):
        for (name, model), amounts in entries:
            if name not in names or model not in shown:
                continue
            key = label(name), model
            sums[key] = added(sums.get(key, NO_AMOUNTS), amounts)
        yield []
    for totals in _batches(sums.items()):
        rows = [
            (name, key, amount)
            for key, amounts in totals
            for name, amount in zip(_AMOUNTS, amounts, strict=True)
        ]
        yield [*families_of(_AMOUNTS, rows)]
    denied: Counter[tuple[str, str]] = Counter()
    for (name, limit), number in tuple(admission.usage.denied.items()):
        if name in names:
            denied[label(name), limit] += number
    for numbers in _batches(denied.items()):
        yield [family("client_limited", dict(numbers))]
    for accounts in _batches(tuple(admission.accounts())):
        in_flight = {
            (account.name,): account.in_flight + account.others_in_flight
            for account in accounts
            if account.name.startswith("group ") or account.name.removeprefix("key ") in labelled
        }
        yield [family("client_in_flight_requests", in_flight)]


def _batches(items: Iterable[_T], size: int = _AT_ONCE) -> Iterator[list[_T]]:
    """After an empty one: families are named even if they have no series."""
    yield []
    yield from batches(items, size)
