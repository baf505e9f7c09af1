"""A trace run in its order: its rows, times and texts; in whole, by sessions, and once again."""

import math

import numpy as np
import pytest

from hetero_gateway.sim.ordered_trace import OrderedTrace
from hetero_gateway.sim.prefixes import KnownText, Run

BLOCK_TOKENS = 16


def trace(rows=40, sessions=8, gap_s=0.5):
    """Sessions take turns; each turn's prompt is a block longer than the one before."""
    turn = np.arange(rows) // sessions
    return OrderedTrace(
        gap_s * np.arange(rows),
        BLOCK_TOKENS * (1 + turn),
        1 + np.arange(rows),
        np.arange(rows) % sessions,
        tuple(KnownText((Run(100 * (i % sessions), 1 + int(t)),)) for i, t in enumerate(turn)),
        BLOCK_TOKENS,
    )


def first_keys(workload):
    return [int(workload.prefixes.engine_keys(i, BLOCK_TOKENS)[0]) for i in range(len(workload))]


def test_rows_come_in_order_in_their_own_pattern():
    found = trace().workload(20, 4.0)
    assert found.output_tokens.tolist() == list(range(1, 21))
    assert found.arrival_s.tolist() == pytest.approx([i / 4 for i in range(20)])
    # The turns of a session begin alike, those of two do not.
    keys = first_keys(found)
    assert keys[:8] == keys[8:16]
    assert len(set(keys)) == 8


def test_a_run_that_is_longer_begins_again_as_other_text():
    found = trace().workload(100, 2.0)
    assert found.output_tokens.tolist() == [*range(1, 41), *range(1, 41), *range(1, 21)]
    assert np.diff(found.arrival_s).tolist() == pytest.approx([0.5] * 99)
    keys = first_keys(found)
    assert len(set(keys)) == 24
    assert not set(keys[:40]) & set(keys[40:80])


def test_a_share_is_one_of_whole_sessions():
    whole = trace()
    found = whole.workload(10, math.inf, share=0.25)
    assert len(set(first_keys(found))) == 2
    assert (found.arrival_s == 0).all()
    sessions = whole.sessions[found.output_tokens - 1]
    assert len(set(sessions.tolist())) == 2
    assert sorted(found.output_tokens.tolist()) == found.output_tokens.tolist()


def test_another_seed_goes_on_where_the_one_before_ended():
    assert trace().workload(15, 1.0, seed=1).output_tokens.tolist() == list(range(16, 31))
    assert trace().workload(15, 1.0, seed=2).output_tokens.tolist()[:11] == [*range(31, 41), 1]


def test_what_is_half_done_is_other_text_and_the_trace_follows():
    found = trace().under_way(12, 50)
    assert (found.arrival_s == 0).all()
    assert found.output_tokens[12:].tolist() == [*range(1, 41), *range(1, 11)]
    assert found.output_tokens[:12].min() >= 1
    whole = trace()
    lengths = set((whole.prompt_tokens + whole.output_tokens).tolist())
    assert set((found.prompt_tokens + found.output_tokens)[:12].tolist()) <= lengths
    keys = first_keys(found)
    assert not set(keys[:12]) & set(keys[12:])
    assert keys[12:20] == keys[20:28]


def test_more_may_be_half_done_than_the_trace_has():
    assert len(trace().under_way(100, 10)) == 110


@pytest.mark.parametrize("rows", [1, 40])
def test_a_trace_without_times_of_its_own_comes_at_random(rows):
    found = trace(rows, sessions=1, gap_s=0.0).workload(2000, 5.0)
    assert np.diff(found.arrival_s).mean() == pytest.approx(0.2, rel=0.1)
    assert np.diff(found.arrival_s).std() == pytest.approx(0.2, rel=0.2)
