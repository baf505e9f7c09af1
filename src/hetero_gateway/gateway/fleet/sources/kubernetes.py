"""Kubernetes: the ready pods, or endpoints, of a label selector: listed, then watched.

As in client-go's reflectors: a full list, then a watch from its resource version; when the watch
ends it is resumed, and after ``interval_s``, or when the server says that the version is too old
(410), everything is listed again. The token is the service account's, read again for each request,
as the kubelet rotates it. It needs the rights get, list and watch of the resource.

An ailing API server, or a proxy in front of it, must not be asked more often because of it.
Whatever is answered, requests come at a bounded rate; a watch that ends at once is begun again
after growing pauses, until one has lived for a while; pages, lines and their time have limits.
``kubernetes_objects`` interprets the documents.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from hetero_gateway.files.discovery_config import SourceConfig
from hetero_gateway.gateway.fleet.sources.base import MOST_INSTANCES, Found, SourceError, Tell
from hetero_gateway.gateway.fleet.sources.kubernetes_objects import Gone, ObjectReader, said
from hetero_gateway.gateway.fleet.sources.pace import Allowance, Backoff
from hetero_gateway.plain_httpx import httpx

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CLUSTER = "https://kubernetes.default.svc"
_PATHS = {
    "pods": "/api/v1/namespaces/{}/pods",
    "endpointslices": "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices",
}
_PAGE = 500
# Limit of one list: three times what all the believed instances need.
_MOST_PAGES = 27
_TIMEOUT_S = 10.0
# For a page, however slowly its bytes drip.
_PAGE_TIMEOUT_S = 30.0
# Pods have some ten kilobytes each.
_MOST_PAGE_BYTES = 1 << 25
# An object has some kilobytes; a megabyte is the most that etcd takes.
_MOST_LINE_BYTES = 1 << 22
# Events are read at no more than this rate: the rest waits in the kernel, and at the server.
_EVENT_BYTES_PER_S = 1 << 23
# A list of 500 and a watch at once, and again; then one request a second (client-go: five).
_REQUESTS_PER_S, _REQUESTS_AT_ONCE = 1.0, 4
# A watch that has lived this long may be begun again at once.
_LIVED_S = 5.0
# Many changes come at once: they are reported together, and not continuously.
_TOGETHER_S, _APART_S = 0.05, 0.5


class KubernetesSource:
    """Follows one selector.

    Args:
        config: of the source.
        account: the directory of the service account's token, CA and namespace.
    """

    def __init__(self, config: SourceConfig, account: Path = _ACCOUNT) -> None:
        self._config = config
        self._account = account
        self._reader = ObjectReader(config)
        self._objects: dict[str, tuple[Found, ...]] = {}
        self._soon: asyncio.TimerHandle | None = None
        self._told_s = 0.0
        self._allowance = Allowance(_REQUESTS_PER_S, _REQUESTS_AT_ONCE)
        self._backoff = Backoff()

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
                    while (left_s := listed_s + config.interval_s - time.monotonic()) > 0:
                        began_s = time.monotonic()
                        try:
                            version = await self._watch(client, path, version, left_s, tell)
                        except Gone:
                            version = ""
                        if time.monotonic() - began_s >= _LIVED_S:
                            self._backoff.reset()
                        else:
                            await self._backoff.pause()
                        if not version:
                            break
        except httpx.HTTPError as error:
            raise SourceError(f"the API server: {said(error or type(error).__name__)}") from error
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
        # A compressed page could have any size.
        headers = {"accept": "application/json", "accept-encoding": "identity"}
        try:
            return headers | {"authorization": f"Bearer {self._read('token')}"}
        except OSError:
            return headers  # a proxy of kubectl's needs none

    async def _list(self, client: httpx.AsyncClient, path: str) -> str:
        """List all objects; returns their resource version. Raises SourceError."""
        objects: dict[str, tuple[Found, ...]] = {}
        query = self._query({"limit": str(_PAGE)})
        for _ in range(_MOST_PAGES):
            async with self._answer(client, path, query, _TIMEOUT_S) as answer:
                if answer.status_code == 410 and "continue" in query:
                    del query["continue"]
                    objects.clear()
                    continue
                _check(answer)
                body = await _body(answer)
            page = await asyncio.to_thread(self._reader.page, body)
            objects.update(page.objects)
            if not page.more or len(objects) > MOST_INSTANCES:
                self._objects = objects
                return page.version
            query["continue"] = page.more
        raise SourceError(f"the API server's list has more than {_MOST_PAGES} pages")

    async def _watch(
        self, client: httpx.AsyncClient, path: str, version: str, for_s: float, tell: Tell
    ) -> str:
        """Watch until the server ends it, or its time has passed; returns the version to resume
        from.

        Raises Gone, SourceError.
        """
        query = self._query(
            {
                "watch": "1",
                "allowWatchBookmarks": "true",
                "resourceVersion": version,
                "timeoutSeconds": str(max(1, round(for_s))),
            }
        )
        try:
            async with (
                asyncio.timeout(for_s + _TIMEOUT_S),
                self._answer(client, path, query, for_s + _TIMEOUT_S) as answer,
            ):
                if answer.status_code == 410:
                    raise Gone
                _check(answer)
                async for line in _lines(answer):
                    change = self._reader.event(line)
                    if change is not None:
                        version = change.version
                        self._take(change.name, change.found, tell)
        except TimeoutError:
            pass  # the server does not end it in time
        return version

    def _query(self, more: dict[str, str]) -> dict[str, str]:
        return {"labelSelector": self._config.selector or "", **more}

    @asynccontextmanager
    async def _answer(
        self, client: httpx.AsyncClient, path: str, query: dict[str, str], silence_s: float
    ) -> AsyncIterator[httpx.Response]:
        """The answer to a GET, which is made as soon as the rate allows.

        Args:
            silence_s: how long the server may send nothing.
        """
        await self._allowance.take()
        timeout = httpx.Timeout(_TIMEOUT_S, read=silence_s)
        async with client.stream(
            "GET", path, params=query, headers=self._headers(), timeout=timeout
        ) as answer:
            yield answer

    def _take(self, name: str, found: tuple[Found, ...] | None, tell: Tell) -> None:
        """Apply a change of an object; "" is no object's name."""
        if not name:
            return
        if found is None:
            if not self._objects.pop(name, ()):
                return
        elif name in self._objects or len(self._objects) <= MOST_INSTANCES:
            if self._objects.get(name) == found:
                return
            self._objects[name] = found
        if self._soon is None:
            loop = asyncio.get_running_loop()
            wait_s = max(_TOGETHER_S, self._told_s + _APART_S - time.monotonic())
            self._soon = loop.call_later(wait_s, self._tell_now, tell)

    def _tell_now(self, tell: Tell) -> None:
        self._soon = None
        self._told_s = time.monotonic()
        tell(self._found())

    def _found(self) -> list[Found]:
        found = {each.key: each for many in self._objects.values() for each in many}
        return list(found.values())[:MOST_INSTANCES]


