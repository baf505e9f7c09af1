"""Constants from traffic: right where the traffic says so, the old ones where it does not."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_gateway.core.costs.cost_model import attended_pairs, decode_step_time_s, prefill_time_s
from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.core.instances.calibration import LEAST_ROWS, MOST_CHANGE, NAMES, bounded, refit
from hetero_gateway.core.instances.observation import FirstTokenRow, StepRow, seconds
from tests.core.builders import FAST_CONSTANTS, SLOW_CONSTANTS


def step_rows(
    c: Constants,
    rng: np.random.Generator,
    count: int = 300,
    *,
    batch: tuple[float, float] = (1, 64),
    cached: tuple[float, float] = (50, 2000),
    noise: float = 0.03,
) -> list[StepRow]:
    """Seconds of an engine with these constants; the steps are what is a little off."""
    rows = []
    for _ in range(count):
        b, tokens = float(rng.uniform(*batch)), float(rng.uniform(*cached))
        prompts = int(rng.integers(0, 4))
        prefilled = prompts * float(rng.uniform(20, 600))
        prefill_s = c.p1 * prefilled + c.p2 * prompts
        if prompts:
            prefill_s += c.p9 * prompts * attended_pairs(prefilled / prompts)
        steps = max(1.0, (1 - prefill_s) / decode_step_time_s(c, b, tokens))
        steps *= float(np.exp(rng.normal(0, noise)))
        rows.append(StepRow(1.0, steps, b, tokens, prompts, prefilled))
    return rows


def first_token_rows(
    c: Constants, rng: np.random.Generator, count: int = 200, noise: float = 0.1
) -> list[FirstTokenRow]:
    rows = []
    for _ in range(count):
        row = FirstTokenRow(1.0, 1, float(rng.integers(20, 2000)), 0, 0, 0, 0)
        ttft_s = sum(seconds(row.terms, c)) * float(np.exp(rng.normal(0, noise)))
        rows.append(row._replace(ttft_s=ttft_s))
    return rows


def worst_error(fitted: Constants, true: Constants) -> float:
    """Of predicted steps and prefills, over the range of the rows."""
    errors = []
    for b in (1, 8, 32, 64):
        for tokens in (100, 500, 2000):
            errors.append(
                decode_step_time_s(fitted, b, tokens) / decode_step_time_s(true, b, tokens) - 1
            )
    for tokens in (100, 500, 2000):
        errors.append(prefill_time_s(fitted, 1, tokens) / prefill_time_s(true, 1, tokens) - 1)
    return max(map(abs, errors))


@pytest.mark.parametrize("wrong", [0.5, 1.0, 2.0])
def test_varied_traffic_gives_the_constants_back(wrong: float) -> None:
    rng = np.random.default_rng(0)
    steps, firsts = step_rows(FAST_CONSTANTS, rng), first_token_rows(FAST_CONSTANTS, rng)
    fit = refit(steps, firsts, FAST_CONSTANTS.scaled(wrong))
    assert worst_error(fit.constants, FAST_CONSTANTS) < 0.05
    assert {"p1", "p6", "p8"} <= fit.identified
    assert fit.decode.median < 0.06
    assert fit.prefill.median < 0.15


def test_what_a_first_token_takes_beside_its_steps_is_no_prefill() -> None:
    rng = np.random.default_rng(3)
    steps, firsts = step_rows(FAST_CONSTANTS, rng), first_token_rows(FAST_CONSTANTS, rng)
    later = [row._replace(ttft_s=row.ttft_s + 0.05) for row in firsts]
    told = refit(steps, later, FAST_CONSTANTS, 0.05)
    assert worst_error(told.constants, FAST_CONSTANTS) < 0.05
    assert worst_error(refit(steps, later, FAST_CONSTANTS).constants, FAST_CONSTANTS) > 0.2
    assert told.first_token_rows == len(firsts)
    # A first token that came sooner than that says nothing.
    assert refit(steps, later, FAST_CONSTANTS, 100.0).first_token_rows == 0


@pytest.mark.parametrize("known", [True, False])
def test_attention_that_traffic_shows_is_found_known_before_or_not(known: bool) -> None:
    c = dataclasses.replace(FAST_CONSTANTS, p9=8e-8)  # as much as p1 at 1400 tokens
    rng = np.random.default_rng(5)
    present = c.scaled(1.5) if known else FAST_CONSTANTS
    fit = refit(step_rows(c, rng), first_token_rows(c, rng, 400, noise=0.03), present)
    assert fit.constants.p9 == pytest.approx(8e-8, rel=0.15)
    assert "p9" in fit.identified
    assert worst_error(fit.constants, c) < 0.05


def test_attention_that_traffic_does_not_show_stays_0_and_changes_nothing() -> None:
    rng = np.random.default_rng(6)
    steps, firsts = step_rows(FAST_CONSTANTS, rng), first_token_rows(FAST_CONSTANTS, rng)
    fit = refit(steps, firsts[:3], FAST_CONSTANTS)
    assert fit.constants.p9 == 0
    assert "p9" not in fit.identified
    # And recalibration, which keeps to the profile's proportions, does not invent it.
    assert bounded(dataclasses.replace(fit.constants, p9=1e-7), FAST_CONSTANTS).p9 == 0


def test_another_machine_s_profile_is_not_in_the_way() -> None:
    rng = np.random.default_rng(1)
    fit = refit(
        step_rows(SLOW_CONSTANTS, rng), first_token_rows(SLOW_CONSTANTS, rng), FAST_CONSTANTS
    )
    assert worst_error(fit.constants, SLOW_CONSTANTS) < 0.1


def test_what_the_traffic_cannot_tell_stays_as_it_was_but_scaled() -> None:
    # One batch size, one length: one number is known, the time of that step.
    rng = np.random.default_rng(2)
    rows = step_rows(FAST_CONSTANTS, rng, batch=(8, 8.1), cached=(300, 301))
    old = FAST_CONSTANTS.scaled(0.4)
    fit = refit(rows, [], old)
    assert "p5" not in fit.identified
    # The one that dominates the step may be told; those that do not are the old ones' shape.
    step = decode_step_time_s(fit.constants, 8, 300)
    assert step == pytest.approx(decode_step_time_s(FAST_CONSTANTS, 8, 300), rel=0.05)
    for name in ("p5", "p6", "p7"):
        ratio = getattr(fit.constants, name) / max(getattr(old, name), 1e-30)
        assert getattr(old, name) == 0 or ratio == pytest.approx(2.5, rel=0.3), name


def test_a_tenth_of_wild_rows_does_no_harm() -> None:
    rng = np.random.default_rng(3)
    rows = step_rows(FAST_CONSTANTS, rng)
    for i in range(0, len(rows), 10):
        rows[i] = rows[i]._replace(steps=rows[i].steps / 8)
    fit = refit(rows, first_token_rows(FAST_CONSTANTS, rng), FAST_CONSTANTS)
    assert worst_error(fit.constants, FAST_CONSTANTS) < 0.1


def test_noise_in_the_steps_does_not_bias_the_step_time() -> None:
    rng = np.random.default_rng(4)
    rows = step_rows(FAST_CONSTANTS, rng, 1000, noise=0.25)
    fit = refit(rows, [], FAST_CONSTANTS)
    ratio = decode_step_time_s(fit.constants, 32, 1000) / decode_step_time_s(
        FAST_CONSTANTS, 32, 1000
    )
    assert ratio == pytest.approx(1, abs=0.06)


def test_a_few_rows_are_no_traffic() -> None:
    rows = step_rows(FAST_CONSTANTS, np.random.default_rng(0), LEAST_ROWS - 1)
    assert refit(rows, [], FAST_CONSTANTS) is None
    hanging = [StepRow(1.0, 0, 4, 100, 0, 0)] * 1000
    assert refit(hanging, [], FAST_CONSTANTS) is None


CONSTANT = st.one_of(st.just(0.0), st.floats(1e-9, 1.0))


@settings(max_examples=60)
@given(st.lists(CONSTANT, min_size=8, max_size=8), st.lists(CONSTANT, min_size=8, max_size=8))
def test_bounds_hold_for_every_constant_and_so_for_every_time(fitted, original):
    fitted[7], original[7] = fitted[7] or 0.1, original[7] or 0.1
    old, new = Constants(*original), bounded(Constants(*fitted), Constants(*original))
    for name in NAMES:
        base = getattr(old, name)
        assert base / MOST_CHANGE <= getattr(new, name) <= base * MOST_CHANGE
    for b, tokens in ((1, 1), (64, 2000), (256, 30)):
        ratio = decode_step_time_s(new, b, tokens) / decode_step_time_s(old, b, tokens)
        assert 1 / MOST_CHANGE * 0.999 <= ratio <= MOST_CHANGE * 1.001


def test_within_the_bounds_nothing_is_changed() -> None:
    near = dataclasses.replace(FAST_CONSTANTS.scaled(2), p8=FAST_CONSTANTS.p8 / 3)
    assert bounded(near, FAST_CONSTANTS) == near
