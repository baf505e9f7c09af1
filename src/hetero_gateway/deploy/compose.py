"""A compose file for the whole plan, and the files of Prometheus and Grafana that it mounts.

Compose starts containers of one host. A plan of one machine is one file that starts everything. A
plan of several is one file too, the same on every host, in which each machine's instances have a
profile of the machine's name, and gateway, Prometheus and Grafana the profile ``gateway``:

    docker compose --profile v100-box up -d      (on v100-box)
    docker compose --profile gateway up -d       (on the gateway's host)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any
from urllib.parse import urlsplit

from hetero_gateway.deploy.command import emulate_arguments, serve_arguments
from hetero_gateway.deploy.gateway_files import ADMIN_KEY_ENV, dumped
from hetero_gateway.deploy.instances import DeployedInstance, DeploymentOptions, on_one_host

GATEWAY_FILE = "gateway.compose.yaml"
GATEWAY_IMAGE = "${HETERO_GATEWAY_IMAGE:-hetero-gateway:local}"
# The gateway's own shutdown_timeout_s is 30.
GATEWAY_GRACE = "40s"
_GRACE_MARGIN_S = 20
_CONTAINER_PORT, _ADMIN_PORT = 8000, 9001
_CACHE = "huggingface-cache"
# As docker/compose.yaml: the versions that the dashboard and the alerts were tried with.
_PROMETHEUS_IMAGE, _GRAFANA_IMAGE = "prom/prometheus:v2.55.1", "grafana/grafana:11.3.0"
_ETC = "/etc/hetero-gateway"


def compose_address(instance: DeployedInstance, options: DeploymentOptions, one_host: bool) -> str:
    """Where the gateway's container reaches an instance."""
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
            continue  # its parts find each other over the hosts' own network; commands/ has them
        make = _emulated if options.emulate else _vllm
        service = make(instance, options)
        if not one_host:
            service["profiles"] = [instance.machine_name]
            service["ports"] = [f"{instance.port}:{instance.port}"]
        services[instance.id] = service
    services |= {"prometheus": prometheus_service(), "grafana": grafana_service()}
    if not one_host:
        for name in ("gateway", "prometheus", "grafana"):
            services[name]["profiles"] = ["gateway"]
    volumes = {"prometheus-data": None}
    document = {
        "name": "hetero-gateway-plan",
        "services": services,
        "volumes": volumes if options.emulate else {_CACHE: None} | volumes,
    }
    return "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines()) + dumped(document)


def monitoring_files(
    instances: Sequence[DeployedInstance], options: DeploymentOptions
) -> dict[str, str]:
    """Path to text of what Prometheus and Grafana read."""
    one_host = on_one_host(instances, options)
    return scraped_files({i.id: compose_address(i, options, one_host) for i in instances})


def scraped_files(urls: Mapping[str, str]) -> dict[str, str]:
    """The same, for the instances at these URLs, by id."""
    packed = resources.files("hetero_gateway.deploy").joinpath("monitoring")
    files = _tree(packed, "monitoring")
    files["monitoring/prometheus/instances.yml"] = (
        "# `backend` is the id in the gateway's configuration, so that panels overlay.\n"
        + dumped([_target(instance_id, url) for instance_id, url in urls.items()])
    )
    return files


def _target(instance_id: str, url: str) -> dict[str, Any]:
    """An entry of Prometheus' file_sd_configs."""
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

    The engines' containers reach both ports, so where they are not ours /admin has a key.
    """
    section = {"host": "0.0.0.0", "port": _CONTAINER_PORT, "admin_listen": f"0.0.0.0:{_ADMIN_PORT}"}
    return section if options.emulate else section | {"admin_key_env": ADMIN_KEY_ENV}


def _gateway(options: DeploymentOptions, *, one_host: bool) -> dict[str, Any]:
    service = hardened_service()
    if not options.emulate:
        # A variable of one service has to be set wherever the file is used, so a file of several
        # hosts leaves it to the gateway to miss it.
        missing = "?choose a key for /admin and the dashboard" if one_host else "-"
        service["environment"] = {ADMIN_KEY_ENV: f"${{{ADMIN_KEY_ENV}:{missing}}}"}
    return service | {
        "ports": [
            f"127.0.0.1:{options.gateway_port}:{_CONTAINER_PORT}",
            f"127.0.0.1:{_ADMIN_PORT}:{_ADMIN_PORT}",
        ],
        "volumes": [
            f"./{GATEWAY_FILE}:{_ETC}/gateway.yaml:ro",
            f"./profiles:{_ETC}/profiles:ro",
        ],
        "stop_grace_period": GATEWAY_GRACE,
    }


def hardened_service() -> dict[str, Any]:
    """A container of the gateway's own image."""
    return {
        "image": GATEWAY_IMAGE,
        "restart": "unless-stopped",
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        # Every open stream holds two sockets in the gateway and one in an instance.
        "ulimits": {"nofile": 65536},
    }


