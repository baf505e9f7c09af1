"""Eight emulated instances, each in a process of its own, that can be killed, stopped and broken.

The processes are forked from one that has imported everything, so that one that was killed is back
in a fraction of a second. Each is the package's own emulator under uvicorn; only what its sockets
write may be disturbed (``faults.py``).
"""

import asyncio
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.lab.emulator.app import EmulatedVLLM
from hetero_gateway.lab.emulator.server import EmulatedServer
from hetero_gateway.lab.emulator.settings import EmulatorSettings
from hetero_gateway.lab.emulator.transfer_settings import KVTransferConfig, KVTransferSettings
from hetero_gateway.lab.load.emulated import write_profile
from tests.chaos.faults import Faults, break_transfers, faulty
from tests.fakes.vllm import bound

MODEL = "chaos"
# A decode step of the fastest; the others take these times as long.
STEP_S = 0.03
SLOWNESS = (1.0, 1.0, 1.5, 1.5, 2.0, 2.0, 3.0, 3.0)
READY_WITHIN_S = 60.0


def profile(slowness: float, leg: str = "") -> Profile:
    """What an instance is emulated with, and what the gateway knows of it.

    ``leg``: what it does quickly where requests are split, "prompt" or "answer".
    """
    if leg:
        per_token_s, step_s = (1e-5, 3 * STEP_S) if leg == "prompt" else (2e-3, STEP_S)
        made = Constants(per_token_s, 0.0, 0.0, 0.01, 0.0, 0.0, 0.0, step_s)
        return Profile("emulated", MODEL, 1, made, 65536, 64)
    constants = Constants(
        p1=2e-5 * slowness, p2=0.0, p3=0.0, p4=0.01 * slowness,
        p5=1e-8 * slowness, p6=1e-5 * slowness, p7=1e-8 * slowness, p8=STEP_S * slowness,
    )  # fmt: skip
    return Profile("emulated", MODEL, 1, constants, 65536, 64)


class Instance:
    """One process; its port stays its own while it is down."""

    def __init__(self, number: int, seed: int, context: Any, lease_s: float) -> None:
        self.id = f"i{number}"
        self.leg = ("prompt", "answer")[number % 2] if lease_s else ""
        self._lease_s = lease_s
        self.slowness = SLOWNESS[number % len(SLOWNESS)]
        self._seed = seed
        self._context = context
        # Bound and not listening: while the process is down connections are refused, and nobody
        # else is given the port.
        self._held = bound(0)
        self.port: int = self._held.getsockname()[1]
        self._process: Any = None
        self._control: Connection | None = None
        self.stopped = False
        # Whose turn it is to disturb it: on a busy machine a start takes longer than planned.
        self.turn = asyncio.Lock()
        self.starts = 0
        # When a fault was on, in the harness's time: (kind, from, until or None).
        self.history: list[list[Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Be there, whole and healthy. Raises RuntimeError when it does not come up."""
        self.starts += 1
        ours, theirs = self._context.Pipe()
        self._process = self._context.Process(
            target=_serve,
            args=(
                *(self.port, self.slowness, self._seed + self.starts, theirs),
                *(self.leg, self._lease_s),
            ),
            daemon=True,
        )  # fmt: skip
        self._process.start()
        theirs.close()
        self._control = ours
        if not await asyncio.to_thread(ours.poll, READY_WITHIN_S) or ours.recv() != "ready":
            raise RuntimeError(f"{self.id} did not come up")

    def kill(self) -> None:
        """SIGKILL: the kernel resets its connections."""
        if self._process is not None:
            self._process.kill()
            self._process.join(10)
            self._process = None
        if self._control is not None:
            self._control.close()
            self._control = None
        self.stopped = False

    def stop(self) -> None:
        """SIGSTOP: connections are taken by the kernel, and nobody answers."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGSTOP)
            self.stopped = True

    def go_on(self) -> None:
        if self.stopped and self.pid is not None:
            os.kill(self.pid, signal.SIGCONT)
        self.stopped = False

    def break_off(self, kind: str | None, share: float, now_s: float) -> None:
        """A fault of ``faults`` from now on; None: none."""
        if self.history and self.history[-1][2] is None:
            self.history[-1][2] = now_s
        if kind is not None:
            self.history.append([kind, now_s, None])
        if self._control is not None:
            self._control.send((kind, share))

    def had(self, kind: str, from_s: float, until_s: float) -> bool:
        """Whether a fault was on at some time of an interval."""
        return any(
            k == kind and begun <= until_s and (ended is None or ended >= from_s)
            for k, begun, ended in self.history
        )

    def close(self) -> None:
        self.kill()
        self._held.close()


def make_instances(count: int, seed: int, *, lease_s: float = 0.0) -> list[Instance]:
    """Not yet started. ``lease_s``: they hand prompts over, which half of them compute quickly,
    and half of them answer so; 0: they do not.
    """
    # What numpy starts on import would not outlive a fork.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.chaos.instances"])
    return [
        Instance(number, seed * 1000 + number * 100, context, lease_s) for number in range(count)
    ]


def write_profiles(instances: list[Instance], directory: Path) -> dict[str, str]:
    """Profile files; the path by instance."""
    paths = {instance.id: directory / f"{instance.id}.yaml" for instance in instances}
    for instance in instances:
        write_profile(profile(instance.slowness, instance.leg), paths[instance.id])
    return {name: str(path) for name, path in paths.items()}


def _serve(
    port: int, slowness: float, seed: int, control: Connection, leg: str, lease_s: float
) -> None:
    """The process: serve until it is killed, or whoever holds the other end is gone."""
    sys.stderr = open(os.devnull, "w")  # broken connections are meant
    faults = Faults(seed)
    transfer = None
    if leg:
        extra = {"kv_lease_duration": lease_s}
        told = {"kv_connector": "NixlConnector", "kv_connector_extra_config": extra}
        transfer = KVTransferSettings(KVTransferConfig.model_validate(told), start_s=0.02)
    made = EmulatorSettings(profile(slowness, leg), models=(MODEL,), kv_transfer=transfer)
    emulated = EmulatedVLLM(made)
    if emulated.transfer is not None:
        break_transfers(emulated.transfer, faults)
    listener = bound(port)
    listener.listen(4096)

    def obey() -> None:
        try:
            faults.set(*control.recv())
        except (EOFError, OSError):
            os._exit(0)

    def ready() -> None:
        asyncio.get_running_loop().add_reader(control.fileno(), obey)
        control.send("ready")

    server = EmulatedServer(emulated, listener, on_ready=ready)
    server.config.http = faulty(faults)
    server.serve_until_signal()
