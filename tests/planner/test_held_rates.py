"""What instances hold of a mix, by simulation."""

import dataclasses

import pytest

from hetero_gateway.files.profile_file import load_profile
from hetero_gateway.planner.goals import Goals
from hetero_gateway.planner.held_rates import RateQuestion, find_held_rates

FAST, SLOW = ("V100-32GB-NVLink2", 4), ("V100-32GB-NVLink2", 1)
PROFILES = {(gpu, t): load_profile(f"{gpu}/Llama-3-8B/tp{t}") for gpu, t in (FAST, SLOW)}
REQUESTS = [(200 + 37 * i % 400, 60 + 23 * i % 90) for i in range(200)]


def test_a_larger_instance_holds_more_and_limits_cost_something():
    free = find_held_rates(RateQuestion(PROFILES, REQUESTS))
    assert free.per_s[FAST] > 1.5 * free.per_s[SLOW] > 0
    strict = Goals(ttft_p99_s=0.5, tpot_p99_s=0.02)
    limited = find_held_rates(RateQuestion(PROFILES, REQUESTS, strict, {FAST: 2, SLOW: 2}))
    assert limited.per_s[SLOW] < free.per_s[SLOW]
    four = RateQuestion({SLOW: PROFILES[SLOW]}, REQUESTS, ranks={SLOW: 4})
    assert find_held_rates(four).per_s[SLOW] == pytest.approx(4 * free.per_s[SLOW])
    assert limited.keeps_goals
    assert free.of({FAST: 2, SLOW: 1}) == pytest.approx(2 * free.per_s[FAST] + free.per_s[SLOW])


def test_goals_that_nothing_keeps_are_said_and_rates_are_those_without():
    found = find_held_rates(RateQuestion(PROFILES, REQUESTS, Goals(tpot_p99_s=1e-4)))
    assert not found.keeps_goals
    assert found.per_s == find_held_rates(RateQuestion(PROFILES, REQUESTS)).per_s


def test_requests_that_do_not_fit_an_instance_are_held_by_none_of_it():
    small = dataclasses.replace(PROFILES[SLOW], kv_capacity_tokens=128)
    found = find_held_rates(RateQuestion({FAST: PROFILES[FAST], SLOW: small}, REQUESTS))
    assert found.per_s[SLOW] == 0
    assert found.per_s[FAST] > 0


def test_it_is_asked_again_for_other_lengths_profiles_or_goals_only():
    question = RateQuestion(PROFILES, REQUESTS)
    found = find_held_rates(question)
    assert found.answers(dataclasses.replace(question, counts={FAST: 9}))
    assert found.answers(dataclasses.replace(question, requests=REQUESTS[:190]))
    longer = [(2 * prompt, output) for prompt, output in REQUESTS]
    assert not found.answers(dataclasses.replace(question, requests=longer))
    assert not found.answers(dataclasses.replace(question, goals=Goals(ttft_p99_s=1)))
    assert not found.answers(dataclasses.replace(question, ranks={FAST: 2}))
    assert not found.answers(dataclasses.replace(question, profiles={FAST: PROFILES[FAST]}))
