"""The requests of a plan's file: how long they are, and how much context they need."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.plan_config import PlanConfig
from hetero_gateway.files.trace import CHAT_MIX, TraceRequest
from hetero_gateway.planner.further_sizes import MeanRequest
from hetero_gateway.planner.memory import EngineOptions
from hetero_gateway.planner.model_shape import ModelShape
from hetero_gateway.sim.alone import Mix
from hetero_gateway.sim.arrays import Integers
from hetero_gateway.sim.ordered_trace import OrderedTrace
from hetero_gateway.sim.prefixes import KnownText, Run
from hetero_gateway.sim.workload import Lengths, LogNormal, LogNormalLengths, TraceLengths

# The default workload.
_CHAT_PROMPT = LogNormal(CHAT_MIX.input_median, CHAT_MIX.input_sigma, CHAT_MIX.input_max)
_CHAT_OUTPUT = LogNormal(CHAT_MIX.output_median, CHAT_MIX.output_sigma, CHAT_MIX.output_max)
# Where the file has no max_model_len, the longest request is rounded up to a multiple of this.
_CONTEXT_STEP = 1024
# That of the default workload.
DEFAULT_CONTEXT = CHAT_MIX.input_max + CHAT_MIX.output_max


def trace_lengths(
    rows: Sequence[TraceRequest], trace: Path | None, context: int | None
) -> tuple[Lengths, int]:
    """The trace's lengths, and the tokens of its longest request."""
    prompt: Integers = np.array([row.input_tokens for row in rows], np.int64)
    output: Integers = np.array([row.output_tokens for row in rows], np.int64)
    total = prompt + output
    longest = int(np.argmax(total))
    if context is not None and total[longest] > context:
        raise ConfigError(
            f"{trace}: request {longest + 1} needs {total[longest]} tokens ({prompt[longest]} "
            f"prompt, {output[longest]} output), more than max_model_len {context}; "
            f"{int((total > context).sum())} of {total.size} requests are too long"
        )
    return TraceLengths(prompt, output), int(total[longest])


def without_caches(config: PlanConfig, model: ModelShape, options: EngineOptions) -> str | None:
    """Why hits in prefix caches do not count; None: they do."""
    if not config.workload.prefix_cache:
        return "prefix_cache is off"
    if config.engine.scheduling == "prefill-first" or not options.caches_prefixes:
        return "vLLM before 0.8 has no prefix cache unless it is told to"
    if model.state_bytes:
        return f"how much of {model.name}'s state is cached is not modelled"
    return None


def ordered_trace(rows: Sequence[TraceRequest]) -> OrderedTrace:
    """The requests of a trace that says which prompts begin alike."""
    texts = [row.text for row in rows if row.text is not None]
    return OrderedTrace(
        np.array([row.arrival_s or 0.0 for row in rows], float),
        np.array([row.input_tokens for row in rows], np.int64),
        np.array([row.output_tokens for row in rows], np.int64),
        np.array([text.session for text in texts], np.int64),
        tuple(KnownText(tuple(Run(*run) for run in text.runs)) for text in texts),
        texts[0].block_tokens,
    )


def mix_lengths(config: PlanConfig, source: str, notes: list[str]) -> tuple[Lengths, int]:
    """The file's distributions, or ours cut to the context; and the longest request of them."""
    context, asked = config.max_model_len, config.workload
    prompt = asked.prompt.to_core() if asked.prompt else _CHAT_PROMPT
    output = asked.output.to_core() if asked.output else _CHAT_OUTPUT
    if context is not None and prompt.maximum + output.maximum > context:
        # What is ours may be cut: the output to a quarter, the prompt to what is left.
        if not asked.output:
            room = context - prompt.maximum if asked.prompt else context // 4
            output = dataclasses.replace(output, maximum=min(output.maximum, max(1, room)))
        if not asked.prompt:
            prompt = dataclasses.replace(prompt, maximum=max(1, context - output.maximum))
        notes.append(f"the chat mix is cut to what fits max_model_len {context}")
    longest = prompt.maximum + output.maximum
    if context is not None and longest > context:
        raise ConfigError(
            f"{source}: workload: the longest request has {prompt.maximum} prompt and "
            f"{output.maximum} output tokens, more than max_model_len {context}"
        )
    return LogNormalLengths(prompt, output), longest


def context_tokens(config: PlanConfig, model: ModelShape, longest: int, source: str) -> int:
    """max_model_len, at most what the model is made for."""
    most = model.max_position
    if config.max_model_len is not None:
        if most and config.max_model_len > most:
            raise ConfigError(
                f"{source}: max_model_len: {config.max_model_len} is more than the {most} that "
                f"{model.name} is made for"
            )
        return config.max_model_len
    if most and longest > most:
        raise ConfigError(
            f"{source}: workload: the longest request needs {longest} tokens, {model.name} is "
            f"made for {most}"
        )
    rounded = -(-longest // _CONTEXT_STEP) * _CONTEXT_STEP
    return min(rounded, most) if most else rounded


def mean_request(lengths: Lengths, seed: int) -> MeanRequest:
    """By which sizes are compared in closed form."""
    mix = Mix.of(lengths, seed)
    return MeanRequest(mix.mean_prompt, mix.mean_output, mix.held_tokens)
