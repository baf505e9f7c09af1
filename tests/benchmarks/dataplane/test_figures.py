"""What the data plane's benchmark makes of its segments."""

import dataclasses
from typing import Any

import pytest

from benchmarks.dataplane import figures
from benchmarks.dataplane.segments import Segment


def paced(target: str, number: int, p50_s: float, *, noisy: bool = False) -> Segment:
    return Segment(target, "paced", number, units=100, latency_p50_s=p50_s, noisy=noisy)


def row(target: str, **changes: Any) -> figures.Row:
    values = {
        f.name: "" if f.type == "str" else 0
        for f in dataclasses.fields(figures.Row)
        if f.default_factory is dataclasses.MISSING
    }
    return figures.Row(**values | {"target": target} | changes)


def test_added_latency_is_over_the_same_round_without_a_server() -> None:
    segments = [
        *(paced("direct", 0, 0.001), paced("direct", 1, 0.002)),
        *(paced("gateway", 0, 0.0015), paced("gateway", 1, 0.0028)),
    ]
    assert figures.paced_added(segments, "gateway") == pytest.approx([0.0005, 0.0008])


def test_a_round_whose_direct_segment_was_noisy_is_held_against_the_other_rounds() -> None:
    segments = [
        *(paced("direct", 0, 0.001), paced("direct", 1, 0.009, noisy=True)),
        paced("gateway", 1, 0.0015),
    ]
    assert figures.paced_added(segments, "gateway") == pytest.approx([0.0005])


def test_a_server_that_was_not_paced_adds_nothing_known() -> None:
    assert figures.paced_added([paced("direct", 0, 0.001)], "litellm") == []


def test_ratios_are_to_both_routers_and_goals_are_judged_by_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [
        row("gateway", request_us=300.0, stream_us=8000.0, paced_added_p50_s=0.0004),
        row("vllm-router", request_us=200.0, stream_us=8000.0, paced_added_p50_s=0.0002),
        row("vllm-router-cache-aware", request_us=400.0, stream_us=10_000.0),
    ]
    rows[2].paced_added_p50_s = None
    figures.set_ratios(rows)
    gateway = rows[0]
    assert gateway.request_ratio == {"vllm-router": 1.5, "vllm-router-cache-aware": 0.75}
    assert gateway.stream_ratio == {"vllm-router": 1.0, "vllm-router-cache-aware": 0.8}
    assert gateway.paced_ratio == {"vllm-router": 2.0}
    figures.print_goals(gateway)
    verdicts = [line.rsplit(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert verdicts == ["met", "met", "met", "missed", "missed"]
