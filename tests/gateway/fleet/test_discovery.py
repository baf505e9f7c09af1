"""Sources of instances: two hundred come, move and go under load, and every load is exact."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from hetero_gateway.core.types import InstanceId
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import GatewayConfig
from tests.fakes.dns import FakeNameServer
from tests.fakes.kubernetes import FakeApiServer, pod
from tests.fakes.running import CHAT, FAST, SLOW, RunningGateway, eventually, faked, running_gateway
from tests.fakes.vllm import FakeInstance, fake_instances

HEALTH = {"probe_interval_s": 1, "probe_timeout_s": 30, "scrape_interval_s": 5}


def config_of(*sources: dict[str, Any], **sections: Any) -> GatewayConfig:
    data = {"server": {"port": 0, "shutdown_timeout_s": 1}, "health": HEALTH}
    return GatewayConfig.model_validate(data | {"discovery": list(sources)} | sections)


def pods_of(api: FakeApiServer, **more: Any) -> dict[str, Any]:
    """A source."""
    source = {"name": "pods", "kind": "kubernetes", "selector": "app=vllm", "api_url": api.url}
    return source | {"namespace": "default"} | more


def names_of(server: FakeNameServer, **more: Any) -> dict[str, Any]:
    """A source."""
    source = {"name": "pool", "kind": "dns", "host": "vllm.test", "nameserver": server.address}
    return source | more


def shown(running: RunningGateway) -> dict[str, str]:
    """base_url by id, of all that get requests."""
    instances = running.gateway.fleet.instances.values()
    return {str(i.id): i.config.base_url for i in instances if i.up and not i.leaving}


class Machines:
    """One fake instance at many loopback addresses, at one port."""

    def __init__(self, fake: FakeInstance) -> None:
        self.fake = fake
        self._servers: list[asyncio.Server] = []

    @property
    def port(self) -> int:
        return self.fake.port

    async def add(self, *numbers: int) -> None:
        for n in numbers:
            self._servers.append(
                await asyncio.start_server(self.fake._connection, address(n), self.fake.port)
            )

    def close(self) -> None:
        for server in self._servers:
            server.close()


def address(number: int) -> str:
    return f"127.0.{1 + number // 250}.{1 + number % 250}"


@contextlib.asynccontextmanager
async def machines(count: int) -> AsyncIterator[Machines]:
    async with fake_instances(1) as fakes:
        made = Machines(fakes[0])
        await made.add(*range(count))
        try:
            yield made
        finally:
            made.close()


class Load:
    """Streams one after the other; ``texts``: what they got."""

    def __init__(self, running: RunningGateway, clients: int) -> None:
        self.answers: list[tuple[int, bool]] = []
        self._over = False
        self._url = running.url
        self._tasks = [asyncio.ensure_future(self._client()) for _ in range(clients)]

    async def _client(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=None) as client:
            while not self._over:
                answer = await client.post(CHAT, json=faked(events=4, delay_s=0.7))
                self.answers.append((answer.status_code, answer.text.endswith("[DONE]\n\n")))

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)
        assert self.answers
        assert set(self.answers) == {(200, True)}


async def changes_under_load(
    running: RunningGateway, made: Machines, show: Any, count: int = 200
) -> None:
    """``show(numbers)`` has the source say that these are there."""
    show(range(count))
    await eventually(lambda: len(shown(running)) == count)
    load = Load(running, 12)
    try:
        await asyncio.sleep(2)
        show(range(50, count))  # fifty leave, whoever is on them
        await eventually(lambda: len(shown(running)) == count - 50)
        in_flight = sum(each[2] for each in running.loads())
        assert in_flight == made.fake.open
        show(range(25, count))  # and half of them come back, some before they are gone
        await eventually(lambda: len(shown(running)) == count - 25)
        await made.add(*range(count, count + 40))
        show(range(60, count + 40))  # others move
        await eventually(lambda: len(shown(running)) == count - 20)
        await asyncio.sleep(3)
    finally:
        await load.end()
    await eventually(running.settled)
    await eventually(lambda: len(running.gateway.fleet.instances) == count - 20)
    expected = {f"http://{address(n)}:{made.port}" for n in range(60, count + 40)}
    assert set(shown(running).values()) == expected


@pytest.mark.slow
async def test_two_hundred_by_dns_come_move_and_go_under_load() -> None:
    async with machines(200) as made, FakeNameServer() as server:
        server.ttl_s = 1
        source = names_of(server, port=made.port, profile=FAST)

        def show(numbers: range) -> None:
            server.records["vllm.test", "A"] = [address(n) for n in numbers]

        async with running_gateway(config_of(source)) as running:
            await changes_under_load(running, made, show)


@pytest.mark.system(virtual=True)
@pytest.mark.slow
async def test_two_hundred_by_kubernetes_come_move_and_go_under_load() -> None:
    async with machines(200) as made, FakeApiServer() as api:
        source = pods_of(api, port=made.port, profile=SLOW)

        def show(numbers: range) -> None:
            wanted = {f"vllm-{n}": address(n) for n in numbers}
            api.delete(*[name for name in api.objects if name not in wanted])
            new = [name for name in wanted if name not in api.objects]
            api.put(*[pod(name, wanted[name]) for name in new])

        async with running_gateway(config_of(source)) as running:
            await changes_under_load(running, made, show)


async def test_a_name_is_asked_again_when_its_ttl_is_over_and_no_sooner() -> None:
    async with machines(2) as made, FakeNameServer() as server:
        server.ttl_s = 20
        server.records["vllm.test", "A"] = [address(0), "169.254.169.254"]
        source = names_of(server, port=made.port, interval_s=60)
        async with running_gateway(config_of(source)) as running:
            await eventually(lambda: len(shown(running)) == 1)  # and not a cloud's metadata
            await asyncio.sleep(50)
            assert len(server.asked) == 6  # A and AAAA, three times
            assert list(shown(running)) == [f"pool-{address(0).replace('.', '-')}-{made.port}"]
            server.silent = True
            await asyncio.sleep(100)
            assert len(shown(running)) == 1  # who does not answer says nothing
            server.silent = False
            server.records.clear()
            await eventually(lambda: not running.gateway.fleet.instances)


async def test_a_ttl_of_nothing_is_a_second_and_many_names_are_asked_for_slowly() -> None:
    async with machines(1) as made, FakeNameServer() as server:
        server.ttl_s = 0
        server.records["vllm.test", "A"] = [address(0)]
        server.records["_http._tcp.vllm.test", "SRV"] = [
            f"0 0 {made.port} n{n}.vllm.test." for n in range(300)
        ]
        for source, most in (
            ({"host": "vllm.test", "port": made.port}, 32),
            ({"host": "_http._tcp.vllm.test", "record": "srv"}, 15 * 50 + 100),
        ):
            server.asked.clear()
            async with running_gateway(config_of(names_of(server) | source)):
                await asyncio.sleep(15)
                assert 20 <= len(server.asked) <= most


async def test_srv_records_name_ports_and_ipv6_has_addresses() -> None:
    async with fake_instances(2) as fakes, FakeNameServer() as server:
        ports = [fake.port for fake in fakes]
        server.records["_http._tcp.vllm.test", "SRV"] = [
            f"0 0 {ports[0]} one.vllm.test.", f"0 0 {ports[1]} two.vllm.test."
        ]  # fmt: skip
        server.records["one.vllm.test", "A"] = ["127.0.0.1"]
        server.records["two.vllm.test", "A"] = ["127.0.0.1"]
        server.records["two.vllm.test", "AAAA"] = ["2001:db8::1"]
        decodes = {"connector": "NixlConnector", "role": "decode"}
        source = names_of(server, host="_http._tcp.vllm.test", record="srv", kv_transfer=decodes)
        async with running_gateway(config_of(source)) as running:
            await eventually(lambda: len(running.gateway.fleet.instances) == 3)
            found = [i.config for i in running.gateway.fleet.instances.values()]
            assert all(one.kv_transfer and one.kv_transfer.role == "decode" for one in found)
            urls = {one.base_url for one in found}
            local = {f"http://127.0.0.1:{port}" for port in ports}
            assert urls == local | {f"http://[2001:db8::1]:{ports[1]}"}


async def test_a_cut_watch_goes_on_and_a_version_that_is_gone_is_listed_anew(
    tmp_path: Path,
) -> None:
    async with machines(4) as made, FakeApiServer() as api:
        source = pods_of(api, port=made.port, interval_s=300)
        api.put(pod("a", address(0)), pod("b", address(1), ready=False))
        async with running_gateway(config_of(source)) as running:
            await eventually(lambda: list(shown(running)) == ["a"])
            api.put(pod("b", address(1)))
            await eventually(lambda: set(shown(running)) == {"a", "b"})
            api.reset_connections()
            api.put(pod("c", address(2)))
            await eventually(lambda: set(shown(running)) == {"a", "b", "c"})
            api.forget()
            del api.objects["a"]
            await eventually(lambda: set(shown(running)) == {"b", "c"})
            api.refuses = 500
            api.reset_connections()
            await asyncio.sleep(60)
            assert set(shown(running)) == {"b", "c"}
            [follower] = running.gateway.discovery.followers()
            assert "500" in follower.problem
            api.refuses = 0
            gone = pod("b", address(1))
            gone["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            api.put(gone)
            await eventually(lambda: set(shown(running)) == {"c"})


async def test_a_pod_that_moves_drains_where_it_was() -> None:
    async with machines(2) as made, FakeApiServer() as api:
        source = pods_of(api, port=made.port)
        api.put(pod("a", address(0)))
        async with running_gateway(config_of(source)) as running:
            await eventually(lambda: list(shown(running)) == ["a"])
            async with httpx.AsyncClient(base_url=running.url, timeout=None) as client:
                body = faked(events=20, delay_s=0.5)
                under_way = asyncio.ensure_future(client.post(CHAT, json=body))
                await eventually(lambda: made.fake.open == 1)
                api.put(pod("a", address(1)))
                await eventually(lambda: list(shown(running)) == ["a.2"])
                old = running.gateway.fleet.instances[InstanceId("a")]
                assert old.leaving
                assert running.gateway.fleet.scheduler.members.snapshot(old.id).in_flight == 1
                assert (await under_way).text.endswith("data: [DONE]\n\n")
            await eventually(lambda: list(running.gateway.fleet.instances) == ["a.2"])
            await eventually(running.settled)


async def test_endpoint_slices_with_their_ports() -> None:
    async with machines(3) as made, FakeApiServer() as api:
        source = pods_of(
            api,
            name="slices",
            resource="endpointslices",
            selector="kubernetes.io/service-name=vllm",
            namespace="models",
        )
        endpoints = [
            {"addresses": [address(0)], "targetRef": {"kind": "Pod", "name": "p0"}},
            {"addresses": [address(1)], "conditions": {"ready": True}},
            {"addresses": [address(2)], "conditions": {"ready": False}},
        ]
        ports = [{"name": "http", "port": made.port}]
        api.put({"metadata": {"name": "s1"}, "endpoints": endpoints, "ports": ports})
        async with running_gateway(config_of(source)) as running:
            await eventually(lambda: set(shown(running)) == {"p0", address(1)})
            assert api.requests[0].startswith(
                "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices?labelSelector="
            )


async def test_profiles_by_label_and_by_what_the_engine_serves() -> None:
    async with machines(3) as made, FakeApiServer() as api:
        rules = [
            {"labels": {"gpu": "fast"}, "profile": FAST},
            {"model": "m", "labels": {"gpu": "asked"}, "profile": SLOW},
        ]
        source = pods_of(api, port=made.port, profiles=rules)
        api.put(
            pod("a", address(0), gpu="fast"),
            pod("b", address(1), gpu="asked"),
            pod("c", address(2), gpu="other"),
        )
        async with running_gateway(config_of(source)) as running:
            await eventually(lambda: len(shown(running)) == 3)
            instances = running.gateway.fleet.instances
            names = {str(i.id): i.profile_name for i in instances.values()}
            assert names == {"a": FAST, "b": SLOW, "c": "unprofiled"}
            specs = list(running.gateway.fleet.scheduler.members.specs.values())
            assert [spec.profile is not None for spec in specs] == [True, True, False]


async def test_a_watched_file_is_a_source_and_takes_nobody_elses_away(tmp_path: Path) -> None:
    path, listed = tmp_path / "gateway.yaml", tmp_path / "instances.yaml"
    async with fake_instances(3) as fakes:
        entries = [{"id": f"f{i}", "base_url": fake.url} for i, fake in enumerate(fakes)]
        entries[2] |= {"data_parallel_ranks": 2}
        listed.write_text(yaml.safe_dump({"instances": entries[:2]}))
        source = {"name": "list", "kind": "file", "file": "instances.yaml", "interval_s": 0.5}
        mine = {"id": "mine", "base_url": fakes[2].url}
        data = {"server": {"port": 0}, "health": HEALTH, "instances": [mine]}
        path.write_text(json.dumps(data | {"discovery": [source]}))
        config = config_of(source, instances=[mine])
        async with (
            running_gateway(config, path) as running,
            httpx.AsyncClient(base_url=running.url) as client,
        ):
            await eventually(lambda: set(shown(running)) == {"f0", "f1", "mine"})
            rows = (await client.get("/admin/instances")).json()["instances"]
            assert {row["id"]: row["source"] for row in rows} == {
                "f0": "list", "f1": "list", "mine": "file",
            }  # fmt: skip
            await client.post("/admin/reload")
            assert set(shown(running)) == {"f0", "f1", "mine"}
            listed.write_text("instances: [")
            await asyncio.sleep(5)
            assert set(shown(running)) == {"f0", "f1", "mine"}
            listed.write_text(yaml.safe_dump({"instances": entries[1:]}))
            places = {"f2.dp0", "f2.dp1"}  # a server with two ranks
            await eventually(lambda: set(shown(running)) == {"f1", *places, "mine"}, 100)
            asked = {running.gateway.fleet.instances[InstanceId(i)].pool.own_fields for i in places}
            assert len(asked) == 2
            before = running.gateway.fleet.instances[InstanceId("f1")]
            path.write_text(json.dumps(data | {"discovery": [source | {"interval_s": 1.0}]}))
            assert (await client.post("/admin/reload")).json()["settings"] == ["discovery"]
            await asyncio.sleep(3)
            assert running.gateway.fleet.instances[InstanceId("f1")] is before
            path.write_text(json.dumps(data))
            await client.post("/admin/reload")
            assert set(shown(running)) == {"mine"}


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ({"name": "x", "kind": "dns"}, "needs it"),
        ({"name": "x", "kind": "file", "file": "f", "host": "h"}, "has none"),
        ({"name": "x", "kind": "dns", "host": "h", "nameserver": "nobody"}, "no IP"),
        ({"name": "x", "kind": "file", "file": "f", "profile": "no-such"}, "no profile"),
        ({"name": "admin", "kind": "file", "file": "f"}, "taken"),
    ],
)
async def test_a_source_that_cannot_be_followed_is_an_error_at_the_start(
    source: dict[str, Any], what: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=what):
        async with running_gateway(config_of(source)):
            pass
