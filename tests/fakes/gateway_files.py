"""Files of a gateway, good and bad, and what is said of them."""

import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import GatewayConfig, load_gateway_config

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
    text = data if isinstance(data, str) else yaml.dump(data, Dumper=yaml.CSafeDumper)
    path.write_text(text, encoding="utf-8")
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


def clients(folder: Path, **keys: dict[str, Any]) -> dict[str, str]:
    """The section ``clients`` for a file of keys: that of ``a`` is ``ka``; with further fields."""
    entries = [
        {"name": name, "hash": f"sha256:{sha256(f'k{name}'.encode()).hexdigest()}"} | fields
        for name, fields in keys.items()
    ]
    return {"keys_file": str(write(folder / "keys.yaml", {"keys": entries}))}
