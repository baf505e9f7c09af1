"""Constants that follow the traffic while serving: ``scheduler.recalibrate``.

Off by default; then nothing here is ever called. If on, an instance's constants are fitted again
after each minute of observed time and replaced when that changes what they predict;
``core/instances/calibration.py`` fits, and keeps every constant within bounds of the original. A
fit runs in a thread, as it takes some 5 ms, and the first one imports scipy; the result is applied
on the event loop, unless the instance has gone or was reset meanwhile. The original profile is
kept, and PATCH /admin/instances/ID {"recalibrated": false} restores it for good. An instance
without a profile gets a learned one, once its engine has reported its KV cache's size.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Sequence

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.instances.calibration import Refit, bounded, refit
from hetero_gateway.core.instances.observation import StepRow, seconds
from hetero_gateway.core.types import InstanceId
from hetero_gateway.gateway.fleet.instances import Fleet, Instance

# Observed seconds between two fits, and rows that one uses: the last few minutes.
EVERY_S = 60.0
_MOST_ROWS = 300
# Constants that predict the same as before are not worth restarting the speed factor.
_WORTH = 1.1
# A fit that misses held-out rows by more than this (median) is rejected.
_MOST_ERROR = 0.3

_log = logging.getLogger(__name__)


class Recalibration:
    """Fits the observations of a fleet, and replaces constants."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._fitted_at_s: dict[InstanceId, float] = {}  # observed time at the last fit

    def look(self) -> None:
        """Fit instances that were observed for long enough; called about once a second."""
        scheduler, instances = self._fleet.scheduler, self._fleet.instances
        if len(self._fitted_at_s) > len(instances):
            gone = self._fitted_at_s.keys() - instances.keys()
            for instance_id in gone:
                del self._fitted_at_s[instance_id]
        for instance in instances.values():
            observed_s = scheduler.members.table[instance.id].observations.observed_s
            before_s = self._fitted_at_s.get(instance.id, 0.0)
            if observed_s < before_s:  # another instance has the id now
                before_s = 0.0
            if observed_s - before_s >= EVERY_S and instance.recalibrates:
                self._fitted_at_s[instance.id] = observed_s
                self._fit(instance)

    def _fit(self, instance: Instance) -> None:
        scheduler, original = self._fleet.scheduler, instance.profile
        seen = scheduler.members.table[instance.id].observations
        steps = [row for row in seen.steps.last(_MOST_ROWS) if row.known]
        base = scheduler.members.stand_in(instance.id) if original is None else original.constants
        beside_s = 0.0 if original is None else original.first_token_s
        fitting = asyncio.get_running_loop().run_in_executor(
            None, refit, steps, seen.first_tokens.last(_MOST_ROWS), base, beside_s
        )

        def done(future: asyncio.Future[Refit | None]) -> None:
            if future.cancelled():
                return
            if (error := future.exception()) is not None:
                _log.error("instance %s: the fit failed", instance.id, exc_info=error)
            elif (fit := future.result()) is not None:
                self._apply(instance, steps, fit)

        fitting.add_done_callback(done)

    def _apply(self, instance: Instance, steps: Sequence[StepRow], fit: Refit) -> None:
        if self._fleet.instances.get(instance.id) is not instance or not instance.recalibrates:
            return
        if fit.decode.median is None or fit.decode.median > _MOST_ERROR:
            return
        original = instance.profile
        constants = (
            fit.constants if original is None else bounded(fit.constants, original.constants)
        )
        present = instance.calibrated or original
        if present is not None and _same(steps, constants, present.constants):
            return
        profile = _profile(instance, constants)
        if profile is None:
            return
        instance.calibrated = profile
        _log.info(
            "instance %s: %s from %d s of traffic; the constants that it shows: %s; median error "
            "of decode %.0f %%",
            instance.id,
            "a profile is learned" if original is None else "the profile is recalibrated",
            round(sum(row.duration_s for row in steps)),
            ", ".join(sorted(fit.identified)) or "none",
            100 * fit.decode.median,
        )
        self._fleet.publish(instance)


def _same(rows: Sequence[StepRow], one: Constants, other: Constants) -> bool:
    """Whether both predict the same for these rows, prefill and decode."""
    for phase in (0, 1):
        a = sum(seconds(row.terms, one)[phase] for row in rows)
        b = sum(seconds(row.terms, other)[phase] for row in rows)
        if (a > 0) != (b > 0) or (a > 0 and abs(math.log(a / b)) > math.log(_WORTH)):
            return False
    return True


def _profile(instance: Instance, constants: Constants) -> Profile | None:
    if instance.profile is not None:
        source = {**instance.profile.source, "note": "recalibrated from traffic"}
        return dataclasses.replace(instance.profile, constants=constants, source=source)
    capacity = instance.engine_kv_capacity_tokens
    if capacity is None:
        return None  # as if it were infinite, a backlog would all go to it
    model = min(instance.models, default="unknown")
    source = {"how": "measured", "note": "learned from traffic"}
    return Profile("learned", model, 1, constants, capacity, source=source)
