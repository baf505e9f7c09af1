"""The sums per instance are those of its requests, whatever happens and in whatever order."""

from __future__ import annotations

import numpy as np
import pytest

from hetero_gateway.core.costs.cost_model import decode_step_time_s
from hetero_gateway.core.instances.dispatch import Dispatch, PeerLoad
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.instances.table import (
    CONTEXT,
    IN_FLIGHT,
    KV_TOKENS,
    LOAD_S,
    RECENT_PREFILL,
    SILENT_S,
    STREAMING,
    WAITING,
    WAITING_OUTPUT,
    WAITING_PROMPT,
    Table,
)
from hetero_gateway.core.lengths.predictors import STAGE_TOKENS, ResidualLives
from hetero_gateway.core.types import InstanceId, Outcome
from tests.core.builders import FAST_CONSTANTS, SLOW_CONSTANTS, request

SLOTS = np.array([0, 1])


def progress() -> Table:
    """Two instances, i0 and i1 in slots 0 and 1."""
    table = Table()
    for name, constants in (("i0", FAST_CONSTANTS), ("i1", SLOW_CONSTANTS)):
        table.join(InstanceId(name)).set_constants(constants)
    return table


def at(p: Table, slot: int = 0) -> InstanceState:
    return p[InstanceId(f"i{slot}")]


def place(
    p: Table,
    now_s: float = 0.0,
    slot: int = 0,
    prompt: int = 100,
    output: float = 50.0,
    sequences: int = 1,
) -> Dispatch:
    return at(p, slot).dispatch(request(prompt, output, sequences=sequences), 0.0, now_s)


def stream(p: Table, now_s: float, **lengths: int) -> Dispatch:
    d = place(p, **lengths)
    assert d.state.first_token(d, now_s)
    return d


def gone(d: Dispatch, now_s: float) -> bool:
    return d.state.settle(d, Outcome.COMPLETED, now_s)


def test_a_request_waits_then_streams_then_is_gone() -> None:
    p = progress()
    d = place(p, slot=1, prompt=100, output=50.0, sequences=2)
    rows = p.rows(SLOTS, 0.0)
    assert rows[[WAITING, STREAMING, WAITING_PROMPT, WAITING_OUTPUT], 1].tolist() == [
        2,
        0,
        200,
        100,
    ]
    assert d.state.first_token(d, 1.0)
    rows = p.rows(SLOTS, 1.0)
    assert rows[[WAITING, STREAMING, WAITING_PROMPT, CONTEXT], 1].tolist() == [0, 2, 0, 202]
    assert p.stages(SLOTS)[:, 1].tolist() == [2] + [0] * (len(STAGE_TOKENS) - 1)
    gone(d, 2.0)
    assert not p.rows(SLOTS, 2.0)[[WAITING, STREAMING, CONTEXT]].any()
    assert not p.stages(SLOTS).any()


def test_context_grows_by_one_token_per_stream_and_step() -> None:
    p = progress()
    stream(p, 0.0, prompt=100)
    stream(p, 0.0, prompt=300)
    step_s = decode_step_time_s(FAST_CONSTANTS, 2, 201)
    assert p.rows(SLOTS, 10 * step_s)[CONTEXT, 0] == pytest.approx(402 + 2 * 10, rel=1e-6)


def test_an_observation_sets_the_step_clock() -> None:
    p = progress()
    stream(p, 0.0, prompt=100)
    at(p).observe_steps(1, 0.01, 0.01)
    before = p.rows(SLOTS, 0.01)[CONTEXT, 0]
    at(p).observe_steps(40, 1.0, 1.01)
    assert p.rows(SLOTS, 1.01)[CONTEXT, 0] == pytest.approx(before + 40, rel=1e-9)


def test_the_stage_of_a_stream_follows_its_length() -> None:
    p = progress()
    stream(p, 0.0)
    seen = 1.0
    at(p).observe_steps(1, 0.01, 0.0)
    now_s = 0.0
    for following, stage in zip(STAGE_TOKENS[1:], range(1, len(STAGE_TOKENS)), strict=True):
        steps = following - seen
        now_s += steps * 0.01
        at(p).observe_steps(steps, steps * 0.01, now_s)
        seen = following
        assert p.stages(SLOTS)[stage, 0] == 1
        assert p.stages(SLOTS)[:, 0].sum() == 1


@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0])
def test_the_speed_factor_converges_to_observed_over_modelled(factor: float) -> None:
    p, now_s = progress(), 0.0
    for _ in range(8):
        stream(p, 0.0, prompt=500)
    for _ in range(60):
        context = p.rows(SLOTS, now_s)[CONTEXT, 0]
        step_s = factor * decode_step_time_s(FAST_CONSTANTS, 8, context / 8)
        now_s += 30 * step_s
        at(p).observe_steps(30, 30 * step_s, now_s)
    assert at(p, 0).speed == pytest.approx(factor, rel=0.05)
    assert at(p, 1).speed == 1.0


def test_a_prompt_that_kept_no_decode_step_waiting_does_not_count_in_the_speed() -> None:
    p = progress()
    stream(p, 0.0, prompt=5000)
    step_s = decode_step_time_s(FAST_CONSTANTS, 1, 5005)
    at(p).observe_steps(10, 10 * step_s, 10 * step_s)
    assert at(p, 0).speed == pytest.approx(1.0, rel=0.01)


