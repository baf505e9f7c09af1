"""``doctor``, ``schema``, ``completion``, ``profile list``, and what --help points to."""

import json
import re
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from hetero_gateway.cli import COMMANDS
from hetero_gateway.files.profile_file import builtin_profiles
from tests.cli.test_mistakes import answering
from tests.fakes.gateway_files import TP4, instance, write

ROOT = Path(__file__).parents[2]
MODELS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ndate: Mon, 02 Jan 2006 15:04:05 GMT\r\n"
    b'content-length: 25\r\n\r\n{"data": [{"id": "m-1"}]}'
)


def test_the_schema_takes_every_configuration_that_is_shown_and_describes_each_key(run) -> None:
    schema = json.loads(run("schema").out)
    check = jsonschema.Draft202012Validator(schema)
    for name in ("configs/gateway.yaml", "configs/emulated.yaml", "docker/gateway.yaml"):
        assert not list(check.iter_errors(yaml.safe_load((ROOT / name).read_text("utf-8"))))
    (error,) = check.iter_errors({"server": {"prot": 1}})
    assert "prot" in error.message
    bare = [
        f"{name}.{field}"
        for name, part in schema["$defs"].items()
        for field, told in part.get("properties", {}).items()
        if "$ref" not in told and not told.get("description")
    ]
    sections = {"group", "class"}  # of sections, whose class has the words
    assert [each for each in bare if each.split(".")[1] not in sections] == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_every_command_and_its_flags(shell: str, run) -> None:
    text = run("completion", shell).out
    assert all(re.search(rf"\b{name}\b", text) for name in COMMANDS)
    assert ("--takeover" if shell != "fish" else "-l takeover") in text


def test_bash_completes(run) -> None:
    script = run("completion", "bash").out + (
        'COMP_WORDS=(hetero-gateway sim); COMP_CWORD=1; _hetero_gateway; echo "${COMPREPLY[@]}"\n'
        "COMP_WORDS=(hetero-gateway key new --gr); COMP_CWORD=3; _hetero_gateway\n"
        'echo "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["simulate", "--group"], done.stderr


def test_the_built_in_profiles_are_listed_an_l4_among_them(run, document) -> None:
    rows = document("profile", "list")["profiles"]
    assert [row["name"] for row in rows] == sorted(builtin_profiles())
    assert "L4-24GB/Llama-3-8B/tp1" in run("profile", "list").out
    assert builtin_profiles()["L4-24GB/Llama-3-8B/tp1"].constants.p9 > 0


def test_help_names_no_file_of_the_checkout_and_says_where_the_documentation_is(run) -> None:
    folder = ROOT / "src" / "hetero_gateway" / "cli" / "commands"
    named = [f.name for f in folder.glob("*.yaml") if "configs/" in f.read_text("utf-8")]
    assert named == []
    assert re.search(r"documentation: \S+index\.md", run("--help").out)


def test_a_gateways_file_can_be_simulated(tmp_path, document, error) -> None:
    rows = [instance(id=name, profile=TP4, base_url=f"http://{name}:1") for name in ("a", "b")]
    rows[0]["data_parallel_ranks"] = 2
    path = write(tmp_path / "gateway.yaml", {"server": {"port": 1}, "instances": rows})
    flags = ("--policy", "min-max", "--rate", "4", "--count", "40", "--seeds", "1")
    (result,) = document("simulate", "-c", path, *flags)["results"]
    assert [each["id"] for each in result["instances"]] == ["a-0", "a-1", "b"]
    del rows[1]["profile"]
    told = error("simulate", "-c", write(tmp_path / "gateway.yaml", {"instances": rows}))
    assert "b has none: `hetero-gateway profile list`" in told


def test_the_doctor_finds_what_is_wrong_in_a_file_and_at_its_instances(
    tmp_path, document, monkeypatch
) -> None:
    monkeypatch.setenv("KEY_9", "a-key-of-ours-0123456789")
    refuses = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n"
    with answering(MODELS) as good, answering(refuses) as shut:
        rows = [
            instance(id="good", base_url=f"http://127.0.0.1:{good}"),
            instance(id="tls", base_url=f"https://127.0.0.1:{good}"),
            instance(id="shut", base_url=f"http://127.0.0.1:{shut}", api_key_env="KEY_9"),
            instance(id="gone", base_url="http://127.0.0.1:1"),
        ]
        path = write(tmp_path / "gateway.yaml", {"instances": rows})
        found = document("doctor", "-c", path, code=1)["findings"]
    by = {(each["what"], each["state"]): each["detail"] for each in found}
    assert "m-1" in by["instance good", "ok"]
    assert "its clock differs" in by["instance good", "warning"]
    assert "it speaks plain HTTP there" in by["instance tls", "BAD"]
    assert "401; its key is wrong" in by["instance shut", "BAD"]
    assert "nobody listens" in by["instance gone", "BAD"]
    assert by["file", "ok"]
    assert "a-key-of-ours" not in json.dumps(found)
    path.write_text("servr: {}\n")
    (bad,) = (f for f in document("doctor", "-c", path, code=1)["findings"] if f["what"] == "file")
    assert "did you mean server?" in bad["detail"]
    assert {f["what"] for f in document("doctor")["findings"]} == {"versions", "descriptors"}
