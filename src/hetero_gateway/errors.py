"""Every exception of the package, by whose fault it is.

    HeteroGatewayError
    ├── ConfigError      the operator's: a file, a key, a flag           exit code 2
    ├── ProfileError     constants that cannot be right                  exit code 2
    ├── OutputError      standard output cannot be written               exit code 1
    ├── Refusal          the gateway answers with an OpenAI error body, 4xx or 5xx
    └── InstanceError    an instance's: connect, timeout, broken stream (http/failures.py)

Expected outcomes (no capacity, nothing fits) are values of ``core.types``, not exceptions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence


class HeteroGatewayError(Exception):
    """Root of the tree; its text is one line that tells a person what to do."""


class ConfigError(HeteroGatewayError):
    """A configuration that cannot be used: one line with file and key for each mistake."""

    def __init__(self, *lines: str) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines


@contextlib.contextmanager
def named_place(where: str) -> Iterator[None]:
    """Prefix a ConfigError's text with the place."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


class ProfileError(HeteroGatewayError):
    """A profile with missing, negative or meaningless constants."""


class OutputError(HeteroGatewayError):
    """A command's output cannot be written."""


class Refusal(HeteroGatewayError):
    """A request that the gateway itself answers with an error.

    ``status`` is the HTTP status; ``code``, ``param`` and ``kind`` fill OpenAI's error body;
    ``retry_after_s`` becomes a Retry-After header. ``spent``: the gateway has already retried,
    so OpenAI's clients are told not to, as that would multiply the attempts. ``headers``: extra
    headers of the answer.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        kind: str = "invalid_request_error",
        retry_after_s: int | None = None,
        spent: bool = False,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.spent = spent
        self.headers = headers
