"""Clients' keys: the file that names them, its entries, and how a key is made.

    groups:
      team-a: {tokens_per_minute: 200000, models: [llama-3-8b], classes: [interactive, batch]}
    keys:
      - {name: alice, hash: "sha256:3fc9…", group: team-a, requests_per_minute: 60}

A key itself is stored nowhere. Made here it is 256 random bits, which nobody can guess, so one hash
of it is enough, and a slow one (bcrypt, Argon2) would cost each request milliseconds. Two kinds are
known: ``sha256``, which LiteLLM's table of keys has as well, and ``hmac-sha256``, with a secret
from the environment (``clients.hash_key_env``): then even a key that a person made up cannot be
guessed from the file alone.
"""

import base64
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BeforeValidator, Field, field_validator, model_validator

from hetero_gateway.core.limits.accounts import Limits
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.model_names import ModelName
from hetero_gateway.files.whole_file import write_keys
from hetero_gateway.files.yaml_file import StrictModel, parse_model, parse_yaml, read_yaml

# Characters that are safe in a metric's label.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
_HASH = re.compile(r"(sha256|hmac-sha256):([0-9a-f]{64})")
# Longer ones are unknown, and are not hashed.
MOST_KEY_BYTES = 512
# A shorter one could be guessed.
_LEAST_KEY_CHARACTERS = 20
_KEY_BYTES = 32
_MOST = 2**50


def _check_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(
            "must be 1 to 63 letters, digits, dots, dashes, underscores or @, starting with a "
            "letter or digit"
        )
    return value


class ClientLimits(StrictModel):
    """The rights of a key, or of all keys of a group together."""

    models: list[ModelName] | None = None
    """Names of the models that may be used; none: all."""
    requests_per_minute: int | None = Field(None, ge=1, le=_MOST)
    """Most requests in any 60 s; none: no limit."""
    tokens_per_minute: int | None = Field(None, ge=1, le=_MOST)
    """Most tokens, prompts and outputs, in any 60 s."""
    concurrency: int | None = Field(None, ge=1, le=_MOST)
    """Most requests at a time, including waiting ones."""
    request_class: str | None = Field(None, alias="class")
    """The class of its requests; none: interactive."""
    classes: list[str] | None = None
    """Classes that a request may name in x-hetero-gateway-class."""
    share: float | None = Field(None, gt=0, le=1e6)
    """Weight when clients compete; none: 1."""

    @property
    def limits(self) -> Limits:
        return Limits(self.requests_per_minute, self.tokens_per_minute, self.concurrency)


class KeyConfig(ClientLimits):
    """One key."""

    name: str
    """Its name in metrics and /admin."""
    hash: str
    """As printed by `hetero-gateway key new`."""
    group: str | None = None
    """The group whose limits it shares; models, class, classes and share default to the
        group's."""
    expires: datetime | None = None
    """Refused from then on; a date, or a time (UTC if it has no zone)."""

    _named = field_validator("name")(_check_name)

    @field_validator("hash")
    @classmethod
    def _check_hash(cls, value: str) -> str:
        if not _HASH.fullmatch(value):
            raise ValueError("must be sha256: or hmac-sha256: and 64 hexadecimal digits")
        return value

    @field_validator("expires", mode="before")
    @classmethod
    def _at_midnight(cls, value: Any) -> Any:
        if isinstance(value, date) and not isinstance(value, datetime):
            value = datetime(value.year, value.month, value.day)
        return value

    @field_validator("expires")
    @classmethod
    def _in_utc(cls, value: datetime | None) -> datetime | None:
        return value.replace(tzinfo=UTC) if value is not None and value.tzinfo is None else value

    @property
    def scheme(self) -> str:
        return self.hash.partition(":")[0]

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.hash.partition(":")[2])


