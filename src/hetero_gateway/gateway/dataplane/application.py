"""The hot path: a plain ASGI application that reads a request, has it placed, relays, settles.

It stands ahead of FastAPI: no Request or Response objects and no middleware. Per request there is
one pass through the policy, the ledger and the metrics; per chunk there is none.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import os
import re
import time
from collections import deque
from dataclasses import replace

from hetero_gateway.core.lengths.estimates import BytesPerToken, capped_output_tokens
from hetero_gateway.core.lengths.predictors import LengthFeatures, OutputLengthPredictor
from hetero_gateway.core.types import InstanceId, Outcome, Reject, RejectReason, Request
from hetero_gateway.errors import ClientError, InstanceError
from hetero_gateway.files.gateway_config import GatewayConfig, RetryConfig, secret
from hetero_gateway.gateway.control.history import new_history
from hetero_gateway.gateway.control.metrics import Metrics
from hetero_gateway.gateway.dataplane.answers import (
    answer,
    client_error,
    rejection,
    shutting_down,
    too_large,
)
from hetero_gateway.gateway.dataplane.placement import ClientGone, Placed, Placement
from hetero_gateway.gateway.dataplane.records import DecisionRecord, Job, Recorder, outcome_of
from hetero_gateway.gateway.dataplane.relay import Deadlines, Exchange
from hetero_gateway.gateway.fleet.health import HealthMonitor
from hetero_gateway.gateway.fleet.instances import Fleet, Instance
from hetero_gateway.gateway.wire.downstream import (
    AsgiDownstream,
    Downstream,
    Receive,
    Scope,
    Send,
    downstream_of,
)
from hetero_gateway.gateway.wire.openai import ParsedRequest, Work, parse_body, prompt_text
from hetero_gateway.gateway.wire.tokenizer import Tokenizer

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
_RETRY_WINDOW_S = 10.0


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
        placement: finds each request its instance.
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
        placement: Placement,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._scheduler = fleet.scheduler
        self._metrics = metrics
        self._predictor = predictor
        self._bytes_per_token = bytes_per_token
        self._tokenizer = tokenizer
        self.open_exchanges = deadlines
        self._placement = placement
        self.history = new_history()
        self._recorder = Recorder(fleet, health, metrics, predictor, bytes_per_token, self.history)
        self._budget = RetryBudget(config.retry)
        key = secret(config.server.api_key_env, "server.api_key_env")
        self._api_key = key.encode() if key else None
        # Each entry holds arrays of one entry per instance: about 8, or 30 with an outlook.
        entries = 25_000 if placement.queues else 100_000
        size = max(16, min(256, entries // max(1, len(config.instances))))
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
            answer(downstream, error, scope["path"], request_id)
        except ClientGone:
            return
        except asyncio.CancelledError:
            # The server ends, and this request was not done in the time that it gave.
            answer(downstream, shutting_down(), scope["path"], request_id)
            raise
        except Exception:
            _log.exception("request %s failed inside the gateway", request_id.decode())
            self._metrics.series("", "").outcomes["internal_error"] += 1
            failed = ClientError(500, "internal_error", "The gateway failed.", kind="server_error")
            answer(downstream, failed, scope["path"], request_id)
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

    async def _read(self, scope: Scope, receive: Receive, work: Work, request_id: bytes) -> Job:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.check_key(headers)
        content_type = b""
        limit = self._config.server.max_body_bytes
        for name, value in headers:
            if name == b"content-type":
                content_type = value
            elif name == b"content-length" and int(value) > limit:
                raise too_large(limit)
        message = await receive()
        body: bytes = message.get("body", b"")
        if message["type"] == "http.disconnect":
            raise ClientGone
        if message.get("more_body"):
            body = await _read_rest(receive, body, limit)
        if len(body) > limit:
            raise too_large(limit)
        received_s = time.monotonic()
        path = scope["path"]
        parsed = parse_body(body, content_type)
        # /v1/responses sends its first events before any token is made.
        streams = parsed.stream and work is Work.GENERATE and path != "/v1/responses"
        model = self._model(parsed, path)
        request, features = await self._describe(parsed, body, work, model, streams)
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        queues = self._placement.queues and work is not Work.LIGHT
        return Job(
            path, target, headers, request_id, body, parsed, request, features, queues, received_s
        )

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

    async def _describe(
        self, parsed: ParsedRequest, body: bytes, work: Work, model: str, streams: bool
    ) -> tuple[Request, LengthFeatures | None]:
        """What the scheduler needs: the lengths of prompt and output, exact or estimated.

        And what the output's length was predicted from, where there is any output.
        """
        if work is Work.LIGHT:
            return Request(model, 1, 0.0, streams=False), None
        tokens = parsed.exact_prompt_tokens
        if tokens is None and self._tokenizer is not None and parsed.text_bytes:
            tokens = await self._tokenizer.count(parsed.messages or parsed.prompt)
        if tokens is None:
            tokens = self._bytes_per_token.tokens(model, parsed.text_bytes)
        tokens += parsed.media_parts * self._config.scheduler.tokens.image_tokens
        prompt_tokens = max(1, -(-tokens // parsed.prompt_count))
        if work is Work.PREFILL:
            return Request(model, prompt_tokens, 0.0, parsed.sequences, streams=False), None
        features = LengthFeatures(model, prompt_tokens, parsed.max_output_tokens, body, prompt_text)
        output_tokens = capped_output_tokens(
            self._predictor.predict(features),
            parsed.max_output_tokens,
            self._scheduler.context_tokens(model),
            prompt_tokens,
        )
        return Request(model, prompt_tokens, output_tokens, parsed.sequences, streams), features

    def _request_id(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        for name, value in headers:
            if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
                return value
        return b"%b-%x" % (self._request_id_prefix.encode(), next(self._request_ids))

    # Choosing and relaying

    async def _run(self, job: Job, downstream: Downstream) -> None:
        now_s = job.received_s
        self._budget.note_request(now_s)
        deadline_s = now_s + self._config.timeouts.total_s
        tried: list[InstanceId] = []
        failure: InstanceError | None = None
        while True:
            placed = await self._place(job, tried, failure, downstream, deadline_s)
            instance = placed.instance
            outcome = Outcome.CLIENT_DISCONNECTED  # also when this task is cancelled
            extra = [
                (b"x-request-id", job.request_id),
                (b"x-hetero-gateway-instance", instance.id.encode()),
            ]
            on_stream = self._placement.watch(placed)
            exchange = Exchange(downstream, job.path, extra, deadline_s, on_stream)
            retry = False
            self.open_exchanges.add(exchange)
            try:
                await self._attempt(job, placed, exchange, first=not tried)
                outcome = outcome_of(exchange, downstream)
                tried.append(instance.id)
                retry = self._may_retry(exchange, len(tried))
            finally:
                self.open_exchanges.discard(exchange)
                self._placement.settle(placed.dispatch, outcome, exchange)
                self._recorder.record(job, placed, exchange, outcome, final=not retry)
            failure = exchange.error
            if failure is None:
                return
            if exchange.head_sent:
                exchange.break_off(client_error(failure, instance))
                return
            if not retry:
                raise client_error(failure, instance)
            self._metrics.retries[failure.reason] += 1

    async def _place(
        self,
        job: Job,
        tried: list[InstanceId],
        failure: InstanceError | None,
        downstream: Downstream,
        deadline_s: float,
    ) -> Placed:
        """The request's instance, now or when one has room. Raises what the client is told."""
        placement, request = self._placement, job.request
        outcomes = self._metrics.series
        try:
            while True:
                if job.queues:
                    placed = await placement.place(request, tried, downstream, deadline_s)
                else:
                    placed = placement.place_now(request, tried)
                if (
                    not isinstance(placed, Reject)
                    or placed.reason is not RejectReason.FITS_NO_INSTANCE
                    or job.parsed.exact_prompt_tokens is not None
                    or request is not job.request
                ):
                    break
                # The length is an estimate: when half of it fits, the engine is to judge.
                request = replace(request, prompt_tokens=-(-request.prompt_tokens // 2))
        except ClientGone:
            outcomes(request.model, "").outcomes["client_disconnected"] += 1
            raise
        except ClientError as error:
            outcome = "timed_out" if error.status == 504 else "unavailable"
            outcomes(request.model, "").outcomes[outcome] += 1
            raise
        if isinstance(placed, Reject):
            # A name that nobody serves is the client's invention: it must not become a label.
            model = request.model if self._scheduler.knows(request.model) else "unknown"
            ours = placed.reason is RejectReason.NO_AVAILABLE_INSTANCE
            outcomes(model, "").outcomes["unavailable" if ours else "rejected"] += 1
            raise rejection(placed, failure, job.path)
        self._metrics.decisions[placed.instance.id] += 1
        self.decisions.append(
            DecisionRecord(time.time(), job.request_id.decode(), placed.decision, placed.waited_s)
        )
        return placed

    async def _attempt(self, job: Job, placed: Placed, exchange: Exchange, *, first: bool) -> None:
        pool = placed.instance.pool
        payload = self._upstream_request(job, placed.instance)
        connection = pool.take_idle()
        try:
            if connection is None:
                connection = await pool.connect()
            if first:
                overhead_s = time.monotonic() - job.received_s - placed.waited_s
                self._metrics.overhead_s.observe(overhead_s)
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

    def _upstream_request(self, job: Job, instance: Instance) -> bytes:
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
            raise too_large(limit)
        more = message.get("more_body", False)
    return b"".join(parts)
