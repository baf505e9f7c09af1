"""``status``: what a running gateway sees now."""

import argparse
import itertools
import json
from collections.abc import Iterator
from typing import Any

from hetero_gateway.cli.reports.report import figure, percent, print_table, shared_in_words
from hetero_gateway.lab.load.admin import fetch_document, printable


def run(args: argparse.Namespace) -> int:
    document = fetch_document(args.url, args.admin_key_env, "/admin/instances", {})
    if args.json:
        print(json.dumps(document))
        return 0
    instances = document["instances"]
    up = {_server(i) for i in instances if _state(i) == "up"}
    there = {_server(i) for i in instances}
    note = ", the gateway is draining" if document["draining"] else ""
    if (queue := document["queue"]) is not None:
        note += f"; {queue['waiting']} wait"
        if queue["waiting"]:
            note += f", the first for {figure(queue['oldest_wait_s'])} s"
    if (sharing := document.get("sharing")) is not None:
        note += f"; {shared_in_words(sharing)}"
    print(f"policy {document['policy']}, {len(up)} of {len(there)} instances take requests{note}")
    if instances:
        _print_instances(instances)
    for text in document["warnings"]:
        print(f"warning: {printable(text)}")
    return 0


def _print_instances(instances: list[dict[str, Any]]) -> None:
    total = sum(i["requests"] for i in instances)
    print_table(
        ("INSTANCE", "STATE", "IN FLIGHT", "NO TOKEN", "SPEED", "DRIFT", "WORKLOAD", "KV EST",
         "KV ENGINE", "CACHE", "SHARE", "REQUESTS", "PROFILE", "MODELS"),
        list(_rows(instances, total)),
    )  # fmt: skip
    for i in instances:
        if not i["up"]:
            print(f"{i['id']} is down: {printable(i['down_reason'] or 'unknown')}")
        elif i.get("ejected"):
            print(f"{i['id']} is ejected: its requests failed ({i['ejected_reason']})")
        for pair in i.get("refused_pairs") or ():
            print(
                f"{pair['to']} cannot fetch prompts that {i['id']} has computed: the two share no "
                f"request for {figure(pair['for_s'])} s more; unequal engines refuse each other "
                "(kv_transfer.group)"
            )
        if (i.get("slowness") or {}).get("slow"):
            print(
                f"{i['id']} is slow: its last seconds took {figure(i['slowness']['factor'])} times "
                "as long as its profile says"
            )
        if (i.get("drift") or {}).get("drifted"):
            print(
                f"{i['id']}: its profile has drifted (decode/prefill: observed over modelled); "
                "`hetero-gateway profile --from-gateway URL` makes a new one from the traffic"
            )


def _rows(instances: list[dict[str, Any]], total: int) -> Iterator[tuple[str, ...]]:
    """One row per instance; if its ranks are separate places, theirs follow."""
    for server, group in itertools.groupby(instances, _server):
        places = list(group)
        if places[0]["id"] != server:
            requests = sum(i["requests"] for i in places)
            yield (
                server,
                f"{sum(_state(i) == 'up' for i in places)} of {len(places)} ranks up",
                str(sum(i["in_flight"] for i in places)),
                figure(sum(i["waiting_first_token"] or 0 for i in places)),
                *("-" * 6),
                percent(requests / total if total else None),
                str(requests),
                places[0]["profile"],
                ", ".join(places[0]["models"]) or "-",
            )
        for i in places:
            yield (
                i["id"],
                _state(i),
                str(i["in_flight"]),
                figure(i["waiting_first_token"]),
                figure(i["speed_factor"]),
                _drift(i),
                figure(i["workload"]),
                percent(i["kv_usage"]),
                percent(i["engine_kv_usage"]),
                _cache(i),
                percent(i["requests"] / total if total else None),
                str(i["requests"]),
                i["profile"] + (" (recalibrated)" if _recalibrated(i) else ""),
                ", ".join(i["models"]) or "-",
            )


def _server(instance: dict[str, Any]) -> str:
    """The server that it is a place of; or itself."""
    return str(instance.get("instance") or instance["id"])


def _drift(instance: dict[str, Any]) -> str:
    """Decode and prefill, observed over modelled; a mark if the profile has drifted."""
    drift = instance.get("drift")
    if drift is None or (drift["decode"] is None and drift["prefill"] is None):
        return "-"
    ratios = f"{figure(drift['decode'])}/{figure(drift['prefill'])}"
    return ratios + (" !" if drift["drifted"] else "")


def _cache(instance: dict[str, Any]) -> str:
    """How its prefix cache is known, and how much of it is hit."""
    source, trust = instance.get("prefix_source"), instance.get("prefix_trust")
    return "-" if source is None or trust is None else f"{source} {percent(trust)}"


def _recalibrated(instance: dict[str, Any]) -> bool:
    return bool(instance.get("recalibrated")) and instance["profile"] != "learned"


def _state(instance: dict[str, Any]) -> str:
    if not instance["up"]:
        return "down"
    if instance.get("asleep") or instance.get("paused"):
        return "asleep" if instance.get("asleep") else "paused"
    if instance["draining"]:
        return "draining"
    return "ejected" if instance.get("ejected") else "up"
