"""The files of ``init``: valid whatever a server says, and fitting one another."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_gateway.deploy.directory import write_beside
from hetero_gateway.deploy.starter import ProbedServer, starter_files
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import GatewayConfig, load_gateway_config
from hetero_gateway.files.profile_file import builtin_profiles

TP4 = "V100-32GB-NVLink2/Llama-3-8B/tp4"


def written(tmp_path: Path, *servers: ProbedServer, **options: Any) -> GatewayConfig:
    """The configuration, read from the files as a gateway reads it."""
    write_beside(starter_files(servers, builtin_profiles(), **options), tmp_path)
    return load_gateway_config(tmp_path / "gateway.yaml")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def llama(url: str, **more: Any) -> ProbedServer:
    facts: dict[str, Any] = {"served": {"llama-3-8b": 8192}, "version": "0.32.0"}
    return ProbedServer(url, **facts | {"has_metrics": True, "kv_capacity_tokens": 750_000} | more)


def test_without_a_server_there_is_an_example_to_edit(tmp_path):
    (instance,) = written(tmp_path).instances
    assert instance.base_url == "http://127.0.0.1:8001"


def test_what_a_server_said_stands_beside_its_entry(tmp_path):
    (instance,) = written(tmp_path, llama("http://10.0.0.5:8000")).instances
    assert (instance.id, instance.base_url) == ("10.0.0.5-8000", "http://10.0.0.5:8000")
    text = (tmp_path / "gateway.yaml").read_text("utf-8")
    assert "vLLM 0.32.0; serves llama-3-8b (at most 8192 tokens). KV cache: 750000 tokens." in text
    # Of the built-in profiles of its model, the one with about its KV cache comes first.
    assert f"Or a built-in one of this model: {TP4}," in text


def test_a_suggested_profile_can_be_uncommented(tmp_path):
    written(tmp_path, llama("http://10.0.0.5:8000"))
    path = tmp_path / "gateway.yaml"
    text = path.read_text("utf-8")
    line = next(each for each in text.splitlines() if each.startswith("    # profile: "))
    path.write_text(text.replace(line, f"    profile: {TP4}"), "utf-8")
    (instance,) = load_gateway_config(path).instances
    assert instance.profile == TP4


def test_a_server_without_metrics_or_an_answer_is_written_down_with_that(tmp_path):
    silent = ProbedServer("http://10.0.0.7:8000", problem="http://10.0.0.7:8000: no answer")
    mute = llama("http://10.0.0.6:8000", has_metrics=False, kv_capacity_tokens=None)
    config = written(tmp_path, mute, silent)
    assert [each.base_url for each in config.instances] == [mute.base_url, silent.base_url]
    text = (tmp_path / "gateway.yaml").read_text("utf-8")
    assert "It has no vLLM metrics" in text
    assert "It did not answer: http://10.0.0.7:8000: no answer" in text


def test_one_address_is_one_instance_and_ids_differ(tmp_path):
    urls = ["http://a:1", "http://A:1/", "http://a:1/x", "https://a:1", "http://localhost:2"]
    config = written(tmp_path, *map(llama, urls))
    ids = [each.id for each in config.instances]
    assert ids == ["a-1", "a-1-x", "a-1-2", "vllm-2"]


@pytest.mark.parametrize(
    "said",
    ["x\ny: 1", "${HOME}", "a\u2028b", "# }", "\x1b[2J", "x" * 500, "instances: []\r"],
)
def test_nothing_that_a_server_says_gets_out_of_its_comment(tmp_path, said):
    plain = written(tmp_path / "plain", ProbedServer("http://a:1"))
    for server in (llama("http://a:1", version=said), ProbedServer("http://a:1", problem=said)):
        config = written(tmp_path / server.version[:1] / "d", server)
        assert config == plain
    files = starter_files([llama("http://a:1", version=said)], builtin_profiles())
    assert all(c.isprintable() or c == "\n" for c in files["gateway.yaml"])


def test_the_gateway_leaves_the_servers_their_port(tmp_path):
    config = written(tmp_path, llama("http://localhost:8000"), llama("http://127.0.0.1:8001"))
    assert config.server.port == 8080
    compose = read(tmp_path / "compose.yaml")
    gateway, prometheus = compose["services"]["gateway"], compose["services"]["prometheus"]
    assert any("8080" in word for word in gateway["healthcheck"]["test"])
    scrapes = read(tmp_path / "monitoring/prometheus/prometheus.yml")
    targets = scrapes["scrape_configs"][0]["static_configs"][0]["targets"]
    assert targets == ["gateway:8080"]
    assert prometheus["extra_hosts"] == ["gateway:127.0.0.1"]


def test_prometheus_reads_the_instances_by_the_gateways_names(tmp_path):
    config = written(tmp_path, llama("http://a:1"), llama("https://b:2/vllm"))
    rows = read(tmp_path / "monitoring/prometheus/instances.yml")
    assert [row["targets"] for row in rows] == [["a:1"], ["b:2"]]
    assert [{i.id for i in config.instances} & set(row["labels"].values()) for row in rows] == [
        {"a-1"},
        {"b-2-vllm"},
    ]
    assert rows[1]["labels"]["__scheme__"] == "https"
    assert rows[1]["labels"]["__metrics_path__"] == "/vllm/metrics"


def test_everything_that_compose_mounts_is_written(tmp_path):
    written(tmp_path, llama("http://a:1"))
    compose = read(tmp_path / "compose.yaml")
    mounts = [m for s in compose["services"].values() for m in s.get("volumes", ())]
    ours = [mount.split(":")[0] for mount in mounts if mount.startswith(".")]
    assert len(ours) >= 6
    assert all((tmp_path / path).exists() for path in ours)


def test_a_key_is_named_and_not_written(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_KEY", "s3cret")
    config = written(tmp_path, llama("http://a:1"), api_key_env="TEST_KEY")
    assert config.instances[0].api_key_env == "TEST_KEY"
    texts = [p.read_text("utf-8") for p in tmp_path.rglob("*") if p.is_file()]
    assert not any("s3cret" in text for text in texts)
    compose = read(tmp_path / "compose.yaml")
    assert "TEST_KEY" in compose["services"]["gateway"]["environment"]


def test_no_file_is_replaced_unless_that_is_wanted(tmp_path):
    (tmp_path / "gateway.yaml").write_text("mine")
    files = starter_files([], builtin_profiles())
    with pytest.raises(ConfigError, match=r"has gateway\.yaml already; .*--force"):
        write_beside(files, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["gateway.yaml"]
    assert (tmp_path / "gateway.yaml").read_text() == "mine"
    (tmp_path / "other").write_text("mine")
    write_beside(files, tmp_path, force=True)
    assert (tmp_path / "gateway.yaml").read_text() == files["gateway.yaml"]
    assert (tmp_path / "other").read_text() == "mine"
