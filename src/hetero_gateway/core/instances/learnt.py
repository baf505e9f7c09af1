"""What was seen of an instance, in plain values, for a process that goes on from there."""

from __future__ import annotations

from typing import NamedTuple


class Learnt(NamedTuple):
    """Args:
    constants: that its speed is about; None: it has none yet.
    stands_in: they are not of this machine.
    observed: and yet its speed was seen.
    speed: factor, own, observed_s, modelled_s and seen_s of its ``SpeedEstimate``.
    slots, most_slots: of its ``Concurrency``.
    """

    constants: list[float] | None
    stands_in: bool
    observed: bool
    speed: tuple[float, float, float, float, float]
    slots: int | None
    most_slots: float
