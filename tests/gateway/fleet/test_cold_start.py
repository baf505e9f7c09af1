"""Two engines that are eight times as slow as their profiles say, from the first request on."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import numpy as np

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.engines.vllm.paths import COMPLETIONS
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.profile_file import profile_document, write_profile_file
from hetero_gateway.lab.emulator.settings import EmulatorSettings
from tests.fakes.emulated import emulated
from tests.fakes.running import eventually, running_gateway

BELIEVED = Constants(5e-5, 0.0, 0.0, 0.007, 0.0, 1e-4, 0.0, 0.01)
WRONG, FIRST, REQUESTS = 8.0, 10, 30


def machine(times_slower: float) -> Profile:
    return Profile("GPU", "tiny", 1, BELIEVED.scaled(times_slower), 100_000, 64)


async def makespan_s(
    folder: Path, slower: Sequence[float], wrong: float | None, per_s: float = 4.0
) -> float:
    """From the eleventh request's arrival to the last one's end; ``wrong`` None: no profile."""
    async with AsyncExitStack() as stack:
        rows = []
        for i, times in enumerate(slower):
            settings = EmulatorSettings(machine(times), models=("m",), max_model_len=4096)
            url, _ = await stack.enter_async_context(emulated(settings))
            row = {"id": f"i{i}", "base_url": url, "model": "m"}
            if wrong is not None:
                row["profile"] = str(folder / f"{wrong}-{i}.yaml")
                document = profile_document(machine(times / wrong), {"how": "derived"})
                write_profile_file(Path(row["profile"]), document)
            rows.append(row)
        config = GatewayConfig.model_validate({"server": {"port": 0}, "instances": rows})
        running = await stack.enter_async_context(running_gateway(config))
        client = httpx.AsyncClient(base_url=running.url, timeout=600)
        await stack.enter_async_context(client)
        rng = np.random.default_rng(0)

        async def one(prompt_tokens: int, output_tokens: int) -> None:
            body = {
                "model": "m", "prompt": [7] * prompt_tokens, "stream": True, "ignore_eos": True,
                "max_tokens": output_tokens,
            }  # fmt: skip
            assert (await client.post(COMPLETIONS, json=body)).status_code == 200

        async with asyncio.TaskGroup() as tasks:
            for i in itertools.count():
                if i == FIRST:
                    began_s = time.monotonic()
                if i == REQUESTS:
                    break
                tasks.create_task(one(int(rng.integers(50, 500)), int(rng.integers(10, 40))))
                await asyncio.sleep(rng.exponential(1 / per_s))
        took_s = time.monotonic() - began_s
        await eventually(running.settled)
        return took_s


async def test_after_ten_requests_it_is_as_if_the_profiles_were_right(tmp_path: Path) -> None:
    slower = (10 * WRONG, WRONG)
    right_s = await makespan_s(tmp_path, slower, 1.0)
    wrong_s = await makespan_s(tmp_path, slower, WRONG)
    assert wrong_s <= 1.1 * right_s
