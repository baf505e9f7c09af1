"""What is made of the runs of ``replicas.py``."""

from collections import Counter

import pytest

from benchmarks.scheduling.replicas import WAYS, Run, requests_of, rows, targets_of
from hetero_gateway.lab.load.result import RequestRecord


def run(way: str, seed: int, slower: float = 1.0, tail: float = 1.0, load: str = "0.9") -> Run:
    """100 requests of 1 s and more, a first token after a tenth; two of them are the tail."""
    records = []
    for i in range(100):
        latency_s = (1.0 + 0.001 * (i + seed)) * slower * (tail if i >= 98 else 1.0)
        first_s = i + latency_s / 10
        where = f"i{(i + (way != 'one' and i < 10)) % 4}"
        records.append(RequestRecord(i, i, i, first_s, i + latency_s, 10, 10, where, None))
    return Run(load, way, seed, records, 0.0, {})


def test_a_goal_is_missed_by_a_tail_that_is_beyond_it_in_every_seed() -> None:
    runs = [run("one", seed) for seed in range(3)]
    runs += [run("shared", seed, slower=1.01) for seed in range(3)]
    runs += [run("shared, uneven", seed, tail=1.3) for seed in range(3)]
    runs += [run("alone", seed, tail=2.0) for seed in range(3)]
    found = {row["way"]: row for row in rows(runs)}
    assert set(found) == set(WAYS) - {"one", "alone, uneven"}
    assert found["shared"]["met"]
    assert found["shared"]["ratios"]["mean"] == (pytest.approx(1.01), pytest.approx(0, abs=1e-9))
    assert not found["shared, uneven"]["met"]
    assert found["shared, uneven"]["ratios"]["p99"][0] == pytest.approx(1.3, abs=0.02)
    assert found["alone"]["met"], "those that do not share have no goal"
    assert found["shared"]["runs"] == 3


def test_only_seeds_that_one_gateway_has_run_count_and_picks_are_compared_one_by_one() -> None:
    runs = [run("one", 0, load="serial"), run("shared", 0, load="serial")]
    runs += [run("shared", 1, load="serial")]
    (row,) = rows(runs)
    assert (row["runs"], row["same_picks"], row["errors"]) == (1, "90%", 0)


def test_loads_and_their_spread_are_the_same_for_each_way() -> None:
    assert requests_of("0.7", 3, 10.0, 50.0) == requests_of("0.7", 3, 10.0, 50.0)
    assert len(requests_of("0.7", 3, 10.0, 50.0)) == 350
    assert {r.due_s for r in requests_of("burst", 0, 1.0, 1.0)} == {0.0}
    assert targets_of("uneven", 1, 5, 0) == [0] * 5
    assert targets_of("even", 4, 6, 0) == [0, 1, 2, 3, 0, 1]
    uneven = Counter(targets_of("uneven", 4, 5000, 0))
    assert uneven[0] / 5000 == pytest.approx(0.7, abs=0.03)
    assert min(uneven[i] for i in (1, 2, 3)) > 400
