"""What the gateway makes of what an engine says of itself."""

import json

import httpx
import pytest

from tests.fakes.running import config_for, eventually, running_gateway
from tests.fakes.vllm import fake_instances

RANKS = (
    'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 1.0\n'
    'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.2\n'
    'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
    'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="300"} 1.0\n'
)


async def test_the_ranks_of_an_instance_are_one_cache() -> None:
    async with fake_instances(1) as fakes:
        fakes[0].metrics = RANKS
        async with running_gateway(config_for(fakes)) as running:
            (instance,) = running.gateway.fleet.instances.values()
            assert instance.engine_kv_capacity_tokens == 400 * 16
            assert instance.engine_kv_usage == pytest.approx(0.4)


@pytest.mark.parametrize("listed", [[], "models", {"data": {"m": 1}}, {"data": ["m", None]}])
async def test_an_odd_list_of_models_ends_neither_the_start_nor_the_others(
    listed: object,
) -> None:
    async with fake_instances(2) as fakes:
        fakes[0].models_body = json.dumps(listed).encode()
        config = config_for(fakes)
        async with running_gateway(config) as running:
            await eventually(lambda: all(i.up for i in running.gateway.fleet.instances.values()))
            async with httpx.AsyncClient(base_url=running.url) as client:
                cards = (await client.get("/v1/models")).json()["data"]
                assert [card["id"] for card in cards] == ["m"]
                answer = await client.post("/v1/completions", json={"model": "m", "prompt": "x"})
                assert answer.headers["x-hetero-gateway-instance"] == "i1"
