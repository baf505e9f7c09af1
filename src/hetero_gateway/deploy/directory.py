"""All files of a plan, as text, and the directory that they are written to.

    README.md            what was planned and how to start it
    plan.json            the plan as ``plan --json`` prints it, and the list of these files
    gateway.yaml         for ``hetero-gateway serve``; profiles/ has the files it names
    start.sh             everything on this machine, if one machine has everything
    commands/NAME.sh     the instances of one machine
    compose.yaml         containers; gateway.compose.yaml and monitoring/ belong to it
    kubernetes/          manifests; following/ has those that scale with the load
    requests.csv         requests of the planned lengths, for load tests

All texts are made before any is written. A new directory appears complete or not at all; with
``force`` files are replaced atomically, one at a time, and those of an older plan are removed.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from hetero_gateway.deploy import compose, kubernetes
from hetero_gateway.deploy.following import following_files
from hetero_gateway.deploy.gateway_files import gateway_text, own_address, profile_files
from hetero_gateway.deploy.instances import (
    DeployedInstance,
    DeploymentOptions,
    deployed_instances,
    on_one_host,
)
from hetero_gateway.deploy.plan_document import size_document
from hetero_gateway.deploy.readme import readme_text
from hetero_gateway.deploy.script import Program, instance_program, script_text
from hetero_gateway.errors import ConfigError, HeteroGatewayError
from hetero_gateway.files.whole_file import named, write_whole
from hetero_gateway.planner.plan import Plan

_DOCUMENT = "plan.json"
_MOST_NAMED = 3


def write_deployment(
    plan: Plan,
    options: DeploymentOptions,
    directory: Path,
    *,
    force: bool = False,
) -> list[Path]:
    """Write the best of the plan; returns the files' paths, sorted.

    Args:
        force: write into a directory that is not empty.

    Raises:
        ConfigError: the directory is not empty or cannot be one, or a name or port cannot be
            used.
        HeteroGatewayError: it cannot be written.
    """
    files = render_deployment(plan, options)
    check_directory(directory, force=force)
    try:
        if directory.exists() and any(directory.iterdir()):
            _replace(directory, files)
        else:
            _create(directory, files)
    except OSError as error:
        raise HeteroGatewayError(f"{directory}: cannot be written: {error.strerror}") from error
    return sorted(directory / name for name in files)


def check_directory(directory: Path, *, force: bool) -> None:
    """Raises ConfigError if a plan must not be written there; call it before a long search."""
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"-o: {directory} is a file; name a directory")
    with named(f"-o: {directory}", "read"):
        not_empty = directory.is_dir() and any(directory.iterdir())
    if not_empty and not force:
        raise ConfigError(f"-o: {directory} is not empty; name another, or give --force")


def write_beside(files: Mapping[str, str], directory: Path, *, force: bool = False) -> list[Path]:
    """Write files into a directory that may contain others; returns their paths, sorted.

    Args:
        force: replace those that exist.

    Raises:
        ConfigError: some exist already; nothing was written.
        HeteroGatewayError: one cannot be written.
    """
    existing = sorted(name for name in files if (directory / name).exists())
    if existing and not force:
        which = ", ".join(existing[:_MOST_NAMED]) + (", …" if len(existing) > _MOST_NAMED else "")
        raise ConfigError(f"{directory}: has {which} already; name another with -o, or --force")
    try:
        _write(directory, files)
    except OSError as error:
        raise HeteroGatewayError(f"{directory}: cannot be written: {error.strerror}") from error
    return sorted(directory / name for name in files)


def render_deployment(plan: Plan, options: DeploymentOptions) -> dict[str, str]:
    """Relative path to text; deterministic for the same plan and options."""
    instances = deployed_instances(plan, options)
    serving = [i for i in instances if not i.rank]
    files = profile_files(serving, options)
    files |= _gateway_files(plan, serving, options)
    files |= _scripts(instances, options)
    one_host = on_one_host(serving, options)
    urls = {instance.id: compose.compose_address(instance, one_host) for instance in serving}
    files |= compose.scraped_files(urls)
    contained = [i for i in serving if options.emulate or i.size.machines == 1]
    if contained:
        files |= _kubernetes_files(plan, contained, options, profile_files(contained, options))
    if options.workload:
        rows = "".join(f"{prompt},{output}\n" for prompt, output in options.workload)
        files["requests.csv"] = f"input_tokens,output_tokens\n{rows}"
    files["README.md"] = readme_text(plan, instances, options)
    files[_DOCUMENT] = _document(instances, options, [*files, _DOCUMENT])
    return dict(sorted(files.items()))


def _gateway_files(
    plan: Plan, instances: Sequence[DeployedInstance], options: DeploymentOptions
) -> dict[str, str]:
    one_host = on_one_host(instances, options)
    bare = gateway_text(
        instances,
        options,
        plan.policy,
        base_url=own_address,
        comment="hetero-gateway serve -c gateway.yaml",
        splits=True,
    )
    contained = gateway_text(
        instances,
        options,
        plan.policy,
        base_url=lambda instance: compose.compose_address(instance, one_host),
        comment="The gateway's configuration in compose.yaml.",
        server=compose.server_section(options),
    )
    comment = (
        "Gateway, instances, Prometheus and Grafana. README.md says how to start them.\n"
        "Ports of the gateway, Prometheus and Grafana are published on 127.0.0.1 only."
    )
    if not one_host:
        comment += (
            "\nOne file for all hosts: each starts its own part by its profile's name. The"
            "\ninstances' ports are published on all addresses; let only the gateway reach them."
        )
    return {
        "gateway.yaml": bare,
        compose.GATEWAY_FILE: contained,
        "compose.yaml": compose.compose_text(instances, options, comment),
    }


def _scripts(instances: Sequence[DeployedInstance], options: DeploymentOptions) -> dict[str, str]:
    one_host = on_one_host(instances, options)
    listen = "127.0.0.1" if one_host else "0.0.0.0"
    kind = "emulated" if options.emulate else "vLLM"
    machines: dict[str, list[DeployedInstance]] = {}
    for instance in instances:
        machines.setdefault(instance.machine_name, []).append(instance)
    files = {}
    for name, members in machines.items():
        programs = [instance_program(i, options, listen) for i in members]
        title = f"Starts the {kind} instances of machine {name}."
        files[f"commands/{name}.sh"] = script_text(title, programs, options, up="..")
    if one_host:
        programs = [instance_program(i, options, listen) for i in instances]
        serve = "hetero-gateway serve -c gateway.yaml"
        programs.append(Program("gateway", options.gateway_port, serve))
        title = f"Starts the {kind} instances and the gateway in front of them."
        files["start.sh"] = script_text(title, programs, options, up=".")
    return files


def _kubernetes_files(
    plan: Plan,
    instances: Sequence[DeployedInstance],
    options: DeploymentOptions,
    profiles: Mapping[str, str],
) -> dict[str, str]:
    configuration = gateway_text(
        instances,
        options,
        plan.policy,
        base_url=kubernetes.kubernetes_address,
        comment="The gateway's configuration in its pod.",
        server=kubernetes.GATEWAY_SERVER,
    )
    manifests = kubernetes.gateway_manifests(configuration, instances, profiles)
    return following_files(instances, options, plan.policy, profiles) | {
        "kubernetes/gateway.yaml": manifests,
        "kubernetes/instances.yaml": kubernetes.instance_manifests(instances, options, profiles),
    }


def _document(
    instances: Sequence[DeployedInstance], options: DeploymentOptions, files: Sequence[str]
) -> str:
    """plan.json: the plan, which part of it is deployed, and the list of written files."""
    deployed = [
        {
            "id": i.id,
            "machine": i.machine.id,
            "accelerator": i.machine.accelerator,
            **size_document(i.size),
            **({"node_rank": i.rank} if i.size.machines > 1 else {}),
            "devices": list(i.devices),
            "base_url": own_address(i),
            "profile": i.profile_file,
        }
        for i in instances
    ]
    more: dict[str, Any] = {
        "emulated": options.emulate,
        "time_scale": options.time_scale if options.emulate else None,
        "instances": deployed,
        "files": sorted(files),
    }
    return json.dumps({**options.document, "deployment": more}, indent=2, allow_nan=False) + "\n"


def _create(directory: Path, files: Mapping[str, str]) -> None:
    """Create a new or empty directory: built next to it, then renamed."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _write(made, files)
        made.chmod(0o755)
        made.replace(directory)  # allowed onto an empty directory
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _replace(directory: Path, files: Mapping[str, str]) -> None:
    stale = set(_listed_files(directory)) - set(files)
    _write(directory, files)
    for name in stale:
        with contextlib.suppress(OSError):
            (directory / name).unlink()


def _listed_files(directory: Path) -> list[str]:
    """The files of an earlier plan, by its own list; none outside the directory."""
    try:
        listed = json.loads((directory / _DOCUMENT).read_text("utf-8"))["deployment"]["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if not isinstance(listed, list):
        return []
    names = [name for name in listed if isinstance(name, str)]
    return [n for n in names if not PurePosixPath(n).is_absolute() and ".." not in n.split("/")]


def _write(directory: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text, mode=0o755 if path.suffix == ".sh" else 0o644)
