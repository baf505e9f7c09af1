"""Requests that find out whether an instance that was slow still is.

What a speed factor is, and when it is doubted, is ``instances/speed.py``'s. Here it is asked of all
pools twice a second, and now and then a request goes to a doubted instance that has nothing on it.
With nobody doubted, which is the rule, a placement pays for one comparison.
"""

from __future__ import annotations

import math

from hetero_gateway.core.instances.speed import UNSEEN_S
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.scheduling.members import Members
from hetero_gateway.core.scheduling.pool import Eligible

REVISE_EVERY_S = 0.5
# One request in so many goes to find out, and no more than one in so many seconds, soon twice that:
# a small share, should the instance be slow indeed. Where few come, one in a longer time.
REQUESTS_PER_PROBE, PROBE_EVERY_S, PROBE_SELDOM_S = 16, 3.0, 10.0


class Probes:
    """Who is ``doubted``, and whose turn it is to be tried.

    Args:
        members: who is there.
        active: the policy looks at speed factors at all.
    """

    __slots__ = ("_every_s", "_members", "_placed", "_probed_s", "doubted", "next_s")

    def __init__(self, members: Members, *, active: bool) -> None:
        self.next_s = -math.inf if active else math.inf  # when to ``revise`` again
        self._members = members
        self.doubted: list[InstanceState] = []
        self._placed = 0  # since the last probe
        self._probed_s = -math.inf
        self._every_s = PROBE_EVERY_S

    def activate(self, active: bool) -> None:
        """Whether the policy looks at speed factors, from now on."""
        self.next_s = -math.inf if active else math.inf
        self.doubted = []

    def revise(self, now_s: float) -> None:
        """Doubt speed factors that are high and were not seen for long."""
        self.next_s = now_s + REVISE_EVERY_S
        self.doubted = []
        for pool in self._members.pools.values():
            own = [s for s in pool.states if not s.stands_in]
            learnt = [s for s in pool.states if s.stands_in and s.observed]
            # A profile may be right: that others are faster than theirs says nothing of this one.
            self._revise(own, 1.0, now_s)
            self._revise(learnt, 0.0, now_s)
            for state in learnt:
                state.let_pass(now_s)
        if not self.doubted:
            self._every_s = PROBE_EVERY_S

    def _revise(self, comparable: list[InstanceState], least: float, now_s: float) -> None:
        best = max(least, min((state.speed for state in comparable), default=1.0))
        for state in comparable:
            if (state.speed > best or state.doubted) and state.revise_speed(best, now_s):
                self.doubted.append(state)

    def due(self, eligible: Eligible, now_s: float) -> Eligible | None:
        """The one that a request is to try, alone; None: none, or not this request."""
        self._placed += 1
        since_s = now_s - self._probed_s
        few = self._placed <= REQUESTS_PER_PROBE
        if since_s < (PROBE_SELDOM_S if few else self._every_s):
            return None
        for state in self.doubted:
            i = eligible.pool.position.get(state.instance_id)
            if i is None or not eligible.has(i) or not state.doubted or state.in_flight:
                continue
            if state.unseen_s(now_s) >= UNSEEN_S:
                others = [j for j in eligible.positions() if j != i]
                return eligible.without(others, f"{state.instance_id} is tried, unseen for long")
        return None

    def sent(self, now_s: float) -> None:
        """A request has gone where ``due`` said."""
        self._placed, self._probed_s = 0, now_s
        self._every_s = min(2 * self._every_s, 2 * PROBE_EVERY_S)
