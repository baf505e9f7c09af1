"""What decisions and pumps cost: the scripts place what they say they place."""

from __future__ import annotations

import json

import pytest

from benchmarks.scheduling import decision, pump


def test_every_policy_decides_at_every_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision, "DECISIONS_PER_ROUND", 20)
    monkeypatch.setattr(decision, "ROUNDS", 2)
    decision.main(["--instances", "2,20", "--json"])
    document = json.loads(capsys.readouterr().out)
    cells = [(row["policy"], row["instances"]) for row in document["results"]]
    assert cells == [("finish-time", 2), ("finish-time", 20), ("min-max", 2), ("min-max", 20)]
    for row in document["results"]:
        assert 0 < row["choose_us"]
        assert 0 < row["request_us"]


@pytest.mark.parametrize("queue", [False, True])
def test_a_full_cluster_stays_full(queue: bool) -> None:
    row = pump.measure("finish-time", 2, 50, queue=queue)
    assert row["placed"] == 50
    assert row["running"] >= 2 * pump.RUNNING_EACH


def test_an_unknown_policy_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decision.main(["--policies", "min-max,fastest"])
    assert "no policy fastest" in capsys.readouterr().err
