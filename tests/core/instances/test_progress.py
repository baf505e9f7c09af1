"""The sums per instance are those of its requests, whatever happens and in whatever order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_gateway.core.costs.cost_model import decode_step_time_s
from hetero_gateway.core.instances.ledger import Dispatch
from hetero_gateway.core.instances.progress import (
    CONTEXT,
    SILENT_S,
    SPEED,
    STREAMING,
    WAITING,
    WAITING_OUTPUT,
    WAITING_PROMPT,
    Progress,
)
from hetero_gateway.core.lengths.estimates import STAGE_TOKENS, ResidualLives
from hetero_gateway.core.types import InstanceId
from tests.core.builders import FAST_CONSTANTS, SLOW_CONSTANTS, request

SLOTS = np.array([0, 1])


def progress() -> Progress:
    result = Progress()
    result.open_slot(0, FAST_CONSTANTS)
    result.open_slot(1, SLOW_CONSTANTS)
    return result


def dispatch(
    slot: int = 0, prompt: int = 100, output: float = 50.0, sequences: int = 1
) -> Dispatch:
    body = request(prompt, output, sequences=sequences)
    return Dispatch(body, InstanceId(f"i{slot}"), slot, 0.0)


def stream(p: Progress, now_s: float, **lengths: int) -> Dispatch:
    d = dispatch(**lengths)
    p.placed(d, 0.0)
    assert p.first_token(d, now_s)
    return d


def test_a_request_waits_then_streams_then_is_gone() -> None:
    p, d = progress(), dispatch(1, 100, 50.0, sequences=2)
    p.placed(d, 0.0)
    rows = p.rows(SLOTS, 0.0)
    assert rows[[WAITING, STREAMING, WAITING_PROMPT, WAITING_OUTPUT], 1].tolist() == [
        2,
        0,
        200,
        100,
    ]
    assert p.first_token(d, 1.0)
    rows = p.rows(SLOTS, 1.0)
    assert rows[[WAITING, STREAMING, WAITING_PROMPT, CONTEXT], 1].tolist() == [0, 2, 0, 202]
    assert p.stages(SLOTS)[1].tolist() == [2] + [0] * (len(STAGE_TOKENS) - 1)
    p.left(d, 2.0)
    assert not p.rows(SLOTS, 2.0)[[WAITING, STREAMING, CONTEXT]].any()
    assert not p.stages(SLOTS).any()


def test_only_the_first_of_first_tokens_counts() -> None:
    p = progress()
    d = stream(p, 0.0)
    assert not p.first_token(d, 1.0)
    p.left(d, 2.0)
    assert not p.first_token(d, 3.0)
    p.left(d, 4.0)
    assert not p.rows(SLOTS, 5.0)[[WAITING, STREAMING, CONTEXT]].any()


def test_context_grows_by_one_token_per_stream_and_step() -> None:
    p = progress()
    stream(p, 0.0, prompt=100)
    stream(p, 0.0, prompt=300)
    step_s = decode_step_time_s(FAST_CONSTANTS, 2, 201)
    assert p.rows(SLOTS, 10 * step_s)[CONTEXT, 0] == pytest.approx(402 + 2 * 10, rel=1e-6)


def test_an_observation_sets_the_step_clock() -> None:
    p = progress()
    stream(p, 0.0, prompt=100)
    p.observe_steps(0, 1, 0.01, 0.01)
    before = p.rows(SLOTS, 0.01)[CONTEXT, 0]
    p.observe_steps(0, 40, 1.0, 1.01)
    assert p.rows(SLOTS, 1.01)[CONTEXT, 0] == pytest.approx(before + 40, rel=1e-9)


def test_the_stage_of_a_stream_follows_its_length() -> None:
    p = progress()
    stream(p, 0.0)
    seen = 1.0
    p.observe_steps(0, 1, 0.01, 0.0)
    now_s = 0.0
    for following, stage in zip(STAGE_TOKENS[1:], range(1, len(STAGE_TOKENS)), strict=True):
        steps = following - seen
        now_s += steps * 0.01
        p.observe_steps(0, steps, steps * 0.01, now_s)
        seen = following
        assert p.stages(SLOTS)[0, stage] == 1
        assert p.stages(SLOTS)[0].sum() == 1


@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0])
def test_the_speed_factor_converges_to_observed_over_modelled(factor: float) -> None:
    p, now_s = progress(), 0.0
    for _ in range(8):
        stream(p, 0.0, prompt=500)
    for _ in range(60):
        context = p.rows(SLOTS, now_s)[CONTEXT, 0]
        step_s = factor * decode_step_time_s(FAST_CONSTANTS, 8, context / 8)
        now_s += 30 * step_s
        p.observe_steps(0, 30, 30 * step_s, now_s)
    assert p.speed(0) == pytest.approx(factor, rel=0.05)
    assert p.speed(1) == 1.0


def test_a_prompt_that_kept_no_decode_step_waiting_does_not_count_in_the_speed() -> None:
    p = progress()
    stream(p, 0.0, prompt=5000)
    step_s = decode_step_time_s(FAST_CONSTANTS, 1, 5005)
    p.observe_steps(0, 10, 10 * step_s, 10 * step_s)
    assert p.speed(0) == pytest.approx(1.0, rel=0.01)


def test_the_speed_factor_has_bounds_and_forgets() -> None:
    p, now_s = progress(), 0.0
    stream(p, 0.0)
    for _ in range(50):
        now_s += 5
        p.observe_steps(0, 1, 5.0, now_s)
    assert p.speed(0) == 10.0
    for _ in range(50):
        context = p.rows(SLOTS, now_s)[CONTEXT, 0]
        step_s = decode_step_time_s(FAST_CONSTANTS, 1, context)
        now_s += 50 * step_s
        p.observe_steps(0, 50, 50 * step_s, now_s)
    assert p.speed(0) == pytest.approx(1.0, rel=0.05)


def test_an_engine_that_hangs_while_it_streams_is_slow() -> None:
    p = progress()
    stream(p, 0.0)
    for second in range(1, 5):
        p.observe_steps(0, 0, 1.0, float(second))
    assert p.speed(0) == 10.0


def test_a_slot_is_silent_while_it_owes_a_first_token() -> None:
    p, first, second = progress(), dispatch(), dispatch()
    assert p.rows(SLOTS, 5.0)[SILENT_S].tolist() == [0, 0]
    p.placed(first, 5.0)
    p.placed(second, 6.0)
    assert p.rows(SLOTS, 7.0)[SILENT_S].tolist() == [2, 0]
    p.first_token(first, 7.5)
    assert p.rows(SLOTS, 8.0)[SILENT_S].tolist() == [0.5, 0]
    p.first_token(second, 8.0)
    assert p.rows(SLOTS, 9.0)[SILENT_S].tolist() == [0, 0]


def test_a_slot_that_is_used_again_knows_nothing_of_the_past() -> None:
    p = progress()
    d = stream(p, 0.0)
    p.observe_steps(0, 1, 5.0, 5.0)
    p.left(d, 6.0)
    p.close_slot(0)
    p.open_slot(0, SLOW_CONSTANTS)
    assert p.speed(0) == 1.0
    assert not p.rows(SLOTS, 9.0)[[WAITING, STREAMING, CONTEXT]].any()


def test_an_unprofiled_slot_counts_and_keeps_its_speed() -> None:
    p = Progress()
    p.open_slot(0, None)
    stream(p, 0.0)
    p.observe_steps(0, 10, 1.0, 1.0)
    assert p.speed(0) == 1.0
    assert p.rows(SLOTS[:1], 2.0)[STREAMING, 0] == 1


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["place", "first", "leave", "observe"]),
        st.integers(0, 1),
        st.integers(0, 30),
        st.integers(1, 3),
        st.floats(0, 2),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(EVENTS)
def test_sums_are_those_of_the_requests_and_zero_at_the_end(events: list[tuple]) -> None:  # type: ignore[type-arg]
    p, now_s = progress(), 0.0
    waiting: list[Dispatch] = []
    streaming: list[Dispatch] = []
    for kind, slot, pick, sequences, wait_s in events:
        now_s += wait_s
        if kind == "place":
            d = dispatch(slot, 10 + pick, 7.0 * pick, sequences)
            p.placed(d, now_s)
            waiting.append(d)
        elif kind == "first" and waiting:
            d = waiting.pop(pick % len(waiting))
            assert p.first_token(d, now_s)
            streaming.append(d)
        elif kind == "leave" and waiting + streaming:
            d = (waiting + streaming)[pick % len(waiting + streaming)]
            (waiting if d in waiting else streaming).remove(d)
            p.left(d, now_s)
        elif kind == "observe":
            p.observe_steps(slot, 1 + pick, 0.1 + wait_s, now_s)
        rows, stages = p.rows(SLOTS, now_s), p.stages(SLOTS)
        for s in SLOTS:
            there = [d.request for d in waiting if d.slot == s]
            assert rows[WAITING, s] == sum(r.sequences for r in there)
            assert rows[WAITING_PROMPT, s] == sum(r.sequences * r.prompt_tokens for r in there)
            running = sum(d.request.sequences for d in streaming if d.slot == s)
            assert rows[STREAMING, s] == stages[s].sum() == running
            assert stages[s].min() >= 0
        assert (rows[SPEED] >= 0.1).all()
        assert (rows[SPEED] <= 10).all()
    for d in waiting + streaming:
        p.left(d, now_s)
    assert not p.rows(SLOTS, now_s)[
        [WAITING, STREAMING, WAITING_PROMPT, WAITING_OUTPUT, CONTEXT]
    ].any()
    assert not p.stages(SLOTS).any()


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
