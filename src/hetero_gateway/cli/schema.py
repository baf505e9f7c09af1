"""``schema``: the JSON schema of a gateway's configuration, for editors."""

import argparse
import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from hetero_gateway.files.gateway_config import GatewayConfig
from hetero_gateway.files.yaml_file import StrictModel


def run(args: argparse.Namespace) -> int:
    print(json.dumps(gateway_schema(), indent=2))
    return 0


def gateway_schema() -> dict[str, Any]:
    """The schema, with the source's description of each key."""
    schema = GatewayConfig.model_json_schema()
    classes = {each.__name__: each for each in _models(StrictModel)}
    parts = schema.get("$defs", {}) | {GatewayConfig.__name__: schema}
    for name, part in parts.items():
        if name in classes:
            said = _descriptions(classes[name])
            for field, of_field in part.get("properties", {}).items():
                if field in said:
                    of_field["description"] = said[field]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _models(base: type[StrictModel]) -> Iterator[type[StrictModel]]:
    for each in base.__subclasses__():
        yield each
        yield from _models(each)


def _descriptions(model: type[StrictModel]) -> dict[str, str]:
    """The texts below fields in the source, by the names used in the file."""
    found: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if not issubclass(each, StrictModel):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(body, ast.ClassDef)
        for before, node in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(before, ast.AnnAssign)
                and isinstance(before.target, ast.Name)
                and isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                field = model.model_fields.get(before.target.id)
                name = (field.alias if field is not None else None) or before.target.id
                found[name] = " ".join(node.value.value.split())
    return found
