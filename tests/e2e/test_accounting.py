"""The promise that matters most: whatever happens, every load ends at exactly 0."""

import asyncio
import json
import random
import re

import pytest

from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.running import config_for, eventually, running_gateway
from tests.fakes.vllm import fake_instances

pytestmark = pytest.mark.slow

REQUESTS = 500
AT_ONCE = 100
FAULTS: list[dict[str, object]] = [
    {},
    {},
    {},
    {"events": 20, "delay_s": 0.005},
    {"first_delay_s": 0.05},
    {"usage": False},
    {"framing": "close"},
    {"die": "before_head"},
    {"die": "after_head"},
    {"die": "mid_chunk"},
    {"die": "after_events"},
    {"die_mid_body": True},
    {"end": "error"},
    {"status": 400},
    {"status": 503},
    {"hang": True},
    {"garbage": "not http\r\n\r\n"},
    {"event_bytes": 100_000},
]


async def one_request(port: int, rng: random.Random) -> None:
    """A raw client that may leave at any moment, politely or not."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fault = rng.choice(FAULTS)
    body = json.dumps(
        {
            "model": rng.choice(["m", "m", "m", "nope"]),
            "messages": [{"role": "user", "content": "x" * rng.randrange(2000)}],
            # Long ones fill an instance's share of prompts without a first token, so that others
            # wait.
            "prompt": [1] * rng.choice([10, 3000]),
            "stream": rng.random() < 0.6,
            "n": rng.choice([1, 1, 2]),
            "max_tokens": rng.randrange(1, 1000),
            "fake": fault,
        }
    ).encode()
    if rng.random() < 0.03:
        body = body[:-5]  # broken JSON
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    length = len(body) + (10 if rng.random() < 0.02 else 0)  # a body that never comes whole
    patience_s = rng.choice([0.0, 0.01, 0.03, 0.1]) if rng.random() < 0.4 else 0.6
    try:
        writer.write(head + b"content-length: %d\r\n\r\n" % length + body)
        async with asyncio.timeout(patience_s):
            await reader.read()
    except (TimeoutError, ConnectionError):
        pass
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()


def request_tasks() -> list[asyncio.Task[object]]:
    """Tasks that still serve a request: uvicorn's, and our own short ones."""
    names = ("RequestResponseCycle.run_asgi", "Attempts._guarded", "_LocalWait._wait")
    return [t for t in asyncio.all_tasks() if getattr(t.get_coro(), "__qualname__", "") in names]


# A queue that is small enough to be full, to make its requests wait too long, and to be left.
SMALL_QUEUE = {
    "policy": "finish-time",
    "prefill_depth": 2,
    "queue": {"max_requests": 30, "timeout_s": 0.25},
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "scheduler", [SMALL_QUEUE, {"policy": "min-max"}], ids=lambda s: s["policy"]
)
async def test_hundreds_of_mixed_requests_leave_nothing_behind(
    scheduler: dict[str, object], workers: int
) -> None:
    rng = random.Random(7)
    timeouts = {"first_byte_s": 0.4, "idle_s": 0.4, "total_s": 5}
    pool = {"idle_expiry_s": 0.5}
    async with fake_instances(4) as fakes:
        retry = {"budget_ratio": 1.0}
        config = config_for(fakes, timeouts=timeouts, retry=retry, pool=pool, scheduler=scheduler)
        async with running_gateway(config, workers=workers) as running:
            gate = asyncio.Semaphore(AT_ONCE)

            async def client() -> None:
                async with gate:
                    await one_request(running.port, rng)

            async def chaos() -> None:
                for _ in range(3):
                    await asyncio.sleep(0.7)
                    victim = rng.choice(fakes)
                    await victim.kill()
                    await asyncio.sleep(0.3)
                    await victim.start()

            disturbance = asyncio.ensure_future(chaos())
            await asyncio.gather(*(client() for _ in range(REQUESTS)))
            await disturbance
            await eventually(running.settled, within_s=60)
            processes = running.processes()
            for each in processes:
                await eventually(lambda: len(each.dataplane.open_exchanges) == 0)  # noqa: B023
                await eventually(lambda: len(each.dataplane) == 0)  # noqa: B023
            # No timer of the queue, and no stream that is watched for its speed.
            await eventually(lambda: running.gateway.placement.idle)
            # Idle keep-alive connections are closed by the gateway itself, and no task is left.
            pools = [i.pool for each in processes for i in each.fleet.instances.values()]
            await eventually(lambda: all(p.open_connections == 0 for p in pools), within_s=60)
            await eventually(lambda: not request_tasks(), within_s=60)
            if workers > 1:
                await asyncio.sleep(2)  # what workers count themselves is told each second
            text = await running.metrics()
    if scheduler["policy"] == "finish-time":
        for reason in ("queue_full", "queue_timeout"):
            assert f'queue_rejections_total{{reason="{reason}"}}' in text
        assert 'backend="",model="m",outcome="client_disconnected"' in text
        assert "hetero_gateway_queue_depth 0.0" in text
    failed = re.findall(r'outcome="internal_error"[^}]*} (\S+)', text)
    assert set(failed) <= {"0.0"}
    for outcome in ("completed", "upstream_error", "client_disconnected", "timed_out", "rejected"):
        assert f'outcome="{outcome}"' in text
