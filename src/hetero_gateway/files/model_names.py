"""Names of models, in files and in requests to /admin: printable and short.

They become labels, headers, log lines and table rows.
"""

from collections.abc import Collection
from typing import Annotated

from pydantic import AfterValidator

from hetero_gateway.engines.vllm.answers import MOST_MODELS, is_model_name


def _check(value: str) -> str:
    if not is_model_name(value):
        raise ValueError("must be printable, and of 1 to 256 characters")
    return value


def _check_all(value: str | list[str] | None) -> str | list[str] | None:
    names: Collection[str] = [value] if isinstance(value, str) else value or ()
    if value is not None and not names:
        raise ValueError("must be a name or a list of names; leave it out to ask the instance")
    if len(names) > MOST_MODELS:
        raise ValueError(f"must be at most {MOST_MODELS} names")
    for name in names:
        _check(name)
    return value


ModelName = Annotated[str, AfterValidator(_check)]
# Of an instance; none: ask the instance.
ServedNames = Annotated[str | list[str] | None, AfterValidator(_check_all)]
