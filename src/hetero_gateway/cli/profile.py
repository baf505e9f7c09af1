"""``profile``: p1..p9 of an instance: measured live, from samples, or from a gateway's traffic."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_gateway.cli.admin_client import add_from_gateway, add_key_argument
from hetero_gateway.cli.arguments import positive_float, positive_int
from hetero_gateway.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.progress import Progress as Bar

    from hetero_gateway.core.costs.fitting import Fit, Sample
    from hetero_gateway.lab.profiler.campaign import CampaignPlan, CampaignProgress
    from hetero_gateway.lab.profiler.engine import EngineFacts, Overrides
    from hetero_gateway.lab.profiler.live import MeasuredProfile

_EXAMPLE = """\
examples:
  hetero-gateway profile http://127.0.0.1:8000 -o a100.yaml --gpu A100-80GB-SXM
  hetero-gateway profile http://127.0.0.1:8000 -o a100.yaml --gpu A100-80GB-SXM --resume
  hetero-gateway profile --from samples.csv -o a100.yaml --gpu A100-80GB-SXM --model Llama-3-8B \\
      --kv-capacity-tokens 400000
  hetero-gateway profile --from-gateway http://127.0.0.1:8000 --instance a100-0 -o a100.yaml

The engine must serve nobody else meanwhile. Every sample is kept as it comes, in
FILE.samples.jsonl: after Ctrl-C, or whatever else ended it, --resume goes on. The profile is
written in any case, if there are samples enough. docs/guide/profile.md says how it measures.
"""

_NO_GPU = "unknown"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "profile",
        help="measure a live instance, or fit recorded samples: a profile file",
        description="Measure a live instance through its API and fit p1..p9 of the time model; or "
        "fit samples that were recorded before, or what a running gateway has observed.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("url", nargs="?", metavar="URL", help="base URL of a vLLM, with or without /v1")
    add("--from", dest="samples", type=Path, metavar="FILE", help="fit these samples instead")
    add_from_gateway(parser, "fit what this gateway has seen of an instance")
    add("-o", "--output", type=Path, required=True, metavar="FILE.yaml", help="the profile")
    add("--model", metavar="NAME", help="default: the first that the engine lists")
    add("--gpu", metavar="NAME", help="for the profile's name")
    add("--tensor-parallel", type=positive_int, metavar="N", help="likewise (default: 1)")
    add("--quantization", metavar="NAME", help="of the weights; only noted")
    add("--resume", action="store_true", help="go on with the samples that FILE has already")
    add("--plot", type=Path, metavar="FILE", help="measured against fitted, .png or .svg")
    add("--report", type=Path, metavar="FILE.html", help="write a page with plots")
    add("--json", action="store_true", help="print one JSON document")
    add("--seed", type=int, default=0, help="of lengths, hold-out and bootstrap (default: 0)")
    live = parser.add_argument_group("a live engine")
    add = live.add_argument
    add("--budget", type=positive_float, default=600.0, metavar="S", help="seconds (default: 600)")
    add("--passes", type=positive_int, default=3, metavar="N", help="samples per cell (default: 3)")
    add("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    add("--timeout", type=positive_float, default=600.0, metavar="S", help="per request")
    add(
        "--max-num-batched-tokens",
        type=positive_int,
        default=2048,
        metavar="N",
        help="as the engine was started with (default: 2048, vLLM's on most cards)",
    )
    add(
        "--deep-prefills",
        action="store_true",
        help="fit prefills of several steps too; with --resume, of the samples that are there",
    )
    observed = parser.add_argument_group("a gateway's traffic")
    add = observed.add_argument
    add("--instance", metavar="ID", help="default: the only one")
    add_key_argument(observed)
    known = parser.add_argument_group("what the engine reports, unless given here")
    add = known.add_argument
    add("--kv-capacity-tokens", type=positive_int, metavar="N", help="KV cache of the instance")
    add("--max-num-seqs", type=positive_int, metavar="N", help="default: vLLM's, 256")
    add("--max-model-len", type=positive_int, metavar="N", help="context window in tokens")
    add("--block-size", type=positive_int, metavar="N", help="tokens per KV block")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure or fit; 0 when complete, 130 after Ctrl-C, 1 when the engine ended it."""
    sources = {"url": _live, "samples": _recorded, "from_gateway": _observed}
    chosen = [run_it for name, run_it in sources.items() if getattr(args, name) is not None]
    if len(chosen) != 1:
        raise ConfigError(
            "profile: give one of a URL to measure, --from FILE, and --from-gateway URL"
        )
    if args.report is not None:
        from hetero_gateway.cli.reports.page import check_can_write

        if chosen[0] is _observed:
            raise ConfigError("--report: there is none of a gateway's traffic")
        check_can_write(args.report)
    return chosen[0](args)


