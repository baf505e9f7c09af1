"""The hot path: a plain ASGI application that reads a request, chooses, relays and settles.

It stands ahead of FastAPI: no Request or Response objects and no middleware. Per request there is
one pass through the policy, the ledger and the metrics; per chunk there is none.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import os
import re
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple

from hetero_gateway.config import GatewayConfig, RetryConfig, secret
from hetero_gateway.core.cost_model import decode_time_s, prefill_time_s
from hetero_gateway.core.length import (
    BytesPerToken,
    OutputLengthPredictor,
    capped_output_tokens,
)
from hetero_gateway.core.scheduler import Decision
from hetero_gateway.core.types import InstanceId, Outcome, Reject, RejectReason, Request
from hetero_gateway.errors import ClientError, InstanceError
from hetero_gateway.gateway.downstream import (
    AsgiDownstream,
    Downstream,
    Receive,
    Scope,
    Send,
    downstream_of,
)
from hetero_gateway.gateway.fleet import Fleet, Instance
from hetero_gateway.gateway.health import HealthMonitor
from hetero_gateway.gateway.metrics import Metrics
from hetero_gateway.gateway.openai import ParsedRequest, Work, error_body, parse_body
from hetero_gateway.gateway.relay import Deadlines, Exchange
from hetero_gateway.gateway.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

# Not passed on: hop-by-hop, written anew, or (accept-encoding) because a compressed answer would
# hide its usage. An instance's own key replaces the client's authorization.
_DROPPED_REQUEST_HEADERS = frozenset(
    (
        b"accept-encoding",
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-request-id",
    )
)
# It goes into logs, headers and the dashboard: visible ASCII only.
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
_RETRYABLE = frozenset(("connect", "reset", "pool", "protocol"))
_OUTCOME_BY_ERROR = {
    "first_byte_timeout": Outcome.TIMED_OUT,
    "idle_timeout": Outcome.TIMED_OUT,
    "total_timeout": Outcome.TIMED_OUT,
}
_RETRY_AFTER_S = 2
_RETRY_WINDOW_S = 10.0


class ClientGone(Exception):
    """The client left while its request was being read."""


class DecisionRecord(NamedTuple):
    """One line of /admin/decisions."""

    unix_s: float
    request_id: str
    decision: Decision


@dataclass(slots=True)
class _Job:
    """One client's request, through all of its attempts."""

    path: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    request_id: bytes
    body: bytes
    parsed: ParsedRequest
    request: Request
    received_s: float


class RetryBudget:
    """Retries as a share of recent requests, so that an outage is not multiplied by them."""

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._window_start_s = 0.0
        self._requests = 0
        self._retries = 0

    def note_request(self, now_s: float) -> None:
        if now_s - self._window_start_s >= _RETRY_WINDOW_S:
            self._window_start_s = now_s
            self._requests = self._retries = 0
        self._requests += 1

    def take(self) -> bool:
        """Whether one more retry is allowed; if so it is counted."""
        config = self._config
        if self._retries >= config.budget_min + config.budget_ratio * self._requests:
            return False
        self._retries += 1
        return True


