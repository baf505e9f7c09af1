"""Files of keys: what is read, what is refused in one line, and what is added to their ends."""

import hashlib
from pathlib import Path

import pytest

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.client_keys import (
    ClientsConfig,
    add_key,
    changes,
    hash_of,
    new_key,
    read_clients,
    read_keys,
)
from hetero_gateway.files.gateway_config import load_gateway_config

HASH = "sha256:" + "a" * 64


def test_keys_are_random_and_their_hash_is_litellm_s() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    key = keys.pop()
    assert len(key) == 46
    assert hash_of(key) == "sha256:" + hashlib.sha256(key.encode()).hexdigest()
    assert hash_of(key, "one") != hash_of(key, "other")


@pytest.mark.parametrize("key", ["short", "with a space and long enough", "ümlaut" * 9, "x" * 513])
def test_a_key_that_is_none_is_refused_and_not_quoted(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hash_of(key)
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"keys: [{{name: a, hash: '{HASH}'}}, {{name: a, hash: '{HASH}b'}}]", "hash"),
        (f"keys: [{{name: a, hash: '{HASH}'}}, {{name: b, hash: '{HASH}'}}]", "hash of another"),
        ("keys: [{name: a, hash: secret-key}]", "keys.0.hash: must be sha256:"),
        (f"keys: [{{name: 'a b', hash: '{HASH}'}}]", "keys.0.name"),
        (f"keys: [{{name: a, hash: '{HASH}', rpm: 3}}]", "unknown key"),
        (f"keys: [{{name: a, hash: '{HASH}', requests_per_minute: 0}}]", "requests_per_minute"),
        (f"keys: [{{name: a, hash: '{HASH}', expires: soon}}]", "expires"),
        (f"keys: [{{name: a, hash: '{HASH}', group: g}}]", "there is no group 'g'"),
        (f"keys: [{{name: a, hash: 'hmac-{HASH}'}}]", "hash_key_env"),
        ("groups: {'a b': {}}", "1 to 63 letters"),
        ("[", "keys.yaml:1: "),
    ],
)
def test_what_is_wrong_is_told_in_one_line(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "keys.yaml").write_text(text)
    (tmp_path / "gateway.yaml").write_text("clients: {keys_file: keys.yaml}")
    with pytest.raises(ConfigError) as caught:
        load_gateway_config(tmp_path / "gateway.yaml")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret-key" not in str(caught.value)


def test_what_stands_in_a_file_stays_as_a_key_is_added(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    text = (
        f"# mine\ngroups:\n  g: {{concurrency: 3}}\nkeys:\n  # old\n  - {{name: a, hash: {HASH!r}}}"
    )
    path.write_text(text)
    path.chmod(0o640)
    before = read_keys(path)
    add_key(path, {"name": "b", "hash": hash_of(new_key()), "group": "g"})
    assert path.read_text().startswith(text + "\n  - {name: b, ")
    assert path.stat().st_mode & 0o777 == 0o640
    assert changes(before, read_keys(path)) == ["key b"]
    with pytest.raises(ConfigError, match="named 'b' already"):
        add_key(path, {"name": "b", "hash": hash_of(new_key())})


def test_a_new_file_is_its_owner_s_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    add_key(path, {"name": "b", "hash": HASH})
    assert path.stat().st_mode & 0o777 == 0o600
    assert [key.name for key in read_keys(path).keys] == ["b"]


@pytest.mark.parametrize(
    "text", ["keys: []\n", "keys: [{name: a, hash: X}]\n", "keys:\n- 1\nx: 2\n"]
)
def test_a_file_with_another_end_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text.replace("X", HASH))
    with pytest.raises(ConfigError):
        add_key(path, {"name": "b", "hash": "sha256:" + "b" * 64})
    assert path.read_text() == text.replace("X", HASH)


def test_keys_come_from_the_environment_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYS_9", f'{{"keys": [{{"name": "a", "hash": "{HASH}", "group": "g"}}]}}')
    add_key(tmp_path / "keys.yaml", {"name": "b", "hash": "sha256:" + "b" * 64})
    config = ClientsConfig.model_validate(
        {"keys_file": "keys.yaml", "keys_env": "KEYS_9", "groups": {"g": {"share": 2}}}
    )
    whole = read_clients(config, tmp_path)
    assert [key.name for key in whole.keys] == ["b", "a"]
    monkeypatch.delenv("KEYS_9")
    with pytest.raises(ConfigError, match="KEYS_9 is not set"):
        read_clients(config, tmp_path)
