"""Counts and learns from the results of attempts, and informs the health monitor.

Once per attempt, after it is settled; the last one of a request is ``final`` and counts for it.
Outcomes take effect at once. Counting and learning are done for several requests together, within
``LATER_S``: one after the other they find code and counts in the processor's caches, where a single
request would have to fetch them. ``Metrics`` and other readers of counts have that done first.

What the answer itself shows (``count_seen``) is counted where it passes: in a worker, if there are
several processes. What needs the place and the prediction, or changes estimates (``learn_from``),
and what a client is charged, belongs to the scheduling process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from mypy_extensions import mypyc_attr

from hetero_gateway.core.costs.cost_model import decode_time_s, prefill_time_s
from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.core.histogram import Histogram, count_noted
from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.instances.outcomes import Outcomes
from hetero_gateway.core.lengths.predictors import (
    BytesPerToken,
    LengthFeatures,
    OutputLengthPredictor,
    can_hold,
    learn,
)
from hetero_gateway.core.policies.base import Decision
from hetero_gateway.core.prefixes.engine_blocks import EngineBlocks
from hetero_gateway.core.types import CLIENT_DISCONNECTED, COMPLETED, Outcome, Usage
from hetero_gateway.engines.vllm import (
    REALTIME,
    Work,
    least_tokens_of_bytes,
    least_tokens_of_events,
    tokens_of_events,
)
from hetero_gateway.engines.vllm.kv_events import session_of
from hetero_gateway.gateway.admission.usage import ClientUsage
from hetero_gateway.gateway.dataplane.intake import Job, Placed, PrefillLeg
from hetero_gateway.gateway.dataplane.observed import ObservedResponse
from hetero_gateway.gateway.fleet.ejection import OutcomeWatch
from hetero_gateway.gateway.fleet.health import HealthMonitor
from hetero_gateway.gateway.fleet.instances import Fleet, Instance
from hetero_gateway.gateway.records.history import RequestHistory
from hetero_gateway.gateway.records.metrics import Metrics
from hetero_gateway.gateway.records.request_log import ROW_OF, FailedAttempt, RequestLog
from hetero_gateway.gateway.request.openai import ParsedRequest
from hetero_gateway.http.failures import Failure, InstanceError, Suspicion
from hetero_gateway.http.hops import LOOP_DETECTED

_log = logging.getLogger(__name__)

# A member of an enumeration is looked up at each use, which costs as much as a call.
_GENERATE, _LIGHT = Work.GENERATE, Work.LIGHT
# How long a request's counts may wait for others', and how many may wait.
LATER_S = 0.05
_MOST_LATER = 32
# Not implemented, or not in this version of HTTP: the request is wrong. A loop that is an
# instance's fault is its attempt's error (``Failure.LOOP``).
_NO_FAULT = (501, 505, LOOP_DETECTED)
# The assumed duration of a request if nothing is known of its instance.
_UNKNOWN_LATENCY_S = 1.0
_COSTS_A_PROMPT = (CLIENT_DISCONNECTED, Outcome.TIMED_OUT)
# Of an instance that does not report its own.
_MOST_CONTEXT_TOKENS = 1 << 24
# Of an answer up to this size, its size says nothing.
_SHORT_ANSWER_BYTES = 8192
# Of a token id in a list, as JSON.
_BYTES_OF_AN_ID = 8
# Stands for an instance's id: all services elsewhere.
OUTSIDE = "outside"


class AnswerTokens:
    """Tokens of an answer, as far as its engine's report is plausible; None: not reported."""

    __slots__ = ("output", "prompt")

    def __init__(self, prompt: int | None, output: int) -> None:
        self.prompt = prompt
        self.output = output


# Placeholder for an answer counted here whose tokens have yet to be read.
UNREAD: Final = AnswerTokens(None, -1)


