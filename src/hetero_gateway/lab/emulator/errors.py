"""vLLM's error bodies, in its own words (observed on vLLM 0.32)."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

ModelT = TypeVar("ModelT", bound=BaseModel)


class ApiError(Exception):
    """A refusal, rendered as vLLM renders it.

    Two names are alike on purpose: ``BadRequestError`` is the engine's refusal of a value,
    ``Bad Request`` (with a space) the web framework's refusal of a shape.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "BadRequestError",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param

    def body(self, anthropic: bool = False) -> bytes:
        """OpenAI's shape, or that of /v1/messages."""
        if anthropic:
            return msgspec.json.encode(
                {"type": "error", "error": {"type": self.kind, "message": self.message}}
            )
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.kind,
                    "param": self.param,
                    "code": self.status,
                }
            }
        )


def bad_value(message: str, param: str, value: Any) -> ApiError:
    """A value that the engine refuses, named twice as vLLM does."""
    return ApiError(f"{message} (parameter={param}, value={value})", param=param)


def bad_shape(details: list[dict[str, Any]]) -> ApiError:
    """What FastAPI's validation found, in vLLM's rendering."""
    count = "1 validation error" if len(details) == 1 else f"{len(details)} validation errors"
    lines = "".join(f"\n  {detail}" for detail in details)
    return ApiError(f"{count}:{lines}", kind="Bad Request", param=details[0]["loc"])


def validate(model: type[ModelT], body: Any) -> ModelT:
    """``body`` as a pydantic model.

    Raises:
        ApiError: what is wrong with its shape.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        details = [
            {
                "type": e["type"],
                "loc": ".".join(["body", *(str(part) for part in e["loc"] if _is_key(part))]),
                "msg": e["msg"],
                "input": _describe(e["input"]),
            }
            for e in error.errors(include_url=False)
        ]
        raise bad_shape(details) from None


def _is_key(part: int | str) -> bool:
    # A union's member is in the location too ("str", "list[str]"); vLLM leaves it out.
    return isinstance(part, int) or (part not in ("str", "int", "bool") and "[" not in part)


def _describe(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)
