"""``validate``: check a gateway's, a cluster's or a plan's file without running anything."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from hetero_gateway.files.gateway_config import has_gateway_keys, load_gateway_config
from hetero_gateway.files.instance_config import instance_profile
from hetero_gateway.files.setup_warnings import Seen, setup_warnings
from hetero_gateway.files.yaml_file import read_yaml

# The files of other commands are read by what takes longer to import than all of the rest.


def run(args: argparse.Namespace) -> int:
    data = read_yaml(args.config)
    if "machines" in data or "offers" in data:  # no other file has any
        return _validate_plan(args)
    if not has_gateway_keys(data):
        from hetero_gateway.files.cluster_config import is_cluster

        if is_cluster(data):
            return _validate_cluster(args)
    config = load_gateway_config(args.config)
    rows: list[dict[str, Any]] = []
    seen: list[Seen] = []
    for instance in config.instances:
        profile = instance_profile(instance, args.config.parent)
        rows.append(
            {
                "id": instance.id,
                "base_url": instance.base_url,
                "models": sorted(instance.models),
                "profile": profile.name if profile else None,
            }
        )
        seen.append(
            Seen(
                instance.id,
                instance.base_url,
                instance.models,
                profile_model=None if profile is None else profile.model,
            )
        )
    warnings = setup_warnings(seen) if seen or not config.discovery else []
    if args.json:
        document = {"file": str(args.config), "valid": True, "instances": rows}
        print(json.dumps(document | {"warnings": [str(each) for each in warnings]}))
        return 0
    for each in warnings:
        line = None
        if each.key is not None:
            number = next(n for n, i in enumerate(config.instances) if i.id == each.instance_id)
            line = data.line(("instances", number, each.key))
        where = f"{args.config}:{line}" if line else str(args.config)
        print(f"hetero-gateway: {where}: warning: {each}", file=sys.stderr)
    print(f"{args.config}: valid; policy {config.scheduler.policy}, {len(rows)} instances")
    for row in rows:
        models = ", ".join(row["models"]) or "asked of the instance"
        profile_name = row["profile"] or "none"
        print(f"  {row['id']}: {row['base_url']}, models: {models}, profile: {profile_name}")
    return 0


def _validate_cluster(args: argparse.Namespace) -> int:
    from hetero_gateway.files.cluster_config import load_cluster
    from hetero_gateway.files.trace import read_trace

    cluster = load_cluster(args.config)
    if cluster.trace is not None:
        read_trace(cluster.trace)
    rows = [{"id": i.instance_id, "profile": i.profile.name} for i in cluster.instances]
    if args.json:
        document = {"file": str(args.config), "valid": True, "kind": "cluster", "instances": rows}
        print(json.dumps(document | {"faults": len(cluster.faults)}))
        return 0
    print(f"{args.config}: valid for simulate; {len(rows)} instances, {len(cluster.faults)} faults")
    for row in rows:
        print(f"  {row['id']}: profile: {row['profile']}")
    return 0


def _validate_plan(args: argparse.Namespace) -> int:
    from hetero_gateway.files.plan_request import load_requests

    request = load_requests(args.config)[0]
    question = request.question
    rows = [{"id": m.id, "accelerator": m.accelerator, "count": m.count} for m in question.machines]
    if args.json:
        document = {"file": str(args.config), "valid": True, "kind": "plan", "machines": rows}
        print(json.dumps(document | {"model": request.model.name}))
        return 0
    print(f"{args.config}: valid for plan; {request.model.name} on {len(rows)} machines")
    for row in rows:
        print(f"  {row['id']}: {row['count']}x {row['accelerator']}")
    return 0