class SettledAttempt:
    """A settled attempt that waits to be counted.

    ``usage``: as the answer reported it; None: still to be read. ``told``: what was believed of it,
    once it is counted.
    """

    __slots__ = ("ended_s", "job", "outcome", "placed", "seen", "told", "usage")

    def __init__(
        self,
        job: Job,
        placed: Placed,
        seen: ObservedResponse,
        outcome: Outcome,
        ended_s: float,
        usage: Usage | None = None,
    ) -> None:
        self.job = job
        self.placed = placed
        self.seen = seen
        self.outcome = outcome
        self.ended_s = ended_s
        self.usage = usage
        self.told: AnswerTokens | None = None


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(eq=False)
class Recorder:
    """Counts and learns from attempts. Needs a running event loop.

    Args:
        _fleet, _health, _outcomes, _metrics: of the gateway.
        predictor, _bytes_per_token: the length estimates, which learn from finished requests.
        _history: keeps finished requests.
        _usage: of each client.
    """

    _fleet: Fleet
    _health: HealthMonitor
    _outcomes: OutcomeWatch
    _metrics: Metrics
    predictor: OutputLengthPredictor
    _bytes_per_token: BytesPerToken
    _history: RequestHistory
    _usage: ClientUsage

    def __post_init__(self) -> None:
        self.log = RequestLog()  # outcomes of the last requests
        self._ejections = self._fleet.ejections
        self._loop = asyncio.get_running_loop()
        self._later: list[SettledAttempt] = []
        # Of a batch of requests: the series' histograms that have something to count, when
        # instances answered well, and rows for what learns.
        self._noted: set[Histogram] = set()
        self._answered_s: defaultdict[Outcomes, list[float]] = defaultdict(list)
        self._prompts: list[tuple[str, int, int]] = []
        self._outputs: list[tuple[LengthFeatures, float]] = []
        self._finished: list[tuple[float, str, int, int, int | None, int]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._metrics.catch_up = self.catch_up

    def close(self) -> None:
        """Count what has waited so far."""
        self.catch_up()

    def catch_up(self) -> None:
        """Count and learn from all ended requests."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        later, self._later = self._later, []
        for attempt in later:
            try:
                told = self.count_seen(
                    attempt.job,
                    attempt.placed.instance,
                    attempt.seen,
                    attempt.outcome,
                    attempt.ended_s,
                    attempt.usage,
                )
                attempt.told = told
                self.learn_from(attempt, told)
            except Exception:
                # The boundary of a request: the others are counted all the same.
                _log.exception("a request cannot be counted")
        self.log.add(map(ROW_OF, later))
        count_noted((*self._metrics.noted, *self._noted))
        self._noted.clear()
        for outcomes, times_s in self._answered_s.items():
            outcomes.answered(times_s[-1], len(times_s))
        self._answered_s.clear()
        try:
            self._learn()
        except Exception:
            _log.exception("cannot learn from %d requests", len(later))

    def _learn(self) -> None:
        prompts, self._prompts = self._prompts, []
        outputs, self._outputs = self._outputs, []
        finished, self._finished = self._finished, []
        if prompts:
            self._bytes_per_token.observe_many(prompts)
        if finished:
            self._history.extend(finished)
        if outputs:
            if self._fleet.queues:
                residual = self._fleet.scheduler.residual
                residual.observe_many([(features.model, tokens) for features, tokens in outputs])
            learn(self.predictor, outputs)

    def record(
        self,
        job: Job,
        placed: Placed,
        exchange: ObservedResponse,
        outcome: Outcome,
        usage: Usage | None = None,
        *,
        final: bool,
        told: AnswerTokens | None = UNREAD,
    ) -> None:
        """Count, learn, inform the health monitor; once per attempt, the last of them ``final``.

        Args:
            usage: as the answer reported it; None: still to be read.
            told: of an answer that was counted where it passed.
        """
        instance = placed.instance
        now_s = time.monotonic()
        if self._fleet.instances.get(instance.id) is not instance:
            pass  # removed meanwhile: its health no longer matters
        elif outcome is COMPLETED and exchange.error is None and exchange.status < 400:
            # A request without engine work says nothing about the engine.
            if job.inbound.work is not _LIGHT:
                dispatch, outcomes = placed.dispatch, instance.outcomes
                if self._ejections.suspects or dispatch in outcomes.trials:
                    self._outcomes.succeeded(instance, dispatch, job.inbound.body, now_s)
                else:
                    self._answered_s[outcomes].append(now_s)
        elif outcome is not CLIENT_DISCONNECTED:
            self.catch_up()  # earlier answers must count before this failure
            self._note_failure(job, placed, exchange, outcome)
        if final:
            self.count(SettledAttempt(job, placed, exchange, outcome, now_s, usage), told)

    def note_prompt(self, body: bytes, leg: PrefillLeg) -> None:
        """An instance has computed a prompt for a request that another one answers."""
        self._outcomes.succeeded(leg.instance, leg.dispatch, body, time.monotonic())

    def _note_failure(
        self, job: Job, placed: Placed, exchange: ObservedResponse, outcome: Outcome
    ) -> None:
        error, instance = exchange.error, placed.instance
        if error is None and outcome is Outcome.UPSTREAM_ERROR:
            error = (
                InstanceError(Failure.EMPTY, "its answer is empty")
                if exchange.empty
                else InstanceError(Failure.ENGINE, "its engine broke off")
            )
        if error is None and exchange.status >= 500 and exchange.status not in _NO_FAULT:
            error = InstanceError(Failure.SERVER_ERROR, f"it answered {exchange.status}")
        if error is not None:
            sent_s, expected_s = placed.placed_s, _expected_latency_s(placed)
            self.note_error(job, instance, placed.dispatch, error, sent_s, expected_s)

    def note_error(
        self,
        job: Job,
        instance: Instance,
        dispatch: Dispatch,
        error: InstanceError,
        sent_s: float,
        expected_s: float,
    ) -> None:
        """Count an instance's failure, and inform the health monitor.

        Args:
            sent_s: when the request was sent there, monotonic.
            expected_s: its expected duration.
        """
        self._metrics.upstream_errors[instance.id, error.reason] += 1
        request_id, now_s = job.inbound.request_id, time.monotonic()
        self.log.add_failed(FailedAttempt(request_id, instance.id, error.reason, now_s))
        if error.failure is Failure.MODEL_GONE:
            self._health.miss(instance, job.request.model)
        suspicion = error.failure.suspicion
        if suspicion is not Suspicion.NONE:
            self._health.suspect(instance, str(error), down=suspicion is Suspicion.DOWN)
        self._outcomes.failed(instance, dispatch, error, job.inbound.body, sent_s, expected_s)

    def count(self, attempt: SettledAttempt, told: AnswerTokens | None = UNREAD) -> None:
        """Count and learn from an ended request, soon. ``told``: as in ``record``."""
        later = self._later
        if told is UNREAD:
            later.append(attempt)
        else:
            attempt.told = told
            self.log.add((ROW_OF(attempt),))
            self.learn_from(attempt, told)
        if len(later) >= _MOST_LATER:
            self.catch_up()
        elif self._timer is None:
            self._timer = self._loop.call_later(LATER_S, self.catch_up)

    def count_seen(
        self,
        job: Job,
        instance: Instance,
        exchange: ObservedResponse,
        outcome: Outcome,
        now_s: float,
        usage: Usage | None,
    ) -> AnswerTokens | None:
        """Count what a request's last answer shows; returns its tokens, None if it has none.

        Args:
            now_s: when it ended.
            usage: as the answer reported it; None: still to be read.
        """
        request, parsed = job.request, job.parsed
        told = believed(job, context_of(instance), exchange, usage or exchange.usage())
        if self._fleet.instances.get(instance.id) is not instance:
            return told  # removed meanwhile: its series are gone
        metrics = self._metrics
        series = metrics.every_series.get((request.model, instance.id))
        if series is None:
            series = metrics.counts(request.model, instance.id)
        label = "completed"
        if outcome is not COMPLETED or exchange.status >= 400:
            label = label_of(outcome, exchange)
        series.outcomes[label] += 1
        metrics.classes[request.request_class, label] += 1
        if outcome is CLIENT_DISCONNECTED:
            metrics.client_disconnects[instance.id] += 1
        series.duration.note(now_s - job.inbound.received_s)
        self._noted.add(series.duration)
        if told is None:
            return None
        told_prompt, output = told.prompt, told.output
        series.input_tokens += told_prompt or request.prompt_tokens * parsed.prompt_count
        series.output_tokens += output
        if parsed.stream:
            first_s = exchange.first_body_at_s
            assert first_s is not None
            series.ttft.note(first_s - job.inbound.received_s)
            self._noted.add(series.ttft)
            per_sequence = output / request.sequences
            if per_sequence > 1:
                series.tpot.note((now_s - first_s) / (per_sequence - 1))
                self._noted.add(series.tpot)
        return told

    def count_outside(self, job: Job, exchange: ObservedResponse, outcome: Outcome) -> None:
        """Count a request served elsewhere: nothing is learnt from it."""
        if job.client.name:
            usage = exchange.usage()
            told = believed(job, _MOST_CONTEXT_TOKENS, exchange, usage)
            self._bill(job, told, usage, outcome, time.monotonic())
        series = self._metrics.counts(job.request.model, OUTSIDE)
        series.outcomes[label_of(outcome, exchange)] += 1

    def _bill(
        self,
        job: Job,
        told: AnswerTokens | None,
        usage: Usage,
        outcome: Outcome,
        now_s: float,
    ) -> None:
        """Settle the account of the request's client, which has a name.

        Requests that an engine refused or failed to answer cost nothing; a client that left, or
        timed out, before an answer pays for the prompt.

        Args:
            told: the believed values of the answer and its ``usage``.
        """
        prompt = cached = 0
        told_prompt, output = (None, 0) if told is None else (told.prompt, told.output)
        if job.inbound.work is not _LIGHT and (told is not None or outcome in _COSTS_A_PROMPT):
            prompt = told_prompt or job.request.prompt_tokens * job.parsed.prompt_count
            if told is not None and usage.cached_tokens:
                cached = min(usage.cached_tokens, prompt)
        if job.charge is not None:
            job.charge.settle(prompt + output, now_s)
        self._usage.count(job.client.name, job.request.model, prompt, cached, output)

    def learn_from(self, attempt: SettledAttempt, told: AnswerTokens | None) -> None:
        """Settle the client's account, and learn from the last answer, which was counted."""
        job, placed, exchange = attempt.job, attempt.placed, attempt.seen
        outcome, now_s = attempt.outcome, attempt.ended_s
        if job.client.name:
            self._bill(job, told, attempt.usage or exchange.usage(), outcome, now_s)
        instance = placed.instance
        if (
            told is None
            or outcome is not COMPLETED  # cut short: its length says nothing
            or self._fleet.instances.get(instance.id) is not instance
        ):
            return
        request, parsed, metrics = job.request, job.parsed, self._metrics
        told_prompt, output = told.prompt, told.output
        if request.prefix is not None:
            dispatch = placed.dispatch
            prefix = dispatch.state.prefix
            hits = None
            if dispatch.hit_tokens is not None or prefix.counts:
                hits = prefix.believed_hits(dispatch)
                series = metrics.counts(request.model, instance.id)
                series.cached_tokens += hits or 0.0
            if instance.engine_blocks is not None:
                _note_end(instance.engine_blocks, job, told_prompt, hits)
        if (
            told_prompt
            and parsed.exact_prompt_tokens is None
            and not parsed.media_parts
            and not parsed.previous
        ):
            self._prompts.append((request.model, parsed.text_bytes, told_prompt))
        predicted = request.predicted_output_tokens
        if output and predicted and job.features is not None:
            actual = output / request.sequences
            self._outputs.append((job.features, actual))
            prompt_tokens = request.prompt_tokens
            if told_prompt:
                prompt_tokens = max(1, told_prompt // parsed.prompt_count)
            self._finished.append(
                (
                    job.inbound.received_s,
                    request.model,
                    prompt_tokens,
                    max(1, int(actual + 0.5)),
                    parsed.max_output_tokens,
                    request.sequences,
                )
            )
            metrics.output_prediction.note(actual / predicted)
            if instance.profile is not None:
                expected_s = _expected_latency_s(placed)
                error = (now_s - placed.placed_s) / expected_s
                metrics.latency_prediction.note(error)


def _is_session(job: Job) -> bool:
    """Whether it is a WebSocket."""
    return job.inbound.path == REALTIME


def believed(
    job: Job, context: int, exchange: ObservedResponse, usage: Usage
) -> AnswerTokens | None:
    """Tokens as the engine reported them (``usage``), as far as plausible; None if it answered
    nothing, or with an error.

    A prompt is at most as long as its body and the instance's context, and exactly as long as its
    token ids. An answer is no longer than the context and what was asked for, and no shorter than
    what arrived. If no output is reported, its events are counted.
    """
    if exchange.first_body_at_s is None or exchange.status >= 400:
        return None
    request, parsed = job.request, job.parsed
    prompt, output, _ = usage
    if prompt is not None and not (_can_be(prompt, parsed, context) or _is_session(job)):
        # (A session's prompts are many, and its tokens the gateway's own count.)
        prompt = None
    longest = min(context, parsed.max_output_tokens or context) * request.sequences
    if output is None or (output > longest and not _is_session(job)):
        output = min(tokens_of_events(job.inbound.path, exchange.events), longest)
    elif parsed.stream:
        if output < least_tokens_of_events(request.sequences, exchange.events):
            # A report of less than half of what arrived is rejected: counting is closer.
            output = min(tokens_of_events(job.inbound.path, exchange.events), longest)
    elif exchange.body_bytes > _SHORT_ANSWER_BYTES:
        output = max(output, min(_least_output_tokens(job, exchange), longest))
    return AnswerTokens(prompt, output)


def context_of(instance: Instance) -> int:
    """An instance's longest sequence in tokens, if known."""
    return instance.max_model_len or _MOST_CONTEXT_TOKENS


def _can_be(prompt_tokens: int, parsed: ParsedRequest, context_tokens: int) -> bool:
    """Whether all prompts of a request can be this long."""
    if prompt_tokens > context_tokens * parsed.prompt_count:
        return False
    if parsed.media_parts or parsed.previous:
        return True
    given = parsed.exact_prompt_tokens or 0
    here = given + parsed.text_bytes
    if 0 < here < prompt_tokens and not can_hold(here, prompt_tokens):
        return False
    return prompt_tokens >= given or parsed.truncates


def _least_output_tokens(job: Job, exchange: ObservedResponse) -> int:
    """The minimum output tokens of an answer that does not stream, from its size."""
    parsed = job.parsed
    if parsed.wordy or job.inbound.work is not _GENERATE:
        return 0
    asked_bytes = parsed.text_bytes + _BYTES_OF_AN_ID * (parsed.exact_prompt_tokens or 0)
    return least_tokens_of_bytes(
        job.inbound.path, job.request.sequences, exchange.body_bytes, asked_bytes
    )


def label_of(outcome: Outcome, exchange: ObservedResponse) -> str:
    """How a request that reached an instance is counted."""
    if outcome is COMPLETED and exchange.status >= 400:
        return "client_error" if exchange.status < 500 else "upstream_error"
    return outcome.value


def _expected_latency_s(placed: Placed) -> float:
    """The expected duration on the instance, if known."""
    found_s = expected_latency_s(placed.decision, placed.instance.profile)
    return _UNKNOWN_LATENCY_S if found_s is None else found_s


def expected_latency_s(decision: Decision, profile: Profile | None) -> float | None:
    """The expected duration of a request at its place: the policy's estimate, or the cost model's.

    None: nothing is known of that instance (``profile``).
    """
    estimated_s = decision.choice.latency_s
    if estimated_s is not None or profile is None:
        return estimated_s
    request, c = decision.request, profile.constants
    batch = decision.choice.figures.at("in_flight", decision.choice.position) + 1
    batch = min(batch, profile.max_num_seqs)
    result = prefill_time_s(c, 1, request.prompt_tokens)
    return result + decode_time_s(c, batch, request.prompt_tokens, request.predicted_output_tokens)


def _note_end(blocks: EngineBlocks, job: Job, told_prompt: int | None, hits: float | None) -> None:
    """A request is complete: its keys belong to the blocks reported under its prompt's name."""
    keys, parsed = job.request.prefix, job.parsed
    if keys is None or not keys.hashes or parsed.prompt_count != 1 or parsed.media_parts:
        return
    tokens = told_prompt or job.request.prompt_tokens
    computed = None if hits is None else tokens - hits
    blocks.ended(session_of(keys.hashes[-1]), keys, tokens, computed)
