"""An API server that is ill, or hostile: it is asked seldom, and what it says is bounded."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from hetero_gateway.files.discovery_config import SourceConfig
from hetero_gateway.gateway.fleet.sources import kubernetes, pace
from hetero_gateway.gateway.fleet.sources.base import MOST_INSTANCES, SourceError
from hetero_gateway.gateway.fleet.sources.kubernetes_objects import Gone, ObjectReader
from tests.fakes.kubernetes import pod
from tests.fakes.running import RunningGateway, eventually, running_gateway
from tests.gateway.fleet.test_discovery import config_of

# What a list, or a watch, is answered with; nothing: the connection is closed.
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
_TOO_MANY = 1000


def answered(
    document: Any, status: int = 200, headers: str = "", *, version: str = "HTTP/1.1"
) -> Answer:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()

    async def answer(writer: asyncio.StreamWriter) -> None:
        head = f"{version} {status} X\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
        writer.write(head.encode() + body)

    return answer


def streamed(*parts: bytes, pause_s: float = 0.0, for_ever: bool = False) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for part in itertools.cycle(parts) if for_ever else parts:
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
            await asyncio.sleep(pause_s)
        writer.write(b"0\r\n\r\n")

    return answer


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def silent(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


def listing(*items: Any, version: Any = "7", more: Any = None) -> dict[str, Any]:
    metadata = {"resourceVersion": version} | ({} if more is None else {"continue": more})
    return {"metadata": metadata, "items": list(items)}


def event(kind: str, body: Any) -> bytes:
    return json.dumps({"type": kind, "object": body}).encode() + b"\n"


ITEM = pod("a", "127.0.0.9")
GOOD = answered(listing(ITEM))
ENDLESS = answered(listing(ITEM, more="on"))
EXPIRED = event("ERROR", {"code": 410, "message": "too old resource version"})


class ApiServer:
    """Answers lists in one way and watches in another; ``asked_s``: when."""

    def __init__(self, list_: Answer, watch: Answer) -> None:
        self._list, self._watch = list_, watch
        self.asked_s: list[float] = []
        self.targets: list[str] = []
        self.too_many = asyncio.Event()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.transport.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                self.targets.append(head.decode().split(" ")[1])
                self.asked_s.append(asyncio.get_running_loop().time())
                if len(self.asked_s) > _TOO_MANY:
                    self.too_many.set()
                    return
                await (self._watch if "watch=1" in self.targets[-1] else self._list)(writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def followed(
    list_: Answer, watch: Answer, **source: Any
) -> AsyncIterator[tuple[RunningGateway, ApiServer]]:
    api = ApiServer(list_, watch)
    server = await asyncio.start_server(api.connection, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    config = {
        "name": "pods", "kind": "kubernetes", "selector": "app=vllm", "api_url": url,
        "namespace": "default",
    } | source  # fmt: skip
    try:
        async with running_gateway(config_of(config)) as running:
            yield running, api
    finally:
        server.close()


ILL: dict[str, tuple[Answer, Answer]] = {
    "watches end at once": (GOOD, answered(b"")),
    "watches end after an event": (GOOD, streamed(event("MODIFIED", ITEM | {"status": {}}))),
    "watches are closed": (GOOD, closed),
    "watches are 410": (GOOD, answered({}, 410)),
    "watches say 410": (GOOD, streamed(EXPIRED)),
    "watches are 500": (GOOD, answered({}, 500)),
    "watches are no JSON": (GOOD, streamed(b"{]\n")),
    "watches say an error": (GOOD, streamed(event("ERROR", {"code": 500, "message": "x\ny"}))),
    "watches of unknown kinds": (GOOD, streamed(event("WONDER", ITEM), event("ADDED", [1]))),
    "watches with odd versions": (
        GOOD, streamed(event("BOOKMARK", {"metadata": {"resourceVersion": {"a": 1}}}))
    ),
    "watches that never end a line": (GOOD, streamed(b"x" * 65536, for_ever=True)),
    "lists are 410": (answered({}, 410), closed),
    "lists are 401": (answered({}, 401), closed),
    "lists are closed": (closed, closed),
    "lists are 429": (answered({}, 429, "retry-after: 1\r\n"), closed),
    "lists are 503 for a day": (answered({}, 503, "retry-after: 86400\r\n"), closed),
    "lists are 503 for a negative time": (answered({}, 503, "retry-after: -5\r\n"), closed),
    "lists are redirected": (answered({}, 302, "location: /api/v1/namespaces\r\n"), closed),
    "lists never end": (ENDLESS, closed),
    "lists are no JSON": (answered(b"[[["), closed),
    "lists are something else": (answered([1, 2]), closed),
    "lists have odd versions": (answered(listing(version={"a": []})), closed),
    "lists have long versions": (answered(listing(version="9" * 5000)), closed),
    "lists have odd continues": (answered(listing(ITEM, more=["x"])), closed),
    "lists have long continues": (answered(listing(ITEM, more="x" * 20_000)), closed),
    "lists are compressed": (answered(b"x", 200, "content-encoding: gzip\r\n"), closed),
    "lists drip": (streamed(b" ", pause_s=0.5, for_ever=True), closed),
    "lists are silent": (silent, closed),
}  # fmt: skip


@pytest.mark.parametrize("ill", ILL)
async def test_whatever_an_api_server_answers_it_is_asked_twice_a_second_at_most(ill: str) -> None:
    async with followed(*ILL[ill]) as (_, api):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(120):
                await api.too_many.wait()
        asked_s = api.asked_s
    assert not api.too_many.is_set()
    assert len(asked_s) <= 130
    for first_s, last_s in zip(asked_s, asked_s[8:], strict=False):
        assert last_s - first_s >= 4  # nine in less than that would be more
    # And what is ill is asked ever later, unless it is in the middle of a list.
    if ill != "lists never end":
        assert len([at_s for at_s in asked_s if at_s > asked_s[0] + 60]) <= 8


async def test_a_watch_that_has_lived_is_begun_again_at_once() -> None:
    def lives(for_s: float) -> Answer:
        return streamed(event("BOOKMARK", {"metadata": {"resourceVersion": "8"}}), pause_s=for_s)

    for for_s, least, most in ((20, 6, 8), (0.1, 3, 9)):
        async with followed(GOOD, lives(for_s), interval_s=600) as (_, api):
            await eventually(lambda: "watch=1" in "".join(api.targets))
            await asyncio.sleep(120)
            watches = [target for target in api.targets if "watch=1" in target]
            assert least <= len(watches) <= most
            assert "resourceVersion=8" in watches[-1]


async def test_retry_after_is_heeded_but_not_for_ever() -> None:
    for wanted, least_s, most_s in (("20", 20, 21), ("86400", 60, 61), ("soon", 0.4, 0.8)):
        busy = answered({}, 503, f"retry-after: {wanted}\r\n")
        async with followed(busy, closed) as (running, api):
            await eventually(lambda: len(api.asked_s) > 1, within_s=200)
            assert least_s <= api.asked_s[1] - api.asked_s[0] <= most_s
            [follower] = running.gateway.discovery.followers()
            assert follower.problem == "the API server answered 503"


async def test_pages_are_few_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()

    async def endless(writer: asyncio.StreamWriter) -> None:
        items = [pod(f"p{next(numbers)}", "127.0.0.9") for _ in range(3)]
        await answered(listing(*items, more="on"))(writer)

    async with followed(endless, closed) as (running, api):
        await eventually(lambda: running.gateway.discovery.followers()[0].problem != "")
        assert len(api.asked_s) == kubernetes._MOST_PAGES
        assert "pages" in running.gateway.discovery.followers()[0].problem
        assert not running.gateway.fleet.instances
    monkeypatch.setattr(kubernetes, "_MOST_PAGE_BYTES", 1 << 16)
    async with followed(answered(b" " * (1 << 17)), closed) as (running, _):
        await eventually(lambda: running.gateway.discovery.followers()[0].problem != "")
        assert "too large" in running.gateway.discovery.followers()[0].problem


async def test_a_watch_brings_no_more_objects_than_are_believed() -> None:
    added = b"".join(event("ADDED", _versioned(f"p{n}")) for n in range(3 * MOST_INSTANCES))
    source = kubernetes.KubernetesSource(_config())
    for line in added.splitlines():
        change = source._reader.event(line)
        assert change is not None
        source._take(change.name, change.found, lambda found: None)
    assert len(source._objects) == MOST_INSTANCES + 1
    assert len(source._found()) == MOST_INSTANCES
    assert source._soon is not None
    source._soon.cancel()


async def test_a_flood_of_events_leaves_the_loop_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "_EVENT_BYTES_PER_S", 1 << 18)
    line = event("MODIFIED", _versioned("a"))
    flood = streamed(line * 200, for_ever=True)
    async with followed(GOOD, flood, interval_s=600) as (running, _):
        await eventually(lambda: list(running.gateway.fleet.instances) == ["a"])
        loop = asyncio.get_running_loop()
        began_s, turns = loop.time(), 0
        while loop.time() < began_s + 1:
            await asyncio.sleep(0.01)
            turns += 1
        assert turns > 50


def _config(**fields: Any) -> SourceConfig:
    fields = {"name": "pods", "kind": "kubernetes", "selector": "app=vllm"} | fields
    return SourceConfig.model_validate(fields)


def _versioned(name: str, **more: Any) -> dict[str, Any]:
    body = pod(name, "127.0.0.9")
    body["metadata"]["resourceVersion"] = "9"
    return body | more


def test_only_events_of_the_kind_that_is_followed_change_anything() -> None:
    reader = ObjectReader(_config())
    change = reader.event(event("ADDED", _versioned("a", kind="Pod")))
    assert change is not None
    assert (change.name, len(change.found or ())) == ("a", 1)
    assert reader.event(event("WONDER", _versioned("a"))) is None
    other = reader.event(event("ADDED", _versioned("a", kind="Service")))
    assert other is not None
    assert other.name == ""
    gone = reader.event(event("DELETED", _versioned("a")))
    assert gone is not None
    assert (gone.name, gone.found) == ("a", None)
    with pytest.raises(Gone):
        reader.event(EXPIRED)
    for odd in (
        b"{", b"[]", b"null", b'{"type":"ADDED"}', b'{"type":1,"object":{}}',
        event("ADDED", {"metadata": {"name": ["a"], "resourceVersion": "1"}}),
        event("ADDED", _versioned("a") | {"metadata": {"name": "a"}}),
        event("ERROR", {"code": 500, "message": "two\nlines"}), b"\xff\xfe",
    ):  # fmt: skip
        with pytest.raises(SourceError) as raised:
            reader.event(odd)
        assert "\n" not in str(raised.value)


def test_an_object_that_is_not_as_it_must_be_is_no_instance() -> None:
    reader = ObjectReader(_config())
    for status in (
        5, [], {"podIP": 5}, {"podIP": "127.0.0.9"}, {"podIP": "169.254.169.254"},
        {"podIP": "127.0.0.9", "conditions": [{"type": "Ready", "status": True}]},
        {"podIP": "127.0.0.9", "conditions": {"Ready": "True"}},
        {"podIP": "[", "conditions": [{"type": "Ready", "status": "True"}]},
    ):  # fmt: skip
        change = reader.event(event("MODIFIED", _versioned("a", status=status)))
        assert change is not None
        assert change.found == (), status
    slices = ObjectReader(_config(resource="endpointslices"))
    for port, endpoints in (
        (0x10000, [{"addresses": ["127.0.0.9"]}]), (-1, [{"addresses": ["127.0.0.9"]}]),
        (8000, [{"addresses": []}]), (8000, [{}]), (8000, {"addresses": ["127.0.0.9"]}),
        (8000, [{"addresses": [7]}]), ("http", [{"addresses": ["127.0.0.9"]}]),
    ):  # fmt: skip
        body = {"ports": [{"port": port}], "endpoints": endpoints}
        change = slices.event(event("ADDED", _versioned("s", **body)))
        assert change is not None
        assert change.found == (), (port, endpoints)


async def test_pauses_grow_with_jitter_and_an_allowance_holds_in_the_long_run() -> None:
    loop, backoff, pauses = asyncio.get_running_loop(), pace.Backoff(), list[float]()
    for _ in range(9):
        began_s = loop.time()
        await backoff.pause()
        pauses.append(loop.time() - began_s)
    steps = [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert all(a - 0.01 <= b <= 1.5 * a + 0.1 for a, b in zip(steps, pauses, strict=True))
    assert len({round(pause_s, 3) for pause_s in pauses[-3:]}) == 3
    allowance, began_s = pace.Allowance(2.0, 5), loop.time()
    for _ in range(25):
        await allowance.take()
    assert 9.9 <= loop.time() - began_s <= 10.1
