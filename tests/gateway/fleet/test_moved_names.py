"""A host name that leads elsewhere while connections to where it led are open."""

import asyncio
import socket
from typing import Any

import pytest

from hetero_gateway.http.addresses import LOOK_UPS, Addresses
from tests.fakes.running import CHAT, FAST, chat, eventually, rig
from tests.fakes.vllm import FakeInstance

NAME = "engine.test"


class Names:
    """What the resolver of this event loop says of ``NAME``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *leads_to: str) -> None:
        self.leads_to = leads_to
        loop = asyncio.get_running_loop()
        self._system = loop.getaddrinfo
        monkeypatch.setattr(loop, "getaddrinfo", self._look_up, raising=False)

    async def _look_up(self, host: Any, port: Any, **options: Any) -> list[Any]:
        if host != NAME:
            return await self._system(host, port, **options)
        if not self.leads_to:
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        found = [await self._system(host, port, **options) for host in self.leads_to]
        return [each for addresses in found for each in addresses]


@pytest.mark.parametrize("workers", [1, 2])
async def test_requests_follow_a_name_though_connections_to_where_it_led_stay_open(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = FakeInstance(), FakeInstance()
    await old.start()
    new.host, new.port = "127.0.0.2", old.port
    await new.start()
    names = Names(monkeypatch, "127.0.0.1")
    instance = {"id": "i0", "base_url": f"http://{NAME}:{old.port}", "profile": FAST}
    sections: dict[str, Any] = {"pool": {"idle_expiry_s": 1}}
    statuses: list[int] = []
    async with rig([old, new], instances=[instance], workers=workers, **sections) as at:

        async def ask(number: int, **fake: float) -> None:
            body = chat(f"{number}", fake=fake, stream="events" in fake)
            statuses.append((await at.client.post(CHAT, json=body)).status_code)

        async def load() -> None:
            async with asyncio.TaskGroup() as tasks:
                for number in range(400):  # connections are never idle for long
                    tasks.create_task(ask(number, first_delay_s=0.05))
                    await asyncio.sleep(0.05)

        long = asyncio.create_task(ask(-1, events=250, delay_s=0.1))
        loading = asyncio.create_task(load())
        await asyncio.sleep(5)
        assert new.requests == 0
        names.leads_to = ()  # that nobody answers says nothing
        await asyncio.sleep(5)
        assert new.requests == 0
        names.leads_to = ("127.0.0.2",)
        await asyncio.sleep(LOOK_UPS + 2)
        before = old.requests
        await asyncio.sleep(1)
        assert old.requests == before
        await eventually(lambda: old.open == 1)  # the stream, which is not cut
        await asyncio.gather(loading, long)
        assert statuses == [200] * 401
        await eventually(lambda: not old._writers)


async def test_an_address_that_some_answers_leave_out_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, addresses = Names(monkeypatch), Addresses(NAME, 80)
    for turn in range(12):
        names.leads_to = ("127.0.0.1",) if turn % LOOK_UPS == 0 else ("127.0.0.2",)
        await addresses.look_up()
        assert not addresses.has_left("127.0.0.1", 0)
    for _ in range(LOOK_UPS):
        names.leads_to = ("127.0.0.2",)
        await addresses.look_up()
    assert addresses.has_left("127.0.0.1", 0)
    assert not addresses.has_left("127.0.0.1", addresses.look_ups - 1)  # connected just now
    assert not Addresses("127.0.0.1", 80).is_name
    assert not Addresses("::1", 80).is_name