def _emulated(instance: DeployedInstance, options: DeploymentOptions) -> dict[str, Any]:
    words = ["emulate", "--profile", f"{_ETC}/{instance.profile_file}"]
    words += [*emulate_arguments(instance, options), "--host", "0.0.0.0"]
    return {
        **hardened_service(),
        "command": [*words, "--port", str(instance.port)],
        "volumes": [f"./profiles:{_ETC}/profiles:ro"],
        "stop_grace_period": f"{options.shutdown_timeout_s + _GRACE_MARGIN_S}s",
        "healthcheck": health_check("python", instance.port, "20s"),
    }


def _vllm(instance: DeployedInstance, options: DeploymentOptions) -> dict[str, Any]:
    words = [_escaped(word) for word in serve_arguments(instance, options)]
    words += ["--host", "0.0.0.0", "--port", str(instance.port)]
    vendor_keys = dict(instance.vendor.compose_devices(instance.devices))
    environment = {"HF_TOKEN": "${HF_TOKEN:-}", "VLLM_NO_USAGE_STATS": "1"}
    environment |= vendor_keys.pop("environment", {})
    volumes = [f"{_CACHE}:/root/.cache/huggingface", *vendor_keys.pop("volumes", [])]
    model = options.model
    if model is not None and model.startswith("/"):  # a directory of the host
        volumes.append(f"{_escaped(model)}:{_escaped(model)}:ro")
    return {
        "image": instance.vendor.compose_image(),
        "restart": "unless-stopped",
        "entrypoint": ["vllm", "serve"],
        "command": [_model_variable(options), *words],
        "environment": environment,
        "volumes": volumes,
        # NCCL and the tensor-parallel processes talk through shared memory; Docker gives 64 MB.
        "shm_size": "8gb",
        "stop_grace_period": f"{options.shutdown_timeout_s + _GRACE_MARGIN_S}s",
        # The first start downloads the weights.
        "healthcheck": health_check("python3", instance.port, "30m"),
        **vendor_keys,
    }


def _model_variable(options: DeploymentOptions) -> str:
    if options.model is None:
        return f"${{MODEL:?{options.wanted_checkpoint}}}"
    if "}" in options.model:  # would end the variable
        return _escaped(options.model)
    return f"${{MODEL:-{_escaped(options.model)}}}"


def health_check(
    python: str, port: int, start_period: str, path: str = "/health"
) -> dict[str, Any]:
    """Asks a server for a path, with the Python of its own image."""
    # http.client and not urllib, which would go through a proxy named in the environment.
    code = (
        f"import http.client as h, sys; c = h.HTTPConnection('127.0.0.1', {port}, timeout=3); "
        f"c.request('GET', '{path}'); sys.exit(c.getresponse().status != 200)"
    )
    return {
        "test": ["CMD", python, "-c", code],
        "interval": "10s",
        "timeout": "5s",
        "start_period": start_period,
        "retries": 3,
    }


def prometheus_service() -> dict[str, Any]:
    """Prometheus, with the files under monitoring/."""
    etc, ours = "/etc/prometheus", "./monitoring/prometheus"
    return {
        "image": _PROMETHEUS_IMAGE,
        "restart": "unless-stopped",
        "command": [
            f"--config.file={etc}/prometheus.yml",
            "--storage.tsdb.path=/prometheus",
            "--storage.tsdb.retention.time=7d",
        ],
        "ports": ["127.0.0.1:9090:9090"],
        "volumes": [
            *(f"{ours}/{n}.yml:{etc}/{n}.yml:ro" for n in ("prometheus", "alerts", "instances")),
            "prometheus-data:/prometheus",
        ],
        **_watched("http://127.0.0.1:9090/-/ready"),
    }


def grafana_service() -> dict[str, Any]:
    """Grafana, with the files under monitoring/."""
    dashboards = f"{_ETC}/dashboards"
    return {
        "image": _GRAFANA_IMAGE,
        "restart": "unless-stopped",
        # Anyone who reaches the port may read, nobody can log in: there is no account at all.
        "environment": {
            "GF_AUTH_ANONYMOUS_ENABLED": "true",
            "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
            "GF_AUTH_DISABLE_LOGIN_FORM": "true",
            "GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION": "true",
            "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": f"{dashboards}/hetero-gateway.json",
            "GF_ANALYTICS_REPORTING_ENABLED": "false",
            "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
            "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
        },
        "ports": ["127.0.0.1:3000:3000"],
        "volumes": [
            "./monitoring/grafana/provisioning:/etc/grafana/provisioning:ro",
            f"./monitoring/grafana/dashboards:{dashboards}:ro",
        ],
        **_watched("http://127.0.0.1:3000/api/health"),
    }


def _watched(url: str) -> dict[str, Any]:
    return {
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "healthcheck": {
            "test": ["CMD", "wget", "-q", "--spider", url],
            "interval": "10s",
            "timeout": "5s",
        },
    }


def _escaped(text: str) -> str:
    """Compose puts variables in the place of ``$NAME``; ``$$`` is a dollar sign."""
    return text.replace("$", "$$")
