"""Under the default policy the faster instance gets more, and the slower one is not left idle."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import httpx
import pytest
from real_vllm.cluster import PATIENCE_S, Cluster, chat

pytestmark = pytest.mark.real_vllm

REQUESTS = 60
CLIENTS = 12
OUTPUT_TOKENS = 40


async def test_the_faster_instance_gets_more(
    cluster: Cluster, figure: Callable[[str], None]
) -> None:
    shares: Counter[str] = Counter()
    left = list(range(REQUESTS))

    async def client(http: httpx.AsyncClient) -> None:
        while left:
            # A user's number in each prompt, so that they are not all one cached prefix.
            content = f"request {left.pop()}: def f(x): return x"
            body = chat(OUTPUT_TOKENS, messages=[{"role": "user", "content": content}])
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == OUTPUT_TOKENS
            shares[answer.headers["x-hetero-gateway-instance"]] += 1

    began_s = time.perf_counter()
    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
    took_s = time.perf_counter() - began_s
    figure(
        f"{REQUESTS} requests of {OUTPUT_TOKENS} tokens, {CLIENTS} at a time: "
        f"small {shares['small']}, large {shares['large']}; "
        f"{REQUESTS * OUTPUT_TOKENS / took_s:.0f} tokens/s"
    )
    assert sum(shares.values()) == REQUESTS
    assert shares["small"] > shares["large"] > 0


def test_the_books_agree_with_what_was_asked(cluster: Cluster) -> None:
    before = cluster.gateway_values("hetero_gateway_output_tokens_total")
    cluster.post("/v1/chat/completions", chat(17, "tiny-fast"))
    with cluster.stream("/v1/chat/completions", chat(23, "tiny-fast", stream=True)) as response:
        response.read()
    with cluster.stream(
        "/v1/chat/completions",
        chat(31, "tiny-fast", stream=True, stream_options={"include_usage": True}),
    ) as response:
        response.read()
    after = cluster.gateway_values("hetero_gateway_output_tokens_total")
    counted = after.get("small", 0) - before.get("small", 0)
    # Without usage the events are counted, and vLLM merges some tokens into one event.
    assert 17 + 20 + 31 <= counted <= 17 + 25 + 31
