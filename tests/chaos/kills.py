"""Instances that are killed every few seconds, and streams whose clients must not notice.

    python -m tests.chaos.kills [--seconds 600] [--streams 200] [--every 3] [--seed 1]
                                [--workers 1] [--legs] [--lease 30] [--stops] [--breaks]
                                [--keep DIR] [--json]

So many streams are open at any time, of plain text by chat and by completion. Each must be one
well-formed stream to its end, with all of its tokens and the true sums, however often its instance
is killed; at the end every load is 0. With ``--legs`` requests are split among two instances, of
two groups, a third of them do not stream, and at the end no block is pinned. With ``--stops`` some
are stopped for up to 8 s in place of being killed, with ``--breaks`` others do not get the caches
of prompts from some. A request is *given up* under which two instances died in turn, as the gateway
says in its log: it may end with an error. The instances are processes of the emulated vLLM, whose
texts are a word a token: what is told can be counted.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from hetero_gateway.engines.vllm.kv_transfer import DEFAULT_LEASE_S
from tests.chaos.faults import TRANSFERS
from tests.chaos.gateway import GatewayProcess
from tests.chaos.instances import MODEL, Instance, make_instances, write_profiles

PATHS = ("/v1/chat/completions", "/v1/completions")
TOKENS = (20, 200)
_BYTES_PER_TOKEN = 4
# A chat's template, as the emulated instance has it: of a message, and in front of the answer.
_TEMPLATE_TOKENS = {"/v1/chat/completions": 4 + 3, "/v1/completions": 0}
_SETTLED_WITHIN_S = 30.0
# So long an instance is stopped, or its transfers break.
_LASTS_S = (0.3, 1.0, 2.0, 4.0, 8.0)


@dataclass
class Seen:
    """What the clients saw; ``faults``: what was wrong, a line each."""

    streams: int = 0
    continued: int = 0
    legs: Counter[int] = field(default_factory=Counter)
    disturbances: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    given_up: int = 0
    results: dict[str, float] = field(default_factory=dict)  # as the gateway counts them
    handovers: dict[str, float] = field(default_factory=dict)  # the same


@dataclass
class Answer:
    """Of one request; ``ids``: those of its events; ``pieces``: of a stream that went on."""

    text: str = ""
    usage: dict[str, int] = field(default_factory=dict)
    pieces: int = 1
    ids: set[tuple[str, int]] = field(default_factory=set)
    ends: int = 0
    done: bool = False
    request_id: str = ""

    async def of_stream(self, http: httpx.AsyncClient, path: str, asked: dict[str, Any]) -> None:
        """Raises ValueError."""
        async with http.stream("POST", path, json=asked) as response:
            self.request_id = response.headers.get("x-request-id", "")
            if response.status_code != 200:
                raise ValueError(f"status {response.status_code}: {await response.aread()!r}")
            async for line in response.aiter_lines():
                self.pieces += line.startswith(": continued by ")
                if line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(event["error"]["message"])
                    self.take(event)

    async def whole(self, http: httpx.AsyncClient, path: str, asked: dict[str, Any]) -> None:
        """Raises ValueError."""
        response = await http.post(path, json=asked)
        self.request_id = response.headers.get("x-request-id", "")
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}: {response.text[:300]}")
        self.take(response.json())
        self.done = True

    def take(self, part: dict[str, Any]) -> None:
        if part.get("kv_transfer_params") is not None:
            raise ValueError("it has kv_transfer_params")
        self.ids.add((part["id"], part["created"]))
        self.usage = part.get("usage") or self.usage
        for choice in part["choices"]:
            self.ends += choice["finish_reason"] is not None
            told = choice.get("delta") or choice.get("message") or choice
            self.text += told.get("content", told.get("text")) or ""


async def ask_once(
    http: httpx.AsyncClient, rng: random.Random, seen: Seen, *, legs: bool = False
) -> None:
    """A stream; with ``legs`` of a longer prompt, and in one of three cases no stream."""
    path, tokens = rng.choice(PATHS), rng.randint(*TOKENS)
    prompt = "word" * rng.randint(5, 1500 if legs else 300)
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": tokens, "ignore_eos": True}
    streams = not legs or rng.random() < 2 / 3
    if not streams:
        # It begins anew each time that its instance is killed, and two deaths are its fault.
        tokens = asked["max_tokens"] = min(tokens, 40)
    if streams:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    if path == PATHS[0]:
        asked["messages"] = [{"role": "user", "content": prompt}]
    else:
        asked["prompt"] = prompt
    got = Answer()
    try:
        await (got.of_stream if streams else got.whole)(http, path, asked)
        prompt_tokens = len(prompt) // _BYTES_PER_TOKEN + _TEMPLATE_TOKENS[path]
        told = got.usage.get("prompt_tokens"), got.usage.get("completion_tokens")
        if not got.done or got.ends != 1 or len(got.ids) != 1:
            raise ValueError(f"no whole answer: {got.done} {got.ends} {got.ids}")
        sums = (*told, len(got.text.split()))
        if sums != (prompt_tokens, tokens, tokens):
            raise ValueError(f"(prompt, output, words) {sums}, not {prompt_tokens}, {tokens}")
    except (httpx.HTTPError, ValueError) as error:
        kind = "stream" if streams else "answer"
        what = f"{kind} of {tokens} tokens after {got.pieces}: {error!r}"
        seen.faults.append(f"{got.request_id}: {path}: {what}")
    seen.streams += 1
    seen.continued += got.pieces > 1
    seen.legs[got.pieces] += 1


async def disturb_now_and_then(
    instances: list[Instance], kinds: list[str], every_s: float, rng: random.Random, seen: Seen
) -> None:
    while True:
        await asyncio.sleep(every_s)
        victim = rng.choice(instances)
        kind = rng.choice(kinds) if len(kinds) > 1 else kinds[0]
        seen.disturbances[kind] += 1
        if kind == "kill":
            victim.kill()
            await victim.start()
            continue
        try:
            if kind == "stop":
                victim.stop()
            else:
                victim.break_off(TRANSFERS, rng.choice((0.3, 1.0)), time.monotonic())
            await asyncio.sleep(rng.choice(_LASTS_S))
        finally:
            victim.go_on()
            victim.break_off(None, 0.0, time.monotonic())


async def pinned(instances: list[Instance], lease_s: float) -> list[str]:
    """Who has blocks that nobody fetches, when every lease is over."""
    await asyncio.sleep(lease_s + 2)
    found = []
    async with httpx.AsyncClient(trust_env=False) as http:
        for instance in instances:
            text = (await http.get(f"{instance.url}/metrics")).text
            (line,) = re.findall(r"^vllm:kv_cache_usage_perc\{.*", text, re.MULTILINE)
            if float(line.rpartition(" ")[2]):
                found.append(f"{instance.id} has blocks left: {line}")
    return found


def give_up(seen: Seen, log: str) -> None:
    """Those that the gateway gave up as it may, and why it gave up others."""
    deadly = re.findall(
        r"request (\S+) (?:cannot be continued: two instances broke off under it"
        r"|is not retried: \S+ and \S+ died)",
        log,
    )
    told = [fault for fault in seen.faults if fault.startswith(tuple(f"{id}: " for id in deadly))]
    seen.given_up = len(told)
    seen.faults = [fault for fault in seen.faults if fault not in told]
    lines = [line for line in log.splitlines() if "cannot be continued" in line]
    seen.faults += [line for line in lines if "two instances broke off" not in line]


async def run(args: argparse.Namespace, directory: Path) -> Seen:
    seen, rng = Seen(), random.Random(args.seed)
    instances = make_instances(8, args.seed, lease_s=args.lease if args.legs else 0.0)
    for instance in instances:
        await instance.start()
    profiles = write_profiles(instances, directory)
    config: dict[str, Any] = {
        "health": {"probe_interval_s": 0.5},
        "instances": [
            {"id": i.id, "base_url": i.url, "profile": profiles[i.id]} for i in instances
        ],
    }
    if args.legs:
        config["scheduler"] = {"split_requests": "each"}
        # Those that do not stream begin anew each time: where a kill comes every second, three
        # attempts are not enough for each on a busy machine, whose answers take seconds.
        config["retry"] = {"budget_ratio": 1, "max_attempts": 16}
        for number, row in enumerate(config["instances"]):
            transfer = {"connector": "NixlConnector", "lease_s": args.lease}
            row["kv_transfer"] = transfer | {"group": f"g{number // 4}"}
    (directory / "gateway.yaml").write_text(yaml.safe_dump(config), "utf-8")
    gateway = await GatewayProcess.start(
        directory / "gateway.yaml", directory / "gateway.log", args.workers
    )
    loop = asyncio.get_running_loop()
    until_s = loop.time() + args.seconds

    async def client(http: httpx.AsyncClient, own: random.Random) -> None:
        while loop.time() < until_s:
            await ask_once(http, own, seen, legs=args.legs)

    kinds = ["kill", *["stop"] * args.stops, *["break"] * args.breaks]
    disturbing = asyncio.ensure_future(
        disturb_now_and_then(instances, kinds, args.every, rng, seen)
    )
    try:
        # Without expiry: in a late event loop httpcore closes a connection as expired that it has
        # just given to a request (ReadError).
        limits = httpx.Limits(max_connections=None, keepalive_expiry=None)
        options: dict[str, Any] = {"base_url": gateway.url, "trust_env": False, "limits": limits}
        async with httpx.AsyncClient(timeout=120, **options) as http:
            own = [random.Random(rng.random()) for _ in range(args.streams)]
            await asyncio.gather(*(client(http, each) for each in own))
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)
        give_up_s = loop.time() + _SETTLED_WITHIN_S
        left = await gateway.left_over()
        while left and loop.time() < give_up_s:
            await asyncio.sleep(0.2)
            left = await gateway.left_over()
        seen.faults += left + gateway.alarms()
        metrics = await gateway.metrics()
        told = metrics["hetero_gateway_streams_continued_total"]
        handovers = metrics["hetero_gateway_handovers_total"]
        seen.handovers = {labels[0][1]: number for labels, number in handovers.items()}
        if args.legs:
            seen.faults += await pinned(instances, args.lease)
        total = sum(legs * number for legs, number in seen.legs.items()) - seen.streams
        give_up(seen, gateway.log.read_text("utf-8", "replace"))
        seen.results = {labels[0][1]: number for labels, number in told.items()}
        counted = told[(("result", "continued"),)]
        if counted < total:
            seen.faults.append(f"{counted:g} counted as continued, {total} were")
    finally:
        disturbing.cancel()
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
    parser.add_argument("--legs", action="store_true")
    parser.add_argument("--lease", type=float, default=DEFAULT_LEASE_S)
    parser.add_argument("--stops", action="store_true")
    parser.add_argument("--breaks", action="store_true")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the gateway's log there")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as directory:
        kept: Path = args.keep or Path(directory)
        kept.mkdir(parents=True, exist_ok=True)
        seen = asyncio.run(run(args, kept))
    document = {
        "streams": seen.streams,
        "continued": seen.continued,
        "most_legs": max(seen.legs, default=0),
        "kills": seen.disturbances["kill"],
        "disturbances": dict(seen.disturbances),
        "given_up": seen.given_up,
        "results": seen.results,
        "handovers": seen.handovers,
        "violations": seen.faults[:50],
        "broken": len(seen.faults),
    }
    lines = [f"{name}: {value}" for name, value in document.items()]
    sys.stdout.write(json.dumps(document) if args.json else "\n".join([*lines, ""]))
    return 1 if seen.faults else 0


if __name__ == "__main__":
    sys.exit(main())
