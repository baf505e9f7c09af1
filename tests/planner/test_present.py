"""What runs is put on the plan's machines, and compared without favour."""

import dataclasses
import math

import numpy as np
import pytest

from hetero_gateway.core.costs.cost_model import decode_step_time_s
from hetero_gateway.files.accelerator_catalogue import accelerator
from hetero_gateway.files.model_cards import model_card
from hetero_gateway.planner import present as presents
from hetero_gateway.planner.goals import Goals
from hetero_gateway.planner.plan import Machine, Unfit
from hetero_gateway.planner.present import (
    Present,
    Running,
    aligned,
    capacity_notes,
    observed_profiles,
    simulate_present,
    with_running_types,
)
from hetero_gateway.planner.question import Question
from hetero_gateway.planner.search import search
from hetero_gateway.sim.workload import TraceLengths
from tests.deploy.plans import instance_type, plan, profile

V100, A800 = "V100-32GB-NVLink2", "A800-80GB-PCIe"
MODEL = model_card("Llama-3-8B")
MACHINES = (Machine("box-a", V100, 4), Machine("box-b", V100, 4), Machine("a800", A800, 1))


def running(
    name: str, size: int, accelerator: str = V100, host: str = "10.0.0.1", **more
) -> Running:
    return Running(name, host, profile(accelerator, size), **more)


def place(seen: list[Running], machines=MACHINES) -> Present:
    return presents.place(seen, machines, MODEL, accelerator)


def slower(running: Running, factor: float) -> Running:
    assert running.profile is not None
    constants = running.profile.constants.scaled(factor)
    changed = dataclasses.replace(running.profile, constants=constants)
    return dataclasses.replace(running, profile=changed, observed=True)


def layouts(present: Present) -> dict[str, tuple[int, ...]]:
    return {machine: layout for machine, layout in present.layouts.items() if layout}


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        # The largest first.
        (
            [running("x", 1), running("y", 4), running("z", 2), running("w", 1, A800)],
            {"box-a": (4,), "box-b": (2, 1), "a800": (1,)},
        ),
        # A machine of the same name comes first.
        ([running("box-b-tp2-0", 2)], {"box-b": (2,)}),
        ([running("other", 2, host="box-b")], {"box-b": (2,)}),
        # Another spelling is the same accelerator.
        ([running("x", 1, "v100-32gb nvlink2")], {"box-a": (1,)}),
    ],
)
def test_instances_fill_machines_of_their_accelerator(seen, expected):
    found = place(seen)
    assert layouts(found) == expected
    assert not found.left_out


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"profile": None}, "has no profile"),
        ({"profile": profile("H100-80GB-SXM", 1)}, "no machine with H100-80GB-SXM"),
        ({"profile": profile("Abacus-9000", 1)}, "not in the catalogue"),
        ({"profile": dataclasses.replace(profile(V100, 1), model="Qwen3-8B")}, "is of Qwen3-8B"),
        ({"profile": dataclasses.replace(profile(V100, 8))}, "no room for 8"),
        ({"left_out": "it is down"}, "it is down"),
    ],
)
def test_what_cannot_be_placed_is_left_out_with_the_reason(changes, reason):
    odd = dataclasses.replace(running("odd", 1), **changes)
    found = place([odd, running("good", 1)])
    assert layouts(found) == {"box-a": (1,)}
    ((name, why),) = found.left_out
    assert name == "odd"
    assert reason in why


def types(*keys):
    return {key: instance_type(*key) for key in keys}


def test_what_was_observed_takes_the_place_of_what_was_believed():
    seen = [slower(running("x", 1), 1.5), slower(running("y", 1), 2.5)]
    found = observed_profiles(place(seen), types((V100, 1)), MODEL, 200.0, 100.0)
    (observed,) = found
    believed = profile(V100, 1)
    assert observed.constants.p8 == pytest.approx(2.0 * believed.constants.p8)  # their mean
    assert observed.source["how"] == "measured"
    assert "x, y" in observed.source["note"]


def test_a_size_that_was_not_tried_is_scaled_like_the_one_that_was():
    present = place([slower(running("x", 1), 3.0)])
    believed = types((V100, 1), (V100, 2), (A800, 1))
    found = {p.name: p for p in observed_profiles(present, believed, MODEL, 200.0, 100.0)}
    assert set(found) == {f"{V100}/Llama-3-8B/tp1", f"{V100}/Llama-3-8B/tp2"}
    scaled, before = found[f"{V100}/Llama-3-8B/tp2"], profile(V100, 2)
    for batch, held in ((1, 100.0), (64, 300.0)):
        assert decode_step_time_s(scaled.constants, batch, held) == pytest.approx(
            3.0 * decode_step_time_s(before.constants, batch, held)
        )
    assert scaled.source["how"] == before.source["how"], "still no measurement"


