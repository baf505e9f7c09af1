"""Planted constants come back, what cannot be known is said, and the errors are honest."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_gateway.core.costs.arrays import FloatArray
from hetero_gateway.core.costs.cost_model import decode_time_s, prefill_time_s
from hetero_gateway.core.costs.fitting import Fit, Sample, fit, prefill_terms
from hetero_gateway.core.costs.profile import Constants
from hetero_gateway.errors import ProfileError

BATCHES = (1, 2, 4, 8, 16, 32)
PROMPTS = (64, 128, 256, 512, 1024, 2048)
OUTPUTS = (17, 65)
# Between the measured cells, and none of them.
NEW_CELLS = tuple(product((1, 3, 6, 12, 24), (96, 400, 800, 1600), (33,)))
# Of everyday accelerators, and up to ten times as much.
LEAST = (2e-5, 1e-4, 1e-6, 5e-3, 2e-8, 2e-5, 2e-8, 5e-3)
TYPICAL = Constants(1e-4, 1e-3, 1e-5, 2e-2, 1e-7, 1e-4, 2e-7, 2e-2)
factors = st.tuples(*(st.floats(1, 10) for _ in range(8)))
seeds = st.integers(0, 2**32 - 1)
Noise = Callable[[], float]


def constants_of(by: Sequence[float]) -> Constants:
    return Constants(*(least * factor for least, factor in zip(LEAST, by, strict=True)))


def sample(
    c: Constants, batch: float, prompt: float, output: float, noise: Noise = lambda: 1.0
) -> Sample:
    return Sample(
        batch,
        prompt,
        output,
        prefill_time_s(c, batch, prompt) * noise(),
        decode_time_s(c, batch, prompt, output - 1) * noise(),
    )


def grid(
    c: Constants,
    batches: Sequence[float] = BATCHES,
    prompts: Sequence[float] = PROMPTS,
    outputs: Sequence[float] = OUTPUTS,
    repeats: int = 1,
    noise: Noise = lambda: 1.0,
) -> list[Sample]:
    cells = product(batches, prompts, outputs)
    return [sample(c, *cell, noise) for cell in cells for _ in range(repeats)]


def slower(s: Sample, factor: float) -> Sample:
    """Its prefill took so many times as long."""
    return replace(s, prefill_s=(s.prefill_s or 0) * factor)


def noisy(rng: np.random.Generator, outliers: float = 0.0) -> Noise:
    """3 % of normal noise; a share of the times is three times too long."""
    return lambda: (1 + 0.03 * rng.normal()) * (3 if rng.random() < outliers else 1)


def fitted(samples: Sequence[Sample], seed: int = 0, resamples: int = 20) -> Fit:
    return fit(samples, rng=np.random.default_rng(seed), resamples=resamples)


def errors_on_new_cells(found: Constants, planted: Constants) -> FloatArray:
    """Relative, of prefill and decode times of cells that were not measured."""
    return np.array(
        [
            time_s(found) / time_s(planted) - 1
            for b, i, o in NEW_CELLS
            for time_s in (
                lambda c, b=b, i=i: prefill_time_s(c, b, i),
                lambda c, b=b, i=i, o=o: decode_time_s(c, b, i, o - 1),
            )
        ]
    )


def identified(found: Fit) -> list[bool]:
    return [*found.prefill.identified, *found.decode.identified]


# Planted constants


@given(factors, st.sets(st.integers(0, 6).filter(lambda i: i != 3)))
@settings(max_examples=25)
def test_planted_constants_are_recovered_from_exact_times(by, zeros):
    c = constants_of([0.0 if i in zeros else factor for i, factor in enumerate(by)])
    found = fitted(grid(c), resamples=1)
    assert np.abs(errors_on_new_cells(found.constants, c)).max() < 1e-6
    assert found.prefill.worst_error < 1e-6
    assert found.decode.worst_error < 1e-6
    assert found.prefill.outliers == found.decode.outliers == 0


@given(factors, seeds)
@settings(max_examples=25)
def test_noise_and_outliers_leave_predictions_within_3_percent(by, seed):
    c = constants_of(by)
    samples = grid(c, repeats=2, noise=noisy(np.random.default_rng(seed), outliers=0.05))
    found = fitted(samples, resamples=1)
    assert np.abs(errors_on_new_cells(found.constants, c)).max() < 0.03


@given(
    st.lists(
        st.tuples(
            st.integers(1, 64), st.integers(1, 4096), st.integers(2, 256),
            st.floats(1e-4, 100), st.floats(1e-4, 100),
        ),
        min_size=4,
        max_size=30,
        unique_by=lambda row: row[:2],
    ),
)  # fmt: skip
@settings(max_examples=40)
def test_no_times_whatever_give_a_negative_constant(rows: list[tuple[float, ...]]) -> None:
    found = fitted([Sample(*row) for row in rows], resamples=3)
    values = (*found.prefill.constants, *found.decode.constants)
    assert all(math.isfinite(v) and v >= 0 for v in values)
    assert all(0 <= low <= high for p in (found.prefill, found.decode) for low, high in p.intervals)


def test_times_that_fall_with_the_batch_do_not_give_a_negative_constant() -> None:
    samples = [Sample(b, i, 17, 1 + i / 1000 - b / 64, 1 - b / 64) for b, i, _ in CELLS]
    found = fitted(samples)
    assert min(*found.prefill.constants, *found.decode.constants) == 0
    assert found.prefill.worst_error > 0.05


CELLS = tuple(product(BATCHES, PROMPTS, OUTPUTS))


# What the samples cannot tell


def test_a_well_measured_engine_has_every_constant_identified() -> None:
    found = fitted(grid(TYPICAL, noise=lambda: 1.0), resamples=50)
    assert identified(found) == [True] * 4 + [False] + [True] * 4  # it has no attention
    assert found.prefill.notes == found.decode.notes == ()


def test_a_constant_of_0_is_not_called_identified() -> None:
    c = Constants(1e-4, 0.0, 1e-5, 2e-2, 1e-7, 1e-4, 0.0, 2e-2)
    truth = [value > 0 for value in (c.p1, c.p2, c.p3, c.p4, c.p9, c.p5, c.p6, c.p7, c.p8)]
    right = []
    for seed in range(10):
        found = fitted(grid(c, repeats=2, noise=noisy(np.random.default_rng(seed))), resamples=30)
        right.append(identified(found) == truth)
    # Of 10 at 95 % and two constants each, 1 would be wrong.
    assert sum(right) >= 8
    assert found.prefill.notes == ("p2 cannot be distinguished from 0",)


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        (grid(TYPICAL, batches=(8,)), "every prefill sample has batch size 8"),
        (grid(TYPICAL, prompts=(512,), outputs=(33,)),
         "every prefill sample has 512 prompt tokens"),
        (grid(TYPICAL, batches=(1,), outputs=(33,)) + grid(TYPICAL, prompts=(512,), outputs=(33,)),
         "batch size and prompt length are never both away from 1 and 512 in a prefill sample"),
    ],
)  # fmt: skip
def test_what_was_not_varied_identifies_nothing_and_is_named_as_the_reason(samples, why):
    found = fitted(samples)
    assert identified(found) == [False] * 9
    assert found.prefill.notes == (f"p1, p2, p3, p4 cannot be distinguished: {why}",)
    assert found.decode.notes[0].endswith(why.replace("prefill", "decode"))


def test_what_cannot_be_told_apart_still_predicts_where_it_was_measured() -> None:
    found = fitted(grid(TYPICAL, batches=(8,)))
    for time_s in (
        lambda c, i: prefill_time_s(c, 8, i), lambda c, i: decode_time_s(c, 8, i, 40)
    ):  # fmt: skip
        for i in (100, 700, 1800):
            assert time_s(found.constants, i) == pytest.approx(time_s(TYPICAL, i), rel=1e-6)
    # The part that cannot be told apart goes to the constants that dominate.
    for first, second, third, fourth, *_ in (found.prefill.constants, found.decode.constants):
        assert second * 8 < 1e-3 * fourth
        assert third < 1e-3 * first * 8


def test_nine_of_ten_intervals_hold_the_planted_constant() -> None:
    held = []
    for seed in range(25):
        noise = noisy(np.random.default_rng(seed))
        found = fitted(grid(TYPICAL, noise=noise), seed=seed, resamples=50)
        for part, planted in ((found.prefill, (1e-4, 1e-3, 1e-5, 2e-2)),
                              (found.decode, (1e-7, 1e-4, 2e-7, 2e-2))):  # fmt: skip
            pairs = zip(part.intervals[:4], planted, strict=True)
            held += [low <= value <= high for (low, high), value in pairs]
    assert np.mean(held) > 0.85
    # An interval that holds everything says nothing.
    assert found.prefill.intervals[0][1] < 1.2 * found.prefill.intervals[0][0]


# Errors


def with_prefill(time_s: Callable[[float, float], float]) -> list[Sample]:
    return [replace(s, prefill_s=time_s(s.batch_size, s.prompt_tokens)) for s in grid(TYPICAL)]


def test_an_engine_of_another_form_gets_a_large_error() -> None:
    found = fitted(with_prefill(lambda b, i: 1e-3 + 1e-8 * b**2 * i**2))
    assert found.prefill.mean_error > 0.3
    assert found.prefill.worst_error > found.prefill.mean_error > 0.3
    # Nothing is called an outlier to make it look better.
    assert found.prefill.outliers == 0
    assert found.decode.worst_error < 1e-6


# Attention


@given(factors, st.floats(1e-9, 1e-7))
@settings(max_examples=30)
def test_planted_attention_is_recovered_with_the_others(by: tuple[float, ...], p9: float) -> None:
    c = replace(constants_of(by), p9=p9)
    found = fitted(grid(c), resamples=20)
    assert np.abs(errors_on_new_cells(found.constants, c)).max() < 1e-6
    assert found.constants.p9 == pytest.approx(p9, rel=1e-3)
    assert found.prefill.identified[-1]


def test_attention_under_noise_is_found_where_it_matters_and_the_gain_is_told() -> None:
    c = replace(TYPICAL, p9=1e-7)  # as much as p1 at 2000 tokens
    for seed in range(5):
        found = fitted(grid(c, repeats=3, noise=noisy(np.random.default_rng(seed))), resamples=60)
        assert found.constants.p9 == pytest.approx(1e-7, rel=0.1)
        assert found.prefill.identified[-1]
        assert found.prefill.eq_3_error is not None
        assert found.prefill.mean_error < 0.04 < found.prefill.eq_3_error
        assert found.decode.eq_3_error is None


def test_attention_that_is_not_there_is_left_at_0_and_changes_nothing() -> None:
    rightly = 0
    for seed in range(10):
        samples = grid(TYPICAL, repeats=2, noise=noisy(np.random.default_rng(seed)))
        found = fitted(samples, resamples=30)
        rightly += found.constants.p9 == 0
        if found.constants.p9 == 0:
            assert found.prefill.eq_3_error == found.prefill.mean_error
        # Where noise looks like attention, it is a little of it.
        longest = prefill_time_s(found.constants, 1, 2048)
        assert longest == pytest.approx(prefill_time_s(TYPICAL, 1, 2048), rel=0.05)
    assert rightly >= 8


@pytest.mark.parametrize("prompts", [(512,), (64, 2048)])
def test_attention_takes_three_prompt_lengths(prompts: tuple[int, ...]) -> None:
    c = replace(TYPICAL, p9=1e-7)
    found = fitted(grid(c, prompts=prompts))
    assert found.constants.p9 == 0
    assert not found.prefill.identified[-1]


def test_repeats_of_a_cell_do_not_flatter_the_error() -> None:
    """Each cell is off by a factor of its own, which its repeats share.

    Were repeats held out one by one, the fit would have seen every cell.
    """
    rng = np.random.default_rng(5)
    few = {"batches": (1, 4, 16), "prompts": (64, 1024), "outputs": (33,)}
    told, real = [], []
    for _ in range(30):
        cells = [slower(s, math.exp(0.15 * rng.normal())) for s in grid(TYPICAL, **few)]
        found = fitted(cells * 5, resamples=1)
        told.append(found.prefill.mean_error)
        truth = np.array([prefill_time_s(TYPICAL, b, i) for b, i, _ in NEW_CELLS])
        guess = [prefill_time_s(found.constants, b, i) for b, i, _ in NEW_CELLS]
        fresh = truth * np.exp(0.15 * rng.normal(size=len(truth)))
        real.append(np.mean(np.abs(guess / fresh - 1)))
    assert np.mean(told) > 0.9 * np.mean(real)


def test_the_error_told_is_the_error_on_new_batches() -> None:
    rng = np.random.default_rng(6)
    found = fitted(grid(TYPICAL, repeats=2, noise=noisy(rng)))
    fresh = [sample(TYPICAL, *cell, noisy(rng)) for cell in NEW_CELLS for _ in range(10)]
    predicted = prefill_terms(fresh) @ found.prefill.constants
    real = np.mean([abs(p / (s.prefill_s or 0) - 1) for p, s in zip(predicted, fresh, strict=True)])
    assert found.prefill.mean_error == pytest.approx(real, rel=0.25)
    assert found.prefill.median_error < found.prefill.mean_error < found.prefill.worst_error
    assert 0.99 < found.prefill.r2 < 1


def test_few_cells_are_held_out_one_at_a_time_and_many_in_fifths() -> None:
    few = fitted(grid(TYPICAL, batches=(1, 8), prompts=(64, 512, 2048)))
    assert few.prefill.validation.startswith("each of 6 combinations")
    many = fitted(grid(TYPICAL))
    assert many.decode.validation.startswith("36 combinations")
    assert "a fifth" in many.decode.validation
    # One batch size and prompt length are one combination; its outputs are what differs.
    alone = [Sample(1, 64, o, i, i) for o, i in ((9, 1.0), (17, 2.0), (33, 3.0), (65, 5.0))]
    prefill = [Sample(b, 64, 9, float(b), None) for b in (4, 8, 16)]
    assert fitted(alone + prefill).decode.validation.startswith("each of 4 cells")


# Outliers and repeats


def test_outliers_are_counted_and_left_out() -> None:
    samples = grid(TYPICAL)
    for index in (3, 30):
        samples[index] = slower(samples[index], 3)
    found = fitted(samples)
    assert (found.prefill.used, found.prefill.outliers) == (len(samples) - 2, 2)
    assert (found.decode.used, found.decode.outliers) == (len(samples), 0)
    assert found.prefill.constants == pytest.approx((1e-4, 1e-3, 1e-5, 2e-2, 0.0), rel=1e-3)


def test_a_slow_repeat_is_an_outlier_of_its_cell_even_where_the_equation_is_off() -> None:
    samples = with_prefill(lambda b, i: 1e-3 + 1e-8 * b**2 * i**2) * 3
    samples[0] = slower(samples[0], 50)
    assert fitted(samples, resamples=1).prefill.outliers == 1


def test_two_repeats_that_agree_are_no_outliers_where_the_equation_is_off() -> None:
    """A corner four times as slow as the equation says: the error must tell, not hide it."""
    off = {(32, 2048): 4.0}
    samples = [
        Sample(b, i, 17, prefill_time_s(TYPICAL, b, i) * off.get((b, i), 1.0), None)
        for b, i in product(BATCHES, PROMPTS)
    ]
    decode = [replace(s, prefill_s=None) for s in grid(TYPICAL)]
    twice, once = fitted(samples * 2 + decode), fitted(samples + decode)
    assert twice.prefill.outliers == 0
    assert twice.prefill.worst_error > 0.5
    assert once.prefill.outliers == 1


def test_of_two_repeats_that_differ_the_one_far_from_the_fit_is_the_outlier() -> None:
    samples = grid(TYPICAL, outputs=(17,), repeats=2)
    samples[10], samples[20] = slower(samples[10], 1 / 3), slower(samples[20], 3)
    found = fitted(samples)
    assert found.prefill.outliers == 2
    assert found.prefill.worst_error < 1e-3


def test_a_fifth_and_more_is_no_outlier_but_an_equation_that_does_not_hold() -> None:
    samples = [slower(s, 1 if n % 4 else 3) for n, s in enumerate(grid(TYPICAL))]
    found = fitted(samples)
    assert found.prefill.outliers == 0
    assert found.prefill.mean_error > 0.15
    assert any("too many to leave out" in note for note in found.prefill.notes)


def test_a_cell_counts_once_however_often_it_was_repeated() -> None:
    samples = grid(TYPICAL, outputs=(33,), noise=noisy(np.random.default_rng(7)))
    found, repeated = fitted(samples), fitted(samples + samples[:1] * 50)
    assert repeated.prefill.constants == pytest.approx(found.prefill.constants, rel=1e-6)
    assert repeated.decode.constants == pytest.approx(found.decode.constants, rel=1e-6)


# Order and chance


def test_the_same_seed_gives_the_same_fit_and_the_order_does_not_matter() -> None:
    samples = grid(TYPICAL, noise=noisy(np.random.default_rng(9)))
    found, back = fitted(samples, seed=1), fitted(samples[::-1])
    assert found == fitted(samples, seed=1)
    assert back.prefill.constants == pytest.approx(found.prefill.constants, rel=1e-6)
    assert back.decode.constants == pytest.approx(found.decode.constants, rel=1e-6)


# Too few samples


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([replace(s, decode_s=None) for s in grid(TYPICAL)],
         r"have none of the 4 decode cells .*: measure more"),
        (grid(TYPICAL, outputs=(1,)), "none of the 4 decode cells"),
        ([slower(s, 0) for s in grid(TYPICAL)], "none of the 4 prefill cells"),
        # However often they were repeated.
        (grid(TYPICAL, batches=(1, 2, 4), prompts=(64,), outputs=(17,), repeats=9),
         "only 3 of the 4 prefill cells"),
        ([], "none of the 4 prefill cells"),
    ],
)  # fmt: skip
def test_too_few_samples_are_refused_with_what_to_do(samples: list[Sample], said: str) -> None:
    with pytest.raises(ProfileError, match=said):
        fitted(samples)


def test_either_time_may_be_missing_from_a_sample() -> None:
    samples = grid(TYPICAL)
    halves = [replace(s, **{name: None}) for s in samples for name in ("decode_s", "prefill_s")]
    assert fitted(halves).constants == fitted(samples).constants
