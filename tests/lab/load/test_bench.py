import asyncio
import json

import pytest

from hetero_gateway.cli import parse
from hetero_gateway.errors import ConfigError, HeteroGatewayError
from tests.fakes.vllm import FakeInstance


def run(*argv: str) -> int:
    args = parse(["bench", *argv])
    return args.run(args)


async def run_against(fake: FakeInstance, *argv: str, path: str = "", **fault: object) -> int:
    fake.fault = {"head": "x-hetero-gateway-instance: one\r\n", **fault}
    await fake.start()
    try:
        return await asyncio.to_thread(run, fake.url + path, *argv)
    finally:
        await fake.close()


async def test_bench_prints_one_json_document(tmp_path, capsys):
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,5,3\n0.01,6,4\n", encoding="utf-8")
    fake = FakeInstance()
    assert await run_against(fake, "--requests", str(trace), "--json") == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    told = {key: document[key] for key in ("requests", "errors", "output_tokens", "model")}
    assert told == {"requests": 2, "errors": 0, "output_tokens": 6, "model": "m"}
    assert document["instances"][0]["id"] == "one"
    assert [json.loads(body)["max_tokens"] for body in fake.bodies] == [3, 4]
    assert "2 of 2" in err


async def test_bench_prints_tables(capsys):
    assert await run_against(FakeInstance(), "--limit", "3", "--rate", "inf", path="/v1") == 0
    out = capsys.readouterr().out
    for word in ("throughput", "TTFT", "TPOT", "latency", "share"):
        assert word in out


async def test_bench_fails_when_nothing_is_answered(capsys):
    words = ("--limit", "2", "--model", "other", "--json")
    assert await run_against(FakeInstance(), *words, status=503) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["errors_by_kind"] == {"http_503": 2}
    assert "no request was answered: 2 × http_503" in err


def test_bench_says_that_nobody_listens():
    with pytest.raises(HeteroGatewayError, match=r"http://127\.0\.0\.1:1/v1/models: no answer"):
        run("http://127.0.0.1:1")


def test_bench_refuses_a_bad_trace(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("a,b\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="row 1"):
        run("http://127.0.0.1:1", "--requests", str(trace))


@pytest.mark.parametrize("flag", ["--rate=0", "--rate=nan", "--limit=0", "--timeout=inf"])
def test_bench_refuses_meaningless_figures(flag):
    with pytest.raises(SystemExit) as stop:
        run("http://127.0.0.1:1", flag)
    assert stop.value.code == 2
