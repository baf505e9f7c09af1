"""The planner's KV bytes per token against the blocks that the engines say they have.

On CPUs vLLM measures nothing: its pool is as large as VLLM_CPU_KVCACHE_SPACE says. What is left to
check is how many tokens go into it.
"""

import json
from pathlib import Path

import pytest

from hetero_gateway.files.checkpoints.shape import model_from_config

pytestmark = pytest.mark.real_vllm

GIB = 2**30


@pytest.mark.parametrize("name", ["small", "large"])
def test_the_planner_fills_the_pool_with_as_many_blocks_as_the_engine(servers, name, figure):
    engine = servers.engines[name]
    directory = Path(engine.argv[engine.argv.index("--model") + 1])
    dtype = engine.argv[engine.argv.index("--dtype") + 1]
    config = json.loads((directory / "config.json").read_text())
    model = model_from_config(config, name=name, dtype=dtype)

    shown = servers.samples(engine.base_url)
    labels = next(labels for metric, labels, _ in shown if metric == "vllm:cache_config_info")
    blocks, block_tokens = int(labels["num_gpu_blocks"]), int(labels["block_size"])

    pool_bytes = int(engine.env["VLLM_CPU_KVCACHE_SPACE"]) * GIB
    block_bytes = block_tokens * model.kv_token_bytes()
    figure(
        f"KV pool of {name}: {blocks} blocks of {block_tokens} tokens; "
        f"{model.kv_token_bytes():.0f} bytes per token make {pool_bytes / block_bytes:.2f} blocks"
    )
    assert blocks == pool_bytes // block_bytes
