"""``plan``: the table, the document, the report, and one-line errors."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from hetero_gateway.cli import main
from hetero_gateway.planner import search
from hetero_gateway.sim import alone
from tests.fakes.planning import compiled_plans  # noqa: F401 - used by all

MACHINES = """
machines:
  - {id: v100-box, accelerator: V100-32GB-NVLink2, count: 4}
  - {id: t4-box, accelerator: T4-16GB, count: 2}
"""
# So short that a plan takes little time.
PLAN = """
model: Llama-3-8B
max_model_len: 1024
policy: capacity-weighted
engine: {max_num_seqs: 16}
workload:
  prompt: {median: 64, sigma: 0.5, max: 256}
  output: {median: 16, sigma: 0.5, max: 64}
"""


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "_REQUESTS", 600)
    monkeypatch.setattr(search, "_SYSTEMS", 3)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN + MACHINES, encoding="utf-8")
    return path


def document(capsys: pytest.CaptureFixture[str], path: Path, *flags: str) -> dict[str, Any]:
    assert main(["plan", "-c", str(path), "--json", *flags]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def error(capsys: pytest.CaptureFixture[str], path: Path, *flags: str, code: int = 2) -> str:
    assert main(["plan", "-c", str(path), *flags]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("hetero-gateway: ")
    return err


def test_the_document_has_its_fixed_keys(cluster, capsys):
    told = document(capsys, cluster)
    best = told["best"]
    assert [m["id"] for m in best["machines"]] == ["v100-box", "t4-box"]
    assert best["throughput_tokens_per_s"] > 0
    for machine, count in zip(best["machines"], (4, 2), strict=True):
        used = sum(i["tensor_parallel"] * i["count"] for i in machine["instances"])
        assert 0 < used <= count
        assert all(i["kv_capacity_tokens"] > 1024 for i in machine["instances"])
    assert told["candidates"][0] == best
    assert all(c["why_not"] for c in told["candidates"][1:])
    # 16 GB of weights do not fit a T4 of 16 GB; three does not divide 32 heads.
    reasons = {(i["machine"], i["tensor_parallel"]): i for i in told["infeasible"]}
    assert reasons["t4-box", 1]["shortfall_bytes"] > 0
    assert reasons["t4-box", 1]["remedies"]
    assert "heads" in reasons["v100-box", 3]["reason"]
    assert ("t4-box", 3) not in reasons
    assert {t["times"] for t in told["types"]} == {"derived"}


def prefix_trace(directory: Path) -> Path:
    """Prompts that have the first 20 of 24 blocks in common."""
    path = directory / "trace.jsonl.gz"
    rows = [
        {"t": i / 10, "in": 384 + i % 16, "out": 8 + i % 8, "b": [[0, 20], [100 + 4 * i, 4]]}
        for i in range(300)
    ]
    lines = [{"block_tokens": 16}, *rows]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    return path


def test_hits_in_prefix_caches_count_unless_they_are_not_to(cluster, tmp_path, capsys):
    one = "machines: [{id: a, accelerator: V100-32GB-NVLink2, count: 1}]"
    cluster.write_text(PLAN + one, encoding="utf-8")
    flags = ("--requests", str(prefix_trace(tmp_path)))
    told = document(capsys, cluster, *flags)
    assert 0.7 < told["best"]["cached_share"] < 320 / 384
    assert told["best"]["at_rate"]["cached_share"] > 0.7
    off = document(capsys, cluster, *flags, "--prefix-cache", "off")
    assert off["best"]["cached_share"] is None
    ratio = told["best"]["throughput_tokens_per_s"] / off["best"]["throughput_tokens_per_s"]
    assert ratio > 1.5
    assert [any("begin alike" in n for n in d["notes"]) for d in (told, off)] == [False, True]
    assert main(["plan", "-c", str(cluster), *flags]) == 0
    assert "% of the prompt tokens cached; " in capsys.readouterr().out


def test_the_table_fits_a_screen_and_says_why_the_others_lose(cluster, capsys):
    assert main(["plan", "-c", str(cluster)]) == 0
    out = capsys.readouterr().out
    assert "v100-box" in out
    assert "derived ± 15%" in out
    assert "GiB an accelerator too little; would help:" in out
    assert "why not" in out
    assert len(out.splitlines()) < 60


def test_a_trace_is_planned_for(cluster, tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("input_tokens,output_tokens\n100,50\n200,30\n", encoding="utf-8")
    told = document(capsys, cluster, "--requests", str(trace))
    assert told["mean_prompt_tokens"] == pytest.approx(150, rel=0.02)
    assert told["mean_output_tokens"] == pytest.approx(40, rel=0.02)


def test_the_fewest_accelerators_hold_a_rate(cluster, capsys):
    told = document(capsys, cluster, "--goal", "fewest", "--rate", "2", "--ttft-p99", "5")
    assert told["best"]["holds"] is True
    assert told["best"]["accelerators"] == 1
    assert told["best"]["at_rate"]["ttft_s"]["p99"] <= 5
    assert told["rate_per_s"] == 2


def test_goodput_is_in_the_document_the_table_and_the_report(cluster, tmp_path, capsys):
    limits = ("--slo-ttft", "2", "--slo-tpot", "0.1", "--slo-share", "0.9")
    told = document(capsys, cluster, "--goal", "goodput", *limits)
    best = told["best"]
    assert told["slo"] == {"ttft_s": 2.0, "tpot_s": 0.1, "share": 0.9}
    assert best["goodput_per_s"] == told["rate_per_s"] > 0
    tokens = told["mean_prompt_tokens"] + told["mean_output_tokens"]
    assert best["goodput_tokens_per_s"] == pytest.approx(best["goodput_per_s"] * tokens)
    assert best["at_rate"]["slo_share"] >= 0.9
    page = tmp_path / "plan.html"
    args = ["plan", "-c", str(cluster), "--goal", "goodput", *limits, "--report", str(page)]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "goodput/s" in out
    assert "(90 % within TTFT 2 s, TPOT 100 ms)" in out
    assert "<th>goodput/s</th>" in page.read_text("utf-8")


def test_offers_are_bought_for_a_rate(tmp_path, capsys):
    path = tmp_path / "offers.yaml"
    path.write_text(
        "model: Llama-3-8B\nmax_model_len: 2048\noffers:\n"
        "  - {accelerator: T4-16GB, count: 2, price_per_hour_usd: 1.5, at_most: 2}\n"
        "  - {accelerator: V100-32GB-NVLink2, count: 1, price_per_hour_usd: 1.2, at_most: 3}\n"
        "workload: {rate_per_s: 3}\nslo: {ttft_s: 2, tpot_s: 0.2}\n",
        encoding="utf-8",
    )
    told = document(capsys, path)
    used = [m for m in told["best"]["machines"] if m["instances"]]
    assert told["goal"] == "cost"
    assert told["best"]["usd_per_hour"] == pytest.approx(
        sum({"T4-16GB": 1.5, "V100-32GB-NVLink2": 1.2}[m["accelerator"]] for m in used)
    )
    assert 0 < told["lower_bound"] <= told["best"]["usd_per_hour"]
    assert main(["plan", "-c", str(path)]) == 0
    assert "per hour" in capsys.readouterr().out
    assert main(["validate", "-c", str(path)]) == 0
    assert "valid for plan" in capsys.readouterr().out


def test_goodput_without_limits_is_one_line(cluster, capsys):
    assert main(["plan", "-c", str(cluster), "--goal", "goodput"]) == 2
    assert "--slo-ttft" in capsys.readouterr().err


def test_a_rate_that_nothing_holds_is_a_failure(cluster, capsys):
    text = error(capsys, cluster, "--goal", "fewest", "--rate", "1e6", code=1)
    assert "nothing holds" in text


def test_the_same_file_gives_the_same_plan(cluster, capsys):
    first, again = document(capsys, cluster), document(capsys, cluster)
    assert first["best"] == again["best"]
    assert first["candidates"] == again["candidates"]


def test_the_report_is_one_page_without_addresses(cluster, tmp_path, capsys):
    pytest.importorskip("plotly")
    target = tmp_path / "plan.html"
    assert main(["plan", "-c", str(cluster), "--report", str(target)]) == 0
    page = target.read_text(encoding="utf-8")
    assert "{{" not in page.split("<script", 1)[0]
    assert "default-src 'none'" in page
    assert 'src="http' not in page
    for part in ("v100-box", "Not deployable", 'id="pareto"', 'id="memory"'):
        assert part in page


def test_a_report_that_cannot_be_written_fails_before_the_search(cluster, tmp_path, capsys):
    assert "folder" in error(capsys, cluster, "--report", str(tmp_path / "no" / "plan.html"))


def test_a_model_that_fits_no_machine_is_one_line(tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "model: Llama-3-70B\nmachines: [{id: t4, accelerator: T4-16GB, count: 2}]\n",
        encoding="utf-8",
    )
    text = error(capsys, path)
    assert "fits no machine" in text
    assert "T4-16GB" in text


def test_a_seed_below_0_is_one_line(cluster, capsys):
    assert "seed" in error(capsys, cluster, "--seed", "-1")


def test_an_unknown_policy_is_one_line(cluster, capsys):
    assert "policy" in error(capsys, cluster, "--policy", "fastest")


def test_validate_takes_a_plan(cluster, capsys):
    assert main(["validate", "-c", str(cluster)]) == 0
    assert "valid for plan" in capsys.readouterr().out
    assert main(["validate", "-c", str(cluster), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], [m["id"] for m in told["machines"]]) == ("plan", ["v100-box", "t4-box"])
