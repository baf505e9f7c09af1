"""docker/kubernetes: the picker's manifests and Helm chart, by the published schemas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python.chart as helm
import kubernetes_validate
import pytest
import yaml

from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.yaml_file import parse_model

FOLDER = Path(__file__).parents[2] / "docker" / "kubernetes"
CHART = FOLDER / "chart"
KUBERNETES = "1.31"
VALUES: list[dict[str, Any]] = [
    {},
    {
        "replicas": 3,
        "keysSecret": "keys",
        "gateway": {
            "scheduler": {"policy": "min-max"},
            "instances": [{"id": "a", "base_url": "http://a-0.a:8000"}],
        },
    },
    {"podDisruptionBudget": {"enabled": False}, "inferencePool": {"create": False}},
]


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render(values, name="picker", namespace="default")
    return [
        document
        for name, text in texts.items()
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]


def manifests() -> list[dict[str, Any]]:
    return [
        document
        for path in sorted(FOLDER.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text("utf-8"))
    ]


def by_kind(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    kinds = {document["kind"]: document for document in documents}
    assert len(kinds) == len(documents)
    return kinds


def check(documents: list[dict[str, Any]]) -> None:
    """By the schemas, and that what belongs together does."""
    for document in documents:
        # Kubernetes' own; those of the Gateway API and its extension are not among them.
        if "networking.k8s.io/" not in document["apiVersion"].replace("gateway.", "").replace(
            "inference.", ""
        ):
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
    kinds = by_kind(documents)
    pod = kinds["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"].items()
    for selector in (
        kinds["Service"]["spec"]["selector"],
        kinds["Deployment"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels
    (container,) = pod["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    text = kinds["ConfigMap"]["data"]["gateway.yaml"]
    config = parse_model(GatewayConfig, yaml.safe_load(text), "gateway.yaml")
    assert ports == {
        "ext-proc": config.picker.port,
        "grpc-health": config.picker.health_port,
        "http": config.server.port,
    }
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == config.picker.health_port
    grace_s = pod["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > config.picker.drain_s + config.server.shutdown_timeout_s
    if "PodDisruptionBudget" in kinds:
        budget = kinds["PodDisruptionBudget"]["spec"]
        assert budget["selector"]["matchLabels"].items() <= labels
        assert budget["minAvailable"] < kinds["Deployment"]["spec"]["replicas"]
    if "InferencePool" in kinds:
        service = kinds["Service"]
        reference = kinds["InferencePool"]["spec"]["endpointPickerRef"]
        assert reference["name"] == service["metadata"]["name"]
        assert reference["port"]["number"] in [p["port"] for p in service["spec"]["ports"]]
        assert reference["failureMode"] == "FailOpen"


def test_the_manifests_are_valid_and_belong_together():
    check(manifests())


@pytest.mark.parametrize("values", VALUES)
def test_the_chart_renders_what_is_valid_and_belongs_together(values):
    documents = rendered(values)
    check(documents)
    kinds = by_kind(documents)
    assert ("InferencePool" in kinds) == (values.get("inferencePool", {}).get("create", True))
    assert kinds["Deployment"]["spec"]["replicas"] == values.get("replicas", 2)
    config = yaml.safe_load(kinds["ConfigMap"]["data"]["gateway.yaml"])
    assert config["instances"] == values.get("gateway", {}).get("instances", [])
    assert ("admin_key_env" in config["server"]) == ("keysSecret" in values)


def test_discovery_has_an_account_that_may_read_pods_and_no_more():
    documents = rendered({"discovery": {"serviceAccount": True}})
    check(documents)
    kinds = by_kind(documents)
    name = kinds["ServiceAccount"]["metadata"]["name"]
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == (name, True)
    (subject,) = kinds["RoleBinding"]["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": name, "namespace": "default"}
    assert kinds["RoleBinding"]["roleRef"]["name"] == kinds["Role"]["metadata"]["name"]
    verbs = {verb for rule in kinds["Role"]["rules"] for verb in rule["verbs"]}
    resources = {each for rule in kinds["Role"]["rules"] for each in rule["resources"]}
    assert (verbs, resources) == ({"get", "list", "watch"}, {"pods", "endpointslices"})
    without = by_kind(rendered({}))
    assert "Role" not in without
    assert not without["Deployment"]["spec"]["template"]["spec"]["automountServiceAccountToken"]


def test_helm_has_nothing_against_the_chart():
    report = helm.lint(str(CHART), strict=True, kube_version=f"v{KUBERNETES}.0")
    assert report["total_charts_linted"] == 1
    assert report["errors"] == []
    # Severity 1 is "icon is recommended".
    assert all(message["severity"] < 2 for message in report["messages"]), report["messages"]
