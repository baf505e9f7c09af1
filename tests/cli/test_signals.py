"""``serve`` as a process: SIGHUP reloads, SIGTERM drains, and a broken file ends nothing."""

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from hetero_gateway.http.protocol import NEXT_CALL_S
from tests.fakes.processes import Process, until
from tests.fakes.vllm import FakeInstance, fake_instances

pytestmark = [pytest.mark.system, pytest.mark.slow]

CHAT = "/v1/chat/completions"
STREAM = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}


def write(path: Path, fakes: list[FakeInstance], **sections: Any) -> None:
    document = {
        "health": {"probe_interval_s": 0.2, "probe_timeout_s": 60},
        "instances": [{"id": f"i{i}", "base_url": fake.url} for i, fake in enumerate(fakes)],
    }
    path.write_text(yaml.safe_dump(document | sections))


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("workers", [1, 2])
async def test_sighup_reloads_and_sigterm_drains(tmp_path, workers):
    path = tmp_path / "gateway.yaml"
    async with fake_instances(2) as fakes:
        write(path, fakes[:1])
        command = ("serve", "-c", str(path), "--port", "0", "--workers", str(workers))
        gateway = await asyncio.to_thread(Process, *command)
        client = httpx.AsyncClient(timeout=60)
        try:
            url = await asyncio.to_thread(gateway.wait_ready)

            async def shows(*lines: str) -> bool:
                text = (await client.get(url + "/metrics")).text
                return all(line in text for line in lines)

            body = STREAM | {"fake": {"events": 40, "delay_s": 0.1}}
            under_way = asyncio.ensure_future(client.post(url + CHAT, json=body))
            await until(lambda: fakes[0].open == 1)
            drains = {"server": {"drain_s": 1.5, "shutdown_timeout_s": 60}}
            write(path, fakes, scheduler={"policy": "round-robin"}, **drains)
            os.kill(gateway.process.pid, signal.SIGHUP)
            await until(
                lambda: shows('reloads_total{outcome="applied"} 1.0', 'up{backend="i1"} 1.0')
            )
            path.write_text("instances: [")
            os.kill(gateway.process.pid, signal.SIGHUP)
            await until(lambda: shows("last_reload_successful 0.0"))
            for _ in range(4):
                assert (await client.post(url + CHAT, json=STREAM)).status_code == 200
            assert fakes[1].requests == 2  # in turn, by the new policy
            assert (await client.get(url + "/readyz")).status_code == 200
            gateway.process.send_signal(signal.SIGTERM)

            async def unready() -> bool:
                return (await client.get(url + "/readyz")).status_code == 503

            # Unready at once, and yet who comes within the grace is served.
            await until(unready, within_s=1.0)
            async with httpx.AsyncClient() as late:
                assert (await late.post(url + CHAT, json=STREAM)).status_code == 200
            assert (await under_way).text.endswith("data: [DONE]\n\n")
            assert await asyncio.to_thread(gateway.process.wait, 60) == 0
        finally:
            await client.aclose()
            await asyncio.to_thread(gateway.stop, signal.SIGKILL)


