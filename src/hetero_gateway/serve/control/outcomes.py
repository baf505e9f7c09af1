"""Decisions with their outcomes, as JSON: the last ones, and all of one request."""

import time
from collections.abc import AsyncIterator
from typing import Any

from hetero_gateway.core.scheduling.decision_log import LoggedDecision
from hetero_gateway.core.types import InstanceId
from hetero_gateway.errors import Refusal
from hetero_gateway.gateway.dataplane.records import expected_latency_s
from hetero_gateway.gateway.records.request_log import EndedRequest, FailedAttempt, parts_of
from hetero_gateway.gateway.turns import in_turns
from hetero_gateway.serve.control.documents import describe_decision
from hetero_gateway.serve.wiring.gateway import Gateway

_CANDIDATES_AT_ONCE = 1000


async def describe_decisions(
    gateway: Gateway, limit: int, *, candidates: bool, over: bool, request_id: str | None
) -> AsyncIterator[dict[str, Any]]:
    """The last decisions, newest first; ``over``: only those with a known outcome."""
    log = gateway.dataplane.request_log
    find, failed = log.by_placement(), log.failed_ids()
    records: list[tuple[LoggedDecision, EndedRequest | None]] = []
    raw_id = None if request_id is None else request_id.encode("utf-8", "replace")
    for record in gateway.dataplane.decisions.newest_first(raw_id):
        outcome = find(record.request_id.encode(), record.placed_s)
        if outcome is not None or not over:
            records.append((record, outcome))
        if len(records) == limit:
            break
    size = max((len(r.decision.ids) + len(r.decision.excluded) for r, _ in records), default=1)
    at_once = max(1, _CANDIDATES_AT_ONCE // size) if candidates else max(1, len(records))
    async for batch in in_turns(records, at_once):
        for record, outcome in batch:
            row = _decision(gateway, record)
            row["outcome"] = None
            if outcome is not None:
                row["outcome"] = _outcome(outcome, failed.get(outcome.request_id, 0))
            yield row | ({"candidates": describe_decision(record.decision)} if candidates else {})


def describe_request(gateway: Gateway, request_id: str) -> dict[str, Any]:
    """Everything kept about a request. Raises Refusal: 404, nothing."""
    log, offset_s = gateway.dataplane.request_log, _unix_less_monotonic_s()
    raw_id = request_id.encode("utf-8", "replace")
    records = list(gateway.dataplane.decisions.newest_first(raw_id))
    ended = log.of(raw_id)
    failed = log.failed(raw_id)
    if not (records or ended or failed):
        message = (
            f"Nothing is kept of the request {request_id[:128]!r}: it is none of the last "
            f"{len(gateway.dataplane.decisions)} that were placed."
        )
        raise Refusal(404, "request_not_found", message)
    attempts = []
    left = list(failed)
    for record in reversed(records):
        placed_s, instance_id = record.placed_s, record.decision.instance_id
        outcome = next((each for each in ended if each.placed_s == placed_s), None)
        failure = _take(left, instance_id, placed_s)
        attempts.append(
            _decision(gateway, record)
            | {
                "failed": None
                if failure is None
                else {"reason": failure.reason, "after_s": max(0.0, failure.failed_s - placed_s)},
                "outcome": None if outcome is None else _outcome(outcome, 0),
                "candidates": describe_decision(record.decision),
            }
        )
    retries = sum(bool(each.instance_id) for each in failed)
    last = ended[-1] if ended else None
    return {
        "request_id": request_id,
        "attempts": attempts,
        "turned_away": [
            {"reason": each.reason, "time": each.failed_s + offset_s}
            for each in failed
            if not each.instance_id
        ],
        "outcome": None if last is None else _outcome(last, retries),
        "first_token": None if last is None else _first_token(gateway, last, retries),
    }


def _take(
    failed: list[FailedAttempt], instance_id: InstanceId, placed_s: float
) -> FailedAttempt | None:
    """The failure of an attempt placed there at that time, removed from the list."""
    for each in failed:
        if each.instance_id == instance_id and each.failed_s >= placed_s:
            failed.remove(each)
            return each
    return None


def _decision(gateway: Gateway, record: LoggedDecision) -> dict[str, Any]:
    wanted, decision = record.decision.request, record.decision
    figures, position = decision.choice.figures, decision.choice.position
    spec = gateway.fleet.scheduler.members.specs.get(decision.instance_id)
    return {
        "time": record.placed_s + _unix_less_monotonic_s(),
        "request_id": record.request_id,
        "model": wanted.model,
        "prompt_tokens": wanted.prompt_tokens,
        "predicted_output_tokens": wanted.predicted_output_tokens,
        "sequences": wanted.sequences,
        "chosen": decision.instance_id,
        "prefill_instance": decision.prefill_id,
        "reason": decision.reason(waited_s=record.waited_s),
        "waited_s": record.waited_s,
        "predicted": {
            "ttft_s": figures.at("ttft_s", position) if "ttft_s" in figures else None,
            "latency_s": expected_latency_s(decision, None if spec is None else spec.profile),
        },
    }


def _outcome(ended: EndedRequest, failed: int) -> dict[str, Any]:
    """The outcome. ``ttft_s``, ``latency_s``: from its placement, like the predictions."""
    tokens, first_s = ended.tokens, ended.first_body_at_s
    broke_off = ended.outcome.value != "completed"
    return {
        "outcome": "client_error" if ended.status >= 400 and not broke_off else ended.outcome.value,
        "status": ended.status or None,
        "ttft_s": first_s - ended.placed_s if ended.stream and first_s is not None else None,
        "latency_s": ended.ended_s - ended.placed_s,
        "total_s": ended.ended_s - ended.received_s,
        "output_tokens": None if tokens is None else tokens.output,
        "input_tokens": None if tokens is None else tokens.prompt,
        "client": ended.client or None,
        # A failed attempt after which the client got an error was not retried.
        "retries": max(0, failed - (ended.outcome.value in ("upstream_error", "timed_out"))),
    }


def _first_token(gateway: Gateway, ended: EndedRequest, failed: int) -> dict[str, Any] | None:
    """How long its client waited for the first byte."""
    instance = gateway.fleet.instances.get(InstanceId(ended.instance_id))
    parts = parts_of(ended, failed, None if instance is None else instance.round_trip_s)
    return None if parts is None else {"ttft_s": sum(parts), **parts._asdict()}


def _unix_less_monotonic_s() -> float:
    return time.time() - time.monotonic()
