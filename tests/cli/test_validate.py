"""``validate``: one line for what is wrong, a warning for what is hardly meant."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from hetero_gateway.files.gateway_config import load_gateway_config
from tests.fakes.gateway_files import TP4, instance, write
from tests.fakes.processes import command

ROOT = Path(__file__).parents[2]


def test_validate_says_what_it_checked(run):
    out, err = run("validate", "-c", ROOT / "configs" / "gateway.yaml")
    assert "valid; policy finish-time, 2 instances" in out
    assert TP4 in out
    assert err == ""


BAD = {
    "not there": None,
    "no mapping": "- 1\n",
    "broken YAML": "server: {port: 1\n",
    "unknown key": {"servr": {}},
    "wrong type": {"server": {"port": "http"}},
    "no worker": {"server": {"workers": 0}},
    "id twice": {"instances": [instance(), instance()]},
    "bad address": {"instances": [instance(base_url="x")]},
    "unknown profile": {"instances": [instance(profile="T1000/GPT/tp3")]},
    "line break in a key": {"a\nb": 1},
    "line break in a file name": {"instances": [instance(profile="a\nb.yaml")]},
    "zero byte in a file name": {"instances": [instance(profile="a\0b.yaml")]},
    "date that is none": "a: 2026-13-45\n",
    "unset variable": {"instances": [instance(base_url="http://${HETERO_TEST_NOT_SET}")]},
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_validate_prints_one_line_and_exits_2(tmp_path, data, error):
    path = tmp_path / "bad.yaml"
    if data is not None:
        write(path, data)
    err = error("validate", "-c", path)
    assert re.fullmatch(rf"hetero-gateway: {re.escape(str(path))}:?(\d+:)? .+\n", err)
    assert len(err.splitlines()) == 1


def test_the_command_itself_exits_2_without_a_traceback(tmp_path):
    path = write(tmp_path / "bad.yaml", {"scheduler": {"thetta": 1}})
    done = command("validate", "-c", str(path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"hetero-gateway: {path}:2: scheduler.thetta: unknown key; did you mean theta?\n"
    )


# What is valid and hardly meant


@pytest.fixture
def warnings_of(tmp_path, run, document):
    """What ``validate`` warns of, without the file's name."""

    def warnings_of(*instances: dict[str, Any], **more: Any) -> list[str]:
        named = [each | {"id": each.get("id", f"i{i}")} for i, each in enumerate(instances)]
        path = write(tmp_path / "gateway.yaml", {"instances": named} | more)
        lines = run("validate", "-c", path).err.splitlines()
        assert all(line.startswith(f"hetero-gateway: {path}:") for line in lines)
        lines = [line.removeprefix(f"hetero-gateway: {path}:") for line in lines]
        told = document("validate", "-c", path)["warnings"]
        assert [line.partition("warning: ")[2] for line in lines] == told
        return lines

    return warnings_of


def test_a_file_without_instances_is_valid_with_a_warning(tmp_path, warnings_of):
    (line,) = warnings_of()
    assert line == " warning: there are no instances: every request gets an error"
    source = {"name": "pods", "kind": "file", "file": "instances.yaml"}
    (tmp_path / "instances.yaml").write_text("instances: []")
    assert warnings_of(discovery=[source]) == []


@pytest.mark.parametrize(
    ("url", "other"),
    [
        ("http://a:8000", "http://a:8000/"),
        ("http://a:8000", "http://A:8000"),
        ("http://a", "http://a:80"),
        ("https://a.example.", "https://a.example:443"),
        ("http://localhost:9000", "http://127.0.0.1:9000"),
        ("http://a/vllm/", "http://a/vllm"),
    ],
)
def test_one_address_twice_is_warned_of_in_any_spelling(tmp_path, url, other, warnings_of):
    (line,) = warnings_of({"base_url": url}, {"base_url": other})
    number, said = line.split(": warning: ")
    text = (tmp_path / "gateway.yaml").read_text("utf-8").splitlines()
    assert other in text[int(number) - 1]
    assert said == "instance i1: it has the address of i0: one server would be counted as two"


def test_two_servers_are_not_taken_for_one(warnings_of):
    urls = ["http://a:8000", "http://b:8000", "http://a:8001", "https://a:8000", "http://a:8000/x"]
    assert warnings_of(*({"base_url": url} for url in urls)) == []


def test_a_profile_of_another_model_is_warned_of(warnings_of):
    lines = warnings_of(
        instance(id="a", profile=TP4, model=["qwen-14b", "qwen-14b-lora"]),
        instance(id="b", profile=TP4, base_url="http://b", model="Meta-Llama-3-8B-Instruct"),
        instance(id="c", profile=TP4, base_url="http://c", model="chat"),
        instance(id="d", profile=TP4, base_url="http://d"),
    )
    assert [line.partition("warning: ")[2] for line in lines] == [
        "instance a: its profile is of Llama-3-8B, and it serves qwen-14b, qwen-14b-lora"
    ]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name
)
def test_no_configuration_that_ships_is_warned_of(path, run):
    assert run("validate", "-c", path).err == ""


