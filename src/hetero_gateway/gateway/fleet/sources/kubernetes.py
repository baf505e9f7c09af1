"""Kubernetes: the ready pods, or endpoints, that a label selector selects: listed, then watched.

As client-go's reflectors do it: a full list, then a watch from its resource version; when the
watch ends it is taken up again, and after ``interval_s``, or when the server says that the version
is too old (410), all is listed anew. The token is the service account's, read again for each
request, as the kubelet exchanges it. What needs a right: get, list and watch of the resource.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hetero_gateway.files.discovery_config import SourceConfig
from hetero_gateway.gateway.fleet.sources.base import (
    DEFAULT_PORT,
    MOST_INSTANCES,
    Found,
    SourceError,
    Tell,
    url_of,
)
from hetero_gateway.plain_httpx import httpx

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CLUSTER = "https://kubernetes.default.svc"
_PATHS = {
    "pods": "/api/v1/namespaces/{}/pods",
    "endpointslices": "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices",
}
_PAGE = 500
_TIMEOUT_S = 10.0
# An object has some kilobytes; a megabyte is the most that etcd takes.
_MOST_LINE_BYTES = 1 << 22
# Many changes come at once: they are reported together.
_TOGETHER_S = 0.05


class _Gone(Exception):
    """The resource version is too old: list anew."""


class KubernetesSource:
    """Follows one selector.

    Args:
        config: of the source.
        account: the directory of the service account's token, CA and namespace.
    """

    def __init__(self, config: SourceConfig, account: Path = _ACCOUNT) -> None:
        self._config = config
        self._account = account
        self._objects: dict[str, dict[str, Any]] = {}
        self._soon: asyncio.TimerHandle | None = None

    async def follow(self, tell: Tell) -> None:
        config = self._config
        try:
            namespace = config.namespace or self._read("namespace")
            client = await asyncio.to_thread(self._client)
        except (OSError, ValueError) as error:
            raise SourceError(f"the service account cannot be used: {error}") from error
        path = _PATHS[config.resource].format(namespace)
        try:
            async with client:
                while True:
                    version = await self._list(client, path)
                    tell(self._found())
                    listed_s = time.monotonic()
                    try:
                        while (left_s := listed_s + config.interval_s - time.monotonic()) > 0:
                            version = await self._watch(client, path, version, left_s, tell)
                    except _Gone:
                        continue
        except httpx.HTTPError as error:
            raise SourceError(f"the API server: {error or type(error).__name__}") from error
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            raise SourceError(f"the API server's answer cannot be read: {error!r}") from error
        finally:
            if self._soon is not None:
                self._soon.cancel()
                self._soon = None

    def _read(self, name: str) -> str:
        return (self._account / name).read_text("ascii").strip()

    def _client(self) -> httpx.AsyncClient:
        url, verify = self._config.api_url or _CLUSTER, ssl.create_default_context()
        if (ca := self._account / "ca.crt").exists():
            verify = ssl.create_default_context(cafile=ca)
        return httpx.AsyncClient(base_url=url, verify=verify, timeout=_TIMEOUT_S, trust_env=False)

    def _headers(self) -> dict[str, str]:
        try:
            return {"authorization": f"Bearer {self._read('token')}"}
        except OSError:
            return {}  # a proxy of kubectl's needs none

    async def _list(self, client: httpx.AsyncClient, path: str) -> str:
        """All objects; returns their resource version."""
        objects: dict[str, dict[str, Any]] = {}
        query = {"labelSelector": self._config.selector or "", "limit": str(_PAGE)}
        while True:
            answer = await client.get(path, params=query, headers=self._headers())
            if answer.status_code == 410 and "continue" in query:
                del query["continue"]
                objects.clear()
                continue
            answer.raise_for_status()
            page = msgspec.json.decode(answer.content)
            for each in page["items"]:
                objects[each["metadata"]["name"]] = each
            more = page["metadata"].get("continue")
            if not more or len(objects) > MOST_INSTANCES:
                self._objects = objects
                return str(page["metadata"]["resourceVersion"])
            query["continue"] = more

    async def _watch(
        self, client: httpx.AsyncClient, path: str, version: str, for_s: float, tell: Tell
    ) -> str:
        """Until the server ends it; returns the version to go on from. Raises _Gone."""
        query = {
            "labelSelector": self._config.selector or "",
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, round(for_s))),
        }
        timeout = httpx.Timeout(_TIMEOUT_S, read=for_s + _TIMEOUT_S)
        async with client.stream(
            "GET", path, params=query, headers=self._headers(), timeout=timeout
        ) as answer:
            if answer.status_code == 410:
                raise _Gone
            answer.raise_for_status()
            buffer = b""
            async for part in answer.aiter_bytes():
                *lines, buffer = (buffer + part).split(b"\n")
                if len(buffer) > _MOST_LINE_BYTES:
                    raise SourceError("the API server's event has no end")
                for line in lines:
                    if line.strip():
                        version = self._take(msgspec.json.decode(line), version, tell)
        return version

    def _take(self, event: dict[str, Any], version: str, tell: Tell) -> str:
        kind, body = event["type"], event["object"]
        if kind == "ERROR":
            if body.get("code") == 410:
                raise _Gone
            raise SourceError(f"the API server: {str(body.get('message'))[:200]}")
        metadata = body["metadata"]
        if kind != "BOOKMARK":
            if kind == "DELETED":
                self._objects.pop(metadata["name"], None)
            else:
                self._objects[metadata["name"]] = body
            if self._soon is None:
                loop = asyncio.get_running_loop()
                self._soon = loop.call_later(_TOGETHER_S, self._tell_now, tell)
        return str(metadata["resourceVersion"])

    def _tell_now(self, tell: Tell) -> None:
        self._soon = None
        tell(self._found())

    def _found(self) -> list[Found]:
        read = _of_pod if self._config.resource == "pods" else _of_slice
        found: dict[str, Found] = {}
        for body in self._objects.values():
            try:
                for each in read(body, self._config):
                    found[each.key] = each
            except (KeyError, TypeError, AttributeError, ValueError):
                continue  # an object that is not as it must be is no instance
        return list(found.values())[:MOST_INSTANCES]


def _labels(metadata: dict[str, Any]) -> dict[str, str]:
    """Labels, and annotations, whose values may have slashes."""
    both = {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}
    return {str(name): str(value) for name, value in both.items()}


def _of_pod(body: dict[str, Any], config: SourceConfig) -> Iterator[Found]:
    metadata, status = body["metadata"], body.get("status") or {}
    conditions = status.get("conditions") or []
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    if not ready or metadata.get("deletionTimestamp") or not status.get("podIP"):
        return
    url = url_of(config.scheme, status["podIP"], config.port or DEFAULT_PORT)
    if url is not None:
        yield Found(metadata["name"], url, _labels(metadata))


def _of_slice(body: dict[str, Any], config: SourceConfig) -> Iterator[Found]:
    ports = [p["port"] for p in body.get("ports") or [] if p.get("port")]
    port = config.port or (int(ports[0]) if ports else DEFAULT_PORT)
    for endpoint in body.get("endpoints") or []:
        conditions = endpoint.get("conditions") or {}
        if conditions.get("ready") is False or conditions.get("terminating"):
            continue
        address = endpoint["addresses"][0]
        url = url_of(config.scheme, address, port)
        if url is not None:
            name = (endpoint.get("targetRef") or {}).get("name") or address
            yield Found(str(name), url, _labels(body["metadata"]))
