"""YAML files that people write: read strictly, and checked against a schema.

An unknown key is an error that names it, and so is one that is written twice. ``${NAME}`` in any
text is replaced from the environment. Every error is a ``ConfigError``: file, line, key, what is
wrong (``files/problems.py``).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.problems import Document, Key, Problems

_ENV_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class StrictModel(BaseModel):
    """Immutable; unknown keys, infinities and NaN are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is written twice: the first one would be dropped without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is written twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


ModelT = TypeVar("ModelT", bound=BaseModel)


def read_yaml(path: Path) -> Document:
    """A YAML mapping with ``${NAME}`` expanded. Raises ConfigError with file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        not_text = isinstance(error, UnicodeDecodeError)
        reason = "it is not UTF-8 text" if not_text else getattr(error, "strerror", error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            data = None if root is None else loader.construct_document(root)
        finally:
            loader.dispose()
        if root is None or not isinstance(data, dict):
            raise ConfigError(f"{path}: must be a mapping of keys, not {type(data).__name__}")
        document = Document(data, root)
        problems = Problems(str(path), document)
        for name, value in data.items():
            document[name] = _expand(value, (name,), problems)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{mark.line + 1}:" if mark else ""
        problem = getattr(error, "problem", None) or "broken YAML"
        raise ConfigError(f"{path}:{where} {problem}") from error
    except ValueError as error:  # a date or number that PyYAML takes for one and cannot build
        raise ConfigError(f"{path}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply, or an alias of itself") from error
    problems.raise_any()
    return document


def _expand(value: Any, key: Key, problems: Problems) -> Any:
    if isinstance(value, dict):
        return {name: _expand(inner, (*key, name), problems) for name, inner in value.items()}
    if isinstance(value, list):
        return [_expand(inner, (*key, number), problems) for number, inner in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in os.environ:
            problems.add(key, f"the environment variable {name} is not set")
        return os.environ.get(name, "")

    return _ENV_REFERENCE.sub(replace, value)


def parse_model(model: type[ModelT], data: Any, source: str) -> ModelT:
    """Check ``data`` against a pydantic model; its errors become one ConfigError."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = Problems(source, data)
        problems.add_all(model, error)
        problems.raise_any()
        raise  # never: there is at least one
