"""Kubernetes manifests: the gateway, and one StatefulSet for each size of instance on each machine.

Why the instances are not a Deployment: behind a Deployment's Service, kube-proxy would choose the
replica, and the gateway would see one instance instead of several. A StatefulSet with a headless
Service gives every replica its own name, and the gateway chooses.

The vendor's device plugin decides which devices of its node a pod gets. Secrets are read from the
Secret ``hetero-gateway-keys``, which the user creates; no value of it is written here.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import yaml

from hetero_gateway.deploy.command import emulate_arguments, serve_arguments
from hetero_gateway.deploy.gateway_files import ADMIN_KEY_ENV, API_KEY_ENV, commented
from hetero_gateway.deploy.instances import DeployedInstance, DeploymentOptions
from hetero_gateway.deploy.template import piece

PORT = 8000
_ETC = "/etc/hetero-gateway"
_LISTEN = ("--host", "0.0.0.0", "--port", str(PORT))
_GRACE_MARGIN_S = 20
# Settings of the gateway's ``server`` section besides its defaults.
GATEWAY_SERVER = {
    "host": "0.0.0.0",
    "port": PORT,
    "api_key_env": API_KEY_ENV,
    "admin_key_env": ADMIN_KEY_ENV,
}
# How long a pod that is being removed may wait until its engine is idle.
DRAIN_S = 3600


_piece = partial(piece, "kubernetes.yaml")


def kubernetes_address(instance: DeployedInstance) -> str:
    """The pod's own name, in the gateway's namespace."""
    return f"http://{instance.id}.{instance.set_name}:{PORT}"


def stateful_sets(instances: Sequence[DeployedInstance]) -> dict[str, list[DeployedInstance]]:
    """The instances by the name of their StatefulSet."""
    sets: dict[str, list[DeployedInstance]] = {}
    for instance in instances:
        sets.setdefault(instance.set_name, []).append(instance)
    return sets


def gateway_manifests(
    configuration: str,
    instances: Sequence[DeployedInstance],
    profiles: Mapping[str, str],
    *,
    finds_pods: bool = False,
) -> str:
    """ConfigMap, Deployment and Service of the gateway.

    Args:
        configuration: gateway.yaml for pods.
        profiles: path below the configuration's directory to text, as gateway.yaml names them.
        finds_pods: it asks the API server for pods, and has an account with that right.
    """
    # A ConfigMap's keys have no slashes; the volume puts the files into their folder.
    named = {i.gateway_profile_file for i in instances}
    files = {"gateway.yaml": configuration}
    files |= {path: text for path, text in profiles.items() if path in named}
    objects = _piece(
        "gateway",
        data={path.replace("/", "."): text for path, text in files.items()},
        items=[{"key": path.replace("/", "."), "path": path} for path in files],
        finds_pods=finds_pods,
        account="hetero-gateway" if finds_pods else None,
    )
    if finds_pods:
        objects = _piece("account") + objects
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
    """The instances' StatefulSets and Services, and who may reach them.

    ``following``: an autoscaler sets the number, and pods finish their requests before they
        stop.
    """
    sets = stateful_sets(instances)
    manifests: list[dict[str, Any]] = []
    if options.emulate:
        data = {path.replace("/", "."): text for path, text in profiles.items()}
        manifests.append(_piece("profiles", data=data))
    grace_s, lifecycle = options.shutdown_timeout_s + _GRACE_MARGIN_S, None
    if following:
        grace_s += DRAIN_S
        command = ["python3", "-c", _piece("drain", drain_s=DRAIN_S)]
        lifecycle = {"preStop": {"exec": {"command": command}}}
    kind, of_pod = ("emulated_pod", _emulated) if options.emulate else ("vllm_pod", _vllm)
    for name, members in sets.items():
        values = of_pod(members[0], options)
        pod = _piece(kind, **values, grace_s=grace_s, lifecycle=lifecycle)
        # Reapplying the file must not reset the number that an autoscaler has set.
        replicas = None if following else len(members)
        manifests += _piece("instances", name=name, replicas=replicas, pod=pod)
    manifests.append(_piece("network_policy", names=[*sets]))
    comment = (
        "The instances. kubernetes.io/hostname below is the plan's name of the machine: change it\n"
        "to the node's where they differ (kubectl get nodes -L kubernetes.io/hostname)."
    )
    return documents(comment, manifests)


def _vllm(instance: DeployedInstance, options: DeploymentOptions) -> dict[str, Any]:
    # A name that is not on the hub, as nobody knows the right one.
    model = options.model or "replace-me/model"
    is_directory = model.startswith("/")
    volume = {"name": "model", "hostPath": {"path": model, "type": "Directory"}}
    return {
        "image": instance.vendor.kubernetes_image,
        # Kubernetes substitutes variables for $(NAME); $$ is a dollar sign.
        "model": model.replace("$(", "$$("),
        "arguments": [*serve_arguments(instance, options), *_LISTEN],
        "limits": {instance.vendor.kubernetes_resource: len(instance.devices)},
        "model_mount": {"name": "model", "mountPath": model} if is_directory else None,
        "model_volume": volume if is_directory else None,
        "machine": instance.machine_name,
    }


def _emulated(instance: DeployedInstance, options: DeploymentOptions) -> dict[str, Any]:
    key = instance.profile_file.replace("/", ".")
    words = ["emulate", "--profile", f"{_ETC}/{key}", *emulate_arguments(instance, options)]
    return {"arguments": [*words, *_LISTEN]}


class _Dumper(yaml.CSafeDumper):
    """Writes multi-line text as blocks, and repeats a mapping instead of using an anchor."""

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
    return commented(comment) + text
