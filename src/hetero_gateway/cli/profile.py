"""``profile``: p1..p9 of an instance: measured live, from samples, or from a gateway's traffic."""

import argparse
import asyncio
import json
import signal
import sys
from functools import partial
from pathlib import Path

import uvloop
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from hetero_gateway.cli import profile_pairs
from hetero_gateway.cli.reports import page
from hetero_gateway.cli.reports.profile import render, report
from hetero_gateway.cli.reports.report import CommandReport, print_table
from hetero_gateway.core.costs.fitting import Fit
from hetero_gateway.core.costs.profile import DEFAULT_MAX_NUM_SEQS
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.profile_file import builtin_profiles
from hetero_gateway.files.secrets import secret
from hetero_gateway.lab.load.admin import fetch_document
from hetero_gateway.lab.load.client import parse_target
from hetero_gateway.lab.profiler.campaign import CampaignPlan, CampaignProgress
from hetero_gateway.lab.profiler.document import ProfiledInstance, fit_recorded
from hetero_gateway.lab.profiler.engine import EngineFacts, Overrides
from hetero_gateway.lab.profiler.live import MeasuredProfile, measure, samples_path
from hetero_gateway.lab.profiler.observed import write_observed

_NO_GPU = "unknown"


def run(args: argparse.Namespace) -> int:
    """Measure or fit; 0 when complete, 130 after Ctrl-C, 1 if the engine stopped it."""
    if args.url == "list":
        return _list(as_json=args.json)
    if args.output is None:
        raise ConfigError("profile: -o FILE.yaml: name the file to write the profile to")
    if args.pairs:
        return profile_pairs.run(args)
    sources = {"url": _live, "samples": _recorded, "from_gateway": _observed}
    chosen = [run_it for name, run_it in sources.items() if getattr(args, name) is not None]
    if len(chosen) != 1:
        raise ConfigError(
            "profile: give one of a URL to measure, --from FILE, and --from-gateway URL"
        )
    if args.report is not None and chosen[0] is _observed:
        raise ConfigError("--report: not available for a gateway's traffic")
    page.check_can_write(args.report)
    return chosen[0](args)


def _list(*, as_json: bool) -> int:
    """The built-in profiles."""
    rows = [
        {
            "name": name,
            "gpu": each.gpu,
            "model": each.model,
            "tensor_parallel": each.tensor_parallel,
            "kv_capacity_tokens": each.kv_capacity_tokens,
            "how": each.source["how"],
        }
        for name, each in sorted(builtin_profiles().items())
    ]
    if as_json:
        print(json.dumps({"profiles": rows}))
        return 0
    print_table(
        ("PROFILE", "KV TOKENS", "HOW"),
        [(str(row["name"]), str(row["kv_capacity_tokens"]), str(row["how"])) for row in rows],
    )
    print(
        "derived: from public measurements; roofline: from the data sheet, known to about 25 %. "
        "`hetero-gateway profile URL -o FILE.yaml` measures your own."
    )
    return 0


def _recorded(args: argparse.Namespace) -> int:
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
    written = _written(args.output)
    CommandReport(
        {"output": str(args.output), "profile": written},
        lambda: print(report(fitted.fit), end=""),
        lambda: render(fitted.fit, fitted.samples, written, fitted.discarded),
    ).tell(args)
    return 0


def _observed(args: argparse.Namespace) -> int:
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
    target = parse_target(args.url, secret(args.api_key_env, "--api-key-env"))
    plan = CampaignPlan(
        budget_s=args.budget,
        seed=args.seed,
        passes=args.passes,
        timeout_s=args.timeout,
        max_batched_tokens=args.max_num_batched_tokens,
        deep_prefills=args.deep_prefills,
    )
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
                _given(args),
                plan,
                plot=args.plot,
                resume=args.resume,
                watch=watch,
                on_start=on_start,
            )

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(measured())
    return _tell(args, result)


def _given(args: argparse.Namespace) -> Overrides:
    same = ("model", "kv_capacity_tokens", "max_model_len", "max_num_seqs", "quantization")
    return Overrides(
        **{name: getattr(args, name) for name in same},
        block_tokens=args.block_size,
        gpu=args.gpu or _NO_GPU,
        tensor_parallel=args.tensor_parallel or 1,
    )


def _tell(args: argparse.Namespace, result: MeasuredProfile) -> int:
    outcome, fit = result.outcome, result.fit

    def text() -> None:
        if fit is None:
            return
        print(report(fit, discarded=result.discarded), end="")
        for note in outcome.notes:
            print(f"note: {note}")
        if outcome.unaffordable:
            print(f"not measured, beyond the budget: {', '.join(outcome.unaffordable)}")
        print(f"wrote {args.output}")

    def html(fit: Fit) -> str:
        return render(fit, result.samples, _written(args.output), result.discarded)

    CommandReport(_json(args, result), text, None if fit is None else partial(html, fit)).tell(args)
    number = result.signal_number
    early = outcome.stopped or (number and f"ended by {signal.Signals(number).name}")
    if early or result.missing:
        kept = f"{len(result.samples)} samples are in {samples_path(args.output)}; --resume goes on"
        wrote = "" if result.fit else f"; no profile was written: {result.missing}"
        print(f"hetero-gateway: profile: {early or 'done'}; {kept}{wrote}", file=sys.stderr)
    if number:
        return 128 + number
    return 1 if outcome.stopped or result.missing else 0


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
    text = path.read_text("utf-8")
    document: dict[str, object] = json.loads(json.dumps(yaml.safe_load(text), default=str))
    return document


def _facts(facts: EngineFacts, budget_s: float) -> str:
    seqs = "" if facts.max_num_seqs_known else " (assumed; --max-num-seqs)"
    checked = "" if facts.look.has_metrics else "; no /metrics: batches cannot be checked"
    return (
        f"{facts.model} on vLLM {facts.look.version}: context {facts.max_model_len}, "
        f"KV {facts.kv_capacity_tokens} tokens in blocks of {facts.block_tokens}, "
        f"max_num_seqs {facts.max_num_seqs}{seqs}{checked}; up to {budget_s:g} s"
    )


def _note(progress: CampaignProgress) -> str:
    minutes, seconds = divmod(round(progress.left_s), 60)
    discarded = f", {progress.discarded} discarded" if progress.discarded else ""
    return f"{progress.cell}{discarded}, {minutes}:{seconds:02d} left"


def _bar(console: Console) -> Bar:
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        auto_refresh=False,
        disable=not console.is_terminal,
    )
