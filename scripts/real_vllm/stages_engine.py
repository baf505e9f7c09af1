"""A vLLM of some stages on CPUs that notes what its batches take, for real_stages.py in
benchmarks/planner.
"""

import json
import os
import random
import sys
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.v1.worker.cpu_worker import CPUWorker


class TimedWorker(CPUWorker):
    """Notes the tokens of prompts, the sequences that decode and the processor time of its stage.

    The time is that of the model's runner: before it, the second stage spins until the first is
    through.
    """

    def determine_available_memory(self):
        runner, self.batches = self.model_runner, []
        if self.rank:
            # vLLM 0.32 makes this when it compiles; eager, the second stage fails without it.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                runner.max_num_tokens, runner.model_config.dtype, runner.device
            )
        execute, sample = runner.execute_model, runner.sample_tokens

        def timed_execute(scheduled, *args):
            began_s = time.thread_time()
            output = execute(scheduled, *args)
            counts = scheduled.num_scheduled_tokens.values()
            if counts:
                decodes = sum(each == 1 for each in counts)
                self.batches.append([sum(counts) - decodes, decodes, time.thread_time() - began_s])
            return output

        def timed_sample(*args):
            began_s = time.thread_time()
            output = sample(*args)
            if self.batches:
                self.batches[-1][2] += time.thread_time() - began_s
            return output

        runner.execute_model, runner.sample_tokens = timed_execute, timed_sample
        return super().determine_available_memory()

    def taken(self):
        return self.batches


def measure(stages, shape, prompts, outputs, budget, seats, dtype, measured_s):
    """Of each stage its batches: prompts' tokens, sequences that decode, processor time in s."""
    config = LlamaConfig(**shape)
    with tempfile.TemporaryDirectory() as directory:
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
        llm = LLM(
            directory, skip_tokenizer_init=True, dtype=dtype, max_model_len=1024,
            enforce_eager=True, enable_prefix_caching=False, distributed_executor_backend="mp",
            pipeline_parallel_size=stages, worker_cls="real_vllm.stages_engine.TimedWorker",
            max_num_batched_tokens=budget, max_num_seqs=seats,
        )  # fmt: skip
    rng, count, until_s = random.Random(1), 0, time.monotonic() + measured_s
    while time.monotonic() < until_s:
        while llm.llm_engine.get_num_unfinished_requests() < seats + 8:
            tokens = [rng.randrange(3, shape["vocab_size"]) for _ in range(rng.randint(*prompts))]
            most = rng.randint(*outputs)
            sampling = SamplingParams(ignore_eos=True, max_tokens=most, detokenize=False)
            llm.llm_engine.add_request(f"{count}", {"prompt_token_ids": tokens}, sampling)
            count += 1
        llm.llm_engine.step()
    return llm.collective_rpc("taken")


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # its workers' end takes half a minute