def test_the_speed_factor_has_bounds_and_forgets() -> None:
    p, now_s = progress(), 0.0
    stream(p, 0.0)
    for _ in range(50):
        now_s += 5
        at(p).observe_steps(1, 5.0, now_s)
    assert at(p, 0).speed == 10.0
    for _ in range(50):
        context = p.rows(SLOTS, now_s)[CONTEXT, 0]
        step_s = decode_step_time_s(FAST_CONSTANTS, 1, context)
        now_s += 50 * step_s
        at(p).observe_steps(50, 50 * step_s, now_s)
    assert at(p, 0).speed == pytest.approx(1.0, rel=0.05)


def test_an_engine_that_hangs_while_it_streams_is_slow() -> None:
    p = progress()
    stream(p, 0.0)
    for second in range(1, 5):
        at(p).observe_steps(0, 1.0, float(second))
    assert at(p, 0).speed == 10.0


def test_a_slot_is_silent_while_it_owes_a_first_token() -> None:
    p = progress()
    assert p.rows(SLOTS, 5.0)[SILENT_S].tolist() == [0, 0]
    first, second = place(p, 5.0), place(p, 6.0)
    assert p.rows(SLOTS, 7.0)[SILENT_S].tolist() == [2, 0]
    first.state.first_token(first, 7.5)
    assert p.rows(SLOTS, 8.0)[SILENT_S].tolist() == [0.5, 0]
    second.state.first_token(second, 8.0)
    assert p.rows(SLOTS, 9.0)[SILENT_S].tolist() == [0, 0]


def test_a_slot_that_is_used_again_knows_nothing_of_the_past() -> None:
    p = progress()
    d = stream(p, 0.0)
    at(p).observe_steps(1, 5.0, 5.0)
    gone(d, 6.0)
    p.leave(InstanceId("i0"), 6.0)
    p.join(InstanceId("i0")).set_constants(SLOW_CONSTANTS)
    assert at(p, 0).speed == 1.0
    assert not p.rows(SLOTS, 9.0)[[WAITING, STREAMING, CONTEXT]].any()


def test_an_unprofiled_slot_counts_and_keeps_its_speed() -> None:
    p = Table()
    p.join(InstanceId("i0")).set_constants(None)
    stream(p, 0.0)
    at(p).observe_steps(10, 1.0, 1.0)
    assert at(p, 0).speed == 1.0
    assert p.rows(SLOTS[:1], 2.0)[STREAMING, 0] == 1


def test_the_load_of_a_peer_is_added_where_a_policy_looks_and_goes_with_it() -> None:
    p = progress()
    d = stream(p, 0.0, prompt=100)
    before = p.rows(SLOTS, 0.0)
    there = PeerLoad(2.0, 700, 3, 1, 2, 50, 50.0, 30.0, 600.0)
    at(p).set_peer("other", there)
    at(p).set_peer("third", there)
    added = p.rows(SLOTS, 0.0) - before
    assert added[[LOAD_S, KV_TOKENS, IN_FLIGHT], 0].tolist() == [4.0, 1400, 6]
    assert added[[WAITING, STREAMING, WAITING_PROMPT], 0].tolist() == [2, 4, 100]
    assert added[[WAITING_OUTPUT, CONTEXT], 0].tolist() == [60, 1200]
    assert not added[:, 1].any()
    at(p).set_peer("other", PeerLoad())
    at(p).set_peer("third", None)
    # But for the prompts that were sent there lately.
    changed = np.flatnonzero((p.rows(SLOTS, 0.0) != before).any(axis=1))
    assert changed.tolist() == [RECENT_PREFILL]
    assert (at(p).load_s, at(p).in_flight) == (0.0, 1), "what is ours was never changed"
    assert gone(d, 1.0)


def test_a_peers_load_without_a_time_takes_no_clock_back() -> None:
    p = progress()
    # A machine that has been up for weeks.
    at(p).set_peer("other", PeerLoad(prompt_tokens=50.0), 3e6)
    at(p).set_peer("other", PeerLoad(prompt_tokens=80.0), 3e6)
    at(p).set_peer("other", PeerLoad(prompt_tokens=90.0))
    assert (at(p).recent_prefill, at(p).recent_prefill_s) == (40.0, 3e6)


def test_residual_lives_of_a_constant_length_fall_as_it_streams() -> None:
    lives = ResidualLives(prior_tokens=100.0, prior_requests=1e-9)
    for _ in range(64):
        lives.observe("m", 300.0)
    table = lives.table("m")
    assert table[0] == pytest.approx(300 - 16)
    assert table[3] == pytest.approx(300 - 192)
    assert lives.table("another").tolist() == [100.0] * len(STAGE_TOKENS)


def test_residual_lives_of_a_memoryless_length_stay() -> None:
    lives = ResidualLives(prior_tokens=1.0)
    for length in np.random.default_rng(0).exponential(200, 2048):
        lives.observe("m", float(length))
    assert lives.table("m")[:5] == pytest.approx(np.full(5, 200), rel=0.25)