async def one_after_the_other(port: int, body: bytes) -> int:
    """Requests on one connection until a response says that it is the last; how many there were.

    Raises asyncio.IncompleteReadError, OSError: one had no answer, though it came in time.
    """
    loop = asyncio.get_running_loop()
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answered, asked_s = 0, loop.time()
    while True:
        # Since the gateway's last answer at most: on a busy machine it was read long after.
        waited_s, asked_s = loop.time() - asked_s, loop.time()
        writer.write(head % (CHAT.encode(), len(body)) + body)
        try:
            said = (await reader.readuntil(b"\r\n\r\n")).lower()
        except (OSError, asyncio.IncompleteReadError):
            if waited_s < NEXT_CALL_S:
                raise
            return answered
        length = re.search(rb"content-length: (\d+)", said)
        if length is not None:
            await reader.readexactly(int(length[1]))
        else:
            while size := int(await reader.readline(), 16):
                await reader.readexactly(size + 2)
            await reader.readexactly(2)
        answered += 1
        if b"connection: close" in said:
            writer.close()
            return answered


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("clients", [16, 200])
async def test_at_the_end_no_client_on_a_kept_connection_is_without_an_answer(
    tmp_path, workers, clients
):
    path = tmp_path / "gateway.yaml"
    bodies = [json.dumps(STREAM | {"stream": streams}).encode() for streams in (True, False)]
    async with fake_instances(2) as fakes:
        write(path, fakes, server={"shutdown_timeout_s": 60})
        for fake in fakes:
            fake.delay_s = 0.02
        command = ("serve", "-c", str(path), "--port", "0", "--workers", str(workers))
        gateway = await asyncio.to_thread(Process, *command)
        try:
            port = httpx.URL(await asyncio.to_thread(gateway.wait_ready)).port
            asking = [
                asyncio.ensure_future(one_after_the_other(port, bodies[i % 2]))
                for i in range(clients)
            ]
            await until(lambda: sum(fake.requests for fake in fakes) > 3 * clients)
            gateway.process.send_signal(signal.SIGTERM)
            assert min(await asyncio.gather(*asking)) > 0
            assert await asyncio.to_thread(gateway.process.wait, 60) == 0
        finally:
            await asyncio.to_thread(gateway.stop, signal.SIGKILL)


@pytest.mark.parametrize("workers", [1, 2])
async def test_who_has_connected_as_the_gateway_is_told_to_end_is_served(tmp_path, workers):
    path = tmp_path / "gateway.yaml"
    async with fake_instances(1) as fakes:
        write(path, fakes, server={"shutdown_timeout_s": 60})
        command = ("serve", "-c", str(path), "--port", "0", "--workers", str(workers))
        gateway = await asyncio.to_thread(Process, *command)
        try:
            port = httpx.URL(await asyncio.to_thread(gateway.wait_ready)).port
            pid = gateway.process.pid
            processes = [pid, *children(pid)]
            for each in processes:  # so that none is accepted before
                os.kill(each, signal.SIGSTOP)
            body = json.dumps(STREAM).encode()
            asking = [asyncio.ensure_future(one_after_the_other(port, body)) for _ in range(40)]
            await asyncio.sleep(0.1)
            gateway.process.send_signal(signal.SIGTERM)
            for each in processes:
                os.kill(each, signal.SIGCONT)
            assert min(await asyncio.gather(*asking)) > 0
            assert await asyncio.to_thread(gateway.process.wait, 60) == 0
        finally:
            await asyncio.to_thread(gateway.stop, signal.SIGKILL)


async def test_a_worker_that_is_started_again_has_the_configuration_in_effect(tmp_path):
    path = tmp_path / "gateway.yaml"
    async with fake_instances(1) as fakes:
        write(path, fakes)
        command = ("serve", "-c", str(path), "--port", "0", "--workers", "2")
        gateway = await asyncio.to_thread(Process, *command)
        client = httpx.AsyncClient(timeout=60)
        try:
            url = await asyncio.to_thread(gateway.wait_ready)
            write(path, fakes, server={"max_body_bytes": 2000})
            assert (await client.post(url + "/admin/reload")).status_code == 200
            path.write_text("instances: [")
            for child in children(gateway.process.pid):
                os.kill(child, signal.SIGKILL)

            async def all_new() -> bool:
                try:
                    text = (await client.get(url + "/metrics")).text
                except httpx.HTTPError:
                    return False
                return "hetero_gateway_workers 2.0" in text

            await until(all_new)
            long = STREAM | {"user": "x" * 3000}
            assert (await client.post(url + CHAT, json=long)).status_code == 413
            assert (await client.post(url + CHAT, json=STREAM)).status_code == 200
        finally:
            await client.aclose()
            await asyncio.to_thread(gateway.stop)
