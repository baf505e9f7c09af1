"""Real proxies in front of something on loopback: nginx, HAProxy and Envoy, on free ports.

Each ends with its block. ``SET_UPS`` names ways in which people set them up, from the one that
tells most of its clients to those that tell nothing.
"""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from benchmarks.envoy import address
from benchmarks.ports import free_port
from tests.fakes.envoy import end, running_envoy

START_S = 20.0

_NGINX = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream gateway {{ server 127.0.0.1:{upstream}; keepalive 4; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://gateway;
      proxy_buffering off;
      {options}
    }}
  }}
}}
"""
_HAPROXY = """\
global
  maxconn 256
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend clients
  bind 127.0.0.1:{port}
  {options}
  default_backend gateway
backend gateway
  server one 127.0.0.1:{upstream}
"""


@contextlib.asynccontextmanager
async def nginx(folder: Path, upstream: int, *options: str) -> AsyncIterator[str]:
    """Its URL. ``options``: directives of its one location."""
    port = free_port()
    text = _NGINX.format(
        folder=folder, port=port, upstream=upstream, options="\n      ".join(options)
    )
    path = folder / "nginx.conf"
    path.write_text(text, "utf-8")
    async with _listening(["nginx", "-p", str(folder), "-c", str(path)], folder, port) as url:
        yield url


@contextlib.asynccontextmanager
async def haproxy(folder: Path, upstream: int, *options: str) -> AsyncIterator[str]:
    """Its URL. ``options``: lines of its frontend."""
    port = free_port()
    text = _HAPROXY.format(port=port, upstream=upstream, options="\n  ".join(options))
    path = folder / "haproxy.cfg"
    path.write_text(text, "utf-8")
    async with _listening(["haproxy", "-db", "-f", str(path)], folder, port) as url:
        yield url


@contextlib.asynccontextmanager
async def envoy(
    folder: Path, upstream: int, route: Mapping[str, Any] | None = None, **options: Any
) -> AsyncIterator[str]:
    """Its URL. ``options``: of the HTTP connection manager; ``route``: of its one route."""
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network"
        ".http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "clients",
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
                },
            }
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": {"cluster": "gateway", "timeout": "60s"} | dict(route or {}),
                        }
                    ],
                }
            ]
        },
    } | options
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    endpoint = {"endpoint": {"address": address(upstream)}}
    document = {
        "admin": {"address": address(0)},
        "static_resources": {
            "listeners": [
                {"name": "clients", "address": address(0), "filter_chains": [{"filters": filters}]}
            ],
            "clusters": [
                {
                    "name": "gateway",
                    "type": "STATIC",
                    "connect_timeout": "5s",
                    "load_assignment": {
                        "cluster_name": "gateway",
                        "endpoints": [{"lb_endpoints": [endpoint]}],
                    },
                }
            ],
        },
    }
    async with running_envoy(document, folder) as started:
        yield started.url


@contextlib.asynccontextmanager
async def _listening(command: Sequence[str], folder: Path, port: int) -> AsyncIterator[str]:
    """A process until the block ends, once it takes connections on a loopback port."""
    log = folder / "output"
    with log.open("wb") as output:
        process = await asyncio.to_thread(
            subprocess.Popen, command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        async with asyncio.timeout(START_S):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                if process.poll() is not None:
                    raise RuntimeError(f"{command[0]} ended: {log.read_text('utf-8')[-2000:]}")
                await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        await end(process)


SetUp = Callable[[Path, int], AbstractAsyncContextManager[str]]

_VERSION = "proxy_http_version 1.1;"
_FOR = "proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;"

SET_UPS: dict[str, SetUp] = {
    "nginx, HTTP/1.0": lambda folder, upstream: nginx(folder, upstream),
    "nginx, HTTP/1.0, Host of the client": lambda folder, upstream: nginx(
        folder, upstream, "proxy_set_header Host $host;"
    ),
    "nginx, HTTP/1.1": lambda folder, upstream: nginx(folder, upstream, _VERSION),
    "nginx, HTTP/1.1, kept alive": lambda folder, upstream: nginx(
        folder, upstream, _VERSION, 'proxy_set_header Connection "";'
    ),
    "nginx, HTTP/1.1, Host of the client": lambda folder, upstream: nginx(
        folder, upstream, _VERSION, "proxy_set_header Host $http_host;"
    ),
    "nginx, HTTP/1.1, Host of the gateway": lambda folder, upstream: nginx(
        folder, upstream, _VERSION, f"proxy_set_header Host 127.0.0.1:{upstream};"
    ),
    "nginx, HTTP/1.1, X-Forwarded-For": lambda folder, upstream: nginx(
        folder, upstream, _VERSION, "proxy_set_header Host $host;", _FOR
    ),
    "nginx, HTTP/1.1, X-Forwarded-For emptied": lambda folder, upstream: nginx(
        folder, upstream, _VERSION, "proxy_set_header Host localhost;",
        'proxy_set_header X-Forwarded-For "";', 'proxy_set_header Origin "";',
    ),
    "HAProxy": lambda folder, upstream: haproxy(folder, upstream),
    "HAProxy, forwardfor": lambda folder, upstream: haproxy(
        folder, upstream, "option forwardfor"
    ),
    "HAProxy, Host localhost": lambda folder, upstream: haproxy(
        folder, upstream, "http-request set-header Host localhost"
    ),
    "HAProxy, forwarded fields removed": lambda folder, upstream: haproxy(
        folder, upstream, "http-request del-header X-Forwarded-For",
        "http-request del-header Forwarded", "http-request set-header Host 127.0.0.1",
    ),
    "Envoy": lambda folder, upstream: envoy(folder, upstream),
    "Envoy, use_remote_address": lambda folder, upstream: envoy(
        folder, upstream, use_remote_address=True
    ),
    "Envoy, use_remote_address false": lambda folder, upstream: envoy(
        folder, upstream, use_remote_address=False
    ),
    "Envoy, skip_xff_append": lambda folder, upstream: envoy(
        folder, upstream, use_remote_address=True, skip_xff_append=True
    ),
    "Envoy, no trace": lambda folder, upstream: envoy(
        folder, upstream, {"host_rewrite_literal": "localhost"}, skip_xff_append=True,
        generate_request_id=False,
    ),
}  # fmt: skip
