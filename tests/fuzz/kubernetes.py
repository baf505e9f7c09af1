"""Documents of an API server that are spoilt, read by a real source over real sockets.

Whatever is listed and watched, following ends with a ``SourceError`` or goes on, in time; what is
named is bounded and could be an instance; and the next good list is read.
"""

import asyncio
import contextlib
import json
import random
import traceback
from typing import Any

from hetero_gateway.files.discovery_config import SourceConfig
from hetero_gateway.files.instance_config import InstanceConfig
from hetero_gateway.files.link_local import is_link_local
from hetero_gateway.gateway.fleet.sources.base import MOST_INSTANCES, Found, SourceError
from hetero_gateway.gateway.fleet.sources.kubernetes import KubernetesSource
from hetero_gateway.gateway.fleet.sources.pace import Allowance, Backoff
from hetero_gateway.plain_httpx import httpx
from tests.fakes.kubernetes import pod
from tests.fakes.servers import FakeServer
from tests.fuzz.fuzzing import Findings, errors_found
from tests.fuzz.mutation import mutated_bytes, mutated_head, mutated_json
from tests.fuzz.short_ways import cuts_of, pieces_of

_PATIENCE_S = 30.0
# Documents of one life: a list, and events of a watch.
_EVENTS = 40
_AT_ONCE = 8
_LABEL = "gpu"


def _slice(name: str) -> dict[str, Any]:
    endpoints = [
        {"addresses": ["127.0.0.9"], "targetRef": {"kind": "Pod", "name": name}},
        {"addresses": ["fd00::9"], "conditions": {"ready": True, "terminating": False}},
        {"addresses": ["127.0.0.8"], "conditions": {"ready": False}},
    ]
    return {"metadata": {"name": name}, "endpoints": endpoints, "ports": [{"port": 8000}]}


def _object(rng: random.Random, resource: str) -> dict[str, Any]:
    name = f"o{rng.randrange(9)}"
    kind = "Pod" if resource == "pods" else "EndpointSlice"
    body = pod(name, "127.0.0.9", gpu="h100") if resource == "pods" else _slice(name)
    body["metadata"]["resourceVersion"] = str(rng.randrange(1000))
    return body | {"kind": kind, "apiVersion": "v1"}


def _line(rng: random.Random, resource: str) -> bytes:
    body: Any = _object(rng, resource)
    kind = rng.choice(("ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR", "WONDER"))
    if kind == "ERROR":
        body = {"kind": "Status", "code": rng.choice((410, 500)), "message": "x"}
    return _spoilt(rng, {"type": kind, "object": body})


def _spoilt(rng: random.Random, document: Any) -> bytes:
    # Half of them are good, or no watch would ever come to its second event.
    kind = rng.random()
    if kind < 0.5:
        return json.dumps(document).encode()
    data = mutated_json(rng, document)
    return mutated_bytes(rng, data) if kind > 0.9 else data


def good_list(resource: str) -> bytes:
    """One with a single instance."""
    body = _object(random.Random(1), resource)
    return json.dumps({"metadata": {"resourceVersion": "9"}, "items": [body]}).encode()


class _Server(FakeServer):
    """An API server. ``good``: it lists well, and its watches end at once."""

    def __init__(self, rng: random.Random, resource: str) -> None:
        super().__init__()
        self._rng, self._resource = rng, resource
        self.good = False
        self.sent = 0

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        watches = b"watch=1" in await reader.readuntil(b"\r\n\r\n")
        rng, status, body = self._rng, b"200 OK", b""
        if self.good:
            body = b"" if watches else good_list(self._resource)
        elif watches:
            lines = [_line(rng, self._resource) for _ in range(rng.randint(1, _EVENTS))]
            self.sent += len(lines)
            body = rng.choice((b"\n", b"\n", b"\n", b"\r\n", b"\n\n")).join(lines) + b"\n"
        else:
            items = [_object(rng, self._resource) for _ in range(rng.randint(0, 5))]
            metadata = {"resourceVersion": "7"} | ({"continue": "on"} if rng.random() < 0.3 else {})
            self.sent += 1
            body = _spoilt(rng, {"kind": "List", "metadata": metadata, "items": items})
        if not self.good and rng.random() < 0.1:
            status = rng.choice((b"410 Gone", b"500 X", b"429 X\r\nretry-after: 1", b"302 X"))
        data = b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)
        if not self.good and rng.random() < 0.1:
            data = mutated_head(rng, data)
        for piece in pieces_of(data, cuts_of(rng, data) if rng.random() < 0.3 else []):
            writer.write(piece)
        await writer.drain()
        # What is too short by its length would be waited for.
        return self.good


