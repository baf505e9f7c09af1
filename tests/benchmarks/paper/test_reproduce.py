"""The paper's experiments, in small: what is drawn, what is compared, and what the page says."""

import dataclasses
import math
import re

import numpy as np
import pytest

from benchmarks.paper import experiments as ex
from benchmarks.paper import reproduce
from benchmarks.paper.lengths import CONVERSATIONS, FIRST_TURNS, Moments, Source
from benchmarks.paper.report import CLAIMS, ScanPoint, crossing
from hetero_gateway.sim import alone
from hetero_gateway.sim.workload import TraceLengths

EQUAL = Source("equal", TraceLengths(np.full(100, 300), np.full(100, 100)))
SHORT = Source("short", TraceLengths(np.arange(20, 220), np.arange(200, 0, -1)))


@pytest.mark.parametrize("named", [CONVERSATIONS.outputs, FIRST_TURNS.prompts, Moments(9, 3, 20)])
def test_a_log_normal_has_the_mean_and_sd_that_it_names_before_the_cut(named):
    uncut = dataclasses.replace(named, cut=10**9).log_normal()
    tokens = uncut.draw(400_000, np.random.default_rng(0))
    assert tokens.mean() == pytest.approx(named.mean, rel=0.02)
    assert tokens.std() == pytest.approx(named.sd, rel=0.06)
    assert named.log_normal().draw(10_000, np.random.default_rng(0)).max() <= named.cut


@pytest.mark.parametrize("mix", reproduce.MIXES)
def test_a_mix_fits_the_context_and_is_the_same_each_time(mix):
    pool = mix.source().lengths
    assert (pool.prompt_tokens + pool.output_tokens).max() <= 8192
    assert min(pool.prompt_tokens.min(), pool.output_tokens.min()) >= 1
    assert np.array_equal(pool.prompt_tokens, mix.source().lengths.prompt_tokens)


def test_another_link_changes_the_v100s_and_nothing_else():
    for name in ("A", "B"):
        nvlink, pcie = (ex.paper_cluster(name, link).instances for link in reproduce.LINKS)
        assert [i.instance_id for i in nvlink] == [i.instance_id for i in pcie]
        assert [i.weight for i in nvlink] == [i.weight for i in pcie]
        for a, b in zip(nvlink, pcie, strict=True):
            assert b.profile.name == a.profile.name.replace("NVLink2", "PCIe3")
            assert a.believed == a.profile
            assert b.believed == b.profile
    assert [i.weight for i in ex.paper_cluster("A", "NVLink2").instances] == [4, 1]


def test_equal_instances_in_turn_are_done_together():
    a = ex.paper_cluster("A", "NVLink2")
    twins = dataclasses.replace(
        a, instances=(a.instances[0], dataclasses.replace(a.instances[0], instance_id="other"))
    )
    result = ex.run(twins, EQUAL, math.inf, ex.RR_TURNS, 0, 40)
    assert [i.requests for i in result.instances] == [20, 20]
    assert result.completion_spread == pytest.approx(0)
    last_s = result.instances[0].completion_s
    assert result.total_tokens_per_s == pytest.approx(40 * 400 / last_s)


def test_policies_get_the_same_requests_and_a_seed_repeats():
    a = ex.paper_cluster("A", "PCIe3")
    first, second = (ex.run(a, SHORT, 8.0, ex.SI, 3, 60) for _ in range(2))
    assert np.array_equal(first.latencies_s, second.latencies_s)
    assert [i.requests for i in first.instances] == [60, 0]
    # SI puts everything on the first instance, whatever the second one is like.
    slowed = a.slowed((1,), 5.0)
    third = ex.run(slowed, SHORT, 8.0, ex.SI, 3, 60)
    assert np.array_equal(first.latencies_s, third.latencies_s)
    assert ex.run(slowed, SHORT, 8.0, ex.OS, 3, 60).instances[1].requests < 60


