"""Errors in a file that a person wrote: all of them, each in one line.

A line reads ``FILE:LINE: key: what is wrong``, in the terms of the file's author rather than those
of the validation library.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hetero_gateway.core.nearest import nearest_names
from hetero_gateway.errors import ConfigError

Key = tuple[str | int, ...]

# The rest of a file with a hundred errors is reported once these are fixed.
_MOST = 20
_LONGEST_SHOWN = 200  # characters of a quoted name

_WORDS: Mapping[str, str] = {
    "missing": "required, but missing",
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "finite_number": "must be a finite number",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
}
# By the beginning of the error's type.
_KINDS: Mapping[str, str] = {
    "bool": "must be true or false",
    "dict": "must be a mapping of keys",
    "float": "must be a number",
    "int": "must be a whole number",
    "list": "must be a list",
    "model": "must be a mapping of keys",
    "path": "must be the path of a file",
    "string": "must be a text",
}


class Document(dict[str, Any]):
    """A mapping as it was read, with the line numbers of its keys."""

    def __init__(self, data: Mapping[str, Any], root: yaml.Node) -> None:
        super().__init__(data)
        self._root = root

    def line(self, key: Key) -> int | None:
        """The line (from 1) of a key, or of the mapping that lacks it; None: not from the file."""
        node, line = self._root, self._root.start_mark.line
        for part in key:
            found = _child(node, part)
            if found is None:
                return None if node is self._root else line + 1
            node, line = found
        return line + 1


def _child(node: yaml.Node, part: str | int) -> tuple[yaml.Node, int] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return value, key.start_mark.line
    elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        value = node.value[part]
        return value, value.start_mark.line
    return None


def shown(text: str) -> str:
    """A quote from a file, for one line of a message: printable, and not long."""
    text = "".join(c if c.isprintable() else "?" for c in text[: _LONGEST_SHOWN + 1])
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


class Misfits(ValueError):
    """All inconsistencies in a model, by key, for a validator to raise."""

    def __init__(self, found: Sequence[tuple[Key, str]]) -> None:
        super().__init__("; ".join(f"{'.'.join(map(str, key))}: {text}" for key, text in found))
        self.found = found


class Problems:
    """Collects errors, and raises them as one ``ConfigError``.

    Args:
        source: the file's name, or another source.
        data: what was read.
    """

    def __init__(self, source: str, data: Any) -> None:
        self._source = source
        self._data = data
        self._line: Callable[[Key], int | None] = (
            data.line if isinstance(data, Document) else lambda key: None
        )
        self._said: dict[tuple[int, str], None] = {}  # in the order of the file

    def add(self, key: Key, text: str) -> None:
        line = self._line(key)
        where = f"{self._source}:{line}" if line else self._source
        name = shown(".".join(map(str, key)))
        self._said[line or 0, f"{where}: {name + ': ' if key else ''}{text}"] = None

    @contextlib.contextmanager
    def at(self, key: Key, known: str = "") -> Iterator[None]:
        """Report an inner exception, without the prefix that ``key`` already has."""
        try:
            yield
        except (ConfigError, ValueError) as error:
            self.add(key, str(error).removeprefix(known))

    def add_all(self, model: type[BaseModel], error: ValidationError) -> None:
        """Everything that pydantic found."""
        by_key: dict[Key, list[str]] = {}
        for each in error.errors(include_url=False):
            key = _key_of(each["loc"], self._data, missing=each["type"] == "missing")
            raised = each.get("ctx", {}).get("error")
            if isinstance(raised, Misfits):
                for part, text in raised.found:
                    by_key.setdefault((*key, *part), []).append(text)
                continue
            by_key.setdefault(key, []).append(_words(model, key, each))
        for key, texts in by_key.items():
            # If any of several kinds is allowed, there is an error for each of them.
            first, *others = dict.fromkeys(texts)
            self.add(key, " or ".join([first, *(text.removeprefix("must be ") for text in others)]))

    def raise_any(self) -> None:
        """Raises ConfigError: there are problems."""
        lines = [text for _, text in sorted(self._said, key=lambda said: said[0])]
        if len(lines) > _MOST:
            lines[_MOST:] = [f"{self._source}: and {len(lines) - _MOST} more"]
        if lines:
            raise ConfigError(*lines)


def _key_of(loc: Sequence[str | int], data: Any, *, missing: bool) -> Key:
    """An error's place, without pydantic's names for the kinds of a union in it."""
    key: list[str | int] = []
    for number, part in enumerate(loc):
        if isinstance(data, Mapping) and (part in data or (missing and number == len(loc) - 1)):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            continue
        key.append(part)
    return tuple(key)


def _words(model: type[BaseModel], key: Key, error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        near = nearest_names(str(key[-1]), _names_at(model, key), 1, least=0.6)
        return "unknown key" + (f"; did you mean {near[0]}?" if near else "")
    if kind == "literal_error":
        names = [name.strip(" '") for name in context["expected"].replace(" or ", ", ").split(",")]
        near = nearest_names(str(error["input"]), names, 1, least=0.6)
        return f"must be one of {', '.join(names)}" + (f"; did you mean {near[0]}?" if near else "")
    if kind in _WORDS:
        return _WORDS[kind].format_map(context)
    if error["msg"].startswith("Input should be"):
        for beginning, words in _KINDS.items():
            if kind.startswith(beginning):
                return words
    return error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")


def _names_at(model: type[BaseModel], key: Key) -> list[str]:
    """The keys that are allowed where ``key`` is."""
    models = [model]
    for part in key[:-1]:
        if isinstance(part, str):
            fields = [each.model_fields[part] for each in models if part in each.model_fields]
            models = [inner for field in fields for inner in _models(field.annotation)]
    return [name for each in models for name in each.model_fields]


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field may contain, itself or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [inner for argument in get_args(annotation) for inner in _models(argument)]