def test_what_runs_as_believed_scales_nothing():
    present = place([running("x", 1)])
    (only,) = observed_profiles(present, types((V100, 1), (V100, 2)), MODEL, 200.0, 100.0)
    assert only.tensor_parallel == 1
    assert only.source["how"] == "derived"


def question(of, machines=MACHINES, **changes) -> Question:
    lengths = TraceLengths(np.array([40, 60, 80]), np.array([20, 30, 40]))
    small = {
        key: dataclasses.replace(each, profile=dataclasses.replace(each.profile, max_num_seqs=4))
        for key, each in of.items()
    }
    return Question(machines=machines, types=small, lengths=lengths, requests=200, **changes)


def test_a_type_that_runs_can_be_deployed_whatever_the_memory_model_says():
    present = place([running("x", 1, kv_capacity_tokens=5000)])
    unfit = (Unfit(V100, 1, "too small"), Unfit(V100, 2, "too small"))
    asked = question(types((A800, 1)), unfit=unfit)
    found = with_running_types(asked, present, MODEL)
    assert found.types[V100, 1].memory.kv_capacity_tokens == 5000
    assert found.types[V100, 1].memory.how == "measured"
    assert [u.tensor_parallel for u in found.unfit] == [2]
    assert found.types[A800, 1] == asked.types[A800, 1]


def test_an_engine_with_another_cache_than_modelled_is_told():
    believed = types((V100, 1))
    tokens = believed[V100, 1].memory.kv_capacity_tokens
    reported = {"as-modelled": int(tokens * 1.05), "half": tokens // 2, "silent": None}
    placed = place([running(name, 1, kv_capacity_tokens=n) for name, n in reported.items()])
    (note,) = capacity_notes(placed, believed)
    assert note.startswith("half reports")


def test_the_present_deployment_has_the_figures_that_a_candidate_of_the_same_layout_has():
    machines = (Machine("box", V100, 2),)
    asked = question(types((V100, 1), (V100, 2)), machines, goals=Goals(rate_per_s=2.0))
    plan = search(asked)
    for candidate in plan.candidates:
        if candidate.simulated is None:
            continue
        now = simulate_present(asked, candidate.layouts)
        assert now is not None
        assert now.simulated is not None
        assert now.simulated.tokens_per_s == pytest.approx(candidate.simulated.tokens_per_s)
        assert (now.at_rate is None) == (candidate.at_rate is None)
        if now.at_rate is not None and candidate.at_rate is not None:
            assert now.at_rate.ttft_mean_s == pytest.approx(candidate.at_rate.ttft_mean_s)


def test_a_rate_that_is_too_much_has_no_latencies():
    machines = (Machine("box", V100, 1),)
    asked = question(types((V100, 1)), machines, goals=Goals(rate_per_s=1e6))
    now = simulate_present(asked, {"box": (1,)})
    assert now is not None
    assert now.at_rate is None


def test_equal_machines_are_changed_as_little_as_can_be():
    planned = plan({"a": (V100, 2, (2,)), "b": (V100, 2, (1, 1)), "c": (V100, 2, (1, 1))})
    now = {"a": (1, 1), "b": (2,), "c": (2,)}
    found = aligned(planned.best, planned.machines, now)
    assert found.layouts == {"a": (1, 1), "b": (2,), "c": (1, 1)}
    # Unequal ones keep their layouts.
    planned = plan({"a": (V100, 2, (2,)), "b": (V100, 4, (1, 1, 1, 1))})
    assert aligned(planned.best, planned.machines, now).layouts == planned.best.layouts


# What the simulation says of both decides


@pytest.mark.parametrize(("factor", "changed"), [(1.003, False), (1.0, False), (0.9, True)])
def test_what_runs_and_does_as_much_is_never_changed_for_less(monkeypatch, factor, changed):
    machines = (Machine("box", V100, 2),)
    asked = question(types((V100, 1), (V100, 2)), machines)
    found = search(asked)
    best = found.best.simulated
    assert best is not None
    other = (2,) if found.best.layouts["box"] != (2,) else (1, 1)
    runs = dataclasses.replace(
        found.best,
        layouts={"box": other},
        estimate_tokens_per_s=math.nan,
        simulated=dataclasses.replace(best, tokens_per_s=factor * best.tokens_per_s),
    )
    monkeypatch.setattr(presents, "simulate_present", lambda question, layouts: runs)
    present = Present(placed=(), left_out=(), layouts={"box": other})
    told = presents.compare(found, asked, present, "finish-time")
    assert bool(told.changes) is changed
    assert told.gain is not None
    assert told.gain >= 0
    assert [c.layouts for c in told.plan.candidates].count(told.best.layouts) == 1
    assert all(c.why_not for c in told.plan.candidates[1:])
    assert not any("-0." in note for note in told.plan.notes)
