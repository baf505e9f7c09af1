"""What the tests see: the servers of scripts/real-vllm, their metrics, and raw connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families
from real_vllm.servers import ALIASES, SERVED_NAME, Server, load_server, wait_until

# Only a hang meets it. Where vLLM's kernels were slow (335 tokens/s), one prefill step took 46 s,
# an abort waits for the step that runs, and 200 streams share those tokens.
PATIENCE_S = 900.0
LOAD_GAUGES = ("hetero_gateway_in_flight_requests", "hetero_gateway_instance_workload")

Figure = Callable[[str], None]  # prints a line of figures at the end of the run


class Cluster:
    """The gateway and the two engines behind it."""

    def __init__(self, run_directory: Path) -> None:
        self.engines: dict[str, Server] = {
            name: load_server(run_directory / f"{name}.json") for name in ALIASES
        }
        self.gateway = load_server(run_directory / "gateway.json")
        self.url = self.gateway.base_url
        self.http = httpx.Client(timeout=PATIENCE_S)

    def samples(self, base_url: str = "") -> Iterator[tuple[str, dict[str, str], float]]:
        """Name, labels and value of every sample that the gateway, or another server, shows."""
        text = self.http.get(f"{base_url or self.url}/metrics").text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value

    def total(self, *metrics: str, base_url: str = "", **labels: str) -> float:
        """The sum of the samples of these names that have these labels."""
        return sum(
            value
            for name, found, value in self.samples(base_url)
            if name in metrics and labels.items() <= found.items()
        )

    def engine_requests(self, name: str) -> float:
        """Requests running and waiting on an engine, as it says itself."""
        gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return self.total(*gauges, base_url=self.engines[name].base_url)

    def engine_completions(self, name: str) -> float:
        """Requests that an engine brought to their full length; an aborted one is not counted."""
        url = self.engines[name].base_url
        return self.total("vllm:request_success_total", base_url=url, finished_reason="length")

    def gateway_values(self, metric: str) -> dict[str, float]:
        """One metric of the gateway by instance, summed over its other labels."""
        values: dict[str, float] = {}
        for name, labels, value in self.samples():
            if name == metric and "backend" in labels:
                key = labels["backend"]
                values[key] = values.get(key, 0.0) + value
        return values

    def loads(self) -> dict[str, dict[str, float]]:
        return {gauge: self.gateway_values(gauge) for gauge in LOAD_GAUGES}

    def assert_idle(self) -> None:
        """The gateway's loads are exactly 0 and the engines have no request, now or soon."""
        assert wait_until(lambda: not any(self._alive_requests()), PATIENCE_S), "engines are busy"
        zero = {gauge: dict.fromkeys(self.engines, 0.0) for gauge in LOAD_GAUGES}
        wait_until(lambda: self.loads() == zero, PATIENCE_S)
        assert self.loads() == zero

    def _alive_requests(self) -> list[float]:
        return [self.engine_requests(name) for name, e in self.engines.items() if e.is_ready()]

    def assert_up(self, **expected: bool) -> None:
        """The gateway comes to see the instances as given, e.g. ``small=True, large=False``."""
        wanted = {name: float(up) for name, up in expected.items()}
        wait_until(lambda: self.gateway_values("hetero_gateway_instance_up") == wanted, PATIENCE_S)
        assert self.gateway_values("hetero_gateway_instance_up") == wanted

    def restore(self) -> None:
        """Restart what is dead, and wait until the gateway sees all of it."""
        dead = [engine for engine in self.engines.values() if not engine.is_running()]
        for engine in dead:
            engine.start()
        for engine in dead:
            engine.wait_ready()
        self.assert_up(**dict.fromkeys(self.engines, True))

    def post(self, path: str, body: object, base_url: str = "") -> httpx.Response:
        """POST ``body`` (bytes as they are, anything else as JSON) to the gateway, or elsewhere."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        return self.http.post((base_url or self.url) + path, content=content, headers=headers)

    def stream(self, path: str, body: object) -> AbstractContextManager[httpx.Response]:
        return self.http.stream("POST", self.url + path, json=body)


def chat(max_tokens: int, model: str = SERVED_NAME, **more: Any) -> dict[str, Any]:
    """A chat request whose answer has exactly ``max_tokens`` tokens."""
    messages = [{"role": "user", "content": "def f(x): return x"}]
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True}
    return body | more


async def send_raw(
    base_url: str, path: str, body: object
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a POST on a connection of its own and leave the answer unread."""
    address = urlsplit(base_url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    return reader, writer
