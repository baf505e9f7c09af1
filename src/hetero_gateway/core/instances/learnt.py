"""What was learnt of an instance, as plain values, for a process that takes over."""

from __future__ import annotations

from typing import NamedTuple


class Learnt(NamedTuple):
    """Args:
    constants: that its speed refers to; None: it has none yet.
    stands_in: they are another machine's.
    observed: its speed was observed all the same.
    speed: factor, own, observed_s, modelled_s and seen_s of its ``SpeedEstimate``.
    slots, most_slots: of its ``Concurrency``.
    """

    constants: list[float] | None
    stands_in: bool
    observed: bool
    speed: tuple[float, float, float, float, float]
    slots: int | None
    most_slots: float
