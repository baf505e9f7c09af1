"""Whether a process works: what its supervisor makes of silence, and who accepts meanwhile."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from hetero_gateway.serve.heartbeat import (
    LOOK_S,
    SILENT_LOOKS,
    Condition,
    Heartbeat,
    Pulse,
    is_stopped,
    tell_cover,
)
from hetero_gateway.serve.processes.supervisor import listen_together
from tests.fakes.running import eventually, rig

TIMEOUT_S = 30.0


def looks(pulse: Pulse, count: int, *, stopped: bool = False) -> list[Condition]:
    return [pulse.look(stopped=stopped) for _ in range(count)]


def test_silence_is_covered_at_once_and_ends_a_process_only_after_the_time_out() -> None:
    pulse = Pulse(TIMEOUT_S)
    for _ in range(1000):
        pulse.beat()
        assert looks(pulse, SILENT_LOOKS - 1) == [Condition.WELL] * (SILENT_LOOKS - 1)
    pulse.beat()
    assert looks(pulse, SILENT_LOOKS)[-1] is Condition.SILENT
    assert SILENT_LOOKS * LOOK_S < 2
    rest = looks(pulse, round(TIMEOUT_S / LOOK_S) - SILENT_LOOKS)
    assert set(rest) == {Condition.SILENT}
    assert pulse.look(stopped=False) is Condition.HANGS
    pulse.beat()  # one word after a long silence is enough
    assert pulse.look(stopped=False) is Condition.WELL


def test_one_that_is_stopped_is_so_after_two_seconds_unless_it_goes_on_in_between() -> None:
    pulse = Pulse(3600)
    for _ in range(50):
        pulse.beat()
        assert Condition.STOPPED not in looks(pulse, 2, stopped=True) + looks(pulse, 1)
    found = looks(pulse, 10, stopped=True)
    assert (found.index(Condition.STOPPED) + 1) * LOOK_S <= 2


def test_one_that_is_being_started_has_longer() -> None:
    pulse = Pulse(TIMEOUT_S)
    assert Condition.HANGS not in looks(pulse, round(5 * TIMEOUT_S / LOOK_S))
    assert Condition.HANGS in looks(pulse, round(6 * TIMEOUT_S / LOOK_S))


@contextlib.contextmanager
def child() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="the system does not say it")
async def test_the_system_says_who_is_stopped_again_and_again() -> None:
    with child() as pid:
        assert not is_stopped(pid)
        for _ in range(2):
            os.kill(pid, signal.SIGSTOP)
            await eventually(lambda: is_stopped(pid))
            assert is_stopped(pid)
            os.kill(pid, signal.SIGCONT)
            await eventually(lambda: not is_stopped(pid))
    assert not is_stopped(pid)  # it is gone


async def test_what_comes_in_for_another_worker_is_served_until_that_is_back() -> None:
    async with rig() as (running, _, _):
        (listener,) = listen_together("127.0.0.1", 0, 1)
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        ours, theirs = socket.socketpair()
        with ours, listener:
            ours.setblocking(False)
            heartbeat = Heartbeat(theirs.detach())
            heartbeat.start(running.server)
            async with httpx.AsyncClient(timeout=60) as early, httpx.AsyncClient() as late:
                asked = asyncio.ensure_future(early.get(f"{url}/livez"))
                await asyncio.sleep(0.1)
                assert not asked.done()  # it stands in the other's queue
                tell_cover(ours, 7, listener)
                assert (await asked).status_code == 200
                tell_cover(ours, 7, listener)  # said twice is done once
                tell_cover(ours, 7, None)
                await eventually(lambda: len(running.server.servers) == 1)
                # What it has accepted, it keeps; what comes now is the other's.
                assert (await early.get(f"{url}/livez")).status_code == 200
                mine = asyncio.ensure_future(late.get(f"{url}/livez"))
                loop = asyncio.get_running_loop()
                connection, _ = await asyncio.wait_for(loop.sock_accept(listener), 60)
                connection.close()
                with pytest.raises(httpx.HTTPError):
                    await mine
            said = await loop.sock_recv(ours, 100)
            assert set(said) == set(b".")
            heartbeat.stop()
