"""Kubernetes manifests: the gateway, and one StatefulSet for each size of instance on each machine.

Why no Deployment for the instances: behind a Deployment's Service, kube-proxy would choose the
replica, and the gateway would see one instance where there are several. A StatefulSet with a
headless Service gives every replica a name of its own, and the gateway chooses.

Which devices of its node a pod gets, the vendor's device plugin decides. What is secret is read
from the Secret ``hetero-gateway-keys``, which the user makes; no value of it is written here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from hetero_gateway.deploy.command import emulate_arguments, serve_arguments
from hetero_gateway.deploy.gateway_files import ADMIN_KEY_ENV, API_KEY_ENV
from hetero_gateway.deploy.instances import DeployedInstance, DeploymentOptions
from hetero_gateway.engines.vllm import paths

SECRET = "hetero-gateway-keys"
HF_TOKEN_KEY, API_KEY_KEY, ADMIN_KEY_KEY = "hf-token", "gateway-api-key", "gateway-admin-key"
GATEWAY_IMAGE = "hetero-gateway:local"
_PART_OF = {"app.kubernetes.io/part-of": "hetero-gateway"}
PORT = 8000
_ETC = "/etc/hetero-gateway"
_GRACE_MARGIN_S = 20
# No token, and no variables named after Services: one called "vllm" would set VLLM_PORT.
_QUIET = {"automountServiceAccountToken": False, "enableServiceLinks": False}
# Of ten seconds each: half an hour for the download of the weights.
_STARTUP_PROBES = 180

# Of a pod that is to go: the gateway hears of it, and sends nothing more; then it waits until the
# engine has nothing left. An engine that does not answer has nothing left.
DRAIN_S = 3600
DRAIN_SCRIPT = f"""\
import re, time, urllib.request
end_s = time.monotonic() + {DRAIN_S}
time.sleep(5)
while time.monotonic() < end_s:
    try:
        with urllib.request.urlopen("http://127.0.0.1:{PORT}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        break
    left = re.findall(r"^vllm:num_requests_(?:running|waiting)\\{{.*\\}} (\\S+)$", text, re.M)
    if not sum(map(float, left)):
        break
    time.sleep(1)
"""


def kubernetes_address(instance: DeployedInstance) -> str:
    """The pod's own name, in the namespace of the gateway."""
    return f"http://{instance.id}.{instance.set_name}:{PORT}"


def gateway_server() -> dict[str, Any]:
    """What the gateway's ``server`` section says beside its defaults."""
    return {
        "host": "0.0.0.0",
        "port": PORT,
        "api_key_env": API_KEY_ENV,
        "admin_key_env": ADMIN_KEY_ENV,
    }


def stateful_sets(instances: Sequence[DeployedInstance]) -> dict[str, list[DeployedInstance]]:
    """The instances by the name of their StatefulSet."""
    sets: dict[str, list[DeployedInstance]] = {}
    for instance in instances:
        sets.setdefault(instance.set_name, []).append(instance)
    return sets


def set_labels(name: str) -> dict[str, str]:
    """Of a StatefulSet's objects and pods."""
    return {"app.kubernetes.io/name": name, **_PART_OF}


def gateway_manifests(
    configuration: str, profiles: Mapping[str, str], *, finds_pods: bool = False
) -> str:
    """ConfigMap, Deployment and Service of the gateway.

    Args:
        configuration: gateway.yaml for pods.
        profiles: path below the configuration's directory to text.
        finds_pods: it asks the API server for them, and has an account that may.
    """
    labels = {"app.kubernetes.io/name": "hetero-gateway", **_PART_OF}
    # A ConfigMap's keys have no slashes; the volume puts the files into their folder.
    keys = {path.replace("/", "."): path for path in profiles}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "hetero-gateway", "labels": labels},
        "data": {"gateway.yaml": configuration} | {k: profiles[p] for k, p in keys.items()},
    }
    items = [{"key": "gateway.yaml", "path": "gateway.yaml"}]
    items += [{"key": key, "path": path} for key, path in keys.items()]
    deployment: dict[str, Any] = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "hetero-gateway", "labels": labels},
        "spec": {
            # One: it owns the ledger of loads. A second one would not know of the first one's.
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": _gateway_pod(items)},
        },
    }
    service = _service("hetero-gateway", labels, headless=False)
    objects = [config_map, deployment, service]
    if finds_pods:
        pod = deployment["spec"]["template"]["spec"]
        pod |= {"serviceAccountName": "hetero-gateway", "automountServiceAccountToken": True}
        objects = [*_account(labels), *objects]
    comment = (
        "The gateway. Its keys come from the Secret; README.md says how to make it.\n"
        "After a change of the ConfigMap: kubectl rollout restart deployment/hetero-gateway"
    )
    return documents(comment, objects)


