"""``why``: one request's history: wait, attempts, candidates, prediction, outcome."""

import argparse
import json
import time
from typing import Any
from urllib.parse import quote

from hetero_gateway.cli.explain import print_candidates
from hetero_gateway.cli.reports.report import figure, print_table
from hetero_gateway.lab.load.admin import fetch_document, printable

_WAITED_FOR = (
    ("the gateway's queue", "queue_s"),
    ("attempts that failed", "retry_s"),
    ("the network", "network_s"),
    ("the engine: its queue and the prefill", "prefill_s"),
)


def run(args: argparse.Namespace) -> int:
    path = f"/admin/requests/{quote(args.request_id, safe='')}"
    document = fetch_document(args.url, args.admin_key_env, path, {})
    if args.json:
        print(json.dumps(document))
        return 0
    print(_verdict(document))
    for away in document["turned_away"]:
        print(f"{_clock(away['time'])} turned away: {away['reason']}")
    for attempt in document["attempts"]:
        _print_attempt(attempt)
    if (first := document["first_token"]) is not None:
        parts = [f"{figure(first[key], ' s')} for {name}" for name, key in _WAITED_FOR]
        print(f"the first byte came after {figure(first['ttft_s'], ' s')}: {', '.join(parts)}")
    return 0


def _verdict(document: dict[str, Any]) -> str:
    name, outcome = printable(document["request_id"]), document["outcome"]
    if outcome is None:
        away = bool(document["turned_away"])
        return f"request {name}: {'no instance had it' if away else 'it is not over'}"
    status = f" (HTTP {outcome['status']})" if outcome["status"] else ""
    retries = f", {outcome['retries']} tried again" if outcome["retries"] else ""
    client = f", for {printable(outcome['client'])}" if outcome["client"] else ""
    total = figure(outcome["total_s"], " s")
    return f"request {name}: {outcome['outcome']}{status} after {total}{retries}{client}"


def _print_attempt(attempt: dict[str, Any]) -> None:
    print(f"\n{_clock(attempt['time'])} {printable(attempt['reason'])}")
    print(
        f"{printable(attempt['model'])}, {attempt['prompt_tokens']} prompt tokens, "
        f"{figure(attempt['predicted_output_tokens'])} output tokens predicted"
    )
    if (failed := attempt["failed"]) is not None:
        print(f"it failed after {figure(failed['after_s'], ' s')}: {failed['reason']}")
    predicted, outcome = attempt["predicted"], attempt["outcome"] or {}
    rows = [
        ("first token", predicted["ttft_s"], outcome.get("ttft_s"), " s"),
        ("latency", predicted["latency_s"], outcome.get("latency_s"), " s"),
        ("output tokens", attempt["predicted_output_tokens"], outcome.get("output_tokens"), ""),
    ]
    if outcome:
        print_table(
            ("", "PREDICTED", "MEASURED", "RATIO"),
            [
                (name, figure(before, unit), figure(after, unit), _ratio(before, after))
                for name, before, after, unit in rows
            ],
        )
    print_candidates(attempt["candidates"], attempt["chosen"], "chosen")


def _ratio(predicted: float | None, measured: float | None) -> str:
    return figure(measured / predicted) if predicted and measured is not None else "-"


def _clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))
