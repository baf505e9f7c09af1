from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero_gateway.cli import parse
from hetero_gateway.errors import ConfigError, HeteroGatewayError


def run(*argv: str) -> int:
    args = parse(["bench", *argv])
    code: int = args.run(args)
    return code


def test_bench_prints_one_json_document(
    serve_in_thread: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,5,3\n0.01,6,4\n", encoding="utf-8")
    assert run(serve_in_thread.url, "--requests", str(trace), "--json") == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["requests"] == 2
    assert document["errors"] == 0
    assert document["output_tokens"] == 7
    assert document["instances"][0]["id"] == "one"
    assert document["model"] == "fast"
    assert "2 of 2" in err


def test_bench_prints_tables(serve_in_thread: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(serve_in_thread.url + "/v1", "--limit", "3", "--rate", "inf") == 0
    out = capsys.readouterr().out
    for word in ("throughput", "TTFT", "TPOT", "latency", "share"):
        assert word in out


def test_bench_fails_when_nothing_is_answered(
    serve_in_thread: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(serve_in_thread.url, "--limit", "2", "--model", "refused", "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["errors_by_kind"] == {"http_503": 2}
    assert "no request was answered: 2 × http_503" in err


def test_bench_says_that_nobody_listens() -> None:
    with pytest.raises(HeteroGatewayError, match=r"http://127\.0\.0\.1:1/v1/models: no answer"):
        run("http://127.0.0.1:1")


def test_bench_refuses_a_bad_trace(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("a,b\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="row 1"):
        run("http://127.0.0.1:1", "--requests", str(trace))


@pytest.mark.parametrize("flag", ["--rate=0", "--rate=nan", "--limit=0", "--timeout=inf"])
def test_bench_refuses_meaningless_figures(flag: str) -> None:
    with pytest.raises(SystemExit) as stop:
        run("http://127.0.0.1:1", flag)
    assert stop.value.code == 2
