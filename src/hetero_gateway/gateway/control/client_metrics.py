"""The series of clients that have names: what they used, what they were refused, what is open.

Labels are names, never keys, and bounded: the first ``most`` clients of the configuration have
their own, all others share ``other``; models are those that a request has reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hetero_gateway.gateway.admission.clients import Admission
from hetero_gateway.gateway.admission.usage import OTHER

_PREFIX = "hetero_gateway_client_"
_AMOUNTS = (
    ("requests", "Requests of a client that reached an instance and are over."),
    ("input_tokens", "Prompt tokens of a client, as engines reported them, or estimated."),
    ("input_tokens_cached", "Of them, what was in a prefix cache, as engines reported."),
    ("output_tokens", "Output tokens of a client, as reported or counted."),
)


def client_families(admission: Admission, most: int) -> Iterator[Metric]:
    """Nothing where no client has a name. ``most``: clients with labels of their own."""
    clients = list(admission)
    if not clients:
        return
    labelled = {client.name for client in clients[:most]}

    def label(name: str) -> str:
        return name if name in labelled else OTHER

    sums: dict[tuple[str, str], list[int]] = {}
    for (name, model), amounts in admission.usage.totals().items():
        entry = sums.setdefault((label(name), model), [0, 0, 0, 0])
        for i, amount in enumerate(amounts):
            entry[i] += amount
    for i, (name, text) in enumerate(_AMOUNTS):
        counter = CounterMetricFamily(_PREFIX + name, text, labels=("client", "model"))
        for key, amounts in sums.items():
            counter.add_metric(key, amounts[i])
        yield counter
    denied: Counter[tuple[str, str]] = Counter()
    for (name, limit), number in admission.usage.denied.items():
        denied[label(name), limit] += number
    refused = CounterMetricFamily(
        _PREFIX + "limited", "Requests refused by a limit (429).", labels=("client", "limit")
    )
    for key, number in denied.items():
        refused.add_metric(key, number)
    yield refused
    in_flight = GaugeMetricFamily(
        _PREFIX + "in_flight_requests",
        "Requests of a key, or of all keys of a group, that are not over, where it has limits.",
        labels=["account"],
    )
    for account in admission.accounts():
        name = account.name.removeprefix("key ")
        if account.name.startswith("group ") or name in labelled:
            in_flight.add_metric([account.name], account.in_flight + account.others_in_flight)
    yield in_flight
