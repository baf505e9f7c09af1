"""YAML files that people write: read strictly, checked against a schema, told of in one line.

An unknown key is an error that names it, and so is one that is written twice. ``${NAME}`` in any
text is replaced from the environment. Every error is a ``ConfigError``: file, key, what is wrong.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from hetero_gateway.core.nearest import nearest_names
from hetero_gateway.errors import ConfigError

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


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping with ``${NAME}`` expanded. Raises ConfigError with file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        not_text = isinstance(error, UnicodeDecodeError)
        reason = "it is not UTF-8 text" if not_text else getattr(error, "strerror", error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    try:
        data = yaml.load(text, _Loader)  # a SafeLoader
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: must be a mapping of keys, not {type(data).__name__}")
        expanded: dict[str, Any] = _expand(data, str(path), "")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "broken YAML"
        raise ConfigError(f"{path}:{where} {problem}") from error
    except ValueError as error:  # a date or number that PyYAML takes for one and cannot build
        raise ConfigError(f"{path}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply, or an alias of itself") from error
    return expanded


def _expand(value: Any, source: str, key: str) -> Any:
    if isinstance(value, dict):
        return {k: _expand(v, source, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [_expand(v, source, f"{key}.{i}") for i, v in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in os.environ:
            raise ConfigError(f"{source}: {key}: the environment variable {name} is not set")
        return os.environ[name]

    return _ENV_REFERENCE.sub(replace, value)


def parse_model(model: type[ModelT], data: Any, source: str) -> ModelT:
    """Check ``data`` against a pydantic model; the first error becomes a one-line ConfigError."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        _raise_config_error(model, error, source)


def _raise_config_error(model: type[BaseModel], error: ValidationError, source: str) -> NoReturn:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown key"
        if near := nearest_names(str(first["loc"][-1]), _field_names(model), 1, least=0.6):
            message += f"; did you mean {near[0]}?"
    elif first["type"] == "missing":
        message = "required, but missing"
    raise ConfigError(f"{source}: {key + ': ' if key else ''}{message}") from error


def _field_names(model: type[BaseModel]) -> list[str]:
    names: list[str] = []
    for name, info in model.model_fields.items():
        names.append(name)
        annotation = info.annotation
        for inner in getattr(annotation, "__args__", (annotation,)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                names.extend(_field_names(inner))
    return names
