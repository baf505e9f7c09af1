"""A plan's instances have names, devices and ports of their own, and the commands say the plan."""

import dataclasses
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_gateway.deploy.checkpoints import checkpoint_of
from hetero_gateway.deploy.command import emulate_arguments, serve_arguments
from hetero_gateway.deploy.directory import render_deployment
from hetero_gateway.deploy.instances import deployed_instances, on_one_host
from hetero_gateway.deploy.script import instance_program
from hetero_gateway.deploy.template import pieces
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.accelerator_catalogue import accelerator
from hetero_gateway.files.model_cards import MODEL_CARDS
from hetero_gateway.files.plan_request import load_requests
from hetero_gateway.lab.emulator.settings import BLOCK_TOKENS
from hetero_gateway.planner.layouts import machine_names
from hetero_gateway.planner.plan import Plan
from hetero_gateway.planner.sizes import Size
from tests.deploy.plans import EVERY_VENDOR, ONE_MACHINE, TWO_MACHINES, options, plan


def instances(planned, **changes):
    return deployed_instances(planned, options(**changes))


def first_words(planned, **changes):
    """What follows ``vllm serve MODEL`` of its first instance."""
    return serve_arguments(instances(planned, **changes)[0], options(**changes))


def option(words, name):
    return words[words.index(name) + 1]


@given(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=8))
def test_devices_of_one_machine_are_disjoint_and_groups_are_aligned(sizes):
    layout = tuple(sorted(sizes, reverse=True))
    found = instances(plan({"box": ("V100-32GB-NVLink2", sum(layout), layout)}))
    assert [i.tensor_parallel for i in found] == list(layout)
    given_out = [device for i in found for device in i.devices]
    assert sorted(given_out) == list(range(sum(layout)))
    assert all(i.devices[0] % i.tensor_parallel == 0 for i in found)
    assert len({i.id for i in found}) == len({i.port for i in found}) == len(layout)


def test_ports_begin_anew_on_every_machine_unless_all_are_emulated_on_one():
    found = instances(TWO_MACHINES)
    assert [i.port for i in found] == [8001, 8002, 8003, 8004, 8001, 8002]
    emulated = instances(TWO_MACHINES, emulate=True)
    assert [i.port for i in emulated] == [8001, 8002, 8003, 8004, 8005, 8006]
    assert {i.host for i in emulated} == {"127.0.0.1"}


def test_a_machine_is_reached_by_its_address_its_id_or_loopback():
    assert {i.host for i in instances(ONE_MACHINE)} == {"127.0.0.1"}
    assert {i.host for i in instances(TWO_MACHINES)} == {"v100-box", "mi-box-1"}
    given_one = instances(TWO_MACHINES, addresses={"MI box_1": "10.0.0.7"})
    assert {i.host for i in given_one} == {"v100-box", "10.0.0.7"}


def test_a_single_machine_with_an_address_is_not_the_gateways_own():
    away = options(addresses={"v100-box": "10.0.0.7"})
    assert on_one_host(instances(ONE_MACHINE), options())
    assert not on_one_host(deployed_instances(ONE_MACHINE, away), away)


def test_two_machines_at_one_address_are_refused():
    with pytest.raises(
        ConfigError, match=r"v100-box and MI box_1 have the same address 10\.0\.0\.7"
    ):
        instances(TWO_MACHINES, addresses={"v100-box": "10.0.0.7", "MI box_1": "10.0.0.7"})


def test_equal_names_in_files_are_told_apart():
    names = machine_names(["A_1", "a 1", "a-1-2", "8box", "…"])
    assert names == {
        "A_1": "a-1",
        "a 1": "a-1-2",
        "a-1-2": "a-1-2-2",
        "8box": "m8box",
        "…": "machine",
    }


def test_the_command_says_every_setting_of_the_plan():
    words = first_words(ONE_MACHINE)
    first = instances(ONE_MACHINE)[0]
    expected = {
        "--tensor-parallel-size": "4",
        "--max-num-seqs": str(first.type.profile.max_num_seqs),
        "--max-model-len": "4096",
        "--max-num-batched-tokens": "2048",
        "--gpu-memory-utilization": "0.9",
        "--served-model-name": "llama-3-8b",
    }
    assert {name: option(words, name) for name in expected} == expected
    assert int(option(words, "--shutdown-timeout")) > 0


