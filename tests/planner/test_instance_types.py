"""Every engine that machines could hold: its memory, its times, and how both are known."""

import dataclasses

from hetero_gateway.core.costs.profile import Constants, Profile
from hetero_gateway.files.accelerator_catalogue import accelerator
from hetero_gateway.files.model_cards import model_card
from hetero_gateway.files.profile_file import builtin_profiles
from hetero_gateway.planner.instance_types import instance_types
from hetero_gateway.planner.memory import EngineOptions, is_feasible
from hetero_gateway.planner.plan import Machine
from hetero_gateway.planner.stages import instance_memory

BUILT_IN = list(builtin_profiles().values())
LLAMA = model_card("Llama-3-8B")
TOLD = EngineOptions(max_model_len=4096)


def machine(name, count=8):
    return Machine(f"box-{name}", name, count)


def found(machines, profiles=BUILT_IN, model=LLAMA, told=TOLD, **more):
    told_of = {"needed_tokens": 4096, "find": accelerator} | more
    return instance_types(model, machines, profiles, told, **told_of)


def measured(**changes):
    source = {"how": "measured", "error": {"prefill": 0.04, "decode": 0.02}} | changes
    return Profile("H100-80GB-SXM", "Llama-3-8B", 1, Constants(*[1e-5] * 8), 400_000, 1024, source)


def test_every_size_is_a_type_or_unfit_with_a_reason():
    types, unfit = found([machine("V100-32GB-NVLink2"), machine("T4-16GB", 4)])
    sizes = {(u.accelerator, u.tensor_parallel) for u in unfit} | set(types)
    assert sizes == {("V100-32GB-NVLink2", t) for t in range(1, 9)} | {
        ("T4-16GB", t) for t in range(1, 5)
    }
    assert {t for name, t in types if name.startswith("V100")} == {1, 2, 4, 8}
    assert all(u.reason for u in unfit)
    # 16 GB hold no 8B model in 16 bits.
    (small,) = [u for u in unfit if (u.accelerator, u.tensor_parallel) == ("T4-16GB", 1)]
    assert small.shortfall_bytes > 2 * 2**30
    assert small.remedies[0] == "tensor_parallel 2"


def test_many_equal_machines_are_one_case_in_any_order_and_the_largest_counts():
    one, _ = found([machine("L4", 4)])
    many, _ = found([machine("L4", 2), *[machine("L4", 4)] * 20])
    assert one == many
    assert max(t for _, t in many) == 4
    # The types go by the name that the machine has.
    machines = [machine("L4"), machine("h100 sxm", 3), machine("T4")]
    forth, back = found(machines), found(machines[::-1])
    assert forth[0] == back[0]
    assert sorted(map(repr, forth[1])) == sorted(map(repr, back[1]))
    names = {name for name, _ in forth[0]} | {u.accelerator for u in forth[1]}
    assert names == {"L4", "h100 sxm", "T4"}
    assert forth[0]["h100 sxm", 1].profile.source["how"] == "derived"


def test_measured_comes_before_derived_before_a_roofline():
    machines = [machine("H100-80GB-SXM", 1), machine("RTX4090", 1)]

    def how(profiles):
        types, _ = found(machines, profiles)
        return [types[name, 1].profile.source["how"] for name in ("H100-80GB-SXM", "RTX4090")]

    assert how(BUILT_IN) == ["derived", "roofline"]
    assert how([*BUILT_IN, measured()]) == ["measured", "roofline"]
    assert how([]) == ["roofline", "roofline"]


def test_the_uncertainty_of_times_grows_from_measured_to_a_roofline_of_a_card_never_checked():
    machines = [machine(n, 1) for n in ("H100-80GB-SXM", "A800-80GB-PCIe", "L4", "MI325X")]
    types, _ = found(machines, [*BUILT_IN, measured()])
    values = [types[m.accelerator, 1].time_uncertainty for m in machines]
    assert values == sorted(values)
    assert values[0] == 0.04
    assert len(set(values)) == 4


def test_a_profile_gets_the_memory_and_the_sequences_of_these_options():
    told = EngineOptions(max_model_len=4096, utilisation=0.8, max_num_seqs=77)
    types, _ = found([machine("H100-80GB-SXM", 2)], told=told)
    for (name, t), kind in types.items():
        wanted = instance_memory(LLAMA, accelerator(name), t, told)
        assert kind.profile.kv_capacity_tokens == wanted.kv_capacity_tokens
        assert kind.memory.kv_capacity_tokens == wanted.kv_capacity_tokens
        assert kind.profile.max_num_seqs == 77
        assert is_feasible(kind.memory, 4096)


def test_engines_plan_a_step_ahead_since_they_do_so_by_default():
    for version, ahead in (("0.13", False), ("0.14.1", True)):
        told = EngineOptions(max_model_len=4096, vllm_version=version)
        types, _ = found([machine("RTX4090", 1)], told=told)
        assert types["RTX4090", 1].profile.plans_ahead is ahead


def test_a_live_engines_capacity_counts_where_it_was_told_the_same():
    machines = [machine("H100-80GB-SXM", 1)]

    def kind(profile, told=TOLD):
        return found(machines, [profile], told=told)[0]["H100-80GB-SXM", 1]

    same = kind(measured(gpu_memory_utilization=0.9))
    assert (same.memory.how, same.profile.kv_capacity_tokens) == ("measured", 400_000)
    assert same.memory.kv_bytes == 400_000 * 131_072
    for other in (
        kind(measured()),  # it does not say
        kind(measured(gpu_memory_utilization=0.8)),
        kind(measured(gpu_memory_utilization=0.9), dataclasses.replace(TOLD, max_num_seqs=8)),
        kind(measured(gpu_memory_utilization=0.9), dataclasses.replace(TOLD, kv_dtype="fp8")),
    ):
        assert other.memory.how == "fitted"
        assert other.profile.kv_capacity_tokens != 400_000


def test_times_of_another_storage_are_not_taken():
    fp8 = model_card("Llama-3-8B", quantization="fp8")
    own = measured(quantization="fp8")
    for profiles, how in ((BUILT_IN, "roofline"), ([own], "measured")):
        types, _ = found([machine("H100-80GB-SXM", 1)], profiles, model=fp8)
        assert types["H100-80GB-SXM", 1].profile.source["how"] == how


def test_nothing_deployable_is_below_what_a_request_needs():
    told = EngineOptions(max_model_len=32_768)
    machines = [machine(n) for n in ("L4", "T4", "A10", "RTX4090")]
    types, unfit = found(machines, told=told, needed_tokens=1000)
    assert types
    assert all(kind.memory.kv_capacity_tokens >= 32_768 for kind in types.values())
    (l4,) = [u for u in unfit if (u.accelerator, u.tensor_parallel) == ("L4", 1)]
    assert "one request needs 32768" in l4.reason
    assert any(remedy.startswith("a max length of") for remedy in l4.remedies)


def test_the_papers_method_has_the_papers_capacity():
    types, _ = found([machine("V100-32GB-NVLink2")], method="paper")
    assert types["V100-32GB-NVLink2", 4].memory.how == "paper"
    assert abs(types["V100-32GB-NVLink2", 4].profile.kv_capacity_tokens - 755_654) <= 4


def test_a_storage_that_a_card_cannot_load_is_unfit():
    types, unfit = found(
        [machine("V100-32GB-NVLink2", 2)], model=model_card("Llama-3-8B", quantization="fp8")
    )
    assert not types
    assert all("needs CUDA capability 7.5" in u.reason for u in unfit)
