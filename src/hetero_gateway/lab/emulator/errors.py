"""vLLM's error bodies, in its own words: ``refusals.csv`` (observed on vLLM 0.32)."""

import csv
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hetero_gateway.engines.vllm import paths

ModelT = TypeVar("ModelT", bound=BaseModel)

with Path(__file__).with_name("refusals.csv").open(encoding="utf-8", newline="") as _file:
    _REFUSALS = {row["name"]: row for row in csv.DictReader(_file)}


class RefusedRequest(Exception):
    """An error instead of an answer; ``allow``: the method that the path accepts.

    Two of the engine's types are deliberately alike: ``BadRequestError`` is its refusal of a
    value, ``Bad Request`` (with a space) the web framework's refusal of a type.
    """

    def __init__(self, status: int, document: dict[str, Any], allow: str = "") -> None:
        super().__init__(document)
        self.status = status
        self.document = document
        self.headers = [(b"allow", allow.encode())] if allow else []

    def document_at(self, path: str) -> dict[str, Any]:
        """The error on this path: in OpenAI's format, or in that of /v1/messages."""
        error = self.document.get("error")
        if isinstance(error, dict) and path.startswith(paths.MESSAGES):
            error = {key: error[key] for key in ("type", "message")}
            return {"type": "error", "error": error}
        return self.document


def _api_error(message: str, *, status: int, kind: str, param: str | None) -> RefusedRequest:
    error = {"message": message, "type": kind, "param": param, "code": status}
    return RefusedRequest(status, {"error": error})


def refused(reason: str, **values: Any) -> RefusedRequest:
    """A refusal of ``refusals.csv``, with these values inserted."""
    row = _REFUSALS[reason]
    param = row["param"].format(**values) or None
    message = row["message"].format(**values)
    return _api_error(message, status=int(row["status"]), kind=row["kind"], param=param)


def bad_shape(*details: dict[str, Any]) -> RefusedRequest:
    """FastAPI's validation errors, in vLLM's rendering."""
    count = "1 validation error" if len(details) == 1 else f"{len(details)} validation errors"
    lines = "".join(f"\n  {detail}" for detail in details)
    param = details[0]["loc"]
    return _api_error(f"{count}:{lines}", status=400, kind="Bad Request", param=param)


def bad_body(
    kind: str, message: str, given: str, loc: str = "body", **context: dict[str, str]
) -> RefusedRequest:
    """A body that is not an object, in the words of FastAPI's validation."""
    return bad_shape({"type": kind, "loc": loc, "msg": message, "input": given, **context})


def validate(model: type[ModelT], body: Any) -> ModelT:
    """``body`` as a pydantic model. Raises RefusedRequest: its structure is wrong."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        details = [
            {
                "type": e["type"],
                "loc": ".".join(["body", *(str(part) for part in e["loc"] if _is_key(part))]),
                "msg": e["msg"],
                "input": describe(e["input"]),
            }
            for e in error.errors(include_url=False)
        ]
        raise bad_shape(*details) from None


def _is_key(part: int | str) -> bool:
    # A union's member is in the location too ("str", "list[str]"); vLLM leaves it out.
    return isinstance(part, int) or (part not in ("str", "int", "bool") and "[" not in part)


def describe(value: Any) -> str:
    """A refused value, in short."""
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)