def test_a_step_is_never_smaller_than_the_batch():
    words = first_words(ONE_MACHINE, max_num_batched_tokens=16)
    assert option(words, "--max-num-batched-tokens") == option(words, "--max-num-seqs")
    assert int(option(words, "--max-num-seqs")) > 16


@pytest.mark.parametrize(
    ("asked", "said"), [(None, "float16"), ("bfloat16", "float16"), ("float32", "float32")]
)
def test_a_v100_is_not_asked_for_bfloat16(asked, said):
    assert option(first_words(ONE_MACHINE, dtype=asked), "--dtype") == said


def test_a_newer_card_keeps_the_models_own_dtype():
    newer = plan({"box": ("H100-80GB-SXM", 1, (1,))})
    assert "--dtype" not in first_words(newer)
    assert option(first_words(newer, dtype="bfloat16"), "--dtype") == "bfloat16"


@pytest.mark.parametrize(("method", "named"), [("fp8", True), ("awq", False), ("gptq", False)])
def test_only_a_method_that_is_applied_on_loading_is_named(method, named):
    assert ("--quantization" in first_words(ONE_MACHINE, quantization=method)) is named


@pytest.mark.parametrize(
    ("machine", "variable"),
    [
        ("v100-box", "CUDA_VISIBLE_DEVICES=4,5,6,7"),
        ("mi-box", "HIP_VISIBLE_DEVICES=1"),
        ("gaudi-box", "HABANA_VISIBLE_MODULES=0,1"),
        ("ascend-box", "ASCEND_RT_VISIBLE_DEVICES=0"),
    ],
)
def test_each_make_has_its_own_variable_for_the_devices(machine, variable):
    last = [i for i in instances(EVERY_VENDOR) if i.machine.id == machine][-1]
    words = shlex.split(instance_program(last, options(), "127.0.0.1").command)
    assert words[:2] == ["env", variable]


def test_an_emulated_instance_has_the_same_engine_and_no_devices():
    first = instances(ONE_MACHINE, emulate=True, time_scale=4.0)[0]
    words = emulate_arguments(first, options(emulate=True, time_scale=4.0))
    assert option(words, "--max-num-seqs") == str(first.type.profile.max_num_seqs)
    assert option(words, "--max-num-batched-tokens") == "2048"
    assert option(words, "--time-scale") == "4"
    assert first.gateway_profile_file != first.profile_file