class _Eager(KubernetesSource):
    """Asks as soon as it may: how often is another test's."""

    def __init__(self, config: SourceConfig) -> None:
        super().__init__(config)
        self._allowance = Allowance(1e6, 1_000_000)
        self._backoff = _NoPause()

    def _client(self) -> httpx.AsyncClient:
        url = self._config.api_url or ""
        return httpx.AsyncClient(base_url=url, verify=False, trust_env=False)


class _NoPause(Backoff):
    async def pause(self, retry_after_s: float = 0.0) -> None:
        await asyncio.sleep(0)


def _source(api: _Server, resource: str) -> KubernetesSource:
    config = {
        "name": "fuzz", "kind": "kubernetes", "selector": "a=b", "namespace": "default",
        "resource": resource, "api_url": api.url, "interval_s": 0.5,
        "profiles": [{"labels": {_LABEL: "h100"}, "profile": "A100-80GB-SXM/Llama-3-8B/tp1"}],
    }  # fmt: skip
    return _Eager(SourceConfig.model_validate(config))


def _strange(found: list[Found]) -> str:
    """What of these could be no instance."""
    if len(found) > MOST_INSTANCES:
        return f"{len(found)} are named"
    for each in found:
        if not 0 < len(each.key) <= 253 or not set(each.labels) <= {_LABEL}:
            return f"{each} is named"
        host = InstanceConfig(id="a", base_url=each.base_url).base_url.partition("//")[2]
        if is_link_local(host.rpartition(":")[0]):
            return f"{each} is link-local"
    return ""


async def _follow(
    api: _Server, source: KubernetesSource, found: list[Found], findings: Findings
) -> None:
    """One life of a source; whatever ends it but an error of the API server's is a finding."""

    def tell(told: list[Found]) -> None:
        found[:] = told
        if strange := _strange(told):
            findings.add(strange, b"")

    try:
        async with asyncio.timeout(_PATIENCE_S):
            await source.follow(tell)
    except SourceError as error:
        findings.statuses[400] += 1
        if "\n" in str(error) or len(str(error)) > 500:
            findings.add(f"the error {error!r}", b"")
    except TimeoutError:
        findings.statuses[200] += 1
    except Exception:
        findings.add(traceback.format_exc(), b"")


async def fuzz_kubernetes(seed: int, count: int) -> Findings:
    """At least ``count`` documents, in lives of some."""
    findings = Findings()

    async def one(number: int) -> None:
        rng = random.Random(seed * 1000 + number)
        resource = "pods" if number % 2 else "endpointslices"
        async with _Server(rng, resource) as api:
            source, found = _source(api, resource), list[Found]()
            while api.sent * _AT_ONCE < count:
                life = asyncio.ensure_future(_follow(api, source, found, findings))
                before = api.sent
                done, _ = await asyncio.wait([life], timeout=_PATIENCE_S)
                if not done:
                    life.cancel()
                    if api.sent == before:
                        findings.add(f"nothing was asked for in {_PATIENCE_S:g} s", b"")
                if len(source._objects) > MOST_INSTANCES + 6:
                    findings.add(f"{len(source._objects)} objects are kept", b"")
            api.good = True
            found.clear()
            life = asyncio.ensure_future(_follow(api, source, found, findings))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE_S):
                    while not found and not life.done():  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            if not found:
                findings.add("a good list is not read", good_list(resource))
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
            findings.sent += api.sent

    with errors_found(findings):
        await asyncio.gather(*(one(number) for number in range(_AT_ONCE)))
    return findings
