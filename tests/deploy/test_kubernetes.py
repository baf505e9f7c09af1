"""The manifests: what belongs together does, and no secret is in them."""

import re

import pytest
import yaml

from hetero_gateway.deploy.directory import render_deployment
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.yaml_file import parse_model
from tests.deploy.plans import EACH_PLAN, EVERY_VENDOR, ONE_MACHINE, PLANS, TWO_MACHINES, options

DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


class Manifests:
    def __init__(self, planned, **changes) -> None:
        files = render_deployment(planned, options(**changes))
        self.texts = {n: t for n, t in files.items() if re.fullmatch(r"kubernetes/[^/]*", n)}
        self.all = [d for text in self.texts.values() for d in yaml.safe_load_all(text)]

    def of(self, kind: str) -> dict[str, dict]:
        return {d["metadata"]["name"]: d for d in self.all if d["kind"] == kind}


@EACH_PLAN
def test_every_object_has_a_name_that_kubernetes_takes_and_has_it_once(planned, emulate):
    manifests = Manifests(planned, emulate=emulate)
    seen = [(d["kind"], d["metadata"]["name"]) for d in manifests.all]
    assert len(seen) == len(set(seen))
    assert all(DNS_LABEL.fullmatch(name) for _, name in seen)
    assert all(d["apiVersion"] in ("v1", "apps/v1", "networking.k8s.io/v1") for d in manifests.all)


@EACH_PLAN
def test_the_gateway_knows_every_pod_by_its_own_name(planned, emulate):
    manifests = Manifests(planned, emulate=emulate)
    data = manifests.of("ConfigMap")["hetero-gateway"]["data"]
    config = parse_model(GatewayConfig, yaml.safe_load(data["gateway.yaml"]), "gateway.yaml")
    services = manifests.of("Service")
    pods = {
        f"http://{name}-{k}.{each['spec']['serviceName']}:"
        f"{services[each['spec']['serviceName']]['spec']['ports'][0]['port']}"
        for name, each in manifests.of("StatefulSet").items()
        for k in range(each["spec"]["replicas"])
    }
    assert {instance.base_url for instance in config.instances} == pods
    for name in manifests.of("StatefulSet"):
        assert services[name]["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize("emulate", [False, True])
def test_the_gateways_profiles_are_mounted_where_its_configuration_looks(emulate):
    manifests = Manifests(TWO_MACHINES, emulate=emulate, time_scale=2.0)
    data = manifests.of("ConfigMap")["hetero-gateway"]["data"]
    pod = manifests.of("Deployment")["hetero-gateway"]["spec"]["template"]["spec"]
    items = {
        i["path"]: i["key"] for v in pod["volumes"] for i in v.get("configMap", {}).get("items", ())
    }
    assert set(items.values()) == set(data)
    named = {i["profile"] for i in yaml.safe_load(data["gateway.yaml"])["instances"]}
    assert named == set(items) - {"gateway.yaml"}
    assert all(re.fullmatch(r"[-._a-zA-Z0-9]+", key) for key in data)


def test_an_emulated_pods_profile_is_mounted_where_its_command_looks():
    manifests = Manifests(TWO_MACHINES, emulate=True, time_scale=2.0)
    data = manifests.of("ConfigMap")["emulated-profiles"]["data"]
    for each in manifests.of("StatefulSet").values():
        (container,) = each["spec"]["template"]["spec"]["containers"]
        path = container["args"][container["args"].index("--profile") + 1]
        folder, _, key = path.rpartition("/")
        assert container["volumeMounts"] == [
            {"name": "profiles", "mountPath": folder, "readOnly": True}
        ]
        assert key in data


@pytest.mark.parametrize(
    ("name", "resource", "count"),
    [
        ("v100-box-tp4", "nvidia.com/gpu", 4),
        ("mi-box-tp1", "amd.com/gpu", 1),
        ("gaudi-box-tp2", "habana.ai/gaudi", 2),
        ("ascend-box-tp1", "huawei.com/Ascend910", 1),
    ],
)
def test_a_pod_asks_for_the_accelerators_of_its_size(name, resource, count):
    pod = Manifests(EVERY_VENDOR).of("StatefulSet")[name]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {resource: count}
    assert pod["nodeSelector"] == {"kubernetes.io/hostname": name.rsplit("-", 1)[0]}


@pytest.mark.parametrize("planned", PLANS)
def test_a_selector_finds_its_pods_and_no_others(planned):
    manifests = Manifests(planned)
    workloads = manifests.of("StatefulSet") | manifests.of("Deployment")
    labels = {n: w["spec"]["template"]["metadata"]["labels"] for n, w in workloads.items()}
    for name, workload in workloads.items():
        for selector in (
            workload["spec"]["selector"]["matchLabels"],
            manifests.of("Service")[name]["spec"]["selector"],
        ):
            found = {n for n, have in labels.items() if selector.items() <= have.items()}
            assert found == {name}
    (policy,) = manifests.of("NetworkPolicy").values()
    (expression,) = policy["spec"]["podSelector"]["matchExpressions"]
    assert set(expression["values"]) == set(manifests.of("StatefulSet"))


def test_keys_come_from_a_secret_that_is_not_written():
    manifests = Manifests(ONE_MACHINE)
    assert not manifests.of("Secret")
    workloads = [*manifests.of("Deployment").values(), *manifests.of("StatefulSet").values()]
    references = [
        entry["valueFrom"]["secretKeyRef"]
        for w in workloads
        for c in w["spec"]["template"]["spec"]["containers"]
        for entry in c["env"]
        if "valueFrom" in entry
    ]
    assert {r["key"] for r in references} == {"hf-token", "gateway-api-key", "gateway-admin-key"}
    assert {r["key"] for r in references if r.get("optional")} == {"hf-token"}
    config = yaml.safe_load(manifests.of("ConfigMap")["hetero-gateway"]["data"]["gateway.yaml"])
    assert config["server"]["api_key_env"]
    assert config["server"]["admin_key_env"]
    readme = render_deployment(ONE_MACHINE, options())["README.md"]
    assert all(f"--from-literal={r['key']}=…" in readme for r in references)


def test_there_is_one_gateway_and_it_is_locked_down():
    deployment = Manifests(ONE_MACHINE).of("Deployment")["hetero-gateway"]["spec"]
    assert deployment["replicas"] == 1
    assert deployment["strategy"] == {"type": "Recreate"}
    pod = deployment["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["containers"][0]["livenessProbe"]["httpGet"]["path"] == "/livez"


def test_a_pod_is_given_longer_than_open_requests_may_take():
    for each in Manifests(ONE_MACHINE, shutdown_timeout_s=25).of("StatefulSet").values():
        pod = each["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > 25
