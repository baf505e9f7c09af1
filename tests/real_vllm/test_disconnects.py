"""A client that goes away takes its work with it: on the engine, and in the gateway's books."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from real_vllm.cluster import LOAD_GAUGES, PATIENCE_S, Cluster, Figure, chat, send_raw
from real_vllm.servers import ALIASES, wait_until

pytestmark = pytest.mark.real_vllm

# Long enough that the engine cannot be through before the client is gone: 4 000 tokens take it
# 13 s at best on the small instance, a minute on the large one.
LONG_TOKENS = 4000


def long_chat(instance: str, **more: Any) -> dict[str, Any]:
    return chat(LONG_TOKENS, ALIASES[instance], **more)


def long_prefill(**more: Any) -> dict[str, Any]:
    """Prompts that keep the large instance from its first token for seconds; random: uncached."""
    prompts = [[random.randrange(3, 2000) for _ in range(3500)] for _ in range(8)]
    return {"model": ALIASES["large"], "prompt": prompts, "max_tokens": 2, **more}


async def wait_for(condition: Callable[[], bool], what: str) -> float:
    """Seconds until it holds."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    assert await asyncio.to_thread(wait_until, condition, PATIENCE_S, 0.02), what
    return loop.time() - began_s


async def assert_aborted(
    cluster: Cluster,
    instance: str,
    writer: asyncio.StreamWriter,
    figure: Figure,
    what: str,
) -> None:
    """Close the client's connection; the engine's and the gateway's counts go to 0."""
    for gauge in LOAD_GAUGES:
        assert cluster.gateway_values(gauge)[instance] > 0, gauge
    disconnects = disconnects_of(cluster)
    completions = cluster.engine_completions(instance)
    writer.close()
    took_s = await wait_for(
        lambda: cluster.engine_requests(instance) == 0, "the engine still works on it"
    )
    assert cluster.engine_completions(instance) == completions, "it was finished, not aborted"
    figure(f"disconnect, {what}: the engine's requests were 0 after {took_s * 1e3:.0f} ms")
    cluster.assert_idle()
    assert disconnects_of(cluster) == disconnects + 1


def disconnects_of(cluster: Cluster) -> float:
    return cluster.total("hetero_gateway_client_disconnects_total")


@pytest.mark.parametrize("instance", ALIASES)
async def test_leaving_in_mid_stream_aborts_on_the_engine(cluster, instance, figure):
    body = long_chat(instance, stream=True)
    reader, writer = await send_raw(cluster.url, "/v1/chat/completions", body)
    for _ in range(5):
        await asyncio.wait_for(reader.readuntil(b'"delta":{"content"'), PATIENCE_S)
    await wait_for(lambda: cluster.engine_requests(instance) > 0, "the engine never had it")
    await assert_aborted(cluster, instance, writer, figure, f"mid-stream, {instance}")


async def test_leaving_before_the_answer_aborts_a_plain_request(
    cluster: Cluster, figure: Figure
) -> None:
    _, writer = await send_raw(cluster.url, "/v1/chat/completions", long_chat("small"))
    await wait_for(lambda: cluster.engine_requests("small") > 0, "the engine never had it")
    await assert_aborted(cluster, "small", writer, figure, "not streamed, in decode")


@pytest.mark.parametrize("streamed", [True, False])
async def test_leaving_before_the_first_token_aborts(cluster, streamed, figure):
    body = long_prefill(stream=streamed)
    reader, writer = await send_raw(cluster.url, "/v1/completions", body)
    await wait_for(lambda: cluster.engine_requests("large") > 0, "the engine never had it")
    what = "streamed" if streamed else "not streamed"
    received = b""
    if streamed:  # vLLM sends its headers before the first token
        received = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        assert received.startswith(b"HTTP/1.1 200")
    await assert_aborted(cluster, "large", writer, figure, f"before the first token, {what}")
    assert b"data:" not in received + await asyncio.wait_for(reader.read(), PATIENCE_S)


async def test_many_clients_that_leave_at_random_leave_nothing_behind(cluster: Cluster) -> None:
    rng = random.Random(7)

    async def one(after_s: float, streamed: bool) -> None:
        body = chat(LONG_TOKENS, stream=streamed)
        _, writer = await send_raw(cluster.url, "/v1/chat/completions", body)
        await asyncio.sleep(after_s)
        writer.close()

    before = {name: cluster.engine_completions(name) for name in ALIASES}
    await asyncio.gather(*(one(rng.uniform(0, 3), rng.random() < 0.5) for _ in range(60)))
    await asyncio.to_thread(cluster.assert_idle)
    assert {name: cluster.engine_completions(name) for name in ALIASES} == before
