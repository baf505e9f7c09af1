"""The configuration: strict, every error one line that names the file and the key."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from hetero_gateway.cli import main
from hetero_gateway.core.costs.cost_model import request_time_s
from hetero_gateway.core.policies import POLICY_NAMES
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import GatewayConfig, load_gateway_config
from hetero_gateway.files.instance_config import ModelConfig, instance_profile
from hetero_gateway.files.profile_file import (
    PartSourceModel,
    ProfileModel,
    builtin_profiles,
    load_profile,
    profile_document,
    write_profile_file,
)
from hetero_gateway.files.scheduler_config import PolicyName
from hetero_gateway.files.secrets import secret

ROOT = Path(__file__).parents[2]
TP4 = "V100-32GB-NVLink2/Llama-3-8B/tp4"

PROFILE: dict[str, Any] = {
    "gpu": "V100",
    "model": "Llama-3-8B",
    "tensor_parallel": 4,
    "constants": {f"p{i}": 1e-3 * i for i in range(1, 9)},
    "kv_capacity_tokens": 755654,
}


def instance(**changes: Any) -> dict[str, Any]:
    return {"id": "a", "base_url": "http://127.0.0.1:8101"} | changes


def write(path: Path, data: Any) -> Path:
    """Text as it is, anything else as YAML."""
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data), encoding="utf-8")
    return path


def load(tmp_path: Path, data: Any, **overrides: Any) -> GatewayConfig:
    return load_gateway_config(write(tmp_path / "gateway.yaml", data), overrides)


def error_of(tmp_path: Path, data: Any, **overrides: Any) -> str:
    """The error's text without file and line, after the checks that every error must pass."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, data, **overrides)
    text = str(caught.value)
    assert "\n" not in text
    said = re.fullmatch(rf"{re.escape(str(tmp_path / 'gateway.yaml'))}:(\d+:)? (.*)", text)
    assert said is not None, text
    return said[2]


# Reading a file


def test_an_empty_mapping_is_a_valid_configuration(tmp_path: Path) -> None:
    config = load(tmp_path, "{}")
    assert config.scheduler.policy == "finish-time"
    assert config.server.host == "127.0.0.1"
    assert config.instances == []


def test_the_whole_example_of_the_interface_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A800_KEY", "sesame")
    config = load(
        tmp_path,
        """
        server:    {host: 0.0.0.0, port: 8000}
        scheduler: {policy: least-work, theta: 2.0}
        instances:
          - id: a800-0
            base_url: http://10.0.0.5:8000/
            model: deepseek-r1-distill-qwen-14b
            profile: A800-80GB-PCIe/DeepSeek-R1-Distill-Qwen-14B/tp1
            api_key_env: A800_KEY
        """,
    )
    (one,) = config.instances
    assert one.base_url == "http://10.0.0.5:8000"
    assert one.models == {"deepseek-r1-distill-qwen-14b"}
    assert one.profile == "A800-80GB-PCIe/DeepSeek-R1-Distill-Qwen-14B/tp1"


def test_an_instance_may_have_several_names_or_none(tmp_path: Path) -> None:
    rows = [instance(id="a", model=["x", "y"]), instance(id="b", model="x"), instance(id="c")]
    models = [i.models for i in load(tmp_path, {"instances": rows}).instances]
    assert models == [{"x", "y"}, {"x"}, frozenset()]