def _recorded(args: argparse.Namespace) -> int:
    from hetero_gateway.cli.reports.profile_table import report
    from hetero_gateway.core.costs.profile import DEFAULT_MAX_NUM_SEQS
    from hetero_gateway.lab.profiler.document import ProfiledInstance
    from hetero_gateway.lab.profiler.recorded import fit_recorded

    for name in ("model", "kv_capacity_tokens"):
        if getattr(args, name) is None:
            raise ConfigError(f"profile --from: --{name.replace('_', '-')} is needed")
    fitted = fit_recorded(
        args.samples,
        args.output,
        ProfiledInstance(
            args.gpu or _NO_GPU,
            args.model,
            args.tensor_parallel or 1,
            args.kv_capacity_tokens,
            args.max_num_seqs or DEFAULT_MAX_NUM_SEQS,
        ),
        plot=args.plot,
        seed=args.seed,
    )
    if args.report is not None:
        _write_report(args, fitted.fit, fitted.samples, fitted.discarded)
    if args.json:
        print(json.dumps({"output": str(args.output), "profile": _written(args.output)}))
    else:
        print(report(fitted.fit), end="")
    return 0


def _observed(args: argparse.Namespace) -> int:
    from hetero_gateway.lab.load.admin import fetch_document
    from hetero_gateway.lab.profiler.observed import write_observed

    url, key_env, instance = args.from_gateway, args.admin_key_env, args.instance
    if instance is None:
        listed = fetch_document(url, key_env, "/admin/instances", {})["instances"]
        if len(listed) != 1:
            names = ", ".join(str(i["id"]) for i in listed) or "none"
            raise ConfigError(f"--instance: say which; the gateway has {names}")
        instance = listed[0]["id"]
    text = write_observed(
        fetch_document(url, key_env, "/admin/observations", {"instance": instance}),
        args.output,
        gpu=args.gpu,
        tensor_parallel=args.tensor_parallel,
        kv_capacity_tokens=args.kv_capacity_tokens,
        max_num_seqs=args.max_num_seqs,
    )
    if args.json:
        print(json.dumps({"output": str(args.output), "profile": _written(args.output)}))
    else:
        print(f"{text}wrote {args.output}")
    return 0


def _live(args: argparse.Namespace) -> int:
    # Imported here so that other commands and --help stay quick.
    import asyncio

    import uvloop
    from rich.console import Console

    from hetero_gateway.files.secrets import secret
    from hetero_gateway.lab.load.client import parse_target
    from hetero_gateway.lab.profiler.live import Hardware, measure

    target = parse_target(args.url, secret(args.api_key_env, "--api-key-env"))
    plan, given = _asked(args)
    console = Console(stderr=True, highlight=False)
    with _bar(console) as bar:
        task = bar.add_task("profile", total=None, note="")

        def watch(progress: CampaignProgress) -> None:
            bar.update(
                task,
                completed=progress.done,
                total=progress.total,
                note=_note(progress),
                refresh=True,
            )

        def on_start(facts: EngineFacts) -> None:
            console.print(_facts(facts, plan.budget_s), soft_wrap=True)

        async def measured() -> MeasuredProfile:
            return await measure(
                target,
                args.output,
                Hardware(args.gpu or _NO_GPU, args.tensor_parallel or 1, args.quantization),
                given,
                plan,
                plot=args.plot,
                resume=args.resume,
                watch=watch,
                on_start=on_start,
            )

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(measured())
    return _tell(args, result)


