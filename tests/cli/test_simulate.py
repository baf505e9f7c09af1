"""``simulate``: flags, the table, the document, and one-line errors."""

import json
import math
from pathlib import Path

import pytest

from hetero_gateway.cli import main
from hetero_gateway.core.lengths.length_model import ANY_MODEL, Leaf, LengthModel
from hetero_gateway.files.length_model_file import write_length_model
from tests.fakes.gateway_files import write

CLUSTER = """
instances:
  - {id: big, profile: V100-32GB-NVLink2/Llama-3-8B/tp4}
  - {id: small, profile: V100-32GB-NVLink2/Llama-3-8B/tp1}
"""
# A mix so short that a run takes little time.
WORKLOAD = """
workload:
  prompt: {median: 64, sigma: 0.5, max: 256}
  output: {median: 16, sigma: 0.5, max: 64}
"""
TRACE = "arrival_s,input_tokens,output_tokens\n1,20,5\n2,30,6\n4,40,7\n9,50,8\n"


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the instances do alone takes little time to find."""
    monkeypatch.setattr("hetero_gateway.sim.experiment._BOUND_REQUESTS", 600)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    return write(tmp_path / "cluster.yaml", CLUSTER + WORKLOAD)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.csv", TRACE)


@pytest.fixture
def run(run):
    """On a cluster; short, unless it is said how long."""

    def simulate(path, *flags, code=0):
        small = () if "--count" in flags or "--requests" in flags else ("--count", "40")
        seeds = () if "--seeds" in flags else ("--seeds", "2")
        return run("simulate", "-c", path, *small, *seeds, *flags, code=code)

    return simulate


# What comes out


def test_the_document_has_its_fixed_keys(cluster, document):
    told = document(cluster, "--policy", "round-robin,capacity-weighted", "--rate", "8,inf")
    assert [(r["policy"], r["rate"]) for r in told["results"]] == [
        ("round-robin", 8.0),
        ("capacity-weighted", 8.0),
        ("round-robin", "inf"),
        ("capacity-weighted", "inf"),
    ]
    for result in told["results"]:
        assert result["seeds"] == 2
        assert result["throughput_tokens_per_s"]["mean"] > 0
        assert result["throughput_tokens_per_s"]["sd"] >= 0
        for key in ("latency_s", "ttft_s", "tpot_s"):
            assert 0 < result[key]["p50"] <= result[key]["p99"]
        assert result["ttft_s"]["mean"] < result["latency_s"]["mean"]
        assert 0 < result["share_of_bound"] < 1.2
        assert [i["id"] for i in result["instances"]] == ["big", "small"]
        assert sum(i["requests"] for i in result["instances"]) == 40
        assert max(i["completion_s"] for i in result["instances"]) > 0
    assert told["bound_tokens_per_s"] == pytest.approx(
        sum(i["bound_tokens_per_s"] for i in told["instances"])
    )


def test_the_tables_go_to_stdout_and_the_progress_to_stderr(cluster, run):
    out, err = run(cluster, "--policy", "round-robin,min-max", "--rate", "5")
    for word in ("2 instances", "5 requests/s", "tokens/s", "of bound", "TTFT", "TPOT", "spread"):
        assert word in out
    assert out.count("round-robin") == out.count("min-max") == 1
    assert "refused" not in out
    assert err.splitlines() == [
        "round-robin, 5 requests/s: 2 runs",
        "min-max, 5 requests/s: 2 runs",
    ]


def test_the_load_that_is_held_is_printed_where_it_is_asked_for(
    cluster, monkeypatch, run, document
):
    monkeypatch.setattr("hetero_gateway.cli.simulate.can_compile", lambda: False)
    flags = ("--policy", "finish-time,round-robin", "--load", "0.5", "--seeds", "1")
    flags += ("--slo-tpot", "0.03")
    told = document(cluster, *flags, "--heed-slo", "--held")
    assert told["heeds_slo"] is True
    for loads in told["held"].values():
        assert 2 >= loads["0.9"] >= loads["0.95"] >= loads["0.99"] >= 0
    assert told["held"].keys() == {"finish-time", "round-robin"}
    assert "Highest load" in run(cluster, *flags, "--held").out
    assert "held" not in document(cluster, *flags)


def test_the_same_seeds_give_the_same_document(cluster, document):
    flags = ("--policy", "min-max,paper", "--rate", "6")
    assert document(cluster, *flags) == document(cluster, *flags)


def test_single_instance_means_the_first_one(cluster, document):
    told = document(cluster, "--policy", "single-instance", "--rate", "inf")
    assert [i["requests"] for i in told["results"][0]["instances"]] == [40, 0]
    assert told["results"][0]["completion_spread"]["mean"] == 1


# Split requests

SPLIT = """
instances:
  - {id: big, profile: V100-32GB-NVLink2/Llama-3-8B/tp4}
  - {id: small, profile: V100-32GB-NVLink2/Llama-3-8B/tp1, count: 2}
