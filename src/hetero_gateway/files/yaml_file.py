"""YAML files that people write: read strictly, and checked against a schema.

An unknown or repeated key is an error that names it. ``${NAME}`` in any text is replaced from the
environment. Every error is a ``ConfigError``: file, line, key, what is wrong
(``files/problems.py``).
"""

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.problems import Document, Key, Problems, shown
from hetero_gateway.files.whole_file import named

# Far above 100 000 keys, and read in minutes at worst.
_MOST_BYTES = 1 << 25
# Values of a file, each as often as an alias repeats it: ten lines of aliases are a billion.
_MOST_VALUES = 1_000_000
# PyYAML's exceptions besides its own errors, for a tag whose value does not fit (``!!bool maybe``).
_UNFIT = (ValueError, KeyError, IndexError, AttributeError, TypeError, OverflowError)
_ENV_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class StrictModel(BaseModel):
    """Immutable; unknown keys, infinities and NaN are errors. A text below a field describes it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _KeysOnce(SafeConstructor):
    """Refuses a repeated key: otherwise the first one would be dropped silently."""

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


class _Loader(_KeysOnce, yaml.SafeLoader):
    """Its errors are more precise than libyaml's, with the right line."""


_IN_C: list[type[Any]] = []
with contextlib.suppress(ImportError):  # if PyYAML was built without libyaml
    from yaml import cyaml

    class _LoaderInC(Composer, cyaml.CParser, _KeysOnce, Resolver):  # type: ignore[name-defined, misc]
        """Scanned and parsed by libyaml, six times as fast. PyYAML's own ``CSafeLoader`` also
        composes nodes in C, where deep nesting crashes the process.
        """

        def __init__(self, text: str) -> None:
            cyaml.CParser.__init__(self, text)  # type: ignore[attr-defined]
            for part in (Composer, SafeConstructor, Resolver):
                part.__init__(self)

    _IN_C.append(_LoaderInC)


def _built(text: str) -> tuple[yaml.Node | None, Any]:
    """The document's root and the object built from it. Raises PyYAML's exceptions."""
    for kind in _IN_C:
        with contextlib.suppress(yaml.YAMLError, *_UNFIT):
            return _built_by(kind, text)
    return _built_by(_Loader, text)


def _built_by(kind: type[Any], text: str) -> tuple[yaml.Node | None, Any]:
    loader = kind(text)
    try:
        root = loader.get_single_node()
        return root, None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


_KINDS = {list: "a list", str: "a text", int: "a number", float: "a number"}

ModelT = TypeVar("ModelT", bound=BaseModel)


def read_yaml(path: Path, overrides: Mapping[str, Any] | None = None) -> Document:
    """A YAML mapping with ``${NAME}`` expanded. Raises ConfigError with file and line.

    Args:
        overrides: dotted keys from the command line, e.g. ``{"server.port": 9000}``; None values
            are ignored.
    """
    with named(path, "read"), path.open(encoding="utf-8") as file:
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{path}: longer than {_MOST_BYTES} characters")
    document = parse_yaml(text, str(path))
    for dotted, value in (overrides or {}).items():
        if value is not None:
            *parents, last = dotted.split(".")
            place: Any = document
            for name in parents:
                place = place.setdefault(name, {}) if isinstance(place, dict) else None
            if isinstance(place, dict):  # else the schema says what is wrong with it
                place[last] = value
    return document


def parse_yaml(text: str, source: str, *, expands: bool = True, quotes: bool = True) -> Document:
    """The YAML mapping in a text. Raises ConfigError, which quotes nothing unless it may.

    Args:
        source: the file's name, or another source.
        expands: ``${NAME}`` is replaced from the environment.
    """
    try:
        root, data = _built(text)
        if data is None:
            raise ConfigError(f"{source}: there is nothing in it; it must be a mapping of keys")
        if root is None or not isinstance(data, dict):
            what = _KINDS.get(type(data), "a single value")
            raise ConfigError(f"{source}: must be a mapping of keys (`name: value`), not {what}")
        document = Document(data, root)
        problems = Problems(source, document)
        values = _Values(problems, expands=expands)
        for name, value in data.items():
            document[name] = values.expand(value, (name,))
    except yaml.YAMLError as error:
        line, problem = _problem(error, text)
        where = "" if line is None else f"{line}:"
        raise ConfigError(
            f"{source}:{where} {shown(problem if quotes else 'broken YAML')}"
        ) from error
    except _UNFIT as error:  # looks like a date or number, but is invalid
        told = quotes and isinstance(error, ValueError)
        what = shown(str(error)) if told else "a value does not fit its tag"
        raise ConfigError(f"{source}: {what}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply, or an alias of itself") from error
    problems.raise_any()
    return document


def _problem(error: yaml.YAMLError, text: str) -> tuple[int | None, str]:
    """The line of an error, from 1, and its description for the file's author."""
    mark, begun = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or "broken YAML"
    context = getattr(error, "context", None) or ""
    line = None if mark is None else mark.line + 1
    if line is not None and "\t" in _indent(text, line):
        return line, "the line is indented by a tab; YAML wants spaces"
    if begun is not None and "quoted scalar" in context:
        return begun.line + 1, "the quote that begins here does not end"
    return line, problem


def _indent(text: str, line: int) -> str:
    lines = text.splitlines()
    found = lines[line - 1] if line <= len(lines) else ""
    return found[: len(found) - len(found.lstrip())]


class _Values:
    """Copies the data, with its references to the environment replaced."""

    def __init__(self, problems: Problems, *, expands: bool) -> None:
        self._problems = problems
        self._expands = expands
        self._left = _MOST_VALUES

    def expand(self, value: Any, key: Key) -> Any:
        """Raises ValueError: there are too many."""
        self._left -= 1
        if self._left < 0:
            raise ValueError(
                f"more than {_MOST_VALUES} values, each alias counted as what it is of"
            )
        if isinstance(value, dict):
            return {name: self.expand(inner, (*key, name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.expand(inner, (*key, number)) for number, inner in enumerate(value)]
        if not isinstance(value, str) or not self._expands:
            return value

        def replace(match: re.Match[str]) -> str:
            name = match.group(1)
            if name not in os.environ:
                self._problems.add(key, f"the environment variable {name} is not set")
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
