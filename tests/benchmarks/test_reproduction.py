"""The paper's experiments, in small: what is drawn, what is compared, and what the page says."""

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import reproduce
from benchmarks.reproduction import experiments as ex
from benchmarks.reproduction.lengths import CONVERSATIONS, FIRST_TURNS, Lengths, LogNormal
from benchmarks.reproduction.report import CLAIMS, ScanPoint, crossing

ROOT = Path(__file__).parents[2]
EQUAL = Lengths("equal", np.full(100, 300), np.full(100, 100))
SHORT = Lengths("short", np.arange(20, 220), np.arange(200, 0, -1))


@pytest.mark.parametrize("drawn", [CONVERSATIONS.outputs, FIRST_TURNS.prompts, LogNormal(9, 3, 20)])
def test_a_log_normal_has_the_mean_and_sd_that_it_names_before_the_cut(drawn):
    uncut = dataclasses.replace(drawn, cut=10**9)
    tokens = uncut.draw(400_000, np.random.default_rng(0))
    assert tokens.mean() == pytest.approx(drawn.mean, rel=0.02)
    assert tokens.std() == pytest.approx(drawn.sd, rel=0.06)
    assert drawn.draw(10_000, np.random.default_rng(0)).max() <= drawn.cut


@pytest.mark.parametrize("mix", reproduce.MIXES)
def test_a_mix_fits_the_context_and_is_the_same_each_time(mix):
    pool = mix.pool()
    assert (pool.prompt_tokens + pool.output_tokens).max() <= 8192
    assert min(pool.prompt_tokens.min(), pool.output_tokens.min()) >= 1
    assert np.array_equal(pool.prompt_tokens, mix.pool().prompt_tokens)


def test_a_sample_repeats_nothing_while_the_pool_lasts():
    prompts, outputs = SHORT.sample(200, np.random.default_rng(1))
    assert sorted(prompts) == list(range(20, 220))
    assert (prompts + outputs == 220).all()  # pairs stay together
    assert len(SHORT.sample(300, np.random.default_rng(1))[0]) == 300


@pytest.mark.parametrize("name", ["a", "b"])
def test_the_clusters_are_those_of_the_configuration(name):
    text = (ROOT / f"configs/clusters/paper-{name}.yaml").read_text(encoding="utf-8")
    named = re.findall(r"profile: (\S+), count: (\d+)(?:, weight: (\d+))?", text)
    wanted = [
        (profile, float(weight or 1)) for profile, count, weight in named for _ in range(int(count))
    ]
    cluster = {"a": ex.cluster_a, "b": ex.cluster_b}[name]("NVLink2")
    assert [(i.profile.name, i.weight) for i in cluster.instances] == wanted


def test_equal_instances_in_turn_are_done_together():
    a = ex.cluster_a("NVLink2")
    twins = dataclasses.replace(
        a, instances=(a.instances[0], dataclasses.replace(a.instances[0], instance_id="other"))
    )
    result = ex.run(twins, EQUAL, math.inf, ex.RR_TURNS, 0, 40)
    assert result.requests == (20, 20)
    assert result.spread == pytest.approx(0)
    assert result.tokens_per_s == pytest.approx(40 * 400 / max(result.completion_s))


def test_policies_get_the_same_requests_and_a_seed_repeats():
    first, second = (
        ex.run(ex.cluster_a("PCIe3"), SHORT, 8.0, choice, 3, 60) for choice in (ex.SI, ex.SI)
    )
    assert first == second
    assert first.requests == (60, 0)
    # SI puts everything on the first instance, whatever the second one is like.
    slowed = ex.cluster_a("PCIe3").slowed((1,), 5.0)
    assert ex.run(slowed, SHORT, 8.0, ex.SI, 3, 60) == first
    assert ex.run(slowed, SHORT, 8.0, ex.OS, 3, 60).requests[1] < 60


def test_a_slowed_cluster_is_slower_by_that_factor():
    a = ex.cluster_a("NVLink2")
    alone, slowed = (ex.solo_tokens_per_s(c, SHORT, 0, 50) for c in (a, a.slowed((1,), 2.0)))
    assert slowed[0] == alone[0]
    assert slowed[1] == pytest.approx(alone[1] / 2)


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


def test_the_page_has_every_claim_and_nothing_that_is_no_number(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "SCAN_A", (1.0, 2.0))
    monkeypatch.setattr(reproduce, "SCAN_B", (1.0,))
    trace = tmp_path / "some trace.csv"
    rows = "".join(f"{i},{o}\n" for i, o in zip(range(20, 140), range(140, 20, -1), strict=True))
    trace.write_text("input_tokens,output_tokens\n" + rows, encoding="utf-8")
    page = tmp_path / "page.md"
    arguments = ["--seeds", "2", "--count", "40", "--requests", f"my trace={trace}"]
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