NEEDY = """
server: {certificate_file: no.crt, key_file: no.key, client_ca_file: no.pem}
traces: {endpoint: "http://127.0.0.1:4318/v1/traces"}
scheduler: {tokens: {tokenizer_file: no.json}, shared: "redis://127.0.0.1"}
discovery:
  - {name: pool, kind: dns, host: vllm.local, profile: no/such/profile, api_key_env: NOT_SET_HERE}
instances:
  - {id: a, base_url: "https://127.0.0.1:9", ca_file: no.ca}
models: {m: {fallbacks: [{model: n, base_url: "https://127.0.0.1:9", ca_file: no.other}]}}
"""


def test_validate_reports_every_file_and_package_that_is_missing(tmp_path, monkeypatch, run):
    found = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        extras = {"opentelemetry", "tokenizers", "dns"}
        return None if name.split(".")[0] in extras else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    path = tmp_path / "gateway.yaml"
    path.write_text(NEEDY)
    text = run("validate", "-c", path, code=2).err
    for line, rest in [
        (2, "server.certificate_file: no.crt: cannot be read: No such file"),
        (2, "server.key_file: no.key: cannot be read"),
        (2, "server.client_ca_file: no.pem: cannot be read"),
        (3, "traces.endpoint: needs the extra: pip install 'hetero-gateway[otel]'"),
        (4, "scheduler.tokens.tokenizer_file: needs the extra: pip install"),
        (4, "scheduler.tokens.tokenizer_file: no.json: cannot be read"),
        (6, "discovery.0.kind: needs the extra: pip install 'hetero-gateway[dns]'"),
        (6, "discovery.0.profile: no profile is named 'no/such/profile'"),
        (6, "discovery.0.api_key_env: the environment variable NOT_SET_HERE is not set"),
        (8, "instances.0.ca_file: no.ca: cannot be read"),
        (9, "models.m.fallbacks.0.ca_file: no.other: cannot be read"),
    ]:
        assert f"hetero-gateway: {path}:{line}: {rest}" in text
    assert text.count("\n") == 11


def test_packages_and_files_that_are_there_are_no_problem(tmp_path):
    (tmp_path / "ca.pem").touch()
    path = tmp_path / "gateway.yaml"
    path.write_text(
        """
traces: {endpoint: "http://127.0.0.1:4318/v1/traces"}
discovery: [{name: pool, kind: dns, host: vllm.local}]
instances: [{id: a, base_url: "https://127.0.0.1:9", ca_file: ca.pem}]
"""
    )
    assert load_gateway_config(path).traces.endpoint is not None


def test_the_picker_refuses_to_isolate_clients(tmp_path, error):
    path = tmp_path / "gateway.yaml"
    path.write_text(
        "scheduler: {isolate_clients: true}\ninstances: [{id: a, base_url: http://127.0.0.1:1}]\n"
    )
    assert "scheduler.isolate_clients" in error("picker", "-c", path)
    path.write_text("instances: [{id: a, base_url: http://127.0.0.1:1, data_parallel_ranks: 2}]\n")
    assert "data_parallel_ranks: the picker" in error("picker", "-c", path)
    source = "{name: s, kind: dns, host: gpus, port: 8000, data_parallel_ranks: 2}"
    path.write_text(f"discovery: [{source}]\n")
    assert "discovery: data_parallel_ranks: the picker" in error("picker", "-c", path)


@pytest.mark.parametrize(
    ("server", "closed"),
    [
        ({"host": "0.0.0.0"}, ["/metrics", "/admin (reloading", "server.admin_key_env"]),
        ({"host": "0.0.0.0", "expose": {"metrics": "open"}}, ["/admin (reloading"]),
        ({}, ["/metrics wants the key of /admin", "server.admin_key_env"]),
        ({"expose": {"metrics": "clients"}}, []),
        ({"admin_listen": "unix:admin.sock", "host": "0.0.0.0"}, []),
        ({"admin_key_env": "ADMIN_KEY_9", "host": "0.0.0.0"}, []),
    ],
)
def test_validate_says_what_clients_keys_have_locked(tmp_path, monkeypatch, run, server, closed):
    monkeypatch.setenv("ADMIN_KEY_9", "an-admin-key-of-ours")
    (tmp_path / "keys.yaml").write_text("keys: []\n")
    config = {"server": server, "instances": [instance()], "clients": {"keys_file": "keys.yaml"}}
    err = run("validate", "-c", write(tmp_path / "gateway.yaml", config)).err
    assert err.count("warning:") == bool(closed)
    assert all(text in err for text in closed)
    assert ("/metrics, " in err) == ("host" in server and len(closed) == 3)
    without = {name: section for name, section in config.items() if name != "clients"}
    assert run("validate", "-c", write(tmp_path / "open.yaml", without)).err == ""
