"""What the planner takes vLLM to accept, asked of vLLM itself: sizes, and every flag we write."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest

from hetero_gateway.deploy.command import serve_arguments
from hetero_gateway.deploy.instances import deployed_instances
from hetero_gateway.files.checkpoints.shape import model_from_config
from hetero_gateway.files.model_cards import model_card
from hetero_gateway.planner.parallelism import refusal
from hetero_gateway.planner.sizes import Size, layer_partition
from tests.deploy.plans import TWO_MACHINES, options, plan
from tests.planner.asked_sizes import SIZES, small

pytestmark = pytest.mark.real_vllm

HERE = Path(__file__).parent


def ask(jobs):
    """vLLM's answers."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = cache / "hetero-gateway" / "real-vllm" / "engine" / "bin" / "python"
    done = subprocess.run(
        [str(python), str(HERE / "vllm_says.py")],
        input="\n".join(map(json.dumps, jobs)), capture_output=True, text=True, timeout=560,
        check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_sizes_that_vllms_own_model_classes_take(figure):
    facts = json.loads((HERE.parent / "planner" / "published_models.json").read_text())
    jobs = [
        {"config": config, "t": t, "name": name}
        for name, fact in sorted(facts.items())
        if (config := small(fact["config"])) is not None
        for t in SIZES
    ]
    assert len(jobs) >= 300
    answers = ask(jobs)
    differ = []
    for job, said in zip(jobs, answers, strict=True):
        ours = refusal(model_from_config(job["config"], name=job["name"]), job["t"])
        if (ours is None) != (said is None):
            differ.append((job["name"], job["t"], ours, said))
    figure(f"tensor parallelism: {len(jobs)} combinations asked, {len(differ)} answered otherwise")
    assert differ == []


def test_every_flag_that_is_written_is_one_of_vllms(figure):
    jobs = []
    for quantization in (None, "fp8", "bitsandbytes", "mxfp4"):
        for kv_cache_dtype in ("auto", "fp8"):
            told = options(
                quantization=quantization, kv_dtype=kv_cache_dtype, enforce_eager=True,
                dtype="float16", max_model_len=8192, max_num_batched_tokens=2048,
            )  # fmt: skip
            deployed = deployed_instances(TWO_MACHINES, told)
            jobs += [
                {"flags": ["--model", "x", "--host", "::", "--port", "8001",
                           *serve_arguments(instance, told)]}
                for instance in deployed
            ]  # fmt: skip
    for size in (Size(2, 2), Size(1, data=4, experts=True), Size(8, experts=True),
                 Size(2, 4, machines=2)):  # fmt: skip
        layout = {f"box-{i}": ("L40S-48GB", int(size), (size,)) for i in range(size.machines)}
        deployed = deployed_instances(plan(layout), told)
        assert len(deployed) == size.machines
        jobs += [{"flags": ["--model", "x", *serve_arguments(i, told)]} for i in deployed]
    answers = ask(jobs)
    figure(f"flags: {len(jobs)} commands parsed by vLLM's own parser")
    assert answers == [None] * len(jobs)


def test_layers_are_shared_out_as_vllm_does(figure):
    jobs = [
        {"layers": layers, "stages": stages}
        for layers in (16, 28, 32, 36, 61, 80, 94, 126)
        for stages in (2, 3, 4, 5, 6, 8)
    ]
    answers = ask(jobs)
    figure(f"pipelines: {len(jobs)} partitions of vLLM's own function")
    assert [tuple(said) for said in answers] == [
        layer_partition(job["layers"], job["stages"]) for job in jobs
    ]


def test_the_families_whose_classes_take_a_pipeline(figure):
    # Classes that this build can load; gemma3n and mamba2 are the ones that have none.
    taken = {
        "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM", "gpt_oss": "GptOssForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM", "nemotron_h": "NemotronHForCausalLM",
        "mamba2": "Mamba2ForCausalLM", "mixtral": "MixtralForCausalLM",
        "phi3": "Phi3ForCausalLM", "gemma2": "Gemma2ForCausalLM",
    }  # fmt: skip
    answers = ask([{"pipeline": name} for name in taken.values()])
    figure(f"pipelines: {len(taken)} classes asked")
    like = model_card("Llama-3-8B")
    ours = [
        refusal(dataclasses.replace(like, family=family), Size(1, 2)) is None for family in taken
    ]
    assert answers == ours