class KeysFile(StrictModel):
    """The whole file, or the same in an environment variable."""

    groups: dict[str, ClientLimits] = Field(default_factory=dict)
    keys: list[KeyConfig] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names: set[str] = set()
        hashes: set[str] = set()
        for name in self.groups:
            _check_name(name)
        for key in self.keys:
            if key.name in names:
                raise ValueError(f"keys: the name {key.name!r} is used twice")
            if key.hash in hashes:
                raise ValueError(f"keys: {key.name} has the hash of another key")
            names.add(key.name)
            hashes.add(key.hash)
        return self


def _off(value: Any) -> Any:
    """YAML takes a plain ``off`` for false."""
    return "off" if value is False else value


class ClientsConfig(StrictModel):
    """Who may use the gateway, and how much: keys by name, in addition to
    ``server.api_key_env``'s."""

    keys_file: Path | None = None
    """The file of keys and groups, read again with each reload."""
    keys_env: str | None = None
    """Environment variable with such a file's text."""
    hash_key_env: str | None = None
    """Environment variable with the secret of hmac-sha256 hashes."""
    groups: dict[str, ClientLimits] = Field(default_factory=dict)
    """Groups, in addition to those of the file."""
    most_labels: int = Field(200, ge=0, le=100_000)
    """Most clients with metrics of their own."""
    usage_file: Annotated[Literal["off"] | Path | None, BeforeValidator(_off)] = None
    """SQLite file that keeps clients' usage over restarts; none: in Redis if gateways share one,
        else next to keys_file; off: nowhere."""

    @property
    def wanted(self) -> bool:
        """Whether clients have keys of their own."""
        return self.keys_file is not None or self.keys_env is not None

    def usage_place(self, shared: bool) -> Path | Literal["redis"] | None:
        """Where clients' usage is kept; None: nowhere.

        Args:
            shared: gateways share a Redis.
        """
        if not self.wanted or self.usage_file == "off":
            return None
        if self.usage_file is not None:
            return self.usage_file
        if shared:
            return "redis"
        return None if self.keys_file is None else self.keys_file.with_suffix(".usage.sqlite")


def read_clients(config: ClientsConfig, base_dir: Path) -> KeysFile:
    """All keys and groups that a configuration names. Raises ConfigError."""
    groups = dict(config.groups)
    keys: list[KeyConfig] = []
    for part in _parts(config, base_dir):
        if twice := groups.keys() & part.groups.keys():
            raise ConfigError(f"clients: the group {min(twice)!r} is there twice")
        groups |= part.groups
        keys += part.keys
    for key in keys:
        # A group may be in one part, and its keys in another.
        if key.group is not None and key.group not in groups:
            raise ConfigError(f"clients: {key.name}: there is no group {key.group!r}")
        if key.scheme != "sha256" and config.hash_key_env is None:
            raise ConfigError(f"clients: {key.name}: its hash needs clients.hash_key_env")
    return parse_model(KeysFile, {"groups": groups, "keys": keys}, "clients")


def changes(before: KeysFile, after: KeysFile) -> list[str]:
    """The names of keys and groups that were added, removed or changed."""
    names = []
    for kind, old, new in (
        ("group", before.groups, after.groups),
        ("key", {k.name: k for k in before.keys}, {k.name: k for k in after.keys}),
    ):
        names += [
            f"{kind} {n}" for n in sorted(old.keys() | new.keys()) if old.get(n) != new.get(n)
        ]
    return names


def read_keys(path: Path) -> KeysFile:
    """The keys in a file. Raises ConfigError, in one line."""
    return parse_model(KeysFile, read_yaml(path), str(path))


def parse_keys(text: str, source: str) -> KeysFile:
    """The keys in a text, YAML or JSON. Raises ConfigError, which does not quote it."""
    return parse_model(KeysFile, parse_yaml(text, source, expands=False, quotes=False), source)


def new_key() -> str:
    """A key of 256 random bits."""
    return "hg-" + base64.urlsafe_b64encode(secrets.token_bytes(_KEY_BYTES)).rstrip(b"=").decode()


