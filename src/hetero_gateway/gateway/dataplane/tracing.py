"""A span for each request, by OpenTelemetry's own packages (the extra ``otel``).

Imported only where ``traces.endpoint`` is set. A request's span begins when it is sent on, dated
back to its last byte in, so that its id can go to the instance as the parent of vLLM's own spans;
it ends, with all that is known of the request, when that is over. What was never sent gets its span
then. Names and attributes are those of the semantic conventions for generative AI, and vLLM's own
for latencies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from hetero_gateway import __version__
from hetero_gateway.files.log_config import TracesConfig
from hetero_gateway.gateway.dataplane.ended import Ended
from hetero_gateway.http.heads import Inbound

_CLOSE_S = 2.0
_NS = 1_000_000_000
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_LONGEST_NAME = 200


class Tracer:
    """Makes the spans.

    Args:
        config: where they go; its endpoint is set.
        exporter: instead of one to that endpoint.
    """

    def __init__(self, config: TracesConfig, exporter: SpanExporter | None = None) -> None:
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.share)),
            resource=Resource.create(
                {"service.name": config.service_name, "service.version": __version__}
            ),
            shutdown_on_exit=False,
        )
        exporter = exporter or OTLPSpanExporter(endpoint=config.endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("hetero_gateway", __version__)
        self._context = TraceContextTextMapPropagator()
        # The wall clock of a monotonic time, by one offset: a trace's spans must not be shuffled.
        self._unix_less_monotonic_ns = time.time_ns() - time.monotonic_ns()

    def begin(self, inbound: Inbound) -> Span:
        """Begin a request's span, continued from its client's ``traceparent``, if it has one."""
        return self._tracer.start_span(
            _OPERATIONS.get(inbound.path, inbound.path[:_LONGEST_NAME]),
            context=self._parent_of(inbound),
            kind=SpanKind.SERVER,
            start_time=self._at_ns(inbound.received_s),
        )

    def _parent_of(self, inbound: Inbound) -> Context:
        fields = {
            name.decode(): value.decode("latin-1")
            for name, value in inbound.headers
            if name in (b"traceparent", b"tracestate")
        }
        return self._context.extract(fields, context=Context())

    def parent_header(self, span: Span) -> bytes:
        """``traceparent`` for services that do part of a span's work."""
        found = span.get_span_context()
        return b"00-%032x-%016x-%02x" % (found.trace_id, found.span_id, found.trace_flags)

    def __call__(self, requests: Sequence[Ended]) -> None:
        for ended in requests:
            self._end(ended)

    def _end(self, ended: Ended) -> None:
        inbound = ended.inbound
        received_s = inbound.received_s or ended.ended_s
        span: Span = ended.span if ended.span is not None else self.begin(inbound)
        if span.is_recording():
            model = "" if ended.job is None else (ended.job.parsed.model or "")
            if ended.last is not None and model:
                # Otherwise it may be a client's invention.
                name = _OPERATIONS.get(inbound.path)
                if name is not None:
                    span.update_name(f"{name} {model[:_LONGEST_NAME]}")
                span.set_attribute("gen_ai.request.model", model[:_LONGEST_NAME])
            span.set_attributes(_attributes(ended))
            if ended.outcome not in ("completed", "client_error", "rejected"):
                span.set_attribute("error.type", ended.reason or ended.outcome)
                if ended.outcome != "client_disconnected":
                    span.set_status(Status(StatusCode.ERROR, ended.reason or ended.outcome))
            first_s = None if ended.last is None else ended.last[1].first_body_at_s
            if first_s is not None:
                span.add_event("first_token", timestamp=self._at_ns(first_s))
        span.end(self._at_ns(max(received_s, ended.ended_s)))

    def _at_ns(self, monotonic_s: float) -> int:
        return int((monotonic_s or time.monotonic()) * _NS) + self._unix_less_monotonic_ns

    def close(self) -> None:
        """Export what is left, within two seconds."""
        ending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(_CLOSE_S)


def _attributes(ended: Ended) -> dict[str, Any]:
    inbound, (prompt, output, cached) = ended.inbound, ended.usage()
    job = ended.job
    found = {
        "gen_ai.operation.name": _OPERATIONS.get(inbound.path),
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.max_tokens": None if job is None else job.parsed.max_output_tokens,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": output,
        "gen_ai.usage.cache_read.input_tokens": cached,
        "gen_ai.latency.time_to_first_token": ended.ttft_s,
        "gen_ai.latency.time_in_queue": ended.waited_s,
        "gen_ai.latency.e2e": ended.duration_s,
        "http.request.method": inbound.method.decode("ascii"),
        "url.path": inbound.path[:_LONGEST_NAME],
        "http.response.status_code": ended.status,
        "hetero_gateway.request_id": inbound.request_id.decode("ascii"),
        "hetero_gateway.instance": None if ended.last is None else ended.last[0].instance.id,
        "hetero_gateway.outcome": ended.outcome,
        "hetero_gateway.attempts": ended.attempts,
        "hetero_gateway.overhead": ended.overhead_s,
        "hetero_gateway.key": ended.client or None,
    }
    return {name: value for name, value in found.items() if value is not None}
