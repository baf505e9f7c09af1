"""Hundreds of instances: one TLS context, a start that waits for nobody, and late probes."""

import asyncio
import json
import socket
import ssl
import time
from itertools import pairwise
from pathlib import Path

import pytest
import trustme

from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.gateway.fleet.instances import Fleet
from hetero_gateway.gateway.fleet.lag import LoopLag
from hetero_gateway.gateway.fleet.probe import LateProbe, Probe
from hetero_gateway.http import upstream
from tests.fakes.reloads import from_file
from tests.fakes.running import FAST, eventually, rig, running_gateway
from tests.fakes.vllm import FakeInstance, fake_instances


async def test_a_loop_that_is_held_is_behind_and_one_that_is_not_is_not() -> None:
    with LoopLag() as lag:
        await asyncio.sleep(5)
        assert lag.behind_s < 0.01
        time.sleep(3)  # noqa: ASYNC251 - as a long callback does, or a machine without CPU time
        await asyncio.sleep(1)
        assert 2.7 < lag.behind_s < 3.1
        behind_s = lag.behind_s
    time.sleep(3)  # noqa: ASYNC251 - nobody watches
    await asyncio.sleep(1)
    assert lag.behind_s == behind_s


async def test_a_scrape_that_is_late_is_counted_like_a_probe(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Probe.ask

    async def late_for_metrics(probe: Probe, method: bytes, target: bytes, *more: int) -> object:
        if target == b"/metrics":
            raise LateProbe(2.0)
        return await ask(probe, method, target, *more)

    async with rig() as (running, _, _):
        monkeypatch.setattr(Probe, "ask", late_for_metrics)
        await eventually(lambda: running.gateway.health.late > 2)
        (instance,) = running.gateway.fleet.instances.values()
        assert instance.up
    assert "probing instance" not in caplog.text


async def test_a_late_probe_is_not_a_failed_one(caplog: pytest.LogCaptureFixture) -> None:
    health = {"probe_interval_s": 0.1, "probe_timeout_s": 2}
    async with rig(3, health=health) as (running, _, fakes):
        instances = list(running.gateway.fleet.instances.values())
        await eventually(lambda: all(i.up for i in instances))
        # While a probe is under way the loop stands still: fakes and gateway share it.
        for fake in fakes:
            hold_at_health(fake)
        await asyncio.sleep(300)
        assert all(i.up for i in instances)
        assert not any(i.failed_probes for i in instances)
        assert running.gateway.health.late > 0
        assert "hetero_gateway_probes_late_total" in await running.metrics()
    assert "is down" not in caplog.text
    assert 0 < caplog.text.count("probes are late") <= 40


async def test_one_that_hangs_is_down_however_well_the_gateway_does() -> None:
    health = {"probe_interval_s": 0.1, "probe_timeout_s": 2}
    async with fake_instances(1) as fakes:
        hanging = socket.create_server(("127.0.0.1", 0))  # nobody accepts
        urls = [f"http://127.0.0.1:{hanging.getsockname()[1]}", fakes[0].url]
        instances = [{"id": f"i{i}", "base_url": url} for i, url in enumerate(urls)]
        began_s = time.monotonic()
        async with rig(fakes, health=health, instances=instances) as (running, *_):
            assert time.monotonic() - began_s < 1.5  # nobody waits for it
            assert running.gateway.fleet.ready()
            slow, _ = running.gateway.fleet.instances.values()
            await eventually(lambda: slow.failed_probes >= 2)
            assert "no answer within 2 s" in slow.down_reason
            assert running.gateway.health.late == 0
        hanging.close()


async def test_many_that_are_added_come_one_in_a_turn_of_the_loop(tmp_path: Path) -> None:
    """Forty at once would hold up every stream: what it costs is for ``fleet.py`` to measure."""
    async with from_file(tmp_path) as made:
        fleet, loop = made.running.gateway.fleet, asyncio.get_running_loop()
        first = {"id": "i0", "base_url": made.fakes[0].url, "profile": FAST}
        many = [{"id": f"n{i}", "base_url": f"http://127.0.0.1:{i + 1}"} for i in range(40)]
        for more in (40, 0):
            sizes, over = [len(fleet.instances)], asyncio.Event()

            def look(sizes: list[int] = sizes, over: asyncio.Event = over) -> None:
                sizes.append(len(fleet.instances))
                if not over.is_set():
                    loop.call_soon(look)

            look()
            await made.reload(instances=[first, *many[:more]])
            over.set()
            await asyncio.sleep(1)
            assert sizes[-1] == 1 + more
            assert {abs(b - a) for a, b in pairwise(sizes)} == {0, 1}


def test_equal_instances_share_one_tls_context(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    entries = [{"id": f"i{i}", "base_url": f"https://127.0.0.1:{i + 1}"} for i in range(40)]
    own = [entry | {"id": f"own-{entry['id']}", "ca_file": "ca.pem"} for entry in entries]
    plain = {"id": "plain", "base_url": "http://127.0.0.1:1"}
    config = GatewayConfig.model_validate({"instances": [*entries, *own, plain]})
    fleet = Fleet(config, tmp_path)
    contexts = {id(i.ssl_context) for i in fleet.instances.values() if i.ssl_context}
    assert len(contexts) == len(fleet.contexts) == 2


def busy(running: int, total: int) -> str:
    return (
        f'vllm:num_requests_running{{engine="0"}} {running}\n'
        f'vllm:num_requests_waiting{{engine="0"}} 0\n'
        f'vllm:prompt_tokens_total{{engine="0"}} {total}\n'
    )


async def test_an_instance_that_rests_is_scraped_less_often_until_it_works() -> None:
    fake, health = FakeInstance(), {"probe_interval_s": 0.5, "scrape_interval_s": 2}
    scrapes, probes = count_asked(fake, "/metrics"), count_asked(fake, "/health")
    fake.metrics = busy(0, 7)
    async with rig([fake], health=health):
        await asyncio.sleep(60)
        assert 6 <= len(scrapes) <= 12  # and not 30
        # Twice a second at first, then once; each scrape comes with a probe of its own.
        assert 50 <= len(probes) <= 60 + 12 + len(scrapes)
        probes.clear()
        await asyncio.sleep(20)
        assert 18 <= len(probes) <= 26  # and not 40
        fake.metrics = busy(1, 9)
        await asyncio.sleep(12)
        scrapes.clear()
        probes.clear()
        await asyncio.sleep(20)
        assert 5 <= len(scrapes) <= 11
        assert len(probes) >= 36
        # One that rests and fails is looked at as often as any.
        fake.metrics = busy(0, 9)
        await asyncio.sleep(20)
        fake.healthy = False
        probes.clear()
        await asyncio.sleep(10)
        assert len(probes) >= 18


async def test_probes_of_an_instance_that_rests_open_no_connection_anew() -> None:
    fake, health = FakeInstance(), {"probe_interval_s": 3, "scrape_interval_s": 2}
    fake.metrics = busy(0, 7)
    async with rig([fake], health=health):
        await asyncio.sleep(60)
        probes, connections = count_asked(fake, "/health"), set(fake._writers)
        await asyncio.sleep(60)
        assert 8 <= len(probes) <= 12
        assert fake._writers == connections


def hold_at_health(fake: FakeInstance) -> None:
    answer = fake._get

    def held(path: str) -> tuple[int, bytes]:
        if path == "/health":
            time.sleep(3)
        return answer(path)

    fake._get = held  # type: ignore[method-assign]


def count_asked(fake: FakeInstance, wanted: str) -> list[float]:
    """Times at which a path of it is read, from now on."""
    times: list[float] = []
    answer = fake._get

    def counted(path: str) -> tuple[int, bytes]:
        if path == wanted:
            times.append(time.monotonic())
        return answer(path)

    fake._get = counted  # type: ignore[method-assign]
    return times


async def test_an_instance_sees_the_gateways_own_certificate(tmp_path: Path) -> None:
    """Mutual TLS towards an instance, and certificates that are renewed while serving."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    identify(authority, tmp_path)
    fake = FakeInstance()
    await fake.start(context)
    entry = {"id": "i0", "base_url": fake.url.replace("http:", "https:"), "ca_file": "ca.pem"}
    own = {"certificate_file": "own.pem", "key_file": "own.key"}
    path = tmp_path / "gateway.yaml"
    base = {"server": {"port": 0}, "health": {"probe_interval_s": 0.1}}
    path.write_text(json.dumps(base | {"instances": [entry]}))
    config = GatewayConfig.model_validate(base | {"instances": [entry]})
    async with running_gateway(config, path) as running:
        assert not running.gateway.fleet.ready()  # it shows no certificate
        path.write_text(json.dumps(base | {"instances": [entry | own]}))
        await running.gateway.reloader.reload("a test")
        await eventually(running.gateway.fleet.ready)
        (tmp_path / "own.key").write_text("garbage")
        with pytest.raises(Exception, match=r"own\.key"):
            await running.gateway.reloader.reload("a test")
        identify(authority, tmp_path)
        told = await running.gateway.reloader.reload("a test")
        assert told["changed"] == []
        await fake.kill()
        await eventually(lambda: not running.gateway.fleet.ready())
        await fake.start(context)
        await eventually(running.gateway.fleet.ready)
    await fake.close()


def identify(authority: trustme.CA, directory: Path) -> None:
    """A new certificate for the gateway."""
    issued = authority.issue_cert("gateway.test")
    issued.private_key_pem.write_to_path(directory / "own.key")
    issued.cert_chain_pems[0].write_to_path(directory / "own.pem")


@pytest.mark.parametrize("allowed", [True, False])
async def test_probes_go_to_link_local_addresses_where_requests_do(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "is_link_local", lambda address: address == "127.0.0.1")
    async with rig(server={"link_local_instances": allowed}) as (running, _, fakes):
        [instance] = running.gateway.fleet.instances.values()
        await eventually(lambda: instance.up or "link-local" in instance.down_reason)
        assert instance.up == allowed
        if not allowed:
            assert not fakes[0].heads
