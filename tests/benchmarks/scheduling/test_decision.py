"""What decisions and pumps cost, also with many instances and in parts: the scripts do it."""

import json

import pytest

from benchmarks.scheduling import decision, large, pump, shards


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


@pytest.mark.parametrize("part", ["request", "chores", "memory", "probes"])
def test_every_figure_is_of_something(
    part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large, "REQUESTS_PER_ROUND", 5)
    monkeypatch.setattr(large, "PROBED", 4)
    monkeypatch.setattr(large, "PROBED_S", 0.5)
    assert large.main(["--instances", "3,20", "--only", part, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    assert {row["instances"] for row in found} == ({1} if part == "probes" else {3, 20})
    assert all((row["us"] or row["bytes"]) > 0 for row in found)


def test_deciding_in_parts_serves_every_request(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--instances 16 --requests 40 --loads 0.5 --parts 2 --drawn 1,2 --intervals 0.1"
    assert shards.main([*arguments.split(), "--dealt", "chance", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    by = [row["by"].strip() for row in found]
    assert by[:4] == ["one", "2 shards", "2 shards", "2 replicas"]
    assert by[4:] == ["samples"] * (len(by) - 5) + ["samples + last"]
    assert found[0]["mean"] == 1
    assert all(row["mean_s"] > 0 for row in found)


def test_by_kind_a_shard_has_one_kind() -> None:
    instances = shards.make_instances(16)
    order, block = shards.dealt(instances, 4, "kind")
    assert block == 4
    assert all(len({i.profile for i in order[k : k + 4]}) == 1 for k in range(0, 16, 4))
    assert shards.dealt(instances, 4, "turns") == (instances, 4)
