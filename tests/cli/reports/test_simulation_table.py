"""The tables of ``simulate`` on terminals of any width."""

import dataclasses
import io
import math

import numpy as np
import pytest
from rich.console import Console

from hetero_gateway.cli.reports.simulation import (
    COLUMNS,
    number,
    print_tables,
    rate_name,
    short_runs,
    with_sd,
)
from hetero_gateway.sim.figures import Distribution
from hetero_gateway.sim.result import Cell, InstanceResult, RunResult, Spread


def cell(policy: str = "round-robin", lost: int = 0) -> Cell:
    times = Distribution(mean=12.345, p50=10.0, p99=99.0)
    run = RunResult(
        requests=100,
        throughput_tokens_per_s=4171.6,
        total_tokens_per_s=9000.0,
        steady_tokens_per_s=4500.0,
        latency_s=times,
        ttft_s=times,
        tpot_s=Distribution(mean=0.0838, p50=0.08, p99=0.1),
        slo_share=0.049,
        instances=(InstanceResult(60, 96.4), InstanceResult(40, 104.2)),
        preemptions=5,
        refused=0,
        lost=lost,
        latencies_s=np.array([1.0]),
    )
    return Cell(policy, 8.0, None, 5000.0, ("a", "b"), (run, run))


def printed(cells: list[Cell], width: int | None) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=width is not None, color_system=None)
    print_tables(cells, console)
    return out.getvalue()


def test_a_pipe_gets_every_ranked_column():
    out = printed([cell()], None)
    assert "4172 ± 0" in out
    assert "96.4–104" in out
    for column in COLUMNS:
        shown = column.rank is not None and column.name not in ("cached", "split")  # nothing was
        assert (f" {column.name} " in out) == shown
    assert "wider terminal" not in out


@pytest.mark.parametrize("width", [20, 60, 80, 100, 130])
def test_a_narrow_terminal_gets_fewer_columns_and_no_cut_figure(width):
    out = printed([cell(), cell("capacity-weighted")], width)
    if width >= 60:
        assert "…" not in out
        assert max(map(len, out.splitlines())) <= max(
            width, len("A wider terminal shows more columns, --json all of them.")
        )
        assert "4172 ± 0" in out
    assert "wider terminal" in out
    assert "evicted" not in out


def test_what_was_lost_is_shown_only_where_there_is_any():
    assert "lost" not in printed([cell()], None)
    assert "lost" in printed([cell(), cell("min-max", lost=3)], None)
    assert "lost" in printed([cell(lost=3)], 80)


@pytest.mark.parametrize(("rate_per_s", "cautious"), [(1.0, False), (2.0, True), (math.inf, False)])
def test_runs_that_are_short_against_their_latencies_are_said_to_be(rate_per_s, cautious):
    # 100 requests; the mean latency is 12.3 s.
    said = short_runs([dataclasses.replace(cell(), rate_per_s=rate_per_s)])
    assert (said is not None) == cautious
    if said:
        assert "arrivals last 50.0 s" in said


def test_figures_have_three_digits_and_a_dash_where_there_is_none():
    assert [number(v) for v in (0.1234, 12.345, 1234.5, math.nan)] == ["0.12", "12.3", "1234", "–"]
    assert with_sd(Spread(2584.2, 3.57)) == "2584 ± 4"
    assert with_sd(Spread(math.nan, math.nan)) == "–"


def test_a_rate_is_named_as_it_was_asked_for():
    assert rate_name(math.inf) == "all at once"
    assert rate_name(16.123) == "16.1 requests/s"
    assert rate_name(16.123, 0.7) == "16.1 requests/s (70% of the bound)"
