"""Under the default policy the faster instance gets more; what it has no slot for, the slower."""

import asyncio
import time
from collections import Counter

import httpx
import pytest
from real_vllm.cluster import PATIENCE_S, Cluster, Figure, chat

pytestmark = pytest.mark.real_vllm

OUTPUT_TOKENS = 40


async def shares(cluster: Cluster, figure: Figure, requests: int, clients: int) -> Counter[str]:
    """Send so many requests by so many clients; how many each instance got."""
    counts: Counter[str] = Counter()
    left = list(range(requests))

    async def client(http: httpx.AsyncClient) -> None:
        while left:
            # A user's number in each prompt, so that they are not all one cached prefix.
            content = f"request {left.pop()}: def f(x): return x"
            body = chat(OUTPUT_TOKENS, messages=[{"role": "user", "content": content}])
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == OUTPUT_TOKENS
            counts[answer.headers["x-hetero-gateway-instance"]] += 1

    began_s = time.perf_counter()
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S, limits=limits) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))
    took_s = time.perf_counter() - began_s
    figure(
        f"{requests} requests of {OUTPUT_TOKENS} tokens, {clients} at a time: "
        f"small {counts['small']}, large {counts['large']}; "
        f"{requests * OUTPUT_TOKENS / took_s:.0f} tokens/s"
    )
    assert sum(counts.values()) == requests
    return counts


async def test_the_faster_instance_gets_more(cluster: Cluster, figure: Figure) -> None:
    # Twelve at a time are fastest all together on the fast one, five times as fast as the other.
    counts = await shares(cluster, figure, 60, 12)
    assert counts["small"] > counts["large"]


async def test_the_slower_instance_gets_what_the_faster_has_no_slot_for(
    cluster: Cluster, figure: Figure
) -> None:
    # The fast one runs 128 sequences at once.
    counts = await shares(cluster, figure, 400, 200)
    assert counts["small"] > counts["large"] > 0


def test_the_books_agree_with_what_was_asked(cluster: Cluster) -> None:
    before = cluster.gateway_values("hetero_gateway_output_tokens_total")
    cluster.post("/v1/chat/completions", chat(17, "tiny-fast"))
    for tokens, more in ((23, {}), (31, {"stream_options": {"include_usage": True}})):
        body = chat(tokens, "tiny-fast", stream=True, **more)
        with cluster.stream("/v1/chat/completions", body) as response:
            response.read()
    after = cluster.gateway_values("hetero_gateway_output_tokens_total")
    counted = after.get("small", 0) - before.get("small", 0)
    # Without usage the events are counted, and vLLM merges some tokens into one event.
    assert 17 + 20 + 31 <= counted <= 17 + 25 + 31
