"""``init``: asks servers what they are, writes files that serve, and replaces none."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from hetero_gateway.files.gateway_config import load_gateway_config
from tests.fakes.clock import anyio_backend  # noqa: F401 - virtual time
from tests.fakes.running import running_gateway
from tests.fakes.vllm import fake_instances

NOBODY = "http://127.0.0.1:1"


@pytest.fixture
def init(run):
    """The command has a loop of its own."""
    return lambda *words, code=0: asyncio.to_thread(run, "init", *words, code=code)


async def test_what_it_writes_serves_the_servers_that_it_asked(tmp_path, monkeypatch, run, init):
    monkeypatch.chdir(tmp_path)
    async with fake_instances(2, models=("llama-3-8b",)) as fakes:
        out = (await init("--probe", fakes[0].url + "/v1", fakes[1].url)).out.splitlines()
        assert [line.endswith("serves llama-3-8b") for line in out[:2]] == [True, True]
        assert run("validate", "-c", "gateway.yaml").err == ""
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


async def test_a_server_that_does_not_answer_is_warned_of_and_written_down(tmp_path, init):
    folder = tmp_path / "new" / "folder"
    captured = await init("--probe", NOBODY, "-o", folder, "--json")
    assert captured.err.startswith(f"hetero-gateway: warning: {NOBODY}/v1/models: no answer")
    document = json.loads(captured.out)
    assert {Path(name) for name in document["files"]} == {
        path for path in folder.rglob("*") if path.is_file()
    }
    assert document["probed"][0]["models"] == []
    assert NOBODY in (folder / "gateway.yaml").read_text("utf-8")


async def test_a_second_time_it_refuses_and_changes_nothing(tmp_path, init):
    await init("-o", tmp_path)
    (tmp_path / "gateway.yaml").write_text("{}")
    assert "--force" in (await init("-o", tmp_path, code=2)).err
    assert (tmp_path / "gateway.yaml").read_text() == "{}"
    await init("-o", tmp_path, "--force")
    assert "instances:" in (tmp_path / "gateway.yaml").read_text("utf-8")


@pytest.mark.parametrize("url", ["10.0.0.5:8000", "http://[::1", "ftp://a"])
async def test_what_is_no_url_is_refused(url, tmp_path, init):
    captured = await init("--probe", url, "-o", tmp_path, code=2)
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "gateway.yaml").exists()
