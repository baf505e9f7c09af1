"""``log`` of the gateway's configuration: what is written about requests, and in which form."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hetero_gateway.files.yaml_file import StrictModel


class LogConfig(StrictModel):
    """What the gateway logs. Prompts and keys are in no line."""

    format: Literal["text", "json"] = Field(
        "text", description="Of every line, on standard error and output: for people, or JSON."
    )
    access: bool = Field(
        True, description="A line on standard output for each request on an engine's path."
    )
