"""``batches`` of the gateway's configuration: where files of requests are kept, and how much."""

import re
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, Field, model_validator

from hetero_gateway.files.yaml_file import StrictModel

# Refused values are not quoted: they may contain a password.


def _check_database(value: str) -> str:
    try:
        parts = urlsplit(value)
        _ = parts.port
    except ValueError:
        raise ValueError("is not a URL") from None
    if parts.scheme not in ("postgresql", "postgres"):
        raise ValueError("must be postgresql://[USER@]HOST[:PORT]/DATABASE")
    options = [name.lower() for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    if parts.password is not None or any("password" in name for name in options):
        raise ValueError(
            "must not carry a password; name its environment variable in batches.password_env"
        )
    if any(not "!" <= character <= "~" for character in value):
        raise ValueError("must not contain spaces, control or non-ASCII characters")
    return value


def _check_storage(value: str) -> str:
    if not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._/-]{0,255})?", value):
        raise ValueError("must be s3://BUCKET[/PREFIX]; keys are in the environment (AWS_*)")
    return value


def _check_endpoint(value: str) -> str:
    try:
        parts = urlsplit(value)
    except ValueError:
        raise ValueError("is not a URL") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be https://HOST[:PORT]")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("must not carry a user, a query or a fragment; keys are in AWS_*")
    return value


class BatchesConfig(StrictModel):
    """/v1/files and /v1/batches; off without a directory or database. docs/guide/batches.md."""

    directory: Path | None = None
    """A folder for files and their database, used by this gateway only, on a local disk; created if
        missing; relative to this file."""
    database: Annotated[str, AfterValidator(_check_database)] | None = None
    """Instead of a directory, for gateways that share the work: postgresql://USER@HOST/DATABASE."""
    password_env: str | None = None
    """Environment variable with the password of `database`; default: as libpq finds one."""
    storage: Annotated[str, AfterValidator(_check_storage)] | None = None
    """Where the files are if `database` is set: s3://BUCKET/PREFIX."""
    storage_endpoint: Annotated[str, AfterValidator(_check_endpoint)] | None = None
    """Address of an S3-compatible storage other than AWS's."""
    slowdown: float = Field(1.1, gt=1, le=10)
    """By what factor other requests may become slower because of batches, on average and by the
        profiles."""
    max_file_bytes: int = Field(200 * 2**20, ge=1024)
    """Largest file; a larger one gets 413."""
    max_lines: int = Field(50_000, ge=1, le=10_000_000)
    """Most lines of one batch."""
    max_key_bytes: int = Field(10 * 2**30, ge=1024)
    """Most bytes of all files of one key, including answers; uploads beyond it get 429."""
    max_key_lines: int = Field(1_000_000, ge=1)
    """Most lines in a key's unfinished batches."""
    max_key_batches: int = Field(100, ge=1)
    """Most unfinished batches of a key."""
    keep_s: float = Field(30 * 86400.0, gt=0)
    """How long files and finished batches are kept, in seconds."""

    @property
    def on(self) -> bool:
        return self.directory is not None or self.database is not None

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        if (self.database is None) != (self.storage is None):
            raise ValueError("database and storage go together")
        if self.directory is not None and self.database is not None:
            raise ValueError("either a directory, or database and storage")
        if self.database is None and (self.password_env or self.storage_endpoint):
            raise ValueError("password_env and storage_endpoint go with database and storage")
        return self
