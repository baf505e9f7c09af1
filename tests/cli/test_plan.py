"""``plan``: the table, the document, the report, and one-line errors."""

import gzip
import json
from pathlib import Path

import pytest

from hetero_gateway.planner import search
from hetero_gateway.sim import alone
from tests.fakes.gateway_files import write
from tests.fakes.planning import compiled_plans  # noqa: F401 - used by all

MACHINES = """
machines:
  - {id: v100-box, accelerator: V100-32GB-NVLink2, count: 4}
  - {id: t4-box, accelerator: T4-16GB, count: 2}
"""
# So short that a plan takes little time.
SHORT = """
max_model_len: 1024
policy: capacity-weighted
engine: {max_num_seqs: 16}
workload:
  prompt: {median: 64, sigma: 0.5, max: 256}
  output: {median: 16, sigma: 0.5, max: 64}
"""
PLAN = "model: Llama-3-8B" + SHORT


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "_REQUESTS", 600)
    monkeypatch.setattr(search, "_SYSTEMS", 3)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    return write(tmp_path / "plan.yaml", PLAN + MACHINES)


def test_the_document_has_its_fixed_keys(cluster, document):
    told = document("plan", "-c", cluster)
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


def test_hits_in_prefix_caches_count_unless_they_are_not_to(cluster, tmp_path, run, document):
    one = "machines: [{id: a, accelerator: V100-32GB-NVLink2, count: 1}]"
    cluster.write_text(PLAN + one, encoding="utf-8")
    words = ("plan", "-c", cluster, "--requests", prefix_trace(tmp_path))
    told = document(*words)
    assert 0.7 < told["best"]["cached_share"] < 320 / 384
    assert told["best"]["at_rate"]["cached_share"] > 0.7
    off = document(*words, "--prefix-cache", "off")
    assert off["best"]["cached_share"] is None
    ratio = told["best"]["throughput_tokens_per_s"] / off["best"]["throughput_tokens_per_s"]
    assert ratio > 1.5
    assert [any("begin alike" in n for n in d["notes"]) for d in (told, off)] == [False, True]
    assert "% of the prompt tokens cached; " in run(*words).out


def test_what_splitting_would_bring_is_said_where_it_is_asked(cluster, run, document):
    assert "splitting" not in document("plan", "-c", cluster)
    cluster.write_text(PLAN + MACHINES + "transfer: {gbit_per_s: 25}\n", encoding="utf-8")
    told = document("plan", "-c", cluster)["splitting"]
    assert told["transfer"]["gbit_per_s"] == 25
    assert told["transfer"]["kv_bytes_per_token"] == 131072
    assert told["pays"] is False
    said = "over links of 25 Gbit/s does not pay: the policy capacity-weighted splits nothing."
    assert said in run("plan", "-c", cluster).out


def test_the_table_fits_a_screen_and_says_why_the_others_lose(cluster, run):
    out = run("plan", "-c", cluster).out
    said = ("v100-box", "derived ± 15%", "GiB an accelerator too little; would help:", "why not")
    assert [words for words in said if words not in out] == []
    assert len(out.splitlines()) < 60


def test_a_trace_is_planned_for(cluster, tmp_path, document):
    trace = write(tmp_path / "trace.csv", "input_tokens,output_tokens\n100,50\n200,30\n")
    told = document("plan", "-c", cluster, "--requests", trace)
    assert told["mean_prompt_tokens"] == pytest.approx(150, rel=0.02)
    assert told["mean_output_tokens"] == pytest.approx(40, rel=0.02)


def test_the_fewest_accelerators_hold_a_rate(cluster, document):
    told = document("plan", "-c", cluster, "--goal", "fewest", "--rate", "2", "--ttft-p99", "5")
    assert told["best"]["holds"] is True
    assert told["best"]["accelerators"] == 1
    assert told["best"]["at_rate"]["ttft_s"]["p99"] <= 5
    assert told["rate_per_s"] == 2


def test_goodput_is_in_the_document_the_table_and_the_report(cluster, tmp_path, run, document):
    limits = ("--slo-ttft", "2", "--slo-tpot", "0.1", "--slo-share", "0.9")
    words = ("plan", "-c", cluster, "--goal", "goodput", *limits)
    told = document(*words)
    best = told["best"]
    assert told["slo"] == {"ttft_s": 2.0, "tpot_s": 0.1, "share": 0.9}
    assert best["goodput_per_s"] == told["rate_per_s"] > 0
    tokens = told["mean_prompt_tokens"] + told["mean_output_tokens"]
    assert best["goodput_tokens_per_s"] == pytest.approx(best["goodput_per_s"] * tokens)
    assert best["at_rate"]["slo_share"] >= 0.9
    page = tmp_path / "plan.html"
    out = run(*words, "--report", page).out
    assert "goodput/s" in out
    assert "(90 % within TTFT 2 s, TPOT 100 ms)" in out
    assert "<th>goodput/s</th>" in page.read_text("utf-8")


