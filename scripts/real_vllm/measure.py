"""A quick profile of one idle vLLM server: ``python measure.py BASE_URL GPU MODEL > profile.yaml``.

A dozen cells of (batch, prompt tokens), each the best of two: prefill is the time to the last first
token of a batch sent at once, a decode step the mean gap of the request whose first token came
last. p1..p4 and p5..p8 of Eqs. (3) and (4) are then fitted with relative errors and no negative
constant. Rough by intent: enough to tell the two instances of scripts/real-vllm apart.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import random
import re
import sys
import time

import httpx
import numpy as np
import yaml
from scipy.optimize import nnls

PREFILL_CELLS = [(1, 32), (1, 256), (1, 1024), (1, 3000), (4, 32), (4, 256), (8, 64), (8, 256)]
DECODE_CELLS = [(1, 32), (1, 2000), (2, 500), (4, 32), (4, 1000), (8, 32), (16, 32), (16, 250)]
DECODE_TOKENS = 40
REPEATS = 2


async def stream(
    client: httpx.AsyncClient, model: str, prompt_tokens: int, tokens: int
) -> tuple[float, float]:
    """When the first and the last token of one request came."""
    # Random tokens, so that the prefix cache has no part in it; 0..2 are special.
    prompt = [random.randrange(3, 2000) for _ in range(prompt_tokens)]
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    times_s: list[float] = []
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times_s.append(time.perf_counter())
    return times_s[0], times_s[-1]


async def batch(
    client: httpx.AsyncClient, model: str, size: int, prompt_tokens: int, tokens: int
) -> tuple[float, float]:
    """Seconds to the last first token, and per decode step of the request that began last."""
    began_s = time.perf_counter()
    spans = await asyncio.gather(
        *(stream(client, model, prompt_tokens, tokens) for _ in range(size))
    )
    first_s, last_s = max(spans)
    return first_s - began_s, (last_s - first_s) / max(1, tokens - 1)


def fit(cells: list[tuple[int, float]], times_s: list[float]) -> tuple[list[float], float]:
    """Four constants of (b·I, b, I, 1), and the mean relative error of the fit."""
    x = np.array([(b * i, b, i, 1.0) for b, i in cells])
    y = np.array(times_s)
    constants, _ = nnls(x / y[:, None], np.ones(len(y)))
    return [float(f"{c:.3g}") for c in constants], float(np.mean(np.abs(x @ constants / y - 1)))


async def main(base_url: str, gpu: str, name: str) -> None:
    async with httpx.AsyncClient(base_url=base_url, timeout=600) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        await batch(client, model, 2, 32, 8)  # the first request compiles
        prefill_s, step_s = [], []
        for size, length in PREFILL_CELLS:
            runs = [await batch(client, model, size, length, 1) for _ in range(REPEATS)]
            prefill_s.append(min(run[0] for run in runs))
        for size, length in DECODE_CELLS:
            runs = [await batch(client, model, size, length, DECODE_TOKENS) for _ in range(REPEATS)]
            step_s.append(min(run[1] for run in runs))
        metrics = (await client.get("/metrics")).text
    prefill, prefill_error = fit(PREFILL_CELLS, prefill_s)
    # A step sees the prompt and, on average, half of the output.
    decode_cells = [(b, i + DECODE_TOKENS / 2) for b, i in DECODE_CELLS]
    decode, decode_error = fit(decode_cells, step_s)
    capacity = re.search(r'kv_cache_size_tokens="(\d+)"', metrics)
    document = {
        "gpu": gpu,
        "model": name,
        "tensor_parallel": 1,
        "constants": dict(zip([f"p{i}" for i in range(1, 9)], prefill + decode, strict=True)),
        "kv_capacity_tokens": int(capacity[1]) if capacity else 1,
        "max_num_seqs": 128,
        "source": {
            "how": "measured",
            "date": datetime.date.today(),
            "note": "scripts/real_vllm/measure.py, one core",
            "error": {"prefill": round(prefill_error, 3), "decode": round(decode_error, 3)},
        },
    }
    yaml.safe_dump(document, sys.stdout, sort_keys=False)
    cells = {"prefill_s": [PREFILL_CELLS, prefill_s], "step_s": [DECODE_CELLS, step_s]}
    print(json.dumps(cells), file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
