"""The two engines of ``scripts/real-vllm --pair``, asked by hand and behind a gateway."""

import asyncio
import itertools
import json
import re
import signal
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from real_vllm import servers

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.engines.vllm.kv_transfer import (
    CONNECTORS,
    PrefillAnswer,
    Transfer,
    decode_body,
    mended_body,
    mended_events,
    mending_of,
    prefill_body,
    read_answer,
    reason_against,
)
from hetero_gateway.engines.vllm.paths import CHAT_COMPLETIONS, COMPLETIONS, MESSAGES, RESPONSES
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.profile_file import profile_document, write_profile_file
from tests.fakes.between import Between
from tests.fakes.legs import ANSWERS, PROMPTS
from tests.fakes.running import RunningGateway, eventually, running_gateway

PATHS = (COMPLETIONS, CHAT_COMPLETIONS, MESSAGES, RESPONSES)
NIXL = CONNECTORS["NixlConnector"]
# vLLM's CPU engine has blocks of 128 tokens.
TRANSFER = Transfer(block_tokens=128)
PROMPT = "def main(self): import os, sys; return the value of this class " * 8
OUTPUT_TOKENS = 24
LEASE_S = servers.PAIR_LEASE_S
# What the gateway is told: each far too slow with what is the other's, so that every prompt that is
# new is worth being split, and slower than it is on any machine, so that none is found to be slow
# and tried with a whole request.
_TOLD = {"prefill": replace(PROMPTS, p8=40.0), "decode": replace(ANSWERS, p1=10.0, p8=1.0)}
# What a request to it has in it that is one of two.
_LEG_OF = {"prefill": b'"do_remote_decode":true', "decode": b'"do_remote_prefill":true'}
# Only a hang meets it.
PATIENCE_S = 120.0
_IDS = itertools.count()


class Pair:
    """The two engines, asked by hand."""

    def __init__(self, prefill: servers.Server, decode: servers.Server) -> None:
        self.http = httpx.Client(timeout=PATIENCE_S)
        self.engines = {"prefill": prefill, "decode": decode}
        self.prefill, self.decode = prefill.base_url, decode.base_url

    def post(self, base_url: str, path: str, body: bytes, request_id: str) -> httpx.Response:
        headers = {"content-type": "application/json", "x-request-id": request_id}
        answer = self.http.post(base_url + path, content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    def forget(self) -> None:
        for base_url in (self.prefill, self.decode):
            self.http.post(base_url + "/reset_prefix_cache").raise_for_status()

    def whole(self, path: str, body: bytes) -> bytes:
        """By one engine, which has no part of the prompt."""
        self.forget()
        answer = self.post(self.decode, path, body, f"whole-{next(_IDS)}").content
        self.forget()
        return answer

    def prefilled(self, path: str, body: bytes, request_id: str) -> PrefillAnswer:
        assert reason_against(path, body) == ""
        asked = prefill_body(path, body, NIXL.for_prefill(TRANSFER))
        return read_answer(path, self.post(self.prefill, path, asked, request_id).content)

    def split(self, path: str, body: bytes, *, stream: bool) -> bytes:
        """By both, as the client is to see it."""
        request_id = f"split-{next(_IDS)}"
        answer = self.prefilled(path, body, request_id)
        parameters = NIXL.for_decode(TRANSFER, answer)
        decoded = self.post(self.decode, path, decode_body(body, parameters), request_id).content
        mend = mended_events if stream else mended_body
        return mend(path, decoded, mending_of(answer))

    def restore(self) -> None:
        """Start again what is dead, and let go on what was stopped."""
        for engine in self.engines.values():
            engine.signal(signal.SIGCONT)
        dead = [
            engine
            for engine in self.engines.values()
            if not (engine.is_running() and servers.wait_until(engine.is_ready, 30))
        ]
        for engine in dead:
            engine.restart()
        for engine in dead:
            engine.wait_ready()

    def left(self) -> list[str]:
        """What an engine still has: requests, and blocks that nothing has freed."""
        found = []
        for name, engine in self.engines.items():
            text = self.http.get(engine.base_url + "/metrics").text
            for metric in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                for value in re.findall(rf"^vllm:{metric}{{.*}} (\S+)$", text, re.M):
                    found += [f"{name}: {metric} {value}"] if float(value) else []
        return found

    def counted(self, name: str, counter: str) -> float:
        """A counter of one engine, over all of its labels."""
        text = self.http.get(self.engines[name].base_url + "/metrics").text
        return sum(map(float, re.findall(rf"^vllm:{counter}{{.*}} (\S+)$", text, re.M)))

    def computed(self) -> dict[str, float]:
        """Prompt tokens of the decode engine by where they came from, and tokens of its steps."""
        text = self.http.get(self.decode + "/metrics").text
        found = re.findall(
            r'^vllm:prompt_tokens_by_source_total{.*source="(\w+)"} (\S+)$', text, re.M
        )
        found += re.findall(r"^vllm:(iteration_tokens_total_sum){.*} (\S+)$", text, re.M)
        return {name: float(value) for name, value in found}


def body_for(path: str, *, stream: bool = False, **fields: Any) -> bytes:
    limits = {CHAT_COMPLETIONS: "max_completion_tokens", RESPONSES: "max_output_tokens"}
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}]}
    if path in (COMPLETIONS, RESPONSES):
        prompt = {"prompt" if path == COMPLETIONS else "input": PROMPT}
    body = {"model": "tiny", "temperature": 0, "stream": stream, **prompt}
    body[limits.get(path, "max_tokens")] = OUTPUT_TOKENS
    if stream and path in (CHAT_COMPLETIONS, COMPLETIONS):
        body["stream_options"] = {"include_usage": True}
    return json.dumps(body | fields).encode()


