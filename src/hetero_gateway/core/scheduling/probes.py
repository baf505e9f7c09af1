"""Requests that find out whether an instance that was slow still is.

``instances/speed.py`` defines speed factors and when they are doubted. Here they are revised for
all pools twice a second, and now and then a request goes to a doubted instance that has nothing on
it. While no instance is doubted, the normal case, a placement pays for one comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from hetero_gateway.core.instances.speed import UNSEEN_S, observed
from hetero_gateway.core.instances.state import InstanceState, guess_speed, revise_speed
from hetero_gateway.core.scheduling.members import Members
from hetero_gateway.core.scheduling.pool import Eligible

REVISE_EVERY_S: Final = 0.5
# One request in this many is a probe, and no more than one in this many seconds, soon twice that: a
# small share, in case the instance really is slow. With little traffic, less often.
REQUESTS_PER_PROBE, PROBE_EVERY_S, PROBE_SELDOM_S = 16, 3.0, 10.0


class Probes:
    """The ``doubted`` instances, and whose turn it is to be tried.

    Args:
        members: the instances.
        active: the policy uses speed factors at all.
    """

    __slots__ = ("_members", "doubted", "every_s", "next_s", "placed", "probed_s")

    def __init__(self, members: Members, *, active: bool) -> None:
        self.next_s = -math.inf if active else math.inf  # when to ``revise`` again
        self._members = members
        self.doubted: list[InstanceState] = []
        self.placed = 0  # since the last probe
        self.probed_s = -math.inf
        self.every_s = PROBE_EVERY_S

    def activate(self, active: bool) -> None:
        """Set whether the policy uses speed factors."""
        self.next_s = -math.inf if active else math.inf
        self.doubted = []

    def revise(self, now_s: float) -> None:
        """Doubt speed factors that are high and were not observed for long."""
        self.next_s = now_s + REVISE_EVERY_S
        self.doubted = []
        for pool in self._members.pools.values():
            own = [s for s in pool.states if not s.stands_in]
            learnt = [s for s in pool.states if s.stands_in and s.observed]
            # A profile may be right: that others are faster than theirs says nothing about this
            # one.
            revise_among(own, 1.0, now_s)
            revise_among(learnt, 0.0, now_s)
            for state in learnt:
                state.let_pass(now_s)
            self.doubted += [s for s in own + learnt if s.estimate.doubted]
        if not self.doubted:
            self.every_s = PROBE_EVERY_S

    def due(self, eligible: Eligible, now_s: float) -> Eligible | None:
        """The instance that a request should try, alone; None: none, or not this request."""
        if not is_time(self, now_s):
            return None
        for state in self.doubted:
            i = eligible.pool.position.get(state.instance_id)
            if i is not None and eligible.has(i) and is_to_be_tried(state, now_s):
                others = [j for j in eligible.positions() if j != i]
                return eligible.without(
                    others, f"{state.instance_id} is tried: its speed is not known"
                )
        return None


# These ask for fields alone: the simulator's compiled loop has them in tables.


def revise_among(comparable: Sequence[InstanceState], least: float, now_s: float) -> None:
    """Doubt those whose factors are well above the best and were not observed for long; and assume
    instances never used to be as far off as the best of the others turned out to be."""
    best = lowest = math.inf
    unseen = 0
    for state in comparable:
        if observed(state.estimate):
            lowest = min(lowest, state.speed)
        else:
            unseen += 1
        best = min(best, state.speed)
    if unseen > 0 and lowest < math.inf:
        best = lowest
        for state in comparable:
            if not observed(state.estimate):
                if state.streaming == 0:  # otherwise its own speed is seen within a second
                    guess_speed(state, lowest, now_s)
                if state.estimate.seen_s > 0:
                    best = min(best, state.speed)
    best = max(least, best)
    for state in comparable:
        if state.speed > best or state.estimate.doubted:
            revise_speed(state, best, now_s)


def is_time(probes: Probes, now_s: float) -> bool:
    """Whether one more placed request may be a probe, if an instance is to be tried."""
    probes.placed += 1
    few = probes.placed <= REQUESTS_PER_PROBE
    return now_s - probes.probed_s >= (PROBE_SELDOM_S if few else probes.every_s)


def is_to_be_tried(state: InstanceState, now_s: float) -> bool:
    """Whether it is doubted, has nothing on it, and was not heard for long."""
    e = state.estimate
    if not e.doubted or state.in_flight > 0:
        return False
    return now_s - max(e.seen_s, state.heard_s) >= UNSEEN_S


def sent(probes: Probes, now_s: float) -> None:
    """Note that a request went where ``due`` said."""
    probes.placed, probes.probed_s = 0, now_s
    probes.every_s = min(2 * probes.every_s, 2 * PROBE_EVERY_S)