def test_a_configuration_cannot_be_changed_after_loading(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(tmp_path, "{}").server.port = 1  # type: ignore[misc] # that is the point


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be a mapping of keys, not NoneType"),
        ("- 1\n", "must be a mapping of keys, not list"),
        ("server: {port: 1\n", ":2: expected"),
        ("server:\n\tport: 1\n", ":2: found character"),
        ("a: !!python/name:os.system\n", ":1: could not determine a constructor"),
        ("server: {port: 1}\nserver: {port: 2}\n", ":2: the key 'server' is written twice"),
        ("server: {port: 1, port: 2}\n", ":1: the key 'port' is written twice"),
        ("a: 2026-13-45\n", "month must be in 1..12"),
        ("a: !!int many\n", "many"),
        ("a: &a [*a]\n", "alias of itself"),
        ("a: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
    ],
)
def test_what_is_no_yaml_mapping_is_refused_with_its_line(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert said in str(caught.value)
    assert error_of(tmp_path, text)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_gateway_config(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.yaml"
    with pytest.raises(ConfigError, match=re.escape(f"{path}: cannot be read: No such file")):
        load_gateway_config(path)


# Strictness


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"servr": {}}, "servr: unknown key; did you mean server?"),
        ({"server": {"prot": 1}}, "server.prot: unknown key; did you mean port?"),
        (
            {"scheduler": {"polcy": "min-max"}},
            "scheduler.polcy: unknown key; did you mean policy?",
        ),
        (
            {"scheduler": {"predictor": {"mean_token": 1}}},
            "scheduler.predictor.mean_token: unknown key; did you mean mean_tokens?",
        ),
        (
            {"instances": [instance(), instance(id="b", profil="x")]},
            "instances.1.profil: unknown key; did you mean profile?",
        ),
        ({"zzzzzz": 1}, "zzzzzz: unknown key"),
    ],
)
def test_an_unknown_key_is_named_with_a_suggestion(tmp_path: Path, data: Any, said: str) -> None:
    assert error_of(tmp_path, data) == said


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"instances": [{"base_url": "http://x"}]}, "instances.0.id"),
        ({"instances": [instance(), {"id": "b"}]}, "instances.1.base_url"),
    ],
)
def test_a_missing_key_is_named(tmp_path: Path, data: Any, key: str) -> None:
    assert error_of(tmp_path, data) == f"{key}: required, but missing"


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"server": None}, "server"),
        ({"server": {"port": 70000}}, "server.port"),
        ({"server": {"port": "http"}}, "server.port"),
        ({"server": {"max_body_bytes": 10}}, "server.max_body_bytes"),
        ({"scheduler": {"policy": "fastest"}}, "scheduler.policy"),
        ({"scheduler": {"theta": 0}}, "scheduler.theta"),
        ({"scheduler": {"theta": -2}}, "scheduler.theta"),
        ({"scheduler": {"theta": float("inf")}}, "scheduler.theta"),
        ({"health": {"probe_interval_s": float("inf")}}, "health.probe_interval_s"),
        ({"instances": [instance(weight=float("inf"))]}, "instances.0.weight"),
        ({"instances": [instance(weight=float("nan"))]}, "instances.0.weight"),
        ({"scheduler": {"seed": -1}}, "scheduler.seed"),
        ({"scheduler": {"predictor": {"kind": "oracle"}}}, "scheduler.predictor.kind"),
        ({"scheduler": {"tokens": {"bytes_per_token": 0}}}, "scheduler.tokens.bytes_per_token"),
        ({"timeouts": {"connect_s": 0}}, "timeouts.connect_s"),
        ({"timeouts": {"total_s": float("inf")}}, "timeouts.total_s"),
        ({"retry": {"budget_ratio": 1.5}}, "retry.budget_ratio"),
        ({"retry": {"max_attempts": 0}}, "retry.max_attempts"),
        ({"pool": {"max_connections": 0}}, "pool.max_connections"),
        ({"health": {"unhealthy_after": 0}}, "health.unhealthy_after"),
        ({"instances": {}}, "instances"),
        ({"instances": [instance(model="")]}, "instances.0.model"),
        ({"instances": [instance(model=[])]}, "instances.0.model"),
        ({"instances": [instance(model=["a", ""])]}, "instances.0.model"),
        ({"instances": [instance(weight=0)]}, "instances.0.weight"),
        ({"instances": [instance(id="")]}, "instances.0.id"),
        ({"instances": [instance(id="a b")]}, "instances.0.id"),
        ({"instances": [instance(id="-a")]}, "instances.0.id"),
        ({"instances": [instance(id="a" * 64)]}, "instances.0.id"),
    ],
)
def test_a_value_out_of_bounds_is_named(tmp_path: Path, data: Any, key: str) -> None:
    assert error_of(tmp_path, data).startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000", "must be http://HOST"),
        ("ftp://x", "must be http://HOST"),
        ("http://", "must be http://HOST"),
        ("http://:8000", "must be http://HOST"),
        ("http://x:port", "Port could not be cast"),
        ("http://x:99999", "Port out of range"),
        ("http://x:0", "must not have port 0"),
        ("http://[::1", "Invalid IPv6 URL"),
        ("http://me:secret@x", "use api_key_env"),
        ("http://x/?a=1", "must not carry a query"),
        ("http://x/#part", "must not carry a query or a fragment"),
        ("http://x y", "must not contain spaces"),
        ("http://x\r\nevil: 1", "control"),
        ("http://x/v1", "must not end in /v1"),
        ("http://x/v1/", "must not end in /v1"),
    ],
)
def test_a_bad_base_url_is_refused_with_the_reason(tmp_path: Path, url: str, said: str) -> None:
    text = error_of(tmp_path, {"instances": [instance(base_url=url)]})
    assert text.startswith("instances.0.base_url: ")
    assert said in text
    assert "secret" not in text


