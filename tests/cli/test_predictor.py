"""predictor fit: from a trace and from a running gateway; what it prints, writes, and refuses."""

import asyncio
import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from hetero_gateway.cli import main
from hetero_gateway.core.lengths.length_model import TrainedPredictor
from hetero_gateway.core.lengths.predictors import LengthFeatures
from hetero_gateway.files.length_model_file import read_length_model
from tests.fakes.running import config_for, running_gateway
from tests.fakes.vllm import fake_instances


def write_trace(tmp_path: Path, count: int = 2000, *, shuffled: bool = False) -> Path:
    """20 output tokens up to 700 of prompt, 400 above."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, 2000, count)
    rows = [f"{i},{p},{20 if p <= 700 else 400}" for i, p in enumerate(prompts)]
    if shuffled:
        rows = [rows[i] for i in rng.permutation(count)]
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return path


def predict(path: Path, prompt_tokens: int) -> float:
    return TrainedPredictor(read_length_model(path)).predict(LengthFeatures("", prompt_tokens))


def test_a_trace_gives_a_file_that_predicts_and_a_table_of_errors(tmp_path, capsys):
    output = tmp_path / "predictor.json"
    assert (
        main(["predictor", "fit", "--requests", str(write_trace(tmp_path)), "-o", f"{output}"]) == 0
    )
    assert predict(output, 100) == pytest.approx(20, rel=0.1)
    assert predict(output, 1900) == pytest.approx(400, rel=0.1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "trace.csv: 2000 requests; error on the last 500, in tokens"
    rmse = {
        row[-4]: float(row[-1])
        for row in map(str.split, lines)
        if row[0] == "all" and len(row) == 6
    }
    assert rmse["oracle"] == 0
    assert rmse["trained"] < 10 < 50 < rmse["bucket-mean"] < rmse["mean"]
    about = json.loads(output.read_text())["about"]
    assert (about["source"], about["requests"]) == ("trace.csv", 2000)


def test_the_document_tells_each_predictors_error_by_prompt_length(tmp_path, capsys):
    trace, output = write_trace(tmp_path), tmp_path / "p.json"
    assert main(["predictor", "fit", "--requests", f"{trace}", "-o", f"{output}", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    buckets = document["held_out"]["buckets"]
    assert [b["prompt_tokens"]["up_to"] for b in buckets] == [64, 256, 1024, 4096]
    total = document["held_out"]["total"]
    assert set(total) == {"mean", "bucket-mean", "trained", "oracle"}
    for name in total:
        assert sum(b["errors"][name]["requests"] for b in buckets) == total[name]["requests"] == 500
    assert document["leaves"] == {"": 2}


def test_the_held_out_requests_are_the_last_to_arrive_whatever_the_order_of_rows(tmp_path, capsys):
    found = []
    for shuffled in (False, True):
        trace = write_trace(tmp_path, shuffled=shuffled)
        argv = ["predictor", "fit", "--requests", f"{trace}", "-o", f"{tmp_path}/p.json", "--json"]
        assert main(argv) == 0
        found.append(json.loads(capsys.readouterr().out)["held_out"])
    assert found[0] == found[1]


async def test_a_gateways_own_requests_are_learnt_with_their_limits(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KEY", "admin-secret-31415")
    output = tmp_path / "predictor.json"
    async with fake_instances(1) as fakes:
        config = config_for(fakes, server={"admin_key_env": "KEY"})
        async with (
            running_gateway(config) as running,
            httpx.AsyncClient(base_url=running.url) as client,
        ):
            argv = ["predictor", "fit", "--from-gateway", running.url, "-o", f"{output}"]
            assert await asyncio.to_thread(main, argv) == 1
            assert "--admin-key-env" in capsys.readouterr().err
            argv += ["--admin-key-env", "KEY"]
            assert await asyncio.to_thread(main, argv) == 2
            assert "no requests in it" in capsys.readouterr().err
            for i in range(80):
                body = {"model": "m", "messages": [], "max_tokens": 4 if i % 2 else 900}
                await client.post("/v1/chat/completions", json=body)
            assert await asyncio.to_thread(main, argv) == 0
    text = output.read_text()
    assert json.loads(text)["about"]["requests"] == 80
    assert "127.0.0.1" not in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--requests", "nowhere.csv"], 2, "nowhere.csv: cannot be read"),
        (["--from-gateway", "http://127.0.0.1:1"], 1, "the gateway does not answer"),
        (["--from-gateway", "ftp://x"], 2, "URL: must be http://"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(argv, code, said, tmp_path, capsys):
    assert main(["predictor", "fit", *argv, "-o", str(tmp_path / "p.json")]) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "p.json").exists()


def test_too_few_requests_are_refused(tmp_path, capsys):
    trace = write_trace(tmp_path, count=60)
    assert main(["predictor", "fit", "--requests", f"{trace}", "-o", f"{tmp_path}/p.json"]) == 2
    assert "60 requests, of which 45 are to train on" in capsys.readouterr().err


@pytest.mark.parametrize("share", ["0", "1", "nan", "x"])
def test_a_share_that_is_none_is_a_usage_error(share):
    with pytest.raises(SystemExit) as caught:
        main(["predictor", "fit", "--requests", "t.csv", "-o", "p.json", "--hold-out", share])
    assert caught.value.code == 2
