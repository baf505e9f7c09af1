"""docker/kubernetes/chart: rendered by Helm's own library, held against the published schemas."""

import base64
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.yaml_file import parse_model

ROOT = Path(__file__).parents[2]
CHART = ROOT / "docker" / "kubernetes" / "chart"
GUIDE = ROOT / "docs" / "guide" / "kubernetes.md"
KUBERNETES = "1.31"
# Groups of others, whose schemas kubernetes-validate does not have.
OTHERS = ("inference.networking.k8s.io/", "monitoring.coreos.com/", "keda.sh/")
SCALED = {
    "gateway": {
        "following": {
            "types": [
                {
                    "model": "m/x",
                    "profile": "A800-80GB-PCIe/DeepSeek-R1-Distill-Qwen-14B/tp1",
                    "min": 1,
                    "max": 4,
                }
            ]
        }
    },
    "instanceScaling": {
        "kind": "keda",
        "statefulSets": [
            {"name": "vllm-a", "model": "m/x", "accelerator": "A800-80GB-PCIe", "max": 4}
        ],
    },
}
PICKER = {"picker": {"enabled": True}, "replicas": 2}
SHARED = {"scheduler": {"shared": "redis://valkey:6379"}}
AUTOSCALED = {"gateway": SHARED, "autoscaling": {"kind": "hpa", "max": 4}}
# What each shows is asserted below, or by ``check``.
VALUES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "emulated": {"emulated": [{"name": "fast", "profile": "V100-32GB-NVLink2/Llama-3-8B/tp4"}]},
    "names": {"access": "names", "keys": {"clients": "keys: []\n"}, "replicas": 3},
    "open": {"access": "open", "networkPolicy": {"enabled": False}},
    "a secret of one's own": {"keys": {"existingSecret": "mine"}},
    "found": {"discovery": {"enabled": True, "selector": "app=vllm"}},
    "long streams": {
        "preStopSeconds": 15,
        "gateway": {"server": {"drain_s": 7.5, "shutdown_timeout_s": 0}},
    },
    "where": {
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "podAnnotations": {"a": "b"},
        "extraEnv": [{"name": "A", "value": "b"}],
        "image": {"pullSecrets": [{"name": "a"}]},
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "files": {"a.yaml": "b: c"},
    },
    "monitored": {"serviceMonitor": {"enabled": True, "labels": {"release": "x"}}},
    "keda": SCALED,
    "hpa": SCALED | {"instanceScaling": SCALED["instanceScaling"] | {"kind": "hpa"}},
    "more gateways by CPU": AUTOSCALED,
    "more gateways by requests": AUTOSCALED
    | {
        "autoscaling": {"kind": "keda", "min": 3, "targetInFlight": 200},
        "serviceMonitor": {"enabled": True},
    },
    "picker": PICKER,
    "picker alone": {
        "picker": {"enabled": True, "inferencePool": {"create": False}},
        "podDisruptionBudget": {"enabled": False},
        "gateway": {"picker": {"drain_s": 20}},
    },
}


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    import helm_python.chart as helm  # of Go: a third of a second, for each process of tests

    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render(values, name="gateway", namespace="default")
    return [
        document
        for name, text in texts.items()
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]


@cache
def rendered_by_name(name: str) -> list[dict[str, Any]]:
    return rendered(VALUES[name])


def one(documents: list[dict[str, Any]], kind: str, name: str = "gateway") -> dict[str, Any]:
    (found,) = (d for d in documents if (d["kind"], d["metadata"]["name"]) == (kind, name))
    return found


def configuration(documents: list[dict[str, Any]]) -> GatewayConfig:
    text = one(documents, "ConfigMap")["data"]["gateway.yaml"]
    return parse_model(GatewayConfig, yaml.safe_load(text), "gateway.yaml")


