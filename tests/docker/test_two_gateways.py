"""Two gateways in front of the same instances, behind one real Prometheus, as shipped."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.ports import free_port
from tests.fakes.running import CHAT, config_for, running_gateway
from tests.fakes.vllm import fake_instances

PATIENCE_S = 60.0


class Prometheus:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def values(self, expression: str) -> dict[tuple[str, str], float]:
        """(instance, backend) to value."""
        answer = await self._client.get("/api/v1/query", params={"query": expression})
        rows = answer.json()["data"]["result"]
        return {
            (row["metric"].get("instance", ""), row["metric"].get("backend", "")): float(
                row["value"][1]
            )
            for row in rows
        }

    async def becomes(self, expression: str, wanted: dict[tuple[str, str], float]) -> None:
        values: dict[tuple[str, str], float] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while (values := await self.values(expression)) != wanted:  # noqa: ASYNC110 - a server is asked
                    await asyncio.sleep(0.2)
        assert values == wanted, expression


@contextlib.asynccontextmanager
async def prometheus(files, folder: Path, gateways: list[str]) -> AsyncIterator[Prometheus]:
    """The shipped configuration, with these addresses as the gateway's targets."""
    shipped = files.monitoring / "prometheus"
    config: dict[str, Any] = yaml.safe_load((shipped / "prometheus.yml").read_text("utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = (job for job in config["scrape_configs"] if job["job_name"] == "hetero-gateway")
    job["static_configs"] = [{"targets": gateways}]
    config["scrape_configs"] = [job]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), "utf-8")
    (folder / "alerts.yml").write_bytes((shipped / "alerts.yml").read_bytes())
    address = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        "prometheus", f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=PATIENCE_S) as client:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    with contextlib.suppress(httpx.TransportError):
                        if (await client.get("/-/ready")).status_code == 200:
                            break
                    await asyncio.sleep(0.1)
            yield Prometheus(client)
    finally:
        process.terminate()
        await process.wait()


def panel(files, title: str) -> str:
    """A panel's first query, over all models and backends."""
    (found,) = (panel for panel in files.panels() if panel["title"] == title)
    expression: str = found["targets"][0]["expr"]
    for variable in ("$model", "$backend", "$gateway"):
        expression = expression.replace(variable, ".*")
    return expression


@pytest.mark.system
async def test_the_series_of_two_gateways_add_up(files, tmp_path):
    async with (
        fake_instances(2) as fakes,
        running_gateway(config_for(fakes)) as first,
        running_gateway(config_for(fakes)) as second,
    ):
        hosts = [f"127.0.0.1:{gateway.port}" for gateway in (first, second)]
        async with prometheus(files, tmp_path, hosts) as found, httpx.AsyncClient() as client:
            completed = 'hetero_gateway_requests_total{outcome="completed"}'
            # Each gateway has its own counters from the start, at 0.
            zero = {(host, backend): 0.0 for host in hosts for backend in ("i0", "i1")}
            await found.becomes(completed, zero)
            for gateway, number in ((first, 3), (second, 5)):
                for _ in range(number):
                    body = {"model": "m", "messages": [], "stream": True}
                    assert (await client.post(gateway.url + CHAT, json=body)).status_code == 200
            await found.becomes(f"sum({completed})", {("", ""): 8.0})
            await found.becomes(
                f"sum by (instance) ({completed})", {(hosts[0], ""): 3.0, (hosts[1], ""): 5.0}
            )
            by_backend = await found.values(f"sum by (backend) ({completed})")
            assert by_backend.keys() == {("", "i0"), ("", "i1")}
            assert sum(by_backend.values()) == 8
            # Two instances, not four.
            await found.becomes(panel(files, "Instances up"), {("", ""): 2.0})
            await found.becomes(panel(files, "Requests in flight"), {("", "i0"): 0, ("", "i1"): 0})
            # The first requests show in a rate, since their counters were there at 0.
            increase = await found.values(f"sum(increase({completed}[1m]))")
            assert increase[("", "")] > 0
            assert await found.values('ALERTS{alertstate="firing"}') == {}
