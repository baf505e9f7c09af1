"""The cells of a measurement, from limits alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.errors import ConfigError
from hetero_gateway.lab.profiler.grid import KV_SHARE, BatchLimits, plan_cells

A100 = BatchLimits(8192, 400_000, 16, 256, 2048)

limits = st.builds(
    BatchLimits,
    max_model_len=st.integers(64, 200_000),
    kv_capacity_tokens=st.integers(256, 2_000_000),
    block_tokens=st.sampled_from((1, 16, 128)),
    max_num_seqs=st.integers(1, 1024),
    max_batched_tokens=st.integers(64, 16_384),
)


@given(limits=limits, seed=st.integers(0, 99))
def test_every_cell_fits_the_engine(limits, seed):
    for cell in plan_cells(limits, seed):
        size = limits.block_tokens
        length = -(-(cell.prompt_tokens + cell.output_tokens) // size) * size
        assert cell.batch_size <= limits.max_num_seqs
        assert cell.prompt_tokens + cell.output_tokens <= limits.max_model_len
        assert cell.batch_size * length <= KV_SHARE * limits.kv_capacity_tokens
        assert min(cell.prompt_tokens, cell.output_tokens) >= 1
        together = cell.batch_size * cell.prompt_tokens
        assert cell.one_step == (together <= limits.max_batched_tokens)


@given(seed=st.integers(0, 99))
def test_a_seed_gives_the_same_cells_again_and_another_one_others(seed):
    assert plan_cells(A100, seed) == plan_cells(A100, seed)
    assert plan_cells(A100, seed) != plan_cells(A100, seed + 1)


def test_batch_sizes_are_powers_of_two_up_to_the_engines_limit_and_come_first():
    sizes = [c.batch_size for c in plan_cells(A100, 0)]
    assert set(sizes) == set(sizes[:9]) == {2**i for i in range(9)}


def test_a_limit_well_above_a_power_of_two_is_measured_too():
    few = BatchLimits(8192, 400_000, 16, 48, 2048)
    assert max(c.batch_size for c in plan_cells(few, 0)) == 48


def test_each_batch_size_has_prompts_of_very_different_lengths():
    for b in (1, 2, 4, 8, 16):
        lengths = [c.prompt_tokens for c in plan_cells(A100, 0) if c.batch_size == b]
        assert max(lengths) > 20 * min(lengths)


def test_single_prompts_of_many_lengths_are_there_to_show_attention():
    lengths = sorted(c.prompt_tokens for c in plan_cells(A100, 0) if c.batch_size == 1)
    assert len(lengths) == len(set(lengths)) == 8
    assert sum(i > A100.max_batched_tokens for i in lengths) == 4
    assert lengths[-1] > A100.max_model_len / 2


def test_a_context_of_two_steps_has_long_single_prompts_too():
    """Two real servers with contexts of 4096 tokens had none above 2048, and no p9."""
    small = BatchLimits(4096, 524_288, 128, 128, 2048)
    lengths = [c.prompt_tokens for c in plan_cells(small, 0) if c.batch_size == 1]
    assert sum(i > small.max_batched_tokens for i in lengths) == 4
    assert max(lengths) > 0.8 * small.max_model_len


def test_most_cells_prefill_in_one_step_and_in_the_others_who_starts_early_still_runs_at_the_end():
    cells = plan_cells(A100, 0)
    deep = [c for c in cells if not c.one_step]
    assert 0 < len(deep) < len(cells) / 2
    assert all(c.output_tokens > c.batch_size * c.prompt_tokens / 2048 for c in deep)


@pytest.mark.parametrize("sizes", [(16, 100_000), (4096, 20)])
def test_an_engine_without_room_for_a_request_is_refused(sizes):
    with pytest.raises(ConfigError, match="no room"):
        plan_cells(BatchLimits(*sizes, 16, 8, 2048), 0)
