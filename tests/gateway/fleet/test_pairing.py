"""Pairs that refused each other: where that is shown, and for how long it is known."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx

from hetero_gateway.core.instances.pairs import REFUSED_FOR_S, Link
from hetero_gateway.files.gateway_config import GatewayConfig, load_gateway_config
from hetero_gateway.files.instance_config import InstanceConfig
from hetero_gateway.files.pairs_file import write_pairs
from hetero_gateway.files.yaml_file import parse_model
from hetero_gateway.gateway.fleet.instances import Fleet
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.running import FAST, eventually, running_gateway
from tests.fakes.vllm import FakeInstance, fake_instances

SERIES = "hetero_gateway_instance_refused_pairs"


def row(name: str, fake: FakeInstance, **more: Any) -> dict[str, Any]:
    transfer = {"connector": "NixlConnector"}
    return {
        "id": name, "base_url": fake.url, "model": "m", "profile": FAST, "kv_transfer": transfer,
    } | more  # fmt: skip


def refuse(fleet: Fleet, prefill: str, decode: str) -> None:
    pairs = fleet.scheduler.legs.pairs
    assert pairs is not None
    by_name = {str(name): name for name in fleet.instances}
    pairs.refuse(by_name[prefill], by_name[decode], time.monotonic())


async def test_a_refused_pair_is_shown_until_it_may_again() -> None:
    async with fake_instances(3) as fakes:
        config = {
            "server": {"port": 0},
            "scheduler": {"split_requests": "each"},
            "instances": [row(name, fake) for name, fake in zip("ab", fakes, strict=False)],
        }
        async with running_gateway(GatewayConfig.model_validate(config)) as running:
            gateway, fleet = running.gateway, running.gateway.fleet
            await eventually(lambda: all(each.up for each in fleet.instances.values()))
            assert f'{SERIES}{{backend="a"}} 0.0' in await running.metrics()
            refuse(fleet, "a", "b")

            async def shown() -> dict[str, list[Any]]:
                async with httpx.AsyncClient(base_url=running.url) as client:
                    told = json.loads((await client.get("/admin/instances")).text)
                return {each["id"]: each["refused_pairs"] for each in told["instances"]}

            (told,) = (await shown())["a"]
            assert told["to"] == "b"
            assert REFUSED_FOR_S - 5 < told["for_s"] <= REFUSED_FOR_S
            # Who joins does not make it forgotten.
            await gateway.roster.add(parse_model(InstanceConfig, row("c", fakes[2]), "body"))
            assert len((await shown())["a"]) == 1
            assert f'{SERIES}{{backend="a"}} 1.0' in await running.metrics()
            assert f'{SERIES}{{backend="b"}} 0.0' in await running.metrics()
            text = "b cannot fetch the prompts that a computes."
            assert ("warning", text) in [
                (each["severity"], each["text"]) for each in gateway.board.alarms.now()
            ]
            await asyncio.sleep(REFUSED_FOR_S)
            assert await shown() == {"a": [], "b": [], "c": []}


async def test_what_was_measured_of_pairs_is_taken_and_read_again(tmp_path: Path) -> None:
    async with fake_instances(3) as fakes:
        rows = [row(name, fake) for name, fake in zip("abc", fakes, strict=True)]

        large = rows[2] | {"kv_transfer": rows[2]["kv_transfer"] | {"kv_bytes_per_token": 262144}}

        def measure(start_s: float) -> None:
            told = [
                {"prefill": "a", "decode": fakes[1].url, "start_s": start_s, "tokens_per_s": 1e4},
                {"prefill": "b", "decode": "a", "refused": "answered 500"},
            ]
            write_pairs(tmp_path / "pairs.yaml", {"pairs": told})

        measure(0.25)
        config = {
            "server": {"port": 0},
            "scheduler": {"split_requests": "each", "pairs_file": "pairs.yaml"},
            "instances": [*rows[:2], large],
        }
        path = tmp_path / "gateway.yaml"
        path.write_text(json.dumps(config))
        async with running_gateway(load_gateway_config(path), config_path=path) as running:
            legs = running.gateway.fleet.scheduler.legs

            def links() -> dict[str, Link]:
                assert legs.pairs is not None
                return {f"{one}{other}": link for (one, other), link in legs.pairs.links().items()}

            assert set(links()) == {"ab", "ac", "bc", "ca", "cb"}
            assert links()["ab"] == Link(0.25, 1e4 * 131072)
            assert links()["ac"] == Link(0.01, 10e9 / 8 / 2)
            measure(0.5)
            await running.gateway.reloader.reload("a test")
            assert links()["ab"].start_s == 0.5
