"""A whole measurement: which batch next, whether it counts, when to stop.

Every batch leaves its record in a JSON-lines file as it ends, accepted or not, so that an
interrupted run has lost at most the current batch; a resumed run reads the file and continues with
the cells that have no sample yet.

A batch counts only if the engine's own counters say that it was alone (no foreign tokens, nothing
else running, no preemption, no prefix-cache hit) and this process was not too busy to see the
tokens in time. Other batches are tried again later.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hetero_gateway.core.costs.fitting import Sample, decode_terms, eq_3_terms, fit_rows
from hetero_gateway.engines.vllm import EngineMetrics, paths
from hetero_gateway.errors import HeteroGatewayError
from hetero_gateway.lab.load.client import LoadClient, LoadTarget
from hetero_gateway.lab.load.replay import raise_file_limit
from hetero_gateway.lab.profiler import first_tokens, verdicts
from hetero_gateway.lab.profiler.batch import BatchSender, Shot
from hetero_gateway.lab.profiler.engine import EngineClient, EngineFacts
from hetero_gateway.lab.profiler.first_tokens import ShortPrompt
from hetero_gateway.lab.profiler.grid import GRID_VERSION, BatchLimits, GridCell, cost_s, plan_cells
from hetero_gateway.lab.profiler.samples import append, kept_samples, record_of
from hetero_gateway.lab.profiler.tracks import Track
from hetero_gateway.lab.profiler.verdicts import BatchVerdict, disturbance, one_step, several_steps

# Above this share of a core this process may see tokens late.
MAX_CLIENT_CPU = 0.7
# A batch whose estimate is above this share of the whole budget is not worth its time. A first look
# at a long single prompt is worth twice as much: nothing else shows attention (p9).
MAX_SHARE, MAX_SINGLE_SHARE = 0.08, 0.16
TRIES = 3
_IDLE_WITHIN_S = 10.0
_COUNTERS_WITHIN_S = 1.0
_POLL_S = 0.1
# This many in a row end the run, with these messages; a single failure or visitor is only a batch
# to repeat.
_HOPELESS = {
    verdicts.ENGINE_ERROR: (3, "{} batches in a row failed: {}"),
    verdicts.FOREIGN: (
        6,
        "the engine serves others: {} batches in a row were not alone; "
        "profile it while nobody else uses it",
    ),
    verdicts.UNEQUAL: (
        4,
        "the output lengths are not as asked: the engine ignores min_tokens and ignore_eos, so "
        "batches cannot be measured",
    ),
}
# Assumed until something has been measured; every engine does this in a second or two.
_WARM_UP = (256, 16)
# A gate lasts at least this long, and this much longer for each request and each prompt token after
# it: an API server's time to parse them (a vLLM: 0.3 ms and 1 µs).
_GATE_S, _GATE_S_PER_REQUEST, _GATE_S_PER_TOKEN = 0.03, 0.0006, 1.5e-6


@dataclass(frozen=True, slots=True)
class CampaignPlan:
    """The user's settings, as in ``profile --help``.

    ``budget_s`` is over all runs that add to one file, ``timeout_s`` of one request.
    """

    budget_s: float = 600.0
    seed: int = 0
    passes: int = 3
    timeout_s: float = 600.0
    max_batched_tokens: int = 2048
    deep_prefills: bool = False


@dataclass(slots=True)
class CampaignProgress:
    """The progress, for a progress bar."""

    done: int = 0
    total: int = 0
    discarded: int = 0
    left_s: float = 0.0
    cell: str = ""


@dataclass(slots=True)
class CampaignOutcome:
    """How it ended. ``stopped``: a line on why it ended early, or None."""

    stopped: str | None = None
    unaffordable: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    max_num_seqs: int = 0


class _Stop(Exception):
    """Measuring cannot continue; the text is the reason."""


class _Item(NamedTuple):
    """A cell to measure once; ``tries`` failed."""

    cell: GridCell
    tries: int = 0


class Campaign:
    """Measures an engine into a file of samples.

    Args:
        target, facts, plan: what, where, how much.
        path: the samples' file; ``records`` are its present contents.
        watch: called whenever the progress changed.
    """

    def __init__(
        self,
        target: LoadTarget,
        facts: EngineFacts,
        plan: CampaignPlan,
        path: Path,
        records: Sequence[Mapping[str, Any]],
        watch: Callable[[CampaignProgress], None],
    ) -> None:
        self.facts = facts
        self.plan = plan
        self._path = path
        self.records: list[Mapping[str, Any]] = list(records)
        self._watch = watch
        self._client = LoadClient(target, paths.COMPLETIONS, stream=True, timeout_s=plan.timeout_s)
        self._sender = BatchSender(self._client, facts.model)
        self._engine = EngineClient(target)
        self.progress = CampaignProgress()
        self.outcome = CampaignOutcome(max_num_seqs=facts.max_num_seqs)
        self._identity = identity(facts, plan)
        self._waiting: list[_Item] = []
        self._spent_s = sum(float(r.get("took_s", 0.0)) for r in records)
        self._gate_factor = 1.0
        self._in_a_row: Counter[str] = Counter()
        self._prefill = np.zeros(4)
        self._decode = np.zeros(4)
        self._warm: Sample | None = None
        self._rng = np.random.default_rng(plan.seed)
        self.idle_probes: list[ShortPrompt] = []
        self.beside_probes: list[ShortPrompt] = []

    async def run(self) -> CampaignOutcome:
        """Measure until every cell has its samples or the budget is spent, or it cannot continue.

        Cancelling it is safe at any time.
        """
        raise_file_limit()
        try:
            await self._run()
        except _Stop as stop:
            self.outcome.stopped = str(stop)
        finally:
            await self._client.aclose()
            await self._engine.aclose()
        return self.outcome

    async def _run(self) -> None:
        await self._idle()
        prompt, output = (min(n, self.facts.max_model_len // 2) for n in _WARM_UP)
        for _ in range(2):  # the first one compiles
            reading = await self._sender.agree(prompt, output)
        decode_s = reading.decode.decode_s if reading.decode else None
        self._warm = replace(reading.whole, prompt_tokens=prompt, decode_s=decode_s)
        if decode_s:
            await self._probe_first_tokens(decode_s / (output - 1))
        self._waiting = self._items()
        self.progress.total = len(self._waiting) + self.progress.done
        while self._waiting:
            self._estimate()
            item = self._next()
            if item is None:
                return
            await self._measure(item)
            self._show()

    async def _probe_first_tokens(self, step_s: float) -> None:
        """Short prompts alone, and beside a stream: ``first_tokens``."""
        most = self.facts.max_model_len - first_tokens.OUTPUT_TOKENS
        needed_s = first_tokens.STEPS * step_s
        if needed_s > MAX_SHARE * self.plan.budget_s or self.facts.max_num_seqs < 2:
            return
        began_s = time.perf_counter()
        await self._client.warm(2)
        try:
            for tokens in first_tokens.IDLE_TIMES * first_tokens.IDLE_TOKENS:
                if tokens <= most:
                    sent = await self._sender.one(tokens, first_tokens.OUTPUT_TOKENS)
                    self.idle_probes.append(_probe(tokens, *sent))
            await self._probe_beside(step_s)
        except HeteroGatewayError:
            pass  # the batches will show the error
        finally:
            self._spent_s += time.perf_counter() - began_s

    async def _probe_beside(self, step_s: float) -> None:
        tokens = first_tokens.BESIDE_TOKENS
        beside: list[tuple[float, Track]] = []
        # The stream should last as long as the others take.
        steps = max((p.ttft_s for p in self.idle_probes), default=0.0) / step_s + 3
        output = 5 + math.ceil(first_tokens.BESIDE_TIMES * steps)
        output = min(output, self.facts.max_model_len // 2)
        stream = asyncio.create_task(self._sender.one(tokens, output))
        try:
            await asyncio.sleep(3 * step_s)
            while len(beside) < first_tokens.BESIDE_TIMES and not stream.done():
                # At any moment of a step.
                await asyncio.sleep(step_s * (1 + self._rng.random()))
                beside.append(await self._sender.one(tokens, 1))
            _, other = await stream
        finally:
            stream.cancel()
        step_s = (other.times_s[-1] - other.first_s) / max(1, other.output_tokens - 1)
        self.beside_probes += [
            ShortPrompt(tokens, found.first_s - sent_s, step_s)
            for sent_s, found in beside
            if other.first_s < sent_s and found.first_s < other.times_s[-1]
        ]

    # -- choosing

    def _items(self) -> list[_Item]:
        """The remaining cells, first passes first."""
        facts, plan = self.facts, self.plan
        limits = BatchLimits(
            *(facts.max_model_len, facts.kv_capacity_tokens, facts.block_tokens),
            *(facts.max_num_seqs, plan.max_batched_tokens),
        )
        cells = plan_cells(limits, plan.seed)
        have: Counter[str] = Counter()
        for line in self.records:
            if line["discarded"] is None and line.get("closes"):
                have[str(line.get("cell"))] += 1
            most = line.get("max_num_seqs")
            if most is not None:
                self.outcome.max_num_seqs = min(self.outcome.max_num_seqs, int(most))
        items = []
        for number in range(plan.passes):
            items += [_Item(cell) for cell in cells if have[cell.key] <= number]
        self.progress.done = plan.passes * len(cells) - len(items)
        return items

    def _next(self) -> _Item | None:
        """Take out the next affordable one; those that never will be are dropped."""
        left_s = self.plan.budget_s - self._spent_s
        while self._waiting:
            item = self._waiting.pop(0)
            if item.cell.batch_size > self.outcome.max_num_seqs:
                self.progress.total -= 1
                continue
            needs_s = self._cost_s(item.cell)
            first_single = item.cell.batch_size == 1 and not self._measured(item.cell)
            share = MAX_SINGLE_SHARE if first_single else MAX_SHARE
            if needs_s <= min(left_s, share * self.plan.budget_s):
                return item
            self.progress.total -= 1
            if not self._measured(item.cell) and item.cell.key not in self.outcome.unaffordable:
                self.outcome.unaffordable.append(item.cell.key)
        return None

    def _measured(self, cell: GridCell) -> bool:
        return any(r.get("cell") == cell.key and r["discarded"] is None for r in self.records)

    def _estimate(self) -> None:
        """A rough fit of the present samples, to estimate the time of the rest."""
        samples = kept_samples(self.records)
        if self._warm is not None:
            samples.append(self._warm)
        if prefill := [s for s in samples if s.prefill_s]:
            times = np.array([s.prefill_s for s in prefill], dtype=float)
            self._prefill = fit_rows(eq_3_terms(prefill), times)
        if decode := [s for s in samples if s.decode_s]:
            times = np.array([s.decode_s for s in decode], dtype=float)
            self._decode = fit_rows(decode_terms(decode), times)

    def _cost_s(self, cell: GridCell) -> float:
        return cost_s(cell, self._prefill, self._decode) + self._gate_s(cell) + 0.05

    def _gate_s(self, cell: GridCell) -> float:
        tokens = cell.batch_size * cell.prompt_tokens
        needed_s = _GATE_S + _GATE_S_PER_REQUEST * cell.batch_size + _GATE_S_PER_TOKEN * tokens
        return needed_s * self._gate_factor

    def _gate_tokens(self, cell: GridCell) -> int:
        """A prompt that takes long enough, within one step of the engine."""
        most = min(self.plan.max_batched_tokens, self.facts.max_model_len - 1)
        one, none = self._prefill_s(1.0), self._prefill_s(0.0)
        per_token_s = max(one - none, 1e-9)
        return max(16, min(most, int((self._gate_s(cell) - none) / per_token_s)))

    def _prefill_s(self, prompt_tokens: float) -> float:
        sample = [Sample(1, prompt_tokens, 1, None, None)]
        return float((eq_3_terms(sample) @ self._prefill)[0])

    # -- one batch

    async def _measure(self, item: _Item) -> None:
        cell = item.cell
        self.progress.cell = f"{cell.batch_size} × {cell.prompt_tokens} + {cell.output_tokens}"
        self._show()
        began_s = time.perf_counter()
        before = await self._idle()
        gate_tokens = self._gate_tokens(cell)
        shot = await self._sender.measure(cell, gate_tokens)
        found = await self._judge(cell, shot, before)
        took_s = time.perf_counter() - began_s
        self._spent_s += took_s
        for sample, reason, closes, beyond in found:
            more: dict[str, Any] = {"cell": cell.key, "closes": closes, "took_s": round(took_s, 4)}
            took_s = 0.0  # counted once
            if reason == verdicts.NO_WINDOW:
                more["max_num_seqs"] = self.outcome.max_num_seqs
            more["gate_tokens"] = gate_tokens
            if beyond is not None and reason is None:
                more[verdicts.KEY] = {n: getattr(beyond, n) for n in ("prompt_tokens", "prefill_s")}
            line = record_of(sample, discarded=reason, run=self._identity, **more)
            append(self._path, line)
            self.records.append(line)
        self.progress.discarded += any(v.reason is not None for v in found)
        if any(v.reason is None and v.closes for v in found):
            self.progress.done += 1
        elif item.tries + 1 < TRIES:
            self._waiting.append(_Item(cell, item.tries + 1))
        else:
            self.progress.total -= 1
        await self._stop_if_hopeless(found)

    async def _judge(
        self, cell: GridCell, shot: Shot, before: EngineMetrics | None
    ) -> list[BatchVerdict]:
        """The samples of a batch, each with None or the reason why it must not be fitted."""
        asked = Sample(cell.batch_size, cell.prompt_tokens, cell.output_tokens, None, None)
        reading = shot.reading
        if reading is None:
            return [BatchVerdict(asked, f"{verdicts.ENGINE_ERROR}: {shot.failure}")]
        whole, reason = reading.whole, None
        if before is not None:
            reason = disturbance(before, await self._settled(before, shot), shot)
        if reason is None and shot.client_cpu > MAX_CLIENT_CPU:
            reason = verdicts.BUSY_CLIENT
        if reason is None and not reading.equal:
            reason = verdicts.UNEQUAL
        if reason is not None:
            return [BatchVerdict(whole, reason)]
        if reading.most_running < cell.batch_size:
            self._saturated(reading.most_running)
            return [BatchVerdict(whole, verdicts.NO_WINDOW)]
        ragged = cell.one_step and (not reading.together or shot.gate_margin_s <= 0)
        if ragged:
            self._gate_factor = min(self._gate_factor * 1.5, 64.0)
        if cell.one_step:
            return one_step(whole, reading.decode, ragged)
        return several_steps(whole, reading.decode)

    async def _settled(self, before: EngineMetrics, shot: Shot) -> EngineMetrics:
        """The counters once they include the whole batch: they lag behind the stream."""
        give_up_s = time.perf_counter() + _COUNTERS_WITHIN_S
        while True:
            after = await self._counters()
            emitted = verdicts.grown(before.generation_tokens, after.generation_tokens)
            over = after.running in (None, 0.0)
            if (emitted >= shot.output_tokens and over) or time.perf_counter() > give_up_s:
                return after
            await asyncio.sleep(0.02)

    def _saturated(self, most_running: int) -> None:
        """The engine ran fewer sequences than were sent: that is its max_num_seqs."""
        if self.facts.max_num_seqs_known:
            return
        most = max(1, most_running)
        if most < self.outcome.max_num_seqs:
            self.outcome.max_num_seqs = most
            self.outcome.notes.append(f"at most {most} sequences ran together: max_num_seqs")

    # -- the engine's state

    async def _counters(self) -> EngineMetrics:
        try:
            return await self._engine.counters()
        except HeteroGatewayError as error:
            raise _Stop(f"the engine is gone: {error}") from error

    async def _idle(self) -> EngineMetrics | None:
        """Wait until nothing runs there; None without metrics."""
        if not self.facts.look.has_metrics:
            return None
        give_up_s = time.perf_counter() + _IDLE_WITHIN_S
        while True:
            counters = await self._counters()
            busy = (counters.running or 0.0) + (counters.waiting or 0.0)
            if not busy:
                return counters
            if time.perf_counter() > give_up_s:
                raise _Stop(
                    f"the engine serves others: {busy:g} requests that are not ours for "
                    f"{_IDLE_WITHIN_S:g} s; profile it while nobody else uses it"
                )
            await asyncio.sleep(_POLL_S)

    async def _stop_if_hopeless(self, found: list[BatchVerdict]) -> None:
        reasons = {(v.reason or "").split(":")[0] for v in found}
        for kind, (limit, text) in _HOPELESS.items():
            if kind not in reasons:
                # A batch of one is always equal; it says nothing about the others.
                if kind != verdicts.UNEQUAL or found[0].sample.batch_size > 1:
                    self._in_a_row[kind] = 0
                continue
            self._in_a_row[kind] += 1
            if kind == verdicts.ENGINE_ERROR and not await self._comes_back():
                raise _Stop(f"the engine is gone: {found[0].reason}")
            if self._in_a_row[kind] >= limit:
                raise _Stop(text.format(limit, found[0].reason))

    async def _comes_back(self) -> bool:
        for _ in range(5):
            if await self._engine.alive():
                return True
            await asyncio.sleep(0.5)
        return False

    def _show(self) -> None:
        needs_s = sum(self._cost_s(item.cell) for item in self._waiting)
        self.progress.left_s = max(0.0, min(self.plan.budget_s - self._spent_s, needs_s))
        self._watch(self.progress)


def identity(facts: EngineFacts, plan: CampaignPlan) -> dict[str, Any]:
    """The properties that all samples of one measurement must share."""
    return {
        "model": facts.model,
        "engine": facts.look.version,
        "max_model_len": facts.max_model_len,
        "kv_capacity_tokens": facts.kv_capacity_tokens,
        "max_num_seqs": facts.max_num_seqs,
        "max_num_batched_tokens": plan.max_batched_tokens,
        "seed": plan.seed,
        "grid": GRID_VERSION,
    }


def _probe(prompt_tokens: int, sent_s: float, track: Track) -> ShortPrompt:
    """From a prompt that was alone."""
    steps = max(1, track.output_tokens - track.tokens[0])
    step_s = (track.times_s[-1] - track.first_s) / steps
    return ShortPrompt(prompt_tokens, track.first_s - sent_s, step_s)
