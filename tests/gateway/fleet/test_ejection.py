"""Instances that fail, seen by clients: real sockets, and time that jumps (fakes/clock.py)."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.fakes.running import FAST, RunningGateway, config_for, running_gateway
from tests.fakes.vllm import fake_instances

CHAT = "/v1/chat/completions"
EQUAL = (FAST,)
# What a good instance takes for an answer.
WORKS = {"first_delay_s": 0.5}
RESET = {"die": "before_head"}
GARBAGE = {"garbage": "\x00\x01 not HTTP\r\n\r\n"}
FAULTS = {
    "500": {"status": 500},
    "reset": RESET,
    "garbage": GARBAGE,
    "empty": {"empty": "bytes"},
    "empty chunks": {"empty": "chunks"},
    "503": {"status": 503},
    "429": {"status": 429},
}


def chat(text: str = "hello", **fake: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "fake": fake}


class Clients:
    """So many at once, each with one request after the other; what came of them."""

    def __init__(self, running: RunningGateway) -> None:
        self.statuses: Counter[int] = Counter()
        self._url = running.url
        self._sent = 0

    @property
    def share_of_good(self) -> float:
        return self.statuses[200] / self.statuses.total()

    async def send(self, count: int, *, at_once: int = 8, **fake: object) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=900) as client:
            await asyncio.gather(*(self._one(client, count, fake) for _ in range(at_once)))
        self._sent = 0

    async def _one(self, client: httpx.AsyncClient, count: int, fake: dict[str, Any]) -> None:
        while self._sent < count:
            self._sent += 1
            answer = await client.post(CHAT, json=chat(f"question {self._sent}", **fake))
            well = answer.status_code == 200 and not answer.content
            self.statuses[0 if well else answer.status_code] += 1


@pytest.mark.parametrize("policy", ["finish-time", "min-max", "least-requests", "round-robin"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_of_two_equal_instances_the_one_that_fails_at_once_gets_little(
    fault: str, policy: str
) -> None:
    async with fake_instances(2) as fakes:
        config = config_for(fakes, profiles=EQUAL, scheduler={"policy": policy})
        async with running_gateway(config) as running:
            fakes[0].fault = FAULTS[fault]
            clients = Clients(running)
            await clients.send(240, **WORKS)
            assert clients.share_of_good >= 0.95
            assert fakes[0].requests <= 30
            assert running.settled()