def test_an_emulated_context_is_cut_to_the_blocks_of_the_cache():
    first = instances(ONE_MACHINE, emulate=True)[0]
    words = emulate_arguments(first, options(emulate=True, max_model_len=10**9))
    context = int(option(words, "--max-model-len"))
    assert context % BLOCK_TOKENS == 0
    capacity = first.type.profile.kv_capacity_tokens
    assert capacity - BLOCK_TOKENS < context <= capacity


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"served_model_name": "a b"}, "'a b'"),
        ({"served_model_name": "${HOME}"}, "HOME"),
        ({"model": ""}, "neither a model.s name"),
        ({"model": "--trust-remote-code"}, "neither a model.s name"),
        ({"model": "a\nb"}, "neither a model.s name"),
        ({"addresses": {"box": "a b"}}, "box"),
        ({"time_scale": 0.0}, "--time-scale"),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_one_line(changes, words):
    with pytest.raises(ConfigError, match=words) as caught:
        options(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("first_port", [0, 65535, 7999])
def test_ports_that_cannot_be_are_refused(first_port):
    with pytest.raises(ConfigError, match="--first-port"):
        instances(ONE_MACHINE, first_port=first_port)


def test_a_plan_without_instances_is_refused():
    with pytest.raises(ConfigError, match="no instance"):
        instances(plan({"box": ("V100-32GB-NVLink2", 8, ())}))


def test_a_layout_larger_than_its_machine_is_refused():
    too_large = plan({"box": ("V100-32GB-NVLink2", 4, (4,))})
    best = dataclasses.replace(too_large.best, layouts={"box": (4, 4)})
    with pytest.raises(ConfigError, match="8 accelerators planned of 4"):
        deployed_instances(dataclasses.replace(too_large, candidates=(best,)), options())


def test_every_card_has_a_checkpoint_and_every_checkpoint_a_card():
    assert set(pieces("checkpoints.yaml")["cards"]) <= set(MODEL_CARDS)
    assert all("/" in checkpoint_of(card) for card in MODEL_CARDS)
    assert checkpoint_of("my-model") == "my-model"


def test_mxfp4_is_left_its_own_dtype():
    made = plan({"one": ("V100-16GB-PCIe3", 1, (1,))})
    assert "--dtype" not in first_words(made, quantization="mxfp4", dtype="bfloat16")


def test_a_checkpoint_that_is_stored_in_fp8_is_not_quantised_again():
    for wide in (True, False):
        words = first_words(ONE_MACHINE, quantization="fp8", quantise_on_loading=wide)
        assert ("--quantization" in words) == wide


def wide_plan(size: Size, machines: int = 2) -> Plan:
    return plan({f"box-{i}": ("L40S-48GB", int(size), (size,)) for i in range(machines)})


def test_stages_copies_and_experts_are_written_as_vllms_flags():
    deployed = deployed_instances(made := wide_plan(Size(1, 2), 1), options())
    words = serve_arguments(deployed[0], options())
    assert words[words.index("--pipeline-parallel-size") + 1] == "2"
    assert deployed[0].devices == (0, 1)
    assert deployed[0].id == "box-0-tp1-pp2-0"
    made = wide_plan(Size(1, data=2, experts=True), 1)
    deployed = deployed_instances(made, options())
    words = serve_arguments(deployed[0], options())
    assert words[words.index("--data-parallel-size") + 1] == "2"
    assert "--enable-expert-parallel" in words
    most = deployed[0].type.profile.max_num_seqs
    assert words[words.index("--max-num-seqs") + 1] == str(most // 2)


def test_an_instance_over_machines_has_a_part_on_each():
    made = wide_plan(Size(2, 2, machines=2), 4)
    deployed = deployed_instances(made, options())
    assert [(i.machine.id, i.rank, i.master) for i in deployed] == [
        ("box-0", 0, "box-0"), ("box-1", 1, "box-0"),
        ("box-2", 0, "box-2"), ("box-3", 1, "box-2"),
    ]  # fmt: skip
    first, second = (serve_arguments(i, options()) for i in deployed[:2])
    assert second[-1:] != first[-1:] or "--headless" not in first
    assert "--headless" in second
    for rank, words in enumerate((first, second)):
        assert words[words.index("--nnodes") + 1] == "2"
        assert words[words.index("--node-rank") + 1] == str(rank)
        assert words[words.index("--master-addr") + 1] == "box-0"


def test_only_the_first_part_is_behind_the_gateway():
    made = wide_plan(Size(2, 2, machines=2))
    files = render_deployment(made, options())
    assert files["gateway.yaml"].count("base_url") == 1
    assert "http://box-0:8001" in files["gateway.yaml"]
    assert "--headless" in files["commands/box-1.sh"]
    assert "start box-1-tp2-pp2-on2-0 0 " in files["commands/box-1.sh"]
    assert "kubernetes/instances.yaml" not in files
    assert "vllm serve" not in files["compose.yaml"]
    assert "several machines" in files["README.md"]
    assert "kubectl" not in files["README.md"]
    emulated = render_deployment(made, options(emulate=True))
    assert emulated["start.sh"].count("hetero-gateway emulate") == 1


@pytest.mark.parametrize("version", ["0.6.3", "0.6.4", "0.8.5", "0.11", "0.21", "0.21.0", "0.32"])
@pytest.mark.parametrize("card", ["H100", "A100-80GB", "L4", "B200", "MI300X", "V100-16GB"])
def test_memory_simulation_and_command_have_one_step(card, version, tmp_path):
    model = "Llama-3.2-3B" if card == "V100-16GB" else "Llama-3.1-8B"
    path = tmp_path / "plan.yaml"
    path.write_text(
        f"model: {model}\nmax_model_len: 4096\nengine: {{vllm_version: '{version}'}}\n"
        f"machines: [{{id: box, accelerator: {card}, count: 1}}]\n"
    )
    request = load_requests(path)[0]
    device, simulated = accelerator(card), request.question.engines.max_batched_tokens
    made = plan({"box": ("V100-32GB-NVLink2", 1, (1,))})
    found = request.question.types[device.name, 1]
    made = dataclasses.replace(made, types={("V100-32GB-NVLink2", 1): found})
    words = first_words(made, max_num_batched_tokens=simulated)
    in_memory = request.options.batched_tokens(device)
    assert option(words, "--max-num-batched-tokens") == str(in_memory)
    assert max(simulated, found.profile.max_num_seqs) == in_memory
    assert option(words, "--max-num-seqs") == str(request.options.sequences(device))
