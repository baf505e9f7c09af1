"""``explain``: what a running gateway would decide for a request, and why."""

import argparse
import json
from typing import Any

from hetero_gateway.cli.reports.report import figure, percent, print_table
from hetero_gateway.lab.load.admin import fetch_document, printable

# For finish-time; without any profile its cost has no unit.
_ESTIMATES = (
    ("TTFT", "ttft_s", " s"),
    ("LATENCY", "latency_s", " s"),
    ("DELAY", "delay_s", " s"),
    ("MEMORY", "memory_price_s", " s"),
    ("LATE", "late_price_s", " s"),
    ("SLO", "slo_price_s", " s"),
    ("COST", "cost_s", ""),
)


def run(args: argparse.Namespace) -> int:
    wanted = {
        "prompt_tokens": args.prompt_tokens,
        "max_tokens": args.max_tokens,
        "model": args.model,
    }
    params = {name: value for name, value in wanted.items() if value is not None}
    document = fetch_document(args.url, args.admin_key_env, "/admin/explain", params)
    if args.json:
        print(json.dumps(document))
        return 0
    print(printable(document["reason"]))
    print(
        f"policy {document['policy']}, {document['prompt_tokens']} prompt tokens, "
        f"{figure(document['predicted_output_tokens'])} output tokens predicted"
    )
    best = "best" if document["waits"] else "chosen"
    print_candidates(document["candidates"], document["chosen"], best)
    return 0


def print_candidates(candidates: list[dict[str, Any]], chosen: str | None, best: str) -> None:
    """A decision's instances with their figures; ``best`` is the title of the chosen one."""
    if not candidates:
        return
    estimated = any("cost_s" in candidate for candidate in candidates)
    heads = ("INSTANCE", "T", "KV", "W", "LOAD", "LOAD AFTER", "IN FLIGHT")
    print_table(
        (*heads, *(head for head, _, _ in _ESTIMATES if estimated), ""),
        [_row(candidate, chosen, best, estimated) for candidate in candidates],
    )


def _row(
    candidate: dict[str, Any], chosen: str | None, best: str, estimated: bool
) -> tuple[str, ...]:
    note = best if candidate["instance"] == chosen else candidate["excluded"] or ""
    if estimated and candidate["room"] is False:
        note += ", no room" if note else "no room"
    estimates = [figure(candidate.get(n), unit) for _, n, unit in _ESTIMATES] if estimated else []
    return (
        candidate["instance"],
        figure(candidate["request_time_s"], " s"),
        percent(candidate["kv_usage"]),
        figure(candidate["workload"]),
        figure(candidate["load"]),
        figure(candidate["load_after"]),
        figure(candidate["in_flight"]),
        *estimates,
        note,
    )
