"""Pipelines, copies and spread experts: memory, times, vLLM's rules, and whole plans."""

import dataclasses
from pathlib import Path

import pytest

from hetero_gateway.core.costs.cost_model import decode_step_time_s
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.accelerator_catalogue import accelerator
from hetero_gateway.files.model_cards import model_card
from hetero_gateway.files.plan_request import load_requests
from hetero_gateway.planner.accelerators import GIB
from hetero_gateway.planner.allocation import best_sums
from hetero_gateway.planner.further_profiles import (
    Network,
    expert_parallel_times,
    pipelined_profile,
)
from hetero_gateway.planner.instance_types import across, within
from hetero_gateway.planner.layouts import group_machines, machine_layouts
from hetero_gateway.planner.memory import EngineOptions, StartUp
from hetero_gateway.planner.parallelism import refusal
from hetero_gateway.planner.plan import Machine, Plan
from hetero_gateway.planner.question import Question
from hetero_gateway.planner.roofline import all_reduce_s, roofline_profile, step_times
from hetero_gateway.planner.search import search
from hetero_gateway.planner.sizes import Size
from hetero_gateway.planner.stages import holds_request, instance_memory

LARGE, SMALL = model_card("Llama-3.3-70B"), model_card("Llama-3.1-8B")
EXPERTS, LATENT = model_card("Qwen3-30B-A3B"), model_card("DeepSeek-V3")
TOLD = EngineOptions(max_model_len=4096, max_num_batched_tokens=2048)


def weights(model, card, size):
    return instance_memory(model, accelerator(card), size, TOLD).parts["weights"]


def test_the_fullest_stage_decides() -> None:
    for t in (1, 2, 4):  # a plain size has one
        card = accelerator("H100")
        assert instance_memory(LARGE, card, t, TOLD) == StartUp(LARGE, card, t, TOLD).memory()
    assert 30 * GIB < weights(LARGE, "L40S", Size(1, 4)) < 35 * GIB
    # 80 layers over 3 stages are 26, 27, 27; the last has the output layer.
    layer = LARGE.layer_weights / LARGE.layers * 2
    table = LARGE.output_weights * 2
    assert weights(LARGE, "H100", Size(1, 3)) == pytest.approx(27 * layer + table, rel=0.01)
    assert weights(LARGE, "H100", Size(1, 2)) < LARGE.weight_bytes() * 0.51


def test_stages_have_as_much_kv_as_tensor_parallelism_or_more() -> None:
    card = accelerator("L40S")
    tp4 = instance_memory(LARGE, card, 4, TOLD)
    for size in (Size(2, 2), Size(1, 4)):
        found = instance_memory(LARGE, card, size, TOLD)
        assert found.kv_capacity_tokens == pytest.approx(tp4.kv_capacity_tokens, rel=0.2)
        assert found.uncertainty > 0.05