def hash_of(key: str, hash_key: str | None = None) -> str:
    """The stored hash of a key; with a secret, keys can only be guessed by those who know that.

    Raises:
        ConfigError: the key is too short, or invalid in a header.
    """
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError("a key must be of visible ASCII characters, without spaces")
    if not _LEAST_KEY_CHARACTERS <= len(key) <= MOST_KEY_BYTES:
        raise ConfigError(f"a key must have {_LEAST_KEY_CHARACTERS} to {MOST_KEY_BYTES} characters")
    return digest_of(key, hash_key)


def digest_of(key: str, hash_key: str | None) -> str:
    """The same for any key: a short one may be guessed without a secret."""
    if hash_key is None:
        return "sha256:" + hashlib.sha256(key.encode()).hexdigest()
    return "hmac-sha256:" + hmac.digest(hash_key.encode(), key.encode(), "sha256").hex()


def add_key(path: Path, entry: Mapping[str, Any]) -> None:
    """Append a key to a file, which is created if needed; existing content stays as it is.

    Raises:
        ConfigError: it is not a file of keys, or the key cannot be added to its end.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    # JSON is YAML, and safe to paste.
    told: str = yaml.safe_dump(
        dict(entry), default_flow_style=True, sort_keys=False, width=10_000
    ).strip()
    before = read_keys(path) if text.strip() else KeysFile()
    if any(key.name == entry["name"] for key in before.keys):
        raise ConfigError(f"{path}: there is a key named {entry['name']!r} already")
    wanted = parse_model(
        KeysFile, {"groups": before.groups, "keys": [*before.keys, dict(entry)]}, str(path)
    )
    if text and not text.endswith("\n"):
        text += "\n"
    if "keys" not in (yaml.safe_load(text) or {}):
        text += "keys:\n"
    text += f"  - {told}\n"
    try:
        added = parse_keys(text, str(path)) == wanted
    except ConfigError:
        added = False
    if not added:
        raise ConfigError(
            f"{path}: the list `keys` must be the last in the file, one key a line; add this to "
            f"it: - {told}"
        )
    write_keys(path, text)


def add_group(path: Path, name: str, limits: Mapping[str, Any]) -> None:
    """Append a group to a file, which is created if needed; existing content stays as it is.

    Raises:
        ConfigError: it is not a file of keys, has that group, or has `groups` in another form
            than one group per line.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    told: str = yaml.safe_dump(
        {name: dict(limits)}, default_flow_style=True, sort_keys=False, width=10_000
    ).strip()[1:-1]
    before = read_keys(path) if text.strip() else KeysFile()
    if name in before.groups:
        raise ConfigError(f"{path}: there is a group named {name!r} already; change its line there")
    wanted = parse_model(
        KeysFile, {"groups": before.groups | {name: dict(limits)}, "keys": before.keys}, str(path)
    )
    lines = text.splitlines(keepends=True)
    heads = [line.split("#")[0].rstrip() for line in lines]
    if "groups:" in heads:
        lines.insert(heads.index("groups:") + 1, f"  {told}\n")
    else:
        lines[:0] = ["groups:\n", f"  {told}\n"]
    text = "".join(lines)
    try:
        added = parse_keys(text, str(path)) == wanted
    except ConfigError:
        added = False
    if not added:
        raise ConfigError(f"{path}: `groups` is not one group a line; add this to it: {told}")
    write_keys(path, text)


def _parts(config: ClientsConfig, base_dir: Path) -> Iterator[KeysFile]:
    if config.keys_file is not None:
        yield read_keys(base_dir / config.keys_file)
    if (name := config.keys_env) is not None:
        text = os.environ.get(name)
        if not text:
            raise ConfigError(f"clients.keys_env: the environment variable {name} is not set")
        yield parse_keys(text, f"clients.keys_env: {name}")
