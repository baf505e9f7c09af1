"""``plan -o``: what the command writes is what the plan was made for."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_gateway.files.gateway_config import load_gateway_config
from hetero_gateway.files.profile_file import load_profile

PLAN = """\
model: Llama-3-8B
max_model_len: 1024
machines:
  - {id: box, accelerator: V100-32GB-NVLink2, count: 1}
engine: {max_num_seqs: 4, max_num_batched_tokens: 512}
workload:
  prompt: {median: 50, sigma: 0.1, max: 100}
  output: {median: 20, sigma: 0.1, max: 30}
"""
MACHINE = {"accelerator": "V100-32GB-NVLink2", "count": 1}
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 2048, "intermediate_size": 512,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def cluster(tmp_path) -> Path:
    return write(tmp_path)


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(PLAN) | changes))
    return path


def test_the_directory_has_the_settings_of_the_plan(cluster, tmp_path, document):
    directory = tmp_path / "out"
    printed = document("plan", "-c", cluster, "-o", directory)
    written = json.loads((directory / "plan.json").read_text())
    assert {k: v for k, v in printed.items() if k != "took_s"} == {
        k: v for k, v in written.items() if k != "deployment"
    }
    config = load_gateway_config(directory / "gateway.yaml")
    (instance,) = config.instances
    profile = load_profile(instance.profile, directory)
    (planned,) = written["best"]["machines"][0]["instances"]
    assert profile.kv_capacity_tokens == planned["kv_capacity_tokens"]
    assert config.scheduler.predictor.mean_tokens == pytest.approx(20, rel=0.05)
    script = (directory / "commands" / "box.sh").read_text()
    for words in (
        *("--max-num-seqs 4", "--max-num-batched-tokens 512", "--max-model-len 1024"),
        *("--tensor-parallel-size 1", "--dtype float16", "--port 8001", "CUDA_VISIBLE_DEVICES=0"),
        "MODEL:-meta-llama/Meta-Llama-3-8B-Instruct",
    ):
        assert words in script
    rows = (directory / "requests.csv").read_text().splitlines()
    assert rows[0] == "input_tokens,output_tokens"
    assert len(rows) > 200
    assert all(sum(map(int, row.split(","))) <= 1024 for row in rows[1:])


def test_the_same_plan_is_written_the_same(cluster, tmp_path, monkeypatch, run):
    texts = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        run("plan", "-c", cluster, "-o", "out")
        files = sorted(p for p in Path("out").rglob("*") if p.is_file())
        texts.append({str(p): p.read_text() for p in files})
    assert texts[0] == texts[1]


def test_a_config_json_is_served_from_its_own_directory(tmp_path, run):
    model = tmp_path / "my model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    cluster = write(tmp_path, model={"config": "my model/config.json", "name": "mine"})
    run("plan", "-c", cluster, "-o", tmp_path / "out")
    script = (tmp_path / "out" / "commands" / "box.sh").read_text()
    assert f"MODEL:-{shlex.quote(str(model))}" in script
    assert "--served-model-name mine" in script
    compose = yaml.safe_load((tmp_path / "out" / "compose.yaml").read_text())
    assert f"{model}:{model}:ro" in compose["services"]["box-tp1-0"]["volumes"]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Llama-3.1-8B", "MODEL:-meta-llama/Llama-3.1-8B-Instruct"),
        ("NousResearch/Llama-3.1-8B", "MODEL:-NousResearch/Llama-3.1-8B"),
        ({"name": "Llama-3.1-8B", "quantization": "fp8"}, "MODEL:-meta-llama/Llama-3.1-8B-Inst"),
        ({"name": "Llama-3.1-8B", "quantization": "awq"}, "MODEL:?name a checkpoint"),
    ],
)
def test_the_checkpoint_is_stored_as_planned_or_asked_for(tmp_path, model, words, run):
    machine = {"id": "box", "accelerator": "L40S-48GB", "count": 1}
    run("plan", "-c", write(tmp_path, model=model, machines=[machine]), "-o", tmp_path / "out")
    script = (tmp_path / "out" / "commands" / "box.sh").read_text()
    assert words in script
    assert ("--quantization fp8" in script) is (isinstance(model, dict) and "fp8" in str(model))


def test_machines_are_reached_at_their_addresses(tmp_path, run):
    machines = [
        {"id": "one", "address": "10.0.0.7"},
        {"id": "two", "address": "[fd00::2]"},
        {"id": "three"},
    ]
    cluster = write(tmp_path, machines=[MACHINE | each for each in machines])
    run("plan", "-c", cluster, "-o", tmp_path / "out")
    config = load_gateway_config(tmp_path / "out" / "gateway.yaml")
    assert [i.base_url for i in config.instances] == [
        "http://10.0.0.7:8001",
        "http://[fd00::2]:8001",
        "http://three:8001",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"address": "10.0.0.7", "copies": 2}, "address is of one machine"),
        ({"address": "http://10.0.0.7"}, "machines.0.address"),
        ({"address": "a b"}, "machines.0.address"),
    ],
)
def test_an_address_that_cannot_be_is_refused(tmp_path, changes, message, run):
    cluster = write(tmp_path, machines=[{"id": "box"} | MACHINE | changes])
    assert message in run("plan", "-c", cluster, code=2).err


def test_an_emulated_plan_says_so_and_has_its_ports(cluster, tmp_path, run):
    directory = tmp_path / "out"
    words = ("--emulate", "--time-scale", "5", "--first-port", "23456", "--gateway-port", "23400")
    run("plan", "-c", cluster, "-o", directory, *words)
    script = (directory / "start.sh").read_text()
    assert "emulate --profile profiles/v100-32gb-nvlink2-llama-3-8b-tp1.yaml" in script
    assert "--time-scale 5" in script
    assert "vllm serve" not in script
    config = load_gateway_config(directory / "gateway.yaml")
    assert config.server.port == 23400
    assert config.instances[0].base_url == "http://127.0.0.1:23456"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--emulate",), "--emulate: only with -o"),
        (("--force",), "--force: only with -o"),
        (("--time-scale", "2"), "--time-scale: only with -o"),
        (("-o", "{new}", "--time-scale", "2"), "--time-scale: only with --emulate"),
        (("-o", "{here}"), "is not empty; name another, or give --force"),
        (("-o", "{here}/cluster.yaml"), "is a file; name a directory"),
        (("-o", "{new}", "--first-port", "8000"), "include the gateway's"),
    ],
)
def test_flags_that_cannot_be_end_with_one_line_and_code_2(cluster, tmp_path, words, message, run):
    places = {"here": tmp_path, "new": tmp_path / "new"}
    captured = run("plan", "-c", cluster, *(word.format(**places) for word in words), code=2)
    assert message in captured.err.splitlines()[-1]
    assert not (tmp_path / "new").exists()


def test_a_port_that_is_none_is_a_usage_error(cluster, tmp_path, run):
    words = ("plan", "-c", cluster, "-o", tmp_path / "out", "--first-port", "70000")
    assert "--first-port: must be from 1 to 65535" in run(*words, code=2).err