def test_a_slowed_cluster_is_slower_by_that_factor():
    a = ex.paper_cluster("A", "NVLink2")
    before, after = (
        ex.compare(c, SHORT, (), (), 1, 40).solo_tokens_per_s for c in (a, a.slowed((1,), 2.0))
    )
    assert after[0] == before[0]
    assert after[1] == pytest.approx(before[1] / 2)


def test_gains_are_of_pairs_with_the_same_seed():
    comparison = ex.compare(
        ex.paper_cluster("A", "NVLink2"), SHORT, (ex.RR, ex.OS), (math.inf,), 3, 40
    )
    ratios = [
        os.total_tokens_per_s / rr.total_tokens_per_s - 1
        for os, rr in zip(
            comparison.runs["OS", math.inf], comparison.runs["RR", math.inf], strict=True
        )
    ]
    assert comparison.gain("OS", "RR", math.inf)[0] == pytest.approx(sum(ratios) / 3)
    assert comparison.gain("RR", "RR", math.inf) == (0, 0)


def test_a_refused_request_is_an_error():
    a = ex.paper_cluster("A", "NVLink2")
    small = dataclasses.replace(a.instances[0].profile, kv_capacity_tokens=200)
    tiny = dataclasses.replace(
        a, instances=(dataclasses.replace(a.instances[0], profile=small, believed=small),)
    )
    with pytest.raises(RuntimeError, match="refused"):
        ex.run(tiny, EQUAL, math.inf, ex.RR, 0, 5)


def test_rankings_hold_every_t_and_share_t_1_between_the_links():
    nvlink, pcie = ex.simulated_ranking(SHORT, ("NVLink2", "PCIe3"), 0, 20)
    assert sorted(nvlink.order) == sorted(pcie.order) == [1, 2, 4, 8]
    assert nvlink.tokens_per_s[1] == pcie.tokens_per_s[1]
    assert nvlink.tokens_per_s[8] > pcie.tokens_per_s[8]
    padded, unpadded = (
        ex.estimated_ranking(SHORT, "NVLink2", 0, estimator=e, mha=True, count=50)
        for e in ("paper", "unpadded")
    )
    assert all(unpadded.tokens_per_s[t] >= padded.tokens_per_s[t] for t in (1, 2, 4, 8))


def test_the_crossing_is_interpolated():
    points = [ScanPoint(f, r, {"OS": g}) for f, r, g in ((1, 2.0, 0.5), (2, 4.0, 1.5), (3, 6, 2))]
    assert crossing(points, "OS", 1.0) == pytest.approx(3.0)
    assert crossing(points, "OS", 0.4) == 2.0
    assert crossing(points, "OS", 2.5) is None


@pytest.mark.system
def test_the_page_has_every_claim_and_nothing_that_is_no_number(tmp_path, monkeypatch):
    monkeypatch.setattr("hetero_gateway.sim.experiment._BOUND_REQUESTS", 100)
    monkeypatch.setattr(alone, "_BATCHES", 2)
    monkeypatch.setattr(reproduce, "SCAN_A", (1.0, 2.0))
    monkeypatch.setattr(reproduce, "SCAN_B", (1.0,))
    trace = tmp_path / "some trace.csv"
    rows = "".join(f"{i},{o}\n" for i, o in zip(range(20, 140), range(140, 20, -1), strict=True))
    trace.write_text("input_tokens,output_tokens\n" + rows, encoding="utf-8")
    page = tmp_path / "page.md"
    arguments = ["--seeds", "2", "--count", "20", "--requests", f"my trace={trace}"]
    assert reproduce.main([*arguments, "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    for claim, paper, _ in CLAIMS:
        assert f"| {claim} | {paper} |" in text
    assert not re.search(r"\bnan\b|\binf\b|None", text)
    assert str(tmp_path) not in text
    assert "scripts/reproduce --requests 'my trace=TRACE.csv'" in text
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({line.count("|") for line in block.splitlines()}) == 1, block


def test_a_missing_trace_is_one_line(tmp_path, capsys):
    assert reproduce.main(["--requests", str(tmp_path / "none.csv"), "-o", "-"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("reproduce: ")
    assert error.count("\n") == 1
