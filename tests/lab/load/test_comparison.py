import pytest

from hetero_gateway.lab.load.comparison import (
    PolicyResult,
    completion_gap_s,
    conclusion,
    table_rows,
)
from hetero_gateway.lab.load.result import RequestRecord, summarise


def result(
    policy: str, duration_s: float, latency_s: float, *, errors: int = 0, answered: int = 4
) -> PolicyResult:
    """A run of ``answered`` requests; the last one ends after ``duration_s``, on instance b."""
    ends_s = [*[latency_s] * (answered - 1), duration_s][:answered]
    records = []
    for k, end_s in enumerate(ends_s):
        times_s = (0.0, end_s - latency_s if k else 0.0, end_s - latency_s / 2, end_s)
        instance = "b" if k == answered - 1 else "a"
        records.append(RequestRecord(k, *times_s, 100, 100, instance, None))
    bad = [RequestRecord(99, 0.0, 0.0, None, 1.0, 1, 0, None, "http_503")] * errors
    return PolicyResult(policy, summarise([*records, *bad]))


@pytest.mark.parametrize(
    ("other", "mine", "said", "not_said"),
    [
        ((20.0, 4.0), (10.0, 2.0), "beat other (throughput 100.0% higher, mean latency 50", "lost"),
        ((10.0, 2.0), (20.0, 4.0),
         "lost to other (throughput 50.0% lower, mean latency 100.0% higher)", "beat"),
        ((10.0, 2.0), (10.1, 2.01), "was level with other (throughput level at -1.0%", "beat"),
        ((10.0, 2.0), (8.0, 3.0),
         "was better in one way and worse in another than other", "beat"),
    ],
)  # fmt: skip
def test_who_won_is_said_and_by_how_much(other, mine, said, not_said) -> None:
    text = conclusion([result("other", *other), result("mine", *mine)], "mine")
    assert text.startswith(f"In this run mine {said}")
    assert not_said not in text


def test_every_other_policy_is_named() -> None:
    runs = [result("rr", 20.0, 4.0), result("cw", 10.0, 2.0), result("mine", 10.0, 2.0)]
    said = conclusion(runs, "mine")
    assert "beat rr" in said
    assert "and was level with cw" in said


def test_failures_spoil_a_comparison_and_say_so() -> None:
    runs = [result("other", 10.0, 2.0, errors=3), result("mine", 10.0, 2.0)]
    assert "3 requests failed" in conclusion(runs, "mine")
    rows = dict(table_rows(runs, ["a", "b"]))
    assert rows["requests failed"] == ["3", "0"]


def test_a_short_run_says_that_chance_has_a_part() -> None:
    few = [result("other", 10.0, 2.0), result("mine", 10.0, 2.0)]
    many = [result("other", 10.0, 2.0, answered=300), result("mine", 10.0, 2.0, answered=300)]
    assert "4 requests are few" in conclusion(few, "mine")
    assert "few" not in conclusion(many, "mine")


def test_a_run_without_answers_is_not_compared() -> None:
    runs = [result("other", 10.0, 2.0, errors=2, answered=0), result("mine", 10.0, 2.0)]
    assert "cannot be compared with other" in conclusion(runs, "mine")
    assert dict(table_rows(runs, ["a"]))["requests to a"] == ["0%", "75%"]


def test_the_table_has_times_gap_and_shares() -> None:
    run = result("mine", 10.0, 2.0)
    assert completion_gap_s(run, ["a", "b"]) == pytest.approx(8.0)
    rows = dict(table_rows([run], ["a", "b"]))
    assert rows["throughput, tokens/s"] == ["80"]
    assert list(rows.items())[6:] == [
        *[("a done after, s", ["2.0"]), ("b done after, s", ["10.0"]), ("difference, s", ["8.0"])],
        *[("requests to a", ["75%"]), ("requests to b", ["25%"])],
    ]
