"""The comparison of policies: its table, its goals, and its verdicts, on very small runs."""

import math

import pytest

from benchmarks.scheduling import policies


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "CLUSTERS", {"A": "paper-a"})
    monkeypatch.setattr(policies, "REQUESTS_PER_INSTANCE", {"A": 20})
    monkeypatch.setattr(policies, "OTHERS", ("paper", "capacity-weighted"))


def test_every_load_has_a_row_and_every_other_policy_a_column() -> None:
    table, goals = policies.against_all(
        policies.settings({"chat": policies.chat_mix()}, ["A"]), policies.LOADS, seeds=2
    )
    assert len(table) == 2 + len(policies.LOADS)
    assert all(line.count("|") == 7 + 2 + 1 for line in table)
    assert [line.split("|")[1].strip() for line in goals] == [
        "A, chat: throughput at once",
        "worst latency over `capacity-weighted`",
        "worst throughput over `capacity-weighted`",
    ]


def test_a_goal_is_met_or_missed_by_its_figure() -> None:
    same = policies.Comparison(1.0, 1.0, 0.0)
    good = policies.Comparison(0.8, 1.5, 0.0)
    for mean, verdicts in ((same, ["**no**", "**no**"]), (good, ["yes", "yes"])):
        seen = {("B", "chat", load, "paper"): mean for load in (0.9, math.inf)}
        seen |= {("B", "chat", load, "capacity-weighted"): same for load in (0.9, math.inf)}
        lines = policies.goals(seen)
        assert [line.split("|")[4].strip() for line in lines[:2]] == verdicts


def test_what_is_believed_changes_no_engine() -> None:
    (setting,) = policies.settings({"chat": policies.chat_mix()}, ["A"])
    wrong = setting.believing([2.0, 1.0]).experiment.instances
    right = setting.experiment.instances
    assert [i.profile for i in wrong] == [i.profile for i in right]
    assert wrong[0].believed is not None
    assert wrong[0].believed.constants.p8 == 2 * right[0].profile.constants.p8
    assert wrong[1].believed == right[1].profile