@pytest.mark.parametrize(
    "url", ["http://x", "https://x:8443", "http://[::1]:8000", "http://x/vllm"]
)
def test_a_good_base_url_is_kept(tmp_path: Path, url: str) -> None:
    rows = [instance(base_url=url), instance(id="b", base_url=url + "/")]
    assert [i.base_url for i in load(tmp_path, {"instances": rows}).instances] == [url, url]


EVERYTHING_WRONG = """\
server:
  port: http
  max_body_bytes: 10
scheduler: {policy: finish-tim, theta: .inf}
instances:
  - id: a
    base_ur: http://127.0.0.1:8101
  - {id: b b, base_url: http://127.0.0.1:8102, model: [], weight: 0,
     bias: true}
"""


def test_everything_that_is_wrong_is_told_at_once_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "gateway.yaml", EVERYTHING_WRONG)
    assert main(["validate", "-c", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    said = [line.removeprefix(f"hetero-gateway: {path}:") for line in err.splitlines()]
    assert said[:3] == [
        "2: server.port: must be a whole number",
        "3: server.max_body_bytes: must be at least 1024",
        f"4: scheduler.policy: must be one of {', '.join(get_args(PolicyName))}; "
        "did you mean finish-time?",
    ]
    assert said[3:6] == [
        "4: scheduler.theta: must be a finite number",
        "6: instances.0.base_url: required, but missing",
        "7: instances.0.base_ur: unknown key; did you mean base_url?",
    ]
    assert [line.split(": ")[:2] for line in said[6:9]] == [
        ["8", "instances.1.id"],
        ["8", "instances.1.model"],
        ["8", "instances.1.weight"],
    ]
    assert said[9:] == ["9: instances.1.bias: unknown key"]


def test_after_twenty_problems_the_others_are_counted(tmp_path: Path) -> None:
    data = {f"key{number}": 1 for number in range(30)}
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, data)
    assert len(caught.value.lines) == 21
    assert caught.value.lines[-1].endswith("gateway.yaml: and 10 more")


def test_a_variable_that_is_not_set_is_found_without_serving(tmp_path: Path) -> None:
    data = {
        "server": {"api_key_env": "HETERO_TEST_NOT_SET"},
        "instances": [instance(api_key_env="HETERO_TEST_NOT_SET_EITHER")],
    }
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, data)
    first, second = caught.value.lines
    assert first.endswith(
        "instances.0.api_key_env: the environment variable HETERO_TEST_NOT_SET_EITHER is not set"
    )
    assert second.endswith(
        "server.api_key_env: the environment variable HETERO_TEST_NOT_SET is not set"
    )


def test_an_id_that_is_used_twice_is_named(tmp_path: Path) -> None:
    text = error_of(tmp_path, {"instances": [instance(), instance(id="b"), instance()]})
    assert text == "instances.2.id: 'a' is used twice"


def test_what_does_not_fit_together_is_told_at_once_with_its_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        tmp_path / "gateway.yaml",
        """\
instances:
  - {id: a, base_url: "http://x:1"}
  - {id: a, base_url: "http://169.254.169.254"}
scheduler:
  single_instance: b
""",
    )
    assert main(["validate", "-c", str(path)]) == 2
    lines = capsys.readouterr().err.replace(f"hetero-gateway: {path}:", "").splitlines()
    assert [line.split(":")[:2] for line in lines] == [
        ["3", " instances.1.id"],
        ["3", " instances.1.base_url"],
        ["5", " scheduler.single_instance"],
    ]


