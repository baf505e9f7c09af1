"""``bench``: replay a trace as load against any OpenAI-compatible URL."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_gateway.cli.arguments import positive_float, positive_int, rate

if TYPE_CHECKING:
    from hetero_gateway.lab.load.client import LoadTarget
    from hetero_gateway.lab.load.result import RequestRecord

_EXAMPLE = """\
examples:
  hetero-gateway bench http://127.0.0.1:8000 --requests trace.csv --rate 8
  hetero-gateway bench http://127.0.0.1:8000 --rate inf --limit 500 --json > result.json

A trace is a CSV file with the header arrival_s,input_tokens,output_tokens; without arrival_s its
requests are sent at --rate, or all at once. JSON lines that say which prompts begin alike (.jsonl,
.jsonl.gz; docs/guide/simulate.md) are sent as conversations, a turn after the answer to the
last one, stretched to --rate. Without --requests a synthetic mix of chat lengths is sent
(log-normal, from --seed). Throughput counts prompt and output tokens of answered requests, over
the time from the first sending to the last answer.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="put load on a URL and report throughput, TTFT, TPOT, latency and errors",
        description="Replay a trace as load against any OpenAI-compatible URL.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="URL", help="base URL, with or without /v1")
    parser.add_argument("--requests", type=Path, metavar="TRACE", help="the trace to replay")
    parser.add_argument(
        "--rate",
        type=rate,
        metavar="R",
        help="Poisson arrivals per second, or inf; default: the trace's own times",
    )
    parser.add_argument("--model", help="model name; default: the first that /v1/models lists")
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable that holds the API key"
    )
    parser.add_argument(
        "--concurrency", type=positive_int, metavar="N", help="most requests in flight"
    )
    parser.add_argument(
        "--limit",
        type=positive_int,
        metavar="N",
        help="send only the first N requests (default without --requests: 200)",
    )
    parser.add_argument(
        "--prompt",
        choices=("chat", "completion", "token-ids"),
        default="chat",
        help="what to send: chat text (default), completion text, or completion token ids",
    )
    parser.add_argument(
        "--bytes-per-token",
        type=positive_float,
        default=4.0,
        metavar="X",
        help="length of the filler text per prompt token (default: 4.0)",
    )
    parser.add_argument("--no-stream", action="store_true", help="ask for plain answers")
    parser.add_argument(
        "--timeout",
        type=positive_float,
        default=600.0,
        metavar="SECONDS",
        help="per request (default: 600)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of arrivals, lengths and prompts (default: 0)"
    )
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write a page with plots")
    for name, what in (("ttft", "TTFT"), ("tpot", "TPOT")):
        parser.add_argument(
            f"--slo-{name}",
            type=positive_float,
            metavar="S",
            help=f"limit of {what} in seconds: report the share of the requests within the limits",
        )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the load; 0 when at least one request was answered, else 1."""
    # Imported here so that other commands and --help stay quick.
    import asyncio

    import uvloop
    from rich.console import Console

    from hetero_gateway.cli.reports import page
    from hetero_gateway.cli.reports.bench_table import print_summary
    from hetero_gateway.core.policies.slo import Slo
    from hetero_gateway.files.secrets import secret
    from hetero_gateway.files.trace import read_trace, schedule, synthetic_trace
    from hetero_gateway.lab.load.client import parse_target
    from hetero_gateway.lab.load.progress import progress_bar, watch
    from hetero_gateway.lab.load.prompts import BodyMaker, PromptKind, filler_pool
    from hetero_gateway.lab.load.replay import ReplayOptions, replay
    from hetero_gateway.lab.load.result import summarise

    if args.report is not None:
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
    options = ReplayOptions(args.concurrency, args.timeout)
    slo = None
    if args.slo_ttft or args.slo_tpot:
        slo = Slo(args.slo_ttft or math.inf, args.slo_tpot or math.inf)

    async def load() -> list[RequestRecord]:
        with progress_bar(Console(stderr=True)) as progress:
            async with watch(progress, "bench", len(requests)) as counter:
                return await replay(target, requests, maker, options, counter.add)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        records = runner.run(load())
    summary = summarise(records, slo)
    document = summary.to_dict() | {"url": target.base_url, "model": maker.model}
    if args.report is not None:
        from hetero_gateway.cli.reports.bench_report import render

        page.write(args.report, render(summary, records, document))
        print(f"wrote {args.report}", file=sys.stderr)
    if args.json:
        print(json.dumps(document))
    else:
        print_summary(summary, target.base_url, maker.model)
    if summary.errors == summary.requests:
        kinds = ", ".join(f"{n} × {kind}" for kind, n in summary.errors_by_kind.items())
        print(f"hetero-gateway: bench: no request was answered: {kinds}", file=sys.stderr)
        return 1
    return 0


def _model(target: LoadTarget, wanted: str | None) -> str:
    """The model to ask for; also finds out early that nobody listens.

    Raises:
        HeteroGatewayError: no connection, or no answer to /v1/models where a name is needed.
    """
    from hetero_gateway.engines.vllm import paths, read_models
    from hetero_gateway.errors import HeteroGatewayError
    from hetero_gateway.plain_httpx import httpx

    url = target.base_url + paths.MODELS
    headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    try:
        response = httpx.get(url, headers=headers, timeout=10.0)
    except httpx.HTTPError as error:
        raise HeteroGatewayError(f"{url}: no answer: {error}") from error
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
