"""The fields of configurations: listing, comparing and mixing them."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel

from hetero_gateway.files.problems import Key

ModelT = TypeVar("ModelT", bound=BaseModel)


def fields_of(model: BaseModel, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every field with its key; for inner models, also in a list or mapping, their fields."""
    for name in type(model).model_fields:
        value = getattr(model, name)
        entries: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict | list):
            entries = value.items() if isinstance(value, dict) else enumerate(value)
        inside: list[tuple[Key, Any]] = [((name,), value), *(((name, i), v) for i, v in entries)]
        models = [(place, each) for place, each in inside if isinstance(each, BaseModel)]
        if not models:
            yield (*key, name), value
        for place, each in models:
            yield from fields_of(each, (*key, *place))


def differences(before: BaseModel, after: BaseModel, prefix: str = "") -> Iterator[str]:
    """The fields that differ, as ``scheduler.queue.timeout_s``; a list or mapping is one field."""
    for name in type(before).model_fields:
        one, other = getattr(before, name), getattr(after, name)
        if one == other:
            continue
        if isinstance(one, BaseModel) and isinstance(other, BaseModel):
            yield from differences(one, other, f"{prefix}{name}.")
        else:
            yield prefix + name


def with_fields_of(base: ModelT, other: ModelT, names: Collection[str]) -> ModelT:
    """``base``, with these fields (dotted names) as they are in ``other``."""
    update: dict[str, Any] = {}
    for name in type(base).model_fields:
        inner = [n.removeprefix(f"{name}.") for n in names if n.startswith(f"{name}.")]
        if name in names:
            update[name] = getattr(other, name)
        elif inner:
            update[name] = with_fields_of(getattr(base, name), getattr(other, name), inner)
    return base.model_copy(update=update) if update else base


def covers(fields: Collection[str], name: str) -> bool:
    """Whether a dotted name is one of the fields, or lies within one that is a section."""
    return any(name == field or name.startswith(f"{field}.") for field in fields)
