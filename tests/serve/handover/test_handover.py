"""What goes from one gateway to the next, and who may ask for it. Both are in this event loop."""

import asyncio
import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_gateway.core.types import InstanceId
from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.gateway.admission.clients import describe_clients
from hetero_gateway.scaleout.workers import SECRET_ENV
from hetero_gateway.scaleout.workers.messages import frame
from hetero_gateway.serve.app import App, create_app
from hetero_gateway.serve.handover import handover, messages
from hetero_gateway.serve.handover.handover import Handover
from hetero_gateway.serve.handover.predecessor import Predecessor
from hetero_gateway.serve.server import NOTHING_GIVEN, GatewayServer, Given
from tests.fakes.admin_key import kept
from tests.fakes.gateway_files import clients, write
from tests.fakes.running import CHAT, chat, config_for, eventually, faked, serving
from tests.fakes.vllm import FakeInstance, bound, fake_instances

SECRET = "5e" * 32


@pytest.fixture
def anyio_backend() -> str:
    """Wall clock: the later one asks in a thread."""
    return "asyncio"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path: sockets lie in it."""
    monkeypatch.setenv(SECRET_ENV, SECRET)
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@dataclass
class One:
    """A gateway of several that follow each other."""

    app: App
    server: GatewayServer
    client: httpx.AsyncClient
    listen: str

    @property
    def taken(self) -> bool:
        assert self.app.gateway.handover is not None
        return self.app.gateway.handover.taken

    def peers(self, instance: str) -> float:
        """Requests of the other gateway, as this one counts them."""
        table = self.app.gateway.fleet.scheduler.members.table
        return table[InstanceId(instance)].peers.in_flight


@dataclass
class Series:
    """Starts gateways that take over, and ends all of them with the block."""

    folder: Path
    fakes: list[FakeInstance]
    stack: contextlib.AsyncExitStack
    admin_listen: str | None = None
    sections: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder / "takeover"

    async def ask(self, wants: str, before: One) -> Predecessor:
        port = int(before.listen.rpartition(":")[2])
        server = before.app.gateway.config.server.model_copy(update={"port": port})
        return await asyncio.to_thread(Predecessor, server, wants)

    async def start(self, before: One | None = None, **changes: Any) -> One:
        server = {"takeover_socket": str(self.path), "admin_listen": self.admin_listen}
        server |= self.sections.get("server", {})
        config = config_for(self.fakes, **self.sections | changes | {"server": server})
        given, state, sockets = NOTHING_GIVEN, None, None
        if before is not None:
            sockets = await self.ask("sockets", before)
            state = await self.ask("state", before)
            given = Given(sockets.clients, sockets.admin)
            assert sockets.secret == SECRET
        app = create_app(config, self.folder / "gateway.yaml")
        own = app.gateway.handover = Handover(config.server, SECRET, lambda: None, state)
        running, url = await self.stack.enter_async_context(serving(app, app.gateway, given))
        own.end = running.taken_over
        self.stack.enter_context(kept(app.gateway.made_admin_key, url))
        client = httpx.AsyncClient(base_url=url, timeout=60)
        await self.stack.enter_async_context(client)
        one = One(app, running, client, url.removeprefix("http://"))
        if sockets is not None:
            await asyncio.to_thread(sockets.serving)
            await eventually(lambda: not own.waits)
        await eventually(self.path.exists)
        return one


@contextlib.asynccontextmanager
async def series(
    folder: Path, fakes: int = 2, admin_listen: str | None = None, **sections: Any
) -> AsyncIterator[Series]:
    async with fake_instances(fakes) as there, contextlib.AsyncExitStack() as stack:
        yield Series(folder, there, stack, admin_listen, sections)


async def test_of_several_in_a_row_the_last_one_counts_what_all_have(folder):
    async with series(folder, fakes=1) as all_of_them:
        gateways = [await all_of_them.start()]
        asking = []
        for length in (40, 10):
            body = faked(events=length, delay_s=0.05)
            asking.append(asyncio.ensure_future(gateways[-1].client.post(CHAT, json=body)))
            await eventually(lambda: all_of_them.fakes[0].open == len(asking))
            gateways.append(await all_of_them.start(gateways[-1]))
        last = gateways[-1]
        assert last.peers("i0") == 2
        await asking[1]
        await eventually(lambda: last.peers("i0") == 1)
        await asking[0]
        await eventually(lambda: last.peers("i0") == 0)


async def described(one: One) -> dict[str, Any]:
    one.app.gateway.metrics.catch_up()
    rows = [row async for row in describe_clients(one.app.gateway.admission, 0.0)]
    return rows[0]


async def test_the_next_one_knows_what_this_one_does_and_counts_what_it_still_has(folder):
    limited = clients(folder, a={"requests_per_minute": 10, "concurrency": 3})
    key = {"authorization": "Bearer ka"}
    async with series(folder, clients=limited) as all_of_them:
        first = await all_of_them.start()
        for _ in range(4):
            answer = await first.client.post(CHAT, json=chat("x" * 5000), headers=key)
            assert answer.status_code == 200
        first.app.gateway.fleet.instances[InstanceId("i1")].draining = True
        body = faked(events=40, delay_s=0.05)
        asking = asyncio.ensure_future(first.client.post(CHAT, json=body, headers=key))
        await eventually(lambda: sum(fake.open for fake in all_of_them.fakes) == 1)

        second = await all_of_them.start(first)
        gateway, before = second.app.gateway, first.app.gateway
        assert first.taken
        assert gateway.fleet.instances[InstanceId("i1")].draining
        lengths = [each.fleet.scheduler.residual.finished() for each in (gateway, before)]
        assert lengths[0] == lengths[1] != []
        index = [each.fleet.scheduler.caches.index for each in (gateway, before)]
        for name in map(InstanceId, ("i0", "i1")):
            assert set(index[0].held(name)) == set(index[1].held(name))
        assert len(index[0]) > 0
        # Loads and limits hold over both, until the stream is over.
        assert second.peers("i0") == 1
        row = await described(second)
        (account,) = row["limits"]
        assert (account["elsewhere"]["requests"], account["elsewhere"]["in_flight"]) == (5, 1)
        again = asyncio.ensure_future(second.client.post(CHAT, json=body, headers=key))
        await eventually(lambda: first.peers("i0") == 1)
        assert (await asking).text.endswith("data: [DONE]\n\n")
        assert (await again).text.endswith("data: [DONE]\n\n")
        await eventually(lambda: second.peers("i0") == 0)
        await eventually(lambda: not first.app.gateway.handover._askers)
        row = await described(second)
        assert row["limits"][0]["within_a_minute"]["requests"] == 6
        assert row["limits"][0]["elsewhere"]["requests"] == 0
        assert row["usage"]["requests"] == 6
        for _ in range(4):
            assert (await second.client.post(CHAT, json=chat(), headers=key)).status_code == 200
        assert (await second.client.post(CHAT, json=chat(), headers=key)).status_code == 429

        third = await all_of_them.start(second)
        assert (await described(third))["usage"]["requests"] == 10


async def test_instances_that_were_added_are_there_and_those_that_the_file_lacks_are_not(folder):
    async with series(folder, fakes=3) as all_of_them:
        added = all_of_them.fakes.pop()
        listed = [{"id": "found", "base_url": all_of_them.fakes[1].url}]
        write(folder / "listed.yaml", {"instances": listed})
        all_of_them.sections["discovery"] = [
            {"name": "listed", "kind": "file", "file": "listed.yaml", "interval_s": 0.2}
        ]
        del all_of_them.fakes[1]
        first = await all_of_them.start()
        await eventually(lambda: "found" in first.app.gateway.fleet.instances)
        config = {"id": "more", "base_url": added.url, "weight": 1.0}
        answer = await first.client.post("/admin/instances", json=config)
        assert answer.status_code == 201, answer.text
        await eventually(lambda: first.app.gateway.fleet.instances[InstanceId("more")].up)
        change = {"weight": 3.0}
        assert (await first.client.patch("/admin/instances/i0", json=change)).status_code == 200
        second = await all_of_them.start(first)
        there = second.app.gateway.fleet.instances
        kept = {"i0": ("file", 3.0), "found": ("listed", 1.0), "more": ("admin", 1.0)}
        assert {name: (i.source, i.weight) for name, i in there.items()} == kept
        assert all(i.up for i in there.values())
        # Its source goes on with it; and what the file lacks by now is not taken over.
        write(folder / "listed.yaml", {"instances": []})
        await eventually(lambda: "found" not in there)
        del all_of_them.fakes[0]
        third = await all_of_them.start(second)
        assert [*third.app.gateway.fleet.instances] == ["more"]


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_the_listener_of_admin_goes_on(folder, kind):
    with bound(0) as held:
        port = held.getsockname()[1]
    where = f"unix:{folder}/admin" if kind == "unix" else f"127.0.0.1:{port}"
    async with series(folder, admin_listen=where) as all_of_them:
        one = await all_of_them.start()
        for _ in range(2):
            transport = httpx.AsyncHTTPTransport(uds=f"{folder}/admin" if kind == "unix" else None)
            async with httpx.AsyncClient(transport=transport) as client:
                address = "http://localhost" if kind == "unix" else f"http://{where}"
                assert (await client.get(f"{address}/admin/instances")).status_code == 200
                one = await all_of_them.start(one)


async def served(one: One) -> bool:
    return (await one.client.post(CHAT, json=chat())).status_code == 200


def claim(**changes: Any) -> Callable[[str], messages.Claim]:
    def made(listen: str) -> messages.Claim:
        said: dict[str, Any] = {"protocol": messages.PROTOCOL, "version": "9"}
        said |= {"wants": "sockets", "listen": listen}
        return messages.Claim(**said | changes)

    return made


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (claim(protocol=messages.PROTOCOL + 1), "it hands over by protocol"),
        (claim(listen="10.0.0.1:80"), "and not at 10.0.0.1:80"),
    ],
)
async def test_who_does_not_fit_is_refused_and_the_gateway_goes_on(folder, said, why):
    async with series(folder) as all_of_them:
        one = await all_of_them.start()
        reader, writer = await asyncio.open_unix_connection(all_of_them.path)
        writer.write(frame([said(one.listen)]))
        assert why in (await reader.read()).decode("latin-1")
        writer.close()
        assert not one.taken
        assert await served(one)
        assert await served(await all_of_them.start(one))


async def test_another_user_gets_nothing(folder, monkeypatch):
    monkeypatch.setattr(handover, "is_same_user", lambda _: False)
    async with series(folder) as all_of_them:
        one = await all_of_them.start()
        with pytest.raises(HeteroGatewayError, match="another user asks"):
            await all_of_them.ask("sockets", one)
        assert await served(one)


@pytest.mark.parametrize("data", [b"\x04\0\0\0junk", b"\xff\xff\xff\xff", frame([[1, "x"]])])
async def test_what_cannot_be_read_ends_the_connection_and_nothing_else(folder, data):
    async with series(folder) as all_of_them:
        one = await all_of_them.start()
        reader, writer = await asyncio.open_unix_connection(all_of_them.path)
        writer.write(data)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert await served(one)


async def test_one_that_fails_or_is_late_changes_nothing_and_only_one_takes_over(
    folder, monkeypatch
):
    async with series(folder) as all_of_them:
        one = await all_of_them.start()
        gone = await all_of_them.ask("sockets", one)
        with pytest.raises(HeteroGatewayError, match="another gateway is taking over"):
            await all_of_them.ask("sockets", one)
        for each in (gone.connection, *gone.clients):
            each.close()
        monkeypatch.setattr(handover, "START_S", 0.1)
        await eventually(lambda: not one.app.gateway.handover._askers)
        late = await all_of_them.ask("sockets", one)
        await eventually(lambda: not one.app.gateway.handover._askers)
        with pytest.raises(HeteroGatewayError, match="it did not serve within"):
            await asyncio.to_thread(late.serving)
        for each in late.clients:
            each.close()
        assert not one.taken
        assert await served(one)


async def test_only_this_user_can_ask_and_a_directory_of_others_is_not_used(folder):
    async with series(folder) as all_of_them:
        one = await all_of_them.start()
        assert stat.S_IMODE(os.stat(all_of_them.path).st_mode) == 0o600
        folder.chmod(0o750)
        other = create_app(one.app.gateway.config)
        own = other.gateway.handover = Handover(one.app.gateway.config.server, "", print)
        async with serving(other, other.gateway):
            assert own._path is None
        folder.chmod(0o700)
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(all_of_them.path))  # it is there still


async def test_clients_socket_is_served_for_its_group_and_goes_on_to_the_next_gateway(folder):
    path = folder / "clients.sock"
    async with series(folder) as all_of_them:
        all_of_them.sections["server"] = {"client_socket": "clients.sock"}
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            first = await all_of_them.start()
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
            assert (await client.post(CHAT, json=chat())).status_code == 200
            second = await all_of_them.start(first)
            assert first.taken
            answer = await client.post(CHAT, json=chat(), headers={"connection": "close"})
            answer = await client.post(CHAT, json=chat(), headers={"connection": "close"})
            assert answer.status_code == 200
            served = second.app.gateway.metrics
            served.catch_up()
            assert sum(served.decisions.values()) >= 1
            # A worker would have to share it.
    with pytest.raises(ValueError, match="client_socket"):
        config_for([], server={"client_socket": "x", "workers": 2})
