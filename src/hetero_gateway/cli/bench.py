"""``bench``: replay a trace as load against any OpenAI-compatible URL."""

import argparse
import math
import sys

import uvloop
from rich.console import Console

from hetero_gateway.cli.reports import page
from hetero_gateway.cli.reports.bench import report
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.engines.vllm import paths, read_models
from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.files.secrets import secret
from hetero_gateway.files.trace import read_trace, schedule, synthetic_trace
from hetero_gateway.lab.load.client import LoadTarget, parse_target
from hetero_gateway.lab.load.progress import progress_bar, watch
from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind, filler_pool
from hetero_gateway.lab.load.replay import replay
from hetero_gateway.lab.load.result import RequestRecord, summarise
from hetero_gateway.lab.load.unreachable import why_unreachable
from hetero_gateway.plain_httpx import httpx


def run(args: argparse.Namespace) -> int:
    """Run the load; 0 when at least one request was answered, else 1."""
    page.check_can_write(args.report)
    target = parse_target(args.url, secret(args.api_key_env, "--api-key-env"))
    if args.requests is None:
        trace = synthetic_trace(args.limit or 200, args.seed)
    else:
        trace = read_trace(args.requests, args.limit)
    requests = schedule(trace, args.rate, args.seed)
    maker = BodyMaker(
        model=_model(target, args.model),
        kind=PromptKind(args.prompt),
        stream=not args.no_stream,
        bytes_per_token=args.bytes_per_token,
        pool=filler_pool(args.seed),
    )
    slo = None
    if args.slo_ttft or args.slo_tpot:
        slo = Slo(args.slo_ttft or math.inf, args.slo_tpot or math.inf)

    async def load() -> list[RequestRecord]:
        with progress_bar(Console(stderr=True)) as progress:
            async with watch(progress, "bench", len(requests)) as counter:
                most, timeout_s = args.concurrency, args.timeout
                return await replay(
                    target, requests, maker, counter.add, concurrency=most, timeout_s=timeout_s
                )

    records = uvloop.run(load())
    summary = summarise(records, slo)
    report(summary, records, target.base_url, maker.model).tell(args)
    if summary.errors == summary.requests:
        kinds = ", ".join(f"{n} × {kind}" for kind, n in summary.errors_by_kind.items())
        said = next((f" ({r.said})" for r in records if r.said), "")
        print(f"hetero-gateway: bench: no request was answered: {kinds}{said}", file=sys.stderr)
        return 1
    return 0


def _model(target: LoadTarget, wanted: str | None) -> str:
    """The model to ask for; also finds out early that nobody listens.

    Raises:
        HeteroGatewayError: no connection, or no answer from /v1/models and a name is needed.
    """
    url = target.base_url + paths.MODELS
    headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    try:
        response = httpx.get(url, headers=headers, timeout=10.0)
    except httpx.HTTPError as error:
        raise HeteroGatewayError(
            f"{url}: no answer: {why_unreachable(target.base_url, error)}"
        ) from error
    if wanted is not None:
        return wanted
    if not response.is_success:
        raise HeteroGatewayError(
            f"{url}: answered {response.status_code}; give --model or --api-key-env"
        )
    models = read_models(response.content)
    if not models:
        raise HeteroGatewayError(f"{url}: lists no model; give --model")
    return next(iter(models))
