"""Engines that are killed in mid-stream, and clients that do not notice: two of the same weights.

The engines' weights are random, and so they write what no tokenizer would make of its text: the
same text is other tokens when it comes back in a prompt. Held to whole words
(``allowed_token_ids``) they write as models do that have learnt from text.
"""

import asyncio
import dataclasses
import json
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from real_vllm import servers
from real_vllm.cluster import PATIENCE_S, Cluster, Figure

pytestmark = pytest.mark.real_vllm

ROOT = Path(__file__).resolve().parents[2]
PATHS = {"chat": "/v1/chat/completions", "ids": "/v1/completions"}
KILLS, PROMPTS, TOKENS = 10, 20, 60
LEAST_EQUAL_BY_TEXT = 0.9


class Twins(NamedTuple):
    engines: list[servers.Server]
    url: str
    words: list[int]


class Answer(NamedTuple):
    text: str
    usage: dict[str, Any] | None
    continued: int
    fault: str  # why it is no well-formed stream to its end


@pytest.fixture
def twins(cluster: Cluster, tmp_path: Path) -> Iterator[Twins]:
    first = cluster.engines["small"]
    python, model = Path(first.argv[3]), Path(first.argv[first.argv.index("--model") + 1])
    directory = Path(first.directory)
    engines = [
        dataclasses.replace(servers.engine("small", directory, python, model, core), id=f"twin-{i}")
        for i, core in enumerate((0, 1))
    ]
    profile = ROOT / "scripts" / "real_vllm" / "profiles" / "small.yaml"
    config = tmp_path / "gateway.yaml"
    instances = [{"id": e.id, "base_url": e.base_url, "profile": str(profile)} for e in engines]
    config.write_text(json.dumps({"health": {"probe_interval_s": 0.5}, "instances": instances}))
    plain = servers.gateway(directory, Path(sys.executable), ROOT / "src", config)
    gateway = dataclasses.replace(plain, id="gateway-of-twins")
    try:
        for engine in engines:
            engine.log.unlink(missing_ok=True)
            engine.start()
        for engine in engines:
            engine.wait_ready()
        gateway.log.unlink(missing_ok=True)
        gateway.start()
        gateway.wait_port()
        gateway.wait_ready(60)
        yield Twins(engines, gateway.base_url, whole_words(engines[0].base_url))
    finally:
        for server in (gateway, *engines):
            server.stop()
            (directory / f"{server.id}.json").unlink(missing_ok=True)


def whole_words(base_url: str) -> list[int]:
    """Tokens that are a space and a word: however they follow each other, their text is them."""
    found = []
    for token in range(300, 2000):
        text = httpx.post(f"{base_url}/detokenize", json={"tokens": [token]}).json()["prompt"]
        if text[:1] == " " and len(text) > 3 and text[1:].isalpha() and text.isascii():
            found.append(token)
    return found


def is_up(url: str, name: str) -> bool:
    line = f'hetero_gateway_instance_up{{backend="{name}"}} 1.0'
    return servers.wait_until(lambda: line in httpx.get(f"{url}/metrics").text, PATIENCE_S)


async def ask(http: httpx.AsyncClient, twins: Twins, kind: str, prompt: str) -> Answer:
    body: dict[str, Any] = {
        "model": servers.SERVED_NAME,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if kind == "chat":
        body |= {"messages": [{"role": "user", "content": prompt}]}
        body |= {"allowed_token_ids": twins.words}
    else:
        body |= {"prompt": prompt, "return_token_ids": True}
    text, usage, continued, names, ends, done = "", None, 0, set(), 0, False
    try:
        async with http.stream("POST", twins.url + PATHS[kind], json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                continued += line.startswith(": continued by ")
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    done = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return Answer(text, usage, continued, event["error"]["message"])
                names.add((event["id"], event["created"]))
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    ends += choice["finish_reason"] is not None
                    part = choice["delta"].get("content") if kind == "chat" else choice["text"]
                    text += part or ""
    except httpx.HTTPError as error:
        return Answer(text, usage, continued, repr(error))
    whole = done and ends == 1 and len(names) == 1 and usage is not None
    return Answer(text, usage, continued, "" if whole else f"{done} {ends} {names} {usage}")


async def ask_all(twins: Twins, prompts: list[str]) -> dict[tuple[str, str], Answer]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as http:
        asked = [(kind, prompt) for kind in PATHS for prompt in prompts]
        answers = await asyncio.gather(*(ask(http, twins, *each) for each in asked))
    return dict(zip(asked, answers, strict=True))


async def killed_at_random(
    twins: Twins, prompts: list[str], rng: random.Random
) -> AsyncIterator[dict[tuple[str, str], Answer]]:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await ask_all(twins, prompts)
    took_s = loop.time() - began_s
    for _ in range(KILLS):
        asking = asyncio.ensure_future(ask_all(twins, prompts))
        await asyncio.sleep(rng.uniform(0.1, 0.9) * took_s)
        victim = rng.choice(twins.engines)
        victim.signal(signal.SIGKILL)
        yield await asking
        await asyncio.to_thread(victim.kill)
        victim.start()
        await asyncio.to_thread(victim.wait_ready)
        assert await asyncio.to_thread(is_up, twins.url, victim.id)


async def test_no_client_notices_an_engine_that_is_killed(twins: Twins, figure: Figure) -> None:
    rng = random.Random(11)
    words = "def return class import for while print value list dict self name data".split()
    prompts = [" ".join(rng.choices(words, k=12)) for _ in range(PROMPTS)]
    unbroken = await ask_all(twins, prompts)
    assert [answer.fault for answer in unbroken.values()] == [""] * len(unbroken)
    continued, equal = Counter[str](), Counter[str]()
    async for answers in killed_at_random(twins, prompts, rng):
        for (kind, prompt), answer in answers.items():
            assert answer.fault == ""
            assert answer.usage is not None
            assert answer.usage["completion_tokens"] == TOKENS
            if answer.continued:
                continued[kind] += 1
                equal[kind] += answer.text == unbroken[kind, prompt].text
                assert answer.usage == unbroken[kind, prompt].usage
    for kind in PATHS:
        figure(
            f"{KILLS} kills, {PROMPTS} prompts by {kind}: {continued[kind]} streams continued, "
            f"{equal[kind]} with the text of an unbroken run"
        )
    assert min(continued[kind] for kind in PATHS) > KILLS
    assert equal["ids"] == continued["ids"]
    assert equal["chat"] >= LEAST_EQUAL_BY_TEXT * continued["chat"]
