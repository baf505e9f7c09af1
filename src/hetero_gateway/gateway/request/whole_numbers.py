"""The whole numbers of a body, read as an engine reads them, and refused where it refuses them.

vLLM decodes a body with Python's ``json`` and validates it with pydantic, which accepts 5, 5.0, "5"
and true as whole numbers (tests/gateway/request/test_whole_numbers.py asks pydantic itself). What
neither would accept is answered here with 400: it must not come near the scheduler's arithmetic.
What an engine of some version accepts is never refused.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from hetero_gateway.errors import Refusal

# A longer raw value is not a number: Python's json refuses more than 4 300 digits.
MOST_BYTES = 1 << 13
# vLLM's own limit of ``n`` is 16 384 unless VLLM_MAX_N_SEQUENCES says otherwise: 64 times as much
# is more than an engine can hold.
MOST_SEQUENCES = 1 << 20
# No engine counts tokens in more than 64 bits. Newer ones refuse a limit above their context, older
# ones clamp it.
MOST_TOKENS = (1 << 63) - 1

# As pydantic reads them: with underscores, and zeros after a point. It is stricter with
# underscores.
_TEXT = re.compile(r"([+-]?\d[\d_]*)(?:\.0*)?", re.ASCII)


def decode(raw: bytes) -> Any:
    """A field's raw JSON as a Python value; ``...`` if it is too long or too odd for a number."""
    if len(raw) > MOST_BYTES or raw[:1] in (b"[", b"{"):
        return ...
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return ...


def read(value: Any, param: str) -> int | None:
    """A field's value as pydantic accepts it for ``int | None``.

    Raises:
        Refusal: 400 if it does not.
    """
    if value is None or type(value) is int:
        return value
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        if abs(value) <= MOST_TOKENS:
            return int(value)
    elif (
        isinstance(value, str)
        and len(value) <= MOST_BYTES
        and (match := _TEXT.fullmatch(value.strip()))
    ):
        try:
            return int(match[1].replace("_", ""))
        except ValueError:  # too many digits
            pass
    raise Refusal(400, "invalid_type", f"`{param}` must be an integer.", param=param)


def check(value: int, param: str, least: int, most: int) -> int:
    """The value itself. Raises Refusal: 400 if it is out of range."""
    if value < least:
        raise Refusal(400, "invalid_value", f"`{param}` must be at least {least}.", param=param)
    if value > most:
        raise Refusal(400, "invalid_value", f"`{param}` must be at most {most}.", param=param)
    return value
