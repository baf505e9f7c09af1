"""A gateway on a free loopback port, under a real uvicorn in the test's own event loop."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import httpx
from fastapi.dependencies import models

from hetero_gateway.cli.made_key import dashboard_address
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.gateway.admission.clients import describe_clients
from hetero_gateway.gateway.request import byte_scans
from hetero_gateway.http.protocol import Service
from hetero_gateway.scaleout.workers import SECRET_ENV
from hetero_gateway.scaleout.workers.hub import listen
from hetero_gateway.serve.app import App, create_app
from hetero_gateway.serve.control import api
from hetero_gateway.serve.processes.worker import Worker
from hetero_gateway.serve.server import BACKLOG, NOTHING_GIVEN, GatewayServer, Given
from hetero_gateway.serve.wiring.gateway import Gateway, Parts
from tests.fakes.admin_key import kept
from tests.fakes.vllm import FakeInstance, bound

FAST = "V100-32GB-NVLink2/Llama-3-8B/tp4"
SLOW = "V100-32GB-NVLink2/Llama-3-8B/tp1"
CHAT = "/v1/chat/completions"


# Loaded when they are needed first, which takes time: no test is to wait for that.
_LOADED = api, byte_scans
_FASTAPIS_CACHES = [each for each in vars(models).values() if hasattr(each, "cache_clear")]


def chat(text: str = "hello", model: str = "m", **fields: Any) -> dict[str, Any]:
    """A chat's body."""
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


def faked(**fake: Any) -> dict[str, Any]:
    """A chat of which an instance makes this: a stream where it has events."""
    return chat(stream="events" in fake, fake=fake)


@dataclass
class RunningGateway:
    url: str
    app: App
    server: GatewayServer
    workers: list[Worker] = dataclasses.field(default_factory=list)
    ports: list[int] = dataclasses.field(default_factory=list)

    @property
    def port(self) -> int:
        """Of the workers, where there are several, in turn."""
        self.ports.append(self.ports.pop(0))
        return self.ports[-1]

    @property
    def gateway(self) -> Gateway:
        return self.app.gateway

    @property
    def dashboard(self) -> str:
        """The link that ``serve`` prints on a terminal, of a gateway that made a key."""
        assert self.gateway.made_admin_key is not None
        return dashboard_address(self.url, self.gateway.made_admin_key)

    def processes(self) -> list[Gateway | Worker]:
        """What would be processes: the gateway, and its workers."""
        return [self.gateway, *self.workers]

    def loads(self) -> list[tuple[float, int, int]]:
        return loads_of(self.gateway)

    def progress(self) -> list[list[float]]:
        """Each instance's sums of sequences and tokens, as the queue's policy sees them."""
        scheduler = self.gateway.fleet.scheduler
        seen = [scheduler.members.snapshot(i) for i in self.gateway.fleet.instances]
        return [
            [each.waiting, each.streaming, each.waiting_prompt_tokens, each.context_tokens]
            for each in seen
        ]

    def settled(self) -> bool:
        """Every load, every count and every sum is exactly 0, and nobody waits."""
        return (
            all(load == (0.0, 0, 0) for load in self.loads())
            and self.gateway.fleet.scheduler.queued == 0
            and len(self.gateway.placement) == 0
            and not any(any(row) for row in self.progress())
            and all(worker.remote.idle for worker in self.workers)
            and (self.gateway.hub is None or not any(map(len, self.gateway.hub.sessions)))
        )

    async def used_by(self, client: str) -> dict[str, Any]:
        """What a client has used, as /admin/clients shows it."""
        self.gateway.metrics.catch_up()
        described = describe_clients(self.gateway.admission, time.monotonic())
        return {row["name"]: row["usage"] async for row in described}[client]

    async def counted(self) -> None:
        """Wait until every request is over, and its workers' counts have come in."""
        await eventually(self.settled)
        parts = self.workers
        await eventually(lambda: not any(w.metrics.every_series or w.remote._untold for w in parts))
        self.gateway.metrics.catch_up()

    async def metrics(self) -> str:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"{self.url}/metrics")).text


def loads_of(gateway: Gateway) -> list[tuple[float, int, int]]:
    """(load, KV tokens, in flight) of every instance."""
    seen = [gateway.fleet.scheduler.members.snapshot(i) for i in gateway.fleet.instances]
    return [(each.load_s, each.kv_tokens, each.in_flight) for each in seen]


class Addressed(Protocol):
    """An instance, or what stands for one."""

    @property
    def url(self) -> str: ...


def config_for(
    fakes: Sequence[Addressed], *, profiles: tuple[str | None, ...] = (FAST, SLOW), **sections: Any
) -> GatewayConfig:
    """A configuration over fakes named i0, i1, …; sections are merged over quick defaults."""
    data: dict[str, Any] = {
        "server": {"port": 0, "shutdown_timeout_s": 1},
        "health": {"probe_interval_s": 0.5, "probe_timeout_s": 30, "scrape_interval_s": 1},
        "instances": [
            {"id": f"i{i}", "base_url": fake.url, "profile": profiles[i % len(profiles)]}
            for i, fake in enumerate(fakes)
        ],
    }
    for name, section in sections.items():
        if isinstance(section, dict) and name in data:
            data[name] = data[name] | section
        else:
            data[name] = section
    return GatewayConfig.model_validate(data)


