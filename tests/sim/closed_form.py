"""Jobs in a fleet of one engine, many steps at once; and as in the naive engine."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from hetero_gateway.core.costs.profile import Profile
from hetero_gateway.sim import kernel
from hetero_gateway.sim.fleet import EngineFleet
from tests.sim.naive import Job, NaiveEngine

BOTH = ("chunked", "prefill-first")
NEVER_S = 1e12


@dataclass(frozen=True)
class Case:
    """``jobs``: as a test leaves them; ``slowdowns``: (from when, factor)."""

    profile: Profile
    scheduling: str
    max_batched_tokens: int
    jobs: list[Job]
    slowdowns: list[tuple[float, float]] = field(default_factory=list)
    caching: bool = False


def in_closed_form(case: Case, *, compiled: bool = False) -> tuple[list[Job], EngineFleet]:
    """What becomes of the jobs, and the fleet at the end, empty again."""
    jobs = [replace(job) for job in case.jobs]
    fleet = EngineFleet(
        [case.profile],
        scheduling=case.scheduling,
        max_batched_tokens=case.max_batched_tokens,
        prefix_caching=[case.caching],
        most_blocks=40 if case.caching else 0,
        compiled=compiled,
    )
    slots: dict[int, Job] = {}
    last_s = 0.0

    def advance(until_s: float) -> None:
        nonlocal last_s
        complete = False
        while not complete:
            complete = fleet.advance(until_s, False)
            for k in range(1, 1 + fleet.log[0]):
                slot, kind, now_s = fleet.log[k] // 4, fleet.log[k] % 4, fleet.log_s[k]
                assert last_s <= now_s <= until_s
                job, last_s = slots[slot], now_s
                if kind == kernel.FIRST:
                    job.first_s = now_s
                    job.cached_tokens = fleet.cached_tokens(slot)
                elif kind == kernel.FINISHED:
                    job.finish_s = now_s
                    fleet.free_slots.append(slot)
                elif kind == kernel.PREEMPTED:
                    job.preemptions += 1

    events = [(at_s, 0, factor) for at_s, factor in case.slowdowns]
    events += [(job.arrival_s, 1, job) for job in jobs]
    for at_s, _, what in sorted(events, key=lambda event: event[:2]):
        advance(at_s)
        if isinstance(what, Job):
            slot = fleet.new_slot()
            slots[slot] = what
            keys = np.array(what.keys, dtype=np.int64) if compiled else what.keys
            fleet.submit(0, slot, what.prompt, what.output, at_s, keys)
        else:
            fleet.set_slowdown(0, what, at_s)
    advance(NEVER_S)
    n = fleet._n[0]
    assert n[kernel.FREE_BLOCKS] == n[kernel.TOTAL_BLOCKS]
    assert n[kernel.GENERATION_TOTAL] == sum(job.output for job in jobs)
    assert n[kernel.CACHED] == n[kernel.SPARES] == 0
    assert not any(n[kernel.PHASES_AT : kernel.PHASES_AT + 16])
    return jobs, fleet


def check(case: Case, tolerance: float) -> tuple[list[Job], NaiveEngine, EngineFleet]:
    """Times are as in the naive engine within the tolerance, in s and relative; counts exactly.

    Returns the jobs as they are in the end.
    """
    jobs = [replace(job) for job in case.jobs]
    naive = NaiveEngine(
        case.profile, case.scheduling == "chunked", case.max_batched_tokens, case.slowdowns
    )
    naive.run(jobs)
    found, fleet = in_closed_form(case)
    for job, other in zip(found, jobs, strict=True):
        assert job.preemptions == other.preemptions
        assert job.cached_tokens == other.cached_tokens
        assert job.first_s == pytest.approx(other.first_s, rel=tolerance, abs=tolerance)
        assert job.finish_s == pytest.approx(other.finish_s, rel=tolerance, abs=tolerance)
    return jobs, naive, fleet
