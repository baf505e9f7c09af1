"""What benchmarks/simulator/simulated_and_measured.py makes of its figures."""

from typing import Any

from benchmarks.simulator import simulated_and_measured as benchmark


def test_the_order_says_which_neighbours_are_within_the_noise() -> None:
    assert benchmark.order({"a": 3.0, "b": 1.0, "c": 1.01}) == "b ≈ c < a"


def test_pairs_agree_tie_or_differ() -> None:
    measured_s = {"a": 1.0, "b": 1.5, "c": 2.0, "d": 2.01}
    simulated_s = {"a": 1.0, "b": 2.5, "c": 2.0, "d": 3.0}
    assert benchmark.compare_orders(measured_s, simulated_s) == {
        "agree": ["a, b", "a, c", "a, d", "b, d"],
        "tie": ["c, d"],
        "differ": ["b, c"],
    }


def test_a_mean_over_seeds_needs_every_one() -> None:
    run = {name: 1.0 for name, _ in benchmark.FIGURES}
    mean = benchmark.mean_of([run, {**run, "latency_mean_s": 3.0, "ttft_mean_s": None}])
    assert mean["latency_mean_s"] == 2.0
    assert mean["ttft_mean_s"] != mean["ttft_mean_s"]  # nan


def cell() -> dict[str, Any]:
    def row(measured: float, simulated: float) -> dict[str, Any]:
        names = [name for name, _ in benchmark.FIGURES]
        return {
            "measured": dict.fromkeys(names, measured),
            "simulated": dict.fromkeys(names, simulated),
            "ratio": dict.fromkeys(names, measured / simulated),
        }

    return {
        "load": None,
        "rate_per_s": None,
        "policies": {"a": row(1.1, 1.0), "b": row(2.0, 2.0)},
        "order_measured": "a < b",
        "order_simulated": "a < b",
        "pairs": {"agree": ["a, b"], "tie": [], "differ": []},
    }


def test_the_table_has_what_was_measured_and_its_ratio_to_the_simulated() -> None:
    text = benchmark.markdown({"loads": [cell()]})
    assert "Everything at once:" in text
    assert "| a | 1.10 (1.10) |" in text
    assert "none differs" in text


def test_a_difference_in_order_is_named() -> None:
    pairs = {"agree": [], "tie": [], "differ": ["a, b"]}
    assert "these differ: a, b." in benchmark.verdict({**cell(), "pairs": pairs})