@contextlib.asynccontextmanager
async def running_gateway(
    config: GatewayConfig,
    config_path: Path | None = None,
    workers: int = 1,
    record: Path | None = None,
    *,
    one_port: bool = False,
) -> AsyncIterator[RunningGateway]:
    """Serve until the block ends; with several workers, all in this event loop.

    ``one_port``: the workers share it, as processes do, but in turn; else each has one of its own,
    so that a test can choose between them.
    """
    if workers == 1:
        app = create_app(config, config_path, record=record)
        async with serving(app, app.gateway) as (server, url):
            with kept(app.gateway.made_admin_key, url):
                yield RunningGateway(url, app, server, ports=[_port_of(url)])
        return
    # Their supervisor would see to it that all make the same keys of a prompt. They read it when
    # they are made: it stands there no longer, as gateways may end in any order.
    secret = patch.dict(os.environ, {SECRET_ENV: "11" * 32})
    with tempfile.TemporaryDirectory() as directory:
        hub, control = f"{directory}/hub", f"{directory}/control"
        with secret:
            app = create_app(config, config_path, listen(hub), record)
        shared = config.model_copy(
            update={"server": config.server.model_copy(update={"workers": workers, "port": 0})}
        )
        async with contextlib.AsyncExitStack() as stack:
            server, _ = await stack.enter_async_context(
                serving(app, app.gateway, Given([listen(control)]))
            )
            with secret:
                many = [Worker(shared, config_path, i, hub, control) for i in range(workers)]
            servers = [
                await stack.enter_async_context(serving(worker.app, worker)) for worker in many
            ]
            urls = [url for _, url in servers]
            if one_port:
                turns = dealt([each for each, _ in servers], config.server.port)
                urls = [await stack.enter_async_context(turns)]
            with kept(app.gateway.made_admin_key, *urls):
                yield RunningGateway(urls[0], app, server, many, [_port_of(url) for url in urls])


@contextlib.asynccontextmanager
async def serving(
    service: Service, gateway: Parts, given: Given = NOTHING_GIVEN
) -> AsyncIterator[tuple[GatewayServer, str]]:
    """One server until the block ends, and its URL."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = GatewayServer(service, gateway, ready.set_result, given)
    task = asyncio.ensure_future(server.serve())
    try:
        either: set[asyncio.Future[Any]] = {ready, task}
        done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            task.result()
            raise RuntimeError("the server stopped before it was ready")
        yield server, ready.result()
    finally:
        server.should_exit = True
        await task
        # They keep the endpoints of thousands of gateways, and so all that these have.
        for cache in _FASTAPIS_CACHES:
            cache.cache_clear()


@contextlib.asynccontextmanager
async def dealt(servers: list[GatewayServer], port: int) -> AsyncIterator[str]:
    """An address whose connections these servers get in turn, until the block ends.

    Of sockets that share an address the kernel chooses one by the client's port, which is another
    in each run: what a test measures would depend on it.
    """
    loop = asyncio.get_running_loop()

    async def deal() -> None:
        for server in itertools.cycle(servers):
            connection, _ = await loop.sock_accept(listener)
            await loop.connect_accepted_socket(server._connections({}), connection)

    with bound(port) as listener:
        listener.listen(BACKLOG)
        listener.setblocking(False)
        dealing = asyncio.create_task(deal())
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            dealing.cancel()
            await asyncio.wait([dealing])


def _port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


class Rig(NamedTuple):
    running: RunningGateway
    client: httpx.AsyncClient
    fakes: list[Any]


class There:
    """An instance that runs already, for ``rig``."""

    port = 1

    def __init__(self, url: str) -> None:
        self.url = url

    async def close(self) -> None:
        pass


@contextlib.asynccontextmanager
async def rig(
    fakes: int | Sequence[Any] = 1, *, workers: int = 1, **sections: Any
) -> AsyncIterator[Rig]:
    """A gateway over so many fakes, or over these, and a client of it (of its first worker).

    At the end every load is 0. Fakes that do not run yet are started; all are closed.
    """
    there: list[Any] = (
        [FakeInstance() for _ in range(fakes)] if isinstance(fakes, int) else [*fakes]
    )
    async with contextlib.AsyncExitStack() as stack:
        for fake in there:
            if not fake.port:
                await fake.start()
            stack.push_async_callback(fake.close)
        config = config_for(there, **sections)
        running = await stack.enter_async_context(running_gateway(config, workers=workers))
        url = f"http://127.0.0.1:{running.port}"
        many = httpx.Limits(max_connections=None, max_keepalive_connections=16)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=many) as client:
            yield Rig(running, client, there)
        await eventually(running.settled)


async def eventually(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Wait until a condition holds; fail when it does not in time."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - any state may be asked about, not only events
            await asyncio.sleep(0.01)


def counted(text: str, counter: str) -> float:
    """The sum over all labels of a counter (without its prefix) in an exposition."""
    lines = [line for line in text.splitlines() if line.startswith(f"hetero_gateway_{counter}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