def instance_manifests(
    instances: Sequence[DeployedInstance],
    options: DeploymentOptions,
    profiles: Mapping[str, str],
    *,
    following: bool = False,
) -> str:
    """The instances' StatefulSets and Services, and who may talk to them.

    ``following``: an autoscaler says how many, and pods wait for what they have before they go.
    """
    sets = stateful_sets(instances)
    manifests: list[dict[str, Any]] = []
    for name, members in sets.items():
        labels = set_labels(name)
        manifests.append(_service(name, labels, headless=True))
        stateful_set = _stateful_set(name, members, options, labels)
        if following:
            _let_follow(stateful_set)
        manifests.append(stateful_set)
    if options.emulate:
        # The emulated instances read their profiles from files.
        data = {path.replace("/", "."): text for path, text in profiles.items()}
        metadata = {"name": "emulated-profiles", "labels": dict(_PART_OF)}
        manifests.insert(
            0, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
        )
    manifests.append(_network_policy([*sets]))
    comment = (
        "The instances. kubernetes.io/hostname below is the plan's name of the machine: change it\n"
        "to the node's where they differ (kubectl get nodes -L kubernetes.io/hostname)."
    )
    return documents(comment, manifests)


def _gateway_pod(items: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """``items``: where the ConfigMap's keys go in the configuration's directory."""
    container = {
        "name": "gateway",
        "image": GATEWAY_IMAGE,
        "args": ["serve", "-c", f"{_ETC}/gateway.yaml", "--host", "0.0.0.0"],
        "ports": [{"name": "http", "containerPort": PORT}],
        "env": [_secret(API_KEY_ENV, API_KEY_KEY), _secret(ADMIN_KEY_ENV, ADMIN_KEY_KEY)],
        "volumeMounts": [
            {"name": "configuration", "mountPath": _ETC, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
        "livenessProbe": _probe("/livez", period_s=10, failures=3),
        "readinessProbe": _probe("/readyz", period_s=5, failures=2),
        "securityContext": _locked(),
    }
    return {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 40,
        **_QUIET,
        "containers": [container],
        "volumes": [
            {"name": "configuration", "configMap": {"name": "hetero-gateway", "items": items}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def _stateful_set(
    name: str,
    members: Sequence[DeployedInstance],
    options: DeploymentOptions,
    labels: dict[str, str],
) -> dict[str, Any]:
    first = members[0]
    pod = _emulated_pod(first, options) if options.emulate else _vllm_pod(first, options)
    pod["terminationGracePeriodSeconds"] = options.shutdown_timeout_s + _GRACE_MARGIN_S
    pod |= _QUIET
    if not options.emulate:
        pod["nodeSelector"] = {"kubernetes.io/hostname": first.machine_name}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "serviceName": name,
            "replicas": len(members),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _let_follow(stateful_set: dict[str, Any]) -> None:
    """Whoever applies the file again does not set the number back."""
    del stateful_set["spec"]["replicas"]
    pod = stateful_set["spec"]["template"]["spec"]
    pod["terminationGracePeriodSeconds"] += DRAIN_S
    command = ["python3", "-c", DRAIN_SCRIPT]
    pod["containers"][0]["lifecycle"] = {"preStop": {"exec": {"command": command}}}


def _account(labels: dict[str, str]) -> list[dict[str, Any]]:
    """Who the gateway is at the API server: it may look at pods."""
    name, group = "hetero-gateway", "rbac.authorization.k8s.io"
    metadata = {"name": name, "labels": labels}
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    role = {"apiGroup": group, "kind": "Role", "name": name}
    version = f"{group}/v1"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": version, "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": version,
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": role,
            "subjects": [{"kind": "ServiceAccount", "name": name}],
        },
    ]


def _vllm_pod(instance: DeployedInstance, options: DeploymentOptions) -> dict[str, Any]:
    resource = instance.vendor.kubernetes_resource
    mounts = [{"name": "cache", "mountPath": "/root/.cache/huggingface"}]
    cache = {"path": "/var/cache/huggingface", "type": "DirectoryOrCreate"}
    volumes: list[dict[str, Any]] = [{"name": "cache", "hostPath": cache}]
    # Tensor-parallel processes talk through shared memory; a pod has 64 MB.
    mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}})
    # A name that the hub does not have, where nobody knows the right one.
    model = options.model or "replace-me/model"
    if model.startswith("/"):
        mounts.append({"name": "model", "mountPath": model})
        volumes.append({"name": "model", "hostPath": {"path": model, "type": "Directory"}})
    container = {
        "name": "vllm",
        "image": instance.vendor.kubernetes_image,
        "command": ["vllm", "serve", _unexpanded(model)],
        "args": [*serve_arguments(instance, options), "--host", "0.0.0.0", "--port", str(PORT)],
        "env": [
            _secret("HF_TOKEN", HF_TOKEN_KEY, optional=True),
            {"name": "VLLM_NO_USAGE_STATS", "value": "1"},
        ],
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": {"limits": {resource: len(instance.devices)}},
        "volumeMounts": mounts,
        "startupProbe": _probe(paths.HEALTH, period_s=10, failures=_STARTUP_PROBES),
        "readinessProbe": _probe(paths.HEALTH, period_s=5, failures=2),
        "livenessProbe": _probe(paths.HEALTH, period_s=10, failures=6),
    }
    return {"containers": [container], "volumes": volumes}


def _emulated_pod(instance: DeployedInstance, options: DeploymentOptions) -> dict[str, Any]:
    key = instance.profile_file.replace("/", ".")
    arguments = ["emulate", "--profile", f"{_ETC}/{key}", *emulate_arguments(instance, options)]
    container = {
        "name": "emulated",
        "image": GATEWAY_IMAGE,
        "args": [*arguments, "--host", "0.0.0.0", "--port", str(PORT)],
        "ports": [{"name": "http", "containerPort": PORT}],
        "volumeMounts": [{"name": "profiles", "mountPath": _ETC, "readOnly": True}],
        "readinessProbe": _probe(paths.HEALTH, period_s=5, failures=2),
        "livenessProbe": _probe(paths.HEALTH, period_s=10, failures=6),
        "securityContext": _locked(),
    }
    return {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "profiles", "configMap": {"name": "emulated-profiles"}}],
    }


