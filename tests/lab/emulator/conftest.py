"""Emulated instances on real sockets, each in a thread with an event loop of its own."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.lab.emulator.app import EmulatedVLLM
from hetero_gateway.lab.emulator.server import EmulatedServer, listen
from hetero_gateway.lab.emulator.settings import EmulatorSettings

# About 1 ms for a step: quick, and slow enough that a test can act in the middle of an answer.
FAST = Constants(p1=1e-6, p2=1e-5, p3=0, p4=1e-3, p5=1e-9, p6=1e-5, p7=0, p8=1e-3)


@dataclass
class Instance:
    """A running emulated instance and how to ask it."""

    base_url: str
    server: EmulatedServer
    http: httpx.Client

    def post(self, path: str, body: object, **options) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def stream(self, path: str, body: dict[str, object], **options) -> list[str]:
        """The data of every server-sent event of a streamed answer."""
        response = self.post(path, {**body, "stream": True}, **options)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return [
            block.partition("data: ")[2] for block in response.text.split("\n\n") if block.strip()
        ]

    def ask(self, path: str, body: object, **options) -> dict[str, Any]:
        """The document that answers it."""
        response = self.post(path, body, **options)
        assert response.status_code == 200, response.text
        return response.json()

    def chunks(self, path: str, body: dict[str, object]) -> list[dict[str, Any]]:
        """The documents of a stream that ends with [DONE]."""
        *chunks, done = self.stream(path, body)
        assert done == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]

    def metric(self, name: str) -> float:
        match = re.search(
            rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", self.http.get("/metrics").text, re.MULTILINE
        )
        assert match, name
        return float(match[1])

    def wait_for(self, name: str, value: float) -> None:
        """Return when a metric has this value."""
        started_s = time.perf_counter()
        while self.metric(name) != value:
            assert time.perf_counter() - started_s < 60.0, f"{name} is never {value}"
            time.sleep(0.002)


def profile(constants: Constants = FAST, kv_tokens: int = 64_000) -> Profile:
    return Profile("GPU", "tiny", 1, constants, kv_tokens, 64)


@contextmanager
def running(settings: EmulatorSettings) -> Iterator[Instance]:
    listener = listen("127.0.0.1", 0)
    ready = threading.Event()
    server = EmulatedServer(EmulatedVLLM(settings), listener, on_ready=ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        assert ready.wait(60)
        base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(base_url=base_url, timeout=60) as http:
            yield Instance(base_url, server, http)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


Emulate = Callable[..., Instance]


@pytest.fixture
def emulate() -> Iterator[Emulate]:
    """Starts instances of its own for one test: ``emulate(max_num_seqs=1)``."""
    stack = ExitStack()

    def start(constants: Constants = FAST, kv_tokens: int = 64_000, **options) -> Instance:
        context = running(EmulatorSettings(profile(constants, kv_tokens), **options))
        return stack.enter_context(context)

    with stack:
        yield start


@pytest.fixture(scope="module")
def instance() -> Iterator[Instance]:
    """One instance for every test of a module that leaves nothing behind."""
    with running(
        EmulatorSettings(profile(), models=("tiny", "alias"), max_model_len=4096)
    ) as started:
        yield started