def test_a_single_instance_that_does_not_exist_is_named(tmp_path: Path) -> None:
    data = {"scheduler": {"single_instance": "b"}, "instances": [instance()]}
    assert error_of(tmp_path, data) == "scheduler.single_instance: no instance has the id 'b'"
    assert load(tmp_path, data | {"scheduler": {"single_instance": "a"}}).instances


def test_workers_are_a_number_that_a_flag_may_change(tmp_path: Path) -> None:
    assert load(tmp_path, {"server": {"workers": 4}}).server.workers == 4
    assert load(tmp_path, {}, **{"server.workers": 2}).server.workers == 2
    for value in (0, 257, "many"):
        assert "server.workers" in error_of(tmp_path, {"server": {"workers": value}})


# Environment and flags


def test_environment_variables_are_expanded_wherever_a_text_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_HOST", "10.0.0.5")
    monkeypatch.setenv("GPU_PORT", "8101")
    data = {
        "server": {"port": "${GPU_PORT}"},
        "instances": [instance(base_url="http://${GPU_HOST}:${GPU_PORT}", model=["${GPU_HOST}"])],
    }
    config = load(tmp_path, data)
    assert config.server.port == 8101
    assert config.instances[0].base_url == "http://10.0.0.5:8101"
    assert config.instances[0].models == {"10.0.0.5"}


def test_a_dollar_without_braces_is_kept(tmp_path: Path) -> None:
    rows = [instance(model="$HOME ${} ${1} $$")]
    assert load(tmp_path, {"instances": rows}).instances[0].models == {"$HOME ${} ${1} $$"}


def test_a_missing_environment_variable_is_named_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HETERO_TEST_NOT_SET", raising=False)
    text = error_of(tmp_path, {"instances": [instance(base_url="http://${HETERO_TEST_NOT_SET}")]})
    assert text == "instances.0.base_url: the environment variable HETERO_TEST_NOT_SET is not set"


def test_flags_win_over_the_environment_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_PORT", "8001")
    data = {"server": {"port": "${GATEWAY_PORT}", "host": "10.0.0.1"}}
    assert load(tmp_path, data).server.port == 8001
    flags = {"server.port": 9000, "server.host": None, "scheduler.policy": "paper"}
    config = load(tmp_path, data, **flags)
    assert (config.server.port, config.server.host) == (9000, "10.0.0.1")
    assert config.scheduler.policy == "paper"


def test_a_flag_is_checked_like_the_file(tmp_path: Path) -> None:
    assert error_of(tmp_path, {}, **{"server.port": 99999}).startswith("server.port: ")


def test_a_secret_that_is_named_but_not_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_TEST_KEY", "sesame")
    assert secret("HETERO_TEST_KEY", "server.api_key_env") == "sesame"
    assert secret(None, "server.api_key_env") is None
    monkeypatch.setenv("HETERO_TEST_KEY", "")
    with pytest.raises(ConfigError, match=r"server.api_key_env: .* HETERO_TEST_KEY is not set"):
        secret("HETERO_TEST_KEY", "server.api_key_env")


@pytest.mark.parametrize("value", ["open sesame", "sesame\n", "sésame"])
def test_a_secret_that_cannot_stand_in_a_header_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HETERO_TEST_KEY", value)
    with pytest.raises(ConfigError, match="HETERO_TEST_KEY holds") as caught:
        secret("HETERO_TEST_KEY", "server.api_key_env")
    assert value.strip() not in str(caught.value)


# Profiles


def test_a_profile_file_is_found_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    write(tmp_path / "profiles" / "mine.yaml", PROFILE)
    config = load(tmp_path, {"instances": [instance(profile="profiles/mine.yaml")]})
    profile = instance_profile(config.instances[0], tmp_path)
    assert profile is not None
    assert profile.name == "V100/Llama-3-8B/tp4"
    assert profile.constants.p8 == 8e-3
    assert profile.max_num_seqs == 256


