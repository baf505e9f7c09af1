"""Policies before real vLLM servers: throughput, latency and each instance's share, side by side.

    scripts/real-vllm --no-tests --keep                    # one terminal: two unequal CPU servers
    hetero-gateway profile URL -o small.yaml               # another: a profile of each of them
    python benchmarks/scheduling/real_vllm.py --instance small=URL,small.yaml \\
        --instance large=URL,large.yaml

For each policy and rate a gateway is started afresh and the same requests are sent through it:
log-normal lengths, prompts of token ids, streamed. ``max_tokens`` is each request's true length,
because a real engine offers no other way to an exact one; this flatters policies that predict, and
least of all those that only count. Each run has a cache salt of its own, so that no run profits
from the prompts of an earlier one. Seeds are the outer loop: what drifts meets all policies alike.

Gateway, load generator and engines share this machine. "mean of seeds ± their standard deviation".
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.files.trace import LoadRequest
from hetero_gateway.lab.load.admin import fetch_document
from hetero_gateway.lab.load.children import Children
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind, filler_pool
from hetero_gateway.lab.load.replay import replay
from hetero_gateway.lab.load.result import Summary, summarise

POLICIES = ("finish-time", "capacity-weighted", "round-robin")
UP_TIMEOUT_S = 30.0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--instance",
        action="append",
        required=True,
        metavar="ID=URL,PROFILE.yaml",
        help="an instance; give one for each",
    )
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--rates", default="inf", help="requests per second; inf: all at once")
    parser.add_argument("--requests", type=int, default=200, help="of each run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=float, default=200, help="mean")
    parser.add_argument("--output-tokens", type=float, default=60, help="mean")
    parser.add_argument(
        "--records",
        type=Path,
        metavar="FOLDER",
        help="keep each run's `serve --record` file there, for `simulate --against`",
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def make_requests(args: argparse.Namespace, rate: float, seed: int) -> list[LoadRequest]:
    """Log-normal lengths (coefficient of variation 1), Poisson arrivals."""
    rng = np.random.default_rng(seed)

    def lengths(mean: float) -> list[int]:
        sigma_squared = math.log(2)
        drawn = rng.lognormal(
            math.log(mean) - sigma_squared / 2, math.sqrt(sigma_squared), args.requests
        )
        return [max(1, min(1500, round(value))) for value in drawn]

    prompts, outputs = lengths(args.prompt_tokens), lengths(args.output_tokens)
    gaps_s = rng.exponential(1.0, args.requests) / rate if math.isfinite(rate) else [0.0]
    due_s = np.cumsum(np.resize(gaps_s, args.requests)).tolist()
    return [LoadRequest(*row) for row in zip(due_s, prompts, outputs, strict=True)]


def write_config(instances: Sequence[str], folder: Path) -> None:
    """The gateway's configuration, with each instance's profile by its absolute path."""
    entries = []
    for text in instances:
        name, _, rest = text.partition("=")
        url, _, profile = rest.partition(",")
        if not (name and url and profile):
            raise SystemExit(f"--instance {text}: must be ID=URL,PROFILE.yaml")
        entries.append({"id": name, "base_url": url, "profile": str(Path(profile).resolve())})
    (folder / "gateway.yaml").write_text(yaml.safe_dump({"instances": entries}), encoding="utf-8")


async def run(
    policy: str,
    requests: list[LoadRequest],
    model: str,
    salt: str,
    folder: Path,
    record: Path | None,
) -> Summary:
    """All the requests through a gateway of their own."""
    with Children(folder) as children:
        gateway = children.start(
            "the gateway",
            *("serve", "-c", str(folder / "gateway.yaml"), "--port", "0"),
            *("--policy", policy, "--log-level", "warning"),
            *(("--record", str(record)) if record is not None else ()),
        )
        url = await gateway.url()
        await wait_up(url)
        maker = BodyMaker(model, PromptKind.TOKEN_IDS, True, 4.0, filler_pool(), cache_salt=salt)
        records = await replay(parse_target(url), requests, maker)
        summary = summarise(records)
        if summary.errors:
            raise HeteroGatewayError(f"{policy}: {summary.errors_by_kind}")
        return summary


async def wait_up(url: str) -> None:
    """Until the gateway sees every instance up. TimeoutError: it does not."""
    async with asyncio.timeout(UP_TIMEOUT_S):
        while True:
            seen = await asyncio.to_thread(fetch_document, url, None, "/admin/instances", {})
            if all(instance["up"] for instance in seen["instances"]):
                return
            await asyncio.sleep(0.1)


def figures(summary: Summary) -> dict[str, float]:
    """What is compared, with the first instance's share of the requests."""
    named: dict[str, float | None] = {
        "tokens_per_s": summary.throughput_tokens_per_s,
        "latency_mean_s": summary.latency_s.mean,
        "latency_p99_s": summary.latency_s.p99,
        "ttft_mean_s": summary.ttft_s.mean,
        "tpot_mean_s": summary.tpot_s.mean,
    }
    for share in summary.instances:
        named[f"share_{share.instance_id}"] = share.requests / summary.requests
        named[f"done_{share.instance_id}_s"] = share.completion_s
    return {name: math.nan if value is None else value for name, value in named.items()}


def table(results: dict[str, dict[str, list[dict[str, float]]]], names: Sequence[str]) -> str:
    """Markdown: a row per rate and policy."""
    head = ["rate /s", "policy", "tokens/s", "latency, mean, s", "p99", "TTFT, mean, s", "TPOT, s"]
    head += [f"to {name}" for name in names]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for rate, policies in results.items():
        for policy, runs in policies.items():
            cells = [rate, f"`{policy}`"]
            cells += [
                spread([r[key] for r in runs], digits)
                for key, digits in (
                    ("tokens_per_s", 0),
                    ("latency_mean_s", 2),
                    ("latency_p99_s", 2),
                    ("ttft_mean_s", 2),
                    ("tpot_mean_s", 4),
                )
            ]
            cells += [
                f"{statistics.mean(r.get(f'share_{name}', 0.0) for r in runs):.0%}"
                for name in names
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(values: Sequence[float], digits: int) -> str:
    text = f"{statistics.mean(values):.{digits}f}"
    return text + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


async def main() -> int:
    args = parse_args()
    if args.records is not None:
        args.records = args.records.resolve()  # the gateway runs in another folder
        args.records.mkdir(parents=True, exist_ok=True)
    policies, rates = args.policies.split(","), args.rates.split(",")
    names = [text.partition("=")[0] for text in args.instance]
    results: dict[str, dict[str, list[dict[str, Any]]]] = {
        rate: {policy: [] for policy in policies} for rate in rates
    }
    first_url = args.instance[0].partition("=")[2].partition(",")[0]
    async with httpx.AsyncClient() as client:
        model = (await client.get(f"{first_url}/v1/models")).json()["data"][0]["id"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(args.instance, folder)
        for seed in range(args.seeds):
            for rate in rates:
                requests = make_requests(args, float(rate), seed)
                for policy in policies:
                    salt = f"{seed}-{rate}-{policy}-{np.random.default_rng().integers(2**60)}"
                    record = None
                    if args.records is not None:
                        record = args.records / f"{policy}-{rate}-{seed}.jsonl"
                    summary = await run(policy, requests, model, salt, folder, record)
                    results[rate][policy].append(figures(summary))
                    print(f"seed {seed}, {rate}/s, {policy}: {summary.throughput_tokens_per_s:.0f} "
                          f"tokens/s, mean latency {summary.latency_s.mean or 0:.2f} s",
                          file=sys.stderr)  # fmt: skip
    print(json.dumps(results) if args.json else table(results, names))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
