"""docker/kubernetes: the picker's manifests, by the published schemas."""

from pathlib import Path
from typing import Any

import yaml

from benchmarks.envoy import HEADER_MUTATION, configuration, http_filter
from hetero_gateway.engines.vllm.paths import WORK_BY_PATH
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.yaml_file import parse_model

FOLDER = Path(__file__).parents[2] / "docker" / "kubernetes"
KUBERNETES = "1.31"


def manifests() -> list[dict[str, Any]]:
    return [
        document
        for path in sorted(FOLDER.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text("utf-8"))
    ]


def by_kind(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those that there is one of; network policies are ``policies``."""
    single = [document for document in documents if document["kind"] != "NetworkPolicy"]
    kinds = {document["kind"]: document for document in single}
    assert len(kinds) == len(single)
    return kinds


def policies(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Network policies by the pods that they are for: of the picker, and of instances."""
    found = [each["spec"] for each in documents if each["kind"] == "NetworkPolicy"]
    kinds = by_kind(documents)
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    of = {
        "picker" if spec["podSelector"]["matchLabels"].items() <= labels else "instances": spec
        for spec in found
    }
    assert len(of) == len(found)
    assert all(spec["policyTypes"] == ["Ingress"] for spec in found)
    return of


def let_in(policy: dict[str, Any]) -> dict[Any, list[Any]]:
    """Who reaches each port."""
    reach: dict[Any, list[Any]] = {}
    for rule in policy["ingress"]:
        # Without `from`, or with none in it, everybody would.
        assert rule["from"]
        assert rule["ports"]
        for port in rule["ports"]:
            reach.setdefault(port["port"], []).extend(rule["from"])
    return reach


def check(documents: list[dict[str, Any]]) -> None:
    """By the schemas, and that what belongs together does."""
    import kubernetes_validate  # a second of CPU, in each process that collects

    for document in documents:
        # Kubernetes' own; those of the Gateway API and its extension are not among them.
        if not document["apiVersion"].startswith(("gateway.", "inference.")):
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
    budget = kinds["PodDisruptionBudget"]["spec"]
    assert budget["selector"]["matchLabels"].items() <= labels
    assert budget["minAvailable"] < kinds["Deployment"]["spec"]["replicas"]
    service = kinds["Service"]
    reference = kinds["InferencePool"]["spec"]["endpointPickerRef"]
    assert reference["name"] == service["metadata"]["name"]
    assert reference["port"]["number"] in [p["port"] for p in service["spec"]["ports"]]
    # The data plane has nothing of ours that could refuse anybody without the picker.
    assert reference["failureMode"] == "FailClose"


def test_the_manifests_are_valid_and_belong_together():
    check(manifests())


def test_the_route_has_the_gateways_paths_and_no_other():
    (rule,) = by_kind(manifests())["HTTPRoute"]["spec"]["rules"]
    matches = [(m["method"], m["path"]["type"], m["path"]["value"]) for m in rule["matches"]]
    paths = [("POST", "Exact", path) for path in WORK_BY_PATH]
    assert matches == [("GET", "Exact", "/v1/models"), *paths]
    # What the Gateway API allows in one rule.
    assert len(matches) <= 64
    (modifier,) = rule["filters"]
    removed = modifier["requestHeaderModifier"]["remove"]
    mutations = http_filter(configuration([], []), HEADER_MUTATION)["mutations"]
    by_envoy = [each.get("remove_on_match") for each in mutations["request_mutations"]]
    beginnings = tuple(each["key_matcher"]["prefix"] for each in by_envoy if each)
    assert removed
    assert all(name.startswith(beginnings) for name in removed)


def test_only_the_data_plane_reaches_pickers_and_instances():
    here = [{"podSelector": {}}]
    of = policies(manifests())
    assert let_in(of["picker"]) == {"ext-proc": here, "http": here}
    assert let_in(of["instances"]) == {8000: here}
    pool = by_kind(manifests())["InferencePool"]["spec"]
    assert of["instances"]["podSelector"] == pool["selector"]
