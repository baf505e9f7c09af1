"""A compose file for the whole plan, and the files of Prometheus and Grafana that it mounts.

Compose starts containers on one host. For one machine, the file starts everything. For several,
every host gets the same file, in which each machine's instances have a profile with the machine's
name, and gateway, Prometheus and Grafana the profile ``gateway``:

    docker compose --profile v100-box up -d      (on v100-box)
    docker compose --profile gateway up -d       (on the gateway's host)
"""

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any
from urllib.parse import urlsplit

from hetero_gateway.deploy.command import emulate_arguments, serve_arguments
from hetero_gateway.deploy.gateway_files import ADMIN_KEY_ENV, commented, dumped
from hetero_gateway.deploy.instances import DeployedInstance, DeploymentOptions, on_one_host
from hetero_gateway.deploy.template import piece

GATEWAY_FILE = "gateway.compose.yaml"
_GRACE_MARGIN_S = 20
_CONTAINER_PORT, _ADMIN_PORT = 8000, 9001
_CACHE = "huggingface-cache"
service = partial(piece, "compose.yaml")


def compose_address(instance: DeployedInstance, one_host: bool) -> str:
    """The address at which the gateway's container reaches an instance."""
    host = instance.id if one_host else instance.host
    return f"http://{host}:{instance.port}"


def compose_text(
    instances: Sequence[DeployedInstance], options: DeploymentOptions, comment: str
) -> str:
    """compose.yaml."""
    one_host = on_one_host(instances, options)
    services: dict[str, Any] = {"gateway": _gateway(options, one_host=one_host)}
    for instance in instances:
        if instance.size.machines > 1 and not options.emulate:
            continue  # its parts use the hosts' own network; commands/ has them
        make = _emulated if options.emulate else _vllm
        made = make(instance, options)
        if not one_host:
            made["profiles"] = [instance.machine_name]
            made["ports"] = [f"{instance.port}:{instance.port}"]
        services[instance.id] = made
    services |= {"prometheus": service("prometheus"), "grafana": service("grafana")}
    if not one_host:
        for name in ("gateway", "prometheus", "grafana"):
            services[name]["profiles"] = ["gateway"]
    volumes = {"prometheus-data": None}
    document = {
        "name": "hetero-gateway-plan",
        "services": services,
        "volumes": volumes if options.emulate else {_CACHE: None} | volumes,
    }
    return commented(comment) + dumped(document)


def scraped_files(urls: Mapping[str, str]) -> dict[str, str]:
    """Path to text of the target files of Prometheus and Grafana, for the instances' URLs by id."""
    packed = resources.files("hetero_gateway.deploy").joinpath("monitoring")
    files = _tree(packed, "monitoring")
    files["monitoring/prometheus/instances.yml"] = (
        "# `backend` is the id in the gateway's configuration, so that panels overlay.\n"
        + dumped([_target(instance_id, url) for instance_id, url in urls.items()])
    )
    return files


def _target(instance_id: str, url: str) -> dict[str, Any]:
    """One entry of Prometheus' file_sd_configs."""
    parts = urlsplit(url)
    labels = {"backend": instance_id}
    if parts.scheme != "http":
        labels["__scheme__"] = parts.scheme
    if parts.path.strip("/"):
        labels["__metrics_path__"] = parts.path.rstrip("/") + "/metrics"
    return {"targets": [parts.netloc], "labels": labels}


def _tree(folder: Traversable, path: str) -> dict[str, str]:
    files: dict[str, str] = {}
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        name = f"{path}/{entry.name}"
        if entry.is_dir():
            files |= _tree(entry, name)
        elif entry.name.endswith((".json", ".yaml", ".yml")):
            files[name] = entry.read_text("utf-8")
    return files


def server_section(options: DeploymentOptions) -> dict[str, Any]:
    """Where the gateway listens in its container: for clients, and for /admin.

    The engines' containers can reach both ports, so if they are not ours /admin needs a key.
    """
    section = {"host": "0.0.0.0", "port": _CONTAINER_PORT, "admin_listen": f"0.0.0.0:{_ADMIN_PORT}"}
    return section if options.emulate else section | {"admin_key_env": ADMIN_KEY_ENV}


def _gateway(options: DeploymentOptions, *, one_host: bool) -> Any:
    # Compose requires a service's variable wherever the file is used, so in a file for several
    # hosts it is optional, and the gateway itself reports that it is missing.
    missing = "?choose a key for /admin and the dashboard" if one_host else "-"
    key = {ADMIN_KEY_ENV: f"${{{ADMIN_KEY_ENV}:{missing}}}"}
    return service(
        "gateway", port=options.gateway_port, environment=None if options.emulate else key
    )


def _emulated(instance: DeployedInstance, options: DeploymentOptions) -> Any:
    words = ["emulate", "--profile", f"/etc/hetero-gateway/{instance.profile_file}"]
    words += [*emulate_arguments(instance, options), "--host", "0.0.0.0"]
    return service(
        "emulated",
        command=[*words, "--port", str(instance.port)],
        grace_s=options.shutdown_timeout_s + _GRACE_MARGIN_S,
        healthcheck=health_check("python", instance.port, "20s"),
    )


def _vllm(instance: DeployedInstance, options: DeploymentOptions) -> Any:
    words = [_escaped(word) for word in serve_arguments(instance, options)]
    words += ["--host", "0.0.0.0", "--port", str(instance.port)]
    vendor_keys = instance.vendor.compose_devices(instance.devices)
    environment = {"HF_TOKEN": "${HF_TOKEN:-}", "VLLM_NO_USAGE_STATS": "1"}
    environment |= vendor_keys.pop("environment", {})
    volumes = [f"{_CACHE}:/root/.cache/huggingface", *vendor_keys.pop("volumes", [])]
    model = options.model
    if model is not None and model.startswith("/"):  # a directory on the host
        volumes.append(f"{_escaped(model)}:{_escaped(model)}:ro")
    made = service(
        "vllm",
        image=instance.vendor.compose_image(),
        command=[_model_variable(options), *words],
        environment=environment,
        volumes=volumes,
        grace_s=options.shutdown_timeout_s + _GRACE_MARGIN_S,
        healthcheck=health_check("python3", instance.port, "30m"),
    )
    return made | vendor_keys


def _model_variable(options: DeploymentOptions) -> str:
    if options.model is None:
        return f"${{MODEL:?{options.wanted_checkpoint}}}"
    if "}" in options.model:  # would end the variable early
        return _escaped(options.model)
    return f"${{MODEL:-{_escaped(options.model)}}}"


def health_check(python: str, port: int, start_period: str, path: str = "/health") -> Any:
    """Requests a path from a server, with the Python of its own image."""
    return service("healthcheck", python=python, port=port, path=path, start_period=start_period)


def _escaped(text: str) -> str:
    """Escape for compose, which substitutes ``$NAME``: ``$$`` is a dollar sign."""
    return text.replace("$", "$$")
