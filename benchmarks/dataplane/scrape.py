"""What a scrape of /metrics takes: CPU, its longest step, and bytes on the wire.

    python benchmarks/dataplane/scrape.py [--instances 64,500] [--models 1] [--rounds 5]

A gateway in this process with so many instances, each of which has served requests of unequal
times; nothing is sent anywhere. CPU is that of this process, the fastest of the rounds; what other
work on the machine takes is in it.
"""

import argparse
import asyncio
import gc
import math
import random
import time
from pathlib import Path
from typing import Literal

from hetero_gateway.core.types import InstanceId
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.serve.wiring.gateway import Gateway

PROFILE = "V100-32GB-NVLink2/Llama-3-8B/tp4"


def gateway_of(instances: int, models: int) -> Gateway:
    """With a few hundred requests counted for each instance and model."""
    names = [f"model-{k}" for k in range(models)]
    every = [
        {"id": f"gpu-node-{i}", "base_url": f"http://10.0.{i // 250}.{i % 250 + 1}:8000",
         "model": names, "profile": PROFILE}
        for i in range(instances)
    ]  # fmt: skip
    gateway = Gateway(GatewayConfig.model_validate({"instances": every}), Path("gateway.yaml"))
    draw = random.Random(0)
    for i in range(instances):
        for name in names:
            series = gateway.metrics.counts(name, str(InstanceId(f"gpu-node-{i}")))
            requests = draw.randrange(100, 400)
            series.outcomes["completed"] = requests
            series.input_tokens, series.output_tokens = requests * 517, requests * 211
            for _ in range(requests):
                ttft_s = 0.08 * math.exp(draw.gauss(0, 1))
                tpot_s = 0.03 * math.exp(draw.gauss(0, 0.4))
                series.ttft.observe(ttft_s)
                series.tpot.observe(tpot_s)
                series.duration.observe(ttft_s + 211 * tpot_s)
        gateway.metrics.decisions[f"gpu-node-{i}"] = draw.randrange(100, 400)
    return gateway


async def scraped(gateway: Gateway, *, gzipped: bool) -> tuple[float, float, int]:
    """CPU of a scrape in s, that of its longest step, and its bytes."""

    async def written() -> int:
        return sum([len(part) async for part in gateway.metrics.exposition(gzipped=gzipped)])

    scrape, steps_s = written().__await__(), list[float]()
    while True:
        begin_s = time.process_time()
        try:
            next(scrape)
        except StopIteration as done:
            steps_s.append(time.process_time() - begin_s)
            return sum(steps_s), max(steps_s), int(done.value)
        steps_s.append(time.process_time() - begin_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", default="64,500")
    parser.add_argument("--models", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    modes: tuple[Literal["full", "basic"], ...] = ("full", "basic")
    print("| instances | per_backend | encoding | bytes | CPU, ms | longest step, ms |")
    print("|---|---|---|---|---|---|")
    for instances in map(int, args.instances.split(",")):
        gateway = gateway_of(instances, args.models)
        gc.collect()
        gc.freeze()  # as serve does once it has started
        for mode in modes:
            gateway.metrics.per_backend = mode
            for gzipped in (False, True):
                rounds = [
                    asyncio.run(scraped(gateway, gzipped=gzipped)) for _ in range(args.rounds)
                ]
                cpu_s, step_s, size = (min(column) for column in zip(*rounds, strict=True))
                print(
                    f"| {instances} | {mode} | {'gzip' if gzipped else 'none'} | {size} | "
                    f"{cpu_s * 1e3:.1f} | {step_s * 1e3:.1f} |"
                )


if __name__ == "__main__":
    main()
