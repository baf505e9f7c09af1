"""``init``: starter files, filled in with what servers report."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence

from hetero_gateway.deploy.directory import write_beside
from hetero_gateway.deploy.starter import GATEWAY_FILE, ProbedServer, starter_files
from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.files.gateway_config import load_gateway_config
from hetero_gateway.files.profile_file import builtin_profiles
from hetero_gateway.files.secrets import secret
from hetero_gateway.lab.load.client import LoadTarget, parse_target
from hetero_gateway.lab.profiler.engine import EngineClient, look_at


def run(args: argparse.Namespace) -> int:
    key = secret(args.api_key_env, "--api-key-env")
    targets = [parse_target(url, key) for url in args.probe]
    servers = asyncio.run(_ask(targets))
    files = starter_files(servers, builtin_profiles(), args.api_key_env)
    paths = write_beside(files, args.output, force=args.force)
    configuration = args.output / GATEWAY_FILE
    load_gateway_config(configuration)
    for server in servers:
        if server.problem:
            print(f"hetero-gateway: warning: {server.problem}", file=sys.stderr)
    if args.json:
        asked = [
            {
                "base_url": server.base_url,
                "models": list(server.served),
                "version": server.version,
                "problem": server.problem or None,
            }
            for server in servers
        ]
        print(json.dumps({"files": [str(path) for path in paths], "probed": asked}))
        return 0
    for server in servers:
        if not server.problem:
            print(f"{server.base_url}: vLLM {server.version}, serves {', '.join(server.served)}")
    print(f"{len(paths)} files written to {args.output.absolute()}. Next:")
    print(f"  hetero-gateway validate -c {configuration}")
    print(f"  hetero-gateway serve -c {configuration}")
    return 0


async def _ask(targets: Sequence[LoadTarget]) -> list[ProbedServer]:
    return await asyncio.gather(*map(_ask_one, targets))


async def _ask_one(target: LoadTarget) -> ProbedServer:
    """What a server reports; one that does not answer is included all the same."""
    client = EngineClient(target)
    try:
        look = await look_at(client)
    except HeteroGatewayError as error:
        return ProbedServer(target.base_url, problem=str(error))
    finally:
        await client.aclose()
    return ProbedServer(
        target.base_url,
        served=look.served,
        version=look.version,
        has_metrics=look.has_metrics,
        kv_capacity_tokens=look.cache.capacity_tokens,
        prefix_caching=look.cache.prefix_caching,
    )
