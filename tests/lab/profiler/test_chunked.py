"""Prefills of several steps."""

import pytest

from hetero_gateway.core.costs.cost_model import prefill_time_s
from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.lab.profiler.verdicts import KEY, chunked_prefills

C = Constants(p1=1e-4, p2=1e-3, p3=5e-5, p4=0.02, p5=0, p6=0, p7=0, p8=1e-2)


def line(b: int, prompt: int, *, chunks: int = 1, discarded: str | None = None) -> dict:
    """A record of a batch, each step after the first adding its fixed part."""
    prefill_s = prefill_time_s(C, b, prompt) + (chunks - 1) * (C.p2 + C.p4)
    line = {"batch_size": b, "prompt_tokens": prompt, "output_tokens": 9, "prefill_s": None}
    line |= {"decode_s": 1.0, "discarded": discarded}
    if chunks == 1:
        return line | {"prefill_s": prefill_s}
    return line | {KEY: {"prompt_tokens": prompt, "prefill_s": prefill_s}}


ONE_STEP = [line(b, i) for b in (1, 2, 4, 8) for i in (16, 60, 200)]


def test_a_long_prompt_counts_as_if_its_steps_were_one():
    found = chunked_prefills([*ONE_STEP, line(1, 5000, chunks=3)], 2048)
    assert found.singles[0].prefill_s == pytest.approx(prefill_time_s(C, 1, 5000), rel=1e-3)
    assert not found.batches


def test_batches_of_several_steps_are_compared_not_fitted():
    found = chunked_prefills([*ONE_STEP, line(4, 2000, chunks=4)], 2048)
    assert not found.singles
    constants = (C.p1, C.p2, C.p3, C.p4, C.p9)
    off = 3 * (C.p2 + C.p4) / (prefill_time_s(C, 4, 2000) + 3 * (C.p2 + C.p4))
    assert found.error(constants) == pytest.approx(off)


def test_all_of_them_are_there_as_measured_for_who_wants_a_compromise():
    long, deep = line(1, 5000, chunks=3), line(4, 2000, chunks=4)
    found = chunked_prefills([*ONE_STEP, long, deep], 2048)
    assert [s.prefill_s for s in found.measured] == [x[KEY]["prefill_s"] for x in (long, deep)]


def test_without_any_there_is_no_error_to_tell():
    assert chunked_prefills(ONE_STEP, 2048).error((C.p1, C.p2, C.p3, C.p4, C.p9)) is None


def test_discarded_ones_are_passed_over():
    found = chunked_prefills([*ONE_STEP, line(1, 5000, chunks=3, discarded="preemption")], 2048)
    assert not found.singles
