"""predictor fit: from a trace and from a running gateway; what it prints, writes, and refuses."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from hetero_gateway.core.lengths.length_model import TrainedPredictor
from hetero_gateway.core.lengths.predictors import LengthFeatures
from hetero_gateway.files.length_model_file import read_length_model
from tests.fakes.running import rig


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


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "predictor.json"


@pytest.fixture
def fit(run):
    return lambda trace, *words, code=0: run(
        "predictor", "fit", "--requests", trace, "-o", *words, code=code
    )


def predict(path: Path, prompt_tokens: int) -> float:
    return TrainedPredictor(read_length_model(path)).predict(LengthFeatures("", prompt_tokens))


def test_a_trace_gives_a_file_that_predicts_and_a_table_of_errors(tmp_path, fit, output):
    lines = fit(write_trace(tmp_path), output).out.splitlines()
    assert predict(output, 100) == pytest.approx(20, rel=0.1)
    assert predict(output, 1900) == pytest.approx(400, rel=0.1)
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


def test_the_document_tells_each_predictors_error_by_prompt_length(tmp_path, fit, output):
    trace = write_trace(tmp_path)
    told = json.loads(fit(trace, output, "--json").out)
    buckets = told["held_out"]["buckets"]
    assert [b["prompt_tokens"]["up_to"] for b in buckets] == [64, 256, 1024, 4096]
    total = told["held_out"]["total"]
    assert set(total) == {"mean", "bucket-mean", "trained", "oracle"}
    for name in total:
        assert sum(b["errors"][name]["requests"] for b in buckets) == total[name]["requests"] == 500
    assert told["leaves"] == {"": 2}


def test_the_held_out_requests_are_the_last_to_arrive_whatever_the_order_of_rows(
    tmp_path, fit, output
):
    first, second = (
        json.loads(fit(write_trace(tmp_path, shuffled=shuffled), output, "--json").out)["held_out"]
        for shuffled in (False, True)
    )
    assert first == second


async def test_a_gateways_own_requests_are_learnt_with_their_limits(run, monkeypatch, output):
    monkeypatch.setenv("KEY", "admin-secret-31415")
    async with rig(server={"admin_key_env": "KEY"}) as (running, client, _):

        async def learnt(*flags, code=0):
            words = ("predictor", "fit", "--from-gateway", running.url, "-o", output, *flags)
            return await asyncio.to_thread(run, *words, code=code)

        assert "--admin-key-env" in (await learnt(code=1)).err
        key = ("--admin-key-env", "KEY")
        assert "no requests in it" in (await learnt(*key, code=2)).err
        for i in range(80):
            body = {"model": "m", "messages": [], "max_tokens": 4 if i % 2 else 900}
            await client.post("/v1/chat/completions", json=body)
        await learnt(*key)
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
def test_what_cannot_be_read_is_told_in_one_line(argv, code, said, error, output):
    assert said in error("predictor", "fit", *argv, "-o", output, code=code)
    assert not output.exists()


def test_too_few_requests_are_refused(tmp_path, fit, output):
    said = fit(write_trace(tmp_path, count=60), output, code=2).err
    assert "60 requests, of which 45 are to train on" in said


@pytest.mark.parametrize("share", ["0", "1", "nan", "x"])
def test_a_share_that_is_none_is_a_usage_error(share, fit):
    assert "--hold-out" in fit("t.csv", "p.json", "--hold-out", share, code=2).err