def test_a_ninth_constant_is_read_and_written_and_a_file_without_one_stays_so(
    tmp_path: Path,
) -> None:
    for more in ({}, {"p9": 3e-9}):
        path = write(tmp_path / "mine.yaml", PROFILE | {"constants": PROFILE["constants"] | more})
        loaded = load_profile("mine.yaml", tmp_path)
        assert loaded.constants.p9 == more.get("p9", 0.0)
        document = profile_document(loaded, {"how": "measured"})
        assert document["constants"] == PROFILE["constants"] | more
        write_profile_file(path, document)
        assert load_profile("mine.yaml", tmp_path) == loaded


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"constants": {f"p{i}": 1e-3 for i in range(1, 8)}}, "p8 missing"),
        ({"constants": PROFILE["constants"] | {"p3": -1e-6}}, "constant p3 is -1e-06"),
        ({"constants": PROFILE["constants"] | {"p3": float("nan")}}, "constants.p3: "),
        ({"constants": PROFILE["constants"] | {"p3": float("inf")}}, "constants.p3: "),
        ({"constants": PROFILE["constants"] | {"p3": "fast"}}, "constants.p3"),
        ({"constants": PROFILE["constants"] | {"p10": 1.0}}, "unknown constant p10"),
        ({"constants": PROFILE["constants"] | {"p9": -1.0}}, "constant p9 is -1"),
        ({"constants": {f"p{i}": 0.0 for i in range(1, 9)}}, "p5 to p8 are all 0"),
        ({"kv_capacity_tokens": 0}, "kv_capacity_tokens"),
        ({"kv_capacity_tokens": "many"}, "kv_capacity_tokens"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seq": 8}, "max_num_seq: unknown key; did you mean max_num_seqs?"),
        ({"source": {"how": "guessed"}}, "source.how"),
    ],
)
def test_what_is_wrong_in_a_profile_file_is_named(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    write(tmp_path / "mine.yaml", PROFILE | changes)
    text = error_of(tmp_path, {"instances": [instance(profile="mine.yaml")]})
    where = re.escape(f"instances.0.profile: {tmp_path / 'mine.yaml'}:")
    assert re.match(rf"{where}(\d+:)? ", text)
    assert said in text


def test_a_profile_file_without_a_key_is_told_which(tmp_path: Path) -> None:
    for key in PROFILE:
        write(tmp_path / "mine.yaml", {k: v for k, v in PROFILE.items() if k != key})
        with pytest.raises(ConfigError, match=f"{key}: required, but missing"):
            load_profile("mine.yaml", tmp_path)


def test_a_profile_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    text = error_of(tmp_path, {"instances": [instance(profile="nowhere.yaml")]})
    assert text.startswith("instances.0.profile: ")
    assert "nowhere.yaml: cannot be read" in text


def test_an_unknown_built_in_profile_gives_near_names(tmp_path: Path) -> None:
    text = error_of(tmp_path, {"instances": [instance(profile="V100-32GB-NVLink/Llama-3-8B/tp4")]})
    assert text.startswith("instances.0.profile: no profile is named")
    assert TP4 in text


def test_every_built_in_profile_can_be_loaded_by_its_name() -> None:
    profiles = builtin_profiles()
    assert len(profiles) >= 30
    for name, profile in profiles.items():
        assert load_profile(name) == profile
        assert profile.name == name
        # A request of everyday size takes it between 10 ms and 2 s of its own.
        assert 0.01 < request_time_s(profile, 512, 256) < 2
        assert profile.source["how"] in {"measured", "derived", "roofline"}
        assert profile.source["note"]
        assert 0 < profile.source["error"]["decode"] < 0.1


def test_more_tensor_parallelism_is_faster_and_holds_more() -> None:
    profiles = builtin_profiles()
    one, four = (profiles[f"V100-32GB-NVLink2/Llama-3-8B/tp{t}"] for t in (1, 4))
    assert request_time_s(four, 512, 256) < request_time_s(one, 512, 256) / 2
    assert four.kv_capacity_tokens > 4 * one.kv_capacity_tokens


# What belongs together


def test_the_schema_knows_exactly_the_policies_that_exist() -> None:
    assert set(get_args(PolicyName)) == set(POLICY_NAMES)


def test_every_policy_is_explained() -> None:
    text = (ROOT / "docs" / "design" / "scheduling.md").read_text("utf-8")
    section = text.split("## Policies")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `([\w-]+)`", section, re.MULTILINE)) == set(POLICY_NAMES)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) is dict and get_args(annotation)[1] is ModelConfig:
        return [ModelConfig]
    if typing.get_origin(annotation) in {list, typing.Union, types.UnionType}:
        return [model for arg in get_args(annotation) for model in models_in(arg)]
    return []


def fields_of(model: type[BaseModel], prefix: str = "") -> list[tuple[str, str, Any]]:
    """(section, key, default) of every field, depth first."""
    result = []
    for name, field in model.model_fields.items():
        inner = models_in(field.annotation)
        for one in inner:
            result += fields_of(one, f"{prefix}.{name}" if prefix else name)
        if not inner:
            default = "required" if field.is_required() else field.get_default()
            result.append((prefix, name, default))
    return result


def documented() -> dict[str, dict[str, list[str]]]:
    """section -> key -> the cells after the key, of docs/reference/configuration.md's tables."""
    result: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in (ROOT / "docs" / "reference" / "configuration.md").read_text("utf-8").splitlines():
        if heading := re.match(r"#+ `([\w.]+)`", line):
            section = heading[1]
        elif row := re.match(r"\| `(\w+)` \| (.*) \|$", line):
            result.setdefault(section, {})[row[1]] = row[2].split(" | ")
    return result


@pytest.mark.parametrize(
    ("model", "top"), [(GatewayConfig, ""), (ProfileModel, "profile")], ids=["gateway", "profile"]
)
def test_every_field_and_its_default_are_documented(model: type[BaseModel], top: str) -> None:
    tables = documented()
    fields = fields_of(model, top)
    assert len(fields) > 5
    for section, key, default in fields:
        assert key in tables.get(section, {}), (
            f"{section}.{key} is not in docs/reference/configuration.md"
        )
        told = tables[section][key][0].strip("`")
        expected = "none" if default is None or default == "" else default
        if isinstance(expected, float | int) and not isinstance(expected, bool):
            assert float(told) == expected, f"{section}.{key}"
        elif isinstance(expected, bool | str):
            assert told == str(expected).lower(), f"{section}.{key}"


def test_every_figure_of_a_fit_is_documented() -> None:
    told = documented()["profile.source"]["fit"][1]
    assert set(re.findall(r"`(\w+)`", told)) == {"prefill", "decode", *PartSourceModel.model_fields}


def test_nothing_is_documented_that_does_not_exist() -> None:
    fields = fields_of(GatewayConfig) + fields_of(ProfileModel, "profile")
    existing = {(section, key) for section, key, _ in fields}
    told = {(section, key) for section, rows in documented().items() for key in rows}
    assert told == existing


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_configuration_that_ships_loads(path: Path) -> None:
    config = load_gateway_config(path)
    assert len(config.instances) >= 2
    assert all(instance_profile(i, path.parent) for i in config.instances)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "profiles").glob("*.yaml")), ids=lambda p: p.name
)
def test_every_profile_that_ships_loads(path: Path) -> None:
    profile = load_profile(path.name, path.parent)
    assert 0.01 < request_time_s(profile, 512, 256) < 2
    assert profile.source["how"] in {"measured", "derived", "roofline"}


