"""Asks vLLM itself; runs under an engine's own Python, which has vLLM's build for CPUs.

A line of standard input is a job, a line of standard output its answer:

    {"config": …, "t": 4}   does the model class take this tensor parallelism? The model is built on
                            no device, as a rank of so many, by the class that would serve it.
    {"flags": […]}          does the parser of ``vllm serve`` take these?
    {"layers": 80, "stages": 3}   how many layers each stage of a pipeline has
    {"pipeline": "LlamaForCausalLM"}  does this class take a pipeline?
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import parallel_state
from vllm.distributed.utils import get_pp_indices
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.interfaces import supports_pp
from vllm.model_executor.models.registry import ModelRegistry
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.torch_utils import set_default_torch_dtype

REFUSALS = (ValueError, AssertionError, RuntimeError, NotImplementedError)


def start(work: str) -> None:
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{work}/store", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)


def build(config: dict, t: int, work: str) -> None:
    """Raises what vLLM raises."""
    (Path(work) / "config.json").write_text(json.dumps(config))
    model = ModelConfig(
        model=work, tokenizer=work, skip_tokenizer_init=True, max_model_len=1024,
        dtype="bfloat16", enforce_eager=True,
    )  # fmt: skip
    asked = ParallelConfig()
    object.__setattr__(asked, "tensor_parallel_size", t)
    model.verify_with_parallel_config(asked)
    whole = VllmConfig(
        model_config=model,
        parallel_config=ParallelConfig(),
        cache_config=CacheConfig(block_size=32),
    )
    group = parallel_state.get_tp_group()
    group.world_size, one = t, group.world_size
    try:
        with (
            torch.device("meta"),
            set_current_vllm_config(whole),
            set_default_torch_dtype(torch.bfloat16),
        ):
            whole.parallel_config.tensor_parallel_size = t
            initialize_model(vllm_config=whole, model_config=model)
    finally:
        group.world_size = one
        whole.compilation_config.static_forward_context.clear()


def parse(flags: list[str]) -> str | None:
    parser = make_arg_parser(FlexibleArgumentParser())
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_args(flags)
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    return None


def partition(layers: int, stages: int) -> list[int]:
    ranges = [get_pp_indices(layers, i, stages) for i in range(stages)]
    return [end - start for start, end in ranges]


def answer(job: dict, work: str) -> object:
    """Why not; None: yes. Of a pipeline, what was asked."""
    if "stages" in job:
        return partition(job["layers"], job["stages"])
    if "pipeline" in job:
        return supports_pp(ModelRegistry.models[job["pipeline"]].load_model_cls())
    if "flags" in job:
        return parse(job["flags"])
    try:
        build(job["config"], job["t"], work)
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        start(work)
        for line in sys.stdin:
            sys.stdout.write(json.dumps(answer(json.loads(line), work)) + "\n")


if __name__ == "__main__":
    main()