def container(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def kinds(documents: list[dict[str, Any]]) -> set[str]:
    return {document["kind"] for document in documents}


def check(documents: list[dict[str, Any]]) -> None:
    """By the schemas, and that what belongs together does."""
    import kubernetes_validate  # a second of CPU, in each process that collects

    for document in documents:
        if not document["apiVersion"].startswith(OTHERS):
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(names) == len(set(names))
    config, pod = configuration(documents), one(documents, "Deployment")["spec"]["template"]
    labels = pod["metadata"]["labels"].items()
    selectors = [
        one(documents, "Service")["spec"]["selector"],
        one(documents, "Deployment")["spec"]["selector"]["matchLabels"],
    ]
    for kind in ("PodDisruptionBudget", "ServiceMonitor"):
        selectors += [d["spec"]["selector"]["matchLabels"] for d in documents if d["kind"] == kind]
    assert all(selector.items() <= labels for selector in selectors)
    # It listens where its Service, its policy and its probes say, longer than they need.
    it = container(documents)
    ports = {port["name"]: port["containerPort"] for port in it["ports"]}
    expected = {"http": config.server.port}
    drain_s = config.server.drain_s
    if it["args"][0] == "picker":
        expected |= {"ext-proc": config.picker.port, "grpc-health": config.picker.health_port or 0}
        drain_s = config.picker.drain_s
    assert ports == expected
    assert config.server.host == "0.0.0.0"
    for port in one(documents, "Service")["spec"]["ports"]:
        assert ports[port["targetPort"]] == port["port"]
    (hook,) = it["lifecycle"].values()
    pre_stop_s = int(hook["exec"]["command"][1])
    least_s = pre_stop_s + drain_s + config.server.shutdown_timeout_s
    assert least_s < pod["spec"]["terminationGracePeriodSeconds"] <= least_s + 11
    # Every key that the configuration names is in the environment or mounted, from a Secret.
    secrets = [e["valueFrom"]["secretKeyRef"] for e in it["env"] if "valueFrom" in e]
    given = {e["name"] for e in it["env"]}
    assert {config.server.admin_key_env, config.server.api_key_env} - {None} <= given
    mounts = {m["name"]: m["mountPath"] for m in it["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert mounts.keys() == volumes.keys()
    if (file := config.clients.keys_file) is not None:
        assert mounts["keys"] == str(file.parent)
        secrets.append({"name": volumes["keys"]["secret"]["secretName"], "key": file.name})
    made = {d["metadata"]["name"]: d["data"].keys() for d in documents if d["kind"] == "Secret"}
    assert all(s["key"] in made[s["name"]] for s in secrets if s["name"] != "mine")
    # Instances have a pod's own name, behind a headless Service.
    sets = [d for d in documents if d["kind"] == "StatefulSet"]
    pods = {
        f"http://{d['metadata']['name']}-{k}.{d['spec']['serviceName']}:8000"
        for d in sets
        for k in range(d["spec"]["replicas"])
    }
    assert pods <= {instance.base_url for instance in config.instances}
    for each in sets:
        service = one(documents, "Service", each["spec"]["serviceName"])["spec"]
        assert service["clusterIP"] == "None"
        assert service["selector"].items() <= each["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("name", VALUES)
def test_the_chart_renders_what_is_valid_and_belongs_together(name: str) -> None:
    check(rendered_by_name(name))


def blocks() -> Iterator[dict[str, Any]]:
    for text in re.findall(r"```yaml\n(.*?)```", GUIDE.read_text("utf-8"), re.S):
        yield yaml.safe_load(text)
    for text in re.findall(r"--set-json '(\w+)=(.*?)'", GUIDE.read_text("utf-8"), re.S):
        yield {text[0]: json.loads(text[1])}


@pytest.mark.parametrize("values", [*blocks()])
def test_the_values_that_the_guide_shows_are_good(values: dict[str, Any]) -> None:
    check(rendered(values))


def by_schema(values: dict[str, Any]) -> list[str]:
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    return [e.json_path for e in jsonschema.Draft7Validator(schema).iter_errors(values)]


def test_the_schema_takes_these_values_and_names_what_is_wrong() -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    assert defaults.keys() == schema["properties"].keys() - {"global"}
    for values in (defaults, *VALUES.values(), *blocks()):
        assert by_schema(values) == []
    assert by_schema({"acces": "key"}) == ["$"]
    assert by_schema({"access": "all"}) == ["$.access"]
    assert by_schema({"emulated": [{"name": "a"}]}) == ["$.emulated[0]"]
    # A selector is of no use to who may not ask for pods.
    assert by_schema({"discovery": {"selector": "a=b", "enabled": False}})
    assert by_schema({"podDisruptionBudget": {"maxUnavailable": 0}})


def test_helm_itself_holds_values_against_the_schema() -> None:
    with pytest.raises(Exception, match="acces"):
        rendered({"acces": "key"})


def test_a_secret_is_made_and_no_key_stands_elsewhere() -> None:
    documents = rendered({"keys": {"adminKey": "an-admin-key-of-mine"}})
    data = one(documents, "Secret", "gateway-keys")["data"]
    assert base64.b64decode(data["gateway-admin-key"]) == b"an-admin-key-of-mine"
    assert re.fullmatch(rb"\w{40}", base64.b64decode(data["gateway-api-key"]))
    assert "an-admin-key-of-mine" not in json.dumps([d for d in documents if d["kind"] != "Secret"])
    assert "Secret" not in kinds(rendered_by_name("a secret of one's own"))


def test_who_may_ask() -> None:
    assert configuration(rendered_by_name("nothing")).server.api_key_env
    named = configuration(rendered_by_name("names"))
    assert (named.server.api_key_env, named.server.watch_files_s) == (None, 10)
    opened = configuration(rendered_by_name("open"))
    assert opened.server.api_key_env is opened.clients.keys_file is None
    assert opened.server.admin_key_env


def test_liveness_is_not_readiness() -> None:
    paths = {
        name: probe["httpGet"]["path"]
        for name, probe in container(rendered_by_name("nothing")).items()
        if name.endswith("Probe")
    }
    assert paths == {
        "startupProbe": "/livez", "readinessProbe": "/readyz", "livenessProbe": "/livez"
    }  # fmt: skip
    for name, probe in container(rendered_by_name("picker")).items():
        if name.endswith("Probe"):
            service = "readiness" if name == "readinessProbe" else "liveness"
            assert probe["grpc"] == {"port": 9003, "service": service}


def test_discovery_has_an_account_that_may_read_pods_and_no_more() -> None:
    documents = rendered_by_name("found")
    (source,) = configuration(documents).discovery
    assert (source.kind, source.selector) == ("kubernetes", "app=vllm")
    pod = one(documents, "Deployment")["spec"]["template"]["spec"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("gateway", True)
    (subject,) = one(documents, "RoleBinding")["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": "gateway", "namespace": "default"}
    assert one(documents, "RoleBinding")["roleRef"]["name"] == "gateway"
    rules = one(documents, "Role")["rules"]
    assert {verb for rule in rules for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert {r for rule in rules for r in rule["resources"]} == {"pods", "endpointslices"}
    without = rendered_by_name("nothing")
    assert not {"Role", "ServiceAccount"} & kinds(without)
    pod = one(without, "Deployment")["spec"]["template"]["spec"]
    assert not pod["automountServiceAccountToken"]


@pytest.mark.parametrize("kind", ["keda", "hpa"])
def test_each_stateful_set_gets_the_number_that_the_gateway_publishes(kind: str) -> None:
    documents = rendered_by_name(kind)
    if kind == "keda":
        spec = one(documents, "ScaledObject", "vllm-a")["spec"]
        (trigger,) = spec["triggers"]
        assert trigger["metadata"]["query"] == (
            'sum(hetero_gateway_desired_instances{model="m/x",accelerator="A800-80GB-PCIe",'
            'tensor_parallel="1"})'
        )
        assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (0, 4)
    else:
        spec = one(documents, "HorizontalPodAutoscaler", "vllm-a")["spec"]
        (metric,) = spec["metrics"]
        assert metric["external"]["metric"]["name"] == "hetero_gateway_desired_instances_vllm_a"
        assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 4)
    assert spec["scaleTargetRef"]["name"] == "vllm-a"


def test_instances_that_follow_nothing_are_an_error() -> None:
    with pytest.raises(Exception, match=r"gateway\.following\.types"):
        rendered({"instanceScaling": SCALED["instanceScaling"]})


@pytest.mark.parametrize("name", ["more gateways by CPU", "more gateways by requests"])
def test_the_gateways_number_is_left_to_the_autoscaler(name: str) -> None:
    documents = rendered_by_name(name)
    deployment = one(documents, "Deployment")["spec"]
    assert "replicas" not in deployment
    kind = "ScaledObject" if "requests" in name else "HorizontalPodAutoscaler"
    spec = one(documents, kind)["spec"]
    assert spec["scaleTargetRef"]["name"] == one(documents, "Deployment")["metadata"]["name"]
    if kind == "ScaledObject":
        assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (3, 6)
        (trigger,) = spec["triggers"]
        assert trigger["metadata"]["threshold"] == "200"
        name_of_series = trigger["metadata"]["query"].partition("(")[2].partition("{")[0]
        reference = (ROOT / "docs" / "reference" / "metrics.md").read_text("utf-8")
        assert f"`{name_of_series}` | gauge" in reference
    else:
        assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 4)
        # A share of what the container asks for, so that it has to ask.
        assert spec["metrics"][0]["resource"]["target"]["averageUtilization"] == 60
        assert container(documents)["resources"]["requests"]["cpu"]
    assert one(rendered_by_name("nothing"), "Deployment")["spec"]["replicas"] == 1


@pytest.mark.parametrize(
    ("values", "needs"),
    [
        ({"gateway": {}}, r"gateway\.scheduler\.shared"),
        ({"autoscaling": {"kind": "hpa", "min": 5, "max": 4}}, "min is above max"),
        ({"autoscaling": {"kind": "keda"}}, r"serviceMonitor\.enabled"),
    ],
)
def test_gateways_that_cannot_be_scaled_are_an_error(values: dict[str, Any], needs: str) -> None:
    with pytest.raises(Exception, match=needs):
        rendered(AUTOSCALED | values)


def test_the_names_in_the_guides_commands_are_those_of_the_chart() -> None:
    """``helm`` and ``kubectl`` as printed: releases, services and keys of secrets are there."""
    text = GUIDE.read_text("utf-8")
    documents = rendered_by_name("emulated")
    assert set(re.findall(r"helm (?:upgrade )?(?:--)?install (\S+) (\S+)", text)) == {
        ("gateway", "docker/kubernetes/chart")
    }
    for name, port in re.findall(r"port-forward service/(\S+) (\d+)", text):
        assert int(port) in [p["port"] for p in one(documents, "Service", name)["spec"]["ports"]]
    asked = re.findall(r"get secret (\S+) -o jsonpath='\{\.data\.(\S+)\}'", text)
    assert len(asked) >= 2
    for name, key in asked:
        assert key in one(documents, "Secret", name)["data"]


def test_a_monitor_may_read_metrics_that_are_for_administrators() -> None:
    (endpoint,) = one(rendered_by_name("monitored"), "ServiceMonitor")["spec"]["endpoints"]
    credentials = endpoint["authorization"]["credentials"]
    assert credentials == {"name": "gateway-keys", "key": "gateway-admin-key"}
    assert endpoint["port"] == "http"


def test_the_picker_has_a_pool_that_fails_closed() -> None:
    documents = rendered_by_name("picker")
    reference = one(documents, "InferencePool")["spec"]["endpointPickerRef"]
    service = one(documents, "Service")["spec"]
    assert reference["port"]["number"] in [port["port"] for port in service["ports"]]
    # The data plane has nothing of ours that could refuse anybody without the picker.
    assert (reference["name"], reference["failureMode"]) == ("gateway", "FailClose")
    assert "InferencePool" not in kinds(rendered_by_name("picker alone"))
    assert "InferencePool" not in kinds(rendered_by_name("nothing"))


def let_in(documents: list[dict[str, Any]], name: str = "gateway") -> dict[Any, list[Any]]:
    """Who reaches each port."""
    spec = one(documents, "NetworkPolicy", name)["spec"]
    assert spec["policyTypes"] == ["Ingress"]
    reach: dict[Any, list[Any]] = {}
    for rule in spec["ingress"]:
        # Without `from`, or with none in it, everybody would.
        assert rule["from"]
        assert rule["ports"]
        for port in rule["ports"]:
            reach.setdefault(port["port"], []).extend(rule["from"])
    return reach


def test_only_who_is_named_reaches_the_gateway_and_the_instances() -> None:
    here = [{"podSelector": {}}]
    assert let_in(rendered_by_name("nothing")) == {"http": here}
    assert let_in(rendered_by_name("picker")) == {"ext-proc": here, "http": here}
    envoys = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "envoys"}}}
    scraper = {"podSelector": {"matchLabels": {"app": "prometheus"}}}
    policy = {"clients": [envoys], "operators": [scraper], "instances": True}
    documents = rendered({"networkPolicy": policy})
    assert let_in(documents) == {"http": [envoys, scraper]}
    labels = one(documents, "Deployment")["spec"]["selector"]["matchLabels"]
    gateways = {"podSelector": {"matchLabels": labels}}
    assert let_in(documents, "gateway-instances") == {8000: [gateways]}
    # Envoy sends requests to the instances itself.
    documents = rendered(PICKER | {"networkPolicy": policy})
    check(documents)
    assert let_in(documents) == {"ext-proc": [envoys], "http": [envoys, scraper]}
    assert let_in(documents, "gateway-instances") == {8000: [envoys, gateways]}
    # Nobody named is nobody let in, not everybody.
    documents = rendered(PICKER | {"networkPolicy": {"clients": [], "instances": True}})
    assert let_in(documents) == {}
    assert let_in(documents, "gateway-instances") == {8000: [gateways]}
    documents = rendered(PICKER | {"networkPolicy": {"clients": [], "operators": [scraper]}})
    assert let_in(documents) == {"http": [scraper]}
    assert "NetworkPolicy" not in kinds(rendered_by_name("open"))


def test_helm_has_nothing_against_the_chart() -> None:
    import helm_python.chart as helm

    report = helm.lint(str(CHART), strict=True, kube_version=f"v{KUBERNETES}.0")
    assert report["total_charts_linted"] == 1
    assert report["errors"] == []
    # Severity 1 is "icon is recommended".
    assert all(message["severity"] < 2 for message in report["messages"]), report["messages"]
