"""Rows tell what was seen; by the model they take the time that the engine took."""

import pytest

from hetero_gateway.core.costs.cost_model import decode_step_time_s, prefill_time_s
from hetero_gateway.core.instances.dispatch import Dispatch
from hetero_gateway.core.instances.observation import (
    MOST_ROWS,
    FirstTokenRow,
    Observations,
    StepRow,
    seconds,
)
from hetero_gateway.core.instances.state import InstanceState
from hetero_gateway.core.instances.table import Table
from hetero_gateway.core.types import InstanceId, Outcome
from tests.core.builders import FAST_CONSTANTS, fast_instance, request


def place(p: InstanceState, now_s: float, prompt: int, sequences: int = 1) -> Dispatch:
    return p.dispatch(request(prompt, 50.0, sequences=sequences), 0.0, now_s)


def test_a_row_of_steps_takes_what_the_cost_model_says() -> None:
    row = StepRow(1.0, 10.0, 4.0, 300.0, 2.0, 500.0)
    prefill_s, decode_s = seconds(row.terms, FAST_CONSTANTS)
    assert decode_s == pytest.approx(10 * decode_step_time_s(FAST_CONSTANTS, 4, 300))
    assert prefill_s == pytest.approx(500 * FAST_CONSTANTS.p1 + 2 * FAST_CONSTANTS.p2)


def test_a_first_token_on_an_idle_instance_takes_its_prefill() -> None:
    row = FirstTokenRow(0.1, 2, 800, 0, 0, 0, 0)
    assert row.clear
    assert sum(seconds(row.terms, FAST_CONSTANTS)) == pytest.approx(
        prefill_time_s(FAST_CONSTANTS, 2, 400)
    )


def test_a_first_token_behind_others_or_of_many_steps_is_not_clear() -> None:
    assert not FirstTokenRow(0.1, 1, 100, 1, 50, 0, 0).clear
    assert not FirstTokenRow(0.1, 1, 100, 0, 0, 2, 50).clear
    assert not FirstTokenRow(0.1, 1, 5000, 0, 0, 0, 0).clear


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    seen = Observations()
    for i in range(2 * MOST_ROWS):
        seen.add_steps(StepRow(0.5, float(i), 1, 1, 0, 0))
        seen.add_first_token(FirstTokenRow(0.1, 1, float(i % 100), 0, 0, 0, 0))
    assert len(seen.steps) == len(seen.first_tokens) == len(seen.take_fresh()) == MOST_ROWS
    assert next(iter(seen.steps)).steps == MOST_ROWS
    assert [row.steps for row in seen.steps.last(2)] == [2 * MOST_ROWS - 1, 2 * MOST_ROWS - 2]
    assert seen.observed_s == MOST_ROWS
    assert seen.take_fresh() == []


def test_batch_and_context_of_a_row_are_means_over_its_time() -> None:
    p = fast_instance()
    first, second = place(p, 0.0, 100), place(p, 0.0, 300)
    p.first_token(first, 1.0)
    p.observe_steps(0, 0.0, 1.0)
    # Two are there for a quarter of the interval; the look itself comes after the second has gone.
    p.first_token(second, 1.5)
    p.settle(second, Outcome.COMPLETED, 1.75)
    row = p.observe_steps(0, 1.0, 2.0)
    assert row.sequences == pytest.approx(1.25)
    # No step is assumed on average: the clock ran by the model, which makes the context grow.
    steps = 1 / decode_step_time_s(FAST_CONSTANTS, 1, 120)
    assert row.sequences * row.cached_tokens == pytest.approx(
        101 + 0.25 * 301 + steps / 2, rel=0.05
    )
    assert (row.prompts, row.prompt_tokens) == (1, 300)
    assert p.observations.steps.last(1) == [row]


def test_first_tokens_know_what_was_there_before_them() -> None:
    p = fast_instance()
    first = place(p, 0.0, 100)
    p.first_token(first, 0.5)
    second, third = place(p, 0.5, 200), place(p, 0.5, 400, sequences=2)
    p.first_token(second, 0.75, seen=False)
    p.first_token(third, 1.5)
    rows = list(p.observations.first_tokens)
    assert rows[0] == FirstTokenRow(0.5, 1, 100, 0, 0, 0, 0)
    assert rows[1] == FirstTokenRow(1.0, 2, 800, 1, 200, 1, 101)
    assert len(rows) == 2, "a predicted first token is not an observation"


def test_a_busy_period_that_ended_before_the_look_is_a_row_too() -> None:
    p = fast_instance()
    d = place(p, 0.0, 100)
    p.first_token(d, 0.25)
    p.settle(d, Outcome.COMPLETED, 0.75)
    row = p.observe_steps(5, 0.5, 1.0)
    assert (row.sequences, row.duration_s) == (1, 0.5)


def test_stand_ins_that_were_not_seen_have_the_lowest_speed_that_was() -> None:
    table = Table()
    a, b, c = (table.join(InstanceId(name)) for name in "abc")
    for state in (a, b, c):
        state.set_constants(FAST_CONSTANTS, stands_in=True)
    step_s = decode_step_time_s(FAST_CONSTANTS, 1, 120)
    assert not any(state.observed for state in (a, b, c))
    for state, factor in ((a, 40.0), (b, 0.02)):
        state.first_token(place(state, 0.0, 100), factor * prefill_time_s(FAST_CONSTANTS, 1, 100))
        for i in range(10, 20):
            state.observe_steps(40, 40 * factor * step_s, float(i))
            table.spread_stand_in_speed()
    # Far outside of the bounds that hold where there is a profile.
    assert a.speed == pytest.approx(40, rel=0.3)
    assert b.speed == pytest.approx(0.02, rel=0.3)
    assert c.speed == b.speed == table.stand_in_speed()
    assert (a.observed, c.observed) == (True, False)


def test_other_constants_begin_with_a_speed_factor_of_1() -> None:
    p = fast_instance()
    d = place(p, 0.0, 100)
    p.first_token(d, 0.0)
    p.observe_steps(1, 1.0, 1.0)
    assert p.speed > 5
    p.set_constants(FAST_CONSTANTS)
    assert p.speed > 5, "the same constants: nothing has changed"
    p.set_constants(FAST_CONSTANTS.scaled(2))
    assert p.speed == 1
