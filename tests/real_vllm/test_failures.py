"""Engines that die: their clients learn it, others go on, and a restarted engine comes back."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from real_vllm.cluster import PATIENCE_S, Cluster, Figure, chat, send_raw
from real_vllm.servers import ALIASES, SERVED_NAME, session_members, wait_until

pytestmark = pytest.mark.real_vllm

CHAT = "/v1/chat/completions"


def engine_core(cluster: Cluster, instance: str) -> int:
    """vLLM's second process, which holds the model; its server reports its death and ends."""
    for pid in session_members(cluster.engines[instance].pid):
        if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("no EngineCore process")


def upstream_errors(cluster: Cluster) -> float:
    """Requests that ended in an error of the instance, whatever their HTTP status."""
    return cluster.total("hetero_gateway_requests_total", outcome="upstream_error")


async def test_a_server_killed_in_mid_stream(cluster: Cluster) -> None:
    victim = cluster.engines["small"]
    body = chat(4000, ALIASES["small"], stream=True)
    reader, writer = await send_raw(cluster.url, CHAT, body)
    for _ in range(5):
        await asyncio.wait_for(reader.readuntil(b'"delta":{"content"'), PATIENCE_S)
    victim.signal(signal.SIGKILL)
    rest = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    assert b'"error"' in rest, "the client was not told"
    assert b"[DONE]" not in rest, "a stream that was cut must not look complete"

    # Others go to the instance that lives, before the first probe has even failed.
    for _ in range(5):
        answer = await asyncio.to_thread(cluster.post, CHAT, chat(2))
        assert answer.status_code == 200
        assert answer.headers["x-hetero-gateway-instance"] == "large"

    await asyncio.to_thread(cluster.assert_up, small=False, large=True)
    names = {model["id"] for model in cluster.http.get(f"{cluster.url}/v1/models").json()["data"]}
    assert names == {SERVED_NAME, ALIASES["large"]}
    refused = await asyncio.to_thread(cluster.post, CHAT, chat(2, ALIASES["small"]))
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "no_healthy_instance"

    await asyncio.to_thread(cluster.restore)
    back = await asyncio.to_thread(cluster.post, CHAT, chat(2, ALIASES["small"]))
    assert back.status_code == 200


def test_an_engine_process_killed_in_mid_stream_reaches_openai_as_an_error(
    cluster: Cluster,
) -> None:
    """Here vLLM itself says so, and then a [DONE] under status 200: not a success."""
    before = upstream_errors(cluster)
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "def f(x): return x"}]
        stream = client.chat.completions.create(
            model=ALIASES["small"],
            messages=messages,
            max_tokens=4000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for _ in range(5):
            next(stream)
        os.kill(engine_core(cluster, "small"), signal.SIGKILL)
        with pytest.raises(openai.APIError):
            list(stream)
    assert wait_until(lambda: upstream_errors(cluster) == before + 1, PATIENCE_S)
    # Its server ends too, a moment later; only then is it known to be dead.
    assert cluster.engines["small"].wait_stopped(PATIENCE_S)


async def test_a_plain_request_on_a_killed_server_goes_to_another_instance(
    cluster: Cluster, figure: Figure
) -> None:
    """No byte of its answer was sent, so the request may be tried again elsewhere."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
        # Enough of them that the small instance has several.
        requests = [asyncio.create_task(http.post(CHAT, json=chat(150))) for _ in range(12)]
        had_work = lambda: cluster.engine_requests("small") >= 2  # noqa: E731
        assert await asyncio.to_thread(wait_until, had_work, PATIENCE_S)
        cluster.engines["small"].signal(signal.SIGKILL)
        answers = await asyncio.gather(*requests)
    # The retry budget allows ten at once by default; beyond it the client gets a 502.
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) <= {200, 502}
    assert statuses.count(200) >= 10
    by_large = [a for a in answers if a.headers.get("x-hetero-gateway-instance") == "large"]
    assert by_large
    figure(f"instance killed under 12 plain requests: {statuses.count(200)} answered with 200")


async def test_with_every_instance_dead_the_answer_is_503_at_once(cluster: Cluster) -> None:
    for engine in cluster.engines.values():
        await asyncio.to_thread(engine.kill)
    for streamed in (False, True):
        began_s = time.monotonic()
        answer = await asyncio.to_thread(cluster.post, CHAT, chat(2, stream=streamed))
        assert time.monotonic() - began_s < 10, "it must not wait for an instance"
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "no_healthy_instance"
    await asyncio.to_thread(cluster.assert_up, small=False, large=False)
    assert cluster.http.get(f"{cluster.url}/livez").status_code == 200
    assert cluster.http.get(f"{cluster.url}/readyz").status_code == 503
    again = await asyncio.to_thread(cluster.post, CHAT, chat(2))
    assert again.status_code == 503
    unknown = await asyncio.to_thread(cluster.post, CHAT, chat(2, "nobody-serves-this"))
    assert unknown.status_code == 404, "never known is not the same as known and dead"
    assert cluster.gateway.is_running()

    await asyncio.to_thread(cluster.restore)
    assert cluster.http.get(f"{cluster.url}/readyz").status_code == 200
    for alias in ALIASES.values():
        answer = await asyncio.to_thread(cluster.post, CHAT, chat(2, alias))
        assert answer.status_code == 200
