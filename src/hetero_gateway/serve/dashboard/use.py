"""Clients' use and waiting times over the last minute, from the gateway's log of requests.

Computed when somebody looks. All figures are of the same requests, so that parts add up to sums.
"""

import time
from collections.abc import Mapping
from typing import Any

from hetero_gateway.core.types import CLIENT_DISCONNECTED, COMPLETED, InstanceId
from hetero_gateway.gateway.fleet.instances import Fleet
from hetero_gateway.gateway.records.request_log import (
    MOST_ENDED,
    EndedRequest,
    RequestLog,
    WaitParts,
    parts_of,
)
from hetero_gateway.gateway.turns import in_turns
from hetero_gateway.serve.dashboard.trend import short

OVER_S = 60.0
_CLIENTS = 6
_AT_ONCE = 128


async def describe_use(
    log: RequestLog, fleet: Fleet, denied: Mapping[tuple[str, str], int]
) -> dict[str, Any]:
    """{"span_s", "requests", "retried", "retries", "waits", "clients"}, in slices of the event
    loop.

        Args:
            denied: clients' refusals since the start, by name and limit.
    """
    now_s, failed = time.monotonic(), log.failed_ids()
    ended = list(log.newest_first(now_s - OVER_S))
    # If more arrive than are kept, those kept span less than a minute.
    full = len(ended) == MOST_ENDED
    retried = retries = 0
    waits = _Waits()
    clients: dict[str, list[int]] = {name: [0, 0, 0] for name, _ in denied}
    async for some in in_turns(ended, _AT_ONCE):
        for each in some:
            tries = failed.get(each.request_id, 0)
            retried += tries > 0
            retries += tries
            _count(clients.setdefault(each.client, [0, 0, 0]), each)
            if each.stream and each.status < 400:
                instance = fleet.instances.get(InstanceId(each.instance_id))
                waits.add(each, tries, None if instance is None else instance.round_trip_s)
    return {
        "span_s": round(max(1.0, now_s - ended[-1].ended_s), 1) if full else OVER_S,
        "requests": len(ended),
        "retried": retried,
        "retries": retries,
        "waits": waits.means(),
        "clients": _clients(clients, denied),
    }


class _Waits:
    """Streams' waiting times, s, summed."""

    def __init__(self) -> None:
        self._sums = [0.0] * len(WaitParts._fields)
        self._streams = 0

    def add(self, ended: EndedRequest, failed: int, round_trip_s: float | None) -> None:
        parts = parts_of(ended, failed, round_trip_s)
        if parts is not None:
            self._streams += 1
            for i, part in enumerate(parts):
                self._sums[i] += part

    def means(self) -> dict[str, Any] | None:
        """None: there was no stream."""
        count = self._streams
        if not count:
            return None
        means = {n: short(s / count) for n, s in zip(WaitParts._fields, self._sums, strict=True)}
        return {"streams": count, "ttft_s": short(sum(means.values()), 4), **means}


def _count(counts: list[int], ended: EndedRequest) -> None:
    """A client's requests, output tokens, and failures."""
    counts[0] += 1
    counts[1] += 0 if ended.tokens is None else ended.tokens.output
    broke = ended.outcome is not COMPLETED and ended.outcome is not CLIENT_DISCONNECTED
    counts[2] += broke or ended.status >= 400


def _clients(
    found: Mapping[str, list[int]], denied: Mapping[tuple[str, str], int]
) -> list[dict[str, Any]]:
    """Those with the most requests, and all others together; without a key: None as the name."""
    refused: dict[str, int] = {}
    for (name, _), count in denied.items():
        refused[name] = refused.get(name, 0) + count
    ordered = sorted(found, key=lambda name: (-found[name][0], name))
    rows = [_client(name or None, [name], found, refused) for name in ordered[:_CLIENTS]]
    if rest := ordered[_CLIENTS:]:
        rows.append(_client(f"{len(rest)} others", rest, found, refused))
    return rows


def _client(
    shown: str | None,
    names: list[str],
    found: Mapping[str, list[int]],
    refused: Mapping[str, int],
) -> dict[str, Any]:
    requests, output_tokens, failed = (sum(found[name][i] for name in names) for i in range(3))
    return {
        "name": shown,
        "requests": requests,
        "output_tokens": output_tokens,
        "failed": failed,
        "refused": sum(refused.get(name, 0) for name in names),
    }