def _asked(args: argparse.Namespace) -> tuple[CampaignPlan, Overrides]:
    from hetero_gateway.lab.profiler.campaign import CampaignPlan
    from hetero_gateway.lab.profiler.engine import Overrides

    plan = CampaignPlan(
        budget_s=args.budget,
        seed=args.seed,
        passes=args.passes,
        timeout_s=args.timeout,
        max_batched_tokens=args.max_num_batched_tokens,
        deep_prefills=args.deep_prefills,
    )
    given = Overrides(
        model=args.model,
        kv_capacity_tokens=args.kv_capacity_tokens,
        max_model_len=args.max_model_len,
        block_tokens=args.block_size,
        max_num_seqs=args.max_num_seqs,
    )
    return plan, given


def _tell(args: argparse.Namespace, result: MeasuredProfile) -> int:
    from hetero_gateway.cli.reports.profile_table import report
    from hetero_gateway.lab.profiler.live import samples_path

    outcome = result.outcome
    if args.report is not None and result.fit is not None:
        _write_report(args, result.fit, result.samples, result.discarded)
    if args.json:
        print(json.dumps(_json(args, result), default=str))
    elif result.fit is not None:
        print(report(result.fit, discarded=result.discarded), end="")
        for text in outcome.notes:
            print(f"note: {text}")
        if outcome.unaffordable:
            print(f"not measured, beyond the budget: {', '.join(outcome.unaffordable)}")
        print(f"wrote {args.output}")
    number = result.signal_number
    early = outcome.stopped or (number and f"ended by {signal.Signals(number).name}")
    if early or result.missing:
        kept = f"{len(result.samples)} samples are in {samples_path(args.output)}; --resume goes on"
        wrote = "" if result.fit else f"; no profile was written: {result.missing}"
        print(f"hetero-gateway: profile: {early or 'done'}; {kept}{wrote}", file=sys.stderr)
    if number:
        return 128 + number
    return 1 if outcome.stopped or result.missing else 0


def _write_report(
    args: argparse.Namespace, fit: Fit, samples: Sequence[Sample], discarded: Mapping[str, int]
) -> None:
    from hetero_gateway.cli.reports import page
    from hetero_gateway.cli.reports.profile_report import render

    page.write(args.report, render(fit, samples, _written(args.output), discarded))
    print(f"wrote {args.report}", file=sys.stderr)


def _json(args: argparse.Namespace, result: MeasuredProfile) -> dict[str, object]:
    return {
        "output": str(args.output),
        "profile": result.document,
        "samples": len(result.samples),
        "discarded": result.discarded,
        "not_measured": result.outcome.unaffordable,
        "stopped": result.outcome.stopped,
        "missing": result.missing,
    }


def _written(path: Path) -> dict[str, object]:
    import yaml

    text = path.read_text("utf-8")
    document: dict[str, object] = json.loads(json.dumps(yaml.safe_load(text), default=str))
    return document


def _facts(facts: EngineFacts, budget_s: float) -> str:
    seqs = "" if facts.max_num_seqs_known else " (assumed; --max-num-seqs)"
    checked = "" if facts.has_metrics else "; no /metrics: batches cannot be checked"
    return (
        f"{facts.model} on vLLM {facts.version}: context {facts.max_model_len}, "
        f"KV {facts.kv_capacity_tokens} tokens in blocks of {facts.block_tokens}, "
        f"max_num_seqs {facts.max_num_seqs}{seqs}{checked}; up to {budget_s:g} s"
    )


def _note(progress: CampaignProgress) -> str:
    minutes, seconds = divmod(round(progress.left_s), 60)
    discarded = f", {progress.discarded} discarded" if progress.discarded else ""
    return f"{progress.cell}{discarded}, {minutes}:{seconds:02d} left"


def _bar(console: object) -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    assert isinstance(console, Console)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        auto_refresh=False,
        disable=not console.is_terminal,
    )
