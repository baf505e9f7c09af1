"""The starter files that ``init`` writes, for users who have only the package.

    gateway.yaml     for ``hetero-gateway serve``, with what the instances reported
    compose.yaml     the gateway, Prometheus and Grafana as containers, on the host's own network
    Dockerfile       the gateway's image; wheels/ is for a wheel that is in no package index
    monitoring/      the files of Prometheus and Grafana
    profiles/        for the results of `profile`

What servers reported is put in comments, and only as printable text: it is shown and never parsed.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from hetero_gateway import __version__
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.model_names import same_model
from hetero_gateway.deploy import compose, template
from hetero_gateway.deploy.gateway_files import commented, dumped
from hetero_gateway.files.setup_warnings import same_address

GATEWAY_FILE = "gateway.yaml"
_PORTS = (8000, 8080, 8088)
_LOOPBACK = "127.0.0.1"
_EXAMPLE = "http://127.0.0.1:8001"
_MOST_NAMES, _MOST_PROFILES = 5, 4
_LONGEST_ID = 63


@dataclass(frozen=True, slots=True)
class ProbedServer:
    """A server that will be an instance, and what it reported.

    Args:
        problem: why it did not answer; "": it did.
        served: its models with their context windows in tokens.
    """

    base_url: str
    problem: str = ""
    served: Mapping[str, int | None] = field(default_factory=dict)
    version: str = "unknown"
    has_metrics: bool = False
    kv_capacity_tokens: int | None = None
    prefix_caching: bool | None = None


def starter_files(
    servers: Sequence[ProbedServer], profiles: Mapping[str, Profile], api_key_env: str | None = None
) -> dict[str, str]:
    """Relative path to text; deterministic for the same arguments.

    Args:
        servers: those that were asked; none: an example takes their place.
        profiles: the built-in ones, by name.
        api_key_env: the environment variable with the servers' key.
    """
    named = _named(servers)
    port = _free_port(servers)
    urls = {name: server.base_url for name, server in named.items()} or {"vllm-0": _EXAMPLE}
    entries = ""
    for name, server in named.items():
        entries += _comment(_said(server)) + _entry(name, server.base_url, api_key_env)
        entries += _profile_comment(name, server, profiles, api_key_env) + "\n"
    example = "" if named else _entry("vllm-0", _EXAMPLE, api_key_env)
    values = {"port": port, "example": example, "instances": entries}
    container = resources.files("hetero_gateway.deploy").joinpath("container", "Dockerfile")
    files = compose.scraped_files(urls)
    prometheus = "monitoring/prometheus/prometheus.yml"
    files[prometheus] = files[prometheus].replace("gateway:8000", f"gateway:{port}")
    return files | {
        GATEWAY_FILE: template.text("gateway.yaml", values).rstrip("\n") + "\n",
        "compose.yaml": _compose_text(port, api_key_env),
        "Dockerfile": container.read_text("utf-8").replace("@VERSION@", __version__),
        "profiles/README": "What `hetero-gateway profile` measured, for gateway.yaml to name.\n",
        "wheels/README": template.text("wheels.txt", {}),
    }


def _named(servers: Sequence[ProbedServer]) -> dict[str, ProbedServer]:
    """Each server with an id of its own; one address is one server."""
    named: dict[str, ProbedServer] = {}
    distinct: dict[str, ProbedServer] = {}
    for server in servers:
        distinct.setdefault(same_address(server.base_url), server)
    for server in distinct.values():
        parts = urlsplit(server.base_url)
        host = "vllm" if _is_loopback(server) else parts.hostname or ""
        words = (host, str(parts.port or ""), parts.path)
        stem = "-".join(filter(None, (re.sub(r"[^A-Za-z0-9.]+", "-", w).strip("-") for w in words)))
        name = stem = stem[-_LONGEST_ID + 3 :].strip("-.")
        number = 1
        while name in named:
            number += 1
            name = f"{stem}-{number}"
        named[name] = server
    return named


def _is_loopback(server: ProbedServer) -> bool:
    return urlsplit(same_address(server.base_url)).hostname == _LOOPBACK


def _free_port(servers: Iterable[ProbedServer]) -> int:
    """A port for the gateway that no server of the same machine has."""
    taken = {urlsplit(server.base_url).port for server in servers if _is_loopback(server)}
    return next((port for port in _PORTS if port not in taken), 0)


def _entry(name: str, url: str, api_key_env: str | None) -> str:
    text = f"  - id: {name}\n    base_url: {json.dumps(url)}\n"
    return text + ("" if api_key_env is None else f"    api_key_env: {api_key_env}\n")


def _said(server: ProbedServer) -> str:
    if server.problem:
        return f"It did not answer: {server.problem}"
    names = [
        name + (f" (at most {tokens} tokens)" if tokens else "")
        for name, tokens in list(server.served.items())[:_MOST_NAMES]
    ]
    if (more := len(server.served) - _MOST_NAMES) > 0:
        names.append(f"{more} more")
    version = "of an unknown version" if server.version == "unknown" else server.version
    said = f"vLLM {version}; serves {', '.join(names)}."
    if not server.has_metrics:
        return said + " It has no vLLM metrics: its KV cache is taken to be as its profile says."
    if server.kv_capacity_tokens is not None:
        said += f" KV cache: {server.kv_capacity_tokens} tokens."
    if server.prefix_caching is False:
        said += " It was started without prefix caching."
    return said


def _profile_comment(
    name: str, server: ProbedServer, profiles: Mapping[str, Profile], api_key_env: str | None
) -> str:
    """A comment on how to give the cost of a request there."""
    key = "" if api_key_env is None else f" --api-key-env {api_key_env}"
    measured = f"profiles/{name}.yaml"
    text = (
        "What a request costs there; without it, speed is learnt from the traffic alone. Measured "
        "in at most ten minutes, while nobody else uses the server:\n"
        f"  hetero-gateway profile {server.base_url}{key} -o {measured} --gpu NAME\n"
    )
    if near := _nearest(server, profiles):
        text += f"Or a built-in one of this model: {', '.join(near)}\n"
    return _comment(text + f"profile: {measured}", indent=4)


def _nearest(server: ProbedServer, profiles: Mapping[str, Profile]) -> list[str]:
    """Profiles of the served model, those with a similar KV cache first."""

    def distance(profile: Profile) -> float:
        if server.kv_capacity_tokens is None:
            return 0.0
        return abs(math.log(profile.kv_capacity_tokens / server.kv_capacity_tokens))

    fitting = [
        profile
        for profile in profiles.values()
        if any(same_model(profile.model, model) for model in server.served)
    ]
    return [p.name for p in sorted(fitting, key=lambda p: (distance(p), p.name))[:_MOST_PROFILES]]


def _comment(text: str, indent: int = 2) -> str:
    """Comment lines, all printable, whatever a server reported."""
    lines = []
    for line in text.splitlines():
        printable = "".join(c if c.isprintable() else "?" for c in line)
        own = re.match(" *", printable)
        assert own is not None
        lines += _wrapped(printable, 98 - indent, own[0])
    return "".join(f"{' ' * indent}# {line}\n" for line in lines)


def _wrapped(line: str, width: int, start: str) -> list[str]:
    """Lines of at most this many characters; a command stays whole."""
    if start:
        return [line]
    lines, rest = [], line
    while len(rest) > width and (cut := rest.rfind(" ", 1, width)) > 0:
        lines.append(rest[:cut])
        rest = rest[cut + 1 :]
    return [*lines, rest]


def _compose_text(port: int, api_key_env: str | None) -> str:
    key = {api_key_env: f"${{{api_key_env}:?the servers want a key}}"}
    gateway = compose.service(
        "gateway_on_host",
        healthcheck=compose.health_check("python", port, "20s", "/livez"),
        environment=None if api_key_env is None else key,
    )
    prometheus = _on_host(compose.service("prometheus"), "gateway")
    prometheus["command"].append(f"--web.listen-address={_LOOPBACK}:9090")
    grafana = _on_host(compose.service("grafana"), "prometheus")
    grafana["environment"]["GF_SERVER_HTTP_ADDR"] = _LOOPBACK
    document = {
        "name": "hetero-gateway",
        "services": {"gateway": gateway, "prometheus": prometheus, "grafana": grafana},
        "volumes": {"prometheus-data": None},
    }
    comment = compose.service("init_comment", port=port)
    return commented(comment) + dumped(document)


def _on_host(service: dict[str, Any], asked: str) -> dict[str, Any]:
    """A service on the host's network that still reaches its target by name."""
    del service["ports"]
    return service | {"network_mode": "host", "extra_hosts": [f"{asked}:{_LOOPBACK}"]}
