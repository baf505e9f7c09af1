"""Figures from records, compared with what was computed by hand."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.sim.cluster import Records
from hetero_gateway.sim.result import Cell, RunResult, Spread, summarise, tokens_between
from hetero_gateway.sim.workload import Workload

SLO = Slo(ttft_s=1.0, tpot_s=0.5)
NAN = math.nan


def workload(arrival_s: list[float], output: list[int], prompt: int = 10) -> Workload:
    n = len(output)
    return Workload(np.array(arrival_s, float), np.full(n, prompt), np.array(output))


def records(instance: list[int], first_s: list[float], finish_s: list[float]) -> Records:
    n = len(instance)
    return Records(
        instance=np.array(instance),
        placed_s=np.zeros(n),
        first_token_s=np.array(first_s),
        finish_s=np.array(finish_s),
        preemptions=np.array([1] + [0] * (n - 1)),
        cached_tokens=np.zeros(n, dtype=np.int64),
        split=np.zeros(n, dtype=np.int64),
    )


def three() -> RunResult:
    """Three requests on two instances of three; arrivals from 1 s on."""
    return summarise(
        workload([1, 2, 3], [5, 1, 3]),
        records([0, 1, 0], [1.5, 4.0, 3.5], [3.5, 4.0, 6.0]),
        instances=3,
        slo=SLO,
    )


def test_the_figures_are_those_that_one_computes_by_hand() -> None:
    run = three()
    # Until the last completion.
    assert run.throughput_tokens_per_s == pytest.approx(9 / 5)
    assert run.total_tokens_per_s == pytest.approx(39 / 5)
    # Times count from the arrival.
    assert run.latencies_s.tolist() == [2, 2.5, 3]
    assert run.latency_s.mean == run.latency_s.p50 == 2.5
    assert run.ttft_s.mean == pytest.approx((0.5 + 2 + 0.5) / 3)
    # 2 s for 4 tokens, and 2.5 s for 2; the output of one token has none.
    assert run.tpot_s.mean == pytest.approx((0.5 + 1.25) / 2)
    # The second one's TTFT is 2 s, the third one's TPOT 1.25 s.
    assert run.slo_share == pytest.approx(1 / 3)
    # Each instance has its completion time, and an idle one counts.
    assert [(i.requests, i.completion_s) for i in run.instances] == [(2, 5), (1, 3), (0, 0)]
    assert run.completion_spread == 1
    two = replace(run, instances=run.instances[:2])
    assert two.completion_spread == pytest.approx(0.4)


def test_refused_and_lost_requests_count_in_nothing_else() -> None:
    run = summarise(
        workload([0, 0, 0], [4, 100, 100]),
        records([0, -1, 1], [1.0, NAN, 1.0], [2.0, NAN, NAN]),
        instances=2,
        slo=SLO,
    )
    assert (run.refused, run.lost, run.preemptions) == (1, 1, 1)
    assert run.throughput_tokens_per_s == 2
    assert run.slo_share == pytest.approx(1 / 3)
    assert run.latencies_s.tolist() == [2]
    assert run.instances[1].requests == 0


def test_a_run_in_which_nothing_finished_has_no_figures() -> None:
    run = summarise(workload([0], [4]), records([-1], [NAN], [NAN]), instances=1, slo=SLO)
    assert run.throughput_tokens_per_s == run.steady_tokens_per_s == run.completion_spread == 0
    assert math.isnan(run.latency_s.mean)
    document = Cell("p", 1.0, None, 0.0, ("a",), (run, run)).to_dict()
    assert json.loads(json.dumps(document, allow_nan=False))["latency_s"]["mean"] is None
    assert document["share_of_bound"] is None


def test_tokens_are_spread_between_the_first_and_the_last() -> None:
    load = workload([0, 0], [11, 1])
    done = records([0, 0], [10.0, 3.0], [20.0, 3.0])
    assert tokens_between(load, done, 0, 30) == 12
    assert tokens_between(load, done, 0, 10) == 2
    assert tokens_between(load, done, 12, 17) == pytest.approx(5)
    assert tokens_between(load, done, 21, 30) == 0


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.floats(0, 50), st.integers(1, 900)), min_size=1, max_size=20
    ),
    st.floats(0.001, 99.9),
)
def test_windows_that_meet_share_out_every_token(rows, cut_s):
    first = [a for a, _, _ in rows]
    # Not on a first token's moment, which would belong to both windows.
    cut_s += 1e-7 if cut_s in first else 0
    load = workload([0] * len(rows), [n for _, _, n in rows])
    done = records([0] * len(rows), first, [a + b * (n > 1) for a, b, n in rows])
    parts = tokens_between(load, done, 0, cut_s) + tokens_between(load, done, cut_s, 101)
    # A burst within less than 1e-12 s may be cut out altogether.
    longest = [n for a, b, n in rows if n == 1 or b > 1e-9]
    assert parts <= sum(n for _, _, n in rows) * (1 + 1e-9)
    assert parts >= sum(longest) * (1 - 1e-6)


def test_steady_throughput_leaves_out_the_beginning_and_the_end() -> None:
    # One request a second, each of 10 tokens in 0.9 s, and a straggler at the end.
    n = 11
    arrivals = [float(i) for i in range(n)]
    finish = [a + 1.0 for a in arrivals[:-1]] + [500.0]
    done = records([0] * n, [a + 0.1 for a in arrivals], finish)
    run = summarise(workload(arrivals, [10] * n), done, instances=1, slo=SLO)
    assert run.steady_tokens_per_s == pytest.approx(10)
    assert run.throughput_tokens_per_s < 1


def test_with_everything_at_once_steady_ends_when_the_first_instance_runs_dry() -> None:
    run = summarise(
        workload([0, 0], [11, 101]),
        records([0, 1], [0.0, 0.0], [10.0, 100.0]),
        instances=3,  # the third one got nothing, so it did not run dry
        slo=SLO,
    )
    assert run.steady_tokens_per_s == pytest.approx((11 + 11) / 10)


def test_an_overloaded_cluster_is_steady_after_its_last_arrival_too() -> None:
    # All arrive within 1 s; one instance makes 10 tokens a second for 100 s.
    n = 100
    done = records([0] * n, [i + 0.1 for i in range(n)], [i + 1.0 for i in range(n)])
    run = summarise(workload([i / n for i in range(n)], [10] * n), done, instances=1, slo=SLO)
    assert run.steady_tokens_per_s == pytest.approx(10, rel=0.01)


def test_an_instance_that_is_hardly_used_does_not_end_what_is_steady() -> None:
    # The second one gets a single request, at the beginning, of a light load on the first.
    n = 101
    where = [1] + [0] * (n - 1)
    done = records(where, [i + 0.1 for i in range(n)], [i + 1.0 for i in range(n)])
    run = summarise(workload([float(i) for i in range(n)], [10] * n), done, instances=2, slo=SLO)
    assert run.steady_tokens_per_s == pytest.approx(10)


# Over seeds


def test_a_spread_has_the_sample_deviation_and_none_of_one_value() -> None:
    assert Spread.of([1.0, 3.0]) == Spread(2.0, pytest.approx(math.sqrt(2)))
    assert Spread.of([4.0]) == Spread(4.0, 0.0)
    assert Spread.of([1.0, NAN]).mean == 1.0
    assert math.isnan(Spread.of([]).mean)


def test_a_cell_has_the_fixed_keys_of_the_document() -> None:
    cell = Cell("round-robin", math.inf, None, 3.6, ("a", "b", "c"), (three(), three()))
    document = json.loads(json.dumps(cell.to_dict(), allow_nan=False))
    assert document["policy"] == "round-robin"
    assert document["rate"] == "inf"
    assert document["seeds"] == 2
    assert document["throughput_tokens_per_s"] == {"mean": pytest.approx(1.8), "sd": 0}
    assert document["share_of_bound"] == pytest.approx(0.5)
    for key in ("latency_s", "ttft_s", "tpot_s"):
        assert {"mean", "p50", "p99"} <= document[key].keys()
    assert document["instances"][0] == {
        "id": "a",
        "requests": 2,
        "completion_s": 5,
        "completion_sd_s": 0,
    }
    assert replace(cell, rate_per_s=8.0).to_dict()["rate"] == 8.0


def test_latency_quantiles_are_of_all_seeds_together() -> None:
    cell = Cell("p", 1.0, None, 1.0, ("a", "b", "c"), (three(), three()))
    quantiles = cell.latency_quantiles_s()
    assert (quantiles[0], quantiles[-1]) == (2, 3)
    assert (np.diff(quantiles) >= 0).all()
