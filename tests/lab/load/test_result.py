import json
from dataclasses import replace
from unittest.mock import ANY

import pytest

from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.lab.load.result import InstanceShare, RequestRecord, summarise
from hetero_gateway.sim.figures import Distribution


def record(
    index: int = 0,
    sent_s: float = 0.0,
    first_s: float | None = 1.0,
    end_s: float = 3.0,
    instance: str | None = "a",
    error: str | None = None,
    output_tokens: int = 11,
    streamed: bool = True,
) -> RequestRecord:
    return RequestRecord(
        index, sent_s, sent_s, first_s, end_s, 100, output_tokens, instance, error, streamed
    )


def test_times_count_from_sending() -> None:
    r = record(sent_s=0.5)
    assert r.latency_s == 2.5
    assert r.ttft_s == 0.5
    assert r.tpot_s == pytest.approx(2.0 / 10)


def test_one_token_or_a_plain_answer_has_no_tpot() -> None:
    assert record(output_tokens=1).tpot_s is None
    assert record(streamed=False).tpot_s is None
    assert record(first_s=None).tpot_s is None


def test_throughput_is_all_tokens_over_the_time_of_the_last_answer() -> None:
    summary = summarise([record(0, 1.0, 1.5, 3.0), record(1, 2.0, 2.5, 5.0)])
    assert summary.duration_s == 4.0
    assert summary.throughput_tokens_per_s == pytest.approx(222 / 4)
    assert summary.output_tokens_per_s == pytest.approx(22 / 4)


def test_failed_requests_count_as_errors_and_nothing_else() -> None:
    bad = record(1, 0.0, None, 60.0, "b", "timeout")
    errors = {"requests": 2, "errors": 1, "errors_by_kind": {"timeout": 1}}
    assert summarise([record(), bad]) == replace(summarise([record()]), **errors, send_delay_s=ANY)


def test_instances_have_their_share_and_their_last_answer() -> None:
    records = [record(0, end_s=3.0), record(1, end_s=9.0), record(2, end_s=4.0, instance="b")]
    shares = (InstanceShare("a", 2, 9.0), InstanceShare("b", 1, 4.0))
    assert summarise(records).instances == shares


def test_those_within_the_limits_are_a_share_of_all_that_were_sent() -> None:
    records = [
        record(0),
        record(1, first_s=2.5),  # late
        record(2, end_s=12.5),  # slow
        record(3, error="timeout"),
        record(4, end_s=90.0, streamed=False),  # nobody saw its tokens
    ]
    assert summarise(records, Slo(1.5, 1.0)).slo_share == pytest.approx(2 / 5)
    assert summarise(records, Slo(ttft_s=3.0)).slo_share == pytest.approx(4 / 5)
    assert summarise(records).slo_share is None
    assert summarise([], Slo()).slo_share is None


def test_a_run_without_answers_is_none_and_zero_and_still_json() -> None:
    for records in ([], [record(first_s=None, error="connect")]):
        document = json.loads(json.dumps(summarise(records).to_dict(), allow_nan=False))
        assert document["throughput_tokens_per_s"] == 0.0
        assert document["latency_s"]["mean"] is None


def test_the_document_has_the_fixed_keys() -> None:
    document = summarise([record()]).to_dict()
    fixed = {"requests", "errors", "throughput_tokens_per_s", "duration_s"}
    assert fixed | {"latency_s", "ttft_s", "tpot_s"} <= document.keys()
    assert {"mean", "p50", "p99"} <= document["latency_s"].keys()


def test_percentiles_are_those_of_the_values() -> None:
    d = Distribution.of([float(k) for k in range(101)])
    assert (d.mean, d.p50, d.p90, d.p99, d.max) == (50.0, 50.0, 90.0, 99.0, 100.0)


def test_another_clock_scales_times_and_inverts_throughput() -> None:
    summary = summarise([record()])
    scaled = summary.scaled(5.0)
    assert scaled.duration_s == 15.0
    assert scaled.latency_s.mean == 15.0
    assert scaled.instances[0].completion_s == 15.0
    assert scaled.throughput_tokens_per_s == pytest.approx(summary.throughput_tokens_per_s / 5)
    assert scaled.output_tokens == summary.output_tokens
