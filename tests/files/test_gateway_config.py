"""The configuration: strict, every error one line that names the file and the key."""

import re
import types
import typing
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from hetero_gateway.cli import main
from hetero_gateway.core.policies import POLICY_NAMES
from hetero_gateway.errors import ConfigError
from hetero_gateway.files import yaml_file
from hetero_gateway.files.gateway_config import GatewayConfig, load_gateway_config
from hetero_gateway.files.instance_config import ModelConfig, instance_profile
from hetero_gateway.files.profile_file import PartSourceModel, ProfileModel
from hetero_gateway.files.scheduler_config import PolicyName
from hetero_gateway.files.secrets import secret
from hetero_gateway.files.yaml_file import read_yaml
from tests.fakes.gateway_files import error_of, instance, load, write

ROOT = Path(__file__).parents[2]
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
        ("", "there is nothing in it; it must be a mapping of keys"),
        ("- 1\n", "must be a mapping of keys (`name: value`), not a list"),
        ("server: {port: 1\n", ":2: expected"),
        ("server:\n\tport: 1\n", ":2: the line is indented by a tab"),
        ("a: !!python/name:os.system\n", ":1: could not determine a constructor"),
        ("server: {port: 1}\nserver: {port: 2}\n", ":2: the key 'server' is written twice"),
        ("server: {port: 1, port: 2}\n", ":1: the key 'port' is written twice"),
        ("a: 2026-13-45\n", "month must be in 1..12"),
        ("a: !!int many\n", "many"),
        ("a: &a [*a]\n", "alias of itself"),
        ("a: " + "[" * 1000 + "]" * 1000, "nested too deeply"),
    ],
)
def test_what_is_no_yaml_mapping_is_refused_with_its_line(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert said in str(caught.value)
    assert error_of(tmp_path, text)


def test_libyaml_reads_what_pyyaml_reads_on_the_same_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert yaml_file._IN_C
    files = sorted(Path("configs").rglob("*.yaml"))
    assert len(files) > 10
    read = [read_yaml(file) for file in files]
    monkeypatch.setattr(yaml_file, "_IN_C", [])
    for file, fast in zip(files, read, strict=True):
        slow = read_yaml(file)
        assert slow == fast
        for name, value in slow.items():
            inner = value if isinstance(value, dict) else {}
            keys = [(name,), *((name, other) for other in inner)]
            assert [fast.line(key) for key in keys] == [slow.line(key) for key in keys]


@pytest.mark.parametrize(
    "text",
    [
        f"a: !!float 1.{'f' * 9000}\n",
        f"a: !!python/object:{'x' * 9000} {{}}\n",
        f"a: *{'x' * 9000}\n",
        f"{'a' * 9000}: 1\n{'a' * 9000}: 2\n",
    ],
)
def test_what_the_yaml_reader_says_stays_one_line_that_can_be_read(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    with pytest.raises(ConfigError, match=re.escape(f"{path}: cannot be read: No such file")):
        load_gateway_config(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_gateway_config(path)


# Strictness


NO_B = {"scheduler": {"single_instance": "b"}, "instances": [instance()]}


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
        ({"instances": [{"base_url": "http://x"}]}, "instances.0.id: required, but missing"),
        ({"instances": [instance(), {"id": "b"}]}, "instances.1.base_url: required, but missing"),
        (
            {"instances": [instance(), instance(id="b"), instance()]},
            "instances.2.id: 'a' is used twice",
        ),
        (NO_B, "scheduler.single_instance: no instance has the id 'b'"),
    ],
)
def test_what_is_unknown_missing_twice_or_nowhere_is_named(
    tmp_path: Path, data: Any, said: str
) -> None:
    assert error_of(tmp_path, data) == said


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


def test_a_single_instance_may_be_any_that_there_is(tmp_path: Path) -> None:
    assert load(tmp_path, NO_B | {"scheduler": {"single_instance": "a"}}).instances


def test_workers_are_a_number_that_a_flag_may_change(tmp_path: Path) -> None:
    assert load(tmp_path, {"server": {"workers": 4}}).server.workers == 4
    assert load(tmp_path, {}, **{"server.workers": 2}).server.workers == 2
    for value in (0, 257, "many"):
        assert "server.workers" in error_of(tmp_path, {"server": {"workers": value}})


def test_off_as_people_write_it_is_off(tmp_path: Path) -> None:
    """YAML takes a plain ``off`` for false."""
    path = tmp_path / "gateway.yaml"
    path.write_text("server: {expose: {docs: off, openapi: 'off'}}\n")
    expose = load_gateway_config(path).server.expose
    assert (expose.docs, expose.openapi, expose.dashboard) == ("off", "off", "open")
    path.write_text("server: {expose: {docs: true}}\n")
    with pytest.raises(ConfigError, match=r"server\.expose\.docs: must be one of"):
        load_gateway_config(path)


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


def test_the_shipped_files_are_there() -> None:
    names = {str(p.relative_to(ROOT / "configs")) for p in (ROOT / "configs").rglob("*.yaml")}
    assert {"gateway.yaml", "emulated.yaml", "profiles/example.yaml"} <= names