workload:
  prompt: {median: 1500, sigma: 0.5, max: 4000}
  output: {median: 40, sigma: 0.5, max: 100}
transfer: {gbit_per_s: 100}
"""
TIGHT = ("--load", "0.8", "--slo-tpot", "0.03", "--heed-slo", "--seeds", "1")


def test_what_splitting_brings_stands_beside_the_same_without(tmp_path, document, run):
    path = write(tmp_path / "split.yaml", SPLIT)
    flags = ("--policy", "finish-time,round-robin", *TIGHT)
    told = document(path, *flags)
    split, unsplit, other = told["results"]
    assert [r["policy"] for r in told["results"]] == [
        "finish-time", "finish-time unsplit", "round-robin",
    ]  # fmt: skip
    assert split["split_share"] > 0.3
    assert unsplit["split_share"] == other["split_share"] == 0
    assert split["slo_share"]["mean"] > unsplit["slo_share"]["mean"]
    assert split["latency_s"]["mean"] < unsplit["latency_s"]["mean"]
    assert told["transfer"]["kv_bytes_per_token"] == 131072
    (roles,) = told["roles"]
    legs = roles["legs"]
    assert roles["splits"]
    assert set(legs) == {"big", "small-0", "small-1"}
    off = document(path, *flags, "--split", "off")
    assert [r["policy"] for r in off["results"]] == ["finish-time", "round-robin"]
    assert off["results"][0] | {"policy": ""} == unsplit | {"policy": ""}
    assert "roles" not in off
    out, _ = run(path, *flags)
    prompts, answers = (
        ", ".join(sorted(i for i in legs if legs[i] == leg)) for leg in ("prefill", "decode")
    )
    assert f"prompts on {prompts}; answers on {answers}" in out


def test_over_slow_links_nothing_is_split(tmp_path, document):
    text = SPLIT.replace("gbit_per_s: 100", "gbit_per_s: 0.1")
    told = document(write(tmp_path / "slow.yaml", text), "--policy", "finish-time", *TIGHT)
    assert told["roles"] == [{"rate": told["results"][0]["rate"], "splits": False, "legs": {}}]
    figures = [{**r, "policy": ""} for r in told["results"]]
    assert figures[0] == figures[1]


def test_who_hands_prompts_over_cannot_die(tmp_path, run):
    text = SPLIT + "faults: [{instance: big, kind: dead, start_s: 1}]\n"
    path = write(tmp_path / "dead.yaml", text)
    assert "faults: instances that hand prompts over" in run(path, "--load", "1", code=2).err
    run(path, "--load", "1", "--split", "off", "--policy", "round-robin")


# Rates


def test_without_rates_two_loads_and_everything_at_once_are_run(cluster, document):
    told = document(cluster, "--policy", "round-robin")
    assert [(r["load"], r["rate"] == "inf") for r in told["results"]] == [
        (0.7, False),
        (0.9, False),
        (None, True),
    ]


def test_a_load_is_a_rate_whose_output_is_that_share_of_the_bound(cluster, document):
    told = document(cluster, "--policy", "round-robin", "--load", "0.5", "--rate", "3")
    by_load, by_rate = told["results"]
    offered = by_load["rate"] * told["mix"]["mean_output_tokens"]
    assert offered == pytest.approx(0.5 * told["bound_tokens_per_s"])
    assert (by_rate["rate"], by_rate["load"]) == (3.0, None)


def test_a_traces_own_times_are_kept_unless_a_rate_is_given(cluster, trace, tmp_path, document):
    without_mix = write(tmp_path / "plain.yaml", CLUSTER)
    flags = ("--policy", "round-robin", "--requests", str(trace))
    own = document(without_mix, *flags)
    assert own["arrivals"] == "trace"
    assert own["mix"]["requests"] == 4
    assert own["results"][0]["rate"] == pytest.approx(3 / 8)
    assert max(i["completion_s"] for i in own["results"][0]["instances"]) > 8
    first = document(without_mix, *flags, "--count", "2")
    assert (first["mix"]["requests"], first["results"][0]["rate"]) == (2, 1.0)
    stretched = document(without_mix, *flags, "--arrivals", "trace", "--rate", "100")
    assert stretched["results"][0]["rate"] == 100
    assert stretched["arrivals"] == "trace"
    drawn = document(without_mix, *flags, "--rate", "100", "--count", "30")
    assert drawn["arrivals"] == "random"
    assert drawn["mix"]["requests"] == 30


def test_the_flag_wins_over_the_files_trace(trace, tmp_path, document):
    write(tmp_path / "other.csv", "input_tokens,output_tokens\n9,3\n")
    cluster = write(tmp_path / "c.yaml", CLUSTER + "workload: {requests: other.csv}\n")
    flags = ("--policy", "round-robin", "--rate", "9")
    assert document(cluster, *flags)["mix"]["mean_output_tokens"] == 3
    flags += ("--requests", str(trace))
    assert document(cluster, *flags)["mix"]["mean_output_tokens"] == pytest.approx(6.5, rel=0.02)


# Failures


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--policy", "min-mx"), "no policy is named 'min-mx'; did you mean min-max?"),
        (("--policy", "zzz"), "there are "),
        (("--requests", "nowhere.csv"), "nowhere.csv: cannot be read"),
        (("--arrivals", "trace"), "there is no trace; give --requests"),
        (("--max-batched-tokens", "100"), "raise --max-batched-tokens"),
        (("--report", "no/such/folder/r.html"), "its folder does not exist"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(cluster, flags, said, error):
    assert said in error(cluster, *flags)


def test_a_trace_without_times_cannot_give_them(cluster, tmp_path, error):
    trace = write(tmp_path / "t.csv", "input_tokens,output_tokens\n9,3\n")
    flags = ("--requests", str(trace), "--arrivals", "trace")
    assert f"{trace}: --arrivals trace: it has no column arrival_s" in error(cluster, *flags)


def test_a_wrong_cluster_file_names_the_file_and_the_key(tmp_path, error):
    path = write(tmp_path / "c.yaml", "instances: [{profile: no-such-gpu}]\n")
    assert f"{path}: instances.0.profile: no profile is named" in error(path)


@pytest.mark.parametrize(
    "flags",
    [
        ("--rate", "0"),
        ("--rate", "nan"),
        ("--rate", "x"),
        ("--rate", ""),
        ("--load", "inf"),
        ("--load", "-1"),
        ("--policy", "a,,b"),
        ("--seeds", "0"),
        ("--count", "0"),
        ("--slo-ttft", "0"),
        ("--scheduling", "static"),
        ("--predictor", "magic"),
    ],
)
def test_a_flag_out_of_range_is_a_usage_error(cluster, flags, run):
    assert flags[0] in run(cluster, *flags, code=2).err


def test_help_has_an_example(run):
    assert "hetero-gateway simulate -c" in run("", "--help").out


# What the real engines and the real scheduler do with it


def test_requests_that_fit_nowhere_are_refused_and_shown(tmp_path, run, document):
    trace = write(tmp_path / "t.csv", "input_tokens,output_tokens\n900000,5\n10,5\n")
    path = write(tmp_path / "c.yaml", CLUSTER)
    flags = ("--requests", str(trace), "--in-order", "--count", "10", "--rate", "20")
    told = document(path, *flags, "--policy", "min-max", "--predictor", "oracle")
    assert told["results"][0]["refused"] == 5
    out = run(path, *flags, "--policy", "min-max", "--predictor", "oracle").out
    assert "refused" in out


def test_when_nothing_finishes_the_exit_code_is_1(tmp_path, document, error):
    trace = write(tmp_path / "t.csv", "input_tokens,output_tokens\n900000,5\n")
    path = write(tmp_path / "c.yaml", CLUSTER)
    flags = ("--requests", str(trace), "--rate", "5", "--count", "3", "--policy", "min-max")
    told = document(path, *flags, code=1)
    assert told["results"][0]["latency_s"]["mean"] is None
    assert "fits any instance" in error(
        path, "--requests", str(trace), "--load", "0.5", "--policy", "min-max"
    )


def test_a_dead_instance_loses_what_it_had(tmp_path, document):
    path = tmp_path / "c.yaml"
    faults = "faults: [{instance: big, kind: dead, start_s: 0.5}]\n"
    path.write_text(CLUSTER + WORKLOAD + faults, encoding="utf-8")
    told = document(path, "--policy", "round-robin", "--rate", "20", "--count", "60")
    (result,) = told["results"]
    assert told["faults"] == 1
    assert result["lost"] > 0
    assert result["slo_share"]["mean"] < 1
    done = [i["requests"] for i in result["instances"]]
    assert sum(done) + result["lost"] + result["refused"] == 60
    assert done[1] > 4 * done[0]


def test_min_max_beats_round_robin_on_unequal_instances(tmp_path, document):
    path = write(tmp_path / "c.yaml", CLUSTER)
    flags = ("--policy", "min-max,round-robin", "--rate", "inf", "--count", "300")
    ours, turns = document(path, *flags)["results"]
    assert ours["throughput_tokens_per_s"]["mean"] > 1.2 * turns["throughput_tokens_per_s"]["mean"]
    assert math.isclose(sum(i["requests"] for i in ours["instances"]), 300)
    assert ours["completion_spread"]["mean"] < turns["completion_spread"]["mean"]


def test_a_trained_predictor_is_read_from_its_file(cluster, tmp_path, document, error):
    path = tmp_path / "predictor.json"
    write_length_model(path, LengthModel({ANY_MODEL: Leaf(16.0, 100)}), {})
    flags = ("--predictor", "trained", "--predictor-file", str(path), "--rate", "inf")
    told = document(cluster, "--policy", "min-max", *flags)
    assert told["predictor"] == "trained"
    assert told["results"][0]["throughput_tokens_per_s"]["mean"] > 0
    path.write_text("{}")
    assert "predictor.json: format is missing" in error(cluster, *flags).replace("document: ", "")


@pytest.mark.parametrize(
    "flags", [("--predictor", "trained"), ("--predictor-file", "p.json")], ids=["kind", "file"]
)
def test_a_trained_predictor_and_its_file_belong_together(cluster, flags, error):
    assert "--predictor trained needs --predictor-file" in error(cluster, *flags)


RECORD = (
    '{"record":1,"policy":"min-max","started_s":5.0,"unix_s":1.0}\n'
    '{"instance":"a","weight":1.0,"profile":{"gpu":"g","model":"m","tensor_parallel":1,'
    '"constants":[1e-5,0,0,0.01,1e-8,1e-4,0,0.01,0],"kv_capacity_tokens":9000,"max_num_seqs":8}}\n'
    '{"instance":"big","weight":1.0}\n'
    '{"at":7.0,"model":"m","in":70,"out":11,"predicted":5.5,"outcome":"completed","instance":"a",'
    '"placed":7.0,"first":7.1,"end":7.3,"stream":true}\n'
    '{"at":7.5,"model":"m","in":70,"out":20,"predicted":5.5,"outcome":"completed",'
    '"instance":"big","placed":7.5,"first":7.6,"end":9.0,"n":2,"stream":true}\n'
    '{"at":7.6,"model":"m","in":70,"out":0,"predicted":5.5,"outcome":"rejected","end":7.7}\n'
)


def test_a_record_is_printed_beside_its_simulation(cluster, tmp_path, capsys):
    record = write(tmp_path / "run.jsonl", RECORD)
    words = ("simulate", "-c", str(cluster), "--against", str(record))
    assert main([*words]) == 0
    text = capsys.readouterr().out
    for said in (
        *("min-max, 3 requests", "1 requests without an answer in tokens are left out."),
        *("as placed", "by min-max"),
    ):
        assert said in text
    assert main([*words, "--policy", "round-robin,least-requests"]) == 0
    text = capsys.readouterr().out
    assert text.count("by round-robin") == text.count("by least-requests") == 2
    assert main([*words, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert list(found["policies"]) == ["min-max"]
    assert found["measured"]["ttft_s"]["mean"] == pytest.approx(0.1)
    assert found["as_placed"]["requests"] == found["by_policy"]["requests"] == 3
    # 0.01 + 70·1e-5 s for the prompt, and ten steps of somewhat more than 0.0101 s.
    on_a = found["instances"][0]["as_placed"]
    assert on_a["ttft_s"]["mean"] == pytest.approx(0.0107, abs=1e-4)
    assert on_a["latency_s"]["mean"] == pytest.approx(0.1117, abs=1e-3)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "no profile for big"),
        (("--rate", "3"), "takes no --rate"),
    ],
)
def test_a_record_that_cannot_be_simulated_says_why(tmp_path, capsys, flags, says):
    record = write(tmp_path / "run.jsonl", RECORD)
    assert main(["simulate", "--against", str(record), *flags]) != 0
    assert says in capsys.readouterr().err


def test_classes_are_told_apart_and_the_interactive_ones_wait_less(cluster, document):
    cluster.write_text(CLUSTER.replace("tp4}", "tp4, max_num_seqs: 4}").replace(
        "tp1}", "tp1, max_num_seqs: 4}") + WORKLOAD, encoding="utf-8")  # fmt: skip
    flags = ("--policy", "finish-time", "--rate", "inf", "--batch-share", "0.5", "--count", "100")
    ttft_s = {}
    for queue in ("fifo", "classes", "shortest"):
        found = document(cluster, "--queue", queue, *flags)
        assert found["queue"] == queue
        classes = found["results"][0]["classes"]
        assert set(classes) == {"interactive", "batch"}
        ttft_s[queue] = {name: rows["ttft_s"]["mean"] for name, rows in classes.items()}
    assert ttft_s["classes"]["interactive"] < 0.75 * ttft_s["fifo"]["interactive"]
    assert ttft_s["classes"]["batch"] > ttft_s["fifo"]["batch"]
    assert ttft_s["shortest"]["batch"] < ttft_s["fifo"]["batch"]
