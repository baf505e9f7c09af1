"""``status``: what a running gateway sees now."""

from __future__ import annotations

import argparse
from typing import Any

from hetero_gateway.cli import admin_client
from hetero_gateway.cli.admin_client import figure, percent


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "status",
        help="what a running gateway sees now",
        description="Show every instance of a running gateway: health, load, share of requests.",
        epilog="example: hetero-gateway status http://127.0.0.1:8000",
    )
    admin_client.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    document = admin_client.fetch(args, "/admin/instances", {})
    if args.json:
        admin_client.print_json(document)
        return 0
    instances = document["instances"]
    up = sum(i["up"] and not i["draining"] for i in instances)
    note = ", the gateway is draining" if document["draining"] else ""
    if (queue := document["queue"]) is not None:
        note += f"; {queue['waiting']} wait"
        if queue["waiting"]:
            note += f", the first for {figure(queue['oldest_wait_s'])} s"
    print(f"policy {document['policy']}, {up} of {len(instances)} instances take requests{note}")
    if not instances:
        return 0
    total = sum(i["requests"] for i in instances)
    admin_client.print_table(
        ("INSTANCE", "STATE", "IN FLIGHT", "NO TOKEN", "SPEED", "WORKLOAD", "KV EST",
         "KV ENGINE", "SHARE", "REQUESTS", "PROFILE", "MODELS"),
        [
            (
                i["id"],
                _state(i),
                str(i["in_flight"]),
                figure(i["waiting_first_token"]),
                figure(i["speed_factor"]),
                figure(i["workload"]),
                percent(i["kv_usage"]),
                percent(i["engine_kv_usage"]),
                percent(i["requests"] / total if total else None),
                str(i["requests"]),
                i["profile"],
                ", ".join(i["models"]) or "-",
            )
            for i in instances
        ],
    )  # fmt: skip
    for i in instances:
        if not i["up"]:
            print(f"{i['id']} is down: {admin_client.printable(i['down_reason'] or 'unknown')}")
    return 0


def _state(instance: dict[str, Any]) -> str:
    if not instance["up"]:
        return "down"
    return "draining" if instance["draining"] else "up"
