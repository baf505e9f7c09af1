"""``log``, ``metrics`` and ``traces`` of the gateway's configuration: records of requests."""

from typing import Literal

from pydantic import Field

from hetero_gateway.files.yaml_file import StrictModel


class LogConfig(StrictModel):
    """What the gateway logs. Prompts and keys are in no line."""

    format: Literal["text", "json"] = "text"
    """Of every line, on standard error and output: for people, or JSON."""
    access: bool = True
    """A line on standard output for each request on an engine's path."""


class MetricsConfig(StrictModel):
    """The series of /metrics."""

    per_backend: Literal["full", "basic"] = "full"
    """Series of each instance: all, or `basic`, for hundreds of them: its state, load and speed; of
        requests and failures only the sums over all, with an empty label backend."""


class TracesConfig(StrictModel):
    """Spans of requests, by OpenTelemetry; needs the extra ``otel``."""

    endpoint: str | None = Field(None, pattern=r"^https?://\S+$")
    """OTLP over HTTP: the whole URL, such as http://collector:4318/v1/traces; none: no traces, and
        a client's traceparent is passed on unchanged."""
    share: float = Field(1.0, ge=0, le=1)
    """The share of requests without a client's traceparent that are traced; for the others the
        client decides."""
    service_name: str = Field("hetero-gateway", min_length=1, max_length=200)
    """The spans' service.name."""
