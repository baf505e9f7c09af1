"""Throughput of a deployment estimated from static batches: Algorithm 1 (section 3.2).

    paper        name here                       unit
    I_r, O_r     prompt_tokens, output_tokens    tokens
    KVSize(s)    kv_capacity_tokens              tokens
    TP_s         tokens_per_s                    prompt and output tokens per s

Requests are taken in order, as many per batch as its KV test allows; a batch is prefilled at once
and decodes until its longest output is done. So it ranks deployments, but says nothing about
continuous batching, which is faster.

Differences from the paper: the loop ends when every request is batched (erratum 8); a request that
fits no batch is an outcome, not an endless loop (9); a machine makes (u/t)·TP_s, as the text says,
not t·TP_s (10): ``shortlist`` adds up its instances. ``estimator="paper"`` keeps erratum 11: a
batch is admitted by the sum of its prompts, but timed as if every prompt were the longest.
``"unpadded"`` times it by their mean, that is by the admitted tokens (attention, if the profile has
p9, prompt by prompt).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from hetero_gateway.core.costs.cost_model import attended_pairs, decode_time_s, prefill_time_s
from hetero_gateway.core.costs.profile import Profile

Estimator = Literal["paper", "unpadded"]


class BatchEstimate(NamedTuple):
    """Algorithm 1's result for one instance; ``tokens_per_s`` are of prompts and outputs."""

    tokens_per_s: float
    total_time_s: float
    batch_sizes: tuple[int, ...]


def estimate_throughput(
    profile: Profile,
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    *,
    estimator: Estimator = "paper",
    max_num_seqs: int | None = None,
) -> BatchEstimate | None:
    """Algorithm 1 for one instance; None if a request alone needs more KV than that has.

    Args:
        prompt_tokens, output_tokens: (q,), the sampled requests, at least one.
        estimator: how a batch is timed; see the module's text.
        max_num_seqs: most requests in a batch; the paper has no such limit.

    Raises:
        ValueError: no requests, or lengths that do not pair up.
    """
    if len(prompt_tokens) != len(output_tokens) or not len(prompt_tokens):
        raise ValueError("prompt_tokens and output_tokens must pair up, and hold a request")
    batches = _group(prompt_tokens, output_tokens, profile.kv_capacity_tokens, max_num_seqs)
    if batches is None:
        return None
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
    sizes = tuple(end - begin for begin, end in batches)
    return BatchEstimate(tokens / total_time_s, total_time_s, sizes)


def _group(
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    kv_capacity_tokens: int,
    max_num_seqs: int | None,
) -> list[tuple[int, int]] | None:
    """Half-open ranges of requests, each as long as ΣI + n·max O fits."""
    batches: list[tuple[int, int]] = []
    begin, prompts, longest = 0, 0, 0
    for r, (prompt, output) in enumerate(zip(prompt_tokens, output_tokens, strict=True)):
        if prompt + output > kv_capacity_tokens:
            return None
        size = r - begin + 1
        needed = prompts + prompt + size * max(longest, output)
        if needed > kv_capacity_tokens or (max_num_seqs is not None and size > max_num_seqs):
            batches.append((begin, r))
            begin, prompts, longest = r, 0, 0
        prompts += prompt
        longest = max(longest, output)
    batches.append((begin, len(prompt_tokens)))
    return batches
