"""benchmarks/scheduling/recovery.py judges what it should, on made-up runs."""

import numpy as np
import pytest

from benchmarks.scheduling import recovery
from hetero_gateway.lab.load.result import RequestRecord


def record(first_s: float, end_s: float, tokens: int) -> RequestRecord:
    return RequestRecord(0, 0.0, 0.0, first_s, end_s, 10, tokens, "fast", None)


def results(**shares: float) -> dict[tuple[str, str], list[dict[str, object]]]:
    """Runs of 45 judged seconds; by default each case has 1 000 tokens/s all the time."""
    found: dict[tuple[str, str], list[dict[str, object]]] = {}
    for case in recovery.CASES:
        size = int((45 + (recovery.SLOW_DOWN_AT_S if case.slow_down else 0)) / recovery.WINDOW_S)
        for policy in recovery.POLICIES:
            share = shares.get(policy.replace("-", "_"), 1.0) if case.against != case.name else 1.0
            series = np.full(size, 1000.0) * (share if case.name != "right" else 1.0)
            found[case.name, policy] = [{"tokens_per_s": series.tolist(), "lost_s": 0.0}] * 2
    return found


def test_windows_hold_every_token_where_it_was_streamed() -> None:
    rates = recovery.windows([record(2.5, 7.5, 100), record(9.0, 9.0, 50)], 15.0)
    assert rates.tolist() == pytest.approx([10.0, 20.0, 0.0])


def test_a_case_that_stays_low_is_missed_and_one_that_comes_back_is_not() -> None:
    rows = recovery.judge(results(min_max=0.8), 45.0)
    met = {(row["case"], row["policy"]): row["met"] for row in rows}
    for case in recovery.CASES:
        assert met[case.name, "finish-time"]
        assert met[case.name, "min-max"] == (case.name in ("right", case.against))


def test_the_first_thirty_seconds_are_shown_and_not_judged() -> None:
    runs = results()
    slow = [100.0] * 6 + [990.0] * 3
    runs["slow one x 2", "finish-time"] = [{"tokens_per_s": slow, "lost_s": 0.0}] * 2
    (row,) = (
        r for r in recovery.judge(runs, 45.0)
        if (r["case"], r["policy"]) == ("slow one x 2", "finish-time")
    )  # fmt: skip
    assert row["shares"][:6] == [0.1] * 6
    assert row["after"] == pytest.approx(0.99)
    assert row["met"]