def test_offers_are_bought_for_a_rate(tmp_path, run, document):
    path = tmp_path / "offers.yaml"
    path.write_text(
        "model: Llama-3-8B\nmax_model_len: 2048\noffers:\n"
        "  - {accelerator: T4-16GB, count: 2, price_per_hour_usd: 1.5, at_most: 2}\n"
        "  - {accelerator: V100-32GB-NVLink2, count: 1, price_per_hour_usd: 1.2, at_most: 3}\n"
        "workload: {rate_per_s: 3}\nslo: {ttft_s: 2, tpot_s: 0.2}\n",
        encoding="utf-8",
    )
    told = document("plan", "-c", path)
    used = [m for m in told["best"]["machines"] if m["instances"]]
    assert told["goal"] == "cost"
    assert told["best"]["usd_per_hour"] == pytest.approx(
        sum({"T4-16GB": 1.5, "V100-32GB-NVLink2": 1.2}[m["accelerator"]] for m in used)
    )
    assert 0 < told["lower_bound"] <= told["best"]["usd_per_hour"]
    assert "per hour" in run("plan", "-c", path).out
    assert "valid for plan" in run("validate", "-c", path).out


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--goal", "goodput"), 2, "--slo-ttft"),
        (("--goal", "fewest", "--rate", "1e6"), 1, "nothing holds"),
        (("--rate", "1e6"), 1, "nothing holds"),
        (("--report", "no/such/folder/plan.html"), 2, "folder"),
        (("--seed", "-1"), 2, "seed"),
        (("--policy", "fastest"), 2, "policy"),
    ],
)
def test_what_cannot_be_planned_is_one_line(cluster, error, flags, code, said):
    assert said in error("plan", "-c", cluster, *flags, code=code)


def test_the_report_is_one_page_without_addresses(cluster, tmp_path, run):
    target = tmp_path / "plan.html"
    run("plan", "-c", cluster, "--report", target)
    page = target.read_text(encoding="utf-8")
    assert "{{" not in page.split("<script", 1)[0]
    assert "default-src 'none'" in page
    assert 'src="http' not in page
    for part in ("v100-box", "Not deployable", 'id="pareto"', 'id="memory"'):
        assert part in page


def test_a_model_that_fits_no_machine_is_one_line(tmp_path, error):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "model: Llama-3-70B\nmachines: [{id: t4, accelerator: T4-16GB, count: 2}]\n",
        encoding="utf-8",
    )
    text = error("plan", "-c", path)
    assert "fits no machine" in text
    assert "T4-16GB" in text


def test_validate_takes_a_plan(cluster, run, document):
    assert "valid for plan" in run("validate", "-c", cluster).out
    told = document("validate", "-c", cluster)
    assert (told["kind"], [m["id"] for m in told["machines"]]) == ("plan", ["v100-box", "t4-box"])


# A file with checkpoints: a plan for each, and the one that serves the goal best

CHECKPOINTS = """
model: Llama-3.1-8B
checkpoints: [{name: Llama-3.1-8B, quantization: fp8}, Llama-3.1-8B-AWQ]
machines: [{id: box, accelerator: L4, count: 1}]
"""


def written(tmp_path: Path, text: str) -> Path:
    return write(tmp_path / "plan.yaml", text + SHORT)


def test_the_best_for_the_goal_is_taken(tmp_path, document):
    told = document("plan", "-c", written(tmp_path, CHECKPOINTS), "-o", tmp_path / "out")
    rows = told["checkpoints"]
    assert [row["storage"] for row in rows] == ["bfloat16", "fp8", "awq"]
    (chosen,) = [row for row in rows if row["chosen"]]
    most = max(row["throughput_tokens_per_s"] for row in rows)
    assert chosen["throughput_tokens_per_s"] == most
    assert chosen["storage"] != "bfloat16"
    assert told["best"]["throughput_tokens_per_s"] == most
    assert any("yours to judge" in note for note in told["notes"])
    # Whichever it is, clients ask for the model's name.
    command = (tmp_path / "out" / "commands" / "box.sh").read_text()
    assert "--served-model-name Llama-3.1-8B " in command


def test_one_that_has_no_plan_says_why(tmp_path, document):
    old = CHECKPOINTS.replace("accelerator: L4", "accelerator: V100-32GB")
    rows = document("plan", "-c", written(tmp_path, old))["checkpoints"]
    by_storage = {row["storage"]: row for row in rows}
    assert "fits no machine" in by_storage["fp8"]["reason"]
    assert not by_storage["fp8"]["chosen"]
    assert sum(row["chosen"] for row in rows) == 1


def test_without_any_plan_the_error_is_the_models(tmp_path, error):
    small = CHECKPOINTS.replace("Llama-3.1-8B", "Llama-3.1-405B")
    assert "fits no machine" in error("plan", "-c", written(tmp_path, small))
