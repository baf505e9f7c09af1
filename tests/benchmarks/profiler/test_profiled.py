"""The ruler of benchmarks/profiler/profiled.py, on constants that need no measuring."""

from dataclasses import replace

import pytest

from benchmarks.profiler.profiled import KV_TOKENS, MAX_NUM_SEQS, PLANTED, STEP_TOKENS, differences
from hetero_gateway.lab.profiler.grid import BatchLimits, plan_cells


def test_equal_constants_are_no_distance_apart_and_slower_ones_are_as_far_as_they_are_slow():
    assert max(max(errors) for errors in differences(PLANTED, PLANTED).values()) == 0
    for errors in differences(PLANTED.scaled(1.03), PLANTED).values():
        assert errors == pytest.approx([0.03] * len(errors))


def test_every_planted_constant_moves_the_ruler():
    for i in range(1, 10):
        name = f"p{i}"
        other = replace(PLANTED, **{name: getattr(PLANTED, name) * 1.5})
        errors = differences(other, PLANTED)["prefill" if i <= 4 or i == 9 else "decode"]
        assert max(errors) > 0.05, name


def test_what_is_held_out_is_not_measured():
    cells = plan_cells(BatchLimits(8192, KV_TOKENS, 16, MAX_NUM_SEQS, STEP_TOKENS), 0)
    measured = {(c.batch_size, c.prompt_tokens) for c in cells}
    assert not measured & {(b, i) for b in (1, 3, 6, 12, 24, 32) for i in (24, 48, 96, 200, 400)}
