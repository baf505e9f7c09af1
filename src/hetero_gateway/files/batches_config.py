"""``batches`` of the gateway's configuration: where files of requests are kept, and how much."""

from pathlib import Path

from pydantic import Field

from hetero_gateway.files.yaml_file import StrictModel


class BatchesConfig(StrictModel):
    """/v1/files and /v1/batches; off without a directory. docs/guide/batches.md."""

    directory: Path | None = None
    """A folder of the gateway's own for files and their database, on a local disk, made where it is
    missing; relative to this file. None: no batches."""
    slowdown: float = Field(1.1, gt=1, le=10)
    """How many times as long other requests may take because of batches, on average and by the
    profiles."""
    max_file_bytes: int = Field(200 * 2**20, ge=1024)
    """Largest file; a larger one gets 413."""
    max_lines: int = Field(50_000, ge=1, le=10_000_000)
    """Most lines of one batch."""
    max_key_bytes: int = Field(10 * 2**30, ge=1024)
    """Most bytes of all files of one key, answers included; uploads beyond it get 429."""
    max_key_lines: int = Field(1_000_000, ge=1)
    """Most lines of a key's batches that are not over."""
    max_key_batches: int = Field(100, ge=1)
    """Most batches of a key that are not over."""
    keep_s: float = Field(30 * 86400.0, gt=0)
    """How long files and batches that are over are kept, in seconds."""
