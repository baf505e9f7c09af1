"""The whole numbers of a body, read as an engine reads them, and refused where it refuses them.

vLLM decodes a body with Python's ``json`` and validates it with pydantic, which takes 5, 5.0, "5"
and true for whole numbers (tests/gateway/request/test_whole_numbers.py asks pydantic itself). What
neither would take is answered here with 400: it must not come near the scheduler's arithmetic. What
an engine of some version takes is never refused.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from hetero_gateway.errors import Refusal

# A raw value that is longer is no number: Python's json refuses more than 4 300 digits.
MOST_BYTES = 1 << 13
# vLLM's own limit of ``n`` is 16 384 unless VLLM_MAX_N_SEQUENCES says otherwise: 64 times as much
# is more than an engine can hold.
MOST_SEQUENCES = 1 << 20
# No engine counts tokens in more than 64 bits. A limit above its context is refused by newer ones
# and clamped by older ones.
MOST_TOKENS = (1 << 63) - 1

# As pydantic reads them: underscores within, zeros behind a point. It is stricter with underscores.
_TEXT = re.compile(r"([+-]?\d[\d_]*)(?:\.0*)?", re.ASCII)


def decode(raw: bytes) -> Any:
    """A field's raw JSON as a Python value; what is too long or too odd for a number is ``...``."""
    if len(raw) > MOST_BYTES or raw[:1] in (b"[", b"{"):
        return ...
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return ...


def read(value: Any, param: str) -> int | None:
    """A field's value as pydantic takes it for ``int | None``.

    Raises:
        Refusal: 400, where it is none.
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
    """The value itself. Raises Refusal: 400, where it is not between the two."""
    if value < least:
        raise Refusal(400, "invalid_value", f"`{param}` must be at least {least}.", param=param)
    if value > most:
        raise Refusal(400, "invalid_value", f"`{param}` must be at most {most}.", param=param)
    return value
