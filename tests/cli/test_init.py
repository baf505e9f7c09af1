"""``init``: asks servers what they are, writes files that serve, and replaces none."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from hetero_gateway.cli import main
from hetero_gateway.files.gateway_config import load_gateway_config
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.running import running_gateway
from tests.fakes.vllm import fake_instances

NOBODY = "http://127.0.0.1:1"


async def run(*argv: str) -> int:
    """The command has a loop of its own."""
    return await asyncio.to_thread(main, argv)


async def test_what_it_writes_serves_the_servers_that_it_asked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with fake_instances(2, models=("llama-3-8b",)) as fakes:
        assert await run("init", "--probe", fakes[0].url + "/v1", fakes[1].url) == 0
        out = capsys.readouterr().out.splitlines()
        assert [line.endswith("serves llama-3-8b") for line in out[:2]] == [True, True]
        assert main(["validate", "-c", "gateway.yaml"]) == 0
        assert capsys.readouterr().err == ""
        config = load_gateway_config(tmp_path / "gateway.yaml", {"server.port": 1})
        free = config.server.model_copy(update={"port": 0})
        async with (
            running_gateway(config.model_copy(update={"server": free})) as running,
            httpx.AsyncClient() as client,
        ):
            models = (await client.get(f"{running.url}/v1/models")).json()["data"]
            assert [model["id"] for model in models] == ["llama-3-8b"]
            body = {"prompt": "x", "max_tokens": 2}
            answer = await client.post(f"{running.url}/v1/completions", json=body)
            assert answer.status_code == 200


async def test_a_server_that_does_not_answer_is_warned_of_and_written_down(tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    assert await run("init", "--probe", NOBODY, "-o", str(folder), "--json") == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"hetero-gateway: warning: {NOBODY}/v1/models: no answer")
    document = json.loads(captured.out)
    assert {Path(name) for name in document["files"]} == {
        path for path in folder.rglob("*") if path.is_file()
    }
    assert document["probed"][0]["models"] == []
    assert NOBODY in (folder / "gateway.yaml").read_text("utf-8")


async def test_a_second_time_it_refuses_and_changes_nothing(tmp_path, capsys):
    assert await run("init", "-o", str(tmp_path)) == 0
    (tmp_path / "gateway.yaml").write_text("{}")
    assert await run("init", "-o", str(tmp_path)) == 2
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "gateway.yaml").read_text() == "{}"
    assert await run("init", "-o", str(tmp_path), "--force") == 0
    assert "instances:" in (tmp_path / "gateway.yaml").read_text("utf-8")


@pytest.mark.parametrize("url", ["10.0.0.5:8000", "http://[::1", "ftp://a"])
async def test_what_is_no_url_is_refused(url, tmp_path, capsys):
    assert await run("init", "--probe", url, "-o", str(tmp_path)) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "gateway.yaml").exists()
