"""Throughput of a deployment estimated from static batches: Algorithm 1 (section 3.2).

    paper        name here                       unit
    u_i, t_i     accelerators, tensor_parallel   accelerators
    I_r, O_r     prompt_tokens, output_tokens    tokens
    KVSize(s)    kv_capacity_tokens              tokens
    TP_s         instance_tokens_per_s           prompt and output tokens per s
    TP_system    tokens_per_s                    the same, of all instances

Requests are taken in their order, as many to a batch as its KV test lets in; a batch is prefilled
at once and decodes until its longest output is done. So it ranks deployments, and says nothing of
continuous batching, which is faster.

Differs from the print: the loop ends when every request is batched (erratum 8); a request that
fits no batch is an outcome, not an endless loop (9); the result is (u/t)·TP_s, as the text says,
not t·TP_s (10). ``estimator="paper"`` keeps what erratum 11 names: a batch is let in by the sum of
its prompts, but timed as if every prompt were the longest. ``"unpadded"`` times it by their mean,
that is by the tokens that were let in (attention, where the profile has p9, prompt by prompt).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hetero_gateway.core.costs.cost_model import attended_pairs, decode_time_s, prefill_time_s
from hetero_gateway.core.costs.profile import Profile

Estimator = Literal["paper", "unpadded"]


@dataclass(frozen=True, slots=True)
class BatchEstimate:
    """What Algorithm 1 says of one deployment."""

    tokens_per_s: float  # of all instances: prompt and output tokens
    instance_tokens_per_s: float
    total_time_s: float  # of one instance for all the requests
    batch_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Infeasible:
    """The request at ``position`` needs more KV than one instance has, even alone."""

    position: int
    needed_tokens: int
    kv_capacity_tokens: int

    @property
    def detail(self) -> str:
        return (
            f"request {self.position} needs {self.needed_tokens} KV tokens, "
            f"an instance has {self.kv_capacity_tokens}"
        )


def estimate_throughput(
    profile: Profile,
    accelerators: int,
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    *,
    estimator: Estimator = "paper",
    kv_capacity_tokens: int | None = None,
    max_num_seqs: int | None = None,
) -> BatchEstimate | Infeasible:
    """Algorithm 1 for a machine of ``accelerators`` cut into instances of ``profile``.

    Args:
        accelerators: u_i; a multiple of the profile's tensor parallelism.
        prompt_tokens, output_tokens: (q,), the sampled requests, at least one.
        estimator: how a batch is timed; see the module's text.
        kv_capacity_tokens: instead of the profile's own; the paper counts KV without grouped-query
            attention, which makes the capacity in tokens 4 to 5 times smaller.
        max_num_seqs: most requests in a batch; the paper has no such limit.

    Raises:
        ValueError: no requests, lengths that do not pair up, or a remainder of accelerators.
    """
    if len(prompt_tokens) != len(output_tokens) or not len(prompt_tokens):
        raise ValueError("prompt_tokens and output_tokens must pair up, and hold a request")
    if accelerators < 1 or accelerators % profile.tensor_parallel:
        raise ValueError(f"{accelerators} accelerators do not make instances of {profile.name}")
    capacity = profile.kv_capacity_tokens if kv_capacity_tokens is None else kv_capacity_tokens
    batches = _group(prompt_tokens, output_tokens, capacity, max_num_seqs)
    if isinstance(batches, Infeasible):
        return batches
    total_time_s = 0.0
    for begin, end in batches:
        prompts = prompt_tokens[begin:end]
        size = end - begin
        # Eqs. (3) and (4) take I_B and O_B, the longest of the batch: erratum 11.
        length = max(prompts) if estimator == "paper" else sum(prompts) / size
        total_time_s += prefill_time_s(profile.constants, size, length)
        if estimator != "paper" and profile.constants.p9:
            # Long prompts attend to more than short ones attend to less.
            pairs = sum(map(attended_pairs, prompts)) - size * attended_pairs(length)
            total_time_s += profile.constants.p9 * pairs
        total_time_s += decode_time_s(
            profile.constants, size, length, max(output_tokens[begin:end])
        )
    tokens = int(sum(prompt_tokens)) + int(sum(output_tokens))
    instance_tokens_per_s = tokens / total_time_s
    return BatchEstimate(
        tokens_per_s=accelerators // profile.tensor_parallel * instance_tokens_per_s,
        instance_tokens_per_s=instance_tokens_per_s,
        total_time_s=total_time_s,
        batch_sizes=tuple(end - begin for begin, end in batches),
    )


def _group(
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    kv_capacity_tokens: int,
    max_num_seqs: int | None,
) -> list[tuple[int, int]] | Infeasible:
    """Half-open ranges of requests, each as long as ΣI + n·max O fits."""
    batches: list[tuple[int, int]] = []
    begin, prompts, longest = 0, 0, 0
    for r, (prompt, output) in enumerate(zip(prompt_tokens, output_tokens, strict=True)):
        if prompt + output > kv_capacity_tokens:
            return Infeasible(r, int(prompt + output), kv_capacity_tokens)
        size = r - begin + 1
        needed = prompts + prompt + size * max(longest, output)
        if needed > kv_capacity_tokens or (max_num_seqs is not None and size > max_num_seqs):
            batches.append((begin, r))
            begin, prompts, longest = r, 0, 0
        prompts += prompt
        longest = max(longest, output)
    batches.append((begin, len(prompt_tokens)))
    return batches