def _service(name: str, labels: dict[str, str], *, headless: bool) -> dict[str, Any]:
    ports = [{"name": "http", "port": PORT, "targetPort": "http"}]
    spec: dict[str, Any] = {"selector": labels, "ports": ports}
    if headless:
        # The gateway probes the instances itself, and wants their addresses before they are ready.
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
    }


def _network_policy(names: Sequence[str]) -> dict[str, Any]:
    """vLLM's --api-key guards only /v1/*: what protects the instances is who reaches them."""
    gateway = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "hetero-gateway"}}}
    prometheus = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
    }
    chosen = {"key": "app.kubernetes.io/name", "operator": "In", "values": list(names)}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "hetero-gateway-instances", "labels": dict(_PART_OF)},
        "spec": {
            "podSelector": {"matchExpressions": [chosen]},
            "policyTypes": ["Ingress"],
            "ingress": [
                {
                    "from": [gateway, prometheus],
                    "ports": [{"protocol": "TCP", "port": PORT}],
                }
            ],
        },
    }


def _secret(env_name: str, key: str, *, optional: bool = False) -> dict[str, Any]:
    reference: dict[str, Any] = {"name": SECRET, "key": key}
    if optional:
        reference["optional"] = True
    return {"name": env_name, "valueFrom": {"secretKeyRef": reference}}


def _probe(path: str, *, period_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _locked() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _unexpanded(text: str) -> str:
    """Kubernetes puts variables in the place of ``$(NAME)``; ``$$`` is a dollar sign."""
    return text.replace("$(", "$$(")


class _Dumper(yaml.CSafeDumper):
    """Writes a text of several lines as such, and repeats a mapping instead of pointing at it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.CSafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def documents(comment: str, documents: Sequence[dict[str, Any]]) -> str:
    text: str = yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )
    return "".join(f"# {line}\n" for line in comment.splitlines()) + text