def _check(answer: httpx.Response) -> None:
    """Raises SourceError: not a good answer."""
    if answer.status_code != 200:
        after = answer.headers.get("retry-after", "")
        raise SourceError(
            f"the API server answered {answer.status_code}",
            float(after) if after.isascii() and after.isdigit() and len(after) < 9 else 0.0,
        )
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise SourceError("the API server's answer is encoded, which was not asked for")


async def _body(answer: httpx.Response) -> bytearray:
    """Raises SourceError: it is too large, or too slow."""
    body = bytearray()
    try:
        async with asyncio.timeout(_PAGE_TIMEOUT_S):
            async for part in answer.aiter_raw():
                body += part
                if len(body) > _MOST_PAGE_BYTES:
                    raise SourceError("a page of the API server's list is too large")
    except TimeoutError as error:
        raise SourceError(f"a page took more than {_PAGE_TIMEOUT_S:g} s") from error
    return body


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The non-empty lines of a watch. Raises SourceError: one has no end."""
    buffer, seen = bytearray(), 0
    async for part in answer.aiter_raw():
        buffer += part
        start = 0
        while (end := buffer.find(b"\n", max(start, seen))) >= 0:
            if line := bytes(buffer[start:end]).strip():
                yield line
            start = end + 1
        del buffer[:start]
        seen = len(buffer)
        if seen > _MOST_LINE_BYTES:
            raise SourceError("the API server's event has no end")
        await asyncio.sleep(len(part) / _EVENT_BYTES_PER_S)
