"""A peer that writes what it likes into a real redis-server, while gateways serve all the same."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np
import pytest
import redis

from hetero_gateway.core.instances.dispatch import PeerLoad
from hetero_gateway.core.sharing.message import FIELDS, Message, instance_key, pack
from tests.fakes.redis import RedisServer
from tests.fakes.running import FAST, RunningGateway, eventually, rig
from tests.fakes.vllm import FakeInstance

pytestmark = pytest.mark.system

LIAR = "a" * 16
CHAT = "/v1/chat/completions"
MOST = 2.0**50
# What an engine reports that has nothing to do.
IDLE = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
LIES = {
    "in flight": PeerLoad(in_flight=10_000),
    "streaming": PeerLoad(in_flight=10_000, streaming=10_000, context=MOST, kv_tokens=MOST),
    "waiting": PeerLoad(
        in_flight=10_000, waiting=10_000, waiting_prompt=MOST, waiting_prefill=MOST
    ),
    "one request of all tokens": PeerLoad(
        load_s=MOST, in_flight=1, kv_tokens=MOST, streaming=1, context=MOST
    ),
    "all": PeerLoad(*[MOST] * FIELDS),
}


def body(number: int) -> dict[str, object]:
    """Requests that have no prefix in common, and stream long enough to be there together."""
    message = {"role": "user", "content": f"{number} " * 100}
    fake = {"events": 5, "delay_s": 0.02}
    return {"model": "m", "messages": [message], "stream": True, "fake": fake}


@contextlib.asynccontextmanager
async def lying(
    server: RedisServer, running: RunningGateway, load: PeerLoad
) -> AsyncIterator[None]:
    """Somebody who reports this of every instance, ten times a second."""
    keys = [instance_key(i.id, i.config.base_url) for i in running.gateway.fleet.instances.values()]

    async def lie(client: redis.Redis) -> None:
        sequence = 0
        while True:
            sequence += 1
            rows = np.array([[*load]] * len(keys))
            message = pack(Message(sequence, np.array(keys, dtype=np.uint64), rows))
            client.set("{hetero-gateway}:" + LIAR, message, px=3000)
            client.sadd("{hetero-gateway}:replicas", LIAR)
            await asyncio.sleep(0.1)

    with redis.Redis(port=server.port) as client:
        task = asyncio.create_task(lie(client))
        try:
            yield
        finally:
            task.cancel()


@pytest.mark.parametrize(
    ("policy", "tells"), [("finish-time", True), ("finish-time", False), ("min-max", True)]
)
@pytest.mark.parametrize("lie", LIES)
async def test_whatever_a_peer_claims_all_requests_are_served(
    server: RedisServer, policy: str, lie: str, *, tells: bool
) -> None:
    """With in_flight 10 000, none of 20 was while the view was called shared."""
    fakes = [FakeInstance(), FakeInstance()]
    for fake in fakes:
        fake.metrics += IDLE if tells else ""
    exchange = {"shared": server.url, "sharing": {"interval_s": 0.02, "timeout_s": 1.0}}
    sections = {"scheduler": {"policy": policy} | exchange, "health": {"scrape_interval_s": 1.0}}
    async with rig(fakes, profiles=(FAST,), **sections) as (running, client, _):
        sharing = running.gateway.sharing
        assert sharing is not None
        async with lying(server, running, LIES[lie]):
            await eventually(lambda: len(sharing.describe()["others"]) == 2)
            asked = (client.post(CHAT, json=body(number)) for number in range(20))
            assert [each.status_code for each in await asyncio.gather(*asked)] == [200] * 20
            assert sharing.mode.value == "shared"
            assert all(fake.requests for fake in fakes), "no instance is kept idle"
