"""Where what is known of an instance's prefix cache comes from."""

from __future__ import annotations

import enum
from typing import Protocol


class CacheSource(enum.Enum):
    """What is known of an instance's cache, the better the further down."""

    OWN = "own"  # what this gateway has sent there
    SHARED = "shared"  # what all gateways have
    EXACT = "exact"  # what its engine tells


class EngineWord(Protocol):
    """What an engine tells of its blocks: ``engine_blocks``."""

    @property
    def silent(self) -> bool:
        """Whether it tells nothing any more, although there must be something."""
        ...

    def doubted(self) -> None:
        """Its cache is empty, or nobody knows what is in it."""
        ...
