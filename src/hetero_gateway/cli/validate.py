"""``validate``: check a gateway's, a cluster's or a plan's file without running anything."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_gateway.files.gateway_config import has_gateway_keys, load_gateway_config
from hetero_gateway.files.instance_config import instance_profile
from hetero_gateway.files.kv_transfer_config import hand_over_to, transfer_warnings
from hetero_gateway.files.setup_warnings import Seen, access_warnings, setup_warnings
from hetero_gateway.files.yaml_file import read_yaml

# Other commands' files are read by modules that take longer to import than all the rest.


def run(args: argparse.Namespace) -> int:
    data = read_yaml(args.config)
    if "machines" in data or "offers" in data:  # only plan files have these
        return _validate_plan(args)
    if not has_gateway_keys(data):
        from hetero_gateway.files.cluster_config import is_cluster

        if is_cluster(data):
            return _validate_cluster(args)
    config = load_gateway_config(args.config)
    rows: list[dict[str, Any]] = []
    seen: list[Seen] = []
    transfers = [(each.id, each.kv_transfer) for each in config.instances]
    for each in config.instances:
        profile = instance_profile(each, args.config.parent)
        made_for = None if profile is None else profile.model
        seen.append(Seen(each.id, each.base_url, each.models, profile_model=made_for))
        told = {"id": each.id, "base_url": each.base_url, "models": sorted(each.models)}
        told["hands_over_to"] = hand_over_to(each.id, transfers)
        rows.append(told | {"profile": profile.name if profile else None})
    warnings = setup_warnings(seen) if seen or not config.discovery else []
    warnings += access_warnings(config.server, named=config.clients.wanted)
    splits, workers = config.scheduler.split_requests != "never", config.server.workers
    warnings += transfer_warnings(
        transfers,
        picks="picker" in data,
        splits=splits,
        workers=workers,
        prefill_header=config.picker.prefill_header,
    )
    if not args.json:
        ids: list[str | None] = [each.id for each in config.instances]
        for warning in warnings:
            line = None
            if warning.key is not None:
                line = data.line(("instances", ids.index(warning.instance_id), warning.key))
            where = f"{args.config}:{line}" if line else str(args.config)
            print(f"hetero-gateway: {where}: warning: {warning}", file=sys.stderr)
    return _tell(
        args,
        {"instances": rows, "warnings": [str(warning) for warning in warnings]},
        f"valid; policy {config.scheduler.policy}, {len(rows)} instances",
        [
            f"{row['id']}: {row['base_url']}, "
            f"models: {', '.join(row['models']) or 'asked of the instance'}, "
            f"profile: {row['profile'] or 'none'}{_told_of_transfers(row)}"
            for row in rows
        ],
    )


def _told_of_transfers(row: Mapping[str, Any]) -> str:
    others = row["hands_over_to"]
    return f", hands KV caches over to: {', '.join(others)}" if others else ""


def _validate_cluster(args: argparse.Namespace) -> int:
    from hetero_gateway.files.cluster_config import load_cluster
    from hetero_gateway.files.trace import read_trace

    cluster = load_cluster(args.config)
    if cluster.trace is not None:
        read_trace(cluster.trace)
    rows = [{"id": i.instance_id, "profile": i.profile.name} for i in cluster.instances]
    return _tell(
        args,
        {"kind": "cluster", "instances": rows, "faults": len(cluster.faults)},
        f"valid for simulate; {len(rows)} instances, {len(cluster.faults)} faults",
        [f"{row['id']}: profile: {row['profile']}" for row in rows],
    )


def _validate_plan(args: argparse.Namespace) -> int:
    from hetero_gateway.files.plan_request import load_requests

    request = load_requests(args.config)[0]
    machines = request.question.machines
    rows = [{"id": m.id, "accelerator": m.accelerator, "count": m.count} for m in machines]
    return _tell(
        args,
        {"kind": "plan", "machines": rows, "model": request.model.name},
        f"valid for plan; {request.model.name} on {len(rows)} machines",
        [f"{m.id}: {m.count}x {m.accelerator}" for m in machines],
    )


def _tell(
    args: argparse.Namespace, document: Mapping[str, Any], said: str, lines: Sequence[str]
) -> int:
    if args.json:
        print(json.dumps({"file": str(args.config), "valid": True, **document}))
    else:
        print(*[f"{args.config}: {said}", *lines], sep="\n  ")
    return 0
