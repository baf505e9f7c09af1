"""``key``: printed once, kept as a hash, and let in by the gateway that reads the file."""

import hmac
import io
import json
from pathlib import Path

import pytest

from hetero_gateway.errors import Refusal
from hetero_gateway.files.client_keys import hash_of, read_clients
from hetero_gateway.files.gateway_config import load_gateway_config
from hetero_gateway.gateway.admission.clients import Admission


def config_in(directory: Path, **clients: str) -> Path:
    path = directory / "gateway.yaml"
    path.write_text(json.dumps({"clients": {"keys_file": "keys.yaml", **clients}}))
    return path


def admission_of(path: Path, hash_key: str | None = None) -> Admission:
    clients = load_gateway_config(path).clients
    return Admission(None, read_clients(clients, path.parent), hash_key)


@pytest.mark.parametrize("hash_key", [None, "pepper"])
def test_a_new_key_is_printed_once_and_opens(tmp_path, monkeypatch, hash_key, run, document):
    path = config_in(tmp_path, **({"hash_key_env": "PEPPER_9"} if hash_key else {}))
    monkeypatch.setenv("PEPPER_9", "pepper")
    flags = ("--requests-per-minute", "60", "--expires", "90d", "--models", "a,b")
    key = run("key", "new", "alice", "-c", path, *flags).out.strip()
    assert key not in (tmp_path / "keys.yaml").read_text()
    client = admission_of(path, hash_key).client_of([(b"x-api-key", key.encode())])
    assert (client.name, client.models) == ("alice", {"a", "b"})
    with pytest.raises(Refusal):
        admission_of(path, hash_key).client_of([(b"x-api-key", key.encode() + b"x")])
    (row,) = document("key", "list", "-c", path)["keys"]
    assert (row["name"], row["requests_per_minute"], "hash" in row) == ("alice", 60, False)


def test_a_key_that_clients_have_is_read_from_standard_input(tmp_path, monkeypatch, run):
    path, key = config_in(tmp_path), "sk-of-litellm-1234567890"
    monkeypatch.setattr("sys.stdin", io.StringIO(key + "\n"))
    assert key not in "".join(run("key", "new", "bob", "-c", path, "--stdin"))
    headers = [(b"authorization", b"Bearer " + key.encode())]
    assert admission_of(path).client_of(headers).name == "bob"


@pytest.mark.parametrize(
    "flags",
    [["--group", "nobody"], ["--concurrency", "0"], ["--expires", "soon"], ["--share", "0"]],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(tmp_path, flags, error):
    error("key", "new", "a", "-c", config_in(tmp_path), *flags)
    assert not (tmp_path / "keys.yaml").exists()


def test_envoy_gets_hashes_and_expiry_times_and_no_key(tmp_path, monkeypatch, run, error):
    monkeypatch.setenv("PEPPER_9", "pepper")
    monkeypatch.setenv("SHARED_9", "of-everybody")
    instance = {"id": "a", "base_url": "http://127.0.0.1:1", "api_key_env": "SHARED_9"}
    path = config_in(tmp_path, hash_key_env="PEPPER_9")
    more = {"server": {"api_key_env": "SHARED_9"}, "instances": [instance]}
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    keys = {}
    for name, *flags in (
        ("alice",),
        ("bob", "--expires", "2027-01-01", "--requests-per-minute", "60"),
        ("carol", "--models", "m"),
    ):
        keys[name] = run("key", "new", name, "-c", path, *flags).out.strip()
    output = tmp_path / "envoy.keys"
    said = run("key", "envoy", "-c", path, "-o", output)
    assert said.out == ""
    assert "carol" in said.err
    assert said.err.count("in its environment") == 2
    assert output.stat().st_mode & 0o777 == 0o600
    text = output.read_text()

    def line(key: str, until: str, most: str = "any") -> str:
        return f"key {hash_of(key, 'pepper').replace(':', ' ')} {until} {most}"

    shared = hmac.digest(b"pepper", b"of-everybody", "sha256").hex()
    assert text.splitlines()[1:] == [
        f"key hmac-sha256 {shared} never any",
        line(keys["alice"], "never"),
        line(keys["bob"], "1798761600", "60"),
        *("hash-secret PEPPER_9", "instance-key SHARED_9", "end"),
    ]
    assert not any(secret in text for secret in (*keys.values(), "of-everybody", "pepper\n"))
    # A file that is there keeps its mode: Envoy's user may have to read it.
    output.chmod(0o640)
    run("key", "envoy", "-c", path, "-o", output, "--any-model")
    assert output.stat().st_mode & 0o777 == 0o640
    assert line(keys["carol"], "never") in output.read_text().splitlines()
    assert "cannot be written" in error("key", "envoy", "-c", path, "-o", tmp_path / "no" / "x")


def test_a_group_is_made_and_its_keys_share_what_it_says(tmp_path, run, error):
    path = config_in(tmp_path)
    flags = ("--class", "batch", "--classes", "interactive,batch", "--tokens-per-minute", "1000")
    assert "group nightly is in" in run("key", "group", "nightly", "-c", path, *flags).err
    key = run("key", "new", "a", "-c", path, "--group", "nightly").out.strip()
    run("key", "group", "free", "-c", path)
    run("key", "new", "b", "-c", path, "--group", "free")
    admission = admission_of(path)
    client = admission.client_of([(b"x-api-key", key.encode())])
    assert (client.group, client.request_class) == ("nightly", "batch")
    assert client.classes == {"interactive", "batch"}
    assert {account.name for account in admission.accounts()} == {"group nightly"}
    assert "there is a group named 'free' already" in error("key", "group", "free", "-c", path)
    text = (tmp_path / "keys.yaml").read_text()
    assert text.startswith("groups:\n  free: {}\n  nightly: {")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("groups: {a: {share: 2}}\nkeys: []\n", "add this to it: b: {share: 3.0}"),
        ("groups:\n# what we have\n  a: {share: 2}\nkeys: []\n", ""),
        ("keys: []  # none\n", ""),
        ("groups: []\n", "groups"),
    ],
)
def test_a_group_is_added_to_what_stands_there_or_nothing_is_written(
    tmp_path, run, error, text, says
):
    path, file = config_in(tmp_path), tmp_path / "keys.yaml"
    file.write_text(text)
    words = ("key", "group", "b", "-c", path, "--share", "3")
    if says:
        assert says in error(*words)
        assert file.read_text() == text
    else:
        run(*words)
        assert read_clients(load_gateway_config(path).clients, tmp_path).groups["b"].share == 3
        assert [line for line in text.splitlines() if line not in file.read_text()] == []


def test_a_group_that_is_not_there_is_told_with_the_command_that_makes_it(tmp_path, error):
    path = config_in(tmp_path)
    told = error("key", "new", "a", "-c", path, "--group", "batch")
    assert f"hetero-gateway key group batch -c {path}" in told