def test_the_shipped_files_are_there() -> None:
    names = {str(p.relative_to(ROOT / "configs")) for p in (ROOT / "configs").rglob("*.yaml")}
    assert {"gateway.yaml", "emulated.yaml", "profiles/example.yaml"} <= names


# The command


def test_validate_says_what_it_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "-c", str(ROOT / "configs" / "gateway.yaml")]) == 0
    out, err = capsys.readouterr()
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
def test_validate_prints_one_line_and_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: Any
) -> None:
    path = tmp_path / "bad.yaml"
    if data is not None:
        write(path, data)
    assert main(["validate", "-c", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"hetero-gateway: {re.escape(str(path))}:?(\d+:)? .+\n", err)
    assert len(err.splitlines()) == 1


def test_the_command_itself_exits_2_without_a_traceback(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.yaml", {"scheduler": {"thetta": 1}})
    done = subprocess.run(
        [sys.executable, "-m", "hetero_gateway", "validate", "-c", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"hetero-gateway: {path}:2: scheduler.thetta: unknown key; did you mean theta?\n"
    )


# What is valid and hardly meant


def warnings_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *instances: dict[str, Any], **more: Any
) -> list[str]:
    """What ``validate`` warns of, without the file's name."""
    named = [each | {"id": each.get("id", f"i{i}")} for i, each in enumerate(instances)]
    path = write(tmp_path / "gateway.yaml", {"instances": named} | more)
    assert main(["validate", "-c", str(path)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith(f"hetero-gateway: {path}:") for line in lines)
    assert main(["validate", "-c", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["warnings"]
    lines = [line.removeprefix(f"hetero-gateway: {path}:") for line in lines]
    assert [line.partition("warning: ")[2] for line in lines] == told
    return lines


def test_a_file_without_instances_is_valid_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = warnings_of(tmp_path, capsys)
    assert line == " warning: there are no instances: every request gets an error"
    source = {"name": "pods", "kind": "file", "file": "instances.yaml"}
    (tmp_path / "instances.yaml").write_text("instances: []")
    assert warnings_of(tmp_path, capsys, discovery=[source]) == []


@pytest.mark.parametrize(
    ("url", "other"),
    [
        ("http://a:8000", "http://a:8000/"),
        ("http://a:8000", "http://A:8000"),
        ("http://a", "http://a:80"),
        ("https://a.example.", "https://a.example:443"),
        ("http://localhost:8000", "http://127.0.0.1:8000"),
        ("http://a/vllm/", "http://a/vllm"),
    ],
)
def test_one_address_twice_is_warned_of_in_any_spelling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str, other: str
) -> None:
    (line,) = warnings_of(tmp_path, capsys, {"base_url": url}, {"base_url": other})
    number, said = line.split(": warning: ")
    text = (tmp_path / "gateway.yaml").read_text("utf-8").splitlines()
    assert other in text[int(number) - 1]
    assert said == "instance i1: it has the address of i0: one server would be counted as two"


def test_two_servers_are_not_taken_for_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = ["http://a:8000", "http://b:8000", "http://a:8001", "https://a:8000", "http://a:8000/x"]
    assert warnings_of(tmp_path, capsys, *({"base_url": url} for url in urls)) == []


def test_a_profile_of_another_model_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = warnings_of(
        tmp_path,
        capsys,
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
def test_no_configuration_that_ships_is_warned_of(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "-c", str(path)]) == 0
    assert capsys.readouterr().err == ""


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


def test_validate_reports_every_file_and_package_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        extras = {"opentelemetry", "tokenizers", "redis", "dns"}
        return None if name.split(".")[0] in extras else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    path = tmp_path / "gateway.yaml"
    path.write_text(NEEDY)
    assert main(["validate", "-c", str(path)]) == 2
    text = capsys.readouterr().err
    for line, rest in [
        (2, "server.certificate_file: no.crt: cannot be read: No such file"),
        (2, "server.key_file: no.key: cannot be read"),
        (2, "server.client_ca_file: no.pem: cannot be read"),
        (3, "traces.endpoint: needs the extra: pip install 'hetero-gateway[otel]'"),
        (4, "scheduler.tokens.tokenizer_file: needs the extra: pip install"),
        (4, "scheduler.tokens.tokenizer_file: no.json: cannot be read"),
        (4, "scheduler.shared: needs the extra: pip install 'hetero-gateway[redis]'"),
        (6, "discovery.0.kind: needs the extra: pip install 'hetero-gateway[dns]'"),
        (6, "discovery.0.profile: no profile is named 'no/such/profile'"),
        (6, "discovery.0.api_key_env: the environment variable NOT_SET_HERE is not set"),
        (8, "instances.0.ca_file: no.ca: cannot be read"),
        (9, "models.m.fallbacks.0.ca_file: no.other: cannot be read"),
    ]:
        assert f"hetero-gateway: {path}:{line}: {rest}" in text
    assert text.count("\n") == 12


def test_packages_and_files_that_are_there_are_no_problem(tmp_path: Path) -> None:
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


def test_off_as_people_write_it_is_off(tmp_path: Path) -> None:
    """YAML takes a plain ``off`` for false."""
    path = tmp_path / "gateway.yaml"
    path.write_text("server: {expose: {docs: off, openapi: 'off'}}\n")
    expose = load_gateway_config(path).server.expose
    assert (expose.docs, expose.openapi, expose.dashboard) == ("off", "off", "open")
    path.write_text("server: {expose: {docs: true}}\n")
    with pytest.raises(ConfigError, match=r"server\.expose\.docs: must be one of"):
        load_gateway_config(path)