def test_copies_hold_a_request_each_and_their_kv_adds_up() -> None:
    card, size = accelerator("H200"), Size(1, data=8, experts=True)
    found = instance_memory(LATENT, card, size, TOLD, needed_tokens=4096)
    # Tensor parallelism holds the latent vector eight times; copies hold each once.
    whole = instance_memory(LATENT, card, 8, TOLD, needed_tokens=4096)
    assert found.kv_capacity_tokens > 4 * whole.kv_capacity_tokens
    each = found.kv_capacity_tokens // 8
    assert holds_request(found, size, each // 2)
    assert not holds_request(found, size, 2 * each)


def test_experts_are_shared_out_over_all_copies() -> None:
    alone = weights(EXPERTS, "H100", 1)
    spread = weights(EXPERTS, "H100", Size(1, data=4, experts=True))
    rest = (EXPERTS.layer_weights - EXPERTS.moe_layers * 128 * EXPERTS.expert_weights) * 2
    rest += 2 * EXPERTS.output_weights * 2
    assert spread == pytest.approx(rest + (alone - rest) / 4, rel=0.01)


def test_a_round_of_a_pipeline_costs_what_its_stages_do() -> None:
    card = accelerator("L40S")
    base = roofline_profile(card, LARGE, 2, 256, 60_000)
    two = pipelined_profile(base, LARGE, card, Size(2, 2), None)
    own, piped = (decode_step_time_s(p.constants, 128, 600) for p in (base, two))
    # Weights are read as often, the KV by twice as many accelerators.
    assert own * 0.9 < piped < own * 1.3
    assert two.constants.p5 < 0.6 * base.constants.p5
    assert two.constants.p1 < base.constants.p1
    assert two.constants.p8 > base.constants.p8
    assert two.source["pipeline_parallel"] == 2
    # A slow network makes rounds longer.
    size = Size(2, 2, machines=2)
    fast, slow, far = (
        decode_step_time_s(pipelined_profile(base, LARGE, card, size, n).constants, 128, 600)
        for n in (Network(12.5e9), Network(125e6), Network(12.5e9, 0.01))
    )
    assert slow - fast == pytest.approx(64 * 2 * 8192 * 2 / 125e6, rel=0.02)
    assert far - fast == pytest.approx(0.01, rel=0.02)


def test_spread_experts_read_fewer_weights_and_pay_all_to_all() -> None:
    card = accelerator("H100")
    decode = expert_parallel_times(card, EXPERTS, Size(1, data=4, experts=True))[1]
    alone = step_times(card, EXPERTS, 1)[1]
    assert decode(4, 1000) < alone(4, 1000)
    slots = dataclasses.replace(card, link_bytes_per_s=16e9)
    paid = expert_parallel_times(slots, EXPERTS, Size(1, data=4, experts=True))[1]
    assert paid(512, 1000) > decode(512, 1000)
    assert all_reduce_s(slots, EXPERTS, 4, 512) > 0


def test_vllms_rules() -> None:
    for model, size, why in (
        (dataclasses.replace(SMALL, family="mamba2"), Size(1, 2), "no pipeline"),
        (model_card("Llama-3.2-1B"), Size(1, 17), "do not fill"),
        (SMALL, Size(2, experts=True), "no experts"),
        (EXPERTS, Size(1, data=2), "instances of their own"),
        (LARGE, Size(3, 2), "heads"),
    ):
        assert why in str(refusal(model, size))
    assert refusal(LARGE, Size(2, 3)) is None
    # Its experts of 1536 over 8 are no whole blocks of fp8; whole experts are.
    blocks = model_card("Qwen/Qwen3-235B-A22B-FP8")
    assert "block" in str(refusal(blocks, 8))
    assert refusal(blocks, Size(8, experts=True)) is None


def test_what_is_asked_about() -> None:
    assert set(within(SMALL, 4)) == {Size(1, 2), Size(1, 4), Size(2, 2)}
    assert Size(1, data=4, experts=True) in set(within(EXPERTS, 4))
    found = list(across(LARGE, 2, 3))
    assert found[0] == Size(2, 2, machines=2)
    assert Size(1, 6, machines=3) in found


def asked(tmp_path: Path, text: str) -> Question:
    path = tmp_path / "plan.yaml"
    path.write_text(f"max_model_len: 4096\n{text}")
    return load_requests(path)[0].question


def planned(tmp_path: Path, text: str) -> Plan:
    return search(asked(tmp_path, text))


TWO = "machines: [{id: a, accelerator: L40S, count: 2, copies: 2}]\n"


def test_a_model_that_fits_no_machine_stretches_over_two(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fits no machine"):
        planned(tmp_path, f"model: Llama-3.3-70B\n{TWO}")
    plan = planned(tmp_path, f"model: Llama-3.3-70B\n{TWO}network: {{gbps: 100}}\n")
    (size,) = plan.best.layouts["a-0"]
    assert size == Size(2, 2, machines=2)
    assert plan.best.layouts["a-1"] == (size,)
    assert plan.best.accelerators == 4
    assert plan.best.simulated is not None
    alone = plan.alone["L40S-48GB", size].tokens_per_s
    assert plan.best.alone_tokens_per_s == pytest.approx(alone)
    assert plan.best.simulated.tokens_per_s == pytest.approx(alone, rel=0.1)
    assert any("stages" in note for note in plan.notes)


def test_an_instance_over_machines_takes_all_of_each_and_what_is_left_over_stays_out() -> None:
    wide: tuple[int, ...] = (Size(2, 2, machines=2),)
    assert machine_layouts(2, wide) == [wide]
    assert wide not in machine_layouts(4, [2, *wide])
    (group,) = group_machines([Machine(f"a-{i}", "L40S", 2) for i in range(5)])
    assert best_sums([group], {group: {wide: 10.0}}, 3) == [(((wide, 4),),)]
    # Four machines at 10 each are worth less than five at 9.
    (first, second) = best_sums([group], {group: {wide: 10.0, (1, 1): 9.0}}, 3)
    assert (first, second) == ((((((1, 1)), 5),),), ((((wide), 4),),))


def test_the_least_that_holds_a_rate_takes_whole_pairs(tmp_path: Path) -> None:
    four = TWO.replace("copies: 2", "copies: 4")
    plan = planned(
        tmp_path,
        f"model: Llama-3.3-70B\n{four}network: {{gbps: 100}}\n"
        "goals: {goal: fewest}\nworkload: {rate_per_s: 1.5}\n",
    )
    assert plan.best.accelerators == 4


@pytest.mark.system
def test_stages_win_where_an_all_reduce_is_slow(tmp_path: Path) -> None:
    plan = planned(
        tmp_path, "model: Llama-3.3-70B-AWQ\nmachines: [{id: a, accelerator: A10G, count: 4}]\n"
    )
    assert plan.best.layouts["a"] == (Size(2, 2),)
    nvlink = "machines: [{id: a, accelerator: A100-40GB-SXM, count: 4}]\n"
    fast = planned(tmp_path, f"model: Llama-3.3-70B-AWQ\n{nvlink}")
    assert all(Size(t).plain for layout in fast.best.layouts.values() for t in layout)


def test_a_network_says_how_fast_it_is_once(tmp_path: Path) -> None:
    for network in ("{latency_s: 0.1}", "{gbps: 1, bandwidth_bytes_per_s: 1e9}"):
        with pytest.raises(ConfigError, match="either bandwidth_bytes_per_s or gbps"):
            planned(tmp_path, f"model: Llama-3.1-8B\n{TWO}network: {network}\n")


def test_what_nobody_measured_does_not_win_by_a_little(tmp_path: Path) -> None:
    plan = planned(tmp_path, "model: gpt-oss-20b\nmachines: [{id: a, accelerator: H100, count: 2}]")
    assert all(Size(t).plain for t in plan.best.layouts["a"])
    # Where it is worth much, it does: a latent vector is held once, not eight times.
    wide = asked(tmp_path, "model: DeepSeek-V3\nmachines: [{id: a, accelerator: H200, count: 8}]")
    assert Size(1, data=8, experts=True) in {size for _, size in wide.types}
