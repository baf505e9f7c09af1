"""Envoy's data on clients' keys for the time when no picker answers: one file, without a key in it.

    # hetero-gateway: clients' keys, for docker/envoy/envoy.yaml
    key sha256 3fc9… never any
    key hmac-sha256 a96844af… 1802649600 60
    hash-secret HASH_KEY
    instance-key VLLM_KEY
    end

One line per key: how it is hashed, its hash, the time (seconds since 1970) from which it is
refused, and how many requests it may make in a minute. ``open``: no key is needed. ``hash-secret``
and ``instance-key`` name variables of Envoy's environment: the secret of the hashes, and the key of
all instances. A file that does not end in ``end``, or contains anything else, admits nobody: this
includes one that was cut off.
"""

import math
import re
from pathlib import Path
from typing import NamedTuple

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.client_keys import KeyConfig, KeysFile, digest_of, read_clients
from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.secrets import secret

# The format that the script in envoy.yaml reads.
_VARIABLE = re.compile(r"\w+", re.ASCII)


class EnvoyKeys(NamedTuple):
    """``text``: of the file. ``notes``: a line for each rule that Envoy will not apply."""

    text: str
    notes: tuple[str, ...]


def envoy_keys(config: GatewayConfig, base_dir: Path, *, any_model: bool) -> EnvoyKeys:
    """The file for a gateway's configuration.

    Args:
        any_model: include keys that may use only some models, which Envoy cannot enforce.

    Raises:
        ConfigError: a file or a variable that the configuration names cannot be used.
    """
    keys = read_clients(config.clients, base_dir)
    shared = secret(config.server.api_key_env, "server.api_key_env")
    hash_key = secret(config.clients.hash_key_env, "clients.hash_key_env")
    lines = ["# hetero-gateway: clients' keys, for docker/envoy/envoy.yaml"]
    notes = []
    if shared is None and not config.clients.wanted:
        lines.append("open")
        notes.append("no keys are configured: without a picker, too, everybody is served")
    if shared is not None:
        lines.append(f"key {digest_of(shared, hash_key).replace(':', ' ')} never any")
    bound = [key for key in keys.keys if not any_model and _is_bound(key, keys)]
    lines += [_line(key, keys) for key in keys.keys if key not in bound]
    if bound:
        names = ", ".join(key.name for key in bound)
        notes.append(
            f"left out, as Envoy cannot tell models apart (--any-model takes them in): {names}"
        )
    if any(line.startswith("key hmac-") for line in lines):
        assert config.clients.hash_key_env is not None
        lines.append(f"hash-secret {_variable(config.clients.hash_key_env)}")
        notes.append(f"Envoy needs the variable {config.clients.hash_key_env} in its environment")
    variables = {each.api_key_env for each in config.instances}
    variables |= {each.api_key_env for each in config.discovery}
    if len(variables) == 1 and (name := variables.pop()) is not None:
        lines.append(f"instance-key {_variable(name)}")
        notes.append(f"Envoy needs the variable {name} in its environment, for the instances")
    elif variables - {None}:
        notes.append(
            "the instances have different keys: without a picker Envoy sends none, and those that "
            "have one answer 401"
        )
    return EnvoyKeys("\n".join([*lines, "end"]) + "\n", tuple(notes))


def _is_bound(key: KeyConfig, keys: KeysFile) -> bool:
    """Whether a key may use only some models."""
    of_group = None if key.group is None else keys.groups[key.group].models
    return key.models is not None or of_group is not None


def _line(key: KeyConfig, keys: KeysFile) -> str:
    until = "never" if key.expires is None else str(math.floor(key.expires.timestamp()))
    limits = [key.requests_per_minute]
    if key.group is not None:
        limits.append(keys.groups[key.group].requests_per_minute)
    most = min((limit for limit in limits if limit is not None), default="any")
    return f"key {key.scheme} {key.digest.hex()} {until} {most}"


def _variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise ConfigError(f"the variable {name!r}: letters, digits and _ only, for Envoy")
    return name
