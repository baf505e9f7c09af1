"""Manifests for instances that follow the load: kubernetes/following/.

    gateway.yaml              the gateway with ``following``; it finds the pods at the API server
    instances.yaml            the StatefulSets without replicas; pods drain before they stop
    keda/scaledobjects.yaml   KEDA sets the replicas, from Prometheus
    hpa/hpa.yaml              or Kubernetes' own autoscaler does, by an external metric from
    hpa/prometheus-adapter.yaml   prometheus-adapter (values of its chart)

The gateway publishes a number for each type of instance. Each machine has StatefulSets of its own:
the first machine of a type takes as many as it has room for, the next the rest (``clamp``).
Both autoscalers get the value with a target of 1 per replica: the value is the number of replicas.

Running requests are not cut off: the gateway stops using a pod as soon as the API server reports
its deletion, and its preStop hook waits until the engine is idle, at most ``DRAIN_S``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hetero_gateway.deploy import kubernetes
from hetero_gateway.deploy.gateway_files import gateway_text
from hetero_gateway.deploy.instances import DeployedInstance, DeploymentOptions
from hetero_gateway.deploy.template import piece

_FOLDER = "kubernetes/following"
_METRIC = "hetero_gateway_desired_instances"


def following_files(
    instances: Sequence[DeployedInstance],
    options: DeploymentOptions,
    policy: str,
    profiles: Mapping[str, str],
) -> dict[str, str]:
    """Path to text.

    Args:
        profiles: path below the gateway's configuration to text.
    """
    configuration = gateway_text(
        (),
        options,
        policy,
        base_url=kubernetes.kubernetes_address,
        comment="The gateway's configuration in its pod.",
        server=kubernetes.GATEWAY_SERVER,
        more={
            "discovery": [_source(instances, options)],
            "following": _section(instances, options),
        },
    )
    sets = kubernetes.stateful_sets(instances)
    queries = _queries(sets, options)

    def of_each(kind: str) -> list[dict[str, Any]]:
        return [
            piece(
                "kubernetes.yaml",
                kind,
                name=name,
                most=len(members),
                query=queries[name],
                metric=f"{_METRIC}_{name.replace('-', '_')}",
            )
            for name, members in sets.items()
        ]

    return {
        f"{_FOLDER}/gateway.yaml": kubernetes.gateway_manifests(
            configuration, instances, profiles, finds_pods=True
        ),
        f"{_FOLDER}/instances.yaml": kubernetes.instance_manifests(
            instances, options, profiles, following=True
        ),
        f"{_FOLDER}/keda/scaledobjects.yaml": kubernetes.documents(
            "KEDA: as many replicas as the gateway publishes. serverAddress is your Prometheus.",
            of_each("keda"),
        ),
        f"{_FOLDER}/hpa/hpa.yaml": kubernetes.documents(
            "Kubernetes' own autoscaler; prometheus-adapter.yaml makes the metrics. One replica\n"
            "of each stays, unless the cluster has the feature HPAScaleToZero.",
            of_each("hpa"),
        ),
        f"{_FOLDER}/hpa/prometheus-adapter.yaml": kubernetes.documents(
            "Values of the chart prometheus-community/prometheus-adapter, beside prometheus.url.",
            [{"rules": {"external": of_each("rule")}}],
        ),
    }


def _type(instance: DeployedInstance) -> tuple[str, int]:
    """The gateway's name of the type: from the profile."""
    return instance.type.profile.gpu, instance.tensor_parallel


def _source(instances: Sequence[DeployedInstance], options: DeploymentOptions) -> dict[str, Any]:
    sets = kubernetes.stateful_sets(instances)
    label = "app.kubernetes.io/name"
    return {
        "name": "pods",
        "kind": "kubernetes",
        "selector": f"{label} in ({','.join(sets)})",
        "port": kubernetes.PORT,
        "model": options.served_model_name,
        "profiles": [
            {"labels": {label: name}, "profile": members[0].gateway_profile_file}
            for name, members in sets.items()
        ],
    }


def _section(instances: Sequence[DeployedInstance], options: DeploymentOptions) -> dict[str, Any]:
    """The section ``following`` of the gateway's configuration."""
    by_type: dict[tuple[str, int], list[DeployedInstance]] = {}
    for instance in instances:
        by_type.setdefault(_type(instance), []).append(instance)
    priced = all(i.machine.price_per_hour_usd is not None for i in instances)

    def price(instance: DeployedInstance) -> float:
        return (instance.machine.price_per_hour_usd or 0.0) * instance.tensor_parallel

    # One instance always runs: of the cheapest type.
    least = min(by_type, key=lambda t: price(by_type[t][0]) if priced else t[1])
    types = []
    for key, members in by_type.items():
        row: dict[str, Any] = {
            "model": options.served_model_name,
            "profile": members[0].gateway_profile_file,
            "min": int(key == least),
            "max": len(members),
        }
        if priced:
            row["price_per_hour_usd"] = price(members[0])
        types.append(row)
    section: dict[str, Any] = {"types": types}
    for name in ("ttft_p99_s", "tpot_p99_s"):
        if (limit_s := getattr(options, name)) is not None:
            section[name] = limit_s
    return section


def _queries(
    sets: Mapping[str, Sequence[DeployedInstance]], options: DeploymentOptions
) -> dict[str, str]:
    """By StatefulSet: PromQL for its number of replicas."""
    queries, before = {}, dict[tuple[str, int], int]()
    for name, members in sets.items():
        key = _type(members[0])
        labels = (
            f'model="{options.served_model_name}",accelerator="{key[0]}",tensor_parallel="{key[1]}"'
        )
        others = before.get(key, 0)
        wanted = f"sum({_METRIC}{{{labels}}})" + (f" - {others}" if others else "")
        queries[name] = f"clamp({wanted}, 0, {len(members)})"
        before[key] = others + len(members)
    return queries
