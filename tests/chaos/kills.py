"""Instances that are killed every few seconds, and streams whose clients must not notice.

    python -m tests.chaos.kills [--seconds 600] [--streams 200] [--every 3] [--seed 1]
                                [--workers 1] [--json]

So many streams are open at any time, of plain text by chat and by completion. Each must be one
well-formed stream to its end, with all of its tokens and the true sums, however often its instance
is killed; at the end every load is 0. The instances are processes of the emulated vLLM, whose texts
are a word a token: what is told can be counted.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.chaos.gateway import GatewayProcess
from tests.chaos.instances import MODEL, Instance, make_instances, write_profiles

PATHS = ("/v1/chat/completions", "/v1/completions")
TOKENS = (20, 200)
_BYTES_PER_TOKEN = 4
# A chat's template, as the emulated instance has it: of a message, and in front of the answer.
_TEMPLATE_TOKENS = {"/v1/chat/completions": 4 + 3, "/v1/completions": 0}
_SETTLED_WITHIN_S = 30.0


@dataclass
class Seen:
    """What the clients saw; ``faults``: what was wrong, a line each."""

    streams: int = 0
    continued: int = 0
    legs: Counter[int] = field(default_factory=Counter)
    kills: int = 0
    faults: list[str] = field(default_factory=list)
    results: dict[str, float] = field(default_factory=dict)  # as the gateway counts them


async def stream_once(http: httpx.AsyncClient, rng: random.Random, seen: Seen) -> None:
    path, tokens = rng.choice(PATHS), rng.randint(*TOKENS)
    prompt = "word" * rng.randint(5, 300)
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": tokens, "ignore_eos": True}
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    if path == PATHS[0]:
        asked["messages"] = [{"role": "user", "content": prompt}]
    else:
        asked["prompt"] = prompt
    text, legs, names, ends, done = "", 1, set(), 0, False
    usage: dict[str, int] = {}
    try:
        async with http.stream("POST", path, json=asked) as response:
            if response.status_code != 200:
                raise ValueError(f"status {response.status_code}: {await response.aread()!r}")
            async for line in response.aiter_lines():
                legs += line.startswith(": continued by ")
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(event["error"]["message"])
                    names.add((event["id"], event["created"]))
                    usage = event.get("usage") or usage
                    for choice in event["choices"]:
                        ends += choice["finish_reason"] is not None
                        delta = choice.get("delta", choice)
                        text += delta.get("content", delta.get("text")) or ""
        prompt_tokens = len(prompt) // _BYTES_PER_TOKEN + _TEMPLATE_TOKENS[path]
        sums = usage.get("prompt_tokens"), usage.get("completion_tokens"), len(text.split())
        if not done or ends != 1 or len(names) != 1:
            raise ValueError(f"no whole stream: {done} {ends} {names}")
        if sums != (prompt_tokens, tokens, tokens):
            raise ValueError(f"(prompt, output, words) {sums}, not {prompt_tokens}, {tokens}")
    except (httpx.HTTPError, ValueError) as error:
        seen.faults.append(f"{path} of {tokens} tokens after {legs} legs: {error!r}")
    seen.streams += 1
    seen.continued += legs > 1
    seen.legs[legs] += 1


async def kill_now_and_then(
    instances: list[Instance], every_s: float, rng: random.Random, seen: Seen
) -> None:
    while True:
        await asyncio.sleep(every_s)
        victim = rng.choice(instances)
        victim.kill()
        seen.kills += 1
        await victim.start()


async def run(args: argparse.Namespace, directory: Path) -> Seen:
    seen, rng = Seen(), random.Random(args.seed)
    instances = make_instances(8, args.seed)
    for instance in instances:
        await instance.start()
    profiles = write_profiles(instances, directory)
    config = {
        "health": {"probe_interval_s": 0.5},
        "instances": [
            {"id": i.id, "base_url": i.url, "profile": profiles[i.id]} for i in instances
        ],
    }
    (directory / "gateway.yaml").write_text(yaml.safe_dump(config), "utf-8")
    gateway = await GatewayProcess.start(
        directory / "gateway.yaml", directory / "gateway.log", args.workers
    )
    loop = asyncio.get_running_loop()
    until_s = loop.time() + args.seconds

    async def client(http: httpx.AsyncClient, own: random.Random) -> None:
        while loop.time() < until_s:
            await stream_once(http, own, seen)

    killing = asyncio.ensure_future(kill_now_and_then(instances, args.every, rng, seen))
    try:
        limits = httpx.Limits(max_connections=None)
        options: dict[str, Any] = {"base_url": gateway.url, "trust_env": False, "limits": limits}
        async with httpx.AsyncClient(timeout=120, **options) as http:
            own = [random.Random(rng.random()) for _ in range(args.streams)]
            await asyncio.gather(*(client(http, each) for each in own))
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        give_up_s = loop.time() + _SETTLED_WITHIN_S
        left = await gateway.left_over()
        while left and loop.time() < give_up_s:
            await asyncio.sleep(0.2)
            left = await gateway.left_over()
        seen.faults += left + gateway.alarms()
        told = (await gateway.metrics())["hetero_gateway_streams_continued_total"]
        total = sum(legs * number for legs, number in seen.legs.items()) - seen.streams
        log = gateway.log.read_text("utf-8", "replace").splitlines()
        seen.faults += [line for line in log if "cannot be continued" in line]
        seen.results = {labels[0][1]: number for labels, number in told.items()}
        counted = told[(("result", "continued"),)]
        if counted < total:
            seen.faults.append(f"{counted:g} counted as continued, {total} were")
    finally:
        killing.cancel()
        await gateway.aclose()
        for instance in instances:
            instance.close()
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--every", type=float, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as directory:
        seen = asyncio.run(run(args, Path(directory)))
    document = {
        "streams": seen.streams,
        "continued": seen.continued,
        "most_legs": max(seen.legs, default=0),
        "kills": seen.kills,
        "results": seen.results,
        "violations": seen.faults[:50],
        "broken": len(seen.faults),
    }
    lines = [f"{name}: {value}" for name, value in document.items()]
    sys.stdout.write(json.dumps(document) if args.json else "\n".join([*lines, ""]))
    return 1 if seen.faults else 0


if __name__ == "__main__":
    sys.exit(main())
