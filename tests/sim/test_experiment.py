"""Policies × rates × seeds, on a cluster whose figures can be computed by hand."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.core.lengths.length_model import ANY_MODEL, Leaf, LengthModel
from hetero_gateway.core.lengths.predictors import (
    BucketMeanPredictor,
    ConstantPredictor,
    LengthFeatures,
    NormalPredictor,
)
from hetero_gateway.core.policies.slo import Slo
from hetero_gateway.sim.alone import Alone, Engines, Mix, run_alone
from hetero_gateway.sim.experiment import (
    Bound,
    Experiment,
    Rate,
    compare,
    make_workload,
    measure_bound,
    mix_moments,
    run_once,
)
from hetero_gateway.sim.workload import Fault, FaultKind, LogNormal, LogNormalLengths, TraceLengths
from tests.fakes.cluster import FakeSimulate, simulated

MIX = LogNormalLengths(LogNormal(100, 0.5, 1000), LogNormal(50, 0.5, 500))


def experiment(**changes: Any) -> Experiment:
    values: dict[str, Any] = {
        "instances": (simulated("fast", 0.01), simulated("slow", 0.04)),
        "lengths": MIX,
        "count": 40,
        "slo": Slo(2.0, 0.2),
    }
    return Experiment(**values | changes)


def run(policy: str = "round-robin", **changes: Any) -> dict[str, Any]:
    """What one run asks of the simulation."""
    made, fake = experiment(**changes), FakeSimulate()
    run_once(made, policy, 5.0, 0, mix_moments(made.lengths), fake)
    return fake.calls[0]


def test_one_seed_means_the_same_requests_for_every_policy_and_rate() -> None:
    fake = FakeSimulate()
    rates = [Rate(2.0), Rate(8.0), Rate(math.inf)]
    compare(experiment(), ["min-max", "round-robin"], rates, [0, 1], Bound((1, 1)), simulate=fake)
    loads = [call["workload"] for call in fake.calls]
    assert len(loads) == 12
    for i in range(0, 12, 2):
        assert (loads[i].prompt_tokens == loads[0].prompt_tokens).all()
        assert (loads[i + 1].output_tokens == loads[1].output_tokens).all()
    assert (loads[0].output_tokens != loads[1].output_tokens).any()
    assert np.allclose(loads[0].arrival_s, loads[4].arrival_s * 4)
    assert not loads[8].arrival_s.any()


def test_cells_come_by_rate_and_then_by_policy_with_a_run_for_every_seed() -> None:
    told: list[tuple[str, float, int]] = []
    cells = compare(
        experiment(),
        ["least-requests", "min-max"],
        [Rate(3.0, 0.5), Rate(math.inf)],
        [0, 1, 2],
        Bound((60.0, 40.0)),
        simulate=FakeSimulate(),
        on_run=lambda policy, rate, seed: told.append((policy, rate.per_s, seed)),
    )
    assert [(c.policy, c.rate_per_s, c.load) for c in cells] == [
        ("least-requests", 3.0, 0.5),
        ("min-max", 3.0, 0.5),
        ("least-requests", math.inf, None),
        ("min-max", math.inf, None),
    ]
    assert all(len(c.runs) == 3 and c.bound_tokens_per_s == 100 for c in cells)
    assert cells[0].instance_ids == ("fast", "slow")
    assert len(told) == 12
    assert told[0] == ("least-requests", 3.0, 0)


def test_the_bound_is_what_each_instance_does_alone_once_per_profile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Profile] = []

    def alone(profile: Profile, mix: Mix, engines: Engines, requests: int) -> Alone | None:
        calls.append(profile)
        return run_alone(profile, mix, engines, requests)

    monkeypatch.setattr("hetero_gateway.sim.experiment.run_alone", alone)
    # One sequence at a time, and its first token takes a step as well.
    first, other = (Constants(0, 0, 0, s, 0, 0, 0, s) for s in (0.01, 0.04))
    three = tuple(
        simulated(name, constants=constants, max_num_seqs=1)
        for name, constants in (("a", first), ("b", other), ("c", first))
    )
    bound = measure_bound(experiment(instances=three))
    # A token every 10 or 40 ms, whatever the mix.
    assert bound.instances_tokens_per_s == pytest.approx((100, 25, 100), rel=0.02)
    assert bound.tokens_per_s == pytest.approx(225, rel=0.02)
    assert calls == [three[0].profile, three[1].profile]


def test_the_bound_knows_the_true_constants_and_no_faults() -> None:
    right = measure_bound(experiment(instances=(simulated("a", 0.01),)))
    wrong = replace(simulated("a", 0.01), believed=None)
    fault = Fault(0, FaultKind.DEAD, 0.0)
    assert measure_bound(experiment(instances=(wrong,), faults=(fault,))) == right
    small = simulated("a", 0.01, kv_capacity_tokens=16)  # nothing fits
    assert measure_bound(experiment(instances=(small,))).tokens_per_s == 0


def test_the_bound_does_not_depend_on_the_order_of_a_traces_rows() -> None:
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(50, 150, 2000), rng.integers(10, 90, 2000)
    order = np.argsort(output)
    rates = [
        measure_bound(experiment(lengths=TraceLengths(prompt[o], output[o], True))).tokens_per_s
        for o in (order, order[::-1])
    ]
    assert rates[0] == pytest.approx(rates[1], rel=0.02)


def test_a_load_is_a_share_of_the_bound_and_moments_are_those_of_the_draws() -> None:
    lengths = TraceLengths(np.array([10, 30]), np.array([4, 8]), in_order=True)
    moments = mix_moments(lengths)
    assert (moments.mean_prompt, moments.mean_output, moments.sd_output) == (20, 6, 2)
    assert Bound((100.0, 25.0)).rate_per_s(0.8, moments) == pytest.approx(100 / 6)


@pytest.mark.parametrize(
    ("choice", "policy", "kind"),
    [
        ("auto", "paper", NormalPredictor),
        ("auto", "min-max", BucketMeanPredictor),
        ("bucket-mean", "paper", BucketMeanPredictor),
        ("constant", "min-max", ConstantPredictor),
        ("normal", "min-max", NormalPredictor),
    ],
)
def test_the_predictor_is_the_policys_own_unless_chosen(choice, policy, kind):
    call = run(policy, predictor=choice)
    assert type(call["predictor"]) is kind
    assert call["predictions"] is None
    if kind is not NormalPredictor:  # they start from the mix's mean
        predicted = call["predictor"].predict(LengthFeatures("model", 77))
        assert predicted == pytest.approx(mix_moments(MIX).mean_output)


def test_an_oracle_knows_the_true_lengths() -> None:
    call = run(predictor="oracle")
    assert (call["predictions"] == call["workload"].output_tokens).all()


def test_faults_and_scheduling_are_passed_on_and_each_scheduler_is_new_and_empty() -> None:
    faults = (Fault(1, FaultKind.SLOW, 2.0, 3.0, 4.0),)
    calls = [run(faults=faults, scheduling="prefill-first") for _ in range(2)]
    assert calls[0]["faults"] == faults
    assert calls[0]["scheduling"] == "prefill-first"
    assert calls[0]["scheduler"] is not calls[1]["scheduler"]
    assert all(call["scheduler"].members.specs == {} for call in calls)


def test_an_unknown_policy_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        run("no-such-policy")


def test_a_traces_own_times_are_stretched_and_drawn_ones_vary_as_asked() -> None:
    made = experiment(count=3, trace_arrival_s=np.array([0.0, 1.0, 4.0]))
    assert make_workload(made, 0.5, seed=7).arrival_s.tolist() == [0, 1, 4]
    assert make_workload(made, 1.0, seed=8).arrival_s.tolist() == [0, 0.5, 2]
    assert make_workload(made, math.inf, seed=8).arrival_s.tolist() == [0, 0, 0]
    clock = make_workload(experiment(arrival_cv=0.0), 4.0, seed=0)
    assert np.allclose(np.diff(clock.arrival_s), 0.25)


def test_what_was_refused_and_lost_is_counted() -> None:
    made, fake = experiment(), FakeSimulate(refuse=[1, 2], lose=[3])
    result = run_once(made, "round-robin", 5.0, 0, mix_moments(made.lengths), fake)
    assert (result.refused, result.lost) == (2, 1)


TRAINED = LengthModel({ANY_MODEL: Leaf(77.0, 100)})


def test_a_trained_predictor_starts_from_its_model() -> None:
    call = run(predictor="trained", length_model=TRAINED)
    assert call["predictor"].predict(LengthFeatures("model", 5)) == 77
    assert call["predictions"] is None


@pytest.mark.parametrize(("choice", "model"), [("trained", None), ("constant", TRAINED)])
def test_a_length_model_and_its_predictor_belong_together(choice, model):
    with pytest.raises(ValueError, match="the predictor trained has a length_model"):
        experiment(predictor=choice, length_model=model)
