"""``core/instances/speed.py`` and ``core/scheduling/probes.py`` over arrays.

A row per instance; and one for all of them of what the probes remember.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hetero_gateway.core.costs.arrays import FloatArray
from hetero_gateway.core.instances import speed as core
from hetero_gateway.core.instances.state import SPEED_BOUNDS
from hetero_gateway.core.scheduling import probes as core_probes
from hetero_gateway.sim.arrays import Flags, Integers
from hetero_gateway.sim.compiled.tables import least

# Fields of an estimate.
FACTOR, SEEN_S, REVISED_S, OBSERVED_S, MODELLED_S = range(5)
_FIELDS = 5
# Fields of the probes.
_NEXT_S, _PROBED_S, _EVERY_S = range(3)
_PLACED, _DOUBTED = range(2)

_LOW, _HIGH = SPEED_BOUNDS
_PRIOR_S, _FORGET_S = core.PRIOR_S, core.FORGET_S
_MENDED, _MATURE_S, _FORGET_MENDED_S = core.MENDED, core.MATURE_S, core.FORGET_MENDED_S
_DOUBTED_AT, _CLEARED, _UNSEEN_S = core.DOUBTED, core.CLEARED, core.UNSEEN_S
_DECAY_S, _WEIGHT_S, _LEAST_WEIGHT_S = core.DECAY_S, core.WEIGHT_S, core.LEAST_WEIGHT_S
_REVISE_EVERY_S = core_probes.REVISE_EVERY_S
_REQUESTS_PER_PROBE = core_probes.REQUESTS_PER_PROBE
_PROBE_EVERY_S, _PROBE_SELDOM_S = core_probes.PROBE_EVERY_S, core_probes.PROBE_SELDOM_S


class Speeds(NamedTuple):
    """``estimates``: a row of floats per instance, ``doubted``: by instance.

    ``times_s`` and ``counts`` are the probes'; ``listed``: who was doubted when they last looked,
    in their order; ``changed``: whose factor they changed.
    """

    estimates: FloatArray
    doubted: Flags
    times_s: FloatArray
    counts: Integers
    listed: Integers
    changed: Flags


def new_speeds(size: int) -> Speeds:
    estimates = np.zeros((size, _FIELDS))
    estimates[:, FACTOR] = 1.0
    estimates[:, OBSERVED_S] = _PRIOR_S
    estimates[:, MODELLED_S] = _PRIOR_S
    times_s = np.zeros(3)
    times_s[_NEXT_S] = -math.inf
    times_s[_PROBED_S] = -math.inf
    times_s[_EVERY_S] = _PROBE_EVERY_S
    return Speeds(
        estimates, np.zeros(size, np.bool_), times_s, np.zeros(2, np.int64),
        np.zeros(size, np.int64), np.zeros(size, np.bool_),
    )  # fmt: skip


# SpeedEstimate


def observe(s: Speeds, i: int, observed_s: float, modelled_s: float, now_s: float) -> None:
    e = s.estimates[i]
    forget_s = _FORGET_S
    if (
        observed_s * _MENDED < e[FACTOR] * modelled_s
        and e[FACTOR] > _MENDED
        and (s.doubted[i] or e[OBSERVED_S] > _MATURE_S)
    ):
        forget_s = _FORGET_MENDED_S
    keep = math.exp(-observed_s / forget_s)
    e[OBSERVED_S] = e[OBSERVED_S] * keep + observed_s
    e[MODELLED_S] = e[MODELLED_S] * keep + modelled_s
    e[SEEN_S] = now_s
    e[FACTOR] = min(_HIGH, max(_LOW, e[OBSERVED_S] / e[MODELLED_S]))


def _revise(s: Speeds, i: int, best: float, now_s: float) -> bool:
    e = s.estimates[i]
    if s.doubted[i]:
        if e[FACTOR] <= _CLEARED * best:
            s.doubted[i] = False
            if now_s - e[SEEN_S] >= _UNSEEN_S:
                e[FACTOR] = best
    elif e[FACTOR] > _DOUBTED_AT * best and now_s - e[SEEN_S] >= _UNSEEN_S:
        s.doubted[i] = True
        e[REVISED_S] = now_s
        _lose_weight(e, now_s - e[SEEN_S])
    if not s.doubted[i]:
        return False
    elapsed_s = now_s - max(e[REVISED_S], e[SEEN_S] + _UNSEEN_S)
    e[REVISED_S] = now_s
    if elapsed_s > 0:
        e[FACTOR] = best * (e[FACTOR] / best) ** math.exp(-elapsed_s / _DECAY_S)
        _lose_weight(e, elapsed_s)
    return True


def _lose_weight(e: FloatArray, elapsed_s: float) -> None:
    keep = math.exp(-elapsed_s / _WEIGHT_S)
    e[MODELLED_S] = max(_LEAST_WEIGHT_S, e[MODELLED_S] * keep)
    e[OBSERVED_S] = e[MODELLED_S] * e[FACTOR]


# Probes


def revision_due(s: Speeds, now_s: float) -> bool:
    return bool(now_s >= s.times_s[_NEXT_S])


def revise(s: Speeds, now_s: float) -> None:
    """Doubt speed factors that are high and were not seen for long; factors may change."""
    s.times_s[_NEXT_S] = now_s + _REVISE_EVERY_S
    s.counts[_DOUBTED] = 0
    s.changed[:] = False
    best = max(1.0, least(s.estimates[:, FACTOR]))
    for i in range(len(s.doubted)):
        before = s.estimates[i, FACTOR]
        if (before > best or s.doubted[i]) and _revise(s, i, best, now_s):
            s.listed[s.counts[_DOUBTED]] = i
            s.counts[_DOUBTED] += 1
        s.changed[i] = s.estimates[i, FACTOR] != before
    if s.counts[_DOUBTED] == 0:
        s.times_s[_EVERY_S] = _PROBE_EVERY_S


def due(s: Speeds, in_flight: Integers, heard_s: FloatArray, now_s: float) -> int:
    """The instance that a request is to try, alone; -1: none, or not this request."""
    if s.counts[_DOUBTED] == 0:
        return -1
    s.counts[_PLACED] += 1
    few = s.counts[_PLACED] <= _REQUESTS_PER_PROBE
    if now_s - s.times_s[_PROBED_S] < (_PROBE_SELDOM_S if few else s.times_s[_EVERY_S]):
        return -1
    for at in range(s.counts[_DOUBTED]):
        i = s.listed[at]
        if not s.doubted[i] or in_flight[i] > 0:
            continue
        if now_s - max(s.estimates[i, SEEN_S], heard_s[i]) >= _UNSEEN_S:
            return int(i)
    return -1


def sent(s: Speeds, now_s: float) -> None:
    """A request has gone where ``due`` said."""
    s.counts[_PLACED] = 0
    s.times_s[_PROBED_S] = now_s
    s.times_s[_EVERY_S] = min(2 * s.times_s[_EVERY_S], 2 * _PROBE_EVERY_S)
