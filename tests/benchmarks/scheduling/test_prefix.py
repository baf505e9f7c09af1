"""Routers that know of prefix caches: their rules, on made-up candidates and in small runs."""

import numpy as np
import pytest

from benchmarks.scheduling import prefix, prefix_replicas
from benchmarks.scheduling.prefix_peers import RULES, Candidate
from benchmarks.scheduling.prefix_traces import main as make_trace

RNG = np.random.default_rng(0)


def candidate(position: int, **known) -> Candidate:
    fields = {
        "requests": 0, "match": 0, "queue": 0, "kv_usage": 0.0, "waiting_tokens": 0,
        "waiting_s": 0.0, "prefill_s": 1.0, "token_s": 0.001, "active_blocks": 0, "new_blocks": 0,
    }  # fmt: skip
    return Candidate(position, **{**fields, **known})


@pytest.mark.parametrize(
    ("rule", "first", "second", "chosen"),
    [
        ("cache-aware", {"match": 600, "requests": 30}, {}, 0),
        ("cache-aware", {"match": 500, "requests": 30}, {}, 1),  # not more than half
        ("cache-aware", {"match": 600, "requests": 34}, {"requests": 1}, 1),  # out of balance
        ("cache-aware", {"match": 600, "requests": 400}, {"requests": 365}, 0),  # within a tenth
        ("llm-d", {"match": 640, "kv_usage": 0.9}, {}, 0),
        ("llm-d", {"match": 400, "kv_usage": 0.9}, {}, 1),
        ("llm-d", {"match": 64}, {"match": 640}, 1),
        ("llm-d", {"queue": 3}, {"kv_usage": 0.9}, 1),
        ("dynamo", {"match": 640, "active_blocks": 30}, {"active_blocks": 0}, 0),
        ("dynamo", {"match": 640, "active_blocks": 50}, {"active_blocks": 0}, 1),
        ("dynamo", {"waiting_tokens": 160}, {"active_blocks": 9}, 1),
        ("cache-aware", {"match": 600, "requests": 3}, {"match": 600, "requests": 2}, 1),
        ("aibrix", {"match": 64, "requests": 30}, {"requests": 13}, 0),  # one σ above the mean
        ("aibrix", {"match": 64, "requests": 3}, {"match": 64}, 1),
        ("lmetric", {"match": 600, "requests": 2}, {"requests": 0}, 1),  # 3 · 400 to 1000
        ("lmetric", {"match": 600, "requests": 1}, {"requests": 0}, 0),
        ("lmetric", {"match": 600, "waiting_tokens": 700}, {}, 1),
        ("sticky", {"match": 800, "waiting_tokens": 18_000}, {}, 0),  # 18 s more of prompts
        ("sticky", {"match": 800, "waiting_tokens": 18_001}, {}, 1),
        ("sticky", {"match": 799, "waiting_tokens": 1}, {}, 1),
        ("least-ttft", {"prefill_s": 0.2, "waiting_s": 0.9}, {"prefill_s": 1.0}, 1),
    ],
)
def test_a_rule_chooses_as_its_source_says(rule, first, second, chosen):
    candidates = [candidate(0, **first), candidate(1, **second)]
    assert RULES[rule]().choose(candidates, 1000, RNG).position == chosen


def test_aibrix_leaves_out_those_above_the_mean_by_more_than_the_spread():
    loads = [8, 1, 1, 1]
    candidates = [candidate(i, requests=n, match=64 if i < 2 else 0) for i, n in enumerate(loads)]
    candidates[0].match = 640
    assert RULES["aibrix"]().choose(candidates, 1000, RNG).position == 1


def test_aibrix_matches_the_idlest_only_where_one_has_twice_the_mean_and_more():
    loads = [12, 2, 2, 1, 1]
    candidates = [
        candidate(i, requests=n, match=64 if i in (1, 4) else 0) for i, n in enumerate(loads)
    ]
    candidates[1].match = 640
    assert RULES["aibrix"]().choose(candidates, 1000, RNG).position == 4
    candidates[0].requests = 7
    assert RULES["aibrix"]().choose(candidates, 1000, RNG).position == 1


def test_every_router_serves_a_small_trace_and_nothing_is_run_twice(tmp_path, monkeypatch, capsys):
    path = tmp_path / "trace.jsonl.gz"
    assert make_trace(["agents", "-o", str(path), "--requests", "120", "--seed", "1"]) == 0
    monkeypatch.setattr(prefix, "can_compile", lambda: False)
    arguments = ["prefix", f"made={path}", "-o", str(tmp_path / "cells"), "--clusters", "A"]
    monkeypatch.setattr("sys.argv", [*arguments, "--loads", "0.7"])
    prefix.main()
    text = capsys.readouterr().out.partition("made on A")[2]
    assert all(f" {router} " in text for router in prefix.ROUTERS)
    assert "aware over the best peer" in text
    monkeypatch.setattr(prefix, "run", lambda *_: pytest.fail("it was run before"))
    prefix.main()
    assert capsys.readouterr().out.partition("made on A")[2] == text


def test_what_gateways_share_is_found_and_what_they_do_not_is_computed_again(tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_replicas, "can_compile", lambda: False)
    path = tmp_path / "trace.jsonl.gz"
    assert make_trace(["agents", "-o", str(path), "--requests", "150", "--seed", "1"]) == 0
    instances = prefix.load_instances("equal")
    rows = prefix.read_rows(path, 10**6, None)
    sessions = np.array([row.text.session for row in rows])
    workload = prefix.at_load(prefix.workload_of(rows), 6.0)
    cached = {
        way: prefix_replicas.run(way, instances, workload, sessions, 4, 0)[0].cached_share
        for way in ("one", *prefix_replicas.WAYS)
    }
    assert cached["at once"] == pytest.approx(cached["one"], abs=0.02)
    assert cached["exchanged"] == pytest.approx(cached["one"], abs=0.02)
    assert cached["affinity"] == pytest.approx(cached["one"], abs=0.04)
    assert cached["exchanged"] > cached["own"] + 0.03
    assert cached["own"] > cached["blind"]
