"""Who uses the gateway and what they wait for, over the last minute of its log of requests.

Made when somebody looks. Everything is of the same requests, so that parts add up to their sums.
"""

import time
from collections.abc import Iterable, Mapping
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
from hetero_gateway.serve.dashboard.trend import short

OVER_S = 60.0
_CLIENTS = 6


def describe_use(
    log: RequestLog, fleet: Fleet, denied: Mapping[tuple[str, str], int]
) -> dict[str, Any]:
    """{"span_s", "requests", "retried", "retries", "waits", "clients"}.

    Args:
        denied: what clients were refused since the start, by name and limit.
    """
    now_s = time.monotonic()
    ended = list(log.newest_first(now_s - OVER_S))
    # Of more than are kept, those that are span less than a minute.
    full = len(ended) == MOST_ENDED
    failed = log.failed_ids()
    tries = [failed.get(each.request_id, 0) for each in ended]
    return {
        "span_s": round(max(1.0, now_s - ended[-1].ended_s), 1) if full else OVER_S,
        "requests": len(ended),
        "retried": sum(bool(count) for count in tries),
        "retries": sum(tries),
        "waits": _waits(zip(ended, tries, strict=True), fleet),
        "clients": _clients(ended, denied),
    }


def _waits(ended: Iterable[tuple[EndedRequest, int]], fleet: Fleet) -> dict[str, Any] | None:
    """Means over the streams, s; None: there was none."""
    sums, streams = [0.0] * len(WaitParts._fields), 0
    for each, failed in ended:
        if not each.stream or each.status >= 400:
            continue
        instance = fleet.instances.get(InstanceId(each.instance_id))
        parts = parts_of(each, failed, None if instance is None else instance.round_trip_s)
        if parts is not None:
            sums = [a + b for a, b in zip(sums, parts, strict=True)]
            streams += 1
    if not streams:
        return None
    means = {n: short(s / streams) for n, s in zip(WaitParts._fields, sums, strict=True)}
    return {"streams": streams, "ttft_s": short(sum(means.values()), 4), **means}


def _clients(
    ended: Iterable[EndedRequest], denied: Mapping[tuple[str, str], int]
) -> list[dict[str, Any]]:
    """Those with the most requests, and all others together; without a key: None as the name."""
    found: dict[str, list[int]] = {name: [0, 0, 0] for name, _ in denied}
    for each in ended:
        counts = found.setdefault(each.client, [0, 0, 0])
        counts[0] += 1
        counts[1] += 0 if each.tokens is None else each.tokens.output
        broke = each.outcome not in (COMPLETED, CLIENT_DISCONNECTED)
        counts[2] += broke or each.status >= 400
    refused: dict[str, int] = {}
    for (name, _), count in denied.items():
        refused[name] = refused.get(name, 0) + count
    ordered = sorted(found, key=lambda name: (-found[name][0], name))
    rows = [
        {"name": name or None, "requests": a, "output_tokens": b, "failed": c,
         "refused": refused.get(name, 0)}
        for name in ordered[:_CLIENTS]
        for a, b, c in [found[name]]
    ]  # fmt: skip
    if rest := ordered[_CLIENTS:]:
        sums = [sum(found[name][i] for name in rest) for i in range(3)]
        rows.append(
            {"name": f"{len(rest)} others", "requests": sums[0], "output_tokens": sums[1],
             "failed": sums[2], "refused": sum(refused.get(name, 0) for name in rest)}
        )  # fmt: skip
    return rows