class DataPlane:
    """The ASGI application for the engine's POST paths.

    Args:
        config, fleet, health, metrics: of the gateway.
        predictor, bytes_per_token, tokenizer: the length estimates; the last one may be None.
        deadlines: watches the exchanges.
    """

    def __init__(
        self,
        config: GatewayConfig,
        fleet: Fleet,
        health: HealthMonitor,
        metrics: Metrics,
        predictor: OutputLengthPredictor,
        bytes_per_token: BytesPerToken,
        tokenizer: Tokenizer | None,
        deadlines: Deadlines,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._scheduler = fleet.scheduler
        self._health = health
        self._metrics = metrics
        self._predictor = predictor
        self._bytes_per_token = bytes_per_token
        self._tokenizer = tokenizer
        self.open_exchanges = deadlines
        self._budget = RetryBudget(config.retry)
        key = secret(config.server.api_key_env, "server.api_key_env")
        self._api_key = key.encode() if key else None
        # Each entry holds a few arrays of one entry per instance.
        size = max(16, min(256, 100_000 // max(1, len(config.instances))))
        self.decisions: deque[DecisionRecord] = deque(maxlen=size)
        self._request_ids = itertools.count()
        self._request_id_prefix = os.urandom(6).hex()

    async def serve(self, scope: Scope, receive: Receive, send: Send, work: Work) -> None:
        """One request; every error becomes an answer, and nothing is left on the ledger."""
        downstream = downstream_of(scope, receive, send)
        request_id = self._request_id(scope["headers"])
        try:
            try:
                job = await self._read(scope, receive, work, request_id)
            except ClientError:
                self._metrics.series("unknown", "").outcomes["rejected"] += 1
                raise
            await self._run(job, downstream)
        except ClientError as error:
            self._answer(downstream, error, scope["path"], request_id)
        except ClientGone:
            return
        except Exception:
            _log.exception("request %s failed inside the gateway", request_id.decode())
            self._metrics.series("", "").outcomes["internal_error"] += 1
            failed = ClientError(500, "internal_error", "The gateway failed.", kind="server_error")
            self._answer(downstream, failed, scope["path"], request_id)
        if isinstance(downstream, AsgiDownstream):
            await downstream.close()

    def check_key(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Raise a 401 unless the request carries the gateway's key, where it has one."""
        if self._api_key is None:
            return
        for name, value in headers:
            if name == b"authorization":
                value = value[7:] if value[:7].lower() == b"bearer " else b""
            elif name != b"x-api-key":
                continue
            if hmac.compare_digest(value, self._api_key):
                return
        raise ClientError(401, "invalid_api_key", "Incorrect or missing API key.")

    # Reading

    async def _read(self, scope: Scope, receive: Receive, work: Work, request_id: bytes) -> _Job:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.check_key(headers)
        content_type = b""
        limit = self._config.server.max_body_bytes
        for name, value in headers:
            if name == b"content-type":
                content_type = value
            elif name == b"content-length" and int(value) > limit:
                raise _too_large(limit)
        message = await receive()
        body: bytes = message.get("body", b"")
        if message["type"] == "http.disconnect":
            raise ClientGone
        if message.get("more_body"):
            body = await _read_rest(receive, body, limit)
        if len(body) > limit:
            raise _too_large(limit)
        received_s = time.monotonic()
        path = scope["path"]
        parsed = parse_body(body, content_type)
        request = await self._describe(parsed, work, self._model(parsed, path))
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        return _Job(path, target, headers, request_id, body, parsed, request, received_s)

    def _model(self, parsed: ParsedRequest, path: str) -> str:
        if parsed.model:
            return parsed.model
        # OpenAI's own paths want a model; vLLM's others do without, which is clear when there
        # is only one.
        models = self._fleet.models()
        if not path.startswith("/v1/") and len(models) == 1:
            return next(iter(models))
        raise ClientError(
            400, "missing_required_parameter", "you must provide a model parameter", param="model"
        )

    async def _describe(self, parsed: ParsedRequest, work: Work, model: str) -> Request:
        """What the scheduler needs: the lengths of prompt and output, exact or estimated."""
        if work is Work.LIGHT:
            return Request(model, 1, 0.0)
        tokens = parsed.exact_prompt_tokens
        if tokens is None and self._tokenizer is not None and parsed.text_bytes:
            tokens = await self._tokenizer.count(parsed.messages or parsed.prompt)
        if tokens is None:
            tokens = self._bytes_per_token.tokens(model, parsed.text_bytes)
        tokens += parsed.media_parts * self._config.scheduler.tokens.image_tokens
        prompt_tokens = max(1, -(-tokens // parsed.prompt_count))
        if work is Work.PREFILL:
            return Request(model, prompt_tokens, 0.0, parsed.sequences)
        output_tokens = capped_output_tokens(
            self._predictor.predict(model, prompt_tokens),
            parsed.max_output_tokens,
            self._scheduler.context_tokens(model),
            prompt_tokens,
        )
        return Request(model, prompt_tokens, output_tokens, parsed.sequences)

    def _request_id(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        for name, value in headers:
            if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
                return value
        return b"%b-%x" % (self._request_id_prefix.encode(), next(self._request_ids))

    # Choosing and relaying

    async def _run(self, job: _Job, downstream: Downstream) -> None:
        now_s = job.received_s
        self._budget.note_request(now_s)
        deadline_s = now_s + self._config.timeouts.total_s
        tried: list[InstanceId] = []
        failure: InstanceError | None = None
        while True:
            decision = self._choose(job, tried, failure)
            instance = self._fleet.instances[decision.instance_id]
            extra = [
                (b"x-request-id", job.request_id),
                (b"x-hetero-gateway-instance", instance.id.encode()),
            ]
            exchange = Exchange(downstream, job.path, extra, deadline_s)
            outcome = Outcome.CLIENT_DISCONNECTED  # also when this task is cancelled
            retry = False
            dispatch = self._scheduler.dispatch(decision)
            self.open_exchanges.add(exchange)
            try:
                await self._attempt(job, instance, exchange, first=not tried)
                outcome = _outcome(exchange, downstream)
                tried.append(instance.id)
                retry = self._may_retry(exchange, len(tried))
            finally:
                self.open_exchanges.discard(exchange)
                self._scheduler.settle(dispatch, outcome)
                self._record(job, decision, instance, exchange, outcome, final=not retry)
            failure = exchange.error
            if failure is None:
                return
            if exchange.head_sent:
                exchange.break_off(_client_error(failure, instance))
                return
            if not retry:
                raise _client_error(failure, instance)
            self._metrics.retries[failure.reason] += 1

    def _choose(
        self, job: _Job, tried: list[InstanceId], failure: InstanceError | None
    ) -> Decision:
        started_s = time.perf_counter()
        result = self._scheduler.choose(job.request, tried)
        if (
            isinstance(result, Reject)
            and result.reason is RejectReason.FITS_NO_INSTANCE
            and job.parsed.exact_prompt_tokens is None
        ):
            # The length is an estimate: when half of it fits, the engine is to judge.
            smaller = replace(job.request, prompt_tokens=-(-job.request.prompt_tokens // 2))
            result = self._scheduler.choose(smaller, tried)
        metrics = self._metrics
        metrics.decision_s.observe(time.perf_counter() - started_s)
        if isinstance(result, Reject):
            # A name that nobody serves is the client's invention: it must not become a label.
            model = job.request.model
            model = model if self._scheduler.knows(model) else "unknown"
            ours = result.reason is RejectReason.NO_AVAILABLE_INSTANCE
            metrics.series(model, "").outcomes["unavailable" if ours else "rejected"] += 1
            raise _rejection(result, failure, job.path)
        metrics.decisions[result.instance_id] += 1
        self.decisions.append(DecisionRecord(time.time(), job.request_id.decode(), result))
        return result

    async def _attempt(
        self, job: _Job, instance: Instance, exchange: Exchange, *, first: bool
    ) -> None:
        pool = instance.pool
        payload = self._upstream_request(job, instance)
        connection = pool.take_idle()
        try:
            if connection is None:
                connection = await pool.connect()
            if first:
                self._metrics.overhead_s.observe(time.monotonic() - job.received_s)
            await exchange.run(connection, payload)
            error = exchange.error
            if error is None or connection.got_bytes or not connection.reused:
                return
            if error.reason == "reset":
                # The instance was closing this idle connection when the request was written.
                exchange.error = None
                await exchange.run(await pool.connect(), payload)
        except InstanceError as error:
            exchange.error = error

    def _upstream_request(self, job: _Job, instance: Instance) -> bytes:
        pool = instance.pool
        parts = [
            b"POST ", pool.path_prefix, job.target, b" HTTP/1.1\r\nhost: ", pool.host_header,
            b"\r\nx-request-id: ", job.request_id,
            b"\r\ncontent-length: %d\r\n" % len(job.body),
        ]  # fmt: skip
        dropped = _DROPPED_REQUEST_HEADERS
        ours_only = self._api_key is not None or instance.api_key is not None
        for name, value in job.headers:
            if name in dropped or (ours_only and name in (b"authorization", b"x-api-key")):
                continue
            parts += (name, b": ", value, b"\r\n")
        if instance.api_key is not None:
            parts.append(b"authorization: Bearer %b\r\n" % instance.api_key.encode())
        parts += (b"\r\n", job.body)
        return b"".join(parts)

    def _may_retry(self, exchange: Exchange, attempts: int) -> bool:
        return (
            exchange.error is not None
            and not exchange.head_sent
            and exchange.error.reason in _RETRYABLE
            and attempts < self._config.retry.max_attempts
            and self._budget.take()
        )

    # Afterwards

    def _record(
        self,
        job: _Job,
        decision: Decision,
        instance: Instance,
        exchange: Exchange,
        outcome: Outcome,
        *,
        final: bool,
    ) -> None:
        """Count, learn, tell the health monitor; once per attempt, the last of them ``final``."""
        now_s = time.monotonic()
        metrics = self._metrics
        if self._fleet.instances.get(instance.id) is not instance:
            return  # removed meanwhile: its series are gone for good
        error = exchange.error
        if error is not None:
            metrics.upstream_errors[instance.id, error.reason] += 1
            if error.reason in ("connect", "reset", "first_byte_timeout"):
                self._health.suspect(instance, str(error), down=error.reason == "connect")
        elif outcome is Outcome.UPSTREAM_ERROR:
            # The stream ended well in HTTP, but its server said that the engine is gone.
            metrics.upstream_errors[instance.id, "engine"] += 1
            self._health.suspect(instance, "its engine broke off", down=False)
        if not final:
            return
        series = metrics.series(job.request.model, instance.id)
        label = outcome.value
        if outcome is Outcome.COMPLETED and exchange.status >= 400:
            label = "client_error" if exchange.status < 500 else "upstream_error"
        series.outcomes[label] += 1
        if outcome is Outcome.CLIENT_DISCONNECTED:
            metrics.client_disconnects[instance.id] += 1
        duration_s = now_s - job.received_s
        series.duration.observe(duration_s)
        if exchange.first_body_at_s is not None and exchange.status < 400:
            self._record_tokens(job, decision, instance, exchange, outcome, now_s)

    def _record_tokens(
        self,
        job: _Job,
        decision: Decision,
        instance: Instance,
        exchange: Exchange,
        outcome: Outcome,
        now_s: float,
    ) -> None:
        request, parsed = job.request, job.parsed
        metrics = self._metrics
        series = metrics.series(request.model, instance.id)
        first_s = exchange.first_body_at_s
        assert first_s is not None
        told_prompt, told_output = exchange.usage()
        # Without usage: the events, less the role chunk and [DONE].
        output = told_output if told_output is not None else max(0, exchange.events - 2)
        series.input_tokens += told_prompt or request.prompt_tokens * parsed.prompt_count
        series.output_tokens += output
        if parsed.stream:
            series.ttft.observe(first_s - job.received_s)
            per_sequence = output / request.sequences
            if per_sequence > 1:
                series.tpot.observe((now_s - first_s) / (per_sequence - 1))
        if outcome is not Outcome.COMPLETED:
            return  # cut short: its length says nothing
        if told_prompt and parsed.exact_prompt_tokens is None and not parsed.media_parts:
            self._bytes_per_token.observe(request.model, parsed.text_bytes, told_prompt)
        predicted = request.predicted_output_tokens
        if output and predicted:
            actual = output / request.sequences
            self._predictor.observe(request.model, request.prompt_tokens, actual)
            metrics.output_prediction.observe(actual / predicted)
            if instance.profile is not None:
                c = instance.profile.constants
                batch = float(decision.candidates.in_flight[decision.position]) + 1
                batch = min(batch, instance.profile.max_num_seqs)
                expected_s = prefill_time_s(c, 1, request.prompt_tokens)
                expected_s += decode_time_s(c, batch, request.prompt_tokens, predicted)
                metrics.latency_prediction.observe((now_s - job.received_s) / expected_s)

    def _answer(
        self, downstream: Downstream, error: ClientError, path: str, request_id: bytes
    ) -> None:
        if downstream.started:
            downstream.cut()  # a second head would be taken for a part of the body
            return
        body = error_body(error, path)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", request_id),
        ]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % error.retry_after_s))
        # After a 413 the connection stays open: uvicorn discards the rest of the body. Closing with
        # unread bytes would reset it, and the client might never see the answer.
        downstream.write(downstream.start(error.status, headers, chunked=False) + body)
        downstream.finish()


async def _read_rest(receive: Receive, first: bytes, limit: int) -> bytes:
    parts, size, more = [first], len(first), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        more = message.get("more_body", False)
    return b"".join(parts)


def _too_large(limit: int) -> ClientError:
    return ClientError(413, "request_too_large", f"The request body is larger than {limit} bytes.")


def _outcome(exchange: Exchange, downstream: Downstream) -> Outcome:
    if exchange.error is not None:
        return _OUTCOME_BY_ERROR.get(exchange.error.reason, Outcome.UPSTREAM_ERROR)
    if not exchange.complete:
        return Outcome.CLIENT_DISCONNECTED
    return Outcome.UPSTREAM_ERROR if exchange.engine_failed() else Outcome.COMPLETED


def _rejection(reject: Reject, failure: InstanceError | None, path: str) -> ClientError:
    """The client's error for a request that no instance can take."""
    if reject.reason is RejectReason.UNKNOWN_MODEL:
        return ClientError(404, "model_not_found", reject.detail, param="model")
    if reject.reason is RejectReason.FITS_NO_INSTANCE:
        param = "prompt" if path == "/v1/completions" else "messages"
        return ClientError(400, "context_length_exceeded", reject.detail, param=param)
    if failure is not None and failure.reason != "connect":
        return ClientError(502, "upstream_error", f"{failure}", kind="server_error")
    return _unavailable("no_healthy_instance", reject.detail)


def _client_error(failure: InstanceError, instance: Instance) -> ClientError:
    """The client's error for an attempt that failed and is not tried again."""
    message = f"instance {instance.id}: {failure}"
    if failure.reason.endswith("_timeout"):
        return ClientError(504, "upstream_timeout", message, kind="server_error")
    if failure.reason == "pool":
        return _unavailable("no_free_connection", message)
    if failure.reason == "connect":
        return _unavailable("no_healthy_instance", message)
    return ClientError(502, "upstream_error", message, kind="server_error")


def _unavailable(code: str, message: str) -> ClientError:
    return ClientError(503, code, message, kind="server_error", retry_after_s=_RETRY_AFTER_S)
