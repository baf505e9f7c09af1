"""``profile URL``: measure an engine, fit, and write the profile, however the measuring ended."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetero_gateway.core.costs.fitting import Fit, Sample, fit
from hetero_gateway.errors import ConfigError, ProfileError
from hetero_gateway.lab.load.client import LoadTarget
from hetero_gateway.lab.profiler.campaign import (
    Campaign,
    CampaignOutcome,
    CampaignPlan,
    CampaignProgress,
    identity,
)
from hetero_gateway.lab.profiler.document import ProfiledInstance, write_fit
from hetero_gateway.lab.profiler.engine import EngineClient, EngineFacts, Overrides, read_engine
from hetero_gateway.lab.profiler.first_tokens import fit_first_tokens
from hetero_gateway.lab.profiler.plot import check_can_plot
from hetero_gateway.lab.profiler.samples import discarded_counts, kept_samples, read_json_lines
from hetero_gateway.lab.profiler.verdicts import chunked_prefills


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """The result.

    Args:
        document: the profile as written, or None if there are too few samples.
        fit: of the accepted samples, or None; ``missing`` then says what it lacks.
        samples: the accepted ones.
        discarded: how many batches were not, by reason.
        outcome: how the measuring ended; ``signal_number`` if a signal ended it.
    """

    document: dict[str, Any] | None
    fit: Fit | None
    missing: str | None
    samples: list[Sample]
    discarded: dict[str, int]
    outcome: CampaignOutcome
    signal_number: int | None


def samples_path(output: Path) -> Path:
    """Where a measurement keeps its samples: next to the profile."""
    return output.with_name(output.name + ".samples.jsonl")


def check_output(output: Path, plot: Path | None, *, resume: bool) -> None:
    """Find out before ten minutes of measuring what would fail after them.

    Raises ConfigError: the file could not be written or used, or would overwrite samples.
    """
    if output.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"-o {output}: a profile file ends in .yaml")
    if not output.parent.is_dir():
        raise ConfigError(f"-o {output}: {output.parent}: no such folder")
    if plot is not None:
        check_can_plot(plot)
    path = samples_path(output)
    if path.exists() and not resume:
        raise ConfigError(
            f"{path}: has the samples of an earlier run: continue it with --resume, "
            "or move it away to start over"
        )


async def measure(
    target: LoadTarget,
    output: Path,
    given: Overrides,
    plan: CampaignPlan,
    *,
    plot: Path | None = None,
    resume: bool = False,
    watch: Callable[[CampaignProgress], None] = lambda _: None,
    on_start: Callable[[EngineFacts], None] = lambda _: None,
) -> MeasuredProfile:
    """Measure until done, stopped by the engine, or asked to end by SIGINT or SIGTERM.

    Raises:
        ConfigError: a wrong flag, file, model or key.
        HeteroGatewayError: no engine answers there.
    """
    check_output(output, plot, resume=resume)
    async with contextlib.aclosing(EngineClient(target)) as client:
        facts = await read_engine(client, given)
    path = samples_path(output)
    records = read_json_lines(path) if resume and path.exists() else []
    _check_same(records, identity(facts, plan), path)
    on_start(facts)
    campaign = Campaign(target, facts, plan, path, records, watch)
    number = await _until_signalled(campaign)
    return _conclude(campaign, given, output, plot, number)


async def _until_signalled(campaign: Campaign) -> int | None:
    """Run it; returns the number of the signal that ended it, or None."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(campaign.run())
    caught: list[int] = []

    def end(number: int) -> None:
        caught.append(number)
        # A second one ends the process at once.
        loop.remove_signal_handler(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    try:
        await task
    except asyncio.CancelledError:
        if not caught:
            raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return caught[0] if caught else None


def _check_same(records: list[dict[str, Any]], now: Mapping[str, Any], path: Path) -> None:
    """Raises ConfigError if the file's samples are of another engine or grid."""
    for record in records:
        run = record.get("run")
        if not isinstance(run, dict):
            raise ConfigError(
                f"{path}: --resume: its samples are not of hetero-gateway profile URL"
            )
        for key, value in now.items():
            if run.get(key) != value:
                raise ConfigError(
                    f"{path}: --resume: its samples are of {key} {run.get(key)}, "
                    f"this run is of {value}: measure into another file, or say the same"
                )


def _conclude(
    campaign: Campaign,
    given: Overrides,
    output: Path,
    plot: Path | None,
    signal_number: int | None,
) -> MeasuredProfile:
    """Fit the present samples and write the profile."""
    facts, plan, outcome = campaign.facts, campaign.plan, campaign.outcome
    chunked = chunked_prefills(campaign.records, plan.max_batched_tokens)
    samples = kept_samples(campaign.records)
    samples += chunked.measured if plan.deep_prefills else chunked.singles
    discarded = discarded_counts(campaign.records)
    fitted, document, missing = None, None, None
    try:
        fitted = fit(samples, rng=np.random.default_rng(plan.seed))
    except ProfileError as error:
        missing = str(error)
    if fitted is not None:
        if (off := chunked.error(fitted.prefill.constants)) is not None:
            whether = "fitted too" if plan.deep_prefills else "not fitted (--deep-prefills does)"
            outcome.notes.append(
                f"p1 to p4 and p9 are off by {off:.0%} on average for the {len(chunked.batches)} "
                f"batches measured whose prefill takes several steps; they are {whether}"
            )
        first = fit_first_tokens(campaign.idle_probes, campaign.beside_probes, fitted.constants)
        if first is None:
            outcome.notes.append("what a first token takes beside its steps was not measured")
        instance = ProfiledInstance(
            *(given.gpu, facts.model, given.tensor_parallel),
            *(facts.kv_capacity_tokens, outcome.max_num_seqs),
            *((first.first_token_s, first.plans_ahead) if first is not None else ()),
        )
        source = {
            "note": _note(campaign, len(samples), signal_number),
            "engine": facts.look.version,
            "block_size": facts.block_tokens,
            "max_model_len": facts.max_model_len,
            "gpu_memory_utilization": facts.look.cache.utilisation,
            "kv_cache_dtype": facts.look.cache.dtype,
            "quantization": given.quantization,
            "discarded": discarded,
        }
        document = write_fit(fitted, samples, instance, source, output, plot)
    return MeasuredProfile(document, fitted, missing, samples, discarded, outcome, signal_number)


def _note(campaign: Campaign, samples: int, signal_number: int | None) -> str:
    """How it was measured, for readers of the file."""
    facts, plan, outcome = campaign.facts, campaign.plan, campaign.outcome
    parts = [
        f"hetero-gateway profile: {samples} samples of a live engine over HTTP, "
        f"{plan.passes} passes, seed {plan.seed}, budget {plan.budget_s:g} s, "
        f"steps of {plan.max_batched_tokens} tokens"
    ]
    if not facts.look.has_metrics:
        parts.append("no /metrics, so foreign load and preemption were not looked for")
    if not facts.max_num_seqs_known and outcome.max_num_seqs == facts.max_num_seqs:
        parts.append("max_num_seqs is vLLM's default, not asked of the engine")
    parts += outcome.notes
    if outcome.unaffordable:
        parts.append(f"{len(outcome.unaffordable)} cells were beyond the budget")
    if outcome.stopped is not None or signal_number is not None:
        parts.append("ended early")
    return "; ".join(parts)
