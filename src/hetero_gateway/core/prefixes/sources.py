"""Sources of knowledge about an instance's prefix cache."""

from __future__ import annotations

import enum
from typing import Protocol


class CacheSource(enum.Enum):
    """Sources of knowledge about an instance's cache, better ones last."""

    OWN = "own"  # what this gateway has sent there
    SHARED = "shared"  # what all gateways have
    EXACT = "exact"  # what its engine tells


class EngineWord(Protocol):
    """An engine's own reports of its blocks: ``engine_blocks``."""

    @property
    def silent(self) -> bool:
        """Whether reports have stopped although there must be something to report."""
        ...

    def doubted(self) -> None:
        """Its cache is empty, or its contents are unknown."""
        ...