def fresh(path: str, *, stream: bool = False, **fields: Any) -> bytes:
    """The same, with a prompt that nobody has seen, so that it is worth being split."""
    body = body_for(path, stream=stream, **fields)
    return body.replace(b"def main", b"def f%d" % next(_IDS))


def said(answer: bytes, *, stream: bool) -> object:
    """What does not differ from one time to another: of a stream its text, usages and ends."""
    if not stream:
        text = re.sub(rb'"(created|created_at)":\d+', rb'"\1":0', answer)
        return json.loads(re.sub(rb'"(chatcmpl|cmpl|resp|msg)[-_][^"]*"', b'"id"', text))
    text, rest = "", []
    for line in answer.decode().splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        delta = event.get("delta")
        text += (delta if isinstance(delta, str) else (delta or {}).get("text")) or ""
        for choice in event.get("choices", []):
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            rest.append(choice["finish_reason"])
        parts = (event, event.get("response") or {}, event.get("message") or {})
        rest += [part["usage"] for part in parts if "usage" in part]
        rest.append((delta or {}).get("stop_reason") if isinstance(delta, dict) else None)
    assert b'kv_transfer_params":{' not in answer
    return text, [each for each in rest if each]


def text_of(path: str, answer: bytes, *, stream: bool) -> object:
    """Of a whole answer, what was told and how it ended: whoever told it, whatever was cached."""
    if stream:
        text, rest = said(answer, stream=True)
        ends = [each for each in rest if isinstance(each, str)]
        return text, ends
    document = json.loads(answer)
    if path in (CHAT_COMPLETIONS, COMPLETIONS):
        (choice,) = document["choices"]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        return text, choice["finish_reason"]
    if path == MESSAGES:
        return "".join(part["text"] for part in document["content"]), document["stop_reason"]
    parts = [part for item in document["output"] for part in item.get("content") or []]
    return "".join(part["text"] for part in parts), document["status"]


class Served(NamedTuple):
    """A gateway over the pair; what is in front of an engine, by its name."""

    pair: Pair
    running: RunningGateway
    client: httpx.AsyncClient
    between: Mapping[str, Between]

    async def ask(self, path: str, body: bytes) -> httpx.Response:
        return await self.client.post(path, content=body)

    async def answers(self, path: str, *, stream: bool = False, **fields: Any) -> httpx.Response:
        """What it answers, which must be what one engine alone does."""
        body = fresh(path, stream=stream, **fields)
        alone = await asyncio.to_thread(self.pair.whole, path, body)
        answer = await self.ask(path, body)
        assert answer.status_code == 200, answer.text
        told = text_of(path, answer.content, stream=stream)
        assert told == text_of(path, alone, stream=stream)
        return answer

    @property
    def results(self) -> dict[str, int]:
        return dict(self.running.gateway.metrics.handovers)

    @property
    def refused(self) -> bool:
        """Whether the two are no pair for now."""
        pairs = self.running.gateway.fleet.scheduler.legs.pairs
        assert pairs is not None
        return ("prefill", "decode") in pairs.refused(time.monotonic())

    async def computing(self) -> None:
        """Until an engine is at a prompt for the other one, which is a long one."""
        scheduler = self.running.gateway.fleet.scheduler
        await eventually(lambda: scheduler.members.snapshot("prefill").in_flight == 1)
        await asyncio.sleep(0.2)
        assert not self.results

    async def signal(self, name: str, number: int) -> None:
        await asyncio.to_thread(self.pair.engines[name].signal, number)


@asynccontextmanager
async def served(
    pair: Pair,
    folder: Path,
    *,
    through: Collection[str] = (),
    lease_s: float = LEASE_S,
    **sections: Any,
) -> AsyncIterator[Served]:
    """A gateway over the two, and at the end nothing that is left of any request.

    Args:
        through: the engines that have a ``Between`` in front of them, of what is split.
    """
    async with AsyncExitStack() as stack:
        urls = {"prefill": pair.prefill, "decode": pair.decode}
        between = {}
        for name in through:
            between[name] = await stack.enter_async_context(Between(urls[name], _LEG_OF[name]))
            urls[name] = between[name].url
        config = config_over(urls, folder, lease_s, sections)
        running = await stack.enter_async_context(running_gateway(config))
        headers = {"content-type": "application/json"}
        client = httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S, headers=headers)
        await stack.enter_async_context(client)
        await eventually(lambda: all(i.up for i in running.gateway.fleet.instances.values()))
        yield Served(pair, running, client, between)
        await eventually(running.settled)
        await asyncio.to_thread(pair.restore)
        left = await asyncio.to_thread(pair.left)
        until_s = time.monotonic() + LEASE_S + 5
        while left and time.monotonic() < until_s:
            await asyncio.sleep(0.5)
            left = await asyncio.to_thread(pair.left)
        assert left == []
        assert running.settled()


def config_over(
    urls: Mapping[str, str], folder: Path, lease_s: float, sections: Mapping[str, Any]
) -> GatewayConfig:
    """One engine is thought to be quick with prompts, the other one with answers."""
    rows = []
    for name, url in urls.items():
        file = folder / f"{name}.yaml"
        made = Profile("CPU", "tiny", 1, _TOLD[name], 100_000, 64)
        write_profile_file(file, profile_document(made, {"how": "derived"}))
        row = {"id": name, "base_url": url, "profile": str(file), "model": "tiny"}
        rows.append(row | {"kv_transfer": {"connector": "NixlConnector", "lease_s": lease_s}})
    document = {
        "server": {"port": 0, "shutdown_timeout_s": 1},
        "health": {"probe_interval_s": 0.5},
        "scheduler": {"split_requests": "each"},
        "instances": rows,
    }
    return GatewayConfig.model_validate(document | sections)
