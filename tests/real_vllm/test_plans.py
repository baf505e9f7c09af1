"""What the planner takes vLLM to accept, asked of vLLM itself: sizes, and every flag we write."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from hetero_gateway.deployment.command import serve_arguments
from hetero_gateway.deployment.instances import deployed_instances
from hetero_gateway.planner.models import model_from_config
from hetero_gateway.planner.parallelism import refusal
from tests.deployment.plans import TWO_MACHINES, options
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
                quantization=quantization, kv_cache_dtype=kv_cache_dtype, enforce_eager=True,
                dtype="float16", max_model_len=8192, max_num_batched_tokens=2048,
            )  # fmt: skip
            deployed = deployed_instances(TWO_MACHINES, told, TWO_MACHINES.best)
            jobs += [
                {"flags": ["--model", "x", "--host", "::", "--port", "8001",
                           *serve_arguments(instance, told)]}
                for instance in deployed
            ]  # fmt: skip
    answers = ask(jobs)
    figure(f"flags: {len(jobs)} commands parsed by vLLM's own parser")
    assert answers == [None] * len(jobs)
