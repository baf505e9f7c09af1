"""A run's results: records of single requests, and their summary. Pure.

TTFT        s        first byte of the answer's body, from the moment of sending
TPOT        s/token  (last byte − first byte) / (output tokens − 1), streams only
latency     s        last byte, from the moment of sending
throughput  tokens/s prompt + output tokens of the answered requests, over the time from the
                     first sending to the last answer: the paper's definition
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.sim.figures import Distribution

_DISTRIBUTIONS = ("latency_s", "ttft_s", "tpot_s", "send_delay_s")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. Times are seconds since the start of the run.

    Args:
        index: its place in the order of sending.
        due_s: its sending time in the trace.
        sent_s: when it was sent (before the connection was made, if one had to be).
        first_s: first byte of the body, None if none came.
        end_s: last byte, or the failure.
        input_tokens: prompt tokens by ``usage``, else as asked for.
        output_tokens: output tokens by ``usage``, else the number of events of the stream.
        instance: from ``x-hetero-gateway-instance``, None without that header.
        error: None, or a kind: ``connect``, ``timeout``, ``reset`` (closed before the end),
            ``protocol`` (not HTTP), ``http_NNN``, ``stream_error`` (an error event),
            ``aborted`` (by the engine), ``incomplete`` (a stream without ``[DONE]``).
        cached_tokens: of the prompt, those in the engine's prefix cache; None: ``usage`` does
            not say.
        said: the server's error message.
    """

    index: int
    due_s: float
    sent_s: float
    first_s: float | None
    end_s: float
    input_tokens: int
    output_tokens: int
    instance: str | None
    error: str | None
    streamed: bool = True
    cached_tokens: int | None = None
    said: str = ""

    @property
    def latency_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        if not self.streamed or self.first_s is None or self.output_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class InstanceShare:
    """One instance's answers; ``completion_s`` is its last answer since the run's start."""

    instance_id: str
    requests: int
    completion_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in figures. Failed requests count in ``errors`` and in nothing else.

    ``cached_share``: of the prompts' tokens, those in the engines' prefix caches; of those
    whose answers say so, None if none does. ``slo_share``: of all requests, those within the
    limits; None: there are no limits.
    """

    requests: int
    errors: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    latency_s: Distribution
    ttft_s: Distribution
    tpot_s: Distribution
    send_delay_s: Distribution
    instances: tuple[InstanceShare, ...] = ()
    errors_by_kind: dict[str, int] = field(default_factory=dict)
    cached_share: float | None = None
    slo_share: float | None = None

    @property
    def throughput_tokens_per_s(self) -> float:
        """Prompt and output tokens over the duration; 0 if nothing was answered."""
        tokens = self.input_tokens + self.output_tokens
        return tokens / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s > 0 else 0.0

    def scaled(self, factor: float) -> Self:
        """The same run on a clock that ticks ``factor`` times as many seconds."""
        return replace(
            self,
            duration_s=self.duration_s * factor,
            **{name: getattr(self, name).scaled(factor) for name in _DISTRIBUTIONS},
            instances=tuple(
                replace(share, completion_s=share.completion_s * factor) for share in self.instances
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """The document that ``bench --json`` prints."""
        return {
            "requests": self.requests,
            "errors": self.errors,
            "errors_by_kind": self.errors_by_kind,
            "duration_s": self.duration_s,
            "throughput_tokens_per_s": self.throughput_tokens_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "cached_share": self.cached_share,
            "slo_share": self.slo_share,
            **{name: getattr(self, name).to_dict() for name in _DISTRIBUTIONS},
            "instances": [
                {"id": i.instance_id, "requests": i.requests, "completion_s": i.completion_s}
                for i in self.instances
            ],
        }


def within(record: RequestRecord, slo: Slo) -> bool:
    """Whether a request was answered within the limits. Unstreamed answers have no TPOT."""
    if record.error is not None:
        return False
    first_s, token_s = record.ttft_s or 0.0, record.tpot_s or 0.0
    return first_s <= slo.ttft_s and token_s <= slo.tpot_s


def summarise(records: Sequence[RequestRecord], slo: Slo | None = None) -> Summary:
    """Summarise a run; an empty or wholly failed one has figures of 0 and None."""
    good = [r for r in records if r.error is None]
    start_s = min((r.sent_s for r in records), default=0.0)
    says = [r for r in good if r.cached_tokens is not None]
    prompt_tokens = sum(r.input_tokens for r in says)
    cached_share = slo_share = None
    if prompt_tokens:
        cached_share = sum(r.cached_tokens or 0 for r in says) / prompt_tokens
    if slo is not None and records:
        slo_share = sum(within(r, slo) for r in records) / len(records)
    ends_s: dict[str, list[float]] = {}
    for r in good:
        if r.instance is not None:
            ends_s.setdefault(r.instance, []).append(r.end_s - start_s)
    return Summary(
        requests=len(records),
        errors=len(records) - len(good),
        duration_s=max((r.end_s for r in good), default=start_s) - start_s,
        input_tokens=sum(r.input_tokens for r in good),
        output_tokens=sum(r.output_tokens for r in good),
        latency_s=Distribution.of([r.latency_s for r in good]),
        ttft_s=Distribution.of([r.ttft_s for r in good if r.ttft_s is not None]),
        tpot_s=Distribution.of([r.tpot_s for r in good if r.tpot_s is not None]),
        send_delay_s=Distribution.of([max(0.0, r.sent_s - r.due_s) for r in records]),
        instances=tuple(
            InstanceShare(name, len(ends), max(ends)) for name, ends in sorted(ends_s.items())
        ),
        errors_by_kind=dict(Counter(r.error for r in records if r.error is not None)),
        cached_share=cached_share,
        slo_share=slo_share,
    )
