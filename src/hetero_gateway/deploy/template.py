"""The texts of ``templates/``, with their ``{{places}}`` filled in.

In a text, ``{{#name}} … {{/name}}`` around lines keeps them if the value is true, and
``{{^name}}`` if it is not, as in Mustache. In YAML, a string that is only a place becomes the value
with its type, and a key or an entry whose value is None is left out.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml

_BLOCK = re.compile(r"\{\{([#^])(\w+)\}\}\n(.*?)\{\{/\2\}\}\n", re.S)
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def text(name: str, values: Mapping[str, Any]) -> str:
    """A file of ``templates/``, filled in."""

    def block(found: re.Match[str]) -> str:
        return kept(found[3]) if bool(values[found[2]]) == (found[1] == "#") else ""

    def kept(template: str) -> str:
        return _BLOCK.sub(block, template)

    return fill(kept(_file(name)), values)


def fill(template: str, values: Mapping[str, Any]) -> str:
    """In one pass: inserted text is not searched again."""
    return _PLACE.sub(lambda place: str(values[place[1]]), template)


def piece(file: str, name: str, /, **values: Any) -> Any:
    """The entry of this name in a YAML file of ``templates/``, filled in; a fresh copy."""
    return filled(pieces(file)[name], values)


@cache
def pieces(file: str) -> dict[str, Any]:
    """All entries, with their places; not to be changed."""
    found: dict[str, Any] = yaml.load(_file(file), yaml.CSafeLoader)
    return found


def filled(template: Any, values: Mapping[str, Any]) -> Any:
    """An entry, filled in."""
    if isinstance(template, dict):
        made = {key: filled(value, values) for key, value in template.items()}
        return {key: value for key, value in made.items() if value is not None}
    if isinstance(template, list):
        return [v for v in (filled(entry, values) for entry in template) if v is not None]
    if not isinstance(template, str):
        return template
    whole = _PLACE.fullmatch(template)
    return values[whole[1]] if whole else fill(template, values)


def _file(name: str) -> str:
    return resources.files("hetero_gateway.deploy").joinpath("templates", name).read_text("utf-8")
