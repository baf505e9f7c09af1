"""A configuration's prerequisites: the files that it names, and optional packages.

``load_gateway_config`` checks both, so that ``validate``, ``serve`` and a reload report the same.
The contents of a file are checked by its user. The section ``picker`` is skipped, as ``serve``
ignores it.
"""

import importlib.util
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hetero_gateway.files.config_changes import fields_of
from hetero_gateway.files.problems import Key, Problems
from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.files.whole_file import named

# Files that must exist when the gateway starts; keys and trained models are read separately.
_FILES = frozenset(("ca_file", "certificate_file", "client_ca_file", "key_file", "tokenizer_file"))


def report_missing(config: BaseModel, base_dir: Path, problems: Problems) -> None:
    """Report missing files and packages, by their key; files are relative to ``base_dir``."""
    asked = [(k, v) for k, v in fields_of(config) if v is not None and k[0] != "picker"]
    for key, value in asked:
        module, extra = _package(key, value)
        if module and not _is_installed(module):
            problems.add(key, f"needs the extra: pip install 'hetero-gateway[{extra}]'")
    for key, value in asked:
        if key[-1] in _FILES:
            with problems.at(key), named(value, "read"):
                (base_dir / value).open("rb").close()
    for key, value in asked:
        if key[-1] == "profile" and key[0] != "following":  # those are also compared
            with problems.at(key):
                load_profile(value, base_dir)


def _package(key: Key, value: Any) -> tuple[str, str]:
    """The package that a setting imports: (module, our extra that has it); ("", ""): none."""
    if key == ("traces", "endpoint"):
        return "opentelemetry.exporter.otlp.proto.http", "otel"
    if key[-1] == "tokenizer_file":
        return "tokenizers", "tokenizers"
    return ("dns", "dns") if (key[0], key[-1], value) == ("discovery", "kind", "dns") else ("", "")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor is its parent package
        return False
